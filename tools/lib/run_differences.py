"""Differences between two runs, from their folders: options, log lines, samples, environment and source."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from megatron.arguments.compatibility import role_of
from megatron.arguments.sources import build_config, from_mapping
from megatron.config.errors import UserError
from megatron.config.files import TABLE_FILE_BYTES, parse_json, parse_yaml, read_small
from megatron.config.option import Role
from megatron.config.settings import SETTINGS
from megatron.data.dataset import DIGEST_BLOCK
from megatron.data.errors import DataError
from megatron.data.loader import DataSource, find_source
from megatron.training.loggers.run_folder import (
    CONFIG_FILE,
    DATA_FILE,
    DIFF_FILE,
    ENVIRONMENT_FILE,
    METRICS_FILE,
    read_history,
)
from tools.lib.run_samples import DIGEST_MODULUS, SAMPLES_DIGEST, read_starts

FACT_FILES = (ENVIRONMENT_FILE, DATA_FILE)
"""Files that may explain a difference, but are not one."""

EXACT = ("consumed-samples", "batch-size")
CLOSE = ("learning-rate", "weight-decay", "loss-scale", "grad-norm")
OF_ALL_STEPS = ("skipped-iterations", "lm loss")
"""Metrics of a log line: of the last step, compared exactly or with a tolerance; and of all steps since the previous
line."""


@dataclass
class RunFolder:
    """Content of a run folder."""

    folder: Path
    options: Mapping[str, Any] | None = None  # by name; None without a readable config.yaml
    facts: dict[str, Any] = field(default_factory=dict)  # environment and data, by dotted names
    lines: dict[int, dict[str, Any]] = field(default_factory=dict)  # log lines by step, without discarded steps
    missing: list[str] = field(default_factory=list)  # messages about missing and unreadable files


def read_run(folder: Path) -> RunFolder:
    """Read a run folder. Raise ValueError if it does not exist or is not a run folder."""
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder: pass the folders given to the runs as --run-dir")
    run = RunFolder(folder)
    groups = _parsed(run, CONFIG_FILE, parse_yaml)
    if groups is not None:
        values = {
            name: value for group in groups.values() if isinstance(group, Mapping) for name, value in group.items()
        }
        run.options = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
    elif not (folder / CONFIG_FILE).exists():
        run.missing.append(f"{folder} has no {CONFIG_FILE}")
    run.facts = {name: value for file in FACT_FILES for name, value in _flat(_parsed(run, file, parse_json) or {})}
    if (folder / DIFF_FILE).is_file():
        run.facts["uncommitted changes"] = read_small(folder / DIFF_FILE, TABLE_FILE_BYTES).decode(errors="replace")
    try:
        history = read_history(folder / METRICS_FILE)
        run.lines = {point.iteration: point.line for point in history.train}
        if count := len(history.unreadable):
            run.missing.append(f"{folder / METRICS_FILE}: {count} {'line' if count == 1 else 'lines'} cannot be read")
    except (OSError, ValueError) as error:
        run.missing.append(str(error))
    if run.options is None and not run.lines:
        raise ValueError(f"{folder} is not a run folder: {'; '.join(run.missing)}")
    return run


def _parsed(run: RunFolder, name: str, parse: Callable[[bytes], Any]) -> Mapping[str, Any] | None:
    """Return the content of a file; None if it does not exist or, with a message, if it cannot be read."""
    path = run.folder / name
    if not path.exists():
        return None
    try:
        content = parse(read_small(path))
    except (OSError, ValueError) as error:
        content = " ".join(str(error).split())
    if isinstance(content, Mapping):
        return content
    run.missing.append(f"{path} cannot be read: {content}")
    return None


@dataclass(frozen=True)
class Change:
    """A value that differs between two runs."""

    name: str
    a: Any
    b: Any
    counts: bool = True  # False if the runs are the same run all the same; effects on metrics are reported there
    of_one_start: bool = False  # whether the value may change at every restart

    def __str__(self) -> str:
        numbers = [x for x in (self.a, self.b) if isinstance(x, float) and math.isfinite(x)]
        relative = f" (relative {_relative_difference(*numbers):.1e})" if len(numbers) == 2 else ""
        return f"{self.name}: {_format_value(self.a)} | {_format_value(self.b)}{relative}"


def changed_options(a: RunFolder, b: RunFolder) -> list[Change]:
    """Return the options that differ, in the order of docs/flags.md, with unknown options last.

    Options of model, data, batch and schedule count; options of the computation and of logging do not.
    """
    if a.options is None or b.options is None:
        return []
    defaults = {name: setting.default for name, setting in SETTINGS.items()}  # of options that a version did not have
    left = {**defaults, **a.options}
    right = {**defaults, **b.options}
    configs = build_config(from_mapping(left, "a").values), build_config(from_mapping(right, "b").values)
    changes = []
    for name in dict.fromkeys((*SETTINGS, *left, *right)):
        if left.get(name) != right.get(name):
            known = name in SETTINGS
            flag, role = (SETTINGS[name].flag, role_of(name, left, right, configs)) if known else (name, None)
            counts, of_one_start = role not in (Role.FREE, Role.START), role is Role.START
            changes.append(Change(flag, left.get(name), right.get(name), counts, of_one_start))
    return changes


def changed_facts(a: RunFolder, b: RunFolder) -> list[Change]:
    """Return the differences in environment, source code and data."""
    names = dict.fromkeys((*a.facts, *b.facts))
    return [Change(n, a.facts.get(n), b.facts.get(n), False) for n in names if a.facts.get(n) != b.facts.get(n)]


@dataclass(frozen=True)
class StepComparison:
    """Comparison of the log lines that both runs have."""

    steps: tuple[int, ...]  # steps of these lines
    differs_at: int | None  # first step that differs in a metric other than the samples digest; None if all are equal
    changes: tuple[Change, ...]  # differences at that step
    digests: bool  # whether all lines have a samples digest
    digest_differs_at: int | None  # first step with another digest; the first line, if the data differs anywhere

    def before(self, step: int | None) -> int:
        """Return the last step before ``step``, or the last of all for None; 0 if there is none."""
        return max((s for s in self.steps if step is None or s < step), default=0)


def compare_steps(a: RunFolder, b: RunFolder, tolerance: float = 0.0) -> StepComparison:
    """Compare log lines of the same steps, up to a relative ``tolerance`` of losses, norms and rates.

    Metrics over all steps since the previous line are compared only if that line is of the same step in both runs.
    """
    common = sorted(a.lines.keys() & b.lines.keys())
    previous = [{step: last for last, step in pairwise([0, *sorted(run.lines)])} for run in (a, b)]
    differs_at: int | None = None
    changes: tuple[Change, ...] = ()
    for step in common:
        names = (*EXACT, *CLOSE, *(OF_ALL_STEPS if previous[0][step] == previous[1][step] else ()))
        if found := tuple(_differing(a.lines[step], b.lines[step], names, tolerance)):
            differs_at, changes = step, found
            break
    pairs = {step: (a.lines[step].get(SAMPLES_DIGEST), b.lines[step].get(SAMPLES_DIGEST)) for step in common}
    all_digests = bool(common) and all(None not in pair for pair in pairs.values())
    digest_differs_at = next((step for step, (x, y) in pairs.items() if x != y and None not in (x, y)), None)
    return StepComparison(tuple(common), differs_at, changes, all_digests, digest_differs_at)


def _differing(
    left: Mapping[str, Any], right: Mapping[str, Any], names: Sequence[str], tolerance: float
) -> Iterator[Change]:
    """Yield the values that both lines have and that differ."""
    for name in [name for name in names if name in left and name in right]:
        x, y = left[name], right[name]
        numbers = name not in EXACT and isinstance(x, int | float) and isinstance(y, int | float)
        if x != y and not (numbers and _relative_difference(x, y) <= tolerance):
            yield Change(name, x, y)


def _relative_difference(x: float, y: float) -> float:
    return abs(x - y) / max(abs(x), abs(y)) if x != y else 0.0


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _format_value(value: Any) -> str:
    text = "nothing" if value is None else repr(value) if isinstance(value, float) else str(value)
    return text if len(text) <= 80 and "\n" not in text else f"{len(text.splitlines())} lines, {len(text)} characters"


MAX_COMPARED_BY_CONTENT = 100_000
"""Samples compared by their tokens, if the data come from different files and sample identities differ."""


def first_different_sample(a: RunFolder, b: RunFolder, first: int, stop: int) -> str:
    """Describe the first difference among the training samples ``first .. stop - 1`` of two runs.

    Raises:
        OSError: if files cannot be read, and as :func:`open_samples`.
    """
    streams = [open_samples(run) for run in (a, b)]
    found = first_different_index(streams[0], streams[1], first, stop)
    if found is None:
        compared = (
            min(stop, first + MAX_COMPARED_BY_CONTENT) if len({s.fingerprints["train"] for s in streams}) > 1 else stop
        )
        return f"samples {first:,} to {compared - 1:,} are the same"
    sources = [find_source(stream.datasets["train"], found) or "generated" for stream in streams]
    return f"sample {found:,} (from 0) is the first that differs; it is from {sources[0]} | {sources[1]}"


def open_samples(run: RunFolder) -> DataSource:
    """Open the training samples of a run.

    Raises:
        DataError: if they cannot be opened, or their digest is not the logged one.
        UserError: if its configuration is invalid.
    """
    if run.options is None:
        raise DataError(run.missing[0])
    start = next(read_starts(run.folder))
    data, origin = start.open(), start.origin
    last = run.lines[max(run.lines)] if run.lines else {}
    digest = last.get(SAMPLES_DIGEST)
    read = origin.read + int(last.get("consumed-samples", origin.samples)) - origin.samples
    if digest is not None and f"{(origin.digest + data.digest('train', 0, read)) % DIGEST_MODULUS:016x}" != digest:
        raise DataError(
            f"the training data that {run.folder} names are not those that it has read, or come in another order; "
            "have files changed since?"
        )
    return data


def first_different_index(a: DataSource, b: DataSource, first: int, stop: int) -> int | None:
    """Return the index of the first training sample in ``first .. stop - 1`` that differs; None if none does."""
    left, right = a.datasets["train"], b.datasets["train"]
    stop = min(stop, len(left), len(right))
    if left.fingerprint != right.fingerprint:
        numbers = range(first, min(stop, first + MAX_COMPARED_BY_CONTENT))
        return next((i for i in numbers if not np.array_equal(left[i].tokens, right[i].tokens)), None)
    for at in range(first, stop, DIGEST_BLOCK):
        places = np.arange(at, min(at + DIGEST_BLOCK, stop))
        (differing,) = np.nonzero(left.sample_hashes(places) != right.sample_hashes(places))
        if differing.size:
            return int(places[differing[0]])
    return None


def report_options(a: RunFolder, b: RunFolder, changes: Sequence[Change]) -> Iterator[str]:
    """Yield the report on options."""
    if a.options is None or b.options is None:
        yield "options: not compared, a config.yaml is missing"
        return
    counted = [change for change in changes if change.counts]
    yield f"options: {len(counted)} differ" if counted else "options: equal"
    yield from (f"  {change}" for change in counted)
    yield from (f"  not counted: {change}" for change in changes if not (change.counts or change.of_one_start))
    if rest := [change.name for change in changes if change.of_one_start]:
        yield f"  of one start, not counted: {' '.join(rest)}"


def report_steps(a: RunFolder, b: RunFolder, steps: StepComparison, tolerance: float) -> Iterator[str]:
    """Yield the report on log lines."""
    lengths = [max(run.lines, default=0) for run in (a, b)]
    precision = "to the bit" if tolerance == 0.0 else f"to {tolerance:g}"
    last = steps.before(steps.differs_at)
    if not steps.steps:
        yield f"steps: not compared, no log line is of the same step; the last are of {lengths[0]:,} | {lengths[1]:,}"
    elif steps.differs_at is None:
        yield f"steps: equal {precision} up to step {last:,}, in {len(steps.steps):,} log lines"
        if lengths[0] != lengths[1]:
            yield f"  the runs have {lengths[0]:,} | {lengths[1]:,} steps so far"
    else:
        before = f"equal {precision} up to step {last:,}; " if last else ""
        yield f"steps: {before}the log line of step {steps.differs_at:,} is the first that differs"
        yield from (f"  {change}" for change in steps.changes)


def report_samples(a: RunFolder, b: RunFolder, steps: StepComparison, may_open: bool) -> Iterator[str]:
    """Yield the report on samples: by digests of the log lines, or by the data where these differ or are missing."""
    other, equal = steps.digest_differs_at, steps.before(steps.digest_differs_at)
    if not steps.steps:
        return
    if steps.digests and other is None:
        yield f"samples: the same up to step {equal:,}"
        return
    if other is not None:
        yield f"samples: their digests differ from the log line of step {other:,} on"
    if not may_open:
        yield "samples: the data were not opened"
        return
    first = _samples(a, b, equal) if other is not None else 0
    try:
        yield f"samples: {first_different_sample(a, b, first, _samples(a, b, steps.before(None)))}"
    except (DataError, UserError, OSError) as error:
        yield f"samples: not compared one by one: {error}"


def _samples(a: RunFolder, b: RunFolder, step: int) -> int:
    """Return the number of samples that both runs had consumed after a step."""
    return min(int(run.lines[step]["consumed-samples"]) for run in (a, b)) if step else 0


def report_facts(changes: Sequence[Change]) -> Iterator[str]:
    """Yield the report on environment, source and data."""
    yield "environment, source and data: " + ("they differ" if changes else "equal")
    yield from (f"  {change}" for change in changes)
