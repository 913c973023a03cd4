"""Views of parameters in flat buffers with the layout of a bucket, and flat views of tensors that are neighbours."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from torch import Tensor

from megatron.distributed.param_layout import Packing, ParamShard
from megatron.distributed.sharding import ShardSpec


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
