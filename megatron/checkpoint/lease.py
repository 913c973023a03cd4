"""The lease on a checkpoint folder: the right of one start of a run to write to it, which fences off earlier starts.

A start that the launcher considers dead may still write: its node lost the network but not the shared disk, or a
process stalls during a save and continues an hour later. So the folder numbers its starts (*epochs*), and start 7 has

    SAVE/.epoch-7/             its staging folder: it writes, replaces and deletes checkpoints only in here
    SAVE/.epoch-7/claim.json   its lease: job, host and process; locked with ``flock`` while the process lives. Whoever
                               can open it can lock it, so it is closed to users who cannot write to the folder

**Acquiring the lease.** The new start reads the lease of the newest one. If that is not locked, its process is gone.
If it is locked by an earlier start of the same job (`JobStart.follows`: Slurm requeued the job, srun began a later
step, torchrun restarted its processes), that start is *superseded*. Otherwise the folder is in use and the new start
is rejected. It then creates the staging folder of the next epoch under a temporary name, with the locked lease file in
it, and renames it. A rename cannot replace a folder that is not empty, so of two starts that take the same epoch one
fails and tries again.

**Fencing.** Before it looks for a checkpoint to resume from, the new start renames the staging folders of all earlier
starts into its own (`take_over_staging`). A start changes a published checkpoint only by a rename: out of its staging
folder to publish, into it to delete. Once the staging folder has moved, every such call of the old start fails
because the path does not exist, no matter what it checked before or where it was stopped. Renames that succeeded
before are visible to the new start. So no two starts can change a checkpoint at the same time, which relies only on
POSIX renames being atomic across machines. Ranks that are writing files of a staged checkpoint lose its folder and do
not create another. A save of which only the publication was interrupted is published by the new start. Epochs are
never reused: the newest staging folder stays.

**Detection.** A start whose staging folder is gone is superseded. `Lease.check` looks for it before a save, after any
failure in one, and before the run folder is written to; it raises `SupersededError`, which ends the run. This is for
the logs and their readers; the safety of the checkpoints does not depend on it.

**File systems.** The kernel releases the lock when the process ends. On NFS locks hold across machines, and the
server keeps those of a lost machine for its lease time (often 90 seconds): a start of the same job does not wait for
that, others are rejected with an error. An NFS client may still reach a renamed folder through its handle for some
seconds, so folders that were taken over are deleted before checkpoints are listed. Without lock support no start is
rejected: the newest one holds the folder, and the others are fenced off.

**Object stores** have neither locks nor renames. A start writes its lease over the previous one, and reads it again
before it writes a marker and before it deletes anything. A start that stalls exactly between the two can still do one
more thing: publish a complete checkpoint of an older epoch, or delete a checkpoint that it found superfluous.

Programs that write a checkpoint without a lease, as tools do, stage it in the checkpoint folder itself.
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
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from shlex import quote
from typing import Any, Self, get_type_hints

from megatron.checkpoint.durable_files import LockState, durable_rename, lock_holder, make_folder, try_lock, write_file
from megatron.checkpoint.errors import CheckpointError, StorageError, SupersededError
from megatron.checkpoint.location import Location, local_path
from megatron.checkpoint.publish import (
    STAGING_NAME,
    finish_staged,
    save_elsewhere_flags,
    staged_leftovers,
    staging_folder,
    staging_folders,
)
from megatron.config.errors import Problem
from megatron.config.files import parse_json
from megatron.config.launch import JobStart
from megatron.config.privacy import PRIVATE_FILE, check_access, private_mode, who_can_replace

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
        return None if not isinstance(self.folder, Path) else staging_folder(self.folder, self.epoch)

    @property
    def text(self) -> bytes:
        """Content of the lease file."""
        return json.dumps({"epoch": self.epoch, **asdict(self.holder)}, indent=1).encode() + b"\n"

    def to_json(self) -> list[Any]:
        """Return the lease as JSON, for other ranks."""
        return [self.text.decode(), [*self.notes]]

    @classmethod
    def from_json(cls, folder: Location, data: Sequence[Any]) -> Self:
        """Read what :meth:`to_json` has returned on the rank that holds the lease on ``folder``."""
        text, notes = data
        return cls(folder, *parse_lease(text), tuple(notes))

    def check(self) -> None:
        """Raise SupersededError if a later start holds the folder.

        In an object store, which has no staging folder, call this immediately before every change.
        """
        other = None if self._owns_staging_folder() else current_lease(self.folder)
        if other is not None and other.holder.token != self.holder.token:
            message = (
                f"start {self.epoch} of the run in {self.folder} is superseded by start {other.epoch}, "
                f"of {other.holder}; this start stops writing and exits"
            )
            raise SupersededError(str(Problem("E817", message)))

    def ready(self) -> None:
        """As `check`, before a save: also recreate the staging folder if it was deleted."""
        self.check()
        if isinstance(self.folder, Path):
            check_access(self.folder, shared=True)
        if self.staging is not None and not self._owns_staging_folder():
            make_folder(self.folder, private=True)
            create_staging_folder(self)  # the lock is kept until the process ends
            self.check()

    def _owns_staging_folder(self) -> bool:
        """Return True if the staging folder exists and is this start's; a deleted epoch may have been reused."""
        if self.staging is None:
            return False
        try:
            token = parse_lease((self.staging / LEASE_FILE).read_bytes())[1].token
        except OSError:  # the lease file or the whole folder was deleted
            return self.staging.is_dir()
        return token in ("", self.holder.token)


