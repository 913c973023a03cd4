"""Contiguous gradient buckets, reduced over data-parallel ranks during backward.

A bucket holds the main gradients (at least fp32) of parameters of one dtype and one reduction group, in the order in
which backward is expected to compute them. The reduction has two steps: a reduce-scatter over the ranks that shard the
optimizer state (``shards``), which leaves each rank the part that it updates, and an all-reduce of that part over the
ranks that hold the same shard (``copies``). Without ZeRO there is only the all-reduce. Gradients are communicated in
fp32, or in bf16: then each addend is rounded once, and the sum is computed in fp32. They can be compressed, too
(:mod:`megatron.optimizer.grad_compression`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from megatron.config.parallel import ParallelConfig
from megatron.distributed import comm
from megatron.distributed.comm import Group, Pending
from megatron.distributed.grad_accumulator import GradAccumulator, GradTarget
from megatron.distributed.mesh import Mesh
from megatron.distributed.param_layout import (
    MAX_REDUCTIONS_IN_FLIGHT,
    BucketKey,
    Packing,
    ParamShard,
    matrix_blocks,
    plan_buckets,
)
from megatron.distributed.sharding import ShardSpec
from megatron.layers.parameters import trainable
from megatron.optimizer.grad_compression import Compressor, ErrorFeedback, Int8Compressor, build_compressor


@dataclass
class ReduceHandle:
    """A reduction in flight."""

    pending: Pending
    # Computes the sum from what was communicated.
    finish: Callable[[Tensor], Tensor] = lambda x: x

    def wait(self) -> Tensor:
        """Wait for the sum, and return it flat."""
        return self.finish(self.pending.wait())


def start_grad_reduce_scatter(x: Tensor, group: Group, comm_dtype: torch.dtype) -> ReduceHandle:
    """Start summing ``x`` ``[n]`` over the group; the result is this rank's part ``[n / size]``, in the dtype of ``x``.

    Args:
        x: flat; must not change until the sum is complete. On GPUs the sum overwrites this rank's part of it.
        group: ranks to sum over.
        comm_dtype: dtype in which gradients are communicated.

    """
    if group.size == 1 or comm_dtype == x.dtype:
        return ReduceHandle(comm.start_reduce_scatter(x, group, x.view(group.size, -1)[group.rank]))
    # Each rank receives the addends of its part, and adds them in rank order.
    addends = comm.start_all_to_all(x.to(comm_dtype), group)
    return ReduceHandle(addends, lambda parts: parts.view(group.size, -1).sum(0, dtype=x.dtype))


def start_grad_all_reduce(x: Tensor, group: Group, comm_dtype: torch.dtype) -> ReduceHandle:
    """Start summing ``x`` ``[n]`` over the group, in place unless ``comm_dtype`` differs; the size divides ``n``."""
    if group.size == 1 or comm_dtype == x.dtype:
        return ReduceHandle(comm.start_all_reduce(x, group))
    part = start_grad_reduce_scatter(x, group, comm_dtype)
    return ReduceHandle(
        part.pending, lambda addends: comm.all_gather(part.finish(addends).to(comm_dtype), group).to(x.dtype)
    )


@dataclass(frozen=True)
class BucketLayout:
    """Layout, storage and reduction groups of a bucket."""

    packing: Packing
    # Ranks that shard the bucket.
    shards: Group
    # Ranks that hold the same shard.
    copies: Group
    # Of the gradients, at least fp32.
    dtype: torch.dtype
    device: torch.device
    # Dtype in which gradients are communicated.
    comm_dtype: torch.dtype
    # Of what is communicated; None for none.
    compressor: Compressor | None = None

    def start_reduce_scatter(self, x: Tensor) -> ReduceHandle:
        """Start summing a whole bucket over ``shards``; the result is this rank's part."""
        if isinstance(self.compressor, Int8Compressor) and self.shards.size > 1:
            return ReduceHandle(*self.compressor.start_reduce_scatter(x, self.shards))
        return start_grad_reduce_scatter(x, self.shards, self.comm_dtype)

    def start_all_reduce(self, part: Tensor) -> ReduceHandle:
        """Start summing this rank's part over ``copies``."""
        if self.compressor is not None and self.copies.size > 1:
            return ReduceHandle(*self.compressor.start_all_reduce(part, self.copies))
        return start_grad_all_reduce(part, self.copies, self.comm_dtype)

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
    """Gradients of some parameters.

    Buffers are not zeroed: the first contribution to a gradient overwrites what an earlier step left.
    """

    # This rank's part, [elements / shards]: the sum over all ranks after :meth:`finish`.
    shard: Tensor

    def __init__(self, layout: BucketLayout, specs: Mapping[str, ShardSpec], flush: Callable[[], None]) -> None:
        """Create the bucket; ``flush`` adds contributions that are counted but still queued."""
        self.layout, self.specs, self._flush = layout, specs, flush
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

    def __init__(self, layout: BucketLayout, specs: Mapping[str, ShardSpec], flush: Callable[[], None]) -> None:
        super().__init__(layout, specs, flush)
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
            self._sum = self.layout.start_all_reduce(self.shard)

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
            self._sum = self.layout.start_reduce_scatter(self._buffer)
        else:
            self._sum = self.layout.start_all_reduce(self.shard)


