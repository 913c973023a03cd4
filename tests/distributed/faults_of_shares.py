"""Faults of data-parallel sharding and of experts, each a patch of the library within a context."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from megatron.distributed.comm import Group
from megatron.distributed.param_layout import BucketKey, ParamShard
from megatron.layers import router
from megatron.layers.loss import OutputLayer
from megatron.layers.router import ExpertLoads
from megatron.optimizer import distributed_optimizer
from megatron.optimizer.grad_buffer import Bucket, BufferPool, GradBuffer, ReduceHandle, Reduction, ShardedBucket
from megatron.optimizer.parameter_store import ParameterStore
from megatron.optimizer.sharded_parameter_store import ShardedParameterStore, ShardedWeightBuffer
from megatron.training.components import expert_loads


def shard_off_by_one() -> AbstractContextManager[Any]:
    """Every rank's part of a summed bucket begins one element too late."""
    original = Reduction.start_reduce_scatter

    def shifted(self: Reduction, x: Tensor) -> ReduceHandle:
        total = original(self, x)
        return ReduceHandle(total.pending, lambda x: total.finish(x).roll(-1))

    return patch.object(Reduction, "start_reduce_scatter", shifted)


def shares_counted_by_all_copies() -> AbstractContextManager[Any]:
    """Ranks that update the same share all count it in the norm."""

    def counted_shards(self: GradBuffer) -> Mapping[str, ParamShard]:
        return self.shards

    return patch.object(GradBuffer, "counted_shards", counted_shards)


def gather_of_one_bucket_forgotten() -> AbstractContextManager[Any]:
    """The weights of one bucket stay as they were where other ranks update them."""
    original = ParameterStore.__init__

    def init(self: ParameterStore, *arguments: Any) -> None:
        original(self, *arguments)
        self.buffers[1].group = Group()

    return patch.object(ParameterStore, "__init__", init)


def experts_summed_over_all_replicas() -> AbstractContextManager[Any]:
    """Gradients of different experts are added up, as if all replicas had the same ones."""
    original = BucketKey.of.__func__  # type: ignore[attr-defined]

    def of(cls: type[BucketKey], *arguments: Any) -> BucketKey:
        key: BucketKey = original(cls, *arguments)
        return replace(key, axes=("dp", "cp"))

    return patch.object(BucketKey, "of", classmethod(of))


def choices_counted_locally() -> AbstractContextManager[Any]:
    """Ranks that share a sequence balance the experts by their own part of it."""
    local = vars(router.comm) | {"all_reduce": lambda x, group: x}
    return patch.object(router, "comm", SimpleNamespace(**local))


def loads_of_experts_local() -> AbstractContextManager[Any]:
    """Biases of experts move by the choices of this rank's tokens."""
    local = vars(router.comm) | {"all_reduce": lambda x, group: x}
    return patch.object(expert_loads, "comm", SimpleNamespace(**local))


def loads_of_the_last_microbatch() -> AbstractContextManager[Any]:
    """Biases of experts move by the choices of one micro-batch."""
    original = ExpertLoads.add

    def add(self: ExpertLoads, *counts: Any) -> None:
        torch._foreach_zero_(self.counted())
        original(self, *counts)

    return patch.object(ExpertLoads, "add", add)


def loads_counted_in_recomputation() -> AbstractContextManager[Any]:
    """The choices of a recomputed layer count twice."""
    return patch.object(router, "is_recomputing", lambda: False)


def dirty_padding() -> AbstractContextManager[Any]:
    """No fault by itself: what lies between the gradients of a bucket is not zero."""
    original = Bucket.start_step

    def start_step(self: Bucket) -> None:
        original(self)
        self._buffer.fill_(1.0)
        for name in self.specs:
            self.target(name).zero_()

    return patch.object(Bucket, "start_step", start_step)


@contextmanager
def padding_in_the_norm() -> Iterator[None]:
    """Compute the norm of whole parts of buckets."""
    original = distributed_optimizer.GradNorm.__init__

    def init(self: Any, specs: Any, grads: GradBuffer, *rest: Any) -> None:
        original(self, specs, grads, *rest)
        self._counted = [bucket.shard for bucket in grads.buckets]

    with dirty_padding(), patch.object(distributed_optimizer.GradNorm, "__init__", init):
        yield


def one_microbatch_dropped() -> AbstractContextManager[Any]:
    """Drop the sum of a bucket's first micro-batch."""
    original = ShardedBucket.start_step

    def start_step(self: ShardedBucket) -> None:
        original(self)
        self.left_out = False  # type: ignore[attr-defined]

    reduce = ShardedBucket._reduce

    def _reduce(self: ShardedBucket, in_flight: int) -> None:
        if not self.left_out and self._whole is not None:  # type: ignore[attr-defined]
            self._whole.zero_()
            self.left_out = True  # type: ignore[attr-defined]
        reduce(self, in_flight)

    return patch.multiple(ShardedBucket, start_step=start_step, _reduce=_reduce)


