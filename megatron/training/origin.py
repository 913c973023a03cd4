"""What a run begins with: its own newest checkpoint, another's, a Hugging Face model, or nothing.

Found without torch and without reading a tensor, so that ``--check-config`` can say it too; ``resume`` acts on it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

from megatron.checkpoint.errors import DamagedError, NewerVersionError, UnreachableError, within
from megatron.checkpoint.folder import NAME, Checkpoints
from megatron.checkpoint.local import LocalCheckpoint, is_local
from megatron.checkpoint.manifest import Manifest
from megatron.checkpoint.publish import home, is_complete, is_cut_off
from megatron.checkpoint.remote import Location, location
from megatron.config.checks.checkpoint import holds_checkpoints
from megatron.config.checks.optimizer import schedule_problems
from megatron.config.compare import compare
from megatron.config.problems import Problem, UserError
from megatron.config.run import HUGGING_FACE, CheckpointConfig, RunConfig

BATCH = {"global_batch_size", "rampup_batch_size"}
"""Options that say how many samples a step takes."""

Candidate = LocalCheckpoint | Location
"""A checkpoint that may be tried."""

Place = tuple[int, int]
"""How far a run is: steps, and the samples they used."""


@dataclass(frozen=True)
class Origin:
    """What a run begins with; nothing, where neither ``local``, ``paths`` nor ``hf`` say anything.

    Attributes:
        local: checkpoints on the nodes' own disks to try, newest first.
        paths: checkpoints to try, in this order; the first has been looked at.
        hf: folder of a Hugging Face model.
        mode: how much of a checkpoint is taken over, a choice of ``resume_mode``.
        notes: what was passed over, and why.
    """

    paths: tuple[Location, ...] = ()
    hf: Path | None = None
    mode: str = "exact"
    notes: tuple[str, ...] = ()
    local: tuple[LocalCheckpoint, ...] = ()

    @property
    def fresh(self) -> bool:
        """Whether the run begins from nothing."""
        return not self.paths and not self.local and self.hf is None

    @property
    def in_turn(self) -> tuple[Candidate, ...]:
        """Checkpoints to try one after the other, the newest first; of one step the durable one first."""
        if not self.local:
            return self.paths
        return tuple(sorted((*self.paths, *self.local), key=_step, reverse=True))


def _step(checkpoint: Candidate) -> int:
    """Step of one of the run's own checkpoints."""
    if isinstance(checkpoint, LocalCheckpoint):
        return checkpoint.iteration
    named = NAME.fullmatch(checkpoint.name)
    return int(named[1]) if named else -1


def look(options: CheckpointConfig) -> Origin:
    """What a run begins with.

    A run goes on from its own checkpoints, those in ``save``; ``load`` is for its very beginning.

    Raises:
        UserError: when a checkpoint is asked for or there are some, but none can be used.

    """
    try:
        return _look(options)
    except (NewerVersionError, UnreachableError) as error:  # not damaged: going on without it loses good steps
        raise UserError([Problem("E811", str(error))]) from error
    except OSError as error:
        raise UserError([Problem("E811", f"checkpoints cannot be looked for: {error}")]) from error


def _look(options: CheckpointConfig) -> Origin:
    save, (load, step) = options.save, _named(options)
    own = Checkpoints(location(save)).named() if save is not None else []
    asked = is_asked(options)
    if any(not is_cut_off(path) for _, path in own):
        mode = options.resume_mode if asked else "exact"
        return _pick(location(str(save)), own, step if asked else None, mode, onward=True)
    unfinished = tuple(passed_over(path, _problem(path)) for _, path in own)
    if asked and (step is None or save is None):
        return _nothing(options, unfinished)
    if options.load is not None and options.load.startswith(HUGGING_FACE):
        return Origin(hf=Path(options.load.removeprefix(HUGGING_FACE)), mode="weights-only", notes=unfinished)
    folder = load or location(str(save))
    found = [_itself(folder, step)] if is_complete(folder) else Checkpoints(folder).named()
    return _pick(folder, found, step, options.resume_mode, unfinished)


