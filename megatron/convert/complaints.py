"""What is wrong with a set of tensors, told at once and by name."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

from megatron.checkpoint.errors import CheckpointError

SHOWN = 8


def refuse(where: Path, complaints: Mapping[str, Collection[str]], *fixes: str) -> None:
    """Say which names each complaint is about; nothing when no complaint has any.

    Raises:
        CheckpointError: ``where lacks: a, b; it holds: c``.
    """
    said = [f"{what}: {some(sorted(names))}" for what, names in complaints.items() if names]
    if said:
        raise CheckpointError(f"{where} {'; it '.join(said)}", *fixes)


def some(names: Collection[str]) -> str:
    """The first names, and how many more there are."""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(list(names)[:SHOWN]) + more
