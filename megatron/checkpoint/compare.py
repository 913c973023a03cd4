"""Statistics of checkpoint tensors: summarise one, or compare two. Works chunk by chunk, independent of the layouts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.checkpoint.boxes import cut
from megatron.checkpoint.reader import CheckpointReader
from megatron.parallel.shard import Box

ELEMENTS = 1 << 20
"""Elements computed with at a time, in addition to the chunk in memory."""


@dataclass(frozen=True)
class Summary:
    """Statistics of a tensor; NaN if any element is."""

    minimum: float
    maximum: float
    rms: float


@dataclass(frozen=True)
class Difference:
    """Difference between two tensors."""

    identical: bool  # same type and bitwise equal
    largest: float  # maximum absolute difference of two elements
    relative: float  # norm of the difference over the norm of the first tensor


def summarize(reader: CheckpointReader, name: str) -> Summary:
    """Summarise a tensor of at least one element.

    Raises:
        DamagedError: if it is missing or a checksum differs.
    """
    minimum, maximum, squares, count = math.inf, -math.inf, 0.0, 0
    for box in _small_boxes(reader, name):
        values = reader.read(name, box).double()
        low, high = values.aminmax()
        minimum, maximum = _extreme(min, minimum, low), _extreme(max, maximum, high)
        squares, count = squares + float(values.square().sum()), count + values.numel()
    return Summary(minimum, maximum, math.sqrt(squares / count) if count else 0.0)


def _extreme(choose: Callable[[float, float], float], a: float, b: Tensor) -> float:
    """Apply min or max and propagate NaN, which Python's own do depending on the order of arguments."""
    return math.nan if math.isnan(a) or bool(b.isnan()) else choose(a, float(b))


def difference(a: CheckpointReader, b: CheckpointReader, name: str) -> Difference:
    """Compare a tensor that has the same shape and view in both checkpoints.

    Raises:
        DamagedError: if it is missing or a checksum differs in one of them.
    """
    identical, largest, squares, reference = a.dtype(name) == b.dtype(name), 0.0, 0.0, 0.0
    for box in _small_boxes(a, name):
        x, y = a.read(name, box), b.read(name, box)
        reference += float(x.double().square().sum())
        if x.dtype == y.dtype and torch.equal(_bits(x), _bits(y)):
            continue
        identical = False
        delta = x.double() - y.double()
        largest = _extreme(max, largest, delta.abs().max())
        squares += float(delta.square().sum())
    return Difference(identical, largest, math.sqrt(squares / reference) if reference else math.sqrt(squares))


def _small_boxes(reader: CheckpointReader, name: str) -> Iterator[Box]:
    """Yield boxes that partition a tensor, grouped by chunk so that each chunk is read once."""
    for chunk in reader.manifest.tensors[name].chunks:
        yield from cut(chunk.box, ELEMENTS)


def _bits(x: Tensor) -> Tensor:
    return x.reshape(-1).view(torch.uint8)
