"""Main gradients of a rank, in buckets that are summed over data-parallel ranks while backward continues.

The path of a gradient, through this file from top to bottom:

1. Backward of a layer adds to the tensor that :meth:`GradBuffer.claim` returns, and then calls
   :meth:`GradBuffer.contributed` (:mod:`megatron.distributed.grad_accumulator` does both).
2. The last contribution of a step to a :class:`Bucket` starts its sum; to a :class:`ShardedBucket`, the last of each
   micro-batch does.
3. A :class:`Reduction` sums the bucket. :meth:`GradBuffer.finish` waits for all sums.
4. A :class:`BucketLayout` has the place of each parameter in a bucket, and the shard that this rank updates.

A bucket has the gradients (at least fp32) of parameters of one dtype and one reduction group, in the order in which
backward is expected to compute them. It is not zeroed: the first contribution to a gradient overwrites what an earlier
step left. :mod:`megatron.optimizer.build` builds the buckets.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Protocol

import torch
from torch import Tensor

from megatron.distributed import comm
from megatron.distributed.comm import Group, Pending
from megatron.distributed.grad_accumulator import GradAccumulator, GradTarget
from megatron.distributed.param_layout import MAX_REDUCTIONS_IN_FLIGHT, MatrixBlock, Packing, ParamShard
from megatron.distributed.sharding import ShardSpec


class ReductionListener(Protocol):
    """Observer of buckets whose reduction is complete."""

    def on_reduced(self, bucket: Bucket) -> None:
        """Act when :attr:`Bucket.shard` has the sum over all ranks."""


class GradBuffer(GradTarget):
    """All main gradients of a rank."""

    def __init__(
        self,
        specs: Mapping[str, ShardSpec],
        buckets: Sequence[Bucket],
        without_gradients: Sequence[BucketLayout],
        grad_accumulator: GradAccumulator,
        device: torch.device,
        zero_stage: int,
        overlap: bool,
    ) -> None:
        """Bind the accumulator to the buckets; see :func:`megatron.optimizer.build.build_grad_buffer`."""
        # Specs of the parameters that are trained; their buckets in the order in which they are expected to be
        # complete; and layouts of weights without gradients, frozen ones and buffers.
        self.specs, self.buckets, self.without_gradients = specs, buckets, without_gradients
        # With ``overlap``, a bucket is reduced as soon as it is complete, instead of all at the end of the step.
        self.device, self.zero_stage, self.overlap = device, zero_stage, overlap
        self._bucket_of = {name: bucket for bucket in buckets for name in bucket.specs}
        self._layout_of = {name: self._bucket_of[name].layout for name in specs}
        self._layout_of |= {
            name: layout for layout in without_gradients for name, spec in layout.specs.items() if spec.buffer
        }
        # The shard of each trained parameter and buffer that this rank updates; those without one are not listed.
        self.shards = self._shards(over_copies=False)
        # Gradients of these shards after :meth:`finish`: of the local stored shape if a shard is the whole parameter,
        # else flat.
        self.grads = {name: self.shard_view(self._bucket_of[name].shard, name) for name in self.shards if name in specs}
        self._missing: dict[str, int] = {}  # contributions, by parameter
        self._reducing = True
        self._copies_gradients = any(bucket.reduction.copies_gradients for bucket in buckets)
        # With a listener, or with reductions that copy the gradients, only the newest few reductions are left in flight
        # during backward.
        self._listener: ReductionListener | None = None
        self._in_flight = deque[Bucket]()
        self._grad_accumulator = grad_accumulator
        grad_accumulator.bind(self)

    def start_step(self, microbatches: int, step: int = 0) -> None:
        """Forget the gradients of the previous step and expect this many micro-batches.

        ``step`` is the number of steps taken before; reductions that round at random key it by this.
        """
        self._grad_accumulator.discard_pending()
        self._missing = {name: microbatches * spec.contributions for name, spec in self.specs.items()}
        self._in_flight.clear()
        for bucket in self.buckets:
            bucket.unfinished, bucket.reported = len(bucket.specs), False
            bucket.start_step()
            bucket.reduction.start_step(step)

    def claim(self, name: str) -> tuple[Tensor, bool]:
        """Return the tensor for the next contribution to a gradient, and True if that overwrites what is there."""
        return self._bucket_of[name].claim(name)

    def contributed(self, name: str) -> None:
        """Count a contribution; the last one of a bucket starts its reduction."""
        bucket = self._bucket_of[name]
        self._missing[name] -= 1
        bucket.unfinished -= self._missing[name] == 0
        if self._reducing:
            complete = bucket.unfinished == 0
            bucket.contributed(name, complete, self.overlap)
            if complete and (self._copies_gradients or self._listener is not None):
                self._in_flight.append(bucket)
                if len(self._in_flight) > MAX_REDUCTIONS_IN_FLIGHT:
                    oldest = self._in_flight.popleft()
                    if oldest.wait_early() and self.overlap:
                        self._report(oldest)

    def finish(self) -> None:
        """Wait until the gradients of this rank's shards are summed over all data-parallel ranks.

        Raises:
            RuntimeError: when a parameter got fewer or more contributions than its spec declares.
        """
        for name, missing in self._missing.items():
            if missing:
                raise RuntimeError(
                    f"the gradient of {name} misses {missing} contributions: ShardSpec.contributions differs from the "
                    "number of times that its layer's backward adds to it"
                )
        while self._in_flight:
            self._in_flight.popleft().wait_early()
        scattered: deque[Bucket] = deque()
        for bucket in self.buckets:
            bucket.finish_scatter()
            scattered.append(bucket)
            if self._copies_gradients and len(scattered) > MAX_REDUCTIONS_IN_FLIGHT:
                scattered.popleft().finish()
        for bucket in scattered:
            bucket.finish()
        if self._listener is not None:
            for bucket in self.buckets:
                self._report(bucket)

    def report_to(self, listener: ReductionListener) -> None:
        """Report every bucket to ``listener`` once per step, when its sum is complete."""
        self._listener = listener

    def _report(self, bucket: Bucket) -> None:
        if self._listener is not None and not bucket.reported:
            bucket.reported = True
            self._listener.on_reduced(bucket)

    def accumulated(self, name: str) -> Tensor:
        """Return the gradient accumulated so far and not reduced, ``spec.local_shape``."""
        bucket = self._bucket_of[name]
        found = bucket.target(name)
        bucket.complete()
        return found

    @contextmanager
    def without_reduction(self) -> Iterator[None]:
        """Accumulate gradients without reducing them, for inspection by :meth:`accumulated`."""
        self._reducing = False
        try:
            yield
        finally:
            self._reducing = True

    def discard(self) -> None:
        """Forget the reductions of a step that was captured, and so never ran."""
        for bucket in self.buckets:
            bucket.discard()

    def counted_shards(self) -> dict[str, ParamShard]:
        """Return the shards, of buffers too, that this rank counts in norms and checkpoints: each element once.

        They are the same for ZeRO-0 and 1, so the order of summation is, too. The exception is Muon: its undivided
        parameters lie elsewhere in a bucket that is sharded. ZeRO-2 and 3 have other buckets. There, norms agree up to
        rounding.
        """
        return self._shards(over_copies=True)

    def _shards(self, over_copies: bool) -> dict[str, ParamShard]:
        found = {name: layout.shard(name, over_copies) for name, layout in self._layout_of.items()}
        return {name: share for name, share in found.items() if share is not None}

    def shard_view(self, part: Tensor, name: str) -> Tensor:
        """Return a view of this rank's shard in its part of a bucket, or in a buffer with the same layout."""
        return self._layout_of[name].shard_view(part, name, self.shards[name])

    def gather_shards(
        self, shard: Callable[[str], Tensor], names: Collection[str]
    ) -> Iterator[tuple[str, slice, Tensor]]:
        """Gather tensors of the parameters' shapes, one bucket at a time; collective over the ranks that share it.

        Args:
            shard: computes this rank's shard of the tensor ``name``.
            names: of the parameters, the same on all ranks.

        Yields:
            Name, this rank's elements of the flattened tensor, and the tensor, ``spec.local_shape``, of those of which
            this rank has a shard.
        """
        for bucket in self.buckets:
            if not any(name in names for name in bucket.specs):
                continue
            part = torch.zeros_like(bucket.shard)
            held = {name: self.shards[name] for name in bucket.specs if name in names and name in self.shards}
            for name in held:
                self.shard_view(part, name).copy_(shard(name))
            whole = comm.all_gather(part, bucket.layout.shards)
            for name, own in held.items():
                yield name, slice(own.start, own.stop), bucket.layout.view(whole, name)

    def reduction_of(self, name: str) -> Reduction:
        """Return the reduction of the bucket of a parameter."""
        return self._bucket_of[name].reduction


