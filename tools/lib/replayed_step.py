"""What tools/replay_step.py takes again: the step of an incident or of a run, what is known of it, and the comparison.

Nothing is written. No torch.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron.arguments.sources import from_assignments, from_dict
from megatron.checkpoint.errors import CheckpointError
from megatron.checkpoint.folder import CheckpointFolder
from megatron.checkpoint.format import Manifest
from megatron.checkpoint.location import parse_location
from megatron.checkpoint.publish import CHECKPOINT_NAME
from megatron.checkpoint.rewinds import Rewind, later_rewinds, read_rewinds, rewinds_of
from megatron.config.batch import WHOLE_RUN, Origin
from megatron.config.errors import UserError
from megatron.config.files import read_small
from megatron.config.parallel import ParallelConfig
from megatron.config.privacy import REDACTED
from megatron.config.run import RunConfig
from megatron.config.settings import SETTINGS
from megatron.data.errors import DataError
from megatron.training.incidents import INCIDENT_FILE, read_incident, read_step_record
from megatron.training.loggers.run_folder import COMMAND_FILE, METRICS_FILE, read_json_lines
from megatron.training.resume_source import ResumeSource, find_resume_source, read_only_options, step_of
from tools.lib.run_samples import RunStart, read_starts

if TYPE_CHECKING:
    from megatron.training.replay import Replay, ReplayedStep

TOLERANCE = {"fp64": 1e-10, "fp32": 1e-5, "bf16": 5e-2, "fp16": 5e-2}
"""Relative error of loss and norms that another layout or device may make, by the number format of the weights."""


@dataclass(frozen=True)
class LoggedSteps:
    """A log line: the means over steps ``first`` to ``last``."""

    first: int
    last: int
    line: Mapping[str, Any]
    threads: int | None = None  # of torch, on each rank


@dataclass(frozen=True)
class ReplayTarget:
    """A step to take again, and what the run has recorded of it."""

    run: Path  # folder of the run
    step: int
    config: RunConfig  # of the run
    world_size: int
    record: Mapping[str, Any] = field(default_factory=dict)  # of an incident, see training/step_record.py
    sentence: str = ""  # of the incident
    origin: Origin = WHOLE_RUN  # of the phase
    logged: Sequence[LoggedSteps] = ()

    @property
    def own(self) -> LoggedSteps | None:
        """The log line with the step; None without one."""
        return next((each for each in self.logged if each.first <= self.step <= each.last), None)

    @property
    def has_numbers(self) -> bool:
        """True if the record of the incident has something to compare with."""
        return any(self.record.get(name) is not None for name in ("loss", "grad_norm", "gradients"))

    @property
    def threads(self) -> int | None:
        """Threads of each rank, on which the bits of a CPU depend; None if unknown."""
        return self.record.get("threads") or (None if self.own is None else self.own.threads)

    def lines_after(self, source: ResumeSource) -> int:
        """Return the number of log lines whose steps are all taken from a checkpoint to the step."""
        begin = step_of(source.paths[0]) if source.paths else 0
        return sum(begin < each.first and each.last <= self.step for each in self.logged)


def read_target(path: Path, step: int | None, assignments: Sequence[str]) -> ReplayTarget:
    """Read the step of an incident, or step ``step`` of a run folder.

    Args:
        path: folder of an incident, its file, or the folder of a run.
        step: number of the step, from 1; required for the folder of a run.
        assignments: ``GROUP.NAME=VALUE`` texts that replace options, such as paths of data that have moved.

    Raises:
        DataError: if it is neither, or a file cannot be read.
        UserError: if the configuration or an assignment is wrong.
    """
    folder = path.parent if path.name == INCIDENT_FILE else path
    record, sentence, run, until = dict[str, Any](), "", folder, math.inf
    if (folder / INCIDENT_FILE).exists():
        try:
            incident, record = read_incident(folder), read_step_record(folder)
        except (OSError, ValueError) as error:
            raise DataError(f"{folder / INCIDENT_FILE} cannot be read: {error}") from error
        sentence, run, until = incident.sentence, folder.resolve().parents[1], incident.time
        step = incident.step if step is None else step
        record = record if record.get("step") == step else {}
    elif step is None:
        raise DataError(
            f"{path} is no incident: name a step of the run", f"python tools/replay_step.py {path} --step N"
        )
    logged = read_logged_steps(run / METRICS_FILE, until)
    start = start_of(run, step, logged)
    if record.get("config"):
        start = replace(start, config=from_dict(_known(record["config"])), world_size=int(record["world_size"]))
    config = assign(start.config, assignments)
    return ReplayTarget(run, step, config, start.world_size, record, sentence, start.origin, logged)


def _known(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a configuration that this version has, without those that were redacted."""
    values = {name: value for group in tree.values() for name, value in (group or {}).items() if name in SETTINGS}
    return {name: value for name, value in values.items() if REDACTED not in str(value)}


