"""The file of ``--phases``: every phase is the command line with options of its own, checked like any other.

`plan_phases` parses the command line once for each phase, with the options of the phase in place of ``--set``. A phase
lasts until the first step at which its tokens are reached. Learning rate and weight decay follow one schedule
(``--schedule-tokens``) up to the end of the last phase without one of its own, which a phase has that sets an option of
the schedule.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from megatron.arguments.cli import ParsedArguments
from megatron.arguments.compatibility import compare_configs
from megatron.arguments.sources import LENGTH_OPTIONS, to_dict, without_groups
from megatron.config.batch import (
    Origin,
    batch_size_stages,
    final_consumed_samples,
    final_iteration,
    full_global_batch_size,
    lr_scale,
    schedule_lengths,
    schedule_start,
)
from megatron.config.errors import Problem, UserError
from megatron.config.files import parse_yaml, read_small
from megatron.config.mixture import read_mixture
from megatron.config.option import Role
from megatron.config.phases import Phase
from megatron.config.run import RunConfig
from megatron.config.settings import SETTINGS
from megatron.config.skipping import of_phase
from megatron.config.text import listed
from megatron.config.training import TrainingConfig
from megatron.optimizer.lr_scheduler import LearningRateSchedule

T = TypeVar("T")
Result = TypeVar("Result")

CODE = "E341"
"""Code of all problems of the file."""

RUN_LENGTHS, *SCHEDULE_LENGTHS = LENGTH_OPTIONS

SCHEDULE_OPTIONS = {
    *(name for names in SCHEDULE_LENGTHS for name in names),
    *("lr", "min_lr", "decoupled_lr", "decoupled_min_lr", "lr_decay_style", "lr_wsd_decay_style", "lr_warmup_init"),
    *("weight_decay", "start_weight_decay", "end_weight_decay", "weight_decay_incr_style", "schedule_tokens"),
}
"""Options with which a phase has a schedule of its own."""

CHANGING_STARTS = {
    *("save_interval", "save_hf_interval", "local_save_interval", "log_health_interval", "data_cache_path"),
    *("evaluate_tasks", "evaluate_tasks_interval", "teacher_logits"),
    *("skip_samples", "skip_tokens", "skip_documents"),
}
"""Options of a start that may differ between phases; others hold for the process, or for the run."""

PLACES = ("skip_samples", "skip_tokens")
"""Options that name places in the data of a phase: the command line gives them as ``PHASE/A:B``."""

FIXED = {"device", "distributed_backend", "distributed_timeout_minutes", "plugin", "deterministic", "phases"}
"""Further options that hold for the process."""

FORM = "- {name: long, tokens: 100B, seq_length: 131072}"

UNITS = {"": 0, "K": 3, "M": 6, "B": 9, "T": 12}

LEAST_DRAFT = 2**20
"""Samples that are more than any batch."""

SUDDEN = 0.01
"""Relative change of the learning rate from one phase to the next that is noted."""


@dataclass(frozen=True)
class PhaseEntry:
    """A phase as the file has it."""

    name: str
    tokens: int
    options: Mapping[str, Any]  # by their names in configuration files

    @property
    def has_schedule(self) -> bool:
        """True if it has a schedule of its own."""
        return not SCHEDULE_OPTIONS.isdisjoint(self.options)


def read_phases(path: str) -> list[PhaseEntry]:
    """Read the file of ``--phases``.

    Raises:
        UserError: with all its problems.
    """
    try:
        tree = parse_yaml(read_small(path))
    except OSError as error:
        raise UserError([Problem(CODE, f"--phases {path} cannot be read: {error.strerror}")]) from None
    except ValueError as error:
        raise UserError([Problem(CODE, f"--phases {path} cannot be read as YAML: {error}")]) from None
    if not isinstance(tree, list) or not tree:
        raise UserError([Problem(CODE, f"--phases {path} must hold a list of phases", (FORM,))])
    problems: list[Problem] = []
    entries = [_entry(f"--phases {path}, phase {number}", each, problems) for number, each in enumerate(tree, 1)]
    twice = [name for name, times in Counter(entry.name for entry in entries).items() if times > 1 and name]
    if twice:
        sentence = (
            f"--phases {path} names several phases {listed(twice)}: a checkpoint is found by the name of its phase"
        )
        problems.append(Problem(CODE, sentence, (f"name: {twice[0]}-2",)))
    if problems:
        raise UserError(problems)
    return entries


def mixture_phases(given: Mapping[str, Any]) -> list[PhaseEntry]:
    """Return the phases of a mixture whose stages have samples of several lengths; none for any other run.

    Args:
        given: values that presets, flags and configuration files set, by field.

    Raises:
        UserError: if the file is invalid, or the length of the run is not known.
    """
    path, length = given.get("data_mixture"), given.get("seq_length", TrainingConfig.seq_length)
    if path is None or given.get("data_mixture_stages") or not isinstance(length, int):
        return []
    mixture = read_mixture(path)
    if all(stage.seq_length in (None, length) for stage in mixture.stages):
        return []
    samples, steps, batch = (given.get(name) for name in ("train_samples", "train_iters", "global_batch_size"))
    if samples is None and steps is not None and batch is not None:
        samples = steps * batch
    tokens = [stage.tokens for stage in mixture.stages]
    if samples is None and (None in tokens or steps is not None):
        sentence = (
            f"stages of --data-mixture {path} have several sequence lengths, and the run has no length in samples"
        )
        raise UserError([Problem("E340", sentence, ("--train-samples 1000000",))])
    total = sum(filter(None, tokens)) if samples is None else samples * length
    return [
        PhaseEntry(
            "-".join(stage.name for stage in stages),
            size,
            {"seq_length": of_stages, "data_mixture_stages": [stage.name for stage in stages], "phases": path},
        )
        for stages, of_stages, size in mixture.sections(total, length)
    ]


def _entry(where: str, tree: Any, problems: list[Problem]) -> PhaseEntry:
    """Read one phase; add what is wrong to ``problems``."""
    if not isinstance(tree, Mapping):
        problems.append(Problem(CODE, f"{where} must be 'name: value' pairs, not {tree!r:.40}", (FORM,)))
        return PhaseEntry("", 1, {})
    values = {str(key).replace("-", "_"): value for key, value in tree.items()}
    name, tokens = str(values.pop("name", "")), _tokens(values.pop("tokens", None))
    if not re.fullmatch(r"[^\s:/]+", name):
        problems.append(Problem(CODE, f"{where} needs a name of one word without ':' and '/'", (FORM,)))
    if tokens is None:
        sentence = f"{where} needs its length: a number of tokens above 0, also as 800B or 1.5T"
        problems.append(Problem(CODE, sentence, ("tokens: 100B",)))
    flat = dict[str, Any]()
    for key, value in without_groups(values):
        group, _, last = key.rpartition(".")
        known = last in SETTINGS and (not group or SETTINGS[last].is_in(group))
        option_name = last if known else key  # parsing refuses an unknown one
        if option_name in flat:
            problems.append(Problem(CODE, f"{where} sets {option_name} twice", (f"drop one {option_name}",)))
        flat[option_name] = value
    for key in flat:
        option = SETTINGS[key].option if key in SETTINGS else None
        if key in (*RUN_LENGTHS, "phase_name"):
            given = "its name" if key == "phase_name" else "the length of a phase"
            sentence = f"{where} sets {key}, but {given} is given by {'name' if key == 'phase_name' else 'tokens'}"
            problems.append(Problem(CODE, sentence, (f"drop {key}",)))
        elif option is not None and (key in FIXED or (option.role is Role.START and key not in CHANGING_STARTS)):
            problems.append(
                Problem(CODE, f"{where} sets {key}, which is the same in all phases", _flags(key, flat[key]))
            )
    return PhaseEntry(name, tokens or 1, flat)


def _flags(name: str, value: Any) -> tuple[str, ...]:
    """Return the flag that sets an option for all phases; none if the value cannot be read."""
    with suppress(ValueError):
        return (SETTINGS[name].spell(SETTINGS[name].convert(value)),)
    return ()


def _tokens(value: Any) -> int | None:
    """Return a number of tokens, such as 1000, 1e9, ``800B`` or ``1.5T``; None for anything else."""
    match = re.fullmatch(r"(\d+(?:_\d+)*(?:\.\d+)?(?:e\+?\d+)?)([KMBT]?)", str(value).strip(), re.IGNORECASE)
    if match is None or isinstance(value, bool):
        return None
    number = float(match[1]) * 10.0 ** UNITS[match[2].upper()]
    return round(number) if 1 <= number < 2**62 else None


def samples_of_tokens(training: TrainingConfig, data_parallel_size: int, tokens: int) -> int:
    """Return the samples consumed by the first step at whose end ``tokens`` are reached."""
    needed = -(-tokens // training.seq_length)
    stages = batch_size_stages(training, data_parallel_size)
    first, size = next(stage for stage in reversed(stages) if stage[0] < needed)
    return first + -(-(needed - first) // size) * size


Parse = Callable[[str, Mapping[str, Any], int | None], ParsedArguments]
"""Parses the command line with further options: where they are from, the options, and the number of ranks, if known."""


def plan_phases(
    path: str, entries: Sequence[PhaseEntry], given: Mapping[str, Any], parse: Parse
) -> list[ParsedArguments]:
    """Return the configuration of each phase.

    Args:
        path: of the file.
        entries: its phases.
        given: values that flags and configuration files set, by field.
        parse: parses and checks a phase.

    Raises:
        UserError: with the problems of all phases.
    """
    lengths = [SETTINGS[name].flag for name in RUN_LENGTHS if given.get(name) is not None]
    if lengths and given.get("phases") is not None:  # for stages of a mixture it is the length of all
        sentence = f"{' and '.join(lengths)} and --phases both set the length of the run"
        raise UserError([Problem("E340", sentence, tuple(f"drop {name}" for name in lengths))])
    check_places(path, [entry.name for entry in entries], given)
    trees = [_options(entry, given) for entry in entries]

    def parse_each(trees: Sequence[Mapping[str, Any]], world_size: int | None) -> list[ParsedArguments]:
        names = [entry.name for entry in entries]
        places = [f"{path}, phase {name}" for name in names]
        return collect_phases(names, [*zip(places, trees)], lambda phase: parse(phase[0], phase[1], world_size))

    # A length that is long enough for any warm-up; the number of ranks, if nothing gives it, is one for all phases.
    long = [{**tree, "train_samples": max(entry.tokens, LEAST_DRAFT)} for entry, tree in zip(entries, trees)]
    drafts = parse_each(long, None)
    ranks = math.lcm(*(draft.world_size for draft in drafts))
    if any(draft.world_size != ranks for draft in drafts):
        drafts = parse_each(long, ranks)
    sizes = [draft.config.parallel.data_parallel_size(ranks) for draft in drafts]
    samples = [
        samples_of_tokens(draft.config.training, size, entry.tokens)
        for draft, size, entry in zip(drafts, sizes, entries)
    ]
    if common := [place for place, entry in enumerate(entries) if not entry.has_schedule]:
        first, end = common[0], common[-1] + 1
        total = sum(count * draft.config.training.seq_length for count, draft in zip(samples[:end], drafts))
        tokens = given.get("schedule_tokens") or schedule_in_tokens(drafts[first].config, sizes[first], total)
        for place in common:
            trees[place] |= {**_no_lengths(given), "schedule_tokens": tokens}
    phases = parse_each([{**tree, "train_samples": count} for tree, count in zip(trees, samples)], ranks)
    problems = [problem for pair in zip(phases, phases[1:]) for problem in changes_refused(*pair)]
    if problems:
        raise UserError(problems)
    return phases


def check_places(path: str, names: Sequence[str], given: Mapping[str, Any]) -> None:
    """Check that what the command line skips of the order of the data names phases.

    Raises:
        UserError: if it does not, or if a list cannot be read.
    """
    words = {name: given.get(name, ()) for name in PLACES}
    found = replace(RunConfig().data, **words).phases_of_places()
    problems = []
    if None in found:
        sentence = f"{found[None]} with --phases: places count in the data of a phase"
        problems.append(Problem("E340", sentence, (f"{found[None]} {names[-1]}/A:B",)))
    if absent := [phase for phase in found if phase not in (None, *names)]:
        sentence = f"{found[absent[0]]} names the phase {absent[0]}, and {path} has {listed(names)}"
        problems.append(Problem("E340", sentence, (f"{found[absent[0]]} {names[-1]}/A:B",)))
    if problems:
        raise UserError(problems)


def _options(entry: PhaseEntry, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a phase; one with a schedule of its own does not inherit the lengths of the run's.

    What it skips of its data is added to what the command line skips.
    """
    inherited = {**_no_lengths(given), "schedule_tokens": None}
    lengths = {name: value for name, value in inherited.items() if name not in entry.options}
    places = dict[str, Any]()
    for name in PLACES:
        with suppress(ValueError):  # which parsing refuses
            own = SETTINGS[name].convert(entry.options.get(name)) or ()
            named = (word if of_phase(word)[0] else f"{entry.name}/{word}" for word in own)
            places |= {name: [*given.get(name, ()), *named]} if own else {}
    return {**(lengths if entry.has_schedule else {}), **entry.options, **places, "phase_name": entry.name}