class Bucket:
    """Gradients of some parameters, stored as a whole (ZeRO-0 and 1)."""

    # This rank's part, [elements / shards]: the sum over all ranks after :meth:`finish`.
    shard: Tensor
    # Parameters that miss contributions of the step.
    unfinished: int
    # The listener knows of the sum.
    reported: bool

    def __init__(self, layout: BucketLayout, reduction: Reduction, flush: Callable[[], None]) -> None:
        """Create the bucket; ``flush`` adds contributions that are counted but still queued."""
        self.layout, self.reduction, self.specs, self._flush = layout, reduction, layout.specs, flush
        self._has_peers = layout.shards.size * layout.copies.size > 1
        self._stale: set[str] = set()  # parameters whose gradient is left from an earlier step
        self._sum: ReduceHandle | None = None
        self._allocate()

    def _allocate(self) -> None:
        self._buffer = self.layout.zeros(self.layout.packing.size)
        self._views = {name: self.layout.view(self._buffer, name) for name in self.specs}
        self.shard = self._buffer.view(self.layout.shards.size, -1)[self.layout.shards.rank]
        self._started = False

    def start_step(self) -> None:
        """Forget the gradients of the previous step."""
        self._wait()  # a step that was aborted may have left a reduction in flight
        self._stale, self._started = set(self.specs), False

    def discard(self) -> None:
        """Forget reductions that were captured, and so never ran, and buffers that belong to the graph."""
        self._sum = None

    def claim(self, name: str) -> tuple[Tensor, bool]:
        """Return the tensor for a contribution, and True if it overwrites; see :meth:`GradTarget.claim`."""
        target, first = self.target(name), name in self._stale
        self._stale.discard(name)
        return target, first

    def target(self, name: str) -> Tensor:
        """Return the accumulated gradient of a parameter, ``spec.local_shape``."""
        return self._views[name]

    def complete(self) -> None:
        """Add queued contributions, and zero gradients without contributions."""
        self._flush()
        for name in self._stale:
            self.target(name).zero_()
        self._stale.clear()

    def contributed(self, name: str, complete: bool, overlap: bool) -> None:
        """Record a contribution; ``complete`` if it is the bucket's last of the step."""
        if complete and overlap and self._has_peers:
            self._start()

    def wait_early(self) -> bool:
        """Wait for the reduction in flight, if it belongs to this bucket alone.

        Returns:
            True if :attr:`shard` now has the sum over all ranks.
        """
        self._wait()
        if not self._has_peers:
            self.complete()  # nothing to reduce
            return True
        return self._started and 1 in (self.layout.shards.size, self.layout.copies.size)

    def finish_scatter(self) -> None:
        """Finish the reduction over ``shards``, and start the all-reduce over ``copies``."""
        if not self._started:
            self._start()
        if self.layout.shards.size > 1:
            self._wait()
            self._sum = self.reduction.start_all_reduce(self.shard)

    def finish(self) -> None:
        """Finish the reduction, after :meth:`finish_scatter`."""
        self._wait()

    def _start(self) -> None:
        self._started = True
        self.complete()
        scatters = self.layout.shards.size > 1
        start = self.reduction.start_reduce_scatter if scatters else self.reduction.start_all_reduce
        self._sum = start(self._buffer)

    def _wait(self) -> None:
        """Wait for the reduction in flight, if there is one, and free its memory."""
        if self._sum is not None:
            total = self._sum.wait()
            if total.data_ptr() != self.shard.data_ptr():
                self.shard.copy_(total)
            self._sum = None


