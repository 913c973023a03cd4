"""Leases: at most one start writes to a folder of checkpoints, and earlier starts are fenced off.

A start that the launcher considers dead may still write: its node lost the network but not the shared disk, or a
process stalls during a save and continues an hour later. So the folder numbers its starts (*epochs*), and start 7 has

    SAVE/.epoch-7/             its staging folder: it writes, replaces and deletes checkpoints only in here
    SAVE/.epoch-7/claim.json   its lease: job, host and process; locked with ``flock`` while the process lives

**Acquiring the lease.** The new start reads the lease of the newest one. If that is not locked, its process is gone.
If it is locked by an earlier start of the same job (`Start.follows`: Slurm requeued the job, srun began a later step,
torchrun restarted its processes), that start is *superseded*. Otherwise the folder is in use and the new start is
rejected. It then creates the staging folder of the next epoch under a temporary name, with the locked lease file in
it, and renames it. A rename cannot replace a folder that is not empty, so of two starts that take the same epoch one
fails and tries again.

**Fencing.** Before it looks for a checkpoint to resume from, the new start renames the staging folders of all earlier
starts into its own (`take_over_staging`). A start changes a published checkpoint only by a rename: out of its staging
folder to publish, into it to replace or delete. Once the staging folder has moved, every such call of the old start
fails because the path does not exist, no matter what it checked before or where it was stopped. Renames that succeeded
before are visible to the new start. So no two starts can change a checkpoint at the same time, which relies only on
POSIX renames being atomic across machines. Ranks that are writing files of a staged checkpoint lose its folder and do
not create another. Complete staged checkpoints are published by the new start. Epochs are never reused: the newest
staging folder stays.

**Detection.** A start whose staging folder is gone is superseded. `Lease.check` looks for it before a save, after any
failure in one, and before the run folder is written to; it raises `SupersededError`, which ends the run. This is for
the logs and their readers; the safety of the checkpoints does not depend on it.

**File systems.** The kernel releases the lock when the process ends. On NFS locks hold across machines, and the server
keeps those of a lost machine for its lease time (often 90 seconds): a start of the same job does not wait for that,
others are rejected with an error. An NFS client may still reach a renamed folder through its handle for some seconds,
so folders that were taken over are deleted before checkpoints are listed. Without lock support no start is rejected:
the newest one holds the folder, and the others are fenced off.

**Object stores** have neither locks nor renames. A start writes its lease over the previous one, and reads it again
before it writes a marker and before it deletes anything. A start that stalls exactly between the two can still do one
more thing: publish a complete checkpoint of an older epoch, or delete a checkpoint that it found superfluous.

Programs that write a checkpoint without a lease, as tools do, stage it in the checkpoint folder itself.
"""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from megatron.checkpoint.claims import CLAIM, Claim, Holder, blame, lock, newest, put, stored
from megatron.checkpoint.errors import CheckpointError, StorageError
from megatron.checkpoint.files import elsewhere, make_folder
from megatron.checkpoint.folder import Checkpoints
from megatron.checkpoint.remote import Location, RemotePath
from megatron.checkpoint.workshops import take_over, workshop
from megatron.config.launch import Start


@contextmanager
def hold(folder: Location, flag: str = "--save", start: Start | None = None) -> Iterator[Claim]:
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
    holder = Holder(start or Start())
    if isinstance(folder, RemotePath):
        yield _acquire_in_store(folder, holder, flag)
        return
    try:
        make_folder(folder)
        claim, file, superseded = _acquire_on_disk(folder, holder, flag)
    except OSError as error:
        raise _not_writable(error, folder, flag) from error
    try:
        yield replace(claim, notes=(*superseded, *_fence(claim, folder, flag)))
    finally:
        os.close(file)


def _acquire_in_store(folder: RemotePath, holder: Holder, flag: str) -> Claim:
    """Write the lease to an object store, which also checks that the store is writable."""
    try:
        previous = stored(folder)
        claim = Claim(folder, previous.epoch + 1 if previous else 1, holder)
        (folder / CLAIM).write_bytes(claim.text)
    except OSError as error:
        raise _not_writable(error, folder, flag) from error
    return claim


def _acquire_on_disk(folder: Path, holder: Holder, flag: str) -> tuple[Claim, int, list[str]]:
    """Acquire the lease of the next epoch.

    Returns:
        The lease; its file, which stays locked while it is open; and a note if a live start was superseded.
    """
    while True:
        last, superseded = newest(folder), list[str]()
        if last is not None and _is_locked(workshop(folder, last.epoch)):
            if not holder.start.follows(last.holder.start):
                raise CheckpointError(*_in_use(last, holder, flag))
            superseded = [f"start {last.epoch}, of {last.holder}, is superseded: it may still be alive"]
        claim = Claim(folder, last.epoch + 1 if last else 1, holder)
        file = put(claim, folder)
        if file is not None:
            return claim, file, superseded


def _is_locked(staging: Path) -> bool:
    """Return True if another process has the lease file locked, as far as the file system knows."""
    try:
        file = os.open(staging / CLAIM, os.O_RDONLY)
    except FileNotFoundError:  # being taken over, or deleted
        return False
    try:
        return not lock(file, fcntl.LOCK_SH)  # shared, so that concurrent checks do not block each other
    finally:
        os.close(file)


def _fence(claim: Claim, folder: Path, flag: str) -> list[str]:
    """Fence off all earlier starts, then check that no later start has done the same to this one."""
    try:
        try:
            return take_over(folder, claim.epoch)
        finally:
            blame(claim)
    except OSError as error:
        raise _not_writable(error, folder, flag) from error


def _in_use(last: Claim, holder: Holder, flag: str) -> tuple[str, ...]:
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
    fix = elsewhere(Checkpoints(folder).to_go_on_from()) if flag == "--save" else f"{flag} ANOTHER"
    return StorageError(f"{where}: {error.strerror}; no checkpoint can be written to {folder}", fix)
