"""Crash-safe files: write, publish, rename and lock.

Every write, rename and removal is flushed to disk with fsync, and any call may raise OSError. A file or folder is
published by a rename, once it is complete and on disk under a temporary name. Functions of ``os`` are called by their
full name, so that tests can inject a failure into each one.
"""

from __future__ import annotations

import errno
import fcntl
import os
import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from enum import Enum
from pathlib import Path
from types import TracebackType
from typing import IO, NamedTuple, Self

import xxhash

from megatron.checkpoint.location import Location
from megatron.config.privacy import PRIVATE_FOLDER, private_mode, user_name

Bytes = bytes | memoryview

BLOCK = 1 << 20
"""Bytes processed at a time; small enough to compute the checksum while they are in the processor's cache."""

FLUSH_BYTES = 32 << 20
"""Bytes of a `FlushedFile` after which it is flushed."""

UNSUPPORTED_ERRNO = (errno.EINVAL, errno.ENOTSUP)
"""Errno values of a file system that does not implement a call."""


class Crc32:
    """The checksum of zip archives, which other programs store tensors in; as those of xxhash."""

    prefix = "crc32:"

    def __init__(self, value: int = 0) -> None:
        self._value = value

    def update(self, content: memoryview) -> None:
        """Continue with more bytes."""
        self._value = zlib.crc32(content, self._value)

    def hexdigest(self) -> str:
        """Return the checksum as text."""
        return f"{self.prefix}{self._value:08x}"


def checksum(content: Bytes) -> str:
    """Return the 64-bit XXH3 of ``content`` as 16 hexadecimal digits."""
    return xxhash.xxh3_64_hexdigest(content)


class NewFile:
    """A file being written; creation fails if it already exists."""

    def __init__(self, path: Path, mode: int = 0o666) -> None:
        self._path = path
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)

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


def write_file(path: Location, content: Bytes, mode: int = 0o666) -> None:
    """Create a file with this content and flush it to disk."""
    if not isinstance(path, Path):
        path.write_bytes(content)
        return
    with NewFile(path, mode) as file:
        file.write(content)


def sync_folder(path: Location) -> None:
    """Flush a folder's entries to disk where the file system supports it; object stores need no flush."""
    if not isinstance(path, Path):
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


def make_folder(path: Location, root: Path | None = None, private: bool = False) -> None:
    """Create a folder and its missing parents, and flush their names to disk; does nothing in an object store.

    Args:
        path: the folder.
        root: create only folders below this one.
        private: create them closed to other users, see `private_mode`.
    """
    if not isinstance(path, Path):
        return
    for folder in reversed((path, *path.parents)):
        if not folder.exists() and (root is None or root in folder.parents):
            with suppress(FileExistsError):  # created by another rank
                os.mkdir(folder, private_mode(folder.parent, PRIVATE_FOLDER) if private else 0o777)
            sync_folder(folder.parent)


def sync_file(file: IO[bytes]) -> None:
    """Flush a buffered file to disk."""
    file.flush()
    os.fsync(file.fileno())


class FlushedFile:
    """A file that is flushed to disk in a thread while it is written, so that little is left for the last flush."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._unflushed = 0  # bytes written since the last flush began
        self._thread: threading.Thread | None = None
        self._error: OSError | None = None

    def write(self, content: Bytes) -> None:
        """Append all of ``content``; raise the error of an earlier flush."""
        self._file.write(content)
        self._unflushed += memoryview(content).nbytes
        if self._unflushed >= FLUSH_BYTES and (self._thread is None or not self._thread.is_alive()):
            self.wait()
            self._unflushed = 0
            self._thread = threading.Thread(target=self._flush)
            self._thread.start()

    def wait(self) -> None:
        """Wait until no flush is running; raise its error, which the system reports only once."""
        if self._thread is not None:
            self._thread.join()
        if self._error is not None:
            raise self._error

    def _flush(self) -> None:
        try:
            with _with_filename(Path(str(self._file.name))):
                os.fsync(self._file.fileno())
        except OSError as error:
            self._error = error


def durable_rename(source: Path, target: Path) -> None:
    """Rename a file or folder that is already on disk, and flush the new name to disk; a target file is replaced."""
    os.rename(source, target)
    sync_folder(target.parent)


def publish_file(path: Path, content: Bytes) -> None:
    """Create or replace a file: it has either its old content or all of the new, even after a crash.

    After an OSError the old content is kept, unless only the last flush failed.
    """
    part = path.with_name(f"{path.name}.part")
    try:
        part.unlink(missing_ok=True)  # of an earlier process
        write_file(part, content)
        durable_rename(part, path)
    except OSError:
        with suppress(OSError):
            part.unlink(missing_ok=True)
        raise


def replace_file(path: Path, content: str) -> None:
    """Create or replace a small file that may be lost or cut off in a crash of the machine."""
    part = path.with_name(f"{path.name}.{os.urandom(4).hex()}.part")
    part.write_text(content)
    os.replace(part, path)


class LockState(Enum):
    """Result of `try_lock`."""

    ACQUIRED = "free"
    HELD = "held"  # by another open file, in this or another process
    UNSUPPORTED = "none"  # the file system has no locks


def try_lock(file: int | IO[bytes], shared: bool = False) -> LockState:
    """Lock an open file without blocking, until it is closed or the process ends, however it ends.

    The `filelock` package does not fit: it opens and truncates the file itself, has no shared locks, and where the
    file system has no locks it uses the existence of a file instead, which outlives a crash.

    Args:
        file: open file; it may be renamed while it is locked.
        shared: allow other shared locks, but no exclusive one.
    """
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return LockState.HELD
    except OSError as error:
        if error.errno not in (*UNSUPPORTED_ERRNO, errno.ENOSYS, errno.ENOLCK):
            raise
        return LockState.UNSUPPORTED
    return LockState.ACQUIRED


class LockHolder(NamedTuple):
    """A process on this machine that holds a lock."""

    process: int
    user: str

    def __str__(self) -> str:
        return f"process {self.process} of {self.user}"


LOCKS = Path("/proc/locks")


def lock_holder(path: Path) -> LockHolder | None:
    """Return the process that holds a lock on a file.

    None if this system does not know it: the process is on another machine or in another container, the file system
    has no device numbers of its own, or there is no ``/proc``.
    """
    with suppress(OSError, ValueError):
        file = os.stat(path)
        place = f"{os.major(file.st_dev):02x}:{os.minor(file.st_dev):02x}:{file.st_ino}"
        for line in LOCKS.read_text().splitlines():
            _, _, _, _, process, where, *_ = line.split()  # "1: FLOCK ADVISORY WRITE 4242 fe:00:1234 0 EOF"
            if where == place:
                return LockHolder(int(process), user_name(os.stat(f"/proc/{process}").st_uid))
    return None
