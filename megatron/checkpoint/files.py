"""Files that outlast a crash: every byte, name and removal is asked of the disk, and each call can fail.

All calls go through ``os`` by name, so that a test can make any one of them the last.
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
"""Bytes moved at a time, so that the checksum is taken while they are in the processor's cache."""

UNSUPPORTED = (errno.EINVAL, errno.ENOTSUP)
"""What a file system answers to a call that it does not have."""


def checksum(content: Bytes) -> str:
    """XXH3 (64 bit) in 16 hexadecimal digits."""
    return xxhash.xxh3_64_hexdigest(content)


class NewFile:
    """A file being written; it must not exist yet."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)

    def write(self, content: Bytes) -> None:
        """Append all of ``content``."""
        left = memoryview(content)
        with _naming(self._path):
            while left:
                left = left[os.write(self._fd, left) :]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Make the content outlast a power cut, unless it is incomplete; close."""
        try:
            if kind is None:
                with _naming(self._path):
                    os.fsync(self._fd)
        finally:
            os.close(self._fd)


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Put the file's name into errors of calls that know only its number."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def new_file(path: Location) -> NewFile | RemoteFile:
    """A file or an object being written."""
    return RemoteFile(path) if isinstance(path, RemotePath) else NewFile(path)


def write_file(path: Location, content: Bytes) -> None:
    """A new file with this content, on the disk when the call returns."""
    if isinstance(path, RemotePath):
        path.write_bytes(content)
        return
    with NewFile(path) as file:
        file.write(content)


def sync_folder(path: Location) -> None:
    """Make the names in a folder outlast a power cut, where the file system knows how to; a store always does."""
    if isinstance(path, RemotePath):
        return
    fd = os.open(path, os.O_RDONLY)
    try:
        with _naming(path):
            os.fsync(fd)
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise
    finally:
        os.close(fd)


def make_folder(path: Location) -> None:
    """Create a folder and those around it; their names are on the disk when the call returns. A store has none."""
    if isinstance(path, RemotePath):
        return
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    for folder in reversed(missing):
        with suppress(FileExistsError):  # another rank was faster
            os.mkdir(folder)
        sync_folder(folder.parent)


def make_folders_inside(folder: Path, name: str) -> None:
    """Create what a file's name has of folders, inside of one that is there; it is not made where it is not.

    Raises:
        OSError: when the disk refuses, or ``folder`` is gone.
    """
    for parent in reversed(PurePath(name).parents):
        if parent.name and not (folder / parent).exists():
            with suppress(FileExistsError):  # another rank was faster
                os.mkdir(folder / parent)
            sync_folder((folder / parent).parent)


def is_full(error: OSError) -> bool:
    """Whether a disk says that it has no room left."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def in_words(error: OSError) -> str:
    """What a disk says."""
    return "the disk is full" if is_full(error) else error.strerror or str(error)


def refused(error: OSError, folder: Location, rank: int, older: Location | None = None) -> StorageError:
    """What to tell of a disk that refused while a checkpoint was written to ``folder``.

    Args:
        error: what it said.
        folder: of the checkpoint.
        rank: the one that met it.
        older: where the run's older checkpoints are, if it has any. A run that is begun elsewhere needs to be told.
    """
    fixes = [elsewhere(older)]
    if is_full(error):
        fixes = ["free some space", *fixes]
    if isinstance(folder, RemotePath):
        fixes = [_to_the_store(error), *fixes]
    elif error.errno == errno.ENOENT:
        fixes = ["--save A_FOLDER_THAT_ALL_RANKS_SHARE"]
    sentence = f"{error.filename or folder}: {in_words(error)} (rank {rank}); no checkpoint was written"
    return StorageError(sentence, *fixes)


def _to_the_store(error: OSError) -> str:
    """What helps against an object store's refusal."""
    if error.errno == errno.ENOENT:
        return "make the bucket"
    if error.errno == errno.EACCES:
        return "give this process credentials with which it may write there"
    return "look into the store" if is_lasting(error) else "start again when the store answers"


def elsewhere(older: Location | None) -> str:
    """The flags that save to another folder and go on from the checkpoints in ``older``."""
    return ("" if older is None else f"--load {older} ") + "--save A_FOLDER_ELSEWHERE"
