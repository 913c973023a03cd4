"""Leases on a folder of checkpoints: which start holds the folder, and how it detects that it was superseded.

See :mod:`megatron.checkpoint.folder` for the protocol.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import secrets
import shutil
import socket
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from megatron.checkpoint.errors import SupersededError
from megatron.checkpoint.files import UNSUPPORTED, make_folder, sync_folder
from megatron.checkpoint.remote import Location, RemotePath
from megatron.checkpoint.workshops import workshop, workshops
from megatron.config.launch import Start
from megatron.config.problems import Problem

CLAIM = "claim.json"
"""The lease file: in the staging folder of the start on disk, in the checkpoint folder itself in an object store."""

NO_LOCKS = (*UNSUPPORTED, errno.ENOSYS, errno.ENOLCK)
"""Errno values of a file system without locks."""

TOO_LATE = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT)
"""Errno values meaning that another process took this epoch first, or a later start removed this one."""


@dataclass(frozen=True)
class Holder:
    """The process that holds a lease."""

    start: Start  # start and job that the process belongs to
    host: str = field(default_factory=socket.gethostname)  # name of the machine
    pid: int = field(default_factory=os.getpid)
    since: float = field(default_factory=time.time)  # seconds since 1970
    token: str = field(default_factory=lambda: secrets.token_hex(6))  # unique to this process

    def __str__(self) -> str:
        start = f" ({self.start})" if str(self.start) else ""
        since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(self.since))
        return f"process {self.pid} on {self.host}{start} since {since}"


@dataclass(frozen=True)
class Claim:
    """The right to write checkpoints to a folder; ends when a later start acquires it."""

    folder: Location  # of the checkpoints
    epoch: int  # number of this start among all that have used the folder, from 1
    holder: Holder
    notes: tuple[str, ...] = ()  # on what was found in the folder when the lease was acquired

    @property
    def staging(self) -> Path | None:
        """Staging folder in which checkpoints are written; None in an object store."""
        return None if isinstance(self.folder, RemotePath) else workshop(self.folder, self.epoch)

    @property
    def text(self) -> bytes:
        """Content of the lease file."""
        return json.dumps({"epoch": self.epoch, **asdict(self.holder)}, indent=1).encode() + b"\n"

    def check(self) -> None:
        """Check that no later start holds the folder.

        In an object store, which has no staging folder, call this immediately before every change.

        Raises:
            SupersededError: if a later start holds the folder.
            OSError: if the disk or the store fails.
        """
        if isinstance(self.folder, RemotePath):
            other = stored(self.folder)
        else:
            other = None if self._owns_staging_folder(self.folder) else newest(self.folder)
        if other is not None and other.holder.token != self.holder.token:
            message = (
                f"start {self.epoch} of the run in {self.folder} is superseded by start {other.epoch}, "
                f"of {other.holder}; this start stops writing and exits"
            )
            raise SupersededError(str(Problem("E817", message)))

    def ready(self) -> None:
        """Check the lease before a save, and recreate the staging folder if it was deleted.

        Raises:
            SupersededError: if a later start holds the folder.
            OSError: if the disk or the store fails.
        """
        self.check()
        if not isinstance(self.folder, RemotePath) and not self._owns_staging_folder(self.folder):
            make_folder(self.folder)
            put(self, self.folder)  # the lock is kept until the process ends
            self.check()

    def _owns_staging_folder(self, folder: Path) -> bool:
        """Return True if the staging folder exists and is this start's; a deleted epoch may have been reused."""
        staging = workshop(folder, self.epoch)
        try:
            token = parse((staging / CLAIM).read_bytes())[1].token
        except OSError:  # the lease file or the whole folder was deleted
            return staging.is_dir()
        return token in ("", self.holder.token)


@dataclass(frozen=True)
class Claims:
    """The leases of a start."""

    save: Claim | None = None  # on the ``--save`` folder
    node: Claim | None = None  # on the folder of this rank's node

    @property
    def notes(self) -> list[str]:
        """Notes of both leases."""
        return [note for claim in (self.save, self.node) if claim is not None for note in claim.notes]

    def look(self) -> None:
        """Check the lease of the ``--save`` folder if it is on disk, where that takes a single call.

        Raises:
            SupersededError: if a later start holds the folder.
            OSError: if the disk fails.
        """
        if self.save is not None and self.save.staging is not None:
            self.save.check()


def shop_of(claim: Claim | None) -> Path | None:
    """Return the staging folder of a lease; None without a lease and in an object store."""
    return claim.staging if claim is not None else None


def blame(claim: Claim | None) -> None:
    """Raise SupersededError if a later start holds the folder; ignore I/O errors.

    Called after another failure, to find out whether losing the lease was its cause.

    Raises:
        SupersededError: if a later start holds the folder.
    """
    if claim is not None:
        with suppress(OSError):
            claim.check()


def put(claim: Claim, folder: Path) -> int | None:
    """Create the staging folder of a start with its lease file.

    Returns:
        The open, locked lease file; None if another start was first.

    Raises:
        OSError: if the disk fails.
    """
    target = workshop(folder, claim.epoch)
    draft = target.with_name(f"{target.name}.{claim.holder.token}")
    os.mkdir(draft)
    file = os.open(draft / CLAIM, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        lock(file)
        os.write(file, claim.text)
        os.fsync(file)
        os.rename(draft, target)
        sync_folder(folder)
        if max(epoch for epoch, _ in workshops(folder)) == claim.epoch:
            return file
        shutil.rmtree(target)  # delayed for so long that a later start exists
    except OSError as error:
        shutil.rmtree(draft, ignore_errors=True)
        if error.errno not in TOO_LATE:
            os.close(file)
            raise
    os.close(file)
    return None


def lock(file: int, how: int = fcntl.LOCK_EX) -> bool:
    """Lock an open file without blocking; return False if another process holds it, True if there are no locks.

    Raises:
        OSError: if the disk fails.
    """
    try:
        fcntl.flock(file, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
    return True


def newest(folder: Path) -> Claim | None:
    """Return the lease of the latest start in a folder on disk; None if there was none.

    Raises:
        OSError: if the disk fails.
    """
    found = workshops(folder)
    if not found:
        return None
    epoch, staging = found[-1]
    text = b""
    with suppress(FileNotFoundError):
        text = (staging / CLAIM).read_bytes()
    return Claim(folder, epoch, parse(text)[1])


def stored(folder: RemotePath) -> Claim | None:
    """Return the lease in a folder of an object store; None if there is none.

    Raises:
        OSError: if the store fails or does not answer.
    """
    try:
        epoch, holder = parse((folder / CLAIM).read_bytes())
    except FileNotFoundError:
        return None
    return Claim(folder, epoch, holder)


def parse(text: bytes) -> tuple[int, Holder]:
    """Parse a lease file to epoch and holder; epoch 0 and an unknown holder if it is invalid."""
    try:
        data = json.loads(text)
        start = Start(**_known(data["start"], Start))
        return int(data["epoch"]), Holder(**{**_known(data, Holder), "start": start})
    except (ValueError, KeyError, TypeError, AttributeError):
        return 0, Holder(Start(), host="an unknown machine", pid=0, since=0.0, token="")


def _known(data: dict[str, Any], kind: type[Any]) -> dict[str, Any]:
    """Return the values whose names are fields of ``kind`` in this version."""
    return {name: value for name, value in data.items() if name in {f.name for f in fields(kind)}}