def start_of(run: Path, step: int, logged: Sequence[LoggedSteps]) -> RunStart:
    """Return the start of the run that took a step: the newest one in its phase with as many ranks as its log line."""
    ranks = next((each.line.get("world-size") for each in logged if each.first <= step <= each.last), None)
    starts = [start for start in read_starts(run) if start.origin.iteration < step]
    if not starts or step < 1:
        raise DataError(f"{run} has no step {step}: steps are counted from 1", "--step 1")
    return next((start for start in starts if ranks in (None, start.world_size)), starts[0])


def assign(config: RunConfig, assignments: Sequence[str]) -> RunConfig:
    """Return the configuration with options replaced by ``NAME=VALUE`` texts."""
    source = from_assignments(assignments)
    if source.problems:
        raise UserError(source.problems)
    for name, value in source.values.items():
        section = SETTINGS[name].group
        config = replace(config, **{section: replace(getattr(config, section), **{name: value})})
    return config


def read_logged_steps(path: Path, until: float = math.inf) -> list[LoggedSteps]:
    """Return the log lines of training, without steps that a restart discarded.

    Args:
        path: ``metrics.jsonl`` of the run.
        until: time of an incident; what later starts did is not read.
    """
    found, begins, threads = list[LoggedSteps](), 0, None
    with suppress(OSError):
        for line in read_json_lines(path):
            if line is None or not isinstance(at := line.get("iteration"), int):
                continue
            if line.get("event") == "start":
                if float(line.get("time", 0.0)) > until:
                    break
                found, begins = [each for each in found if each.last <= at], at
                threads = line.get("threads")
            elif "lm loss" in line and "event" not in line:
                found.append(LoggedSteps(begins + 1, at, line, threads))
                begins = at
    return found


def working_folder(target: ReplayTarget) -> Path | None:
    """Return the folder in which the run was started, to which its paths are relative; None if it is gone."""
    found = target.record.get("folder")
    with suppress(OSError, ValueError):
        words = shlex.split(read_small(target.run / COMMAND_FILE).decode().strip().splitlines()[-1])
        found = found or (words[1] if words[:1] == ["cd"] else None)
    return Path(found) if found and Path(found).is_dir() else None


def find_source(target: ReplayTarget, given: str | None) -> ResumeSource:
    """Return the newest valid checkpoint before the step, or what the run itself started from.

    Unless the record of the step has numbers, it is before the first step of the step's log line, if there is one.

    Args:
        target: the step.
        given: a folder of checkpoints, or one of them, to use instead of those of the run; ``none`` for the start.

    Raises:
        DataError: if no checkpoint before the step is left, and the start is too far.
    """
    options, step = target.config.checkpoint, target.step
    folders = [given] if given else [*moved_with(target, options.save), options.save, options.load]
    reasons, others, nearest = list[str](), list[int](), None
    before = step if target.own is None or target.has_numbers else target.own.first
    for folder in dict.fromkeys(folders if given != "none" else ()):
        if not folder or folder.startswith(("hf:", "peft:")):
            continue
        location = parse_location(folder.removeprefix("megatron:"))
        named = CHECKPOINT_NAME.fullmatch(location.name)
        folder_of = CheckpointFolder(location.parent if named else location)
        found = [each for each in folder_of.candidates() if not named or each.iteration == int(named[1])]
        valid = [each for each in found if each.manifest is not None and on_course(target, each.manifest)]
        if usable := [each for each in valid if each.iteration < step]:
            best = next((each for each in usable if each.iteration < before), usable[0])
            new_phase = 0 < best.iteration == target.origin.iteration
            source = ResumeSource((best.path,), mode="new-phase" if new_phase else "exact")
            if best.iteration < before:
                return source
            nearest = nearest or source
        others += [each.iteration for each in valid]
        reasons += [f"{each.path}: {each.problem}" for each in found if each.manifest is None and each.iteration < step]
    interval = options.save_interval
    if given == "none" or options.save is None or (not given and (interval is None or before <= interval)):
        return find_resume_source(replace(read_only_options(replace(options, save=None)), ckpt_step=options.ckpt_step))
    if nearest is not None:
        return nearest
    left = f"the oldest that is left is of step {min(others)}" if others else "none is left"
    raise DataError(
        f"no checkpoint before step {step}: {left}" + "".join(f"\n  {reason}" for reason in reasons),
        "--checkpoint FOLDER, if the checkpoints have moved",
        "--checkpoint none, to take all steps from the start of the run",
    )


def on_course(target: ReplayTarget, manifest: Manifest) -> bool:
    """Return True if the run took the step after this checkpoint, not before or after it went back elsewhere."""
    known = [rewind.id for rewind in rewinds_of(manifest.state)]
    rewinds: Sequence[Rewind] = ()
    with suppress(OSError, CheckpointError):
        rewinds = read_rewinds(manifest.path.parent)
    if "rewinds" in target.record:
        before = target.record["rewinds"]
        if not set(known) <= set(before):
            return False
        rewinds = [rewind for rewind in rewinds if rewind.id in before]
    return not later_rewinds(int(manifest.state["iteration"]), known, rewinds)


