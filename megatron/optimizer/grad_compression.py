"""Gradient sums over data-parallel ranks that send less, for networks on which sending takes most of a step.

16 bits: every addend is rounded once.

int8: every block of :data:`INT8_BLOCK` elements is sent as integers and one fp32 scale, stochastically rounded, so a
sum is exact in the mean and needs no state. An all-reduce is an all-to-all of quantised addends, a sum in fp32 in rank
order, and an all-gather of the quantised sum.

PowerSGD and top-k send part of ``delta = gradient + error``, and ``error = delta - sent`` is the rest, kept by each
rank for the next step (error feedback, arXiv 1901.09847). Both compress the matrices that one tensor-parallel rank
holds (:class:`MatrixBlock`); other elements, few, are sent as they are. Copies of a parameter on tensor-parallel ranks
must stay equal, and these ranks would choose differently.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron.config.parallel import GradCompression
from megatron.distributed import comm
from megatron.distributed.comm import Group, Pending
from megatron.distributed.param_layout import ALIGNMENT, MatrixBlock, round_up
from megatron.distributed.random import stable_hash
from megatron.kernels.dropout import mix, random_bits
from megatron.optimizer.grad_buffer import ReduceHandle, Reduction


class RoundedReduction(Reduction):
    """Sums gradients in their dtype, but communicates them in a shorter one: each addend is rounded once.

    The sum of an all-reduce is rounded once more.
    """

    copies_gradients = True

    def __init__(self, shards: Group, copies: Group, comm_dtype: torch.dtype) -> None:
        """Create the reduction; ``comm_dtype`` is that of communication."""
        super().__init__(shards, copies)
        self._comm_dtype = comm_dtype

    def start_reduce_scatter(self, x: Tensor) -> ReduceHandle:
        """Start summing a bucket ``[n]`` over ``shards``; the result is this rank's part ``[n / shards]``."""
        return super().start_reduce_scatter(x) if self.shards.size == 1 else self._start_sum(x, self.shards)

    def start_all_reduce(self, part: Tensor) -> ReduceHandle:
        """Start summing a part over ``copies``, whose number divides its length."""
        if self.copies.size == 1:
            return super().start_all_reduce(part)
        addends = self._start_sum(part, self.copies)

        def finish(received: Tensor) -> Tensor:
            own = addends.finish(received).to(self._comm_dtype)
            return comm.all_gather(own, self.copies).to(part.dtype)

        return ReduceHandle(addends.pending, finish)

    def _start_sum(self, x: Tensor, group: Group) -> ReduceHandle:
        """Start a reduce-scatter: each rank receives the addends of its part, and adds them in rank order."""
        addends = comm.start_all_to_all(x.to(self._comm_dtype), group)
        return ReduceHandle(addends, lambda parts: parts.view(group.size, -1).sum(0, dtype=x.dtype))


INT8_BLOCK = ALIGNMENT
"""Elements with one scale. Parameters start at multiples of it in a bucket, so no block mixes two of them: copies of a
parameter on tensor-parallel ranks are quantised alike."""

ROUNDING = stable_hash("int8 rounding")


def quantize(x: Tensor, key: Tensor, source: int) -> Tensor:
    """Round blocks stochastically to int8 multiples of 1/127 of their largest magnitude; exact in the mean.

    The bits are a function of (key, source, position). Where a block is not finite, all of its result is not.

    Args:
        x: ``[rows, n]``, finished by :func:`dequantize`; ``INT8_BLOCK`` divides n.
        key: 0-d int64, a hash of what is sent and when.
        source: number of the sender; equal positions of other senders get other bits.

    Returns:
        uint8 ``[rows, n + 4 n / INT8_BLOCK]``: the integers of a row, then its fp32 scales.
    """
    blocks = x.reshape(-1, INT8_BLOCK).float()
    scale = blocks.abs().amax(1, keepdim=True) / 127.0
    inverse = scale.reciprocal().where(scale >= torch.finfo(torch.float32).tiny, 0.0)
    numbers = torch.arange(len(blocks), device=x.device) + (source << 32)
    bits = random_bits(ROUNDING, mix(mix(key) ^ (key >> 32)), numbers, torch.arange(INT8_BLOCK, device=x.device))
    chance = (bits & 0xFFFFFF).float() * 2.0**-24
    rounded = (blocks * inverse + chance).floor_().clamp_(-127.0, 127.0).to(torch.int8)
    return torch.cat([part.view(torch.uint8).view(len(x), -1) for part in (rounded, scale)], dim=1)


