"""Short unique names for datasets without a name."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import PurePath

APART = r"[\s:/]+"
"""Characters that dataset names must not contain: they separate names in records, curves and folders."""


def unique_names(prefixes: Sequence[str]) -> tuple[str, ...]:
    """Return a unique name for each prefix: as few of its last path components as tell all prefixes apart.

    Equal names get a number; characters that names must not contain become ``-``.
    """
    paths = [PurePath(prefix) for prefix in prefixes]
    parts = [tuple(re.sub(APART, "-", part) for part in path.parts if part != path.anchor) for path in paths]
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