class ShardedBucket(Bucket):
    """Gradients of some parameters, of which this rank stores only its shard (ZeRO-2 and 3).

    A full-size buffer exists from the first contribution of a micro-batch until every parameter has that micro-batch's
    contributions; then it is reduced. So every micro-batch communicates as much as a whole step does in ZeRO-1.
    """

    def __init__(self, layout: BucketLayout, reduction: Reduction, flush: Callable[[], None], pool: BufferPool) -> None:
        self._pool = pool
        super().__init__(layout, reduction, flush)

    def _allocate(self) -> None:
        self.shard = self.layout.zeros(self.layout.packing.size // self.layout.shards.size)
        self._reset()

    def _reset(self) -> None:
        self._stale.clear()
        self._sum = None
        self._whole: Tensor | None = None
        self._reduced = False  # a micro-batch of this step
        self._missing = {name: spec.contributions for name, spec in self.specs.items()}

    def start_step(self) -> None:
        """Forget the gradients of the previous step."""
        self._pool.wait(0)  # a step that was aborted may have left reductions in flight
        self._reset()

    def discard(self) -> None:
        """Forget reductions that were captured, and so never ran, and buffers that belong to the graph."""
        self._pool.discard()
        self._reset()

    def target(self, name: str) -> Tensor:
        """Return the gradient of a parameter that is accumulated and not reduced, ``spec.local_shape``."""
        if self._whole is None:
            self._whole = self._pool.take(self.layout)
            self._stale = set(self.specs)
        return self.layout.view(self._whole, name)

    def contributed(self, name: str, complete: bool, overlap: bool) -> None:
        """Record a contribution; ``complete`` if it is the bucket's last of the step."""
        self._missing[name] -= 1
        if not complete and any(missing > 0 for missing in self._missing.values()):
            return
        self._reduce(MAX_REDUCTIONS_IN_FLIGHT if overlap else 0)

    def _reduce(self, in_flight: int) -> None:
        """Start reducing the buffer; afterwards at most ``in_flight`` reductions of all buckets are in flight."""
        self.complete()
        if self._whole is None:
            raise RuntimeError(f"a gradient of {', '.join(self.specs)} was counted before it was added")
        self._pool.reduce(self._whole, self.reduction, self.shard, not self._reduced)
        # Some contributions of the next micro-batches may be there already: those of the loss are made in forward.
        self._missing = {name: missing + self.specs[name].contributions for name, missing in self._missing.items()}
        self._whole, self._reduced = None, True
        self._pool.wait(in_flight)

    def wait_early(self) -> bool:
        """Return True if no reduction is left; later ones usually have waited for this bucket's."""
        return self.layout.copies.size == 1 and not self._pool.reduces(self.shard)

    def finish_scatter(self) -> None:
        """Finish the reduce-scatters over ``shards``, and start the all-reduce over ``copies``."""
        self._pool.wait(0)
        if not self._reduced:  # no parameter has contributions on these ranks
            self.shard.zero_()
        self._sum = self.reduction.start_all_reduce(self.shard)


class BufferPool:
    """Full-size gradient buffers that sharded buckets use in turn, and their reductions in flight."""

    def __init__(self) -> None:
        self._free: dict[tuple[int, torch.dtype], list[Tensor]] = defaultdict(list)
        self._in_flight: deque[tuple[ReduceHandle, Tensor, Tensor, bool]] = deque()

    def take(self, layout: BucketLayout) -> Tensor:
        """Return a buffer for a whole bucket, with any content."""
        free = self._free[layout.packing.size, layout.dtype]
        return free.pop() if free else layout.zeros(layout.packing.size)

    def reduce(self, buffer: Tensor, reduction: Reduction, own: Tensor, first: bool) -> None:
        """Start the reduce-scatter of a buffer, whose result will be added to ``own``, or overwrite it if ``first``."""
        total = reduction.start_reduce_scatter(buffer)
        self._in_flight.append((total, buffer, own, first))

    def wait(self, left: int) -> None:
        """Wait for all but the newest ``left`` reductions, and recycle their buffers."""
        while len(self._in_flight) > left:
            total, buffer, own, first = self._in_flight.popleft()
            own.copy_(total.wait()) if first else own.add_(total.wait())
            self._free[buffer.numel(), buffer.dtype].append(buffer)

    def reduces(self, own: Tensor) -> bool:
        """Return True if a reduction into ``own`` is in flight."""
        return any(target is own for _, _, target, _ in self._in_flight)

    def discard(self) -> None:
        """Forget all buffers and reductions."""
        self._free.clear()
        self._in_flight.clear()


class Reduction:
    """Sums a bucket over data-parallel ranks in two steps.

    A reduce-scatter over the ranks that shard the optimizer state (``shards``) leaves each rank the part that it
    updates. An all-reduce sums this part over the ranks that hold the same one (``copies``). Without ZeRO there is only
    the all-reduce. Gradients are sent as they are; subclasses (:mod:`megatron.optimizer.grad_compression`) send less.
    """

    # A reduction in flight needs as much memory as the gradients.
    copies_gradients = False
    # What this rank has not sent yet, in the layout of its part; None for a reduction that sends everything.
    error: Tensor | None = None

    def __init__(self, shards: Group, copies: Group) -> None:
        self.shards, self.copies = shards, copies

    def start_reduce_scatter(self, x: Tensor) -> ReduceHandle:
        """Start summing a bucket ``[n]`` over ``shards``; the result is this rank's part ``[n / shards]``.

        ``x`` must not change until the sum is complete. On GPUs the sum overwrites this rank's part of it.
        """
        return ReduceHandle(comm.start_reduce_scatter(x, self.shards, x.view(self.shards.size, -1)[self.shards.rank]))

    def start_all_reduce(self, part: Tensor) -> ReduceHandle:
        """Start summing a part over ``copies``; the sum may overwrite ``part``."""
        return ReduceHandle(comm.start_all_reduce(part, self.copies))

    def start_step(self, step: int) -> None:
        """Begin a step, and forget what an aborted one has left; ``step`` is the number of steps taken before."""

    def commit(self, skipped: Tensor) -> None:
        """Keep the state after a step, unless the scalar ``skipped`` is not 0; without synchronisation."""

    def reset(self) -> None:
        """Return to the initial state."""

    def factors(self) -> Sequence[tuple[MatrixBlock, Tensor]]:
        """Return state that belongs to matrices of the part, equal on all ``copies``."""
        return ()


@dataclass
class ReduceHandle:
    """A reduction in flight."""

    pending: Pending
    # Computes the sum from what was communicated.
    finish: Callable[[Tensor], Tensor] = lambda x: x

    def wait(self) -> Tensor:
        """Wait for the sum, and return it flat."""
        return self.finish(self.pending.wait())


@dataclass(frozen=True)
class BucketLayout:
    """Parameters that share flat buffers: one of weights and, unless they are frozen, one of gradients."""

    specs: Mapping[str, ShardSpec]
    packing: Packing
    # Ranks that shard the bucket.
    shards: Group
    # Ranks that hold the same shard.
    copies: Group
    # The ranks of ``shards``, with a communicator for weights.
    gather: Group
    # Of the gradients, at least fp32.
    dtype: torch.dtype
    device: torch.device

    def zeros(self, elements: int) -> Tensor:
        """Allocate a flat buffer of zeros for gradients."""
        return torch.zeros(elements, dtype=self.dtype, device=self.device)

    def view(self, buffer: Tensor, name: str) -> Tensor:
        """Return a view of a parameter, ``spec.local_shape``, in a whole buffer."""
        shape, offset = self.specs[name].local_shape, self.packing.offsets[name]
        return buffer[offset : offset + prod(shape)].view(shape)

    def shard(self, name: str, over_copies: bool = False) -> ParamShard | None:
        """Return this rank's shard of a parameter; ``over_copies`` divides it among ranks with the same one."""
        part, parts = self.shards.rank, self.shards.size
        if over_copies:
            part, parts = part * self.copies.size + self.copies.rank, parts * self.copies.size
        return self.packing.shard_in_part(name, prod(self.specs[name].local_shape), part, parts)

    def shard_view(self, part: Tensor, name: str, share: ParamShard) -> Tensor:
        """Return a view of elements of a parameter in this rank's part of a buffer.

        Args:
            part: ``[elements / shards]``.
            name: of the parameter.
            share: a range inside this rank's shard.

        Returns:
            A view of the local stored shape if the range is the whole parameter, else flat.
        """
        first, shape = self.packing.offsets[name] + share.start, self.specs[name].local_shape
        found = part.narrow(0, first - self.shards.rank * part.numel(), share.numel)
        return found.view(shape) if share.numel == prod(shape) else found