def is_asked(options: CheckpointConfig) -> bool:
    """Whether a step or a mode that is asked for is meant of the run's own checkpoints, not of those in ``load``."""
    load, _ = _named(options)
    return options.load is None or (
        options.save is not None and load is not None and load.resolve() == location(options.save).resolve()
    )


def only_read(options: CheckpointConfig) -> CheckpointConfig:
    """What a run is told of checkpoints that begins with the same one, but claims no folder and saves nothing.

    A run that is at work on its ``save`` folder meanwhile notices nothing of it.
    """
    if is_asked(options):
        options = replace(options, load=options.load or options.save)
    elif holds_checkpoints(options.save):  # these come first, and of those neither mode nor step was meant
        options = replace(options, load=options.save, resume_mode="exact", ckpt_step=None)
    return replace(options, save=None, save_interval=None, local_save=None, local_save_interval=None)


def newest_own(origin: Origin, options: CheckpointConfig) -> int:
    """Step of the run's own checkpoint that it begins with; -1 where it has none."""
    return next((_step(path) for path in origin.paths if is_own(path, options)), -1)


def _nothing(options: CheckpointConfig, notes: tuple[str, ...]) -> Origin:
    """The beginning of a run that finds nothing to begin with.

    Raises:
        UserError: when a resume mode says that there should be something.
    """
    if options.ckpt_step is not None and options.save is None:
        sentence = f"--ckpt-step {options.ckpt_step}, but neither --load nor --save says where checkpoints are"
        raise UserError([Problem("E812", sentence, ("--load RUN", "--set checkpoint.ckpt_step=null"))])
    if options.save is None:
        return Origin()
    if options.resume_mode != "exact":
        sentence = f"--resume-mode {options.resume_mode}, but {options.save} holds no checkpoint to go on from"
        raise UserError([Problem("E812", sentence, ("--load ANOTHER", "--resume-mode exact"))])
    return Origin(notes=(*notes, f"starts from nothing: {options.save} holds no checkpoint"))


def _named(options: CheckpointConfig) -> tuple[Location | None, int | None]:
    """The folder of checkpoints in ``load``, and the step that is asked for.

    ``load`` may be one checkpoint itself: in a folder of others, by its name; or a copy that is called otherwise.
    """
    if options.load is None or options.load.startswith(HUGGING_FACE):
        return None, options.ckpt_step
    path = location(options.load)
    one = NAME.fullmatch(path.name)
    return (path.parent, int(one[1])) if one else (path, options.ckpt_step)


def _itself(path: Location, step: int | None) -> tuple[int, Location]:
    """A checkpoint under a name of its own, with its iteration; one that cannot be read has that which is wanted."""
    manifest = _open(path)
    return (step or 0 if isinstance(manifest, str) else manifest.state.get("iteration", 0)), path


def _pick(
    folder: Location,
    named: Sequence[tuple[int, Location]],
    step: int | None,
    mode: str,
    notes: tuple[str, ...] = (),
    onward: bool = False,
) -> Origin:
    """The newest of ``named`` that can be used and those before it.

    ``onward`` when the run will write its own into the same folder.

    Raises:
        UserError: when there is none, or it must not be gone on from.
    """
    wanted = [path for iteration, path in named if step in (None, iteration)]
    newer = [path for iteration, path in named if step is not None and iteration > step and is_complete(path)]
    for at, path in enumerate(wanted):
        problem = _problem(path)
        if problem is not None:
            notes += (passed_over(path, problem),)
        elif onward and newer:
            sentence = f"{folder} holds newer checkpoints than step {step} ({newer[0].name}): they would be found next"
            raise UserError([Problem("E813", sentence, (f"--load {folder} --ckpt-step {step} --save ANOTHER",))])
        else:
            return Origin(tuple(wanted[at:]), mode=mode, notes=notes)
    raise UserError([_none_usable(folder, named, wanted, step, "--save ANOTHER" if onward else "--load ANOTHER")])


def _problem(path: Location) -> str | None:
    """Why a checkpoint cannot be used, as far as that can be seen without reading its tensors."""
    manifest = _open(path)
    return manifest if isinstance(manifest, str) else None


