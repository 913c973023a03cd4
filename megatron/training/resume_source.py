"""Find what a run starts from: its own newest checkpoint, another run's, a Hugging Face model, or nothing.

Uses neither torch nor tensor data, so that ``--check-config`` can report it too (``preview_start``). A run resumes
from its own checkpoints in ``save`` if there are any; ``load`` is for its first start. Changed options are compared
with those stored in the checkpoint.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, Self

from megatron.arguments.checks.checkpoint import holds_checkpoints
from megatron.arguments.checks.training import schedule_problems
from megatron.arguments.compatibility import (
    StoredLayout,
    compare_configs,
    readable_config,
    resume_mode_fixes,
    stored_tensors_problem,
)
from megatron.checkpoint.errors import (
    CheckpointError,
    DamagedCheckpointError,
    NewerVersionError,
    UnreachableError,
    strip_folder,
)
from megatron.checkpoint.folder import CheckpointFolder, is_local_checkpoint
from megatron.checkpoint.format import Manifest, is_megatron_lm
from megatron.checkpoint.location import Location, parse_location
from megatron.checkpoint.publish import CHECKPOINT_NAME, is_complete, is_interrupted
from megatron.checkpoint.rewinds import (
    CORRUPTION,
    REWIND_TYPES,
    REWINDS_FILE,
    Rewind,
    later_rewinds,
    notes_on,
    read_rewinds,
    rewinds_of,
)
from megatron.config.batch import Origin, final_iteration
from megatron.config.checkpoint import CheckpointConfig
from megatron.config.data import DataConfig
from megatron.config.data_paths import train_data_flag
from megatron.config.errors import Problem, UserError
from megatron.config.mixture import mixture_changes
from megatron.config.option import Role
from megatron.config.run import RunConfig
from megatron.config.schemes import MEGATRON_PREFIX
from megatron.config.text import listed, shell_word
from megatron.convert.sources import checkpoint_location
from megatron.data.dataset import split_label
from megatron.data.preview import data_fingerprints

BATCH_OPTIONS = {"global_batch_size", "rampup_batch_size", "step_batch_size_schedule"}
"""Options that determine the number of samples per step."""

Position = tuple[int, int]
"""Progress of a run: steps taken and samples consumed."""

PHASE: Mapping[str, Any] = {
    "iteration": int,
    "consumed_samples": int,
    "consumed_tokens": int,
    "read": int,
    "digest": str,
    "sources": {str: int},
}

STATE: Mapping[Any, Any] = {
    "iteration": int,
    "consumed_samples": int,
    "batches_since": {"iteration": int, "consumed_samples": int},
    "losses": {str: float},
    "data": {"stretches": {str: [int]}, "fingerprints": {str: str}, "digest": str},
    "base": {"location": str, "digest": str},
    "phase": PHASE,
    "rewinds": {"list": [REWIND_TYPES]},
    "written_by": {"layout": {str: int}},
}
"""Types of what is read of a checkpoint's state before the components read theirs, see :func:`odd_values`."""


class NoCheckpointError(UserError):
    """A checkpoint is required, and none is there or can be used."""


@dataclass(frozen=True)
class ResumeSource:
    """Start of a run: checkpoints, a Hugging Face model, or neither for a new run."""

    paths: tuple[Location, ...] = ()  # checkpoints to try in this order; the manifest of the first is valid
    weights: str | None = None  # location of a model without the state of a run, such as ``hf:DIR``
    mode: str = "exact"  # how much of a checkpoint to load, a choice of ``resume_mode``
    notes: tuple[str, ...] = ()  # which checkpoints were passed over, and why
    rewinds: tuple[Rewind, ...] = ()  # after which the run continues; it leaves out their samples

    @property
    def fresh(self) -> bool:
        """True if the run starts from scratch."""
        return not self.paths and self.weights is None

    def to_json(self) -> list[Any]:
        """Return it as JSON, for other ranks."""
        rewinds = [rewind.to_json() for rewind in self.rewinds]
        return [[*map(str, self.paths)], self.weights, self.mode, [*self.notes], rewinds]

    @classmethod
    def from_json(cls, data: Sequence[Any]) -> Self:
        """Read what :meth:`to_json` has returned on another rank."""
        paths, weights, mode, notes, rewinds = data
        undone = tuple(Rewind(**entry) for entry in rewinds)
        return cls(tuple(map(parse_location, paths)), weights, mode, tuple(notes), undone)

    def without_samples(self, config: RunConfig) -> RunConfig:
        """Return a configuration that leaves out the samples of :attr:`rewinds`, too."""
        phase = config.training.phase_name or ""
        words = [rewind.words for rewind in self.rewinds if rewind.phase == phase and rewind.end > rewind.begin]
        skipped = tuple(dict.fromkeys((*config.data.skip_samples, *words)))
        return replace(config, data=replace(config.data, skip_samples=skipped))


