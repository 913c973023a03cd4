"""Tensors of checkpoints in numbers: one summed up, two compared. Chunk by chunk, whatever their layouts were."""

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
"""Computed with at a time: the chunk they are from is in memory too."""


@dataclass(frozen=True)
class Summary:
    """Smallest and largest element, and the root of the mean square; NaN if any element is."""

    minimum: float
    maximum: float
    rms: float


@dataclass(frozen=True)
class Difference:
    """How two tensors differ.

    Attributes:
        identical: of the same type and equal to the bit.
        largest: greatest absolute difference of two elements.
        relative: norm of the difference over the norm of the first tensor.
    """

    identical: bool
    largest: float
    relative: float


def summarize(reader: CheckpointReader, name: str) -> Summary:
    """Sum up a tensor of at least one element.

    Raises:
        DamagedError: when it cannot be read as it was written.
    """
    minimum, maximum, squares, count = math.inf, -math.inf, 0.0, 0
    for box in _portions(reader, name):
        values = reader.read(name, box).double()
        low, high = values.aminmax()
        minimum, maximum = _extreme(min, minimum, low), _extreme(max, maximum, high)
        squares, count = squares + float(values.square().sum()), count + values.numel()
    return Summary(minimum, maximum, math.sqrt(squares / count) if count else 0.0)


def _extreme(choose: Callable[[float, float], float], a: float, b: Tensor) -> float:
    """The smaller or larger one, where Python's own would let a NaN pass or not by the order."""
    return math.nan if math.isnan(a) or bool(b.isnan()) else choose(a, float(b))


def difference(a: CheckpointReader, b: CheckpointReader, name: str) -> Difference:
    """Compare a tensor that both checkpoints have in the same shape and view.

    Raises:
        DamagedError: when one of them cannot be read as it was written.
    """
    identical, largest, squares, reference = a.dtype(name) == b.dtype(name), 0.0, 0.0, 0.0
    for box in _portions(a, name):
        x, y = a.read(name, box), b.read(name, box)
        reference += float(x.double().square().sum())
        if x.dtype == y.dtype and torch.equal(_bits(x), _bits(y)):
            continue
        identical = False
        delta = x.double() - y.double()
        largest = _extreme(max, largest, delta.abs().max())
        squares += float(delta.square().sum())
    return Difference(identical, largest, math.sqrt(squares / reference) if reference else math.sqrt(squares))


def _portions(reader: CheckpointReader, name: str) -> Iterator[Box]:
    """Boxes that make up a tensor, those of a chunk one after the other, so that it is read once."""
    for chunk in reader.manifest.tensors[name].chunks:
        yield from cut(chunk.box, ELEMENTS)


def _bits(x: Tensor) -> Tensor:
    return x.reshape(-1).view(torch.uint8)
