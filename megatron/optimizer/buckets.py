"""One bucket of gradients: its memory, its contributions, and when it is reduced.

A bucket holds the main gradients (at least fp32) of parameters of one dtype and one reduction group, in the order in
which backward is expected to compute them. Buffers are not zeroed: the first contribution to a gradient overwrites what
an earlier step left.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.distributed.comm import Group
from megatron.distributed.param_layout import MAX_REDUCTIONS_IN_FLIGHT, Packing
from megatron.distributed.sharding import ShardSpec
from megatron.optimizer.flat_views import param_view
from megatron.optimizer.reduction import ReduceHandle, Reduction


@dataclass(frozen=True)
class BucketLayout:
    """Layout and storage of a bucket."""

    packing: Packing
    # Ranks that shard the bucket.
    shards: Group
    # Ranks that hold the same shard.
    copies: Group
    # Of the gradients, at least fp32.
    dtype: torch.dtype
    device: torch.device

    def zeros(self, elements: int) -> Tensor:
        """Allocate a flat buffer of zeros."""
        return torch.zeros(elements, dtype=self.dtype, device=self.device)


@dataclass(frozen=True)
class FrozenBucket:
    """Weights without gradients."""

    packing: Packing
    # Ranks that shard them.
    shards: Group
    specs: Mapping[str, ShardSpec]


class Bucket(ABC):
    """Gradients of some parameters."""

    # This rank's part, [elements / shards]: the sum over all ranks after :meth:`finish`.
    shard: Tensor

    def __init__(
        self, layout: BucketLayout, reduction: Reduction, specs: Mapping[str, ShardSpec], flush: Callable[[], None]
    ) -> None:
        """Create the bucket; ``flush`` adds contributions that are counted but still queued."""
        self.layout, self.reduction, self.specs, self._flush = layout, reduction, specs, flush
        self._stale: set[str] = set()  # parameters whose gradient is left from an earlier step

    @abstractmethod
    def start_step(self) -> None:
        """Forget the gradients of the previous step."""

    @abstractmethod
    def discard(self) -> None:
        """Forget reductions that were captured, and so never ran, and buffers that belong to the graph."""

    @abstractmethod
    def target(self, name: str) -> Tensor:
        """Return the tensor to which contributions to a gradient are added, ``spec.local_shape``."""

    def is_first(self, name: str) -> bool:
        """Return True if the next contribution has to overwrite :meth:`target`; to be called before each."""
        first = name in self._stale
        self._stale.discard(name)
        return first

    def complete(self) -> None:
        """Add queued contributions, and zero gradients without contributions."""
        self._flush()
        for name in self._stale:
            self.target(name).zero_()
        self._stale.clear()

    @abstractmethod
    def contributed(self, name: str, complete: bool, overlap: bool) -> None:
        """Record a contribution; ``complete`` if it is the bucket's last of the step."""

    @abstractmethod
    def wait_early(self) -> bool:
        """Wait for the reduction in flight, if it belongs to this bucket alone.

        Returns:
            True if :attr:`shard` now has the sum over all ranks.
        """

    @abstractmethod
    def finish_scatter(self) -> None:
        """Finish the reduction over ``shards``, and start the all-reduce over ``copies``."""

    @abstractmethod
    def finish(self) -> None:
        """Finish the reduction, after :meth:`finish_scatter`."""