class BufferPool:
    """Full-size gradient buffers that sharded buckets use in turn, and their reductions in flight."""

    def __init__(self) -> None:
        self._free: dict[tuple[int, torch.dtype], list[Tensor]] = defaultdict(list)
        self._in_flight: deque[tuple[ReduceHandle, Tensor, Tensor, bool]] = deque()

    def take(self, layout: BucketLayout) -> Tensor:
        """Return a buffer for a whole bucket, with any content."""
        free = self._free[layout.packing.size, layout.dtype]
        return free.pop() if free else layout.zeros(layout.packing.size)

    def reduce(self, buffer: Tensor, layout: BucketLayout, own: Tensor, first: bool) -> None:
        """Start the reduce-scatter of a buffer, whose result will be added to ``own``, or overwrite it if ``first``."""
        total = layout.start_reduce_scatter(buffer)
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
        self, layout: BucketLayout, specs: Mapping[str, ShardSpec], flush: Callable[[], None], pool: BufferPool
    ) -> None:
        super().__init__(layout, specs, flush)
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
        self._pool.reduce(self._buffer, self.layout, self.shard, not self._reduced)
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
        self._last = self.layout.start_all_reduce(self.shard)

    def finish(self) -> None:
        """Finish the reduction, after :meth:`finish_scatter`."""
        if self._last is not None:
            copy_unless_same(self._last.wait(), self.shard)


