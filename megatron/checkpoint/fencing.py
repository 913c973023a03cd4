"""Acquire the lease on a checkpoint folder, and fence off earlier starts of the run.

A start that the launcher considers dead may still write: its node lost the network but not the shared disk, or a
process stalls during a save and continues an hour later. So the folder numbers its starts (*epochs*), and start 7 has

    SAVE/.epoch-7/             its staging folder: it writes, replaces and deletes checkpoints only in here
    SAVE/.epoch-7/claim.json   its lease: job, host and process; locked with ``flock`` while the process lives

**Acquiring the lease.** The new start reads the lease of the newest one. If that is not locked, its process is gone.
If it is locked by an earlier start of the same job (`JobStart.follows`: Slurm requeued the job, srun began a later
step, torchrun restarted its processes), that start is *superseded*. Otherwise the folder is in use and the new start
is rejected. It then creates the staging folder of the next epoch under a temporary name, with the locked lease file in
it, and renames it. A rename cannot replace a folder that is not empty, so of two starts that take the same epoch one
fails and tries again.

**Fencing.** Before it looks for a checkpoint to resume from, the new start renames the staging folders of all earlier
starts into its own (`take_over_staging`). A start changes a published checkpoint only by a rename: out of its staging
folder to publish, into it to replace or delete. Once the staging folder has moved, every such call of the old start
fails because the path does not exist, no matter what it checked before or where it was stopped. Renames that
succeeded before are visible to the new start. So no two starts can change a checkpoint at the same time, which relies
only on POSIX renames being atomic across machines. Ranks that are writing files of a staged checkpoint lose its
folder and do not create another. Complete staged checkpoints are published by the new start. Epochs are never reused:
the newest staging folder stays.

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

import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from megatron.checkpoint.durable_files import LockState, make_folder, try_lock
from megatron.checkpoint.errors import CheckpointError, StorageError, save_elsewhere_flags
from megatron.checkpoint.folder import CheckpointFolder
from megatron.checkpoint.lease import (
    LEASE_FILE,
    Lease,
    LeaseHolder,
    create_staging_folder,
    newest_lease,
    raise_if_superseded,
    stored_lease,
)
from megatron.checkpoint.object_store import Location, RemotePath
from megatron.checkpoint.publish import (
    DELETED_SUFFIX,
    STAGED_NAME,
    STAGED_SUFFIX,
    STAGING_PREFIX,
    is_complete,
    is_interrupted,
    recover,
    staging_folder,
    staging_folders,
)
from megatron.config.launch import JobStart


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
        StorageError: if the folder is not writable.
    """
    holder = LeaseHolder(start or JobStart())
    if isinstance(folder, RemotePath):
        yield _acquire_in_store(folder, holder, flag)
        return
    try:
        make_folder(folder)
        lease, file, superseded = _acquire_on_disk(folder, holder, flag)
    except OSError as error:
        raise _not_writable(error, folder, flag) from error
    try:
        yield replace(lease, notes=(*superseded, *_fence(lease, folder, flag)))
    finally:
        os.close(file)


def _acquire_in_store(folder: RemotePath, holder: LeaseHolder, flag: str) -> Lease:
    """Write the lease to an object store, which also checks that the store is writable."""
    try:
        previous = stored_lease(folder)
        lease = Lease(folder, previous.epoch + 1 if previous else 1, holder)
        (folder / LEASE_FILE).write_bytes(lease.text)
    except OSError as error:
        raise _not_writable(error, folder, flag) from error
    return lease


def _acquire_on_disk(folder: Path, holder: LeaseHolder, flag: str) -> tuple[Lease, int, list[str]]:
    """Acquire the lease of the next epoch.

    Returns:
        The lease; its file, which stays locked while it is open; and a note if a live start was superseded.
    """
    while True:
        last, superseded = newest_lease(folder), list[str]()
        if last is not None and _is_locked(staging_folder(folder, last.epoch)):
            if not holder.start.follows(last.holder.start):
                raise CheckpointError(*_in_use(last, holder, flag))
            superseded = [f"start {last.epoch}, of {last.holder}, is superseded: it may still be alive"]
        lease = Lease(folder, last.epoch + 1 if last else 1, holder)
        file = create_staging_folder(lease, folder)
        if file is not None:
            return lease, file, superseded


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


def _fence(lease: Lease, folder: Path, flag: str) -> list[str]:
    """Fence off all earlier starts, then check that no later start has done the same to this one."""
    try:
        try:
            return take_over_staging(folder, lease.epoch)
        finally:
            raise_if_superseded(lease)
    except OSError as error:
        raise _not_writable(error, folder, flag) from error


def _in_use(last: Lease, holder: LeaseHolder, flag: str) -> tuple[str, ...]:
    """Return the message and fixes for a folder that is in use."""
    if last.holder.start.follows(holder.start):
        return f"{last.folder} is in use by a later start of this job: {last.holder}", f"{flag} ANOTHER"
    message = f"{last.folder} is in use by {last.holder}"
    if last.holder.host == socket.gethostname():
        return message, f"{flag} ANOTHER"
    return (
        f"{message}; if that machine is gone, its lock expires within minutes",
        f"{flag} ANOTHER",
        "start again then",
    )


def _not_writable(error: OSError, folder: Location, flag: str) -> StorageError:
    where = error.filename or folder
    fix = save_elsewhere_flags(CheckpointFolder(folder).resume_folder()) if flag == "--save" else f"{flag} ANOTHER"
    return StorageError(f"{where}: {error.strerror}; no checkpoint can be written to {folder}", fix)


REST_FOLDER = "rest"
"""Subfolder of a staging folder that is about to be deleted, for entries that are not checkpoints."""


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
