"""Compare two runs by their run folders: options, environment, data, and the first step that differs."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from megatron.config.compare import Role, role_of
from megatron.config.settings import SETTINGS
from megatron.training.run_folder import CONFIG, DATA, DIFF, ENVIRONMENT, METRICS

FACTS = (ENVIRONMENT, DATA)
"""Files that may explain a difference, but are not one."""

DIGEST = "samples-digest"
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

    def options_as_now(self) -> dict[str, Any]:
        """Return all options; those that the run's version did not have get today's default."""
        return {name: setting.default for name, setting in SETTINGS.items()} | dict(self.options or {})


def read_run(folder: Path) -> RunFolder:
    """Read a run folder. Raise ValueError if it does not exist or is not a run folder."""
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder: pass the folders given to the runs as --run-dir")
    run = RunFolder(folder)
    run.options = _options(run)
    run.facts = {name: value for file in FACTS for name, value in _flat(_json(run, file))}
    if (folder / DIFF).is_file():
        run.facts["uncommitted changes"] = (folder / DIFF).read_text(errors="replace")
    _read_lines(run)
    if run.options is None and not run.lines:
        raise ValueError(f"{folder} is not a run folder: {'; '.join(run.missing)}")
    return run


def _options(run: RunFolder) -> dict[str, Any] | None:
    import yaml  # only here

    try:
        tree = yaml.safe_load((run.folder / CONFIG).read_text(encoding="utf-8"))
        groups = [values for values in tree.values() if isinstance(values, Mapping)]
    except FileNotFoundError:
        run.missing.append(f"{run.folder} has no {CONFIG}")
    except (OSError, ValueError, AttributeError, yaml.YAMLError) as error:
        run.missing.append(f"{run.folder / CONFIG} cannot be read: {' '.join(str(error).split())}")
    else:
        return {name: tuple(v) if isinstance(v, list) else v for values in groups for name, v in values.items()}
    return None


def _json(run: RunFolder, name: str) -> Mapping[str, Any]:
    path = run.folder / name
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        run.missing.append(f"{path} cannot be read: {error}")
        return {}
    return content if isinstance(content, Mapping) else {name: content}


def _read_lines(run: RunFolder) -> None:
    path = run.folder / METRICS
    unreadable = 0
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            for text in file:
                try:
                    _add_line(run.lines, json.loads(text))
                except (ValueError, LookupError, TypeError, AttributeError):
                    unreadable += 1  # a crash may cut a line off
    except OSError as error:
        run.missing.append(f"{path} cannot be read: {error.strerror}")
    if unreadable:
        run.missing.append(f"{path}: {unreadable} {'line' if unreadable == 1 else 'lines'} cannot be read")


def _add_line(lines: dict[int, dict[str, Any]], line: dict[str, Any]) -> None:
    if line.get("event") == "start":
        for iteration in [i for i in lines if i > int(line["iteration"])]:
            del lines[iteration]
    elif "lm loss" in line:
        lines[int(line["iteration"])] = line | {"consumed-samples": int(line["consumed-samples"])}


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
    left = a.options_as_now()
    right = b.options_as_now()
    changes = []
    for name in dict.fromkeys((*SETTINGS, *left, *right)):
        if left.get(name) != right.get(name):
            flag, role = (SETTINGS[name].flag, role_of(name, left, right)) if name in SETTINGS else (name, None)
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
    """Compare log lines of the same steps.

    Metrics over all steps since the previous line are compared only if that line is of the same step in both runs.

    Args:
        a: first run.
        b: second run.
        tolerance: allowed relative difference of losses, norms and rates.

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
    pairs = {step: (a.lines[step].get(DIGEST), b.lines[step].get(DIGEST)) for step in common}
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
