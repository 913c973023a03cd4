"""Leases on a folder of checkpoints, and the staging folders of the starts that hold them.

Each start of a run has a staging folder ``.epoch-7`` in the checkpoint folder, with its lease file inside. A later
start supersedes it by moving the staging folder into its own; it then publishes the complete checkpoints in it and
deletes the rest. A start whose staging folder is gone is superseded and exits. :mod:`megatron.checkpoint.folder`
describes the protocol.
"""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from megatron.checkpoint.durable_files import durable_rename, make_folder, try_lock
from megatron.checkpoint.errors import SupersededError
from megatron.checkpoint.object_store import Location, RemotePath
from megatron.checkpoint.publish import (
    DELETED_SUFFIX,
    REPLACED_SUFFIX,
    STAGED_SUFFIX,
    STAGING_NAME,
    STAGING_PREFIX,
    is_complete,
    is_interrupted,
    recover,
)
from megatron.config.errors import Problem
from megatron.config.launch import JobStart

REST_FOLDER = "rest"
"""Subfolder of a staging folder that is about to be deleted, for entries that are not checkpoints."""

STAGED_NAME = re.compile(
    rf"iter_\d+({re.escape(STAGED_SUFFIX)}|{re.escape(REPLACED_SUFFIX)})?({re.escape(DELETED_SUFFIX)})?"
)
"""Names of checkpoints, and of staged ones that were written without a lease."""


def staging_folder(folder: Path, epoch: int) -> Path:
    """Return the staging folder of a start."""
    return folder / f"{STAGING_PREFIX}{epoch}"


def staging_folders(folder: Path) -> list[tuple[int, Path]]:
    """Return epoch and path of the staging folders directly in ``folder``, oldest first.

    Raises:
        OSError: if the disk fails.
    """
    names = [name for name in os.listdir(folder) if STAGING_NAME.fullmatch(name)] if folder.is_dir() else []
    return sorted((int(name.removeprefix(STAGING_PREFIX)), folder / name) for name in names)


def staged_entries(folder: Path) -> Iterator[Path]:
    """Yield all entries of the staging folders in ``folder``, including nested ones that were taken over.

    Raises:
        OSError: if the disk fails.
    """
    for _, staging in staging_folders(folder):
        with suppress(FileNotFoundError):  # taken over by a concurrent start
            yield from sorted(path for path in staging.iterdir() if not STAGING_NAME.fullmatch(path.name))
            yield from staged_entries(staging)


def take_over_staging(folder: Path, epoch: int) -> list[str]:
    """Take over the staging folders of all earlier starts, and finish or delete what is in them.

    Returns:
        Notes on what was found.

    Raises:
        OSError: if the disk fails, or the staging folder of ``epoch`` is gone.
        StorageError: likewise.
    """
    mine = staging_folder(folder, epoch)
    for name in sorted(os.listdir(folder)):
        number = name.removeprefix(STAGING_PREFIX).partition(".")[0]  # an unfinished one is called .epoch-7.5f3a90
        if name.startswith(STAGING_PREFIX) and number.isdecimal() and int(number) < epoch:
            with suppress(FileNotFoundError):  # removed by its own start
                os.rename(folder / name, mine / name)
    _take_over_unleased(folder, mine)
    return [*_recover(folder, mine)]


def _take_over_unleased(folder: Path, mine: Path) -> None:
    """Move entries that were staged without a lease into a nested staging folder of epoch 0, the oldest."""
    left = [name for name in os.listdir(folder) if (match := STAGED_NAME.fullmatch(name)) and any(match.groups())]
    if not left:
        return
    with suppress(FileExistsError):
        os.mkdir(staging_folder(mine, 0))
    for name in sorted(left):
        os.rename(folder / name, staging_folder(mine, 0) / name)


def _recover(folder: Path, staging: Path) -> Iterator[str]:
    """Recover and delete the staging folders nested in ``staging``, oldest first; yield notes."""
    for _, older in staging_folders(staging):
        yield from _recover(folder, older)
        yield from _interrupted_saves(older)
        _set_rest_aside(older)
        for name in sorted({path.name.partition(".")[0] for path in older.glob("iter_*")}):
            recover(folder / name, older)
        with suppress(OSError):  # files still open on NFS may block it; its entries no longer count
            shutil.rmtree(older)


def _set_rest_aside(staging: Path) -> None:
    """Move entries that are not checkpoints to a subfolder that is not searched, because deleting them may fail.

    If a stalled process has a file open there, NFS on the same machine keeps the file and its folder.
    """
    rest = [path for path in staging.glob("iter_*") if path.suffix == DELETED_SUFFIX or is_interrupted(path)]
    if rest:
        (staging / REST_FOLDER).mkdir(exist_ok=True)
    for path in rest:
        os.rename(path, staging / REST_FOLDER / path.name)


def _interrupted_saves(staging: Path) -> Iterator[str]:
    """Yield notes on interrupted saves in a staging folder."""
    for path in sorted(staging.glob(f"iter_*{STAGED_SUFFIX}")):
        if is_complete(path):
            yield f"published {path.name}: its save was complete except for the final rename"
        else:
            yield f"removed {path.name}: its save was interrupted"


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
    file = os.open(draft / LEASE_FILE, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        try_lock(file)
        os.write(file, lease.text)
        os.fsync(file)
        durable_rename(draft, target)
        if max(epoch for epoch, _ in staging_folders(folder)) == lease.epoch:
            return file
        shutil.rmtree(target)  # delayed for so long that a later start exists
    except OSError as error:
        shutil.rmtree(draft, ignore_errors=True)
        if error.errno not in LOST_RACE_ERRNO:
            os.close(file)
            raise
    os.close(file)
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
