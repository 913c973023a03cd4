"""A run's checkpoints on its nodes' own disks: locked, chosen from at the start, and written between the others."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

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
from megatron.config.run import CheckpointConfig, RunConfig
from megatron.config.sources import to_dict
from megatron.parallel import comm
from megatron.parallel.comm import Group
from megatron.training.checkpointing import state, to_write
from megatron.training.logging import RunLog
from megatron.training.metrics import StepWindow
from megatron.training.origin import Origin, is_asked, newest_own, passed_over
from megatron.training.setup import Trainer


def tier_of(options: CheckpointConfig, group: Group, wire: Group, claim: Claim | None = None) -> Tier:
    """The nodes' folders of a run with a ``local_save``; collective over all ranks, which are ``group``.

    Files go over ``wire``, the same ranks with communicators of their own for tensors of the CPU. Where none is sent
    yet, it may be the same. ``claim`` is the one on the node's folder.

    Raises:
        UserError: when the nodes have not as many ranks each.

    """
    nodes = Nodes.counted(comm.all_gather_objects(Launch.read(os.environ).node, group))
    if not nodes.are_even:
        counts = ", ".join(str(len(nodes.ranks(node))) for node in range(nodes.count))
        sentence = f"--local-save: the nodes have {counts} ranks; each keeps copies for another, so all need as many"
        raise UserError([Problem("E804", sentence, ("drop --local-save",))])
    return Tier(folder_of(str(options.local_save), nodes.of[group.rank]), nodes, group, wire, claim)


@contextmanager
def claimed_on_nodes(options: CheckpointConfig, world: Group) -> Iterator[Claim | None]:
    """Keep the nodes' folders for this run, and make them; every rank gets the claim on its node's.

    Raises:
        CheckpointError: when another run, or another node, has one, or it cannot be written; on every rank.
        UserError: when the nodes have not as many ranks each.

    """
    claim = None
    with ExitStack() as stack:
        if options.local_save is not None:
            tier = tier_of(options, world, world)
            claims = together(lambda: _claim(stack, tier, str(options.local_save)), world)
            claim = claims[tier.nodes.ranks(tier.node)[0]]
        yield claim


def _claim(stack: ExitStack, tier: Tier, pattern: str) -> Claim | None:
    if not tier.leads:
        return None
    try:
        return stack.enter_context(hold(tier.folder, "--local-save", Start.read(os.environ)))
    except (StorageError, SupersededError):
        raise
    except CheckpointError as error:
        if tier.nodes.count == 1 or NODE in pattern:
            raise
        shared = f"where nodes share a disk: --local-save {Path(pattern) / NODE}"
        raise CheckpointError(f"{error} | {shared}") from error


def with_local(origin: Origin | UserError, options: CheckpointConfig, world: Group) -> Origin:
    """Begin with what the nodes have, where that is newer than the run's own checkpoints in ``save``; collective.

    Where it is not, it waits for its turn: a durable checkpoint may turn out to be damaged when it is read.

    Args:
        origin: what the run begins with otherwise, or why it cannot.
        options: of the run, with a ``local_save``.
        world: all ranks.

    Raises:
        UserError: when ``origin`` is one and the nodes do not have a checkpoint either, or when they have one that is
            another run's, or a newer one than was asked for.
        NewerVersionError: when a newer version wrote one.
        OSError: when a disk refuses.

    """
    tier = tier_of(options, world, world)
    found, notes = find(tier)
    _refuse_others(found, options)
    step = options.ckpt_step if is_asked(options) else None
    floor = newest_own(origin, options) if isinstance(origin, Origin) else -1
    usable = []
    for checkpoint in found:
        problem = _problem(tier, checkpoint, step)
        if problem is None:
            usable.append(checkpoint)
        else:
            notes.append(passed_over(Checkpoints(tier.folder).path(checkpoint.iteration), problem))
    if not usable:
        if isinstance(origin, UserError):
            raise origin
        return replace(origin, notes=(*origin.notes, *notes))
    mode = options.resume_mode if is_asked(options) else "exact"
    if isinstance(origin, UserError):
        why = (problem.sentence for problem in origin.problems)
        return Origin(mode=mode, notes=(*why, *notes), local=tuple(usable))
    if usable[0].iteration > floor:
        notes.append(f"the nodes have a checkpoint of step {usable[0].iteration}; {_newest(floor)} in --save")
    own = floor >= 0
    said = origin.notes if own else ()
    return Origin(origin.paths if own else (), mode=mode, notes=(*said, *notes), local=tuple(usable))


def _newest(floor: int) -> str:
    return f"the newest is of step {floor}" if floor >= 0 else "there is none"


def _refuse_others(found: list[LocalCheckpoint], options: CheckpointConfig) -> None:
    """Neither go on from another run's checkpoints nor delete them.

    Raises:
        UserError: when there are some.
    """
    save = location(str(options.save)).resolve()
    for checkpoint in found:
        if checkpoint.run is None or location(checkpoint.run).resolve() != save:
            sentence = (
                f"--local-save {options.local_save} holds the checkpoint of step {checkpoint.iteration} of another "
                f"run, which saves to {checkpoint.run}"
            )
            raise UserError([Problem("E804", sentence, (f"--local-save {options.local_save}-new",))])


def _problem(tier: Tier, checkpoint: LocalCheckpoint, step: int | None) -> str | None:
    """Why a local checkpoint is not begun with; collective.

    Raises:
        UserError: when it is complete and newer than the one that is asked for, so that the next start would find it.
    """
    if step is not None and checkpoint.iteration < step:
        return f"step {step} is asked for"
    try:
        manifest, _ = manifest_of(tier, checkpoint)
    except (DamagedError, OSError) as error:
        return str(error)
    if missing := checkpoint.missing([*manifest.files]):
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        return f"no node has {missing[0]}{more}; {len(checkpoint.files)} of {tier.nodes.count} nodes have some of it"
    if step is not None and checkpoint.iteration > step:
        sentence = (
            f"the nodes hold a newer checkpoint than step {step}, of step {checkpoint.iteration}: it would be found"
        )
        raise UserError([Problem("E813", sentence, (f"--load RUN --ckpt-step {step} --save ANOTHER",))])
    return None


def remarks(tier: Tier) -> list[str]:
    """What the run is told of its nodes."""
    if tier.nodes.count > 1:
        return []
    return ["--local-save on one node: no other has a copy, so a lost node loses the checkpoints on it"]


def save_on_nodes(trainer: Trainer, log: RunLog, window: StepWindow) -> None:
    """Where it is due, write a checkpoint into the nodes' folders, and then delete the one before; collective.

    Where a disk refuses, there is a warning and the run goes on with the checkpoints there are.

    Raises:
        RuntimeError: when the samples that the ranks have read are not those of the stream.

    """
    t, interval = trainer, trainer.config.checkpoint.local_save_interval
    if t.local is None or interval is None or t.iteration % interval:
        return
    with window.paused():
        log.flush()  # what was reported up to here must survive a crash of a run that goes on from here
        try:
            _save(t, t.local, log)
        except StorageError as error:
            log.warning(f"step {t.iteration} is not saved on the nodes: {error}")


def _described(config: RunConfig) -> dict[str, Any]:
    """The run's options, with a ``save`` folder that is the same one wherever the next start is made from."""
    said, save = to_dict(config), location(str(config.checkpoint.save))
    if isinstance(save, Path):
        said["checkpoint"]["save"] = str(save.absolute())
    return said


def _save(trainer: Trainer, tier: Tier, log: RunLog) -> None:
    from megatron.checkpoint.local_saving import keep_only, write_local
    from megatron.checkpoint.saving import Extra

    t, started, tensors = trainer, time.monotonic(), to_write(trainer)
    path = write_local(tier, t.iteration, tensors, Extra(state(t), _described(t.config), t.files))
    warning = keep_only(tier, t.iteration)
    size = sum(comm.all_gather_objects(bytes_of(tensors), tier.group))
    log.checkpoint(path, size, time.monotonic() - started)
    if warning:
        log.warning(warning)
