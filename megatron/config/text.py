"""Number formatting, numbers to suggest in fixes, unique dataset names, and factors of parameter patterns."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import PurePath


def format_number(number: float) -> str:
    """Return the shortest text that reads back as the same number."""
    short = f"{number:g}"
    return short if float(short) == number else repr(number).removesuffix(".0")


def format_bytes(count: float) -> str:
    """Format a number of bytes in powers of 1024: ``812 bytes``, ``43.30 KiB``, ``12.50 MiB``, ``1.87 GiB``."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if count >= unit:
            return f"{count / unit:,.2f} {name}"
    return f"{round(count)} byte{'' if round(count) == 1 else 's'}"


def nearest(value: int, among: Iterable[int]) -> list[int]:
    """Return the nearest of ``among`` below ``value`` and the nearest above it."""
    numbers = sorted(among)
    return [*[n for n in numbers if n < value][-1:], *[n for n in numbers if n > value][:1]]


def nearest_multiples(value: int, of: int) -> list[int]:
    """Return the nearest positive multiples of ``of`` below and above ``value``."""
    return nearest(value, (n for n in (value // of * of, (value // of + 1) * of, (-(-value // of) - 1) * of) if n > 0))


MAX_TRIED = 1_000_000  # trial divisors; bounds the time for a mistyped number of 30 digits


def divisors(of: int) -> list[int]:
    """Return all divisors, ascending; above ``MAX_TRIED`` squared only those that pair with a smaller one."""
    small = [d for d in range(1, min(math.isqrt(of), MAX_TRIED) + 1) if of % d == 0]
    return sorted({*small, *(of // d for d in small)})


def flag_fixes(flag: str, numbers: Iterable[int]) -> tuple[str, ...]:
    """Return one fix for each number."""
    return tuple(f"{flag} {n}" for n in numbers)


NAME_SEPARATORS = r"[\s:/]+"
"""Characters that dataset names must not contain: they separate names in records, curves and folders."""


def unique_names(prefixes: Sequence[str]) -> tuple[str, ...]:
    """Return a unique name for each prefix: as few of its last path components as tell all prefixes apart.

    Equal names get a number; characters that names must not contain become ``-``.
    """
    paths = [PurePath(prefix) for prefix in prefixes]
    parts = [tuple(re.sub(NAME_SEPARATORS, "-", part) for part in path.parts if part != path.anchor) for path in paths]
    lengths = range(1, max([1, *map(len, parts)]) + 1)
    candidates = [["-".join(path_parts[-length:]) for path_parts in parts] for length in lengths]
    distinct = len(set(parts))
    return tuple(_numbered(next((names for names in candidates if len(set(names)) == distinct), candidates[-1])))


def _numbered(names: Iterable[str]) -> Iterator[str]:
    """Append a number to names that occurred before."""
    seen: set[str] = set()
    for name in names:
        unique, number = name, 2
        while unique in seen:
            unique, number = f"{name}-{number}", number + 1
        seen.add(unique)
        yield unique


def parse_factor(text: str) -> tuple[str, float]:
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


def matching_factor(name: str, factors: Iterable[tuple[str, float]], default: float) -> float:
    """Return the factor of the last shell pattern that matches a parameter's name, or the default."""
    found = default
    for pattern, factor in factors:
        if fnmatchcase(name, pattern):
            found = factor
    return found