def step_of(path: Location) -> int:
    """Return the step of one of the run's own checkpoints; -1 for a checkpoint with another name."""
    match = CHECKPOINT_NAME.fullmatch(path.name)
    return int(match[1]) if match else -1


def find_resume_source(options: CheckpointConfig) -> ResumeSource:
    """Find what a run starts from: checkpoints in ``save`` if there are any, otherwise ``load``.

    Raises:
        UserError: if there are checkpoints, or some are required, but none can be used.
    """
    try:
        rewinds = () if options.save is None else tuple(read_rewinds(parse_location(options.save)))
        source = _find(options, rewinds)
        if source.paths and source.mode == "exact":  # also those of a run that this one forks
            saved = rewinds_of(Manifest.open(source.paths[0]).state)
            rewinds += tuple(rewind for rewind in saved if rewind not in rewinds)
        return replace(source, rewinds=rewinds)
    except (NewerVersionError, UnreachableError) as error:  # not damaged: an older checkpoint would lose good steps
        raise UserError([Problem("E811", str(error))]) from error
    except (OSError, CheckpointError) as error:
        raise UserError([Problem("E811", f"cannot search for checkpoints: {error}")]) from error


def _find(options: CheckpointConfig, rewinds: Sequence[Rewind]) -> ResumeSource:
    save = None if options.save is None else parse_location(options.save)
    load, step = _load_folder(options)
    own, undone = _without_undone([] if save is None else CheckpointFolder(save).named(), rewinds)
    if undone:
        source = _find_among(options, save, load, step, own)
        return replace(source, notes=(*undone, *source.notes))
    return _find_among(options, save, load, step, own)


def _without_undone(
    named: Sequence[tuple[int, Location]], rewinds: Sequence[Rewind]
) -> tuple[list[tuple[int, Location]], list[str]]:
    """Return the run's own checkpoints without those that a rewind has undone, and notes on these."""
    left, notes = [], list[str]()
    for step, path in named:
        later = later_rewinds(step, (), rewinds)
        if later:  # otherwise no manifest need be read here
            with suppress(DamagedCheckpointError):
                later = later_rewinds(step, [each.id for each in rewinds_of(Manifest.open(path).state)], rewinds)
        if later and is_complete(path):
            notes.append(passed_over_note(path, later[-1].why))
        else:
            left.append((step, path))
    return left, notes