def _no_lengths(given: Mapping[str, Any]) -> dict[str, Any]:
    return {name: SETTINGS[name].default for names in SCHEDULE_LENGTHS for name in names if name in given}


def collect_phases(names: Sequence[str], phases: Sequence[T], act: Callable[[T], Result]) -> list[Result]:
    """Return the result of ``act`` for each phase; raise the problems of all, with the phase unless all have the same.

    Raises:
        UserError: with the problems.
    """
    results, problems, notes = list[Result](), dict[Problem, list[str]](), list[str]()
    for name, phase in zip(names, phases):
        try:
            results.append(act(phase))
        except UserError as error:
            for problem in error.problems:
                problems.setdefault(problem, []).append(name)
            notes += [note for note in error.notes if note not in notes]
    if problems:
        raise UserError([_of_phases(problem, found, len(names)) for problem, found in problems.items()], notes)
    return results


def _of_phases(problem: Problem, phases: Sequence[str], count: int) -> Problem:
    """Return a problem with the phases that have it, unless it names its phase."""
    if len(phases) == count or f", phase {phases[0]}: " in problem.sentence:
        return problem
    which = f"phase {phases[0]}" if len(phases) == 1 else f"phases {listed(phases)}"
    return replace(problem, sentence=f"{which}: {problem.sentence}")


