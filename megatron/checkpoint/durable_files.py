"""Crash-safe files, and the exceptions of the checkpoint package.

Every write, rename and removal is flushed to disk with fsync, and any call may fail. Functions of ``os`` are called
by their full name, so that tests can inject a failure into each one. Exceptions are classified by how a caller can
recover: try an older checkpoint, wait for the store, update the program, or continue training without this save.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePath
from types import TracebackType
from typing import Self

import xxhash

from megatron.checkpoint.object_store import Location, RemoteFileWriter, RemotePath, is_permanent


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


Bytes = bytes | memoryview

BLOCK = 1 << 20
"""Bytes processed at a time; small enough to compute the checksum while they are in the processor's cache."""

UNSUPPORTED_ERRNO = (errno.EINVAL, errno.ENOTSUP)
"""Errno values of a file system that does not implement a call."""


def checksum(content: Bytes) -> str:
    """Return the 64-bit XXH3 of ``content`` as 16 hexadecimal digits."""
    return xxhash.xxh3_64_hexdigest(content)


class NewFile:
    """A file being written; creation fails if it already exists."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)

    def write(self, content: Bytes) -> None:
        """Append all of ``content``."""
        left = memoryview(content)
        with _with_filename(self._path):
            while left:
                left = left[os.write(self._fd, left) :]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the file; flush it to disk first unless an exception left it incomplete."""
        try:
            if kind is None:
                with _with_filename(self._path):
                    os.fsync(self._fd)
        finally:
            os.close(self._fd)


@contextmanager
def _with_filename(path: Path) -> Iterator[None]:
    """Add the file name to errors from calls that take a file descriptor."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def create_file(path: Location) -> NewFile | RemoteFileWriter:
    """Create a file on disk or an object in a store, open for writing."""
    return RemoteFileWriter(path) if isinstance(path, RemotePath) else NewFile(path)


def write_file(path: Location, content: Bytes) -> None:
    """Create a file with this content and flush it to disk."""
    if isinstance(path, RemotePath):
        path.write_bytes(content)
        return
    with NewFile(path) as file:
        file.write(content)


def sync_folder(path: Location) -> None:
    """Flush a folder's entries to disk where the file system supports it; object stores need no flush."""
    if isinstance(path, RemotePath):
        return
    fd = os.open(path, os.O_RDONLY)
    try:
        with _with_filename(path):
            os.fsync(fd)
    except OSError as error:
        if error.errno not in UNSUPPORTED_ERRNO:
            raise
    finally:
        os.close(fd)


def make_folder(path: Location) -> None:
    """Create a folder and its missing parents, and flush their names to disk; does nothing in an object store."""
    if isinstance(path, RemotePath):
        return
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    for folder in reversed(missing):
        with suppress(FileExistsError):  # created by another rank
            os.mkdir(folder)
        sync_folder(folder.parent)


def make_parent_folders(folder: Path, name: str) -> None:
    """Create the parent folders of the relative file name ``name`` below an existing ``folder``.

    Raises:
        OSError: if the disk fails or ``folder`` does not exist.
    """
    for parent in reversed(PurePath(name).parents):
        if parent.name and not (folder / parent).exists():
            with suppress(FileExistsError):  # created by another rank
                os.mkdir(folder / parent)
            sync_folder((folder / parent).parent)


def is_disk_full(error: OSError) -> bool:
    """Return True if the error means that the disk or quota is full."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def describe_os_error(error: OSError) -> str:
    """Return the text of a disk error for messages."""
    return "the disk is full" if is_disk_full(error) else error.strerror or str(error)


def storage_error(error: OSError, folder: Location, rank: int, older: Location | None = None) -> StorageError:
    """Return the error for a checkpoint that could not be written to ``folder``.

    Args:
        error: from the disk or the store.
        folder: of the checkpoint.
        rank: that failed.
        older: folder with earlier checkpoints of the run, to resume from when saving elsewhere; None if there are none.
    """
    fixes = [save_elsewhere_flags(older)]
    if is_disk_full(error):
        fixes = ["free some space", *fixes]
    if isinstance(folder, RemotePath):
        fixes = [_store_fix(error), *fixes]
    elif error.errno == errno.ENOENT:
        fixes = ["--save A_FOLDER_THAT_ALL_RANKS_SHARE"]
    sentence = f"{error.filename or folder}: {describe_os_error(error)} (rank {rank}); no checkpoint was written"
    return StorageError(sentence, *fixes)


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