def _find_among(
    options: CheckpointConfig,
    save: Location | None,
    load: Location | None,
    step: int | None,
    own: Sequence[tuple[int, Location]],
) -> ResumeSource:
    """Return what a run starts from, whose ``own`` checkpoints may be used as far as their rewinds show."""
    for_own = applies_to_own_checkpoints(options)
    if save is not None and any(not is_interrupted(path) for _, path in own):
        return _select(save, own, step if for_own else None, options.resume_mode if for_own else "exact", own=True)
    notes = tuple(passed_over_note(path, _problem(path)) for _, path in own)
    if save is None and load is None and options.load is None:
        if step is not None:
            sentence = f"--ckpt-step {step} needs a folder of checkpoints: neither --load nor --save is given"
            raise NoCheckpointError([Problem("E812", sentence, ("--load RUN", "--set checkpoint.ckpt_step=null"))])
        return ResumeSource()
    pretrained = options.load is not None and options.load == options.pretrained_checkpoint
    if for_own and step is None and not pretrained:
        return ResumeSource(notes=(*notes, f"starts from scratch: {save} holds no checkpoint"))
    if load is None and options.load is not None:
        return ResumeSource(weights=options.load, mode="weights-only", notes=notes)
    folder = load or parse_location(str(save))
    absent = isinstance(folder, Path) and not (folder.is_dir() and any(folder.iterdir()))
    named = (options.load or "").startswith(MEGATRON_PREFIX)  # must exist, as that of hf:
    if absent and step is None and not (named or pretrained):
        return ResumeSource(notes=(*notes, f"starts from scratch: --load {folder} does not exist or is empty"))
    found = CheckpointFolder(folder).named()
    if step is None and found:
        found, undone = _without_undone(found, read_rewinds(folder))
        notes = (*notes, *undone)
    if is_complete(folder) or is_megatron_lm(folder):  # one checkpoint under another name
        iteration = step or 0  # for the error, if it is unreadable
        with suppress(DamagedCheckpointError):
            iteration, _ = position_of(Manifest.open(folder))
        found = [(iteration, folder)]
    option = "--pretrained-checkpoint" if pretrained else "--load"
    return _select(folder, found, step, options.resume_mode, notes, option=option)


def applies_to_own_checkpoints(options: CheckpointConfig) -> bool:
    """Return True if ``ckpt_step`` and ``resume_mode`` apply to the run's own checkpoints, not to those in ``load``."""
    load, _ = _load_folder(options)
    return options.load is None or (
        options.save is not None and load is not None and load.resolve() == parse_location(options.save).resolve()
    )


def later_start_options(options: CheckpointConfig) -> CheckpointConfig:
    """Return the options of a later start in the same processes: a step of the run's own folder is of the first one."""
    return replace(options, load=None, ckpt_step=None) if applies_to_own_checkpoints(options) else options


def read_only_options(options: CheckpointConfig) -> CheckpointConfig:
    """Return options that start from the same checkpoint but write nothing and hold no lease.

    A run that is writing to the ``save`` folder meanwhile is not disturbed.
    """
    if applies_to_own_checkpoints(options):
        options = replace(options, load=options.load or options.save)
    elif holds_checkpoints(options.save):  # they take precedence over ``load``, to which mode and step apply
        options = replace(options, load=options.save, resume_mode="exact", ckpt_step=None)
    options = replace(options, save=None, save_interval=None, save_hf_interval=None)
    return replace(options, local_save=None, local_save_interval=None)


def _load_folder(options: CheckpointConfig) -> tuple[Location | None, int | None]:
    """Return the folder named by ``load``, and the requested step.

    If ``load`` is a single checkpoint ``FOLDER/iter_N``, these are its folder and N.
    """
    path = None if options.load is None else checkpoint_location(options.load)
    if path is None:
        return None, options.ckpt_step
    match = CHECKPOINT_NAME.fullmatch(path.name)
    return (path.parent, int(match[1])) if match else (path, options.ckpt_step)


