"""Leases on a folder of checkpoints: the right of one start of a run to write to it.

The lease file lies in the staging folder of the start that holds it. A start whose staging folder is gone is
superseded and exits. :mod:`megatron.checkpoint.fencing` describes the protocol.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import shutil
import socket
import time
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from megatron.checkpoint.durable_files import durable_rename, make_folder, try_lock, write_file
from megatron.checkpoint.errors import SupersededError
from megatron.checkpoint.object_store import Location, RemotePath
from megatron.checkpoint.publish import staging_folder, staging_folders
from megatron.config.errors import Problem
from megatron.config.launch import JobStart

LEASE_FILE = "claim.json"
"""The lease file: in the staging folder of the start on disk, in the checkpoint folder itself in an object store."""

LOST_RACE_ERRNO = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOENT)
"""Errno values meaning that another process took this epoch first, or a later start removed this one."""


@dataclass(frozen=True)
class LeaseHolder:
    """The process that holds a lease."""

    start: JobStart  # start and job that the process belongs to
    host: str = field(default_factory=socket.gethostname)  # name of the machine
    pid: int = field(default_factory=os.getpid)
    since: float = field(default_factory=time.time)  # seconds since 1970
    token: str = field(default_factory=lambda: secrets.token_hex(6))  # unique to this process

    def __str__(self) -> str:
        start = f" ({self.start})" if str(self.start) else ""
        since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(self.since))
        return f"process {self.pid} on {self.host}{start} since {since}"


@dataclass(frozen=True)
class Lease:
    """The right to write checkpoints to a folder; ends when a later start acquires it."""

    folder: Location  # of the checkpoints
    epoch: int  # number of this start among all that have used the folder, from 1
    holder: LeaseHolder
    notes: tuple[str, ...] = ()  # on what was found in the folder when the lease was acquired

    @property
    def staging(self) -> Path | None:
        """Staging folder in which checkpoints are written; None in an object store."""
        return None if isinstance(self.folder, RemotePath) else staging_folder(self.folder, self.epoch)

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
            other = stored_lease(self.folder)
        else:
            other = None if self._owns_staging_folder(self.folder) else newest_lease(self.folder)
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
            create_staging_folder(self, self.folder)  # the lock is kept until the process ends
            self.check()

    def _owns_staging_folder(self, folder: Path) -> bool:
        """Return True if the staging folder exists and is this start's; a deleted epoch may have been reused."""
        staging = staging_folder(folder, self.epoch)
        try:
            token = parse_lease((staging / LEASE_FILE).read_bytes())[1].token
        except OSError:  # the lease file or the whole folder was deleted
            return staging.is_dir()
        return token in ("", self.holder.token)


@dataclass(frozen=True)
class Leases:
    """The leases of a start."""

    save: Lease | None = None  # on the ``--save`` folder
    node: Lease | None = None  # on the folder of this rank's node

    @property
    def notes(self) -> list[str]:
        """Notes of both leases."""
        return [note for lease in (self.save, self.node) if lease is not None for note in lease.notes]

    def look(self) -> None:
        """Check the lease of the ``--save`` folder if it is on disk, where that takes a single call.

        Raises:
            SupersededError: if a later start holds the folder.
            OSError: if the disk fails.
        """
        if self.save is not None and self.save.staging is not None:
            self.save.check()


def staging_folder_of(lease: Lease | None) -> Path | None:
    """Return the staging folder of a lease; None without a lease and in an object store."""
    return lease.staging if lease is not None else None


def raise_if_superseded(lease: Lease | None) -> None:
    """Raise SupersededError if a later start holds the folder; ignore I/O errors.

    Called after another failure, to find out whether losing the lease was its cause.

    Raises:
        SupersededError: if a later start holds the folder.
    """
    if lease is not None:
        with suppress(OSError):
            lease.check()


def create_staging_folder(lease: Lease, folder: Path) -> int | None:
    """Create the staging folder of a start with its lease file.

    Returns:
        The open, locked lease file; None if another start was first.

    Raises:
        OSError: if the disk fails.
    """
    target = staging_folder(folder, lease.epoch)
    draft = target.with_name(f"{target.name}.{lease.holder.token}")
    os.mkdir(draft)
    with ExitStack() as opened:
        try:
            write_file(draft / LEASE_FILE, lease.text)
            file = os.open(draft / LEASE_FILE, os.O_RDWR)  # NFS refuses exclusive locks of files open for reading only
            opened.callback(os.close, file)
            try_lock(file)
            durable_rename(draft, target)
            if max(epoch for epoch, _ in staging_folders(folder)) == lease.epoch:
                opened.pop_all()
                return file
            shutil.rmtree(target)  # delayed for so long that a later start exists
        except OSError as error:
            shutil.rmtree(draft, ignore_errors=True)
            if error.errno not in LOST_RACE_ERRNO:
                raise
    return None


def newest_lease(folder: Path) -> Lease | None:
    """Return the lease of the latest start in a folder on disk; None if there was none.

    Raises:
        OSError: if the disk fails.
    """
    found = staging_folders(folder)
    if not found:
        return None
    epoch, staging = found[-1]
    text = b""
    with suppress(FileNotFoundError):
        text = (staging / LEASE_FILE).read_bytes()
    return Lease(folder, epoch, parse_lease(text)[1])


def stored_lease(folder: RemotePath) -> Lease | None:
    """Return the lease in a folder of an object store; None if there is none.

    Raises:
        OSError: if the store fails or does not answer.
    """
    try:
        epoch, holder = parse_lease((folder / LEASE_FILE).read_bytes())
    except FileNotFoundError:
        return None
    return Lease(folder, epoch, holder)


def parse_lease(text: bytes) -> tuple[int, LeaseHolder]:
    """Parse a lease file to epoch and holder; epoch 0 and an unknown holder if it is invalid."""
    try:
        data = json.loads(text)
        start = JobStart(**_known(data["start"], JobStart))
        return int(data["epoch"]), LeaseHolder(**{**_known(data, LeaseHolder), "start": start})
    except (ValueError, KeyError, TypeError, AttributeError):
        return 0, LeaseHolder(JobStart(), host="an unknown machine", pid=0, since=0.0, token="")


def _known(data: dict[str, Any], kind: type[Any]) -> dict[str, Any]:
    """Return the values whose names are fields of ``kind`` in this version."""
    return {name: value for name, value in data.items() if name in {f.name for f in fields(kind)}}
