"""The checkpoint that a run would start from, and what that start would say: without torch, and without its tensors.

``megatron.training.resume`` starts from it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.checkpoint.errors import CheckpointError
from megatron.checkpoint.folder import NAME, Checkpoints, Found
from megatron.checkpoint.manifest import Manifest
from megatron.checkpoint.publish import BUILDING, is_complete
from megatron.config.checks.optimizer import schedule_problems
from megatron.config.compare import compare
from megatron.config.problems import Problem, UserError
from megatron.config.run import HUGGING_FACE, CheckpointConfig, RunConfig

BATCH = {"global_batch_size", "rampup_batch_size"}
"""Options that say how many samples a step takes."""


@dataclass(frozen=True)
class Preview:
    """What a start would say.

    Attributes:
        notes: one line each.
        iteration: steps taken before it.
        consumed_samples: samples they used.
    """

    notes: tuple[str, ...] = ()
    iteration: int = 0
    consumed_samples: int = 0


@dataclass(frozen=True)
class _Place:
    """Where checkpoints are looked for: in a folder of them, or one checkpoint.

    Attributes:
        folder: which may not hold any.
        step: the only one to take; None for the newest.
        mode: how much of it is taken over.
        own: whether the run saves to the same folder.
    """

    folder: Path
    step: int | None
    mode: str
    own: bool

    @property
    def paths(self) -> list[Path]:
        """Complete checkpoints, and damaged ones, that may be taken."""
        if Checkpoints(self.folder).is_checkpoint:
            return [self.folder]
        return [path for iteration, path in _saved(self.folder) if self.step in (None, iteration)]

    def newest(self) -> tuple[Manifest, Sequence[Found]]:
        """The newest checkpoint that can be trusted, and newer ones that were passed over.

        Raises:
            UserError: when there is none.
        """
        try:
            return Checkpoints(self.folder).newest(self.step)
        except CheckpointError as error:
            code, elsewhere = "E811" if self.paths else "E812", "--save ANOTHER" if self.own else "--load ANOTHER"
            raise UserError([Problem(code, str(error), (elsewhere,))]) from error


def _place(options: CheckpointConfig) -> _Place | None:
    """Where a run looks for its beginning; None where it begins with a Hugging Face model, or with nothing."""
    load, step = _named(options)
    save = Path(options.save) if options.save else None
    if save is not None:
        asked = not options.load or (load is not None and load.resolve() == save.resolve())
        if _saved(save):
            return _Place(save, step if asked else None, options.resume_mode if asked else "exact", own=True)
        if asked:
            return None if step is None else _Place(save, step, options.resume_mode, own=True)
    return None if load is None else _Place(load, step, options.resume_mode, own=False)


def _named(options: CheckpointConfig) -> tuple[Path | None, int | None]:
    """The folder of checkpoints in ``load``, and the step that is asked for."""
    if not options.load or options.load.startswith(HUGGING_FACE):
        return None, options.ckpt_step
    path = Path(options.load)
    one = NAME.fullmatch(path.name)
    return (path.parent, int(one[1])) if one else (path, options.ckpt_step)


def _saved(folder: Path) -> list[tuple[int, Path]]:
    """Step and path of what was a checkpoint once, newest first; a save that was cut off has left none."""
    return [(step, path) for step, path in Checkpoints(folder).named() if path.suffix != BUILDING or is_complete(path)]


def recall(options: CheckpointConfig) -> Mapping[str, Any] | None:
    """The configuration of the checkpoint that a run starts from; None where it starts from none.

    Raises:
        UserError: when there should be one, and none can be read.
    """
    found = _find(options)
    return None if found is None else found[1].config


def _find(options: CheckpointConfig) -> tuple[_Place, Manifest, Sequence[Found]] | None:
    """The place, the newest checkpoint there, and those passed over; None where a run starts from none.

    Raises:
        UserError: when there should be one, and none can be read.
    """
    try:
        place = _place(options)
        return None if place is None else (place, *place.newest())
    except OSError as error:
        raise UserError([Problem("E811", f"checkpoints cannot be looked for: {error}")]) from error


def preview(config: RunConfig, world_size: int) -> Preview:
    """What the start of a run would say about the checkpoint that it starts from.

    Args:
        config: resolved, the vocabulary's size included.
        world_size: ranks.

    Raises:
        UserError: when there is no such checkpoint, or the run must not go on from it.

    """
    found = _find(config.checkpoint)
    if found is None:
        return Preview(tuple(_without_checkpoint(config.checkpoint)))
    place, manifest, passed_over = found
    changes, problems = _compared(config, world_size, manifest, place)
    problems += _in_the_way(place)
    if problems:
        raise UserError(problems)
    notes = [f"passed over {other.path}: {other.problem}" for other in passed_over]
    notes += [f"checkpoint: {manifest.path}, its tensors not read", *changes]
    return Preview(tuple(notes), *((0, 0) if place.mode == "weights-only" else _progress(manifest)))


def _without_checkpoint(options: CheckpointConfig) -> Iterator[str]:
    """What is said of a run that begins with a Hugging Face model, or with nothing.

    Raises:
        UserError: when other options say that there should be a checkpoint.
    """
    if options.load is not None and options.load.startswith(HUGGING_FACE):
        yield f"checkpoint: {options.load}, its tensors not read"
    elif options.ckpt_step is not None:
        sentence = f"--ckpt-step {options.ckpt_step}, but neither --load nor --save says where checkpoints are"
        raise UserError([Problem("E812", sentence, ("--load RUN", "--set checkpoint.ckpt_step=null"))])
    elif options.save is not None and options.resume_mode != "exact":
        sentence = f"--resume-mode {options.resume_mode}, but {options.save} holds no checkpoint to go on from"
        raise UserError([Problem("E812", sentence, ("--load ANOTHER", "--resume-mode exact"))])
    elif options.save is not None:
        yield f"starts from nothing: {options.save} holds no checkpoint"


def _compared(
    config: RunConfig, world_size: int, manifest: Manifest, place: _Place
) -> tuple[tuple[str, ...], list[Problem]]:
    """Lines for what has changed since a checkpoint, and problems with it."""
    if place.mode != "weights-only" and "optimizer" not in manifest.state:
        elsewhere = f"--load {place.folder} --save {place.folder}-new " if place.own else ""
        fix = f"{elsewhere}--resume-mode weights-only"
        return (), [Problem("E814", f"{manifest.path} holds weights, but no run to go on with", (fix,))]
    begun = _progress(manifest, "batches_since")
    changes = compare(manifest.config, config, place.mode, begin=begun, own=place.own)
    if place.mode == "weights-only":
        begun = (0, 0)
    elif BATCH & changes.changed:
        begun = _progress(manifest)
    ranks = config.parallel.data_parallel_size(world_size)
    return changes.lines, [*changes.problems, *schedule_problems(config, ranks, begun)]


def _progress(manifest: Manifest, name: str = "") -> tuple[int, int]:
    """Steps and samples of the run that wrote a checkpoint, or those that its ``state`` has under ``name``."""
    place = manifest.state.get(name, manifest.state)
    return place.get("iteration", 0), place.get("consumed_samples", 0)


def _in_the_way(place: _Place) -> Iterator[Problem]:
    """Newer checkpoints in the folder that a run goes back in."""
    if not place.own or place.step is None:
        return
    newer = [path for step, path in _saved(place.folder) if step > place.step and is_complete(path)]
    if newer:
        sentence = f"{place.folder} holds newer checkpoints than step {place.step} ({newer[0].name}): "
        fix = f"--load {place.folder} --ckpt-step {place.step} --save ANOTHER"
        yield Problem("E813", f"{sentence}they would be found next", (fix,))
