"""Exceptions of the checkpoint package, classified by how a caller can recover."""

from __future__ import annotations

from megatron.checkpoint.remote import Location, RemotePath
from megatron.checkpoint.retries import is_lasting


class CheckpointError(Exception):
    """A checkpoint is invalid or does not fit its use; the message gives the reason and a fix."""

    def __init__(self, summary: str, *fixes: str) -> None:
        super().__init__(summary + ("\n  fix: " + " | ".join(fixes) if fixes else ""))


class DamagedError(CheckpointError):
    """A checkpoint is missing a file, truncated or corrupted; an older checkpoint may be used instead."""


class UnreachableError(CheckpointError):
    """An object store does not answer or denies access.

    Its checkpoints may be intact, so loading does not fall back to an older one.
    """


class NewerVersionError(CheckpointError):
    """A checkpoint was written in a newer format version than this program supports."""


class StorageError(CheckpointError):
    """Writing a checkpoint failed. Nothing was published, and training can continue."""


class SupersededError(CheckpointError):
    """A later start of the run holds the checkpoint folder; this process must stop writing and exit."""


def unreadable(path: Location, error: OSError, what: str = "") -> CheckpointError:
    """Return the error to raise for an unreadable checkpoint file: damage, or an unreachable object store."""
    summary = f"{path} cannot be read: {error.strerror}{what}"
    if not isinstance(path, RemotePath) or isinstance(error, FileNotFoundError):
        return DamagedError(summary)
    if is_lasting(error):
        return UnreachableError(summary, "give this process the credentials that the store wants")
    return UnreachableError(summary, "start again when the store answers")


def within(folder: Location, problem: object) -> str:
    """Return the text of ``problem`` without a leading ``folder`` path, for messages that already name the folder."""
    text = str(problem)
    for prefix in (f"{folder}/", f"{folder}: ", f"{folder} "):
        text = text.removeprefix(prefix)
    return text