def stale_gradients_added_to() -> AbstractContextManager[Any]:
    """Add to the gradients of an earlier step or micro-batch instead of overwriting them."""
    return patch.object(Bucket, "claim", lambda self, name: (self.target(name), False))


def shards_of_the_last_step_added_to() -> AbstractContextManager[Any]:
    """The first micro-batch of a step is added to the sum of the step before."""
    original = BufferPool.reduce

    def reduce(self: BufferPool, buffer: Tensor, reduction: Reduction, own: Tensor, first: bool) -> None:
        original(self, buffer, reduction, own, first=False)

    return patch.object(BufferPool, "reduce", reduce)


def gradients_reduced_twice() -> AbstractContextManager[Any]:
    """The reduced gradient of a micro-batch is added to the shard twice."""
    original = BufferPool.reduce

    def reduce(self: BufferPool, buffer: Tensor, reduction: Reduction, own: Tensor, first: bool) -> None:
        again = buffer.clone()
        original(self, buffer, reduction, own, first)
        original(self, again, reduction, own, first=False)

    return patch.object(BufferPool, "reduce", reduce)


# ---- of weights that are gathered around their use


def _gathering(gather: Callable[[ShardedWeightBuffer, Tensor], None]) -> AbstractContextManager[Any]:
    """Gather the matrices of one block by another function, of the buffer and its part at the beginning."""
    original = ShardedParameterStore.__init__

    def init(self: ShardedParameterStore, params: Any, buckets: GradBuffer, *rest: Any) -> None:
        original(self, params, buckets, *rest)
        for bucket, buffer in zip(buckets.buckets, self.buffers):
            if "layers.1.mlp.linear_fc1.weight" in bucket.specs:
                buffer.start_gather = partial(gather, buffer, buffer.part.clone())  # type: ignore[method-assign]

    return patch.object(ShardedParameterStore, "__init__", init)


def weights_of_the_last_step_gathered() -> AbstractContextManager[Any]:
    """A block computes with the weights before the update."""

    def gather(buffer: ShardedWeightBuffer, old: Tensor) -> None:
        new, buffer.part = buffer.part, old
        ShardedWeightBuffer.start_gather(buffer)
        buffer.part = new

    return _gathering(gather)


def weights_of_the_next_rank_gathered() -> AbstractContextManager[Any]:
    """The parts of a block's weights are in the order of ranks that begins with the second."""

    def gather(buffer: ShardedWeightBuffer, _: Tensor) -> None:
        ShardedWeightBuffer.start_gather(buffer)
        buffer.wait()
        buffer.whole.copy_(buffer.whole.view(buffer.group.size, -1).roll(1, 0).flatten())

    return _gathering(gather)


def weights_not_gathered_for_backward() -> AbstractContextManager[Any]:
    """Backward of a block finds memory in place of its weights."""
    original = ShardedParameterStore._before_backward

    def gather(buffer: ShardedWeightBuffer) -> None:
        buffer.is_whole = True
        buffer.whole.zero_()

    def before_backward(self: ShardedParameterStore, *arguments: Any) -> None:
        with patch.object(ShardedWeightBuffer, "start_gather", gather):
            original(self, *arguments)

    return patch.object(ShardedParameterStore, "_before_backward", before_backward)


def weights_freed_before_the_end_of_backward() -> AbstractContextManager[Any]:
    """The memory of a block's weights has another use before the gradient of its input is computed."""
    original = ShardedParameterStore._before_backward

    def before_backward(self: ShardedParameterStore, blocks: Sequence[nn.Module], index: int, dy: Tensor) -> None:
        original(self, blocks, index, dy)
        for buffer in self._buffers(blocks[index]):
            buffer.whole.zero_()

    return patch.object(ShardedParameterStore, "_before_backward", before_backward)


def prefetched_weights_overwritten() -> AbstractContextManager[Any]:
    """Prefetched weights are overwritten before their block uses them."""
    original = ShardedParameterStore._before_forward

    def before_forward(
        self: ShardedParameterStore, blocks: Sequence[nn.Module], index: int, block: nn.Module, inputs: Any
    ) -> None:
        original(self, blocks, index, block, inputs)
        for following in blocks[index + 1 : index + 2]:
            for buffer in self._buffers(following):
                buffer.wait()
                buffer.whole.zero_()

    return patch.object(ShardedParameterStore, "_before_forward", before_forward)


def tied_weight_not_gathered_for_the_output() -> AbstractContextManager[Any]:
    """The output layer has no weights of its own, and so gathers none."""
    original = ShardedParameterStore._buffers

    def buffers(self: ShardedParameterStore, block: nn.Module) -> list[ShardedWeightBuffer]:
        return [] if isinstance(block, OutputLayer) else original(self, block)

    return patch.object(ShardedParameterStore, "_buffers", buffers)
