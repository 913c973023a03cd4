"""Checkpoints on the nodes' own disks: hold the folders, choose one at the start, and save between durable ones."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

from megatron.arguments.sources import to_dict
from megatron.checkpoint.errors import CheckpointError, DamagedCheckpointError, StorageError, SupersededError
from megatron.checkpoint.folder import NODE_PLACEHOLDER, CheckpointFolder, LocalCheckpoint, node_folder
from megatron.checkpoint.lease import Lease, acquire_lease
from megatron.checkpoint.local_store import (
    LocalStore,
    NodeMap,
    delete_other_local_checkpoints,
    find_local_checkpoints,
    gather_results,
    read_local_manifest,
    save_local,
)
from megatron.checkpoint.object_store import parse_location
from megatron.checkpoint.save import CheckpointExtras
from megatron.config.errors import Problem, UserError
from megatron.config.launch import JobStart, Launch
from megatron.config.run import CheckpointConfig
from megatron.distributed import comm
from megatron.distributed.comm import Group
from megatron.training.callbacks.base import Callback
from megatron.training.resume_source import ResumeSource, applies_to_own_checkpoints, newest_own_step, passed_over_note
from megatron.training.trainer import Trainer
from megatron.training.trainer_state import checkpoint_bytes, run_state, tensors_to_save


def open_local_store(
    options: CheckpointConfig, group: Group, file_group: Group, lease: Lease | None = None
) -> LocalStore:
    """Open the nodes' folders of a run with ``local_save``; collective over ``group``.

    Args:
        options: options with a ``local_save``.
        group: all ranks.
        file_group: all ranks, with communicators of their own for CPU tensors, to send files over; may be ``group`` if
            no files are sent.
        lease: lease on this node's folder.

    Raises:
        UserError: if the nodes have different numbers of ranks.
    """
    nodes = NodeMap.from_launcher(comm.all_gather_objects(Launch.read(os.environ).node, group))
    if not nodes.are_even:
        counts = ", ".join(str(len(nodes.ranks(node))) for node in range(nodes.count))
        sentence = f"--local-save: the nodes have {counts} ranks; all need the same number, because they copy in pairs"
        raise UserError([Problem("E804", sentence, ("drop --local-save",))])
    return LocalStore(node_folder(str(options.local_save), nodes.node_of[group.rank]), nodes, group, file_group, lease)


@contextmanager
def hold_node_folders(options: CheckpointConfig, world: Group) -> Iterator[Lease | None]:
    """Create the nodes' folders and hold their leases for this run; every rank gets the lease of its node.

    Raises:
        CheckpointError: on every rank, if another run or node holds a lease, or a folder cannot be written.
        UserError: if the nodes have different numbers of ranks.
    """
    lease = None
    with ExitStack() as stack:
        if options.local_save is not None:
            store = open_local_store(options, world, world)
            leases = gather_results(lambda: _acquire(stack, store, str(options.local_save)), world)
            lease = leases[store.nodes.ranks(store.node)[0]]
        yield lease


def _acquire(stack: ExitStack, store: LocalStore, pattern: str) -> Lease | None:
    if not store.is_leader:
        return None
    try:
        return stack.enter_context(acquire_lease(store.folder, "--local-save", JobStart.read(os.environ)))
    except (StorageError, SupersededError):
        raise
    except CheckpointError as error:
        if store.nodes.count == 1 or NODE_PLACEHOLDER in pattern:
            raise
        shared = f"where nodes share a disk: --local-save {Path(pattern) / NODE_PLACEHOLDER}"
        raise CheckpointError(f"{error} | {shared}") from error


def add_local_checkpoints(source: ResumeSource | UserError, options: CheckpointConfig, world: Group) -> ResumeSource:
    """Add the nodes' checkpoints to the ones to try, ordered by step; collective.

    Older local checkpoints stay candidates too, because a durable one may turn out to be damaged.

    Args:
        source: what the run starts from without local checkpoints, or the error if there is nothing.
        options: options with a ``local_save``.
        world: all ranks.

    Raises:
        UserError: if ``source`` is an error and the nodes have no usable checkpoint, or if they have one of another
            run, or one newer than the requested step.
        NewerVersionError: if a newer version of this program wrote one.
        OSError: if a disk cannot be read.
    """
    store = open_local_store(options, world, world)
    found, notes = find_local_checkpoints(store)
    save = parse_location(str(options.save)).resolve()
    for checkpoint in found:
        if checkpoint.run is None or parse_location(checkpoint.run).resolve() != save:
            sentence = (
                f"--local-save {options.local_save} holds the checkpoint of step {checkpoint.iteration} of another "
                f"run, which saves to {checkpoint.run}"
            )
            raise UserError([Problem("E804", sentence, (f"--local-save {options.local_save}-new",))])
    step = options.ckpt_step if applies_to_own_checkpoints(options) else None
    durable = newest_own_step(source, options) if isinstance(source, ResumeSource) else -1
    usable = []
    for checkpoint in found:
        problem = _problem(store, checkpoint, step)
        if problem is None:
            usable.append(checkpoint)
        else:
            notes.append(passed_over_note(CheckpointFolder(store.folder).path(checkpoint.iteration), problem))
    if not usable:
        if isinstance(source, UserError):
            raise source
        return replace(source, notes=(*source.notes, *notes))
    mode = options.resume_mode if applies_to_own_checkpoints(options) else "exact"
    if isinstance(source, UserError):
        reasons = (problem.sentence for problem in source.problems)
        return ResumeSource(mode=mode, notes=(*reasons, *notes), local=tuple(usable))
    if usable[0].iteration > durable:
        newest = f"the newest is of step {durable}" if durable >= 0 else "there is none"
        notes.append(f"the nodes have a checkpoint of step {usable[0].iteration}; {newest} in --save")
    if durable < 0:  # what ``source`` found is not the run's own
        return ResumeSource(mode=mode, notes=tuple(notes), local=tuple(usable))
    return ResumeSource(source.paths, mode=mode, notes=(*source.notes, *notes), local=tuple(usable))


def _problem(store: LocalStore, checkpoint: LocalCheckpoint, step: int | None) -> str | None:
    """Return why a local checkpoint cannot be used, or None; collective.

    Raises:
        UserError: if it is complete and newer than ``step``, so that the next start would resume from it.
    """
    if step is not None and checkpoint.iteration < step:
        return f"step {step} is requested"
    try:
        manifest, _ = read_local_manifest(store, checkpoint)
    except (DamagedCheckpointError, OSError) as error:
        return str(error)
    if missing := checkpoint.missing([*manifest.files]):
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        return f"no node has {missing[0]}{more}; {len(checkpoint.files)} of {store.nodes.count} nodes have some of it"
    if step is not None and checkpoint.iteration > step:
        sentence = (
            f"the nodes hold a newer checkpoint than step {step}, of step {checkpoint.iteration}: "
            "the next start would resume from it"
        )
        raise UserError([Problem("E813", sentence, (f"--load RUN --ckpt-step {step} --save ANOTHER",))])
    return None


class LocalSave(Callback):
    """Write a checkpoint into the nodes' folders every ``--local-save-interval`` steps; delete the previous one.

    The last act of an iteration: a start that finds the final step on the nodes has nothing left to save. If a disk
    fails there is a warning, and the run continues with the existing checkpoints.
    """

    def __init__(self, trainer: Trainer, store: LocalStore, interval: int) -> None:
        """Save to ``store`` every ``interval`` steps."""
        super().__init__(trainer)
        self.interval = interval
        self._store = store

    def on_iteration_end(self) -> None:
        """Save; collective."""
        self.log.flush()  # a run that resumes from this checkpoint must still have all records before it
        try:
            self._save()
        except StorageError as error:
            self.log.warning(f"step {self.trainer.iteration} is not saved on the nodes: {error}")

    def _save(self) -> None:
        trainer, started = self.trainer, time.monotonic()
        config = to_dict(trainer.config)
        save = parse_location(str(trainer.config.checkpoint.save))
        if isinstance(save, Path):  # absolute, because the next start may have another working directory
            config["checkpoint"]["save"] = str(save.absolute())
        extras = CheckpointExtras(run_state(trainer), config, trainer.files)
        path = save_local(self._store, trainer.iteration, tensors_to_save(trainer), extras)
        warning = delete_other_local_checkpoints(self._store, trainer.iteration)
        self.log.checkpoint(path, checkpoint_bytes(trainer), time.monotonic() - started)
        if warning:
            self.log.warning(warning)
