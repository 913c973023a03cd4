"""Names for datasets that nobody has named: short, and each another."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import PurePath

APART = r"[\s:/]+"
"""What parts names from one another where records, curves and folders are named after them."""


def unique_names(prefixes: Sequence[str]) -> tuple[str, ...]:
    """A name for each prefix: its last part, or as many of its last parts as tell all of them apart.

    What would be there twice gets a number, and what no name may hold becomes a ``-``.
    """
    paths = [PurePath(prefix) for prefix in prefixes]
    parts = [tuple(re.sub(APART, "-", part) for part in path.parts if part != path.anchor) for path in paths]
    lengths = range(1, max([1, *map(len, parts)]) + 1)
    tries = [["-".join(some[-length:]) for some in parts] for length in lengths]
    apart = len(set(parts))
    return tuple(_numbered(next((names for names in tries if len(set(names)) == apart), tries[-1])))


def _numbered(names: Iterable[str]) -> Iterator[str]:
    """The names, with a number behind those that were there before."""
    seen: set[str] = set()
    for name in names:
        unique, number = name, 2
        while unique in seen:
            unique, number = f"{name}-{number}", number + 1
        seen.add(unique)
        yield unique