def _select(
    folder: Location,
    named: Sequence[tuple[int, Location]],
    step: int | None,
    mode: str,
    notes: tuple[str, ...] = (),
    own: bool = False,
    option: str = "--load",
) -> ResumeSource:
    """Return the newest usable checkpoint of ``named``, which are sorted by step, and the ones before it.

    UserError if none is usable, or newer ones would take precedence at the next start. ``own``: the run saves there.
    """
    wanted = [path for iteration, path in named if step in (None, iteration)]
    newer = [path for iteration, path in named if step is not None and iteration > step and is_complete(path)]
    problems = {}
    for i, path in enumerate(wanted):
        problem = _problem(path)
        if problem is not None:
            problems[path] = problem
        elif own and newer:
            sentence = (
                f"{folder} holds newer checkpoints than step {step} ({newer[0].name}): "
                "the next start would resume from them"
            )
            raise UserError([Problem("E813", sentence, (f"--load {folder} --ckpt-step {step} --save ANOTHER",))])
        else:
            passed_over = (passed_over_note(path, problem) for path, problem in problems.items())
            return ResumeSource(tuple(wanted[i:]), mode=mode, notes=(*notes, *passed_over))
    usable = [str(iteration) for iteration, path in named if _problem(path) is None]
    instead = tuple(f"--ckpt-step {other}" for other in usable[:1])
    damaged = {path: problem for path, problem in problems.items() if not is_interrupted(path)}
    if damaged:
        which = "no checkpoint" if step is None else f"no checkpoint of step {step}"
        reasons = "".join(f"\n  {path.name}: {strip_folder(path, problem)}" for path, problem in damaged.items())
        elsewhere = "--save ANOTHER" if own else f"{option} ANOTHER"
        raise NoCheckpointError([Problem("E811", f"{which} in {folder} can be used:{reasons}", (*instead, elsewhere))])
    if step is not None:
        sentence = f"{folder} has no checkpoint of step {step}; it has {', '.join(usable) or 'none'}"
        raise NoCheckpointError([Problem("E812", sentence, instead)])
    sentence = f"{folder} has no checkpoint"
    fixes = (f"{option} ANOTHER", f"drop {option} to start from nothing")
    raise NoCheckpointError([Problem("E812", sentence, fixes)])


def _problem(path: Location) -> str | None:
    """Return why a checkpoint cannot be used, as far as its manifest shows; None if it can."""
    try:
        manifest = Manifest.open(path)
    except DamagedCheckpointError as error:
        return str(error)
    weights = {name: t for name, t in manifest.tensors.items() if not name.startswith("optim.")}
    shapes = {name: (tensor.shape, tensor.view) for name, tensor in weights.items()}
    required = ["data"] if "optimizer" in manifest.state else []  # otherwise the checkpoint holds weights alone
    return state_problem(manifest, STATE, required) or stored_tensors_problem(manifest.config, shapes) or None


def state_problem(manifest: Manifest, types: Mapping[str, Any], required: Collection[str]) -> str:
    """Return which values of a checkpoint's state are not of their ``types``, by key, or missing; empty for none."""
    names = {name for name in types if name in required or manifest.state.get(name, {}) != {}}
    odd = [value for name in sorted(names) for value in odd_values(manifest.state.get(name), types[name], name)]
    return f"odd or missing in the state of its manifest: {listed(odd)}" if odd else ""


def odd_values(value: object, form: Any, name: str) -> Iterator[str]:
    """Yield the names of values that have another type than in ``form``.

    In ``form``, ``int`` is a count, ``float`` any number, ``[T]`` a list, and the key ``str`` any name.
    """
    if isinstance(form, Mapping) and isinstance(value, Mapping):
        for key in value if str in form else form:
            yield from odd_values(value.get(key), form.get(key, form.get(str)), f"{name}.{key}")
    elif isinstance(form, list) and isinstance(value, list):
        for each in value:
            yield from odd_values(each, form[0], f"{name}[]")
    elif type(value) is int and form in (int, float):
        if not (0 if form is int else -(2**63)) <= value < 2**63:
            yield name
    elif type(value) is not form:
        yield name


def passed_over_note(path: Location, problem: object) -> str:
    """Return a note on a checkpoint that was passed over."""
    return f"passed over {path}: {strip_folder(path, problem)}"


def position_of(manifest: Manifest, name: str = "") -> Position:
    """Return the position of a checkpoint, or the one stored in its state under ``name``."""
    position = manifest.state.get(name, manifest.state) if name else manifest.state
    return position.get("iteration", 0), position.get("consumed_samples", 0)


def stream_of(source: ResumeSource) -> int | None:
    """Return the stream of samples that a run resumes, if it is one of several."""
    if not source.paths or source.mode == "weights-only":
        return None
    with suppress(DamagedCheckpointError):
        index, count = Manifest.open(source.paths[0]).state["data"].get("stream", (0, 1))
        return int(index) if count > 1 else None
    return None