def raise_if_superseded(lease: Lease | None) -> None:
    """Raise SupersededError if a later start holds the folder; ignore I/O errors.

    Called after another failure, to find out whether losing the lease was its cause.
    """
    if lease is not None:
        with suppress(OSError):
            lease.check()


@contextmanager
def acquire_lease(folder: Location, flag: str = "--save", start: JobStart | None = None) -> Iterator[Lease]:
    """Acquire the lease on ``folder``, which is created if necessary; used by one process of a run.

    Where the file system has no locks, and in object stores, no start is rejected.

    Args:
        folder: of the checkpoints.
        flag: the option that names the folder, for the fixes in errors.
        start: this start of the job; None outside of a job.

    Raises:
        CheckpointError: if another process holds the folder and is not an earlier start of this job.
        SupersededError: if a later start of the job acquired it meanwhile.
        StorageError: if the folder is not writable, or another user may have written to it: see `check_access`. Only
            ``--save`` may name a folder of root or of a group.
    """
    holder = LeaseHolder(start or JobStart())
    with ExitStack() as opened:
        try:
            if not isinstance(folder, Path):
                previous = current_lease(folder)
                lease = Lease(folder, previous.epoch + 1 if previous else 1, holder)
                (folder / LEASE_FILE).write_bytes(lease.text)
            else:
                make_folder(folder, private=True)
                check_access(folder, shared=flag == "--save")
                lease = _acquire_on_disk(folder, holder, flag, opened)
                if who := who_can_replace(folder):
                    note = f"other users can put another folder in the place of {folder}: {who}"
                    lease = replace(lease, notes=(*lease.notes, note))
        except OSError as error:
            fix = save_elsewhere_flags(folder) if flag == "--save" else f"{flag} ANOTHER"
            place = "" if error.filename in (None, str(folder)) else f"{error.filename}: "
            raise StorageError(f"no checkpoint can be written to {folder}: {place}{error.strerror}", fix) from error
        yield lease


def _acquire_on_disk(folder: Path, holder: LeaseHolder, flag: str, opened: ExitStack) -> Lease:
    """Acquire the lease of the next epoch, whose file stays locked while ``opened``, and fence off earlier starts."""
    file = None
    while file is None:
        last, superseded = current_lease(folder), list[str]()
        if last is not None and _is_locked(staging_folder(folder, last.epoch)):
            if not holder.start.follows(last.holder.start):
                raise CheckpointError(*_in_use(last, holder, flag))
            superseded = [f"start {last.epoch}, of {last.holder}, is superseded: it may still be alive"]
        lease = Lease(folder, last.epoch + 1 if last else 1, holder)
        file = create_staging_folder(lease)
    opened.callback(os.close, file)
    try:
        taken_over = take_over_staging(folder, lease.epoch)
    finally:  # a later start may have done the same to this one
        raise_if_superseded(lease)
    return replace(lease, notes=(*superseded, *taken_over))


def _is_locked(staging: Path) -> bool:
    """Return True if another process has the lease file locked, as far as the file system knows."""
    try:
        file = os.open(staging / LEASE_FILE, os.O_RDONLY)
    except FileNotFoundError:  # being taken over, or deleted
        return False
    try:
        return try_lock(file, shared=True) is LockState.HELD  # shared: concurrent checks do not block each other
    finally:
        os.close(file)


