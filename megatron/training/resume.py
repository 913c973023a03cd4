"""Where a run begins: with its own newest checkpoint, with another's, with a Hugging Face model, or from nothing."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from megatron.checkpoint.errors import DamagedError, NewerVersionError
from megatron.checkpoint.folder import NAME, Checkpoints
from megatron.checkpoint.manifest import Manifest
from megatron.checkpoint.publish import BUILDING, is_complete
from megatron.config.checks.optimizer import schedule_problems
from megatron.config.compare import Comparison, compare
from megatron.config.hf import SPECIAL_IDS
from megatron.config.problems import Problem, UserError
from megatron.config.run import HUGGING_FACE, CheckpointConfig, DataConfig
from megatron.convert.checkpoint import GENERATION, TOKENIZER, carried_by, carried_files
from megatron.convert.hf_folder import HFSource
from megatron.data.errors import DataError
from megatron.data.tokenizer import tokenizer_files
from megatron.data.vocabulary import dataset_prefix
from megatron.parallel.comm import Group
from megatron.training.checkpointing import Place, place_of, restore, restore_from_source, restore_weights
from megatron.training.setup import Trainer
from megatron.training.together import on_first

TOKENIZER_JSON = TOKENIZER + "tokenizer.json"

BATCH = {"global_batch_size", "rampup_batch_size"}
"""Options that say how many samples a step takes."""


@dataclass(frozen=True)
class Origin:
    """What a run begins with; nothing, where neither ``paths`` nor ``hf`` say anything.

    Attributes:
        paths: checkpoints to try, in this order; the first has been looked at.
        hf: folder of a Hugging Face model.
        mode: how much of a checkpoint is taken over, a choice of ``resume_mode``.
        notes: what was passed over, and why.
    """

    paths: tuple[Path, ...] = ()
    hf: Path | None = None
    mode: str = "exact"
    notes: tuple[str, ...] = ()

    @property
    def fresh(self) -> bool:
        """Whether the run begins from nothing."""
        return not self.paths and self.hf is None


def choose(options: CheckpointConfig, world: Group) -> Origin:
    """What the run begins with. Rank 0 looks, every rank gets the same answer; collective.

    A run goes on from its own checkpoints, those in ``save``; ``load`` is for its very beginning.

    Raises:
        UserError: when a checkpoint is asked for or there are some, but none can be used.

    """
    return on_first(lambda: _looked(options), world)


def _looked(options: CheckpointConfig) -> Origin:
    try:
        return _look(options)
    except NewerVersionError as error:  # not damaged: going on without it would throw good steps away
        raise UserError([Problem("E811", str(error))]) from error


def _look(options: CheckpointConfig) -> Origin:
    save, (load, step) = options.save, _named(options)
    own = Checkpoints(Path(save)).named() if save is not None else []
    asked = options.load is None or (save is not None and load is not None and load.resolve() == Path(save).resolve())
    if any(_finished(path) for _, path in own):
        mode = options.resume_mode if asked else "exact"
        return _pick(Path(str(save)), own, step if asked else None, mode, onward=True)
    unfinished = tuple(_passed_over(path, _problem(path)) for _, path in own)
    if asked and step is None:
        return _nothing(options, unfinished)
    if options.load is not None and options.load.startswith(HUGGING_FACE):
        return Origin(hf=Path(options.load.removeprefix(HUGGING_FACE)), mode="weights-only", notes=unfinished)
    folder = load or Path(str(save))
    found = [_itself(folder, step)] if is_complete(folder) else Checkpoints(folder).named()
    return _pick(folder, found, step, options.resume_mode, unfinished)


def _nothing(options: CheckpointConfig, notes: tuple[str, ...]) -> Origin:
    """The beginning of a run that finds nothing to begin with.

    Raises:
        UserError: when a resume mode says that there should be something.
    """
    if options.save is None:
        return Origin()
    if options.resume_mode != "exact":
        sentence = f"--resume-mode {options.resume_mode}, but {options.save} holds no checkpoint to go on from"
        raise UserError([Problem("E812", sentence, ("--load ANOTHER", "--resume-mode exact"))])
    return Origin(notes=(*notes, f"starts from nothing: {options.save} holds no checkpoint"))


def _named(options: CheckpointConfig) -> tuple[Path | None, int | None]:
    """The folder of checkpoints in ``load``, and the step that is asked for.

    ``load`` may be one checkpoint itself: in a folder of others, by its name; or a copy that is called otherwise.
    """
    if options.load is None or options.load.startswith(HUGGING_FACE):
        return None, options.ckpt_step
    path = Path(options.load)
    one = NAME.fullmatch(path.name)
    return (path.parent, int(one[1])) if one else (path, options.ckpt_step)


def _itself(path: Path, step: int | None) -> tuple[int, Path]:
    """A checkpoint under a name of its own, with its iteration; one that cannot be read has that which is wanted."""
    manifest = _open(path)
    return (step or 0 if isinstance(manifest, str) else manifest.state.get("iteration", 0)), path


def _pick(
    folder: Path,
    named: Sequence[tuple[int, Path]],
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
            notes += (_passed_over(path, problem),)
        elif onward and newer:
            sentence = f"{folder} holds newer checkpoints than step {step} ({newer[0].name}): they would be found next"
            raise UserError([Problem("E813", sentence, (f"--load {folder} --ckpt-step {step} --save ANOTHER",))])
        else:
            return Origin(tuple(wanted[at:]), mode=mode, notes=notes)
    raise UserError([_none_usable(folder, named, wanted, step, "--save ANOTHER" if onward else "--load ANOTHER")])


def _finished(path: Path) -> bool:
    """Whether it was a checkpoint once; a save that was cut off has left none."""
    return path.suffix != BUILDING or is_complete(path)


def _problem(path: Path) -> str | None:
    """Why a checkpoint cannot be used, as far as that can be seen without reading its tensors."""
    manifest = _open(path)
    return manifest if isinstance(manifest, str) else None


def _open(path: Path) -> Manifest | str:
    """A checkpoint's manifest, or why there is none to be trusted.

    Raises:
        NewerVersionError: when a newer version of this program wrote it.
    """
    try:
        return Manifest.open(path)
    except DamagedError as error:
        return str(error)


def _passed_over(path: Path, problem: str | None) -> str:
    return f"passed over {path}: {problem}"


def _none_usable(
    folder: Path, named: Sequence[tuple[int, Path]], wanted: Sequence[Path], step: int | None, elsewhere: str
) -> Problem:
    usable = [str(iteration) for iteration, path in named if _problem(path) is None]
    damaged = [path for path in wanted if _finished(path)]
    instead = tuple(f"--ckpt-step {other}" for other in usable[:1])
    if damaged:
        which = "no checkpoint" if step is None else f"no checkpoint of step {step}"
        reasons = "; ".join(f"{path.name}: {_problem(path)}" for path in damaged)
        return Problem("E811", f"{which} in {folder} can be used: {reasons}", (*instead, elsewhere))
    if step is not None:
        sentence = f"{folder} has no checkpoint of step {step}; it has {', '.join(usable) or 'none'}"
        return Problem("E812", sentence, instead)
    return Problem("E812", f"{folder} has no checkpoint", ("--load ANOTHER", "drop --load to start from nothing"))


def begin(trainer: Trainer, origin: Origin) -> list[str]:
    """Bring a trainer, built ``fresh`` if the origin is, to where the run begins; collective.

    Returns:
        Notes: what was loaded, what has changed since, what was passed over.

    Raises:
        UserError: when what has changed does not go together with going on, or no checkpoint can be read.
        DataError: when the data cannot be opened.

    """
    notes = list(origin.notes)
    trainer.files = companions(trainer.config.data, carried_files(origin.hf) if origin.hf is not None else {})
    if origin.fresh:
        return notes
    if origin.hf is not None:
        restore_from_source(trainer, HFSource(origin.hf, trainer.config.model))
        return [*notes, f"weights from {origin.hf}"]
    for path in origin.paths:
        try:
            manifest, files = on_first(partial(_opened, path), trainer.mesh.world)
            changes, begun = _compared(trainer, manifest, origin.mode)
            trainer.files = companions(trainer.config.data, files)
            if origin.mode == "weights-only":
                restore_weights(trainer, manifest)
            else:
                restore(trainer, manifest, begun)
        except DamagedError as error:
            notes.append(_passed_over(path, str(error)))
            continue
        return [*notes, _loaded(trainer, manifest, origin.mode), *changes.lines]
    raise UserError([Problem("E811", "; ".join(["no checkpoint can be used", *notes]))])


def _opened(path: Path) -> tuple[Manifest, dict[str, bytes]]:
    """A checkpoint's manifest, and the small files that it carries."""
    manifest = Manifest.open(path)
    return manifest, carried_by(manifest)


