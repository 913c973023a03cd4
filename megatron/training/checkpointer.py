"""Save and load a run: what a checkpoint holds, when it is written, and how a start loads it.

Tensors are global and named: weights in the precision of the main parameters, and optimizer state under
``optim.{kind}.{name}``. The rest is plain numbers. Initial weights and dropout are functions of seeds, and the sample
order is a function of consumed samples, so no random generator state is saved.

``Checkpointer`` saves synchronously, or in a background thread of each rank; rank 0 deletes old checkpoints after the
new one has been validated. ``load_start_state`` loads what ``resume_source`` has found, or the next older checkpoint
if that one is damaged.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, wait
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar, cast

from megatron.arguments.sources import to_dict
from megatron.checkpoint.errors import CheckpointError, DamagedCheckpointError, StorageError, SupersededError
from megatron.checkpoint.folder import CheckpointFolder, LocalCheckpoint
from megatron.checkpoint.format import Manifest
from megatron.checkpoint.lease import Lease, acquire_lease, raise_if_superseded
from megatron.checkpoint.local_store import fetch_missing_files
from megatron.checkpoint.object_store import Location, parse_location
from megatron.checkpoint.save import HostCopyBuffer, disk_space_problem, run_in_background, save_sharded
from megatron.checkpoint.tensor_file import GlobalTensor
from megatron.config.errors import Problem, UserError
from megatron.config.launch import JobStart
from megatron.config.run import CheckpointConfig
from megatron.convert.huggingface.config import SPECIAL_TOKEN_IDS
from megatron.convert.huggingface.weights import HuggingFaceWeights
from megatron.convert.saved_model import (
    GENERATION_CONFIG_FILE,
    TOKENIZER_PREFIX,
    find_tokenizer_files,
    saved_tokenizer_files,
)
from megatron.data.dataset_info import tokenizer_files_to_save
from megatron.data.errors import DataError
from megatron.distributed import comm
from megatron.distributed.comm import Group
from megatron.distributed.launch import is_peer_lost
from megatron.training.local_checkpoints import add_local_checkpoints, open_local_store
from megatron.training.loggers.run_logger import RunLogger
from megatron.training.resume_source import (
    CheckpointCandidate,
    ResumeSource,
    compare_with_checkpoint,
    find_resume_source,
    passed_over_note,
)
from megatron.training.trainer import Trainer
from megatron.training.trainer_state import (
    checkpoint_bytes,
    local_tensors,
    restore_from_source,
    restore_run,
    restore_weights,
    run_state,
    tensors_to_load,
    tensors_to_save,
)

T = TypeVar("T")


def run_on_rank0(act: Callable[[], T], world: Group) -> T:
    """Call ``act`` on rank 0 only, and return its result on every rank; collective.

    Raises:
        CheckpointError, UserError, OSError: on every rank, if ``act`` raises it.
    """
    outcome: Any = None
    if world.rank == 0:
        try:
            outcome = act(), None
        except (CheckpointError, UserError, OSError) as error:
            outcome = None, error
    value, failure = comm.broadcast_object(outcome, world)
    if failure is not None:
        raise failure
    return cast(T, value)


@contextmanager
def hold_save_folder(save: str | None, world: Group) -> Iterator[Lease | None]:
    """Create the ``save`` folder and hold its lease for this run; every rank gets the lease.

    An unwritable folder is found before the first step. An earlier start of the same job that still holds the lease
    is superseded.

    Raises:
        CheckpointError: on every rank, if another run holds the lease, or the folder cannot be written.
    """
    with ExitStack() as stack:
        lease = None
        if save is not None:
            start = JobStart.read(os.environ)
            lease = run_on_rank0(lambda: stack.enter_context(acquire_lease(parse_location(save), start=start)), world)
        yield lease


WAIT_NOTE_SECONDS = 30.0
"""Seconds between log lines while waiting for a save."""

GRACE_SECONDS = 60.0
"""Seconds that a failing run waits for a save in progress."""


@dataclass(frozen=True)
class SavedCheckpoint:
    """A checkpoint that was written."""

    path: Location
    iteration: int  # steps taken when the save began
    bytes: int  # of all tensors
    seconds: float  # until it was on disk and older checkpoints were deleted
    blocking: float | None  # seconds in which training was paused; None for all of them
    warning: str | None  # from deleting older checkpoints


@dataclass(frozen=True)
class SaveJob:
    """A checkpoint to be written, with all its contents."""

    options: CheckpointConfig
    iteration: int  # steps taken
    tensors: Mapping[str, GlobalTensor]  # this rank's parts
    state: Mapping[str, Any]  # progress of the run
    config: dict[str, Any]  # of the run, as JSON
    files: Mapping[str, Path | bytes]  # small files that the checkpoint carries
    bytes: int  # of the tensors of all ranks
    started: float  # on the clock of ``time.monotonic()``
    lease: Lease | None  # on the run's ``save`` folder

    def run(self, group: Group, blocking: float | None = None) -> SavedCheckpoint:
        """Write the checkpoint if it fits, then delete the ones that need not be kept; collective over ``group``.

        All disk access is in here, so with ``async_save`` a hanging disk does not block training. Rank 0 deletes older
        checkpoints only after it has opened the new one as a start would.

        Raises:
            StorageError: on every rank, if it does not fit or cannot be written; older checkpoints are unchanged.
            SupersededError: if a later start owns the folder.
        """
        if problem := _shortage(self.options, self.bytes, group, self.lease):
            raise StorageError(str(problem))
        folder = CheckpointFolder(parse_location(str(self.options.save)))
        path = folder.path(self.iteration)
        save_sharded(path, self.tensors, self.state, self.config, group, self.files, self.lease)
        warning = None
        if group.rank == 0:
            try:
                Manifest.open(path)
                folder.retain(self.options.keep_last, self.options.keep_every, newest=self.iteration, lease=self.lease)
            except SupersededError:
                raise
            except (CheckpointError, OSError) as error:
                raise_if_superseded(self.lease)
                warning = f"older checkpoints are not deleted: {error}"
        return SavedCheckpoint(path, self.iteration, self.bytes, time.monotonic() - self.started, blocking, warning)


def save_checkpoint(trainer: Trainer) -> SavedCheckpoint:
    """Write a checkpoint into the run's ``--save`` folder and delete those that need not be kept; collective.

    Raises:
        StorageError: on every rank, if it cannot be written; older checkpoints are unchanged.
    """
    return prepare_save(trainer).run(trainer.mesh.world)


def prepare_save(trainer: Trainer) -> SaveJob:
    """Gather the contents of a checkpoint; collective.

    Raises:
        RuntimeError: if the samples that the ranks have read are not those of the sample stream.
    """
    started = time.monotonic()
    return SaveJob(
        options=trainer.config.checkpoint,
        iteration=trainer.iteration,
        tensors=tensors_to_save(trainer),
        bytes=checkpoint_bytes(trainer),
        state=run_state(trainer),
        config=to_dict(trainer.config),
        files=trainer.files,
        started=started,
        lease=trainer.leases.save,
    )


def check_disk_space(trainer: Trainer) -> None:
    """Refuse to start a run whose first checkpoint would not fit on the disk; collective.

    Raises:
        UserError: on every rank, if there is less free space than one checkpoint needs.
    """
    options = trainer.config.checkpoint
    if options.save is None or trainer.iteration >= trainer.total_steps:
        return
    if problem := _shortage(options, checkpoint_bytes(trainer), trainer.mesh.world, trainer.leases.save):
        raise UserError([problem])


def _shortage(options: CheckpointConfig, size: int, group: Group, lease: Lease | None) -> Problem | None:
    """Return the problem if rank 0 finds that a checkpoint of ``size`` bytes does not fit; collective."""
    return run_on_rank0(lambda: disk_space_problem(parse_location(str(options.save)), size, lease), group)


@dataclass(frozen=True)
class PendingSave:
    """A save that runs in a background thread."""

    iteration: int
    since: float  # on the clock of ``time.monotonic()``
    outcome: Future[SavedCheckpoint]

    @property
    def seconds(self) -> float:
        """Seconds since the save began."""
        return time.monotonic() - self.since


class Checkpointer:
    """Saves a run synchronously, or with ``async_save`` in a thread of each rank, one save at a time.

    As a context manager it waits up to ``GRACE_SECONDS`` for a save in progress when the run fails inside.
    """

    def __init__(self, trainer: Trainer, log: RunLogger, on_save: Callable[[Location], None]) -> None:
        """Allocate staging memory and communicators for ``async_save``; collective.

        Args:
            trainer: the run to save.
            log: reports saves.
            on_save: called on every rank with the path of each checkpoint that was written.
        """
        self._trainer = trainer
        self._log = log
        self._on_save = on_save
        self.pending: PendingSave | None = None  # the asynchronous save in progress
        self._lost_contact = False
        options = trainer.config.checkpoint
        self._staging: HostCopyBuffer | None = None
        if options.async_save and options.save is not None:
            self._staging = HostCopyBuffer(tensors_to_save(trainer), pinned=trainer.device.type == "cuda")
            self._group = trainer.mesh.background_group()

    def save(self, needed: bool) -> None:
        """Save; collective. If the disk refuses, training goes on with the existing checkpoints.

        Args:
            needed: True if the run ends after this save; waits for it, and for one in progress.

        Raises:
            StorageError: if a needed checkpoint cannot be written.
        """
        self._log.flush()  # a run that resumes from this checkpoint must still have all records before it
        if needed:
            self._wait()
        try:
            if self._staging is None:
                self._report(save_checkpoint(self._trainer))
            elif not self._is_busy():
                self.pending = self._save_in_background(self._staging, self._group)
        except StorageError as error:
            if needed:
                raise
            self._log.warning(f"step {self._trainer.iteration} is not saved: {error}")
        if needed:
            self._wait(needed=True)

    def _save_in_background(self, staging: HostCopyBuffer, group: Group) -> PendingSave:
        """Copy the contents of a checkpoint, after which steps may be taken, and write them in a thread."""
        job = prepare_save(self._trainer)
        copied = replace(job, tensors=staging.copy(job.tensors))
        blocking = time.monotonic() - job.started
        outcome = run_in_background(lambda: copied.run(group, blocking), f"save of step {job.iteration}")
        return PendingSave(job.iteration, job.started, outcome)

    def poll(self) -> None:
        """Report the outcome of a finished background save; raise its error unless it is the disk's."""
        if self.pending is not None and self.pending.outcome.done():
            self._finish(self.pending)

    def _is_busy(self) -> bool:
        """Return True, with a warning, if any rank is still writing; collective."""
        self.poll()
        pending = self.pending
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
            self._group = self._trainer.mesh.background_group()
            self._lost_contact = False
        return False

    def _wait(self, needed: bool = False, at_most: float = float("inf")) -> None:
        """Wait up to ``at_most`` seconds for the save in progress, with a log line from time to time."""
        pending = self.pending
        if pending is None:
            return
        deadline = time.monotonic() + at_most
        while (left := deadline - time.monotonic()) > 0:
            if wait([pending.outcome], min(WAIT_NOTE_SECONDS, left)).done:
                break
            self._log.note(f"waiting for the checkpoint of step {pending.iteration}: {pending.seconds:.0f}s so far")
        if pending.outcome.done():
            self._finish(pending, needed)

    def _finish(self, pending: PendingSave, needed: bool = False) -> None:
        """Report the outcome of a finished background save."""
        self.pending = None
        try:
            self._report(pending.outcome.result())
        except StorageError as error:
            if needed:
                raise
            self._log.warning(f"step {pending.iteration} is not saved: {error}")
        except Exception as error:
            if needed or not is_peer_lost(error):
                raise
            self._lost_contact = True
            self._log.warning(f"step {pending.iteration} is not saved: the ranks lost contact while writing: {error}")

    def _report(self, saved: SavedCheckpoint) -> None:
        self._log.checkpoint(saved.path, saved.bytes, saved.seconds, saved.blocking)
        if saved.warning:
            self._log.warning(saved.warning)
        self._on_save(saved.path)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Wait for a save in progress after a failure, without hiding that failure."""
        if not isinstance(error, Exception) or self.pending is None:
            return
        try:
            self._wait(at_most=GRACE_SECONDS)
        except Exception as other:
            self._log.warning(f"the save in progress failed, too: {other}")


TOKENIZER_JSON = TOKENIZER_PREFIX + "tokenizer.json"

SmallFiles = Mapping[str, Path | bytes]
"""Contents or paths of small files, by their names in a checkpoint."""


def choose_resume_source(options: CheckpointConfig, world: Group) -> ResumeSource:
    """Return what the run starts from, the same on every rank; collective.

    Rank 0 searches ``save`` and ``load``, and one rank per node the node's own disk.

    Raises:
        UserError: as :func:`find_resume_source` and :func:`add_local_checkpoints`.
    """
    if options.local_save is None:
        return run_on_rank0(partial(find_resume_source, options), world)
    return add_local_checkpoints(run_on_rank0(partial(_source_or_error, options), world), options, world)


def _source_or_error(options: CheckpointConfig) -> ResumeSource | UserError:
    """Return what the run starts from; or the error if ``save`` and ``load`` have nothing usable, but nodes might.

    Raises:
        UserError: for errors that local checkpoints must not hide: an unreachable store, a newer format version.
    """
    try:
        return find_resume_source(options)
    except UserError as error:
        if error.__cause__ is not None or not {problem.code for problem in error.problems} <= {"E811", "E812"}:
            raise
        return error


@dataclass(frozen=True)
class ResumeCandidate:
    """A checkpoint that a trainer may resume from, in a folder that all ranks see or on the nodes' own disks."""

    trainer: Trainer
    where: CheckpointCandidate

    @property
    def path(self) -> Location:
        """Folder of the checkpoint, or of this node's part of it."""
        if not isinstance(self.where, LocalCheckpoint):
            return self.where
        if self.trainer.local is None:
            raise ValueError("there are local checkpoints, but no local_save")
        return CheckpointFolder(self.trainer.local.folder).path(self.where.iteration)

    def open(self) -> tuple[Manifest, list[str]]:
        """Fetch the files that this node lacks; return the manifest, and notes on damaged copies. Collective.

        Raises:
            DamagedCheckpointError: on every rank, if it cannot be used.
        """
        store = self.trainer.local
        if not isinstance(self.where, LocalCheckpoint) or store is None:
            return run_on_rank0(lambda: Manifest.open(self.path), self.trainer.mesh.world), []
        wanted = tensors_to_load(self.trainer, local_tensors(self.trainer))
        try:
            return fetch_missing_files(store, self.where, wanted)
        except (OSError, StorageError) as error:
            raise DamagedCheckpointError(f"its files cannot be collected from the nodes: {error}") from error


