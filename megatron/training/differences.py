"""Two runs side by side, as their folders tell of them: the first option, step and sample in which they differ."""

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
"""Files of plain facts; they explain a difference and are none themselves."""

DIGEST = "samples-digest"
EXACT = ("consumed-samples", "batch-size")
CLOSE = ("learning-rate", "weight-decay", "loss-scale", "grad-norm")
OF_ALL_STEPS = ("skipped-iterations", "lm loss")
"""Values of a log line: of its last step, equal or equal up to a tolerance; and of all steps since the line before."""


@dataclass
class RunFolder:
    """What a run has left, or is leaving.

    Attributes:
        folder: where.
        options: by name; None where there is no readable config.yaml.
        facts: of the environment and the data, by dotted names.
        lines: the log line of every step that counts: what a restart threw away is gone.
        missing: a sentence for everything that is not there or could not be read.
    """

    folder: Path
    options: Mapping[str, Any] | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    lines: dict[int, dict[str, Any]] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)

    def options_as_now(self) -> dict[str, Any]:
        """Every option; one that its version did not have yet has today's default."""
        return {name: setting.default for name, setting in SETTINGS.items()} | dict(self.options or {})


def read_run(folder: Path) -> RunFolder:
    """Read what is there.

    Raises:
        ValueError: when the folder is not there, or of no run.
    """
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder: give what the runs were told with --run-dir")
    run = RunFolder(folder)
    run.options = _options(run)
    run.facts = {name: value for file in FACTS for name, value in _flat(_json(run, file))}
    if (folder / DIFF).is_file():
        run.facts["uncommitted changes"] = (folder / DIFF).read_text(errors="replace")
    _read_lines(run)
    if run.options is None and not run.lines:
        raise ValueError(f"{folder} is not the folder of a run: {'; '.join(run.missing)}")
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
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        run.missing.append(f"{path} cannot be read: {error}")
        return {}
    return found if isinstance(found, Mapping) else {name: found}


def _read_lines(run: RunFolder) -> None:
    path, unreadable = run.folder / METRICS, 0
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            for text in file:
                try:
                    _take(run.lines, json.loads(text))
                except (ValueError, LookupError, TypeError, AttributeError):
                    unreadable += 1  # a crash may cut a line off
    except OSError as error:
        run.missing.append(f"{path} cannot be read: {error.strerror}")
    if unreadable:
        run.missing.append(f"{path}: {unreadable} {'line' if unreadable == 1 else 'lines'} cannot be read")


def _take(lines: dict[int, dict[str, Any]], line: dict[str, Any]) -> None:
    if line.get("event") == "start":
        for iteration in [i for i in lines if i > int(line["iteration"])]:
            del lines[iteration]
    elif "lm loss" in line:
        lines[int(line["iteration"])] = line | {"consumed-samples": int(line["consumed-samples"])}


@dataclass(frozen=True)
class Change:
    """Something that has two values.

    Attributes:
        name: what they are called.
        a: one value.
        b: the other.
        counts: whether runs that differ in it are different; what it does to their numbers is seen in these.
        of_one_start: whether the next start of either run may have another value anyhow.
    """

    name: str
    a: Any
    b: Any
    counts: bool = True
    of_one_start: bool = False

    def __str__(self) -> str:
        numbers = [x for x in (self.a, self.b) if isinstance(x, float) and math.isfinite(x)]
        apart = f" (relative {_apart(*numbers):.1e})" if len(numbers) == 2 else ""
        return f"{self.name}: {_shown(self.a)} | {_shown(self.b)}{apart}"


def changed_options(a: RunFolder, b: RunFolder) -> list[Change]:
    """Options that differ, in the order of docs/flags.md, those that this version does not know last.

    Those count that decide model, data, batch or schedule; not how they are computed, and what is told of it.
    """
    if a.options is None or b.options is None:
        return []
    left, right = a.options_as_now(), b.options_as_now()
    found = []
    for name in dict.fromkeys((*SETTINGS, *left, *right)):
        if left.get(name) != right.get(name):
            flag, role = (SETTINGS[name].flag, role_of(name, left, right)) if name in SETTINGS else (name, None)
            counts, of_one_start = role not in (Role.FREE, Role.START), role is Role.START
            found.append(Change(flag, left.get(name), right.get(name), counts, of_one_start))
    return found


def changed_facts(a: RunFolder, b: RunFolder) -> list[Change]:
    """What differs in the environment, the source code and the data."""
    names = dict.fromkeys((*a.facts, *b.facts))
    return [Change(n, a.facts.get(n), b.facts.get(n), False) for n in names if a.facts.get(n) != b.facts.get(n)]


@dataclass(frozen=True)
class StepComparison:
    """The log lines that both runs have.

    Attributes:
        steps: of these lines.
        differs_at: step of the first that differs in anything but the digest of its samples; None where all are equal.
        changes: in what it differs.
        digests: whether all lines have such a digest.
        digest_differs_at: step of the first whose digests differ. Runs on data of other content differ from the first
            line on, wherever the first other sample is.
    """

    steps: tuple[int, ...]
    differs_at: int | None
    changes: tuple[Change, ...]
    digests: bool
    digest_differs_at: int | None

    def before(self, step: int | None) -> int:
        """The last of the steps before this one, or the last of all for None; 0 where there is none."""
        return max((s for s in self.steps if step is None or s < step), default=0)


def compare_steps(a: RunFolder, b: RunFolder, tolerance: float = 0.0) -> StepComparison:
    """Compare log lines of the same steps.

    Values of all steps since the line before are left out where that is not the same line in both.

    Args:
        a: one run.
        b: the other.
        tolerance: by how much losses, norms and rates may differ, relative to the larger one.

    """
    common = sorted(a.lines.keys() & b.lines.keys())
    before = [{step: last for last, step in pairwise([0, *sorted(run.lines)])} for run in (a, b)]
    differs_at: int | None = None
    changes: tuple[Change, ...] = ()
    for step in common:
        names = (*EXACT, *CLOSE, *(OF_ALL_STEPS if before[0][step] == before[1][step] else ()))
        if found := tuple(_differing(a.lines[step], b.lines[step], names, tolerance)):
            differs_at, changes = step, found
            break
    pairs = {step: (a.lines[step].get(DIGEST), b.lines[step].get(DIGEST)) for step in common}
    known = bool(common) and all(None not in pair for pair in pairs.values())
    other = next((step for step, (x, y) in pairs.items() if x != y and None not in (x, y)), None)
    return StepComparison(tuple(common), differs_at, changes, known, other)


def _differing(
    left: Mapping[str, Any], right: Mapping[str, Any], names: Sequence[str], tolerance: float
) -> Iterator[Change]:
    """The values that both lines have and that are not the same."""
    for name in [name for name in names if name in left and name in right]:
        x, y = left[name], right[name]
        numbers = name not in EXACT and isinstance(x, int | float) and isinstance(y, int | float)
        if x != y and not (numbers and _apart(x, y) <= tolerance):
            yield Change(name, x, y)


def _apart(x: float, y: float) -> float:
    return abs(x - y) / max(abs(x), abs(y)) if x != y else 0.0


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _shown(value: Any) -> str:
    text = "nothing" if value is None else repr(value) if isinstance(value, float) else str(value)
    return text if len(text) <= 80 and "\n" not in text else f"{len(text.splitlines())} lines, {len(text)} characters"
