"""Folders of checkpoints ``iter_0000100``, and the lease that lets one start at a time write to them.

``CheckpointFolder`` lists checkpoints, finds the newest valid one and deletes old ones. `acquire_lease` makes sure
that at most one start writes to a folder, and fences off earlier ones. A start that the launcher considers dead may
still write: its node lost the network but not the shared disk, or a process stalls during a save and continues an
hour later. So the folder numbers its starts (*epochs*), and start 7 has

    SAVE/.epoch-7/             its staging folder: it writes, replaces and deletes checkpoints only in here
    SAVE/.epoch-7/claim.json   its lease: job, host and process; locked with ``flock`` while the process lives

**Acquiring the lease.** The new start reads the lease of the newest one. If that is not locked, its process is gone.
If it is locked by an earlier start of the same job (`JobStart.follows`: Slurm requeued the job, srun began a later
step, torchrun restarted its processes), that start is *superseded*. Otherwise the folder is in use and the new start is
rejected. It then creates the staging folder of the next epoch under a temporary name, with the locked lease file in
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
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from megatron.checkpoint.durable_files import LockState, make_folder, try_lock
from megatron.checkpoint.errors import (
    CheckpointError,
    DamagedCheckpointError,
    StorageError,
    save_elsewhere_flags,
    strip_folder,
)
from megatron.checkpoint.format import MANIFEST, MARKER, Manifest
from megatron.checkpoint.lease import (
    LEASE_FILE,
    STAGED_NAME,
    Lease,
    LeaseHolder,
    create_staging_folder,
    newest_lease,
    raise_if_superseded,
    staged_entries,
    staging_folder,
    staging_folder_of,
    stored_lease,
    take_over_staging,
)
from megatron.checkpoint.object_store import Location, RemotePath, local_path
from megatron.checkpoint.publish import (
    REPLACED_SUFFIX,
    STAGED_SUFFIX,
    delete_checkpoint,
    is_complete,
    recover,
    stale_uploads,
)
from megatron.config.launch import JobStart

CHECKPOINT_NAME = re.compile(rf"iter_(\d+)({re.escape(STAGED_SUFFIX)}|{re.escape(REPLACED_SUFFIX)})?")
AGE_ORDER = (REPLACED_SUFFIX, "", STAGED_SUFFIX)
"""Age order within an iteration: a staged complete checkpoint is newer than the published one, a replaced one older."""


@dataclass(frozen=True)
class FoundCheckpoint:
    """A folder that is named like a checkpoint."""

    iteration: int  # steps taken when it was saved
    path: Location
    manifest: Manifest | None  # None if it is not valid
    problem: str | None  # why it is not valid, without the path of the folder


@dataclass(frozen=True)
class CheckpointFolder:
    """The checkpoints of a run, in its ``--save`` folder."""

    folder: Location  # on disk or in an object store; need not exist; for :meth:`newest` it may be a single checkpoint

    def path(self, iteration: int) -> Location:
        """Return the path of the checkpoint of an iteration."""
        return self.folder / f"iter_{iteration:07d}"

    @property
    def is_checkpoint(self) -> bool:
        """True if the folder is itself a checkpoint, valid or damaged."""
        return any((self.folder / name).exists() for name in (MARKER, MANIFEST))

    def named(self) -> list[tuple[int, Location]]:
        """Return iteration and path of all folders named like checkpoints, newest first, without opening them.

        Raises:
            OSError: if the disk or the store fails.
        """
        found = [(int(match[1]), path) for path in self._folders() if (match := CHECKPOINT_NAME.fullmatch(path.name))]
        return sorted(found, key=lambda item: (item[0], AGE_ORDER.index(item[1].suffix)), reverse=True)

    def _folders(self) -> list[Location]:
        """Return all folders inside, including those in staging folders."""
        if isinstance(self.folder, RemotePath):
            return [path for path in self.folder.folders() if path.suffix not in (STAGED_SUFFIX, REPLACED_SUFFIX)]
        if not self.folder.is_dir():
            return []
        return [path for path in (*self.folder.iterdir(), *staged_entries(self.folder)) if path.is_dir()]

    def scan(self) -> Iterator[FoundCheckpoint]:
        """Yield the folders named like checkpoints, newest first, opening each on demand.

        Checks the marker, the manifest's checksum and the sizes of all files; tensors are verified when they are read.
        """
        for iteration, path in self.named():
            try:
                yield FoundCheckpoint(iteration, path, Manifest.open(path), None)
            except CheckpointError as error:
                yield FoundCheckpoint(iteration, path, None, strip_folder(path, error))

    def candidates(self) -> list[FoundCheckpoint]:
        """Return the list of :meth:`scan`."""
        return list(self.scan())

    def newest(self, step: int | None = None) -> tuple[Manifest, list[FoundCheckpoint]]:
        """Return the newest valid checkpoint, and the newer invalid ones that were skipped.

        If ``folder`` is itself a checkpoint, it is returned.

        Args:
            step: consider only checkpoints of this step.

        Raises:
            CheckpointError: if there is none; lists the invalid ones.
            DamagedCheckpointError: if ``folder`` is itself a checkpoint, and damaged.
            NewerVersionError: if a checkpoint has a newer format version; it is not damaged, so no older one is used.
        """
        if self.is_checkpoint:
            return self._itself(step), []
        passed_over: list[FoundCheckpoint] = []
        for iteration, path in self.named():
            if step not in (None, iteration):
                continue
            try:
                return Manifest.open(path), passed_over
            except DamagedCheckpointError as error:
                passed_over.append(FoundCheckpoint(iteration, path, None, strip_folder(path, error)))
        which = "a checkpoint" if step is None else f"a checkpoint of step {step}"
        reasons = "".join(f"\n  {found.path.name}: {found.problem}" for found in passed_over)
        raise CheckpointError(
            f"{self.folder} does not hold {which}" + (f" that can be used:{reasons}" if reasons else "")
        )

    def resume_folder(self) -> Location | None:
        """Return the folder if it contains a valid checkpoint that is not being written, else None."""
        with suppress(OSError, CheckpointError):  # called after a disk error
            if any(found.manifest for found in self.scan() if found.path.suffix != STAGED_SUFFIX):
                return self.folder
        return None

    def _itself(self, step: int | None) -> Manifest:
        manifest = Manifest.open(self.folder)
        found = manifest.state.get("iteration")
        if step not in (None, found):
            raise CheckpointError(
                f"{self.folder} is the checkpoint of step {found}, not {step}", f"--ckpt-step {found}"
            )
        return manifest

    @property
    def leftovers(self) -> list[Location]:
        """Remainders of interrupted saves and deletions."""
        if isinstance(self.folder, RemotePath):
            places = [path for _, path in self.named() if isinstance(path, RemotePath)]
            return [path for place in places for path in stale_uploads(place)]
        found = [(STAGED_NAME.fullmatch(path.name), path) for path in self._folders()]
        return sorted((path for match, path in found if match and any(match.groups())), reverse=True)

    def retain(
        self,
        keep_last: int | None,
        keep_every: int | None = None,
        newest: int | None = None,
        lease: Lease | None = None,
    ) -> list[Location]:
        """Delete old checkpoints and leftovers; must not run during a save.

        Args:
            keep_last: number of newest valid checkpoints to keep; None: all.
            keep_every: iterations that are a multiple of it are kept permanently.
            newest: the iteration just saved. Later ones, which the run skipped as invalid, are kept and not counted.
            lease: lease on the folder. Without one, staging folders are not touched.

        Returns:
            The deleted checkpoints. Damaged ones newer than the kept ones are not deleted, for inspection.

        Raises:
            OSError: if the disk fails, or the staging folder is gone.
            SupersededError: if a later start holds the folder, in an object store.
        """
        staging = staging_folder_of(lease)
        for path in self.leftovers:
            if isinstance(path, RemotePath):
                self._remove(path, lease)
            elif path.parent == (staging or self.folder):
                recover(local_path(self.folder / path.name.partition(".")[0]), staging)
        if keep_last is None:
            return []
        deleted: list[Location] = []
        kept = 0
        for iteration, path in self.named():
            if newest is not None and iteration > newest:
                continue
            if kept < keep_last:
                kept += self._is_valid(path)
            elif is_complete(path) and not (keep_every and iteration % keep_every == 0):
                self._remove(path, lease)
                deleted.append(path)
        return deleted

    def _remove(self, path: Location, lease: Lease | None) -> None:
        """Delete a checkpoint or a leftover; in a store, check the lease immediately before."""
        if isinstance(path, RemotePath) and lease is not None:
            lease.check()
        delete_checkpoint(path, staging_folder_of(lease))

    def _is_valid(self, path: Location) -> bool:
        try:
            Manifest.open(path)
        except CheckpointError:
            return False
        return True


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
