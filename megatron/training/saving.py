"""Save a run: synchronously or in a background thread, with retention of older checkpoints."""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from megatron.checkpoint.background import Staging, in_background
from megatron.checkpoint.claims import Claim, blame
from megatron.checkpoint.errors import CheckpointError, StorageError, SupersededError
from megatron.checkpoint.folder import Checkpoints
from megatron.checkpoint.manifest import Manifest
from megatron.checkpoint.parts import GlobalTensor
from megatron.checkpoint.remote import Location, location
from megatron.checkpoint.room import bytes_of, shortage
from megatron.checkpoint.store import write
from megatron.config.problems import Problem, UserError
from megatron.config.run import CheckpointConfig
from megatron.config.sources import to_dict
from megatron.parallel import comm
from megatron.parallel.comm import Group
from megatron.parallel.mesh import is_lost_contact
from megatron.training.checkpointing import state, to_write
from megatron.training.logging import RunLog
from megatron.training.setup import Trainer
from megatron.training.together import on_first

LINE_SECONDS = 30.0
"""Seconds between log lines while waiting for a save."""

GRACE_SECONDS = 60.0
"""Seconds that a failing run waits for a save in progress."""


@dataclass(frozen=True)
class Saved:
    """A checkpoint that was written."""

    path: Location
    iteration: int  # steps taken when the save began
    bytes: int  # of all tensors
    seconds: float  # until it was on disk and older checkpoints were deleted
    blocking: float | None  # seconds in which training was paused; None for all of them
    warning: str | None  # from deleting older checkpoints


@dataclass(frozen=True)
class Job:
    """A checkpoint to be written, with all its contents."""

    options: CheckpointConfig
    iteration: int  # steps taken
    tensors: Mapping[str, GlobalTensor]  # this rank's parts
    state: Mapping[str, Any]  # progress of the run
    config: dict[str, Any]  # of the run, as JSON
    files: Mapping[str, Path | bytes]  # small files that the checkpoint carries
    bytes: int  # of the tensors of all ranks
    started: float  # on the clock of ``time.monotonic()``
    lease: Claim | None = None  # on the run's ``save`` folder

    def run(self, group: Group, blocking: float | None = None) -> Saved:
        """Write the checkpoint if it fits, then delete the ones that need not be kept; collective over ``group``.

        All disk access is in here, so with ``async_save`` a hanging disk does not block training.

        Rank 0 deletes older checkpoints after it has opened the new one as a start would: valid marker and manifest,
        every file present and of the right size. If that fails, none is deleted.

        Raises:
            StorageError: on every rank, if it does not fit or cannot be written; older checkpoints are unchanged.
            SupersededError: if a later start owns the folder.

        """
        if problem := _shortage(self.options, self.bytes, group, self.lease):
            raise StorageError(str(problem))
        folder = Checkpoints(location(str(self.options.save)))
        path = folder.path(self.iteration)
        write(path, self.tensors, self.state, self.config, group, self.files, self.lease)
        warning = self._delete_old(folder, path) if group.rank == 0 else None
        return Saved(path, self.iteration, self.bytes, time.monotonic() - self.started, blocking, warning)

    def _delete_old(self, folder: Checkpoints, path: Location) -> str | None:
        """Delete checkpoints that need not be kept; return a warning if that fails."""
        try:
            Manifest.open(path)
            folder.retain(self.options.keep_last, self.options.keep_every, newest=self.iteration, claim=self.lease)
        except SupersededError:
            raise
        except (CheckpointError, OSError) as error:
            blame(self.lease)
            return f"older checkpoints are not deleted: {error}"
        return None


def save(trainer: Trainer) -> Saved:
    """Write a checkpoint into the run's ``save`` folder and delete the ones that need not be kept; collective.

    Raises:
        StorageError: on every rank, if it cannot be written; older checkpoints are unchanged.
        RuntimeError: if the samples that the ranks have read are not those of the sample stream.

    """
    return prepare(trainer).run(trainer.mesh.world)


def begin_save(trainer: Trainer, staging: Staging, group: Group) -> Future[Saved]:
    """Copy the contents of a checkpoint, and write them in a background thread; collective.

    Args:
        trainer: may take steps as soon as the call returns.
        staging: memory for the copy; in use until the result is available.
        group: all ranks, with communicators that are used for nothing else meanwhile.

    Returns:
        A future of what :func:`save` returns or raises.

    Raises:
        RuntimeError: if the samples that the ranks have read are not those of the sample stream.

    """
    job = prepare(trainer)
    job = replace(job, tensors=staging.copy(job.tensors))
    blocking = time.monotonic() - job.started
    return in_background(lambda: job.run(group, blocking), f"save of step {job.iteration}")


def prepare(trainer: Trainer) -> Job:
    """Gather the contents of a checkpoint; collective.

    Raises:
        RuntimeError: if the samples that the ranks have read are not those of the sample stream.

    """
    started = time.monotonic()
    tensors = to_write(trainer)
    return Job(
        options=trainer.config.checkpoint,
        iteration=trainer.iteration,
        tensors=tensors,
        bytes=_total_bytes(tensors, trainer),
        state=state(trainer),
        config=to_dict(trainer.config),
        files=trainer.files,
        started=started,
        lease=trainer.claims.save,
    )