def compare_with_checkpoint(
    manifest: Manifest, config: RunConfig, world_size: int, mode: str, notes: Sequence[str]
) -> tuple[list[str], Position, str]:
    """Compare a run with the checkpoint that it is about to start from.

    Args:
        manifest: manifest of the checkpoint.
        config: configuration of the run, resolved.
        world_size: number of ranks of the run.
        mode: how much of the checkpoint to load.
        notes: why this checkpoint was chosen; part of an error.

    Returns:
        Differences to be logged, the position at which the current batch size options took effect, and the mode: a
        phase that has begun with these options is resumed exactly.

    Raises:
        UserError: if the changes do not allow starting from it.
    """
    own = is_own_checkpoint(manifest.path, config.checkpoint)
    if config.model.lora_rank is not None and not manifest.state.get("base"):
        fix = "--save ANOTHER" if own else "drop --load"
        raise UserError([Problem("E806", f"{manifest.path} holds a whole model, not adapters", (fix,))])
    if mode != "weights-only" and "optimizer" not in manifest.state:
        save = config.checkpoint.save
        folders = f"--load {shell_word(save)} --save {shell_word(f'{save}-new')} " if own and save is not None else ""
        why = manifest.state.get("no_optimizer")  # of Megatron-LM
        sentence = f"{manifest.path} holds weights, but not the state of a run{f': {why}' if why else ''}"
        raise UserError([Problem("E814", sentence, (f"{folders}--resume-mode weights-only",))])
    batches_since = position_of(manifest, "batches_since")
    phase, name = manifest.state.get("phase"), config.training.phase_name or ""
    if mode == "new-phase" and own and phase and phase.get("name", "") == name:
        changes = compare_configs(manifest.config, config, "exact", begin=batches_since, own=own)
        mode = mode if changes.problems else "exact"
    changes = compare_configs(manifest.config, config, mode, begin=batches_since, own=own, world_size=world_size)
    renamed = list[Problem]()
    for_load = mode == "exact" and config.checkpoint.resume_mode == "new-phase" and config.training.phases is None
    if own and for_load and phase and phase.get("name", "") != name:
        of = f"phase {phase['name']}" if phase.get("name") else "a phase without a name"
        sentence = f"{manifest.path} is of {of}: --resume-mode new-phase applies to the checkpoint of --load"
        renamed.append(Problem("E342", sentence, ("drop --load",)))
    if mode in ("new-phase", "weights-only"):
        batches_since = (0, 0)
    elif BATCH_OPTIONS & changes.changed:
        batches_since = Origin.from_state(manifest.state).local(*position_of(manifest))
    dp = config.parallel.data_parallel_size(world_size)
    problems = [*(changes.problems or renamed), *schedule_problems(config, dp, batches_since)]
    if problems:
        which = "; ".join([f"the checkpoint is {manifest.path}", *notes])
        raise UserError([replace(problems[0], sentence=f"{problems[0].sentence} ({which})"), *problems[1:]])
    lines = [*changes.lines]
    before = saved_ranks(manifest)
    if before not in (0, world_size):
        lines.insert(0, f"ranks: checkpoint {before} -> now {world_size}")
    return lines, batches_since, mode


def continues_data(before: RunConfig, fingerprint: str | None, config: RunConfig, world_size: int) -> bool:
    """Return True if a phase continues to read where the one before has stopped, whose data have a ``fingerprint``.

    It does if its data are the same: files, sequence length, seed and streams. Otherwise it reads its data from the
    beginning. A mixture begins with its first stage, and continues each source.

    Raises:
        DataError: if the data of the phase cannot be opened.
    """
    if config.data.data_mixture is not None:
        return False
    same = before.training.seed == config.training.seed and before.diloco.streams == config.diloco.streams
    return same and fingerprint == data_fingerprints(config, world_size)["train"]