def dequantize(message: Tensor) -> Tensor:
    """Return the fp32 values ``[n]`` of one row of :func:`quantize`."""
    values, scales = message.split([n := message.numel() * INT8_BLOCK // (INT8_BLOCK + 4), message.numel() - n])
    scale = scales.clone().view(torch.float32)  # a row may start at any byte
    return (values.view(torch.int8).view(-1, INT8_BLOCK) * scale.unsqueeze(1)).flatten()


def start_int8_reduce_scatter(x: Tensor, group: Group, key: Tensor) -> ReduceHandle:
    """Start summing ``x`` ``[n]`` over the group; the result is this rank's part, fp32 ``[n / size]``.

    ``INT8_BLOCK * size`` divides n; see :func:`int8_all_reduce`.
    """

    def finish(received: Tensor) -> Tensor:
        total, *others = received.view(group.size, -1)
        total = dequantize(total)
        for other in others:  # one after the other: all at once would be as large as x in fp32
            total += dequantize(other)
        return total

    message = quantize(x.view(group.size, -1), key, group.rank).flatten()
    return ReduceHandle(comm.start_all_to_all(message, group), finish)


def start_int8_all_reduce(x: Tensor, group: Group, key: Tensor) -> ReduceHandle:
    """Start :func:`int8_all_reduce`; ``INT8_BLOCK * size`` divides the length of ``x``."""
    addends = start_int8_reduce_scatter(x, group, key)

    def finish(received: Tensor) -> Tensor:
        own = quantize(addends.finish(received).unsqueeze(0), key, group.size + group.rank)
        return torch.cat([dequantize(part) for part in comm.all_gather(own, group)])

    return ReduceHandle(addends.pending, finish)


def int8_all_reduce(x: Tensor, group: Group, key: Tensor) -> Tensor:
    """Return the sum of ``x`` over the group, sent in 1.0625 bytes per element; exact in the mean.

    Every addend and every sum is rounded once, by less than 1/127 of the largest magnitude in its block. All ranks get
    the same bits. In a group of one, ``x`` is returned.

    Args:
        x: flat; any length, the same on all ranks.
        group: ranks to sum over.
        key: 0-d int64 on the device of ``x``, equal on all ranks; keys the rounding, so pass another one each time.

    Returns:
        fp32, as long as ``x``.
    """
    if group.size == 1:
        return x
    padded = torch.nn.functional.pad(x, (0, round_up(len(x), INT8_BLOCK * group.size) - len(x)))
    return start_int8_all_reduce(padded, group, key).wait()[: len(x)]


class Int8Reduction(Reduction):
    """Sums in int8; every reduction of a run has a key of its own."""

    copies_gradients = True

    def __init__(self, shards: Group, copies: Group, *identity: object) -> None:
        """Key the rounding by ``identity``, equal on ranks with copies of a parameter."""
        super().__init__(shards, copies)
        self._identity = identity
        self._step, self._reductions = 0, 0

    def start_step(self, step: int) -> None:
        """Begin a step; ``step`` is the number of those taken before."""
        self._step, self._reductions = step, 0

    def start_reduce_scatter(self, x: Tensor) -> ReduceHandle:
        """Start :func:`start_int8_reduce_scatter` over ``shards``."""
        if self.shards.size == 1:
            return super().start_reduce_scatter(x)
        return start_int8_reduce_scatter(x, self.shards, self._next_key(x.device))

    def start_all_reduce(self, part: Tensor) -> ReduceHandle:
        """Start :func:`int8_all_reduce` over ``copies``."""
        if self.copies.size == 1:
            return super().start_all_reduce(part)
        return start_int8_all_reduce(part, self.copies, self._next_key(part.device))

    def _next_key(self, device: torch.device) -> Tensor:
        self._reductions += 1
        key = stable_hash(*self._identity, self._step, self._reductions)
        return torch.full((), key, dtype=torch.int64, device=device)  # a kernel: no copy from the host


class ErrorFeedback(Reduction):
    """All-reduces with feedback of what is not sent.

    :meth:`start_all_reduce` computes the next error, and :meth:`commit` keeps it unless the step is skipped: what a
    skipped step has sent is lost, and its gradients must not return.
    """

    error: Tensor

    def __init__(self, shards: Group, copies: Group, blocks: Sequence[MatrixBlock], part: Tensor) -> None:
        """Allocate the state.

        Args:
            shards: the ranks that shard the bucket.
            copies: the ranks that hold the same part.
            blocks: compressed ranges of the part, ascending.
            part: flat, as long and of the dtype as what will be summed.
        """
        super().__init__(shards, copies)
        self.blocks = list(blocks)
        # Outside the blocks it is 0, except after loading another layout.
        self.error = torch.zeros_like(part)
        starts = [0, *(block.place + block.numel for block in self.blocks)]
        stops = [*(block.place for block in self.blocks), len(part)]
        self._outside = [(start, stop) for start, stop in zip(starts, stops) if start < stop]
        self._next_error: Tensor | None = None

    def start_step(self, step: int) -> None:
        """Begin a step: forget what an aborted one has left."""
        self._next_error = None

    def reset(self) -> None:
        """Forget all errors."""
        self.error.zero_()

    def commit(self, skipped: Tensor) -> None:
        """Keep the state after a step, unless the scalar ``skipped`` is not 0; without synchronisation."""
        if self._next_error is not None:
            torch.where(skipped == 0, self._next_error, self.error, out=self.error)
            self._next_error = None

    def _cut_outside(self, delta: Tensor) -> Tensor:
        """Return the elements outside the blocks, which are sent as they are, and so have no error."""
        parts = [delta[start:stop] for start, stop in self._outside]
        found = torch.cat(parts) if parts else delta.new_empty(0)
        if parts:
            torch._foreach_zero_(parts)
        return found

    def _paste_outside(self, values: Tensor, x: Tensor) -> None:
        """Write sums of what :meth:`_cut_outside` has returned."""
        parts = [x[start:stop] for start, stop in self._outside]
        if parts:
            torch._foreach_copy_(parts, list(values.split([len(part) for part in parts])))


class TopK(ErrorFeedback):
    """Sums of the elements of largest magnitude of each rank: indices and values are gathered, added in rank order."""

    def __init__(
        self, shards: Group, copies: Group, blocks: Sequence[MatrixBlock], part: Tensor, compression: GradCompression
    ) -> None:
        super().__init__(shards, copies, blocks, part)
        self._count = compression.kept(sum(block.numel for block in blocks))

    def start_all_reduce(self, part: Tensor) -> ReduceHandle:
        """Start summing a part over ``copies``, in place."""
        delta, count = part + self.error, self._count
        outside = self._cut_outside(delta)
        rest = comm.start_all_reduce(outside, self.copies) if len(outside) else Pending(outside)
        chosen = delta.abs().topk(count, sorted=False).indices  # outside the blocks only where all others are 0
        message = torch.cat([chosen.to(torch.int32), delta[chosen].view(torch.int32)])
        self._next_error = delta.index_fill_(0, chosen, 0.0)
        pending = comm.start_all_gather(message, self.copies) if count else Pending(message)

        def finish(messages: Tensor) -> Tensor:
            part.zero_()
            for sent in messages.split(len(message) or 1):  # atomic additions of all at once would differ between ranks
                where, values = sent[:count].long(), sent[count:].clone().view(part.dtype)
                part.index_copy_(0, where, part[where] + values)
            self._paste_outside(rest.wait(), part)
            return part

        return ReduceHandle(pending, finish)


class PowerSGD(ErrorFeedback):
    """Sums of rank-r approximations (arXiv 1905.13727, algorithm 1), one power iteration per step with a warm start.

    For a matrix D of a rank: ``P = sum D Q``, ``P <- orthonormal basis of P``, ``sum = P (sum D^T P)^T``; the error is
    ``D - P P^T D``, and ``sum D^T P`` is the next Q.
    """

    def __init__(
        self,
        shards: Group,
        copies: Group,
        blocks: Sequence[MatrixBlock],
        part: Tensor,
        compression: GradCompression,
        *identity: object,
    ) -> None:
        super().__init__(shards, copies, blocks, part)
        self.rank = compression.rank
        # By block, [matrices, columns, rank]; views of one tensor.
        self.warm_starts = self._by_block(part.new_empty(sum(b.count * b.columns for b in blocks) * self.rank), False)
        self._identity = identity
        self._next_q: Tensor | None = None
        self.reset()

    def reset(self) -> None:
        """Forget all errors, and draw the first factors again."""
        super().reset()
        for block, q in zip(self.blocks, self.warm_starts):
            key = stable_hash(*self._identity, "powersgd", block.name, block.first)
            q.copy_(torch.randn(q.shape, generator=torch.Generator().manual_seed(key)))

    def start_step(self, step: int) -> None:
        """Begin a step: forget what an aborted one has left."""
        super().start_step(step)
        self._next_q = None

    def start_all_reduce(self, part: Tensor) -> ReduceHandle:
        """Start summing a part over ``copies``, in place."""
        delta = part + self.error
        outside = self._cut_outside(delta)
        sides = [torch.bmm(d, q) for d, q in zip(self._matrices(delta), self.warm_starts)]
        message = torch.cat([outside, *(side.flatten() for side in sides)])
        self._next_error = delta

        def finish(sums: Tensor) -> Tensor:
            self._paste_outside(sums[: len(outside)], part)
            bases = [torch.linalg.qr(side)[0] for side in self._by_block(sums[len(outside) :], True)]
            own = [torch.bmm(d.mT, p) for d, p in zip(self._matrices(delta), bases)]
            if own:
                self._next_q = comm.all_reduce(torch.cat([q.flatten() for q in own]), self.copies)
                summed = self._by_block(self._next_q, False)
                for d, p, mine, q, out in zip(self._matrices(delta), bases, own, summed, self._matrices(part)):
                    out.copy_(torch.bmm(p, q.mT))
                    d.baddbmm_(p, mine.mT, alpha=-1.0)
            return part

        return ReduceHandle(comm.start_all_reduce(message, self.copies), finish)

    def commit(self, skipped: Tensor) -> None:
        """Keep the state after a step, unless the scalar ``skipped`` is not 0; without synchronisation."""
        super().commit(skipped)
        if self._next_q is not None:
            for q, found in zip(self.warm_starts, self._by_block(self._next_q, False)):
                torch.where(skipped == 0, found, q, out=q)
            self._next_q = None

    def factors(self) -> list[tuple[MatrixBlock, Tensor]]:
        """Return the first factors of the next step, ``[matrices, columns, rank]`` by block."""
        return [*zip(self.blocks, self.warm_starts)]

    def _matrices(self, part: Tensor) -> list[Tensor]:
        """Return views of the blocks in a tensor with the layout of the part, ``[matrices, rows, columns]``."""
        return [part[b.place : b.place + b.numel].view(b.count, b.rows, b.columns) for b in self.blocks]

    def _by_block(self, flat: Tensor, left: bool) -> list[Tensor]:
        """Split a flat tensor into the factors of all blocks, ``[matrices, rows (left) or columns, rank]``."""
        shapes = [(b.count, b.rows if left else b.columns, self.rank) for b in self.blocks]
        parts = flat.split([count * side * rank for count, side, rank in shapes])
        return [part.view(shape) for part, shape in zip(parts, shapes)]
