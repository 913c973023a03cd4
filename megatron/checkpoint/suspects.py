"""Checkpoints that a run must not resume from, because a corruption was found after they were saved.

``SAVE/corruption.json`` is written before anything else follows from the corruption. The next start, which holds the
lease, renames the checkpoints it names to ``suspect_N``, and then the file. Every step may be repeated after a crash.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from megatron.checkpoint.durable_files import durable_rename, publish_file
from megatron.checkpoint.publish import find_checkpoints
from megatron.config.errors import Problem, UserError
from megatron.config.files import parse_json, read_small

CORRUPTION_FILE = "corruption.json"


def record_corruption(save: Path, clean: int, found: int, sentence: str) -> None:
    """Record that checkpoints after step ``clean`` up to step ``found`` are suspect.

    Raises:
        OSError: if it cannot be written.
    """
    facts = {"clean": clean, "found": found, "sentence": sentence}
    publish_file(save / CORRUPTION_FILE, (json.dumps(facts, indent=1) + "\n").encode())


def read_corruption(save: Path) -> dict[str, Any] | None:
    """Return what :func:`record_corruption` has recorded and no start has settled; None for nothing.

    Raises:
        OSError: if the file cannot be read.
        ValueError: if it is no such record.
    """
    try:
        found = parse_json(read_small(save / CORRUPTION_FILE).decode())
    except FileNotFoundError:
        return None
    if not isinstance(found, dict) or {type(found.get(key)) for key in ("clean", "found")} != {int}:
        raise ValueError(f"{save / CORRUPTION_FILE} is no record of a corruption")
    return found


def rename_suspects(save: Path, policy: str) -> Sequence[str]:
    """Rename the suspect checkpoints of a folder whose lease this start holds; return notes.

    Args:
        save: the folder.
        policy: ``on_corruption``; ``stop`` refuses to resume.

    Raises:
        UserError: if the policy is to stop.
        OSError: if the disk fails.
    """
    record = read_corruption(save)
    if record is None:
        return ()
    clean, found = record["clean"], record["found"]
    if policy == "stop":
        sentence = (
            f"{save / CORRUPTION_FILE}: corruption was found in step {found}, and checkpoints after step {clean} are "
            f"suspect: {record.get('sentence', '')}"
        )
        fix = f"the same command with --on-corruption exclude, which resumes from step {clean} or before"
        raise UserError([Problem("E984", sentence, (fix,))])
    notes = []
    for iteration, path in find_checkpoints(save):
        if clean < iteration <= found and isinstance(path, Path):
            target = free_name(save, f"suspect_{iteration:07d}")
            durable_rename(path, target)
            notes.append(f"{path} is set aside as {target.name}: corruption was found in step {found}, later")
    durable_rename(save / CORRUPTION_FILE, free_name(save, f"corruption_{found:07d}.json"))
    return notes or [f"corruption was found in step {found}; no checkpoint after step {clean} has to be set aside"]


def free_name(folder: Path, name: str) -> Path:
    """Return a path in a folder that does not exist: the name, or with a number appended."""
    path, number = folder / name, 1
    with suppress(OSError):
        while path.exists() or path.is_symlink():
            number += 1
            path = folder / f"{name}.{number}"
    return path
