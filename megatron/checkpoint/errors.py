"""What goes wrong with checkpoints, by what can be done about it."""

from __future__ import annotations

from megatron.checkpoint.remote import Location, RemotePath
from megatron.checkpoint.retries import is_lasting


class CheckpointError(Exception):
    """A checkpoint, or what is asked of it, is wrong; the text says what was seen and how to mend it."""

    def __init__(self, seen: str, *fixes: str) -> None:
        super().__init__(seen + ("\n  fix: " + " | ".join(fixes) if fixes else ""))


class DamagedError(CheckpointError):
    """A checkpoint cannot be trusted: a part is missing, cut short or changed. Another one may be tried."""


class UnreachableError(CheckpointError):
    """An object store does not answer, or not to us. What it holds may be whole: an older one is no substitute."""


class NewerVersionError(CheckpointError):
    """A checkpoint is of a version this program does not know."""


class StorageError(CheckpointError):
    """The disk refused while a checkpoint was written. Nothing was published, and training can go on."""


class SupersededError(CheckpointError):
    """A later start of the run has its folder of checkpoints. Nothing of this one may be written, and it has to end."""


def unreadable(path: Location, error: OSError, what: str = "") -> CheckpointError:
    """What it means that a file of a checkpoint could not be read: damage, unless it is the way there that is."""
    seen = f"{path} cannot be read: {error.strerror}{what}"
    if not isinstance(path, RemotePath) or isinstance(error, FileNotFoundError):
        return DamagedError(seen)
    if is_lasting(error):
        return UnreachableError(seen, "give this process the credentials that the store wants")
    return UnreachableError(seen, "start again when the store answers")


def within(folder: Location, problem: object) -> str:
    """What is wrong with a checkpoint, said where its folder has just been named: files by their names alone."""
    text = str(problem)
    for named in (f"{folder}/", f"{folder}: ", f"{folder} "):
        text = text.removeprefix(named)
    return text
