"""Saving a run: what is prepared, written, waited for, skipped and told of, and when older checkpoints may go.

What a checkpoint holds is in `checkpointing`.
"""

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
"""How often somebody who waits for a save is told so."""

GRACE_SECONDS = 60.0
"""How long a run that fails waits for a save that is under way."""


@dataclass(frozen=True)
class Saved:
    """A checkpoint that was written.

    Attributes:
        path: its folder.
        iteration: steps taken when it was begun.
        bytes: of all tensors.
        seconds: from its beginning until it was on the disk and older ones were deleted.
        blocking: those of them in which no step could be taken; None for all.
        warning: what went wrong afterwards.
    """

    path: Location
    iteration: int
    bytes: int
    seconds: float
    blocking: float | None
    warning: str | None


@dataclass(frozen=True)
class Job:
    """A checkpoint that is to be written, with all that goes into it.

    Attributes:
        options: of the run.
        iteration: steps taken.
        tensors: with this rank's parts.
        state: how far the run is.
        config: the run's, as JSON.
        files: small ones that go with it.
        bytes: of the tensors of all ranks.
        started: what ``time.monotonic()`` was.
        claim: on the run's ``save`` folder.
    """

    options: CheckpointConfig
    iteration: int
    tensors: Mapping[str, GlobalTensor]
    state: Mapping[str, Any]
    config: dict[str, Any]
    files: Mapping[str, Path | bytes]
    bytes: int
    started: float
    claim: Claim | None = None

    def run(self, group: Group, blocking: float | None = None) -> Saved:
        """Write it, if there is room, and then delete those that need not be kept; collective over ``group``.

        Only here is the disk asked for anything, so that one that does not answer stops nobody else.

        Older ones are deleted by rank 0, after the new one was opened as a start of the run opens it: marker and
        manifest as they were written, every file there and as long as it should be. Where it cannot be, none is.

        Raises:
            StorageError: when there is no room for it or it cannot be written, on every rank alike; the older ones are
                as they were.
            SupersededError: when a later start has the folder.

        """
        if problem := _shortage(self.options, self.bytes, group, self.claim):
            raise StorageError(str(problem))
        folder = Checkpoints(location(str(self.options.save)))
        path = folder.path(self.iteration)
        write(path, self.tensors, self.state, self.config, group, self.files, self.claim)
        warning = self._make_room(folder, path) if group.rank == 0 else None
        return Saved(path, self.iteration, self.bytes, time.monotonic() - self.started, blocking, warning)

    def _make_room(self, folder: Checkpoints, path: Location) -> str | None:
        """Delete what need not be kept; what speaks against it, which is no reason to end a run.

        Raises:
            SupersededError: when a later start has the folder.
        """
        try:
            Manifest.open(path)
            folder.retain(self.options.keep_last, self.options.keep_every, newest=self.iteration, claim=self.claim)
        except SupersededError:
            raise
        except (CheckpointError, OSError) as error:
            blame(self.claim)
            return f"older checkpoints are not deleted: {error}"
        return None


def save(trainer: Trainer) -> Saved:
    """Write a checkpoint into the run's ``save`` folder and delete those that need not be kept; collective.

    Raises:
        StorageError: when it cannot be written, on every rank alike; the older ones are as they were.
        RuntimeError: when the samples that the ranks have read are not those of the stream.

    """
    return prepare(trainer).run(trainer.mesh.world)


def begin_save(trainer: Trainer, staging: Staging, group: Group) -> Future[Saved]:
    """Copy what a checkpoint holds, and write it in a thread; collective.

    Args:
        trainer: which may take steps as soon as the call returns.
        staging: memory for the copy, which nobody else touches until the result is there.
        group: all ranks, with communicators that nothing else uses meanwhile.

    Returns:
        What came of it, in time: what :func:`save` returns or raises.

    Raises:
        RuntimeError: when the samples that the ranks have read are not those of the stream.

    """
    job = prepare(trainer)
    job = replace(job, tensors=staging.copy(job.tensors))
    blocking = time.monotonic() - job.started
    return in_background(lambda: job.run(group, blocking), f"save of step {job.iteration}")


def prepare(trainer: Trainer) -> Job:
    """Gather what goes into a checkpoint; collective.

    Raises:
        RuntimeError: when the samples that the ranks have read are not those of the stream.

    """
    t, started = trainer, time.monotonic()
    tensors, options = to_write(t), t.config.checkpoint
    size = _size_of(tensors, t)
    return Job(options, t.iteration, tensors, state(t), to_dict(t.config), t.files, size, started, t.claims.save)


def refuse_full_disk(trainer: Trainer) -> None:
    """Do not begin a run whose first checkpoint would not find room; collective.

    Raises:
        UserError: on every rank, when its disk has less room than one takes.

    """
    if trainer.config.checkpoint.save is None or trainer.iteration >= trainer.total_steps:
        return
    if problem := _shortage(trainer.config.checkpoint, size_of(trainer), trainer.mesh.world, trainer.claims.save):
        raise UserError([problem])


def size_of(trainer: Trainer) -> int:
    """Bytes of all tensors of a checkpoint; collective."""
    return _size_of(to_write(trainer), trainer)