class GradBuffer(GradTarget):
    """All main gradients of a rank."""

    def __init__(
        self,
        specs: Mapping[str, ShardSpec],
        dtypes: Mapping[str, torch.dtype],
        mesh: Mesh,
        grad_accumulator: GradAccumulator,
        device: torch.device,
        config: ParallelConfig,
        uncut: Collection[str] = (),
        seed: int = 0,
    ) -> None:
        """Allocate the buckets and bind the accumulator to them.

        Args:
            specs: of all parameters, in the order of forward.
            dtypes: of the same parameters.
            mesh: the groups.
            grad_accumulator: the gradient accumulator, which will write into the buckets.
            device: of the buffers.
            config: bucket size, ZeRO stage, communication dtype and overlap.
            uncut: parameters that are not divided between ranks, except in ZeRO-3.
            seed: of the run; keys the random numbers of gradient compression.

        """
        # Of the parameters that are trained.
        self.specs, self.zero_stage, self.device = trainable(specs), config.zero_stage, device
        # Reduce a bucket as soon as it is complete, instead of all at the end of the step.
        self.overlap = config.overlap_grad_reduce
        # In the order in which they are expected to be complete.
        self.buckets: list[Bucket] = []
        self.frozen: list[FrozenBucket] = []
        self._bucket_of: dict[str, Bucket] = {}
        self._missing: dict[str, int] = {}  # contributions, by parameter
        self._unfinished: dict[int, int] = {}  # parameters that miss contributions, by id of the bucket
        self._reducing = True
        compression = config.compression
        # Reductions in bf16 or int8 copy the gradients.
        self._copies_gradients = config.grad_reduce_in_bf16 or config.grad_compression == "int8"
        # Called once per step and bucket, as soon as :attr:`Bucket.shard` has its sum. With it, or with reductions that
        # copy the gradients, only the newest few reductions are left in flight during backward.
        self.on_reduced: Callable[[Bucket], None] | None = None
        self._in_flight = deque[Bucket]()
        self._reported: set[int] = set()  # ids of buckets for which ``on_reduced`` was called
        pool = BufferPool()
        keys = {
            name: BucketKey.of(name, spec, str(dtypes[name]), name in uncut, config.zero_stage)
            for name, spec in specs.items()
        }

        def group_sizes(axes: tuple[str, ...]) -> tuple[int, int]:
            return mesh.optimizer_shard_group(*axes).size, mesh.optimizer_replica_group(*axes).size

        for shape in plan_buckets(specs, keys, config.bucket_size(mesh.dp_cp.size), group_sizes):
            axes, names = shape.key.axes, [*shape.sizes]
            if shape.key.frozen:
                ranks = mesh.weight_gather_group(*axes) if shape.key.block else Group((mesh.rank,))
                self.frozen.append(FrozenBucket(shape.packing, ranks, {name: specs[name] for name in names}))
                continue
            shards, copies = mesh.optimizer_shard_group(*axes), mesh.optimizer_replica_group(*axes)
            dtype = torch.promote_types(dtypes[names[0]], torch.float32)
            comm_dtype = torch.bfloat16 if config.grad_reduce_in_bf16 else dtype
            bucket_specs = {name: specs[name] for name in names}
            compressor = None
            if compression is not None and (copies.size > 1 or not compression.has_errors):
                blocks = matrix_blocks(shape.packing, bucket_specs, shards.rank, shards.size, compression.rank)
                part = torch.empty(shape.packing.size // shards.size, dtype=dtype, device=device)
                compressor = build_compressor(compression, blocks, part, seed, len(self.buckets))
            layout = BucketLayout(shape.packing, shards, copies, dtype, device, comm_dtype, compressor)
            bucket: Bucket
            if config.zero_stage >= 2 and shards.size > 1:
                bucket = ShardedBucket(layout, bucket_specs, grad_accumulator.flush, pool)
            else:
                bucket = GradBucket(layout, bucket_specs, grad_accumulator.flush)
            self.buckets.append(bucket)
            self._bucket_of |= dict.fromkeys(names, bucket)
        # The shard of each parameter that this rank updates; parameters without one are not listed.
        self.shards = self._shards(over_copies=False)
        # Gradients of these shards after :meth:`finish`: of the local stored shape if a shard is the whole parameter,
        # else flat.
        self.grads = {name: self.shard_view(self._bucket_of[name].shard, name) for name in self.shards}
        self._grad_accumulator = grad_accumulator
        grad_accumulator.bind(self)

    def _shards(self, over_copies: bool) -> dict[str, ParamShard]:
        """Return this rank's shard of every parameter; ``over_copies`` divides it among ranks with the same one."""
        found = {}
        for bucket in self.buckets:
            shards, copies = bucket.layout.shards, bucket.layout.copies
            part, parts = shards.rank, shards.size
            if over_copies:
                part, parts = part * copies.size + copies.rank, parts * copies.size
            for name, spec in bucket.specs.items():
                share = bucket.layout.packing.shard_in_part(name, prod(spec.local_shape), part, parts)
                if share is not None:
                    found[name] = share
        return {name: found[name] for name in self.specs if name in found}

    def counted_shards(self) -> dict[str, ParamShard]:
        """Return the shards that this rank counts in norms and checkpoints: every element is counted by one rank.

        They are the same for ZeRO-0 and 1, so the order of summation is, too. The exception is Muon: its undivided
        parameters lie elsewhere in a bucket that is sharded. ZeRO-2 and 3 have other buckets. There, norms agree up to
        rounding.
        """
        return self._shards(over_copies=True)

    def shard_view(self, part: Tensor, name: str, share: ParamShard | None = None) -> Tensor:
        """Return a view of a parameter's shard in this rank's part of a bucket, or in a buffer with the same layout.

        Args:
            part: ``[elements / shards]``.
            name: of the parameter.
            share: a range inside the shard; by default all of it.

        Returns:
            A view of the local stored shape if the range is the whole parameter, else flat.

        """
        layout = self._bucket_of[name].layout
        return shard_view(part, layout.packing, layout.shards.rank, name, self.specs[name], share or self.shards[name])

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
            layout, part = bucket.layout, torch.zeros_like(bucket.shard)
            held = {name: self.shards[name] for name in bucket.specs if name in names and name in self.shards}
            for name in held:
                self.shard_view(part, name).copy_(shard(name))
            whole = comm.all_gather(part, layout.shards)
            for name, own in held.items():
                yield name, slice(own.start, own.stop), param_view(whole, layout.packing, name, bucket.specs[name])

    def target(self, name: str) -> Tensor:
        """Return the tensor for the next contribution to a gradient, ``spec.local_shape``."""
        return self._bucket_of[name].target(name)

    def is_first(self, name: str) -> bool:
        """Return True if the next contribution overwrites :meth:`target`; to be called once for each."""
        return self._bucket_of[name].is_first(name)

    def accumulated(self, name: str) -> Tensor:
        """Return the gradient accumulated so far and not reduced, ``spec.local_shape``."""
        bucket = self._bucket_of[name]
        found = bucket.target(name)
        bucket.complete()
        return found

    def start_step(self, microbatches: int, step: int = 0) -> None:
        """Forget the gradients of the previous step and expect this many micro-batches.

        ``step``, the number of steps taken before, keys the rounding of compressed gradients.
        """
        self._grad_accumulator.discard_pending()
        self._missing = {name: microbatches * spec.contributions for name, spec in self.specs.items()}
        self._unfinished = {id(bucket): len(bucket.specs) for bucket in self.buckets}
        self._in_flight.clear()
        self._reported.clear()
        for bucket in self.buckets:
            bucket.start_step()
            if bucket.layout.compressor is not None:
                bucket.layout.compressor.start_step(step)

    def error_feedback(self) -> dict[str, ErrorFeedback]:
        """Return what keeps the errors of compressed gradients, by parameter of which this rank has a shard."""
        found = {name: self._bucket_of[name].layout.compressor for name in self.shards}
        return {name: compressor for name, compressor in found.items() if isinstance(compressor, ErrorFeedback)}

    def reset_errors(self) -> None:
        """Forget the errors of compressed gradients."""
        for bucket in self.buckets:
            if isinstance(bucket.layout.compressor, ErrorFeedback):
                bucket.layout.compressor.reset()

    @torch.no_grad()
    def commit_errors(self, skipped: Tensor) -> None:
        """Keep the errors of compressed gradients after an update; see :meth:`ErrorFeedback.commit`."""
        for bucket in self.buckets:
            if isinstance(bucket.layout.compressor, ErrorFeedback):
                bucket.layout.compressor.commit(skipped)

    def discard(self) -> None:
        """Forget the reductions of a step that was captured, and so never ran."""
        for bucket in self.buckets:
            bucket.discard()

    @contextmanager
    def without_reduction(self) -> Iterator[None]:
        """Accumulate gradients without reducing them, for inspection by :meth:`accumulated`."""
        self._reducing = False
        try:
            yield
        finally:
            self._reducing = True

    def contributed(self, name: str) -> None:
        """Count a contribution; the last one of a bucket starts its reduction."""
        bucket = self._bucket_of[name]
        self._missing[name] -= 1
        self._unfinished[id(bucket)] -= self._missing[name] == 0
        if self._reducing:
            complete = self._unfinished[id(bucket)] == 0
            bucket.contributed(name, complete, self.overlap)
            if complete and (self._copies_gradients or self.on_reduced is not None):
                self._in_flight.append(bucket)
                if len(self._in_flight) > MAX_REDUCTIONS_IN_FLIGHT:
                    oldest = self._in_flight.popleft()
                    if oldest.wait_early() and self.overlap:
                        self._report(oldest)

    def _report(self, bucket: Bucket) -> None:
        if self.on_reduced is not None and id(bucket) not in self._reported:
            self._reported.add(id(bucket))
            self.on_reduced(bucket)

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
        for bucket in self.buckets:
            self._report(bucket)


def param_view(buffer: Tensor, packing: Packing, name: str, spec: ShardSpec) -> Tensor:
    """Return a view of a parameter, ``spec.local_shape``, in a buffer with a bucket's layout."""
    offset = packing.offsets[name]
    return buffer[offset : offset + prod(spec.local_shape)].view(spec.local_shape)


def shard_view(part: Tensor, packing: Packing, rank: int, name: str, spec: ShardSpec, share: ParamShard) -> Tensor:
    """Return a view of elements of a parameter in part ``rank`` of a bucket; see :meth:`GradBuffer.shard_view`."""
    first = packing.offsets[name] + share.start - rank * part.numel()
    found = part[first : first + share.numel]
    return found.view(spec.local_shape) if share.numel == prod(spec.local_shape) else found


def adjacent_runs(tensors: Sequence[Tensor]) -> list[list[int]]:
    """Group the indices of contiguous tensors that follow one another in memory without a gap."""
    runs: list[list[int]] = []
    ends: tuple[int, int] | None = None
    places = [(x.untyped_storage()._cdata, int(x.storage_offset())) for x in tensors]
    for index in sorted(range(len(tensors)), key=places.__getitem__):
        x, (storage, offset) = tensors[index], places[index]
        if x.is_contiguous() and ends == (storage, offset):
            runs[-1].append(index)
        else:
            runs.append([index])
        ends = (storage, offset + x.numel()) if x.is_contiguous() else None
    return runs


def flat_runs(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return views of all elements, as few as possible: a flat one for each of :func:`adjacent_runs`."""
    merged = []
    for run in adjacent_runs(tensors):
        first = tensors[run[0]]
        total = sum(tensors[index].numel() for index in run)
        merged.append(first.as_strided((total,), (1,)) if len(run) > 1 else first)
    return merged


def copy_unless_same(x: Tensor, out: Tensor) -> None:
    """Copy ``x`` to ``out``, unless they are the same memory."""
    if x.data_ptr() != out.data_ptr():
        out.copy_(x)
