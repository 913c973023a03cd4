"""One run at a time in a ``--save`` folder: two would remove what the other is writing.

The lock is the kernel's (``flock``), so it goes with the process, however that ends. It reaches as far as the file
system takes it: over all machines on most network file systems, and nowhere on those that have no locks at all.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager

from megatron.checkpoint.errors import CheckpointError, StorageError
from megatron.checkpoint.files import UNSUPPORTED, elsewhere, make_folder
from megatron.checkpoint.folder import Checkpoints
from megatron.checkpoint.remote import Location, RemotePath

LOCK = ".lock"

NO_LOCKS = (*UNSUPPORTED, errno.ENOSYS, errno.ENOLCK)
"""What a file system answers that has no locks."""


@contextmanager
def hold(folder: Location, flag: str = "--save") -> Iterator[None]:
    """Be the only one who writes checkpoints to ``folder``, which is made if need be; by one process of a run.

    Where the file system has no locks, nothing is held and nothing is refused; object stores have none. Errors are
    mended by ``flag``.

    Raises:
        CheckpointError: when another process holds it.
        StorageError: when nothing can be written to the folder.
    """
    if isinstance(folder, RemotePath):
        _leave_a_note(folder, flag)
        yield
        return
    try:
        make_folder(folder)
        file = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise _refused(error, folder, flag) from error
    try:
        _take(file, folder, flag)
        yield
    finally:
        os.close(file)


def _leave_a_note(folder: RemotePath, flag: str) -> None:
    """Say in an object store who writes there, which shows too that it can be written to."""
    try:
        (folder / LOCK).write_bytes(_name())
    except OSError as error:
        raise _refused(error, folder, flag) from error


def _name() -> bytes:
    return f"process {os.getpid()} on {socket.gethostname()}\n".encode()


def _take(file: int, folder: Location, flag: str) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise CheckpointError(f"{folder} is in use by {_holder(file)}", f"{flag} ANOTHER") from error
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise _refused(error, folder, flag) from error
    try:
        os.ftruncate(file, 0)
        os.write(file, _name())
    except OSError as error:
        raise _refused(error, folder, flag) from error


def _holder(file: int) -> str:
    """Who wrote last into the lock; whoever took it this instant may not have yet."""
    return os.pread(file, 500, 0).decode(errors="replace").strip() or "another process"


def _refused(error: OSError, folder: Location, flag: str) -> StorageError:
    where = error.filename or folder / LOCK
    fix = elsewhere(Checkpoints(folder).to_go_on_from()) if flag == "--save" else f"{flag} ANOTHER"
    return StorageError(f"{where}: {error.strerror}; no checkpoint can be written to {folder}", fix)