def next_origin(manifest: Manifest, config: RunConfig, world_size: int) -> Origin:
    """Return the origin of a phase that begins with a checkpoint.

    Raises:
        DataError: if the data of the phase cannot be opened.
    """
    state, then = manifest.state, readable_config(manifest.config)
    before, data = Origin.from_state(state), state["data"]
    iteration, samples = position_of(manifest)
    tokens = before.tokens_at(samples, then.training.seq_length)
    sources = data.get("sources", {})
    if continues_data(then, data["fingerprints"].get("train"), config, world_size):
        read = before.read + samples - before.samples
        return Origin(iteration, samples, tokens, read, before.digest, sources)
    return Origin(iteration, samples, tokens, 0, int(data["digest"] or "0", 16), sources)


def phase_note(origin: Origin, config: RunConfig, world_size: int) -> str:
    """Return the log line on a phase that begins."""
    steps = final_iteration(config.training, config.parallel.data_parallel_size(world_size))
    data = f"its data continue after {origin.read:,} samples" if origin.read else "its data are read from the beginning"
    if config.data.data_mixture is not None and any(origin.sources.values()):
        data = "each source of its mixture continues"
    return (
        f"a new phase of {steps:,} steps begins after step {origin.iteration:,}, {origin.samples:,} samples, "
        f"{origin.tokens:,} tokens: all lengths count from there, and moments and counters continue; {data}"
    )


def compare_data(
    saved: Mapping[str, Any], fingerprints: Mapping[str, str], config: RunConfig, own: bool, reordered: bool = False
) -> list[str]:
    """Compare the data of a run with those of the checkpoint that it resumes; return notes.

    Args:
        saved: ``data`` in the state of the checkpoint.
        fingerprints: of the run's data by split.
        config: of the run.
        own: it is a checkpoint of this run.
        reordered: the samples read before are not those of the checkpoint, or in another order.

    Raises:
        UserError: if the training data differ.
    """
    changed = [name for name, mine in fingerprints.items() if saved["fingerprints"].get(name, mine) != mine]
    if reordered and "train" not in changed:
        changed = ["train", *changed]
    data = f"{' and '.join(map(split_label, changed))} data"
    if "train" in changed:
        sentence = f"the {data} are not those of the checkpoint: {_difference(saved, config.data)}"
        raise UserError([Problem("E815", sentence, tuple(_data_fixes(config, own)))])
    notes = [f"the {data} are not those of the checkpoint: losses on them cannot be compared with those before it"]
    unrecorded = "the checkpoint does not record its samples: the data must be those of its run"  # of Megatron-LM
    return [*([] if saved["digest"] else [unrecorded]), *(notes if changed else [])]


def _data_fixes(config: RunConfig, own: bool) -> Iterator[str]:
    """Yield what may be done about other data."""
    phase, flag = config.training.phase_name, train_data_flag(config.data)
    if own and config.training.phases is not None:
        file = config.data.data_mixture
        of = f"stages of phase {phase} in {file}" if file else f"data of phase {phase} in {config.training.phases}"
        yield f"undo the edit of the {of}"
        yield f"finish phase {phase} with the data of the checkpoint: a later phase takes any"
        return
    if flag is not None:
        yield f"{flag} THE_SAME_DATA"
    yield from resume_mode_fixes(Role.DATA, config.checkpoint, own)


def _difference(saved: Mapping[str, Any], data: DataConfig) -> str:
    """Return what differs between the data of a run and those of the checkpoint."""
    changes = []
    if data.data_mixture is not None and saved.get("mixture"):
        with suppress(LookupError, TypeError, AttributeError):  # of another version
            changes = mixture_changes(saved["mixture"], data.mixture.summary())
    return listed(changes) if changes else "other files, or another order"


def is_own_checkpoint(path: Location, options: CheckpointConfig) -> bool:
    """Return True if a checkpoint is the run's own: in its ``save`` folder, or in a node's ``local_save`` folder."""
    if options.local_save is not None and isinstance(path, Path) and is_local_checkpoint(path, options.local_save):
        return True
    return options.save is not None and path.parent.resolve() == parse_location(options.save).resolve()


