"""Faults of what replicas cut among themselves and of experts, each a patch of the library while a context is open."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from megatron.layers import router
from megatron.optim import buckets, clip, wire
from megatron.optim.buckets import Bucket, GradBuckets, Spare, StreamedBucket
from megatron.optim.weights import Weights
from megatron.optim.wire import Sum
from megatron.parallel.comm import Group
from megatron.parallel.ownership import BucketKey, Share


def shard_off_by_one() -> AbstractContextManager[Any]:
    """Every rank's part of a summed bucket begins one element too late."""
    original = wire.start_reduce_scatter

    def shifted(*arguments: Any) -> Sum:
        total = original(*arguments)
        return Sum(total.pending, lambda x: total.made_of(x).roll(-1))

    return patch.object(buckets, "start_reduce_scatter", shifted)


def shares_counted_by_all_copies() -> AbstractContextManager[Any]:
    """Ranks that update the same share all count it in the norm."""

    def counted(self: GradBuckets) -> Mapping[str, Share]:
        return self.shares

    return patch.object(GradBuckets, "counted", counted)


def gather_of_one_bucket_forgotten() -> AbstractContextManager[Any]:
    """The weights of one bucket stay as they were where other ranks update them."""
    original = Weights.__init__

    def init(self: Weights, *arguments: Any) -> None:
        original(self, *arguments)
        buffer, part, _ = self._buffers[1]
        self._buffers[1] = buffer, part, Group()

    return patch.object(Weights, "__init__", init)


def experts_summed_over_all_replicas() -> AbstractContextManager[Any]:
    """Gradients of different experts are added up, as if all replicas had the same ones."""
    original = BucketKey.of.__func__  # type: ignore[attr-defined]

    def of(cls: type[BucketKey], *arguments: Any) -> BucketKey:
        key: BucketKey = original(cls, *arguments)
        return replace(key, axes=("dp", "cp"))

    return patch.object(BucketKey, "of", classmethod(of))


def choices_counted_locally() -> AbstractContextManager[Any]:
    """Ranks that share a sequence balance the experts by their own part of it."""
    return patch.object(router, "comm", SimpleNamespace(all_reduce=lambda x, group: x))


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
    """The norm is that of whole parts of buckets."""
    original = clip.GradNorm.__init__

    def init(self: Any, specs: Any, grads: GradBuckets, mesh: Any) -> None:
        original(self, specs, grads, mesh)
        self._counted = [bucket.own for bucket in grads.buckets]

    with dirty_padding(), patch.object(clip.GradNorm, "__init__", init):
        yield


def one_microbatch_dropped() -> AbstractContextManager[Any]:
    """What a bucket's first micro-batch summed up to is not added to the others."""
    original = StreamedBucket.start_step

    def start_step(self: StreamedBucket) -> None:
        original(self)
        self.left_out = False  # type: ignore[attr-defined]

    reduce = StreamedBucket._reduce

    def _reduce(self: StreamedBucket, in_flight: int) -> None:
        if not self.left_out and self._buffer is not None:  # type: ignore[attr-defined]
            self._buffer.zero_()
            self.left_out = True  # type: ignore[attr-defined]
        reduce(self, in_flight)

    return patch.multiple(StreamedBucket, start_step=start_step, _reduce=_reduce)


def lent_buffers_not_zeroed() -> AbstractContextManager[Any]:
    """A spare buffer still holds the micro-batch before."""
    original = Spare.take

    def take(self: Spare, room: Any) -> Tensor:
        with patch.object(torch.Tensor, "zero_", lambda x: x):
            return original(self, room)

    return patch.object(Spare, "take", take)