def _compared(trainer: Trainer, manifest: Manifest, mode: str) -> tuple[Comparison, Place]:
    """What has changed since a checkpoint, and where the batches began that are those of now.

    Raises:
        UserError: when what has changed does not go together with going on.
    """
    t, at, begun = trainer, place_of(manifest), place_of(manifest, "batches_since")
    if mode != "weights-only" and "optimizer" not in manifest.state:
        raise UserError([_only_weights(manifest.path, t.config.checkpoint)])
    own = _is_own(manifest.path, t.config.checkpoint)
    changes = compare(manifest.config, t.config, mode, begin=begun, own=own)
    if changes.problems:
        raise UserError(changes.problems)
    begun = (0, 0) if mode == "weights-only" else at if BATCH & changes.changed else begun
    problems = list(schedule_problems(t.config, t.mesh.data_size, begun))
    if problems:
        raise UserError(problems)
    return changes, begun


def _only_weights(path: Path, options: CheckpointConfig) -> Problem:
    elsewhere = f"--load {options.save} --save {options.save}-new " if _is_own(path, options) else ""
    return Problem(
        "E814", f"{path} holds weights, but no run to go on with", (f"{elsewhere}--resume-mode weights-only",)
    )


def _is_own(path: Path, options: CheckpointConfig) -> bool:
    """Whether a checkpoint lies in the run's ``save`` folder."""
    return options.save is not None and path.parent.resolve() == Path(options.save).resolve()


