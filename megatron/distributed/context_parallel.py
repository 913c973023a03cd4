"""Context parallelism: attention over a sequence whose tokens are distributed over ranks.

The R ranks of the *ring* group cut the sequence into 2R chunks; ring rank r holds chunks r and 2R-1-r (zigzag), so that
under a causal mask all compute equally much. The A ranks of the *heads* group share these two chunks: each holds a
consecutive part of them. R x A is the context-parallel size.

==============  =======  =============================================================================================
``type``        R, A     how queries meet keys
==============  =======  =============================================================================================
p2p             CP, 1    keys and values are sent, one peer per step (ring attention, arXiv 2310.01889)
all_gather      CP, 1    keys and values of all ranks are gathered (as in Llama 3, arXiv 2407.21783)
a2a             1, CP    all-to-all: every rank gets the whole sequence of some heads (Ulysses, arXiv 2309.14509)
a2a+p2p         both     a2a among neighbouring ranks, p2p between these groups
==============  =======  =============================================================================================

Shapes: S tokens of this rank, T tokens of the ring rank (S x A), B batch, N query heads, G key/value heads, D channels,
which may differ between keys and values.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import lcm, prod

import torch
from torch import Tensor

from megatron.distributed import comm, mappings
from megatron.distributed.comm import Group, Pending
from megatron.distributed.layout import chunks_of
from megatron.kernels.attention_mask import PLAIN_SCORES, AttentionKernel, AttentionMask, AttentionScores, Ranges
from megatron.kernels.block_attention import AttentionDropout, KeyValues, Use, block_attention


def chunks_of_all(length: int, size: int) -> Ranges:
    """Return the positions that all ring ranks hold, rank by rank."""
    return tuple(chunk for rank in range(size) for chunk in chunks_of(length, size, rank))


def rows_between(ranges: Ranges, start: int, stop: int) -> Ranges:
    """Return the positions of rows ``start`` to ``stop - 1`` of ranges that lie one after the other."""
    found, first = [], 0
    for r in ranges:
        if part := r[max(start - first, 0) : max(stop - first, 0)]:
            found.append(part)
        first += len(r)
    return tuple(found)


@dataclass(frozen=True)
class ContextParallel:
    """The groups over which a sequence is distributed, and attention over it."""

    # Ranks that hold different chunks.
    ring: Group
    # Ranks that share the chunks of a ring rank, and exchange parts of them for heads.
    heads: Group
    # Gather keys and values instead of passing them.
    gathers: bool = False

    def rows(self, length: int) -> Ranges:
        """Return the positions of this rank's rows, of a sequence of ``length`` tokens."""
        share = length // (self.ring.size * self.heads.size)
        chunks = chunks_of(length, self.ring.size, self.ring.rank)
        return rows_between(chunks, self.heads.rank * share, (self.heads.rank + 1) * share)

    def attention(
        self,
        q_SBND: Tensor,
        k_SBGD: Tensor,
        v_SBGD: Tensor,
        mask: AttentionMask,
        dropout: AttentionDropout | None,
        kernel: AttentionKernel,
        scores: AttentionScores = PLAIN_SCORES,
    ) -> Tensor:
        """Attend with this rank's queries to all keys of the sequence; return ``y_SBND``.

        Args:
            q_SBND: queries of :meth:`rows`.
            k_SBGD: keys of the same tokens.
            v_SBGD: values.
            mask: of the whole sequence.
            dropout: of attention weights.
            kernel: attention of a whole sequence without dropout.
            scores: how products of queries and keys become scores.
        """
        heads, groups = q_SBND.shape[2], k_SBGD.shape[2]
        length = mask.queries[0].stop
        if self.heads.size > 1:
            copies = lcm(groups, self.heads.size) // groups
            k_SBGD, v_SBGD = (t.repeat_interleave(copies, 2) if copies > 1 else t for t in (k_SBGD, v_SBGD))
            q_SBND, k_SBGD, v_SBGD = self.gather_rows((q_SBND, k_SBGD, v_SBGD))
            own = heads // self.heads.size
            if dropout is not None:
                dropout = replace(dropout, first_head=dropout.first_head + self.heads.rank * own)
            if scores.sink is not None:
                scores = replace(scores, sink=scores.sink.split(own)[self.heads.rank])
        if self.ring.size > 1:
            chunks = chunks_of(length, self.ring.size, self.ring.rank)
            mask = mask.part(chunks, chunks)
            source = GatheredKeyValues if self.gathers else PassedKeyValues
            key_values: KeyValues = source(self.ring, length)
            y = block_attention(q_SBND, k_SBGD, v_SBGD, mask, dropout, key_values, scores)
        elif dropout is not None:
            y = block_attention(q_SBND, k_SBGD, v_SBGD, mask, dropout, scores=scores)
        else:
            y = kernel(q_SBND, k_SBGD, v_SBGD, mask, scores)
        return y if self.heads.size == 1 else self.scatter_rows(y)

    def gather_chunks(self, x_KN: Tensor) -> Tensor:
        """Gather a value of each chunk of the ring: ``[K, ...] -> [chunks, ...]``, in the order of the sequence.

        A rank has K chunks, two of a ring. The backward adds the gradients of all ranks.
        """
        if self.ring.size == 1:
            return x_KN
        gathered = mappings.gather_rows(x_KN, self.ring)
        return torch.cat((gathered[::2], gathered[1::2].flip(0)))

    @property
    def chunks(self) -> tuple[int, ...]:
        """Places of this rank's chunks among those of :meth:`gather_chunks`."""
        return (self.ring.rank, 2 * self.ring.size - 1 - self.ring.rank) if self.ring.size > 1 else (0,)

    @torch.no_grad()
    def gather_keys(self, k_SBGD: Tensor, mask: AttentionMask) -> tuple[Tensor, AttentionMask]:
        """Return the keys of all ranks, and the mask of this rank's queries and these keys; without gradients.

        Args:
            k_SBGD: keys of :meth:`rows`.
            mask: of the whole sequence.
        """
        length, size = mask.queries[0].stop, self.ring.size
        k_TBGD = comm.all_gather(comm.all_gather(k_SBGD.detach(), self.heads), self.ring)
        return k_TBGD, replace(mask, queries=self.rows(length), keys=chunks_of_all(length, size))

    def gather_rows(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Exchange heads for rows of a ring rank: ``[S, B, N, D] -> [T, B, N/A, D]`` of each tensor, in a message."""
        size = self.heads.size
        parts = [t.unflatten(2, (size, -1)).movedim(2, 0).flatten(3) for t in tensors]
        rows_ASBE = torch.cat(parts, 3)
        rows = [rows_ASBE.shape[1]] * size
        received = mappings.all_to_all(rows_ASBE.flatten(0, 1), rows, rows, self.heads)
        split = received.split([part.shape[3] for part in parts], 2)
        return [part.unflatten(2, (-1, t.shape[3])) for part, t in zip(split, tensors)]

    def scatter_rows(self, y_TBND: Tensor) -> Tensor:
        """Exchange rows for heads: ``[T, B, N/A, D] -> [S, B, N, D]``."""
        size = self.heads.size
        rows = [len(y_TBND) // size] * size
        received = mappings.all_to_all(y_TBND, rows, rows, self.heads)
        return received.unflatten(0, (size, -1)).movedim(0, 2).flatten(2, 3)


@dataclass(frozen=True)
class GatheredKeyValues:
    """Keys and values of all ranks, gathered in forward and again in backward."""

    ring: Group
    # Tokens of the sequence.
    length: int

    def forward(self, k_TBGD: Tensor, v_TBGD: Tensor, mask: AttentionMask, use: Use) -> None:
        """Attend to all keys."""
        use(*self._gather(k_TBGD, v_TBGD, mask))

    def backward(self, k_TBGD: Tensor, v_TBGD: Tensor, mask: AttentionMask, use: Use) -> tuple[Tensor, Tensor]:
        """Return this rank's rows of the gradients of all ranks."""
        dk, dv = use(*self._gather(k_TBGD, v_TBGD, mask))
        return comm.reduce_scatter(dk, self.ring), comm.reduce_scatter(dv, self.ring)

    def _gather(self, k_TBGD: Tensor, v_TBGD: Tensor, mask: AttentionMask) -> tuple[Tensor, Tensor, AttentionMask]:
        """Return the keys and values of all ranks, and the mask with them."""
        k, v = (comm.start_all_gather(t, self.ring) for t in (k_TBGD, v_TBGD))
        return k.wait(), v.wait(), mask.with_keys(chunks_of_all(self.length, self.ring.size))


Shapes = Sequence[tuple[int, ...]]
"""Shapes of chunks of keys and of values, ``[chunks, tokens, B, G, D]``."""


@dataclass(frozen=True)
class _Arriving:
    """Chunks of keys and of values that another rank sends, one after the other in one buffer."""

    buffer: Pending
    shapes: Shapes

    def wait(self) -> list[Tensor]:
        """Return the chunks of keys, and those of values."""
        return _parts(self.buffer.wait(), self.shapes)


def _parts(buffer: Tensor, shapes: Shapes) -> list[Tensor]:
    """Return the parts of a buffer that have these shapes."""
    return [part.view(shape) for part, shape in zip(buffer.split([*map(prod, shapes)]), shapes)]


@dataclass(frozen=True)
class PassedKeyValues:
    """Keys and values of the other ranks, one rank after the other, the next in flight while one is used.

    In step t, rank r uses those of rank r - t. They come straight from there, chunk by chunk, and only the chunks that
    a query of rank r sees. The gradients go back the same way.
    """

    ring: Group
    # Tokens of the sequence.
    length: int

    def forward(self, k_TBGD: Tensor, v_TBGD: Tensor, mask: AttentionMask, use: Use) -> None:
        """Attend to the keys of each rank that are seen."""
        for _, _, k, v, part in self._steps(k_TBGD, v_TBGD, mask):
            use(k, v, part)

    def backward(self, k_TBGD: Tensor, v_TBGD: Tensor, mask: AttentionMask, use: Use) -> tuple[Tensor, Tensor]:
        """Return the gradients of this rank's keys and values, summed over the ranks that used them."""
        wide = torch.promote_types(k_TBGD.dtype, torch.float32)
        own = [torch.zeros(t.shape, dtype=wide, device=t.device) for t in (k_TBGD, v_TBGD)]
        by_chunk = [total.unflatten(0, (2, -1)) for total in own]
        returning: tuple[list[int], _Arriving] | None = None

        def add_returned() -> None:
            if returning is not None:
                chunks, exchange = returning
                for total, arrived in zip(by_chunk, exchange.wait()):
                    for i, grad in zip(chunks, arrived):  # indexing with a list would wait for the device
                        total[i] += grad

        for step, seen, k, v, part in self._steps(k_TBGD, v_TBGD, mask):
            grads = use(k, v, part) if seen else ()
            if step == 0:
                for total, grad in zip(own, grads):
                    total += grad
                continue
            add_returned()  # of the step before, which had the time of this one
            target, source = self._peers(step)
            lent = self._seen(mask, target, self.ring.rank)
            sent = [grad.unflatten(0, (len(seen), -1)) for grad in grads]
            returning = lent, self._start(sent, source, [(len(lent), *t.shape[1:]) for t in by_chunk], target, k_TBGD)
        add_returned()
        dk, dv = (total.to(k_TBGD.dtype) for total in own)
        return dk, dv

    def _steps(
        self, k_TBGD: Tensor, v_TBGD: Tensor, mask: AttentionMask
    ) -> Iterator[tuple[int, list[int], Tensor, Tensor, AttentionMask]]:
        """Yield step, chunks of the owner that are seen, their keys and values, and the mask with these keys."""
        owned = [t.unflatten(0, (2, -1)) for t in (k_TBGD, v_TBGD)]
        pending = None
        for step in range(self.ring.size):
            arriving = pending
            if step + 1 < self.ring.size:
                pending = self._pass(owned, mask, step + 1)
            if arriving is None:
                yield step, [0, 1], k_TBGD, v_TBGD, mask
                continue
            seen, exchange = arriving
            k, v = (t.flatten(0, 1) for t in exchange.wait())
            chunks = chunks_of(self.length, self.ring.size, self._peers(step)[1])
            yield step, seen, k, v, mask.with_keys(tuple(chunks[i] for i in seen))

    def _pass(self, owned: Sequence[Tensor], mask: AttentionMask, step: int) -> tuple[list[int], _Arriving]:
        """Start to send this rank's chunks that the target of a step sees, and to receive the source's seen here."""
        target, source = self._peers(step)
        seen = self._seen(mask, self.ring.rank, source)
        wanted = self._seen(mask, target, self.ring.rank)
        sent = [[t[i] for i in wanted] for t in owned]
        return seen, self._start(sent, target, [(len(seen), *t.shape[1:]) for t in owned], source, owned[0])

    def _start(
        self, sent: Sequence[Iterable[Tensor]], target: int, shapes: Shapes, source: int, like: Tensor
    ) -> _Arriving:
        """Start to exchange chunks, dimension 0 of each tensor sent and of the shapes received."""
        leaving = [(chunk.contiguous(), target) for t in sent for chunk in t]
        buffer = like.new_empty(sum(map(prod, shapes)))
        received = [(chunk, source) for t in _parts(buffer, shapes) for chunk in t]
        return _Arriving(comm.start_exchange(leaving, received, buffer, self.ring), shapes)

    def _peers(self, step: int) -> tuple[int, int]:
        """Return the ranks that this one sends to and receives from."""
        return (self.ring.rank + step) % self.ring.size, (self.ring.rank - step) % self.ring.size

    def _seen(self, mask: AttentionMask, user: int, owner: int) -> list[int]:
        """Return which chunks of ``owner`` a query of ``user`` sees."""
        queries, keys = (chunks_of(self.length, self.ring.size, rank) for rank in (user, owner))
        return [i for i, chunk in enumerate(keys) if mask.sees(queries, (chunk,))]