class GradBucket(Bucket):
    """Gradients of some parameters, stored as a whole (ZeRO-0 and ZeRO-1)."""

    def __init__(
        self, layout: BucketLayout, reduction: Reduction, specs: Mapping[str, ShardSpec], flush: Callable[[], None]
    ) -> None:
        super().__init__(layout, reduction, specs, flush)
        self._buffer = layout.zeros(layout.packing.size)
        self._views = {name: param_view(self._buffer, layout.packing, name, spec) for name, spec in specs.items()}
        self.shard = self._buffer.view(layout.shards.size, -1)[layout.shards.rank]
        self._sum: ReduceHandle | None = None
        self._started = False

    def start_step(self) -> None:
        """Forget the gradients of the previous step."""
        self.wait()  # a step that was aborted may have left a reduction in flight
        self._stale = set(self.specs)
        self._started = False

    def discard(self) -> None:
        """Forget a reduction that was captured, and so never ran."""
        self._sum = None

    def target(self, name: str) -> Tensor:
        """Return the tensor to which contributions to a gradient are added, ``spec.local_shape``."""
        return self._views[name]

    def contributed(self, name: str, complete: bool, overlap: bool) -> None:
        """Record a contribution; ``complete`` if it is the bucket's last of the step."""
        if complete and overlap and self.layout.shards.size * self.layout.copies.size > 1:
            self._start()

    def wait_early(self) -> bool:
        """Wait for the reduction in flight."""
        self.wait()
        if self.layout.shards.size * self.layout.copies.size == 1:
            self.complete()  # nothing to reduce
            return True
        return self._started and 1 in (self.layout.shards.size, self.layout.copies.size)

    def finish_scatter(self) -> None:
        """Finish the reduce-scatter over ``shards``, and start the all-reduce over ``copies``."""
        if not self._started:
            self._start()
        if self.layout.shards.size > 1:
            self.wait()
            self._sum = self.reduction.start_all_reduce(self.shard)

    def finish(self) -> None:
        """Finish the reduction, after :meth:`finish_scatter`."""
        self.wait()

    def wait(self) -> None:
        """Wait for the reduction in flight, if there is one, and free its memory."""
        if self._sum is not None:
            copy_unless_same(self._sum.wait(), self.shard)
            self._sum = None

    def _start(self) -> None:
        self._started = True
        self.complete()
        if self.layout.shards.size > 1:
            self._sum = self.reduction.start_reduce_scatter(self._buffer)
        else:
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


class ShardedBucket(Bucket):
    """Gradients of some parameters, of which this rank stores only its shard (ZeRO-2 and 3).

    A full-size buffer exists from the first contribution of a micro-batch until every parameter has that micro-batch's
    contributions; then it is reduced. So every micro-batch communicates as much as a whole step does in ZeRO-1.
    """

    def __init__(
        self,
        layout: BucketLayout,
        reduction: Reduction,
        specs: Mapping[str, ShardSpec],
        flush: Callable[[], None],
        pool: BufferPool,
    ) -> None:
        super().__init__(layout, reduction, specs, flush)
        self._pool = pool
        self.shard = layout.zeros(layout.packing.size // layout.shards.size)
        self._reset()

    def _reset(self) -> None:
        self._stale.clear()
        self._buffer: Tensor | None = None
        self._last: ReduceHandle | None = None
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
        """Return the tensor to which contributions to a gradient are added, ``spec.local_shape``."""
        if self._buffer is None:
            self._buffer = self._pool.take(self.layout)
            self._stale = set(self.specs)
        return param_view(self._buffer, self.layout.packing, name, self.specs[name])

    def contributed(self, name: str, complete: bool, overlap: bool) -> None:
        """Record a contribution; ``complete`` if it is the bucket's last of the step."""
        self._missing[name] -= 1
        if not complete and any(missing > 0 for missing in self._missing.values()):
            return
        self._reduce(MAX_REDUCTIONS_IN_FLIGHT if overlap else 0)

    def _reduce(self, in_flight: int) -> None:
        """Start reducing the buffer; afterwards at most ``in_flight`` reductions of all buckets are in flight."""
        self.complete()
        if self._buffer is None:
            raise RuntimeError(f"a gradient of {', '.join(self.specs)} was counted before it was added")
        self._pool.reduce(self._buffer, self.reduction, self.shard, not self._reduced)
        # Some contributions of the next micro-batches may be there already: those of the loss are made in forward.
        self._missing = {name: missing + self.specs[name].contributions for name, missing in self._missing.items()}
        self._buffer, self._reduced = None, True
        self._pool.wait(in_flight)

    def wait_early(self) -> bool:
        """Return True if no reduction is left; later ones usually have waited for this bucket's."""
        return self.layout.copies.size == 1 and not self._pool.reduces(self.shard)

    def finish_scatter(self) -> None:
        """Finish the reduce-scatters over ``shards``, and start the all-reduce over ``copies``."""
        self._pool.wait(0)
        self._last = self.reduction.start_all_reduce(self.shard)

    def finish(self) -> None:
        """Finish the reduction, after :meth:`finish_scatter`."""
        if self._last is not None:
            copy_unless_same(self._last.wait(), self.shard)


def copy_unless_same(x: Tensor, out: Tensor) -> None:
    """Copy ``x`` to ``out``, unless they are the same memory."""
    if x.data_ptr() != out.data_ptr():
        out.copy_(x)