def schedule_in_tokens(config: RunConfig, data_parallel_size: int, tokens: int) -> list[int]:
    """Return ``--schedule-tokens`` of a run of ``tokens``: lengths in steps and samples are those of ``config``."""
    length, optimizer = config.training.seq_length, config.optimizer
    training = replace(config.training, train_samples=-(-tokens // length), train_iters=None)
    warmup, decay, final, _ = schedule_lengths(replace(config, training=training), data_parallel_size)
    end = round(decay * length)
    if optimizer.lr_decay_iters is None and optimizer.lr_decay_samples is None:
        end = tokens  # not rounded to samples
    return [round(warmup * length), end, round((final or 0) * length), tokens]


def changes_refused(before: ParsedArguments, after: ParsedArguments) -> Iterator[Problem]:
    """Yield what a phase changes of the one before that no checkpoint allows."""
    names = [str(each.config.training.phase_name) for each in (before, after)]
    found = compare_configs(to_dict(before.config), after.config, "new-phase", name=f"phase {names[0]}")
    for problem in found.problems:
        sentence = problem.sentence.replace(f"the phase {names[0]}'s", f"that of phase {names[0]}")
        yield replace(problem, sentence=f"phase {names[1]}: {sentence}", fixes=())


def planned(parsed: ParsedArguments) -> Phase:
    """Return a phase as the run takes it."""
    training, ranks = parsed.config.training, parsed.config.parallel.data_parallel_size(parsed.world_size)
    tokens = final_consumed_samples(training, ranks) * training.seq_length
    return Phase(parsed.config, parsed.notes, final_iteration(training, ranks), tokens)


def describe_plan(plan: Sequence[Phase], world_size: int) -> list[str]:
    """Return a heading for each phase: its steps and tokens, its learning rates, and a note if these jump."""
    headings, origin, rates = list[str](), Origin(), (0.0, 0.0)
    for number, phase in enumerate(plan, 1):
        config, ranks = phase.config, phase.config.parallel.data_parallel_size(world_size)
        begin = schedule_start(config, origin)
        schedule = LearningRateSchedule.from_config(
            config.optimizer, schedule_lengths(config, ranks), lr_scale(config, ranks), begin
        )
        samples = origin.samples + final_consumed_samples(config.training, ranks)
        last_batch = full_global_batch_size(config.training, ranks)
        places = origin.samples, samples - last_batch, samples
        first, last, following = (float(schedule.rates(consumed).lr) for consumed in places)
        end = Origin(origin.iteration + phase.steps, samples, origin.tokens + phase.tokens)
        headings.append(
            f"phase {phase.name} ({number} of {len(plan)}): steps {origin.iteration + 1:,} to {end.iteration:,}, "
            f"{phase.tokens:,} tokens to {end.tokens:,}, learning rate {first:.3g} to {last:.3g}"
        )
        own = config.optimizer.schedule_tokens is None
        if own and number > 1 and all(abs(first - before) > SUDDEN * max(first, before) for before in rates):
            headings[-1] += (
                f"\nnote: the learning rate jumps from {rates[0]:.3g} to {first:.3g} where {phase.name} begins"
            )
        if number > 1 and (again := mixture_begun_again(plan[number - 2].config, config)):
            headings[-1] += f"\nnote: {again}"
        origin, rates = end, (last, following)  # that of the next step, had the phase been longer
    return headings


def mixture_begun_again(before: RunConfig, config: RunConfig) -> str:
    """Return a note if a phase takes the same stages of a mixture as the one before; else an empty string."""
    path, chosen = config.data.data_mixture, config.data.data_mixture_stages
    if path is None or (before.data.data_mixture, before.data.data_mixture_stages) != (path, chosen):
        return ""
    stages = [stage.name for stage in config.data.mixture.stages]
    if len(stages) == 1:
        return ""
    return (
        f"{config.training.phase_name} takes the stages {listed(stages)} of {path} from the first on, as the phase "
        f"before does; to choose some, data_mixture_stages: [{stages[-1]}]"
    )