def refuse_full_disk(trainer: Trainer) -> None:
    """Refuse to start a run whose first checkpoint would not fit on the disk; collective.

    Raises:
        UserError: on every rank, if there is less free space than one checkpoint needs.

    """
    if trainer.config.checkpoint.save is None or trainer.iteration >= trainer.total_steps:
        return
    if problem := _shortage(trainer.config.checkpoint, size_of(trainer), trainer.mesh.world, trainer.claims.save):
        raise UserError([problem])


def size_of(trainer: Trainer) -> int:
    """Return the bytes of all tensors of a checkpoint; collective."""
    return _total_bytes(to_write(trainer), trainer)


def _total_bytes(tensors: Mapping[str, GlobalTensor], trainer: Trainer) -> int:
    return sum(comm.all_gather_objects(bytes_of(tensors), trainer.mesh.world))


def _shortage(options: CheckpointConfig, size: int, group: Group, lease: Claim | None) -> Problem | None:
    """Return the problem if rank 0 finds that a checkpoint of ``size`` bytes does not fit; collective."""
    return on_first(lambda: shortage(location(str(options.save)), size, lease), group)


@dataclass(frozen=True)
class UnderWay:
    """A save that runs in a background thread."""

    iteration: int
    outcome: Future[Saved]
    since: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        """Seconds since the save began."""
        return time.monotonic() - self.since


class Saver:
    """Saves a run synchronously, or with ``async_save`` in a thread of each rank, one save at a time.

    As a context manager it waits up to ``GRACE_SECONDS`` for a save in progress when the run fails inside.
    """

    def __init__(self, trainer: Trainer, log: RunLog) -> None:
        """Allocate staging memory and communicators for ``async_save``; collective."""
        self._trainer = trainer
        self._log = log
        self._pending: UnderWay | None = None
        self._lost_contact = False
        options = trainer.config.checkpoint
        self._staging: Staging | None = None
        if options.async_save and options.save is not None:
            self._staging = Staging(to_write(trainer), pinned=trainer.device.type == "cuda")
            self._group = trainer.mesh.beside()

    def save(self, needed: bool) -> None:
        """Save; collective. If the disk refuses, training goes on with the existing checkpoints.

        Args:
            needed: True if the run ends after this save; waits for it, and for one in progress.

        Raises:
            StorageError: if a needed checkpoint cannot be written.
            RuntimeError: if the samples that the ranks have read are not those of the sample stream.

        """
        self._log.flush()  # a run that resumes from this checkpoint must still have all records before it
        if needed:
            self._wait()
        try:
            if self._staging is None:
                self._report(save(self._trainer))
            elif not self._is_busy():
                outcome = begin_save(self._trainer, self._staging, self._group)
                self._pending = UnderWay(self._trainer.iteration, outcome)
        except StorageError as error:
            if needed:
                raise
            self._log.warning(f"step {self._trainer.iteration} is not saved: {error}")
        if needed:
            self._wait(needed=True)

    def poll(self) -> None:
        """Report the outcome of a finished background save; raise its error unless it is the disk's."""
        if self._pending is not None and self._pending.outcome.done():
            self._finish(self._pending)

    def _is_busy(self) -> bool:
        """Return True, with a warning, if any rank is still writing; collective."""
        self.poll()
        pending = self._pending
        states = comm.all_gather_objects((pending is not None, self._lost_contact), self._trainer.mesh.world)
        if any(busy for busy, _ in states):
            last = "the last save"  # finished on this rank, but not on another
            if pending is not None:
                last = f"the save of step {pending.iteration}, begun {pending.seconds:.0f}s ago,"
            interval = self._trainer.config.checkpoint.save_interval or 1
            self._log.warning(
                f"step {self._trainer.iteration} is not saved: {last} is still being written\n"
                f"  fix: --save-interval {2 * interval}"
            )
            return True
        if any(lost for _, lost in states):
            self._group = self._trainer.mesh.beside()
            self._lost_contact = False
        return False

    def _wait(self, needed: bool = False, at_most: float = float("inf")) -> None:
        """Wait up to ``at_most`` seconds for the save in progress, with a log line from time to time."""
        pending = self._pending
        if pending is None:
            return
        deadline = time.monotonic() + at_most
        while (left := deadline - time.monotonic()) > 0:
            if wait([pending.outcome], min(LINE_SECONDS, left)).done:
                break
            self._log.note(f"waiting for the checkpoint of step {pending.iteration}: {pending.seconds:.0f}s so far")
        if pending.outcome.done():
            self._finish(pending, needed)

    def _finish(self, pending: UnderWay, needed: bool = False) -> None:
        """Report the outcome of a finished background save."""
        self._pending = None
        try:
            self._report(pending.outcome.result())
        except StorageError as error:
            if needed:
                raise
            self._log.warning(f"step {pending.iteration} is not saved: {error}")
        except Exception as error:
            if needed or not is_lost_contact(error):
                raise
            self._lost_contact = True
            self._log.warning(f"step {pending.iteration} is not saved: the ranks lost contact while writing: {error}")

    def _report(self, saved: Saved) -> None:
        self._log.checkpoint(saved.path, saved.bytes, saved.seconds, saved.blocking)
        if saved.warning:
            self._log.warning(saved.warning)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Wait for a save in progress after a failure, without hiding that failure."""
        if not isinstance(error, Exception) or self._pending is None:
            return
        try:
            self._wait(at_most=GRACE_SECONDS)
        except Exception as other:
            self._log.warning(f"the save in progress failed, too: {other}")