def _size_of(tensors: Mapping[str, GlobalTensor], trainer: Trainer) -> int:
    return sum(comm.all_gather_objects(bytes_of(tensors), trainer.mesh.world))


def _shortage(options: CheckpointConfig, size: int, group: Group, claim: Claim | None) -> Problem | None:
    """What is wrong where a checkpoint of that size does not fit, as rank 0 sees the disk; collective."""
    return on_first(lambda: shortage(location(str(options.save)), size, claim), group)


@dataclass(frozen=True)
class UnderWay:
    """A save that a thread is at."""

    iteration: int
    outcome: Future[Saved]
    since: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        """Since it was begun."""
        return time.monotonic() - self.since


class Saver:
    """Saves a run: at once, or with ``async_save`` by a thread of each rank, one save at a time.

    A context: a run that fails inside waits for ``GRACE_SECONDS`` at most for the save that is under way.
    """

    def __init__(self, trainer: Trainer, log: RunLog) -> None:
        """Take what saving in threads needs, where it is asked for; collective."""
        self._trainer, self._log = trainer, log
        self._under_way: UnderWay | None = None
        self._lost_contact = False
        options = trainer.config.checkpoint
        self._staging: Staging | None = None
        if options.async_save and options.save is not None:
            self._staging = Staging(to_write(trainer), pinned=trainer.device.type == "cuda")
            self._group = trainer.mesh.beside()

    def save(self, needed: bool) -> None:
        """Save; collective. Where the disk refuses, training goes on with the checkpoints there are.

        Args:
            needed: nothing comes after it: it is waited for, and so is one that is under way.

        Raises:
            StorageError: for a checkpoint that is needed and cannot be written.
            RuntimeError: when the samples that the ranks have read are not those of the stream.

        """
        self._log.flush()  # what was reported up to here must survive a crash of a run that goes on from here
        if needed:
            self._finish()
        try:
            if self._staging is None:
                self._tell(save(self._trainer))
            elif not self._is_busy():
                outcome = begin_save(self._trainer, self._staging, self._group)
                self._under_way = UnderWay(self._trainer.iteration, outcome)
        except StorageError as error:
            self._refused(self._trainer.iteration, error, needed)
        if needed:
            self._finish(needed=True)

    def look(self) -> None:
        """Tell what came of the save under way, once that is known.

        Raises:
            Exception: what nobody expects of a disk.

        """
        if self._under_way is not None and self._under_way.outcome.done():
            self._settle(self._under_way)

    def _is_busy(self) -> bool:
        """Whether any rank is still at a save, which then is told; collective."""
        self.look()
        under_way, world = self._under_way, self._trainer.mesh.world
        states = comm.all_gather_objects((under_way is not None, self._lost_contact), world)
        if any(busy for busy, _ in states):
            self._skipped(under_way)
            return True
        if any(lost for _, lost in states):
            self._group, self._lost_contact = self._trainer.mesh.beside(), False
        return False

    def _skipped(self, under_way: UnderWay | None) -> None:
        """Tell that there is no save because of another one, which may be over on this rank."""
        last = "the last save"
        if under_way is not None:
            last = f"the save of step {under_way.iteration}, begun {under_way.seconds:.0f}s ago,"
        interval = self._trainer.config.checkpoint.save_interval or 1
        self._log.warning(
            f"step {self._trainer.iteration} is not saved: {last} is still being written\n"
            f"  fix: --save-interval {2 * interval}"
        )

    def _finish(self, needed: bool = False, at_most: float = float("inf")) -> None:
        """Wait for the save under way, and say so from time to time."""
        under_way = self._under_way
        if under_way is None:
            return
        deadline = time.monotonic() + at_most
        while (left := deadline - time.monotonic()) > 0:
            if wait([under_way.outcome], min(LINE_SECONDS, left)).done:
                break
            self._log.note(f"waiting for the checkpoint of step {under_way.iteration}: {under_way.seconds:.0f}s so far")
        if under_way.outcome.done():
            self._settle(under_way, needed)

    def _settle(self, under_way: UnderWay, needed: bool = False) -> None:
        """Tell what came of a save."""
        self._under_way = None
        try:
            self._tell(under_way.outcome.result())
        except StorageError as error:
            self._refused(under_way.iteration, error, needed)
        except Exception as error:
            if needed or not is_lost_contact(error):
                raise
            self._lost_contact = True
            self._log.warning(f"step {under_way.iteration} is not saved: the ranks lost contact while writing: {error}")

    def _tell(self, saved: Saved) -> None:
        self._log.checkpoint(saved.path, saved.bytes, saved.seconds, saved.blocking)
        if saved.warning:
            self._log.warning(saved.warning)

    def _refused(self, iteration: int, error: StorageError, needed: bool) -> None:
        """A disk refused a save: no reason to end, unless the checkpoint is ``needed``."""
        if needed:
            raise error
        self._log.warning(f"step {iteration} is not saved: {error}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Nothing is under way after a run that ended well. One that failed must tell of its own failure."""
        if not isinstance(error, Exception) or self._under_way is None:
            return
        try:
            self._finish(at_most=GRACE_SECONDS)
        except Exception as other:
            self._log.warning(f"the save under way failed, too: {other}")
