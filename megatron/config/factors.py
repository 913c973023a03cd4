"""``PATTERN=FACTOR``: what multiplies an option of some parameters."""

from __future__ import annotations

import math
from collections.abc import Iterable
from fnmatch import fnmatchcase


def read_factor(text: str) -> tuple[str, float]:
    """Pattern and factor of a text such as ``layers.*.bias=0.5``.

    Raises:
        ValueError: when it is none, in words that follow it.
    """
    pattern, equals, number = text.rpartition("=")
    if not (equals and pattern):
        raise ValueError("has no '=' between a pattern of parameter names and a factor")
    try:
        factor = float(number)
    except ValueError:
        raise ValueError(f"ends with '{number}', which is no number") from None
    if not (math.isfinite(factor) and factor >= 0):
        raise ValueError(f"has the factor {number}, which must be finite and at least 0")
    return pattern, factor


def factor_of(name: str, factors: Iterable[tuple[str, float]], default: float) -> float:
    """The factor of the last pattern, as of the shell, that matches a parameter's name."""
    found = default
    for pattern, factor in factors:
        if fnmatchcase(name, pattern):
            found = factor
    return found
