"""User-facing errors, and the parts of their texts: formatted numbers, and values to suggest.

A ``Problem`` has a code, a sentence and fixes to paste; ``UserError`` reports all problems at once. Each code has a
section in docs/troubleshooting.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches


@dataclass(frozen=True)
class Problem:
    """One error in a command line, file or configuration."""

    code: str  # ``E`` and three digits; docs/troubleshooting.md has a section on each
    sentence: str  # what is wrong, and the rule
    fixes: tuple[str, ...] = ()  # alternatives to paste into the command

    def __str__(self) -> str:
        text = f"{self.code} {self.sentence}"
        return f"{text}\n  fix: {' | '.join(self.fixes)}" if self.fixes else text


class UserError(ValueError):
    """All problems of a request; ``str()`` is the message for the user."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        """Store one or more problems."""
        self.problems = tuple(problems)
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        closing = f"{count}; docs/troubleshooting.md explains the codes"
        super().__init__("\n".join([*map(str, problems), closing]))

    def __reduce__(self) -> tuple[type[UserError], tuple[tuple[Problem, ...]]]:
        """Pickle by the problems, not by the message."""
        return type(self), (self.problems,)


def did_you_mean(word: str, known: Iterable[str]) -> str | None:
    """Return the known word closest to a misspelt ``word``, or None."""
    return next(iter(get_close_matches(word, list(known), n=1, cutoff=0.72)), None)


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
