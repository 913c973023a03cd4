"""Where a run begins: with its own newest checkpoint, with another's, with a Hugging Face model, or from nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.checkpoint.errors import DamagedError
from megatron.checkpoint.folder import NAME, Checkpoints, Found
from megatron.checkpoint.manifest import Manifest
from megatron.checkpoint.publish import BUILDING, is_complete
from megatron.config.compare import compare
from megatron.config.problems import Problem, UserError
from megatron.config.run import CheckpointConfig, DataConfig
from megatron.convert.checkpoint import TOKENIZER, carried_by, carried_files
from megatron.convert.hf_folder import HFSource
from megatron.data.tokenizer import tokenizer_files
from megatron.data.vocabulary import dataset_prefix
from megatron.parallel import comm
from megatron.parallel.comm import Group
from megatron.training.checkpointing import restore, restore_from_source, restore_weights
from megatron.training.setup import Trainer

HF = "hf:"


@dataclass(frozen=True)
class Origin:
    """What a run begins with; nothing, where neither ``manifests`` nor ``hf`` say anything.

    Attributes:
        manifests: checkpoints to try, in this order.
        hf: folder of a Hugging Face model.
        mode: how much of a checkpoint is taken over, a choice of ``resume_mode``.
        notes: what was passed over, and why.
        problems: why the run cannot begin.
    """

    manifests: tuple[Manifest, ...] = ()
    hf: Path | None = None
    mode: str = "exact"
    notes: tuple[str, ...] = ()
    problems: tuple[Problem, ...] = ()

    @property
    def fresh(self) -> bool:
        """Whether the run begins from nothing."""
        return not self.manifests and self.hf is None


def choose(options: CheckpointConfig, world: Group) -> Origin:
    """What the run begins with. Rank 0 looks, every rank gets the same answer; collective.

    A run goes on from its own checkpoints, those in ``save``; ``load`` is for its very beginning.

    Raises:
        UserError: when a checkpoint is asked for or there are some, but none can be used.

    """
    origin, *_ = comm.all_gather_objects(_look(options) if world.rank == 0 else None, world)
    if not isinstance(origin, Origin):
        raise TypeError(f"rank 0 sent {origin!r}")
    if origin.problems:
        raise UserError(origin.problems)
    return origin


def _look(options: CheckpointConfig) -> Origin:
    save, (load, step) = options.save, _named(options)
    own = Checkpoints(Path(save)).candidates() if save is not None else []
    asked = options.load is None or (save is not None and load is not None and load.resolve() == Path(save).resolve())
    if any(_finished(found) for found in own):
        mode = options.resume_mode if asked else "exact"
        return _pick(Path(str(save)), own, step if asked else None, mode, onward=True)
    unfinished = tuple(_passed_over(found) for found in own)
    if asked and step is None:
        return Origin(notes=unfinished)
    if options.load is not None and options.load.startswith(HF):
        return Origin(hf=Path(options.load.removeprefix(HF)), mode="weights-only", notes=unfinished)
    folder = load or Path(str(save))
    return _pick(folder, Checkpoints(folder).candidates(), step, options.resume_mode, unfinished)


def _named(options: CheckpointConfig) -> tuple[Path | None, int | None]:
    """The folder of checkpoints in ``load``, and the step that is asked for; ``load`` may be one checkpoint itself."""
    if options.load is None or options.load.startswith(HF):
        return None, options.ckpt_step
    path = Path(options.load)
    one = NAME.fullmatch(path.name)
    return (path.parent, int(one[1])) if one else (path, options.ckpt_step)


def _pick(
    folder: Path, found: Sequence[Found], step: int | None, mode: str, notes: tuple[str, ...] = (), onward: bool = False
) -> Origin:
    """The usable ones of ``found``, newest first; ``onward`` when the run will write its own into the same folder."""
    wanted = [f for f in found if step is None or f.iteration == step]
    usable = tuple(f.manifest for f in wanted if f.manifest is not None)
    passed_over = notes + tuple(_passed_over(f) for f in wanted if f.manifest is None)
    newer = [f for f in found if f.manifest is not None and step is not None and f.iteration > step]
    if not usable:
        return Origin(problems=(_none_usable(folder, found, wanted, step),))
    if onward and newer:
        sentence = f"{folder} holds newer checkpoints than step {step} ({newer[0].path.name}): they would be found next"
        return Origin(problems=(Problem("E813", sentence, (f"--load {folder} --ckpt-step {step} --save ANOTHER",)),))
    return Origin(usable, mode=mode, notes=passed_over)


def _finished(found: Found) -> bool:
    """Whether it was a checkpoint once; a save that was cut off has left none."""
    return found.path.suffix != BUILDING or is_complete(found.path)


def _passed_over(found: Found) -> str:
    return f"passed over {found.path}: {found.problem}"


def _none_usable(folder: Path, found: Sequence[Found], wanted: Sequence[Found], step: int | None) -> Problem:
    usable = [str(f.iteration) for f in found if f.manifest is not None]
    damaged = [f for f in wanted if _finished(f)]
    instead = tuple(f"--ckpt-step {other}" for other in usable[:1])
    if damaged:
        which = "no checkpoint" if step is None else f"no checkpoint of step {step}"
        reasons = "; ".join(f"{f.path.name}: {f.problem}" for f in damaged)
        return Problem("E811", f"{which} in {folder} can be used: {reasons}", (*instead, "--save ANOTHER"))
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
    for manifest in origin.manifests:
        if origin.mode != "weights-only" and "optimizer" not in manifest.state:
            raise UserError([_only_weights(manifest.path, trainer.config.checkpoint)])
        at = (manifest.state.get("iteration", 0), manifest.state.get("consumed_samples", 0))
        own = _is_own(manifest.path, trainer.config.checkpoint)
        changes = compare(manifest.config, trainer.config, origin.mode, begin=at, own=own)
        if changes.problems:
            raise UserError(changes.problems)
        try:
            trainer.files = companions(trainer.config.data, carried_by(manifest))
            (restore_weights if origin.mode == "weights-only" else restore)(trainer, manifest)
        except DamagedError as error:
            notes.append(f"passed over {manifest.path}: {error}")
            continue
        return [*notes, _loaded(trainer, manifest, origin.mode), *changes.lines]
    raise UserError([Problem("E811", "; ".join(["no checkpoint can be used", *notes]))])


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
        DataError: when the tokenizer recorded beside the data cannot be read.
    """
    recorded = {} if data.mock_data else tokenizer_files(dataset_prefix(data))
    ours = {TOKENIZER + name: content for name, content in recorded.items()}
    return {name: content for name, content in carried.items() if not (ours and name.startswith(TOKENIZER))} | ours


def _loaded(trainer: Trainer, manifest: Manifest, mode: str) -> str:
    if mode == "weights-only":
        return f"weights from {manifest.path}"
    return f"resumed from {manifest.path}: step {trainer.iteration}, {trainer.consumed_samples:,} samples"
