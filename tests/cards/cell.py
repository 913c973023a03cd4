"""What a cell of a card is: one comparison, its bounds, and the code that it covers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.cards.card import Card
from tests.kit.pool import Pool

Measures = dict[str, float | str]
"""What was measured, by name: numbers, or words."""


@dataclass(frozen=True)
class Cell:
    """One comparison of a card.

    Attributes:
        measure: does it in an empty folder; several ranks are those of the pool.
        about: what is compared with what, for the page.
        bounds: the largest value of a measure with which the cell passes; others are shown only.
        covers: files and folders whose change makes a result older than the code.
        missing: why it cannot be measured here, empty if it can.
        optional: measures with a bound that some cards do not have.
    """

    measure: Callable[[Card, Path, Pool], Measures]
    about: str
    bounds: Mapping[str, float]
    covers: tuple[str, ...]
    missing: Callable[[], str] = field(default=lambda: "")
    optional: tuple[str, ...] = ()

    def failure(self, found: Measures) -> str:
        """The first measure that exceeds its bound, in words; empty if none does."""
        for name, bound in self.bounds.items():
            if name not in found and name not in self.optional:
                return f"{name} was not measured"
            value = found.get(name, 0)
            if isinstance(value, str) or not value <= bound:  # NaN exceeds too
                return f"{name} is {value}, more than {bound:g}"
        return ""


def largest(values: Iterable[float]) -> float:
    """The largest value, or NaN if one is NaN, which ``max`` passes over."""
    held = [*values]
    return math.nan if any(map(math.isnan, held)) else max(held)


class CardError(Exception):
    """A comparison that has no number, such as tensors that are missing."""