def load_start_state(trainer: Trainer, source: ResumeSource) -> list[str]:
    """Load what the run starts from into a trainer that was built with ``fresh=source.fresh``; collective.

    Returns:
        Notes: what was loaded, which options have changed, which checkpoints were passed over.

    Raises:
        UserError: if changed options do not allow resuming, or no checkpoint can be read.
        DataError: if the data cannot be opened.
    """
    notes = list(source.notes)
    config = trainer.config
    if config.checkpoint.local_save is not None:
        trainer.local = open_local_store(
            config.checkpoint, trainer.mesh.background_group(), trainer.mesh.background_group(), trainer.leases.node
        )
        if trainer.local.nodes.count == 1:
            notes.append("--local-save on one node: no other has a copy, so a lost node loses the checkpoints on it")
    tokenizer = tokenizer_files_to_save(config.data, config.model.vocab)
    recorded: SmallFiles = {TOKENIZER_PREFIX + name: content for name, content in tokenizer.items()}
    trainer.files = recorded
    if source.fresh:
        return notes
    if source.hf is not None:
        carried = find_tokenizer_files(source.hf)
        trainer.files = files_to_carry(recorded, carried)
        restore_from_source(trainer, HuggingFaceWeights(source.hf, config.model))
        return [*notes, f"weights from {source.hf}", *tokenizer_notes(recorded, carried)]
    world = trainer.mesh.world
    for where in source.candidates:
        candidate = ResumeCandidate(trainer, where)
        try:
            manifest, found = candidate.open()
            notes += found
            files = run_on_rank0(partial(saved_tokenizer_files, manifest), world)
            changes, batches_since = compare_with_checkpoint(manifest, config, world.size, source.mode, notes)
            trainer.files = files_to_carry(recorded, files)
            if source.mode == "weights-only":
                restore_weights(trainer, manifest)
                notes += tokenizer_notes(recorded, files)
                loaded = f"weights from {manifest.path}"
            else:
                notes += restore_run(trainer, manifest, batches_since)
                loaded = f"resumed from {manifest.path}: step {trainer.iteration}, {trainer.consumed_samples:,} samples"
        except DamagedCheckpointError as error:
            notes.append(passed_over_note(candidate.path, error))
            continue
        return [*notes, loaded, *changes]
    raise UserError([Problem("E811", "\n  ".join(["no checkpoint can be used:", *notes]))])