def moved_with(target: ReplayTarget, save: str | None) -> list[str]:
    """Return where checkpoints are that were in the run's folder, if that folder was moved or copied."""
    old = target.config.logging.run_dir
    with suppress(ValueError, TypeError):
        return [str(target.run / Path(str(save)).relative_to(str(old)))]
    return []


def one_process(config: RunConfig) -> RunConfig:
    """Return the configuration on one rank."""
    training = replace(config.training, recompute_granularity=None, recompute_method=None)
    return replace(config, parallel=ParallelConfig(), training=training)


@dataclass
class Comparison:
    """What was compared, line by line, and whether it is equal."""

    lines: list[str] = field(default_factory=list)
    compared: int = 0
    first_difference: str = ""
    largest_error: float = 0.0

    def add(self, what: str, got: Any, expected: Any, exact: bool, tolerance: float = 0.0) -> bool:
        """Compare two numbers or texts; return True if they agree, to the bit if ``exact``."""
        self.compared += 1
        got, expected = (None if isinstance(x, float) and not math.isfinite(x) else x for x in (got, expected))
        same = got == expected
        if not exact and isinstance(got, float) and isinstance(expected, float):
            error = abs(got - expected) / max(abs(expected), 1e-30)
            self.largest_error = max(self.largest_error, error)
            same = error <= tolerance
        if not same and not self.first_difference:
            self.first_difference = f"{what}: {got!r}, the run has {expected!r}"
        return same


def compare(target: ReplayTarget, found: Replay, exact: bool, tolerance: float) -> Comparison:
    """Compare the steps that were taken again with the log, and the last one with the record of the incident.

    Args:
        target: the step, and what is recorded.
        found: what was computed again.
        exact: to the bit; otherwise losses and norms only.
        tolerance: relative error that agrees if not ``exact``.
    """
    result = Comparison()
    taken = {each.step: each for each in found.steps}
    for logged in target.logged:
        steps = [taken[step] for step in range(logged.first, logged.last + 1) if step in taken]
        if len(steps) == logged.last + 1 - logged.first:
            result.lines.append(_compare_line(result, logged, steps, exact, tolerance))
    if target.record and target.step in taken:
        result.lines += _compare_record(result, target.record, taken[target.step], found, exact, tolerance)
    return result


def _compare_line(
    result: Comparison, logged: LoggedSteps, steps: Sequence[ReplayedStep], exact: bool, tolerance: float
) -> str:
    finite = [each.loss for each in steps if math.isfinite(each.loss)]
    loss, line = sum(finite) / len(finite) if finite else None, logged.line
    which = f"step {logged.last}" if len(steps) == 1 else f"steps {logged.first} to {logged.last}"
    pairs = {"loss": (loss, line["lm loss"]), "gradient norm": (steps[-1].grad_norm, line.get("grad-norm"))}
    words = []
    for name, (got, expected) in pairs.items():
        same = result.add(f"{name} of {which}", got, expected, exact, tolerance)
        shown = "not finite" if got is None or not math.isfinite(got) else f"{got:.9g}"
        words.append(f"{name} {shown} {'equal' if same else f'DIFFERS from {expected}'}")
    if (digest := line.get("samples-digest")) is not None:
        same = result.add(f"samples up to step {logged.last}", steps[-1].samples_digest, digest, True)
        words.append("samples equal" if same else "samples DIFFER")
    return f"{which}: {', '.join(words)}"


def _compare_record(
    result: Comparison,
    record: Mapping[str, Any],
    step: ReplayedStep,
    found: Replay,
    exact: bool,
    tolerance: float,
) -> Iterator[str]:
    for what, got, name in (("loss", step.loss, "loss"), ("gradient norm", step.grad_norm, "grad_norm")):
        if record.get(name) is not None:
            same = result.add(f"{what} of the incident", got, float(record[name]), exact, tolerance)
            yield f"incident: {what} {got:.9g} {'equal' if same else f'DIFFERS from {record[name]}'}"
    if exact:
        for what, of in (("weights", "weights before the step"), ("gradients", "gradients")):
            expected, got_all = record.get(what) or {}, found.record.get(what, {})
            differing = [
                name for name in expected if not result.add(f"{what} {name}", got_all.get(name), expected[name], True)
            ]
            if expected:
                more = f"; the first that differs is {differing[0]}" if differing else ""
                yield f"incident: {len(expected) - len(differing)} of {len(expected)} {of} equal to the bit{more}"
    elif norms := record.get("gradient_norms"):
        total = math.hypot(*(float(x) for x in norms.values()))
        got_norms = found.record.get("gradient_norms", {})
        differing = []
        for name, expected in norms.items():
            got, wanted = float(got_norms.get(name, "nan")), float(expected)
            if math.isfinite(total) and wanted < 1e-5 * total:
                continue  # rounding errors alone
            if not result.add(f"norm of the gradient of {name}", got, wanted, False, tolerance):
                differing.append(name)
        more = f"; the first that differs is {differing[0]}" if differing else ""
        yield f"incident: norms of {len(norms)} gradients compared{more}"