def companions(data: DataConfig, carried: Mapping[str, Path | bytes]) -> dict[str, Path | bytes]:
    """Small files that the run's checkpoints carry: those of its data's tokenizer, and what its origin had besides.

    Raises:
        DataError: when the tokenizer recorded beside the data cannot be read, or the origin's generation_config.json.
    """
    recorded = {} if data.mock_data else tokenizer_files(dataset_prefix(data))
    ours = {TOKENIZER + name: content for name, content in recorded.items()}
    if not ours:
        return dict(carried)
    kept = {name: content for name, content in carried.items() if not name.startswith(TOKENIZER)}
    same = TOKENIZER_JSON in carried and _bytes(carried[TOKENIZER_JSON]) == ours.get(TOKENIZER_JSON)
    if GENERATION in kept and not same:  # its ids are those of another tokenizer
        kept[GENERATION] = _without_special_ids(_bytes(kept[GENERATION]))
    return kept | ours


def _bytes(content: Path | bytes) -> bytes:
    return content if isinstance(content, bytes) else content.read_bytes()


def _without_special_ids(generation: bytes) -> bytes:
    """A generation_config.json that says nothing of the ids of another tokenizer."""
    try:
        settings = json.loads(generation)
    except ValueError as error:
        raise DataError(f"the origin's {GENERATION} is no JSON: {error}") from error
    if not isinstance(settings, dict):
        raise DataError(f"the origin's {GENERATION} is {type(settings).__name__} in JSON, not an object")
    return json.dumps({name: value for name, value in settings.items() if name not in SPECIAL_IDS}).encode()


def _loaded(trainer: Trainer, manifest: Manifest, mode: str) -> str:
    if mode == "weights-only":
        return f"weights from {manifest.path}"
    return f"resumed from {manifest.path}: step {trainer.iteration}, {trainer.consumed_samples:,} samples"
