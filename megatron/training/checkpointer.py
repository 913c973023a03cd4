"""Save a run and load it: ``Checkpointer`` with ``load``, ``save`` and ``wait``.

:mod:`megatron.training.checkpoint_contents` is what a checkpoint holds, and
:mod:`megatron.training.resume_source` chooses the one that a start loads.
"""

from __future__ import annotations

import json
import time
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from megatron.arguments.sources import to_dict
from megatron.checkpoint.durable_files import publish_file
from megatron.checkpoint.errors import (
    CheckpointError,
    DamagedCheckpointError,
    StorageError,
    SupersededError,
    describe_os_error,
)
from megatron.checkpoint.folder import CheckpointFolder
from megatron.checkpoint.format import Manifest
from megatron.checkpoint.lease import Lease, raise_if_superseded
from megatron.checkpoint.load import open_manifest
from megatron.checkpoint.location import Location, parse_location
from megatron.checkpoint.save import HostCopyBuffer, disk_space_problem, run_in_background, save_sharded, share_lease
from megatron.config.batch import Origin
from megatron.config.checkpoint import CheckpointConfig
from megatron.config.errors import Problem, UserError
from megatron.convert.sources import SourceOptions, open_source
from megatron.convert.tokenizer_files import (
    TOKENIZER_PREFIX,
    SmallFiles,
    files_to_carry,
    saved_tokenizer_files,
    tokenizer_notes,
    with_end_ids,
)
from megatron.data.blended_dataset import segments_of
from megatron.data.chat import end_ids
from megatron.data.dataset_info import tokenizer_files_to_save
from megatron.data.packed_dataset import PackedDataset
from megatron.distributed import comm
from megatron.distributed.comm import Group
from megatron.distributed.launch import is_peer_lost, run_on_rank0
from megatron.distributed.places import PLACE
from megatron.training.checkpoint_contents import (
    CheckpointContents,
    restore_run,
    restore_weights,
    tensors_to_save,
    total_bytes,
)
from megatron.training.component import Component
from megatron.training.loggers.run_logger import RunLogger
from megatron.training.resume_source import (
    NoCheckpointError,
    ResumeSource,
    compare_with_checkpoint,
    find_resume_source,
    next_origin,
    passed_over_note,
    phase_note,
)
from megatron.training.trainer import Trainer

if TYPE_CHECKING:
    from megatron.training.local_checkpoints import NodeCheckpoints

WAIT_NOTE_SECONDS = 30.0
"""Seconds between log lines while waiting for a save."""

GRACE_SECONDS = 60.0
"""Seconds that a failing run waits for a save in progress."""

FINISHED_FILE = "finished.json"
"""File in the run's folder that exists exactly if the last step has been taken and saved.

Scripts that requeue a job test it. A launcher's exit status is not enough: it is lost with the node of the batch
script, and a scheduler may report 0 itself.
"""


def hold_save_folder(save: str | None, world: Group) -> AbstractContextManager[Lease | None]:
    """Create the ``save`` folder and hold its lease for this run; every rank gets the lease.

    An unwritable folder is found before the first step. An earlier start of the same job that still holds the lease
    is superseded.

    Raises:
        CheckpointError: on every rank, if another run holds the lease, or the folder cannot be written.
    """
    return nullcontext() if save is None else share_lease(parse_location(save), world)


def choose_resume_source(options: CheckpointConfig, world: Group, nodes: NodeCheckpoints | None = None) -> ResumeSource:
    """Return what the run starts from, the same on every rank; collective. Rank 0 searches ``save`` and ``load``.

    Raises:
        UserError: as :func:`find_resume_source`.
    """
    try:
        source = ResumeSource.from_json(run_on_rank0(lambda: find_resume_source(options).to_json(), world))
    except NoCheckpointError as error:
        if nodes is None:
            raise
        return nodes.add_to(error)
    return source if nodes is None else nodes.add_to(source)


class NoCheckpointLeftError(UserError):
    """All checkpoints of a start are damaged, found while they were loaded."""

    def __init__(self, passed_over: Sequence[str]) -> None:
        """Store notes on the checkpoints."""
        super().__init__([Problem("E811", "\n  ".join(["no checkpoint can be used:", *passed_over]))])
        self.passed_over = tuple(passed_over)


