"""What goes wrong with checkpoints, by what can be done about it."""

from __future__ import annotations

from pathlib import Path


class CheckpointError(Exception):
    """A checkpoint, or what is asked of it, is wrong; the text says what was seen and how to mend it."""

    def __init__(self, seen: str, *fixes: str) -> None:
        super().__init__(seen + ("\n  fix: " + " | ".join(fixes) if fixes else ""))


class DamagedError(CheckpointError):
    """A checkpoint cannot be trusted: a part is missing, cut short or changed. Another one may be tried."""


class NewerVersionError(CheckpointError):
    """A checkpoint is of a version this program does not know."""


class StorageError(CheckpointError):
    """The disk refused while a checkpoint was written. Nothing was published, and training can go on."""


def within(folder: Path, problem: object) -> str:
    """What is wrong with a checkpoint, said where its folder has just been named: files by their names alone."""
    text = str(problem)
    for named in (f"{folder}/", f"{folder}: ", f"{folder} "):
        text = text.removeprefix(named)
    return text
