"""Numbers as people write them, and numbers to offer in place of one that does not fit."""

from __future__ import annotations

import math
from collections.abc import Iterable


def text(number: float) -> str:
    """The shortest text that reads back as the same number."""
    short = f"{number:g}"
    return short if float(short) == number else repr(number).removesuffix(".0")


def format_bytes(count: float, *, binary: bool = False) -> str:
    """Format a number of bytes: ``812 bytes``, ``43.3 kB``, ``1.2 MB``, ``3.0 GB``, in powers of 1000.

    With ``binary``, as memory is measured, in 2^20 and 2^30 bytes: ``12.50 MiB``, ``1.87 GiB``.
    """
    if binary:
        unit, name = (2**30, "GiB") if count >= 0.1 * 2**30 else (2**20, "MiB")
        return f"{count / unit:,.2f} {name}"
    if count < 1000:
        return f"{round(count)} byte{'' if round(count) == 1 else 's'}"
    for name in ("kB", "MB"):
        count /= 1000
        if count < 999.95:
            return f"{count:.1f} {name}"
    return f"{count / 1000:,.1f} GB"


def beside(value: int, among: Iterable[int]) -> list[int]:
    """The nearest of some numbers below ``value`` and the nearest above it."""
    numbers = sorted(among)
    return [*[n for n in numbers if n < value][-1:], *[n for n in numbers if n > value][:1]]


def multiples_beside(value: int, of: int) -> list[int]:
    """The nearest positive multiples of ``of`` below and above ``value``."""
    return beside(value, (n for n in (value // of * of, (value // of + 1) * of, (-(-value // of) - 1) * of) if n > 0))


MOST_TRIED = 1_000_000  # numbers: a mistyped one of 30 digits must be answered too


def divisors(of: int) -> list[int]:
    """All divisors, ascending; of numbers above `MOST_TRIED` squared only those that pair with a smaller one."""
    small = [d for d in range(1, min(math.isqrt(of), MOST_TRIED) + 1) if of % d == 0]
    return sorted({*small, *(of // d for d in small)})


def offers(flag: str, numbers: Iterable[int]) -> tuple[str, ...]:
    """One fix for each number."""
    return tuple(f"{flag} {n}" for n in numbers)
