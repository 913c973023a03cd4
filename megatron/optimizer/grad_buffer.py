"""All gradients of a rank, in contiguous buckets that are reduced over data-parallel ranks during backward.

:mod:`megatron.optimizer.buckets` has the buckets, :mod:`megatron.optimizer.reduction` how they are summed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from math import prod
from typing import Protocol

import torch
from torch import Tensor

from megatron.config.parallel import ParallelConfig
from megatron.distributed import comm
from megatron.distributed.grad_accumulator import GradAccumulator, GradTarget
from megatron.distributed.mesh import Mesh
from megatron.distributed.param_layout import MAX_REDUCTIONS_IN_FLIGHT, ParamShard
from megatron.distributed.sharding import ShardSpec
from megatron.layers.parameters import trainable
from megatron.optimizer.buckets import Bucket
from megatron.optimizer.build_buckets import build_buckets
from megatron.optimizer.flat_views import param_view, shard_view
from megatron.optimizer.reduction import Reduction


class ReductionListener(Protocol):
    """Observer of buckets whose reduction is complete."""

    def on_reduced(self, bucket: Bucket) -> None:
        """Act when :attr:`Bucket.shard` has the sum over all ranks."""


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
            seed: of the run; keys the random numbers of reductions.

        """
        # Of the parameters that are trained.
        self.specs, self.zero_stage, self.device = trainable(specs), config.zero_stage, device
        # Reduce a bucket as soon as it is complete, instead of all at the end of the step.
        self.overlap = config.overlap_grad_reduce
        # In the order in which they are expected to be complete.
        self.buckets, self.frozen = build_buckets(
            specs, dtypes, mesh, grad_accumulator.flush, device, config, uncut, seed
        )
        self._bucket_of = {name: bucket for bucket in self.buckets for name in bucket.specs}
        # The shard of each parameter that this rank updates; parameters without one are not listed.
        self.shards = self._shards(over_copies=False)
        # Gradients of these shards after :meth:`finish`: of the local stored shape if a shard is the whole parameter,
        # else flat.
        self.grads = {name: self.shard_view(self._bucket_of[name].shard, name) for name in self.shards}
        self._missing: dict[str, int] = {}  # contributions, by parameter
        self._unfinished: dict[int, int] = {}  # parameters that miss contributions, by id of the bucket
        self._reducing = True
        self._copies_gradients = any(bucket.reduction.copies_gradients for bucket in self.buckets)
        # With a listener, or with reductions that copy the gradients, only the newest few reductions are left in flight
        # during backward.
        self._listener: ReductionListener | None = None
        self._in_flight = deque[Bucket]()
        self._reported: set[int] = set()  # ids of buckets that were reported to the listener
        self._grad_accumulator = grad_accumulator
        grad_accumulator.bind(self)

    def report_to(self, listener: ReductionListener) -> None:
        """Report every bucket to ``listener`` once per step, when its sum is complete."""
        self._listener = listener

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

        ``step`` is the number of steps taken before; reductions that round at random key it by this.
        """
        self._grad_accumulator.discard_pending()
        self._missing = {name: microbatches * spec.contributions for name, spec in self.specs.items()}
        self._unfinished = {id(bucket): len(bucket.specs) for bucket in self.buckets}
        self._in_flight.clear()
        self._reported.clear()
        for bucket in self.buckets:
            bucket.start_step()
            bucket.reduction.start_step(step)

    def reductions(self) -> dict[str, Reduction]:
        """Return the reductions by parameter of which this rank has a shard."""
        return {name: self._bucket_of[name].reduction for name in self.shards}

    def reset_reductions(self) -> None:
        """Return all reductions to their initial state."""
        for bucket in self.buckets:
            bucket.reduction.reset()

    @torch.no_grad()
    def commit_reductions(self, skipped: Tensor) -> None:
        """Keep the state of the reductions after an update; see :meth:`Reduction.commit`."""
        for bucket in self.buckets:
            bucket.reduction.commit(skipped)

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
            if complete and (self._copies_gradients or self._listener is not None):
                self._in_flight.append(bucket)
                if len(self._in_flight) > MAX_REDUCTIONS_IN_FLIGHT:
                    oldest = self._in_flight.popleft()
                    if oldest.wait_early() and self.overlap:
                        self._report(oldest)

    def _report(self, bucket: Bucket) -> None:
        if self._listener is not None and id(bucket) not in self._reported:
            self._reported.add(id(bucket))
            self._listener.on_reduced(bucket)

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
