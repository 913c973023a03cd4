"""Crash-safe files: every write, rename and removal is flushed to disk with fsync, and any call may fail.

Functions are called as ``os.name`` so that tests can inject a failure into each one.
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

from megatron.checkpoint.errors import StorageError
from megatron.checkpoint.remote import Location, RemoteFile, RemotePath
from megatron.checkpoint.retries import is_lasting

Bytes = bytes | memoryview

BLOCK = 1 << 20
"""Bytes processed at a time; small enough to compute the checksum while they are in the processor's cache."""

UNSUPPORTED = (errno.EINVAL, errno.ENOTSUP)
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


def new_file(path: Location) -> NewFile | RemoteFile:
    """Create a file on disk or an object in a store, open for writing."""
    return RemoteFile(path) if isinstance(path, RemotePath) else NewFile(path)


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
        if error.errno not in UNSUPPORTED:
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


def make_folders_inside(folder: Path, name: str) -> None:
    """Create the parent folders of the relative file name ``name`` below an existing ``folder``.

    Raises:
        OSError: if the disk fails or ``folder`` does not exist.
    """
    for parent in reversed(PurePath(name).parents):
        if parent.name and not (folder / parent).exists():
            with suppress(FileExistsError):  # created by another rank
                os.mkdir(folder / parent)
            sync_folder((folder / parent).parent)


def is_full(error: OSError) -> bool:
    """Return True if the error means that the disk or quota is full."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def in_words(error: OSError) -> str:
    """Return the text of a disk error for messages."""
    return "the disk is full" if is_full(error) else error.strerror or str(error)


def refused(error: OSError, folder: Location, rank: int, older: Location | None = None) -> StorageError:
    """Return the error for a checkpoint that could not be written to ``folder``.

    Args:
        error: from the disk or the store.
        folder: of the checkpoint.
        rank: that failed.
        older: folder with earlier checkpoints of the run, to resume from when saving elsewhere; None if there are none.
    """
    fixes = [elsewhere(older)]
    if is_full(error):
        fixes = ["free some space", *fixes]
    if isinstance(folder, RemotePath):
        fixes = [_store_fix(error), *fixes]
    elif error.errno == errno.ENOENT:
        fixes = ["--save A_FOLDER_THAT_ALL_RANKS_SHARE"]
    sentence = f"{error.filename or folder}: {in_words(error)} (rank {rank}); no checkpoint was written"
    return StorageError(sentence, *fixes)


def _store_fix(error: OSError) -> str:
    """Return the fix for a failed write to an object store."""
    if error.errno == errno.ENOENT:
        return "create the bucket"
    if error.errno == errno.EACCES:
        return "give this process credentials with write access"
    return "check the store" if is_lasting(error) else "start again when the store answers"


def elsewhere(older: Location | None) -> str:
    """Return the flags that save to another folder and resume from the checkpoints in ``older``."""
    return ("" if older is None else f"--load {older} ") + "--save A_FOLDER_ELSEWHERE"
