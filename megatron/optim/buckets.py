"""Contiguous gradient buckets, reduced over data-parallel ranks while backward still runs.

A bucket holds the main gradients (at least fp32) of parameters of one dtype and one reduction group, in the
order in which backward is expected to finish them. It is reduced as soon as every parameter in it has had all its
contributions: uses x micro-batches.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from megatron.parallel import comm
from megatron.parallel.comm import Group, Pending
from megatron.parallel.grads import GradSink
from megatron.parallel.mesh import Mesh
from megatron.parallel.shard import ShardSpec

ALIGNMENT = 64
"""Elements: every parameter, and every data-parallel rank's equal part of a bucket, starts at a multiple."""


@dataclass
class Bucket:
    """One flat buffer.

    Attributes:
        buffer: ``[elements]``, at least fp32.
        offsets: first element of each parameter, by name.
        group: ranks over which it is summed.
        unfinished: parameters that expect more contributions.
        pending: the reduction, once started.
    """

    buffer: Tensor
    offsets: dict[str, int]
    group: Group
    unfinished: int = 0
    pending: Pending | None = None


class GradBuckets:
    """All main gradients of a rank.

    Attributes:
        grads: view of each parameter's gradient in its bucket, local stored shape, by name.
        buckets: in the order in which they are expected to be ready.
    """

    def __init__(
        self,
        specs: Mapping[str, ShardSpec],
        dtypes: Mapping[str, torch.dtype],
        mesh: Mesh,
        sink: GradSink,
        device: torch.device,
        bucket_size: int,
        overlap: bool,
    ) -> None:
        """Allocate the buckets and bind the sink to them.

        Args:
            specs: of all parameters, in the order in which forward uses them.
            dtypes: of the same parameters.
            mesh: the groups.
            sink: will write into the buckets.
            device: of the buffers.
            bucket_size: elements after which a bucket is full.
            overlap: reduce a bucket when it is ready, instead of all at the end.

        """
        self.specs, self.overlap = specs, overlap
        self.grads: dict[str, Tensor] = {}
        self.buckets: list[Bucket] = []
        self._bucket_of: dict[str, Bucket] = {}
        self._missing: dict[str, int] = {}
        for names in _partition(specs, dtypes, bucket_size):
            self._allocate(names, dtypes[names[0]], mesh.group(*specs[names[0]].reduce_axes), device)
        sink.bind(self.grads, self._contributed)

    def _allocate(self, names: list[str], dtype: torch.dtype, group: Group, device: torch.device) -> None:
        offsets, size = {}, 0
        for name in names:
            offsets[name] = size
            size += _aligned(self.specs[name])
        size = _round_up(size, ALIGNMENT * group.size)
        buffer = torch.zeros(size, dtype=torch.promote_types(dtype, torch.float32), device=device)
        bucket = Bucket(buffer, offsets, group)
        self.buckets.append(bucket)
        for name, offset in offsets.items():
            shape = self.specs[name].local_shape
            self.grads[name] = buffer[offset : offset + prod(shape)].view(shape)
            self._bucket_of[name] = bucket

    def start_step(self, microbatches: int) -> None:
        """Zero the gradients and expect this many micro-batches."""
        self._missing = {name: microbatches * spec.uses for name, spec in self.specs.items()}
        for bucket in self.buckets:
            bucket.buffer.zero_()
            bucket.pending, bucket.unfinished = None, len(bucket.offsets)

    def _contributed(self, name: str) -> None:
        self._missing[name] -= 1
        if self._missing[name] == 0:
            bucket = self._bucket_of[name]
            bucket.unfinished -= 1
            if bucket.unfinished == 0 and self.overlap:
                bucket.pending = comm.start_all_reduce(bucket.buffer, bucket.group)

    def finish(self) -> None:
        """Wait until every gradient is the sum over all data-parallel ranks.

        Raises:
            RuntimeError: when a parameter got fewer or more contributions than its spec says.

        """
        for name, missing in self._missing.items():
            if missing:
                raise RuntimeError(
                    f"the gradient of {name} misses {missing} contributions: the uses in its spec do not match what "
                    "its layer's backward adds"
                )
        for bucket in self.buckets:
            if bucket.pending is None:
                bucket.pending = comm.start_all_reduce(bucket.buffer, bucket.group)
        for bucket in self.buckets:
            if bucket.pending is not None:
                bucket.pending.wait()


def _aligned(spec: ShardSpec) -> int:
    return _round_up(prod(spec.local_shape), ALIGNMENT)


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def _partition(specs: Mapping[str, ShardSpec], dtypes: Mapping[str, torch.dtype], bucket_size: int) -> list[list[str]]:
    """Names per bucket: same dtype and reduction group, in reverse order of use, cut when full.

    A tied weight has a bucket of its own, so that the chunks which share it cut it alike.
    """
    buckets: list[list[str]] = []
    current: dict[tuple[torch.dtype, tuple[str, ...], bool], list[str]] = {}
    for name in reversed(list(specs)):
        key = (dtypes[name], specs[name].reduce_axes, specs[name].tied)
        names = current.get(key)
        if names is None or sum(_aligned(specs[n]) for n in names) >= bucket_size:
            names = current[key] = []
            buckets.append(names)
        names.append(name)
    return buckets
