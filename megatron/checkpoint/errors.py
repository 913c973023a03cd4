"""Exceptions of the checkpoint package, by how a caller can recover.

Try an older checkpoint, wait for the store, update the program, or continue training without this save.
"""

from __future__ import annotations

import errno

from megatron.checkpoint.object_store import Location, RemotePath, is_permanent


class CheckpointError(Exception):
    """A checkpoint is invalid or does not fit its use; the message gives the reason and a fix."""

    def __init__(self, summary: str, *fixes: str) -> None:
        super().__init__(summary + ("\n  fix: " + " | ".join(fixes) if fixes else ""))


class DamagedCheckpointError(CheckpointError):
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


def read_error(path: Location, error: OSError, what: str = "") -> CheckpointError:
    """Return the error to raise for an unreadable checkpoint file: damage, or an unreachable object store."""
    summary = f"{path} cannot be read: {error.strerror}{what}"
    if not isinstance(path, RemotePath) or isinstance(error, FileNotFoundError):
        return DamagedCheckpointError(summary)
    if is_permanent(error):
        return UnreachableError(summary, "give this process the credentials that the store wants")
    return UnreachableError(summary, "start again when the store answers")


def strip_folder(folder: Location, problem: object) -> str:
    """Return the text of ``problem`` without a leading ``folder`` path, for messages that already name the folder."""
    text = str(problem)
    for prefix in (f"{folder}/", f"{folder}: ", f"{folder} "):
        text = text.removeprefix(prefix)
    return text


def is_disk_full(error: OSError) -> bool:
    """Return True if the error means that the disk or quota is full."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def describe_os_error(error: OSError) -> str:
    """Return the text of a disk error for messages."""
    return "the disk is full" if is_disk_full(error) else error.strerror or str(error)


def storage_error(
    error: OSError, folder: Location, rank: int, older: Location | None = None, local: bool = False
) -> StorageError:
    """Return the error for a checkpoint that could not be written to ``folder``.

    Args:
        error: from the disk or the store.
        folder: of the checkpoint.
        rank: that failed.
        older: folder with earlier checkpoints of the run, to resume from when saving elsewhere; None if there are none.
        local: True for a checkpoint on the nodes' own disks.
    """
    fixes = ["free some space"] if is_disk_full(error) else []
    if local:
        fixes.append("--local-save ELSEWHERE")
    elif isinstance(folder, RemotePath):
        fixes = [_store_fix(error), *fixes, save_elsewhere_flags(older)]
    elif error.errno == errno.ENOENT:
        fixes = ["--save A_FOLDER_THAT_ALL_RANKS_SHARE"]
    else:
        fixes.append(save_elsewhere_flags(older))
    what = "local checkpoint" if local else "checkpoint"
    where = f"{error.filename or folder}: {describe_os_error(error)} (rank {rank})"
    return StorageError(f"{where}; no {what} was written", *fixes)


def _store_fix(error: OSError) -> str:
    """Return the fix for a failed write to an object store."""
    if error.errno == errno.ENOENT:
        return "create the bucket"
    if error.errno == errno.EACCES:
        return "give this process credentials with write access"
    return "check the store" if is_permanent(error) else "start again when the store answers"


def save_elsewhere_flags(older: Location | None) -> str:
    """Return the flags that save to another folder and resume from the checkpoints in ``older``."""
    return ("" if older is None else f"--load {older} ") + "--save A_FOLDER_ELSEWHERE"