def _open(path: Location) -> Manifest | str:
    """A checkpoint's manifest, or why there is none to be trusted.

    Raises:
        NewerVersionError: when a newer version of this program wrote it.
    """
    try:
        return Manifest.open(path)
    except DamagedError as error:
        return str(error)


def passed_over(path: Location, problem: object) -> str:
    """A note on a checkpoint that is not taken."""
    return f"passed over {path}: {within(path, problem)}"


def _none_usable(
    folder: Location,
    named: Sequence[tuple[int, Location]],
    wanted: Sequence[Location],
    step: int | None,
    elsewhere: str,
) -> Problem:
    usable = [str(iteration) for iteration, path in named if _problem(path) is None]
    damaged = [path for path in wanted if not is_cut_off(path)]
    instead = tuple(f"--ckpt-step {other}" for other in usable[:1])
    if damaged:
        which = "no checkpoint" if step is None else f"no checkpoint of step {step}"
        reasons = "".join(f"\n  {path.name}: {within(path, _problem(path))}" for path in damaged)
        return Problem("E811", f"{which} in {folder} can be used:{reasons}", (*instead, elsewhere))
    if step is not None:
        sentence = f"{folder} has no checkpoint of step {step}; it has {', '.join(usable) or 'none'}"
        return Problem("E812", sentence, instead)
    return Problem("E812", f"{folder} has no checkpoint", ("--load ANOTHER", "drop --load to start from nothing"))


@dataclass(frozen=True)
class Changes:
    """What is different from the run that wrote a checkpoint.

    Attributes:
        lines: to be told.
        batches_since: where the batches began that are those of now.
    """

    lines: tuple[str, ...]
    batches_since: Place


def place_of(manifest: Manifest, name: str = "") -> Place:
    """Where the run was that wrote a checkpoint, or the place that its ``state`` has under ``name``."""
    place = manifest.state.get(name, manifest.state)
    return place.get("iteration", 0), place.get("consumed_samples", 0)


def changes_since(
    manifest: Manifest, config: RunConfig, world_size: int, mode: str, notes: Sequence[str] = ()
) -> Changes:
    """Compare a run with the checkpoint that it is about to begin with.

    Args:
        manifest: of the checkpoint.
        config: of the run, resolved.
        world_size: its ranks.
        mode: how much of the checkpoint is taken over.
        notes: why it is this one, to be told with a refusal.

    Raises:
        UserError: when what has changed does not go together with going on.

    """
    own = is_own(manifest.path, config.checkpoint)
    if mode != "weights-only" and "optimizer" not in manifest.state:
        raise UserError([_only_weights(manifest.path, config.checkpoint.save if own else None)])
    begun = place_of(manifest, "batches_since")
    changes = compare(manifest.config, config, mode, begin=begun, own=own)
    if mode == "weights-only":
        begun = (0, 0)
    elif BATCH & changes.changed:
        begun = place_of(manifest)
    problems = [*changes.problems, *schedule_problems(config, config.parallel.data_parallel_size(world_size), begun)]
    if problems:
        which = "; ".join([f"the checkpoint is {manifest.path}", *notes])
        raise UserError([replace(problems[0], sentence=f"{problems[0].sentence} ({which})"), *problems[1:]])
    return Changes((*_ranks(manifest.state, world_size), *changes.lines), begun)


def _ranks(saved: Mapping[str, Any], now: int) -> tuple[str, ...]:
    """A line where another number of ranks goes on."""
    layout = saved.get("written_by", {}).get("layout", {})
    before = prod(layout.get(axis, 1) for axis in ("pp", "dp", "cp", "tp"))
    return (f"ranks: checkpoint {before} -> now {now}",) if layout and before != now else ()


def _only_weights(path: Location, save: str | None) -> Problem:
    elsewhere = "" if save is None else f"--load {save} --save {save}-new "
    fix = f"{elsewhere}--resume-mode weights-only"
    return Problem("E814", f"{path} holds weights, but no run to go on with", (fix,))


def is_own(path: Location, options: CheckpointConfig) -> bool:
    """Whether a checkpoint is the run's: in its ``save`` folder, or in that of a node."""
    if options.local_save is not None and isinstance(path, Path) and is_local(path, options.local_save):
        return True
    return options.save is not None and home(path).resolve() == location(options.save).resolve()
