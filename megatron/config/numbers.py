"""Formatting of numbers, and numbers to suggest in place of one that does not fit."""

from __future__ import annotations

import math
from collections.abc import Iterable


def text(number: float) -> str:
    """Return the shortest text that reads back as the same number."""
    short = f"{number:g}"
    return short if float(short) == number else repr(number).removesuffix(".0")


def beside(value: int, among: Iterable[int]) -> list[int]:
    """Return the nearest of ``among`` below ``value`` and the nearest above it."""
    numbers = sorted(among)
    return [*[n for n in numbers if n < value][-1:], *[n for n in numbers if n > value][:1]]


def multiples_beside(value: int, of: int) -> list[int]:
    """Return the nearest positive multiples of ``of`` below and above ``value``."""
    return beside(value, (n for n in (value // of * of, (value // of + 1) * of, (-(-value // of) - 1) * of) if n > 0))


MAX_TRIED = 1_000_000  # trial divisors; bounds the time for a mistyped number of 30 digits


def divisors(of: int) -> list[int]:
    """Return all divisors, ascending; above ``MAX_TRIED`` squared only those that pair with a smaller one."""
    small = [d for d in range(1, min(math.isqrt(of), MAX_TRIED) + 1) if of % d == 0]
    return sorted({*small, *(of // d for d in small)})


def offers(flag: str, numbers: Iterable[int]) -> tuple[str, ...]:
    """Return one fix for each number."""
    return tuple(f"{flag} {n}" for n in numbers)