def files_to_carry(recorded: SmallFiles, carried: SmallFiles) -> dict[str, Path | bytes]:
    """Return the small files for the run's checkpoints: the tokenizer of its data, and the other files it loaded.

    Args:
        recorded: tokenizer files of the run's data.
        carried: files of the checkpoint or model that the run starts from.

    Raises:
        DataError: if the generation_config.json in ``carried`` cannot be read.
    """
    if not recorded:
        return dict(carried)
    kept = {name: content for name, content in carried.items() if not name.startswith(TOKENIZER_PREFIX)}
    same = TOKENIZER_JSON in carried and not tokenizer_notes(recorded, carried)
    if GENERATION_CONFIG_FILE in kept and not same:  # its special token ids belong to another tokenizer
        kept[GENERATION_CONFIG_FILE] = _without_special_ids(_bytes(kept[GENERATION_CONFIG_FILE]))
    return kept | dict(recorded)


def tokenizer_notes(recorded: SmallFiles, carried: SmallFiles) -> list[str]:
    """Return a note if the data's tokenizer is not the one that the weights were trained with."""
    if TOKENIZER_JSON not in recorded or TOKENIZER_JSON not in carried:
        return []
    if _bytes(recorded[TOKENIZER_JSON]) == _bytes(carried[TOKENIZER_JSON]):
        return []
    return [
        "the data's tokenizer is not that of the weights, so token ids may have other meanings: "
        "pass the folder of the right one to tools/preprocess_data.py --tokenizer-model"
    ]


def _bytes(content: Path | bytes) -> bytes:
    return content if isinstance(content, bytes) else content.read_bytes()


def _without_special_ids(generation: bytes) -> bytes:
    """Return a generation_config.json without special token ids."""
    try:
        settings = json.loads(generation)
    except ValueError as error:
        raise DataError(f"the {GENERATION_CONFIG_FILE} of the loaded model is not valid JSON: {error}") from error
    if not isinstance(settings, dict):
        raise DataError(
            f"the {GENERATION_CONFIG_FILE} of the loaded model is a JSON {type(settings).__name__}, not an object"
        )
    return json.dumps({name: value for name, value in settings.items() if name not in SPECIAL_TOKEN_IDS}).encode()