@dataclass(frozen=True)
class StartPreview:
    """Notes and position of a start that has not been made."""

    notes: tuple[str, ...] = ()  # one line each
    iteration: int = 0  # steps already taken in its phase
    consumed_samples: int = 0  # in these steps
    data: Mapping[str, Any] | None = None  # those of the checkpoint that is resumed, for `compare_data`
    segments: Mapping[str, Sequence[int]] | None = None  # in which that checkpoint laid out its data
    own: bool = False  # it is a checkpoint of this run
    origin: Origin | None = None  # of its phase; None if it takes no position from a checkpoint


def stored_config(options: CheckpointConfig) -> Mapping[str, Any] | None:
    """Return the configuration stored in the checkpoint that a run starts from; None without a checkpoint.

    Raises:
        UserError: if a checkpoint is required and none can be read.
    """
    source = find_resume_source(options)
    return Manifest.open(source.paths[0]).config if source.paths else None


def stored_layout(options: CheckpointConfig) -> StoredLayout | None:
    """Return the layout of the run whose state a start resumes; None for a new run, or one from weights alone.

    Raises:
        UserError: if a checkpoint is required and none can be read.
    """
    source = find_resume_source(options)
    if not source.paths or source.mode == "weights-only":
        return None
    manifest = Manifest.open(source.paths[0])
    return StoredLayout(manifest.config, saved_ranks(manifest), str(manifest.path))


def saved_ranks(manifest: Manifest) -> int:
    """Return the number of ranks that wrote a checkpoint; 0 if it is not recorded."""
    layout = manifest.state.get("written_by", {}).get("layout", {})
    return prod(layout.get(axis, 1) for axis in ("pp", "dp", "cp", "tp")) if layout else 0


def refuse_suspects(config: RunConfig, source: ResumeSource) -> None:
    """Refuse to go on after a corruption under ``--on-corruption stop``.

    Args:
        config: of the run.
        source: what it starts from. A checkpoint that lists the corruption is of a start with ``exclude`` since then.

    Raises:
        UserError: if there was one.
    """
    save = config.checkpoint.save
    if save is None or config.training.skip_train or config.reliability.on_corruption != "stop":
        return
    found = [rewind for rewind in source.rewinds if rewind.kind == CORRUPTION]
    if found and source.paths:
        with suppress(DamagedCheckpointError):
            known = rewinds_of(Manifest.open(source.paths[0]).state)
            found = [rewind for rewind in found if rewind not in known]
    if found:
        fix = f"the same command with --on-corruption exclude, which resumes from step {found[0].limit} or before"
        raise UserError([Problem("E984", f"{save}/{REWINDS_FILE}: {found[0].why}", (fix,))])


def preview_start(config: RunConfig, world_size: int, source: ResumeSource | None = None) -> StartPreview:
    """Return the notes and the position with which the run would start.

    Args:
        config: resolved, vocabulary included.
        world_size: number of ranks.
        source: what it starts from, if it is known.

    Raises:
        UserError: if a required checkpoint is missing, or the run must not resume from it.
    """
    source = source or find_resume_source(config.resume_options)
    refuse_suspects(config, source)
    notes = (*source.notes, *notes_on(source.rewinds))
    if source.weights is not None:
        return StartPreview((*notes, f"checkpoint: {source.weights}, its tensors not read"))
    if source.fresh:
        return StartPreview(notes)
    manifest = Manifest.open(source.paths[0])
    changes, _, mode = compare_with_checkpoint(manifest, config, world_size, source.mode, source.notes)
    notes = (*notes, f"checkpoint: {manifest.path}, its tensors not read", *changes)
    if mode == "weights-only":
        return StartPreview(notes)
    if mode == "new-phase":
        origin = next_origin(manifest, config, world_size)
        segments = manifest.state["data"]["stretches"] if origin.read else None
        return StartPreview((*notes, phase_note(origin, config, world_size)), segments=segments, origin=origin)
    own = is_own_checkpoint(manifest.path, config.checkpoint)
    generated = config.data.mock_data and manifest.config["data"].get("mock_data")  # from options, which are compared
    origin, data = Origin.from_state(manifest.state), manifest.state["data"]
    position = origin.local(*position_of(manifest))
    return StartPreview(notes, *position, None if generated else data, data["stretches"], own, origin)
