"""``PATTERN=FACTOR`` arguments, which scale an option for parameters whose names match."""

from __future__ import annotations

import math
from collections.abc import Iterable
from fnmatch import fnmatchcase


def read_factor(text: str) -> tuple[str, float]:
    """Parse a text such as ``layers.*.bias=0.5`` into pattern and factor.

    Raises:
        ValueError: with a message that completes a sentence that begins with the text.
    """
    pattern, equals, number = text.rpartition("=")
    if not (equals and pattern):
        raise ValueError("has no '=' between a pattern of parameter names and a factor")
    try:
        factor = float(number)
    except ValueError:
        raise ValueError(f"ends with '{number}', which is not a number") from None
    if not (math.isfinite(factor) and factor >= 0):
        raise ValueError(f"has the factor {number}, which must be finite and at least 0")
    return pattern, factor


def factor_of(name: str, factors: Iterable[tuple[str, float]], default: float) -> float:
    """Return the factor of the last shell pattern that matches a parameter's name, or the default."""
    found = default
    for pattern, factor in factors:
        if fnmatchcase(name, pattern):
            found = factor
    return found
