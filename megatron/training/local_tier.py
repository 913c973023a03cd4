"""Checkpoints on the nodes' own disks: hold the folders, choose one at the start, and save between durable ones."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

from megatron.checkpoint.claims import Claim
from megatron.checkpoint.errors import CheckpointError, DamagedError, StorageError, SupersededError
from megatron.checkpoint.exchange import Tier, together
from megatron.checkpoint.folder import Checkpoints
from megatron.checkpoint.local import NODE, LocalCheckpoint, Nodes, folder_of
from megatron.checkpoint.local_loading import find, manifest_of
from megatron.checkpoint.lock import hold
from megatron.checkpoint.remote import location
from megatron.checkpoint.room import bytes_of
from megatron.config.launch import Launch, Start
from megatron.config.problems import Problem, UserError
from megatron.config.run import CheckpointConfig
from megatron.config.sources import to_dict
from megatron.parallel import comm
from megatron.parallel.comm import Group
from megatron.training.checkpointing import state, to_write
from megatron.training.logging import RunLog
from megatron.training.metrics import StepWindow
from megatron.training.origin import Origin, is_asked, newest_own, passed_over
from megatron.training.setup import Trainer


def tier_of(options: CheckpointConfig, group: Group, wire: Group, lease: Claim | None = None) -> Tier:
    """Open the nodes' folders of a run with ``local_save``; collective over ``group``.

    Args:
        options: options with a ``local_save``.
        group: all ranks.
        wire: all ranks, with communicators of their own for CPU tensors, to send files over; may be ``group`` if no
            files are sent.
        lease: lease on this node's folder.

    Raises:
        UserError: if the nodes have different numbers of ranks.

    """
    nodes = Nodes.counted(comm.all_gather_objects(Launch.read(os.environ).node, group))
    if not nodes.are_even:
        counts = ", ".join(str(len(nodes.ranks(node))) for node in range(nodes.count))
        sentence = f"--local-save: the nodes have {counts} ranks; all need the same number, because they copy in pairs"
        raise UserError([Problem("E804", sentence, ("drop --local-save",))])
    return Tier(folder_of(str(options.local_save), nodes.of[group.rank]), nodes, group, wire, lease)


@contextmanager
def claimed_on_nodes(options: CheckpointConfig, world: Group) -> Iterator[Claim | None]:
    """Create the nodes' folders and hold their leases for this run; every rank gets the lease of its node.

    Raises:
        CheckpointError: on every rank, if another run or node holds a lease, or a folder cannot be written.
        UserError: if the nodes have different numbers of ranks.

    """
    lease = None
    with ExitStack() as stack:
        if options.local_save is not None:
            store = tier_of(options, world, world)
            leases = together(lambda: _acquire(stack, store, str(options.local_save)), world)
            lease = leases[store.nodes.ranks(store.node)[0]]
        yield lease


def _acquire(stack: ExitStack, store: Tier, pattern: str) -> Claim | None:
    if not store.leads:
        return None
    try:
        return stack.enter_context(hold(store.folder, "--local-save", Start.read(os.environ)))
    except (StorageError, SupersededError):
        raise
    except CheckpointError as error:
        if store.nodes.count == 1 or NODE in pattern:
            raise
        shared = f"where nodes share a disk: --local-save {Path(pattern) / NODE}"
        raise CheckpointError(f"{error} | {shared}") from error


def with_local(source: Origin | UserError, options: CheckpointConfig, world: Group) -> Origin:
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
    store = tier_of(options, world, world)
    found, notes = find(store)
    _refuse_others(found, options)
    step = options.ckpt_step if is_asked(options) else None
    durable = newest_own(source, options) if isinstance(source, Origin) else -1
    usable = []
    for checkpoint in found:
        problem = _problem(store, checkpoint, step)
        if problem is None:
            usable.append(checkpoint)
        else:
            notes.append(passed_over(Checkpoints(store.folder).path(checkpoint.iteration), problem))
    if not usable:
        if isinstance(source, UserError):
            raise source
        return replace(source, notes=(*source.notes, *notes))
    mode = options.resume_mode if is_asked(options) else "exact"
    if isinstance(source, UserError):
        reasons = (problem.sentence for problem in source.problems)
        return Origin(mode=mode, notes=(*reasons, *notes), local=tuple(usable))
    if usable[0].iteration > durable:
        newest = f"the newest is of step {durable}" if durable >= 0 else "there is none"
        notes.append(f"the nodes have a checkpoint of step {usable[0].iteration}; {newest} in --save")
    if durable < 0:  # what ``source`` found is not the run's own
        return Origin(mode=mode, notes=tuple(notes), local=tuple(usable))
    return Origin(source.paths, mode=mode, notes=(*source.notes, *notes), local=tuple(usable))


def _refuse_others(found: list[LocalCheckpoint], options: CheckpointConfig) -> None:
    """Raise a UserError if a checkpoint belongs to another run: it must neither be loaded nor deleted."""
    save = location(str(options.save)).resolve()
    for checkpoint in found:
        if checkpoint.run is None or location(checkpoint.run).resolve() != save:
            sentence = (
                f"--local-save {options.local_save} holds the checkpoint of step {checkpoint.iteration} of another "
                f"run, which saves to {checkpoint.run}"
            )
            raise UserError([Problem("E804", sentence, (f"--local-save {options.local_save}-new",))])


def _problem(store: Tier, checkpoint: LocalCheckpoint, step: int | None) -> str | None:
    """Return why a local checkpoint cannot be used, or None; collective.

    Raises:
        UserError: if it is complete and newer than ``step``, so that the next start would resume from it.
    """
    if step is not None and checkpoint.iteration < step:
        return f"step {step} is requested"
    try:
        manifest, _ = manifest_of(store, checkpoint)
    except (DamagedError, OSError) as error:
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


def remarks(store: Tier) -> list[str]:
    """Return notes on how safe the local checkpoints are."""
    if store.nodes.count > 1:
        return []
    return ["--local-save on one node: no other has a copy, so a lost node loses the checkpoints on it"]


def save_on_nodes(trainer: Trainer, log: RunLog, window: StepWindow) -> None:
    """Write a checkpoint into the nodes' folders if it is due, then delete the previous one; collective.

    If a disk fails there is a warning, and the run continues with the existing checkpoints.

    Raises:
        RuntimeError: if the samples that the ranks have read are not those of the sample stream.

    """
    interval = trainer.config.checkpoint.local_save_interval
    if trainer.local is None or interval is None or trainer.iteration % interval:
        return
    with window.paused():
        log.flush()  # a run that resumes from this checkpoint must still have all records before it
        try:
            _save(trainer, trainer.local, log)
        except StorageError as error:
            log.warning(f"step {trainer.iteration} is not saved on the nodes: {error}")


def _save(trainer: Trainer, store: Tier, log: RunLog) -> None:
    from megatron.checkpoint.local_saving import keep_only, write_local
    from megatron.checkpoint.saving import Extra

    started = time.monotonic()
    tensors = to_write(trainer)
    config = to_dict(trainer.config)
    save = location(str(trainer.config.checkpoint.save))
    if isinstance(save, Path):  # absolute, because the next start may have another working directory
        config["checkpoint"]["save"] = str(save.absolute())
    path = write_local(store, trainer.iteration, tensors, Extra(state(trainer), config, trainer.files))
    warning = keep_only(store, trainer.iteration)
    size = sum(comm.all_gather_objects(bytes_of(tensors), store.group))
    log.checkpoint(path, size, time.monotonic() - started)
    if warning:
        log.warning(warning)