@dataclass(frozen=True)
class SavedCheckpoint:
    """A checkpoint that was written."""

    path: Location
    bytes: int  # of all tensors
    seconds: float  # until it was on disk and older checkpoints were deleted
    blocking: float | None  # seconds in which training was paused; None for all of them
    warning: str | None  # from deleting older checkpoints


class Checkpointer:
    """Loads what a run starts from, and saves it: synchronously, or with ``async_save`` in a thread of each rank."""

    def __init__(self, trainer: Trainer, lease: Lease | None = None, nodes: NodeCheckpoints | None = None) -> None:
        """Load and save the state of ``trainer``.

        Args:
            trainer: the run.
            lease: this start's lease on the ``save`` folder.
            nodes: further checkpoints of the run, on the nodes' own disks.
        """
        self.trainer = trainer
        self.lease = lease
        self.nodes = nodes
        self.options = trainer.config.checkpoint
        self.world = trainer.mesh.world
        self.pending: tuple[CheckpointContents, Future[SavedCheckpoint]] | None = None  # in the background
        self._lost_contact = False  # the last background save failed because another rank did not answer
        self._staging: HostCopyBuffer | None = None

    # ---- Loading

    def load(self, source: ResumeSource) -> list[str]:
        """Load the start of the run into the trainer, which was built with ``fresh=source.fresh``; collective.

        Returns:
            Notes: what was loaded, which options have changed, which checkpoints were passed over.

        Raises:
            UserError: if changed options do not allow resuming, no checkpoint can be read, or the first one that the
                run saves would not fit on the disk.
            DataError: if the data cannot be opened.
        """
        trainer, config = self.trainer, self.trainer.config
        notes = [*source.notes, *([] if self.nodes is None else self.nodes.connect(trainer))]
        tokenizer = tokenizer_files_to_save(config.data, config.model.vocab)
        trainer.files = own_files = {TOKENIZER_PREFIX + name: content for name, content in tokenizer.items()}
        for component in trainer.components:
            notes += component.before_load(source)
        if source.weights is not None:
            # Links are checked with the options.
            weights = open_source(source.weights, SourceOptions(model=config.model, follow_links=True))
            found = weights.small_files()
            trainer.files = files_to_carry(own_files, found)
            restore_weights(trainer, weights)
            notes += [f"weights from {source.weights}", *tokenizer_notes(own_files, found)]
        elif not source.fresh:
            notes = self._load_newest(source, notes, own_files)
        train = segments_of(trainer.data.datasets["train"])[0] if "train" in trainer.data.datasets else None
        if isinstance(train, PackedDataset):
            trainer.files = with_end_ids(trainer.files, end_ids(config.data, train.conversations))
        if self.options.save is not None and trainer.iteration < trainer.total_steps:
            size = total_bytes(tensors_to_save(trainer), self.world)

            def check_space() -> None:
                if problem := disk_space_problem(parse_location(str(self.options.save)), size, self.lease):
                    raise UserError([problem])

            run_on_rank0(check_space, self.world)
        return notes

    def _load_newest(self, source: ResumeSource, notes: list[str], own_files: SmallFiles) -> list[str]:
        """Load the first checkpoint of ``source`` that is not damaged; return all notes."""
        trainer = self.trainer
        for path in source.paths:
            try:
                opened = None if self.nodes is None else self.nodes.open(trainer, path)
                manifest, more = opened or (open_manifest(path, self.world), [])
                notes += more
                found = self._tokenizer_files(manifest)
                changes, batches_since, mode = compare_with_checkpoint(
                    manifest, trainer.config, self.world.size, source.mode, notes
                )
                trainer.files = files_to_carry(own_files, found)
                notes += [note for component in trainer.components for note in component.check(manifest)]
                if mode == "weights-only":
                    restore_weights(trainer, manifest)
                    notes += tokenizer_notes(own_files, found)
                    loaded = f"weights from {manifest.path}"
                else:
                    origin = Origin.from_state(manifest.state)
                    if mode == "new-phase":
                        origin = next_origin(manifest, trainer.config, self.world.size)
                        notes.append(phase_note(origin, trainer.config, self.world.size))
                    notes += restore_run(trainer, manifest, batches_since, origin)
                    position = f"step {trainer.iteration}, {trainer.consumed_samples:,} samples"
                    loaded = f"resumed from {manifest.path}: {position}"
            except DamagedCheckpointError as error:
                notes.append(passed_over_note(path, error))
                continue
            return [*notes, loaded, *changes]
        raise NoCheckpointLeftError(notes)

    def _tokenizer_files(self, manifest: Manifest) -> dict[str, bytes]:
        def read() -> dict[str, str]:
            return {name: b64encode(content).decode() for name, content in saved_tokenizer_files(manifest).items()}

        return {name: b64decode(content) for name, content in run_on_rank0(read, self.world).items()}

    # ---- Saving

    @contextmanager
    def saving(self, log: RunLogger, on_save: Callable[[Location], None]) -> Iterator[None]:
        """Save inside this context; collective. After a failure wait ``GRACE_SECONDS`` for a save in progress.

        If the state is whole after the failure, the step is saved.

        Args:
            log: reports saves.
            on_save: called on every rank with the path of each checkpoint that was written.
        """
        self._log, self._on_save = log, on_save
        if self.options.async_save and self.options.save is not None:
            self._staging = HostCopyBuffer(tensors_to_save(self.trainer), pinned=self.trainer.device.type == "cuda")
            self._group = self.trainer.mesh.background_group()
        try:
            yield
        except Exception as error:
            PLACE.finishes_save = True  # its phase stays that of the failure
            try:
                whole = any(component.is_whole_after(error) for component in self.trainer.components)
                if whole and self.options.save is not None:
                    self.save(needed=True)
                self.wait(at_most=GRACE_SECONDS)
            except Exception as other:
                log.warning(f"the save in progress failed, too: {other}")
            raise

    def save(self, needed: bool) -> bool:
        """Save now; collective. If it is ``needed``, wait until it is written, and raise the disk's errors.

        If the disk refuses another save, training goes on with the existing checkpoints. Returns False where another
        replica saves for the run.

        Raises:
            StorageError: if the checkpoint is needed and cannot be written.
        """
        self._log.flush()  # a run that resumes from this checkpoint must still have all records before it
        if not all(component.writes(self) for component in self.trainer.acting(Component.writes)):
            return False
        if needed:
            self.wait()
        try:
            if self._staging is None:
                self._report(self.write())
            elif not self._is_busy():
                self.pending = self._save_in_background(self._staging)
        except StorageError as error:
            if needed:
                raise
            self._log.warning(f"step {self.trainer.iteration} is not saved: {error}")
        if needed:
            self.wait(needed=True)
        return True

    def wait(self, needed: bool = False, at_most: float = float("inf")) -> None:
        """Wait up to ``at_most`` seconds for the save in progress, with a log line from time to time."""
        if self.pending is None:
            return
        contents, outcome = self.pending
        deadline = time.monotonic() + at_most
        while (left := deadline - time.monotonic()) > 0 and not wait([outcome], min(WAIT_NOTE_SECONDS, left)).done:
            seconds = time.monotonic() - contents.started
            self._log.note(f"waiting for the checkpoint of step {contents.iteration}: {seconds:.0f}s so far")
        self.poll(needed)

    def write(self) -> SavedCheckpoint:
        """Write a checkpoint into the ``save`` folder and delete those that need not be kept; collective.

        Raises:
            StorageError: on every rank, if it cannot be written; older checkpoints are unchanged.
            RuntimeError: if the samples that the ranks have read are not those of the sample stream.
        """
        return self._write(CheckpointContents.of(self.trainer), self.world)

    def _write(self, contents: CheckpointContents, group: Group, blocking: float | None = None) -> SavedCheckpoint:
        """Write a checkpoint, then delete the ones that need not be kept; collective over ``group``.

        All disk access is in here, so with ``async_save`` a hanging disk does not block training. Rank 0 deletes older
        checkpoints only after it has opened the new one as a start would.
        """
        options, trainer = self.options, self.trainer
        folder = CheckpointFolder(parse_location(str(options.save)))
        path = folder.path(contents.iteration)
        config = to_dict(trainer.config)
        size = save_sharded(path, contents.tensors, contents.state, config, group, trainer.files, self.lease)
        warning = None
        if group.rank == 0:
            try:
                Manifest.open(path)
                kept = options.keep_last, options.keep_every, contents.iteration
                folder.retain(*kept, lease=self.lease, held=trainer.held_checkpoints)
            except SupersededError:
                raise
            except (CheckpointError, OSError) as error:
                raise_if_superseded(self.lease)
                warning = f"older checkpoints are not deleted: {error}"
        return SavedCheckpoint(path, size, time.monotonic() - contents.started, blocking, warning)

    def _save_in_background(self, staging: HostCopyBuffer) -> tuple[CheckpointContents, Future[SavedCheckpoint]]:
        """Copy the contents of a checkpoint, after which steps may be taken, and write them in a thread."""
        contents = CheckpointContents.of(self.trainer)
        contents = replace(contents, tensors=staging.copy(contents.tensors))
        blocking = time.monotonic() - contents.started
        write = partial(self._write, contents, self._group, blocking)
        return contents, run_in_background(write, f"save of step {contents.iteration}")

    def _is_busy(self) -> bool:
        """Return True, with a warning, if any rank is still writing; collective."""
        self.poll()
        states = comm.all_gather_objects([self.pending is not None, self._lost_contact], self.world)
        if any(busy for busy, _ in states):
            last = "the last save"  # finished on this rank, but not on another
            if self.pending is not None:
                contents, _ = self.pending
                last = f"the save of step {contents.iteration}, begun {time.monotonic() - contents.started:.0f}s ago,"
            interval = self.options.save_interval or 1
            self._log.warning(
                f"step {self.trainer.iteration} is not saved: {last} is still being written\n"
                f"  fix: --save-interval {2 * interval}"
            )
            return True
        if any(lost for _, lost in states):
            self._group = self.trainer.mesh.background_group()
            self._lost_contact = False
        return False

    def poll(self, needed: bool = False) -> None:
        """Report the outcome of a finished background save; raise its error unless it is the disk's."""
        if self.pending is None or not self.pending[1].done():
            return
        (contents, outcome), self.pending = self.pending, None
        try:
            self._report(outcome.result())
        except StorageError as error:
            if needed:
                raise
            self._log.warning(f"step {contents.iteration} is not saved: {error}")
        except Exception as error:
            if needed or not is_peer_lost(error):
                raise
            self._lost_contact = True
            self._log.warning(f"step {contents.iteration} is not saved: the ranks lost contact while writing: {error}")

    def _report(self, saved: SavedCheckpoint) -> None:
        self._log.checkpoint(saved.path, saved.bytes, saved.seconds, saved.blocking)
        if saved.warning:
            self._log.warning(saved.warning)
        self._on_save(saved.path)

    # ---- The end of training

    def mark_finished(self, finished: bool) -> None:
        """Write ``finished.json`` after the last step has been saved, or remove it while steps are left; collective.

        Raises:
            StorageError: on every rank, if it cannot be written. The next start, which has nothing else to do, retries.
            OSError: on every rank, if it cannot be removed.
            SupersededError: on every rank, if a later start owns the ``save`` folder: the file may be its own.
        """

        def mark(path: Path) -> None:
            if self.lease is not None:
                self.lease.check()
            if not finished:
                path.unlink(missing_ok=True)
                return
            checkpoint = self._last_checkpoint()
            facts = {
                "iteration": self.trainer.iteration,
                "consumed-samples": self.trainer.consumed_samples,
                "run-id": self.trainer.progress.run_id,
                "checkpoint": None if checkpoint is None else str(checkpoint),
                "time": time.time(),
            }
            try:
                publish_file(path, (json.dumps(facts, indent=2) + "\n").encode())
            except OSError as error:
                sentence = f"{path}, which marks the end of training, cannot be written: {describe_os_error(error)}"
                fix = "free some space and start the run again: it only writes this file"
                raise StorageError(sentence, fix) from error

        if (run_dir := self.trainer.config.logging.run_dir) is not None:
            run_on_rank0(partial(mark, Path(run_dir) / FINISHED_FILE), self.world)

    def is_last_step_saved(self) -> bool:
        """Return True if the ``save`` folder has a complete checkpoint of the last step taken; collective."""
        return run_on_rank0(lambda: self._last_checkpoint() is not None, self.world)

    def _last_checkpoint(self) -> Location | None:
        """Return the checkpoint of the last step taken, or None if it is missing or damaged."""
        if self.options.save is None:
            return None
        path = CheckpointFolder(parse_location(self.options.save)).path(self.trainer.iteration)
        try:
            return Manifest.open(path).path
        except DamagedCheckpointError:
            return None
