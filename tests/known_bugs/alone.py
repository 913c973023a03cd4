"""Detectors of one process: how far its result is from something independent."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from tests.cards.cell import largest
from tests.distributed.detect import Detector


def alone(function: Callable[..., float], *args: Any, within: float = 1e-9) -> Detector:
    """A detector of one rank, on which ``function(rank, world_size, *args)`` returns a relative distance.

    Args:
        function: returns the distance from the independent result.
        args: more of its arguments.
        within: largest distance that is right.
    """
    return Detector(1, function, args, partial(_are_within, within))


def _are_within(limit: float, ranks: Sequence[float]) -> bool:
    return all(distance <= limit for distance in ranks)


def distance(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """The largest distance of a tensor from its reference, relative to the norm of the largest reference."""
    scale = largest(float(tensor.norm()) for tensor in expected.values())
    return largest(float((found[name] - tensor).norm()) for name, tensor in expected.items()) / scale