def _in_use(last: Lease, holder: LeaseHolder, flag: str) -> tuple[str, ...]:
    """Return the message and fixes for a folder that is in use."""
    if last.holder.start.follows(holder.start):
        return f"{last.folder} is in use by a later start of this job: {last.holder}", f"{flag} ANOTHER"
    message = f"{last.folder} is in use by {last.holder}"
    claim = staging_folder(local_path(last.folder), last.epoch) / LEASE_FILE
    found = lock_holder(claim)
    if found is not None and found.process != last.holder.pid:
        message = f"{last.folder} is in use: {found} has locked {claim}, which is of {last.holder}"
        return message, f"{flag} ANOTHER", f"rm {quote(str(claim))} # once no start of this run is alive"
    if last.holder.host == socket.gethostname():
        doubt = "" if found else f", as {claim} has it; this machine does not know which process has locked that file"
        return message + doubt, f"{flag} ANOTHER"
    return (
        f"{message}; if that machine is gone, its lock expires within minutes",
        f"{flag} ANOTHER",
        "start again then",
    )


def create_staging_folder(lease: Lease) -> int | None:
    """Create the staging folder of a start; return its open, locked lease file, or None if another start was first."""
    folder = local_path(lease.folder)
    target = staging_folder(folder, lease.epoch)
    draft = target.with_name(f"{target.name}.{lease.holder.token}")
    os.mkdir(draft)
    with ExitStack() as opened:
        try:
            write_file(draft / LEASE_FILE, lease.text, private_mode(folder, PRIVATE_FILE))
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


def take_over_staging(folder: Path, epoch: int) -> list[str]:
    """Take over the staging folders of all earlier starts, and finish or delete what is in them; return notes on it."""
    mine = staging_folder(folder, epoch)
    for name in sorted(os.listdir(folder)):
        match = re.fullmatch(rf"{STAGING_NAME.pattern}(\..*)?", name)  # an unfinished one is called .epoch-7.5f3a90
        if match and int(match[1]) < epoch:
            with suppress(FileNotFoundError):  # removed by its own start
                os.rename(folder / name, mine / name)
    unleased = staged_leftovers(folder, folder)
    if unleased:
        oldest = staging_folder(mine, 0)
        with suppress(FileExistsError):
            os.mkdir(oldest)
        for path in unleased:
            os.rename(path, oldest / path.name)
    return list(_recover(folder, mine))


def _recover(folder: Path, staging: Path) -> Iterator[str]:
    """Recover and delete the staging folders nested in ``staging``, oldest first; yield notes on interrupted saves."""
    for _, older in staging_folders(staging):
        yield from _recover(folder, older)
        notes = [finish_staged(folder, path) for path in staged_leftovers(folder, older)]
        yield from filter(None, notes)
        with suppress(OSError):  # NFS keeps a file that a stalled process has open; what is in here does not count
            shutil.rmtree(older)


def current_lease(folder: Location) -> Lease | None:
    """Return the lease of the latest start in a folder; None if there was none."""
    if not isinstance(folder, Path):
        try:
            return Lease(folder, *parse_lease((folder / LEASE_FILE).read_bytes()))
        except FileNotFoundError:
            return None
    found = staging_folders(folder)
    if not found:
        return None
    epoch, staging = found[-1]
    text = b""
    with suppress(FileNotFoundError):
        text = (staging / LEASE_FILE).read_bytes()
    return Lease(folder, epoch, parse_lease(text)[1])


def parse_lease(text: str | bytes) -> tuple[int, LeaseHolder]:
    """Parse a lease file to epoch and holder; epoch 0 and an unknown holder if it is invalid."""
    try:
        data = parse_json(text)
        start = JobStart(**_known(data["start"], JobStart))
        holder = LeaseHolder(**_known({**data, "start": start}, LeaseHolder))
        if not {f.name for f in fields(holder)} <= data.keys():
            raise KeyError("a field of the holder")
        str(holder)  # raises for a time that there is not
        return int(data["epoch"]), holder
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, OSError):
        return 0, LeaseHolder(JobStart(), host="an unknown machine", pid=0, since=0.0, token="")


def _known(data: dict[str, Any], kind: type[Any]) -> dict[str, Any]:
    """Return the values whose names are fields of ``kind`` in this version; raise TypeError for another type."""
    hints = get_type_hints(kind)
    known = {name: value for name, value in data.items() if name in hints}
    wrong = [name for name, value in known.items() if not isinstance(value, hints[name] | int)]
    if wrong:
        raise TypeError(f"{wrong} are of other types")
    return known
