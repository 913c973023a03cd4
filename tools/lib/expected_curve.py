"""What a recipe is expected to do: losses at given tokens, memory of a rank and time of a step, beside a run.

Every script that trains has a file ``expected/SCRIPT.json`` in its folder; ``python -m tests.expected`` writes them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from megatron.config.data_paths import SOURCE_OPTIONS
from megatron.config.files import parse_json, read_small
from megatron.config.option import Role
from megatron.config.settings import SETTINGS
from megatron.training.loggers.run_folder import COMMAND_FILE, METRICS_FILE, RunHistory, read_history
from tools.lib.run_differences import RunFolder, changed_options, read_run

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("examples/expected", "slurm/expected")

OTHER_RUN = {SETTINGS[name].flag for name in ("seed", "split", *(name for names in SOURCE_OPTIONS for name in names))}
"""Options that make no other recipe: bands are those of several seeds, and data are compared by their fingerprint."""

ON, ABOVE, BELOW, NOT_JUDGED = "on its curve", "above its curve", "below its curve", "not judged"
"""Verdicts."""


@dataclass(frozen=True)
class Expectation:
    """The content of one ``expected/SCRIPT.json``."""

    file: Path
    content: Mapping[str, Any]

    @classmethod
    def read(cls, file: Path) -> Expectation:
        """Read a file. Raise ValueError if it cannot be read or is no such file."""
        try:
            content = parse_json(read_small(file))
            complete = isinstance(content, dict) and {"script", "options", "ranks", "loss"} <= content.keys()
        except (OSError, ValueError) as error:
            raise ValueError(f"{file} cannot be read: {error}") from error
        if not complete:
            raise ValueError(f"{file} is no file of expected/: it has no script, options, ranks and loss")
        return cls(file, content)

    @property
    def loss(self) -> Mapping[str, Any]:
        """The expected losses: ``points``, ``published`` or ``absent``."""
        loss: Mapping[str, Any] = self.content["loss"]
        return loss

    def differences(self, run: RunFolder) -> list[str]:
        """Return the options in which a run differs from the recipe, apart from seed and data."""
        given = {name: tuple(value) if isinstance(value, list) else value for name, value in self.options.items()}
        options = {name: setting.default for name, setting in SETTINGS.items()} | given
        changes = changed_options(RunFolder(self.file, options=options), run)
        return [str(change) for change in changes if change.counts and change.name not in OTHER_RUN]

    @property
    def options(self) -> Mapping[str, Any]:
        """Options of the recipe that are not the defaults, by name."""
        options: Mapping[str, Any] = self.content["options"]
        return options


def find_expectation(run: RunFolder, folders: Sequence[Path]) -> Expectation:
    """Return the expectation of the recipe whose options are nearest to those of a run.

    The model has to be the same (:func:`other_model`). Of several, that of the fewest differences is taken, then that
    whose configuration file the command names. Raises ValueError if there is none.
    """
    found: list[tuple[int, bool, Expectation]] = []
    path = run.folder / COMMAND_FILE
    command = path.read_text(errors="replace") if path.is_file() else ""
    for file in sorted(file for folder in folders for file in folder.glob("*.json")):
        each = Expectation.read(file)
        differences = each.differences(run)
        if not other_model(differences):
            found.append((len(differences), each.content["script"] not in command, each))
    if not found:
        raise ValueError(f"no recipe has the model of {run.folder}; --expected FILE names a file of your own")
    return min(found, key=lambda each: each[:2])[2]


def other_model(differences: Sequence[str]) -> list[str]:
    """Return those of ``Expectation.differences`` that make another model: other shapes, or another function."""
    model = {setting.flag for setting in SETTINGS.values() if setting.option.role in (Role.SHAPE, Role.FUNCTION)}
    return [line for line in differences if line.partition(":")[0] in model]


@dataclass(frozen=True)
class ComparedSpan:
    """The mean loss of a run over the steps between two log lines, beside the band."""

    step: int
    tokens: int
    loss: float
    low: float
    high: float

    @property
    def verdict(self) -> str:
        """Return whether the loss is in the band; one that is no number is above it."""
        return BELOW if self.loss < self.low else ON if self.loss <= self.high else ABOVE


def compare_losses(
    history: RunHistory, points: Sequence[Mapping[str, float]], interval: float = math.inf
) -> list[ComparedSpan]:
    """Compare the log lines of a run with the points of a band.

    Both are means over the steps since the previous one. They are averaged over spans between numbers of tokens that
    both have, weighted by their tokens, so that other intervals between log lines can be compared. Spans that lack
    lines are left out, such as those before a run that continues another: a line is the mean over ``interval`` steps.
    """
    lines = [(point.tokens, point.loss) for point in history.train]
    numbers = [0, *(point.iteration for point in history.train)]
    gaps = [tokens for (tokens, _), (last, step) in zip(lines, pairwise(numbers)) if step - last > interval]
    steps = {point.tokens: point.iteration for point in history.train}
    common = [tokens for tokens in sorted({int(p["tokens"]) for p in points}) if tokens in steps]
    spans, begin = [], 0
    for end in common:
        if not any(begin < at <= end for at in gaps):
            of_run = _mean(lines, begin, end)
            low, high = (_mean([(int(p["tokens"]), p[name]) for p in points], begin, end) for name in ("low", "high"))
            spans.append(ComparedSpan(steps[end], end, of_run, low, high))
        begin = end
    return spans


def _mean(values: Sequence[tuple[int, float]], begin: int, end: int) -> float:
    """Return the mean of ``values`` in ``(begin, end]``, each of the tokens since the one before it."""
    total, previous = 0.0, begin
    for tokens, value in values:
        if begin < tokens <= end:
            total += (tokens - previous) * value
            previous = tokens
    return total / (end - begin)


@dataclass
class RunComparison:
    """A run beside the expectation of its recipe."""

    expectation: Expectation
    run: RunFolder
    verdict: str = NOT_JUDGED
    # Why there is no verdict.
    reason: str = ""
    differences: list[str] = field(default_factory=list)
    same_data: bool = False
    spans: list[ComparedSpan] = field(default_factory=list)
    # Published losses with the nearest evaluation of the run: (tokens, published, of the run or None, source).
    published: list[tuple[int, float, float | None, str]] = field(default_factory=list)
    ranks: int = 0
    device: str = ""
    # Bytes of the fullest rank and seconds of a step, as the run has logged them.
    memory: float | None = None
    seconds: float | None = None

    @property
    def outside(self) -> ComparedSpan | None:
        """The first span outside of the band."""
        return next((span for span in self.spans if span.verdict != ON), None)

    def as_dict(self) -> dict[str, Any]:
        """Return all numbers for JSON; losses that are no numbers are null."""
        content, outside = self.expectation.content, self.outside
        spans = [
            {
                "step": span.step,
                "tokens": span.tokens,
                "low": span.low,
                "high": span.high,
                "loss": span.loss if math.isfinite(span.loss) else None,
                "verdict": span.verdict,
            }
            for span in self.spans
        ]
        names = ("tokens", "loss", "of_run", "source")
        return {
            "run": str(self.run.folder),
            "script": content["script"],
            "verdict": self.verdict,
            "reason": self.reason,
            "first_step_outside": outside.step if outside else None,
            "spans": spans,
            "options": self.differences,
            "same_data": self.same_data,
            "published": [dict(zip(names, each)) for each in self.published],
            "memory_per_rank": {"bytes": self.memory, "predicted": content.get("memory_per_rank")},
            "time_per_step": {"seconds": self.seconds, "predicted": content.get("time_per_step")},
        }


def compare_run(folder: Path, file: Path | None = None, any_data: bool = False) -> RunComparison:
    """Compare a run with what its recipe is expected to do.

    Args:
        folder: of the run.
        file: of the expectation. Default: that of the recipe whose options are nearest.
        any_data: also judge a run on other data than those of the band.

    Raises:
        ValueError: if the folder is no run folder, the file cannot be read, or no recipe is near.
    """
    run = read_run(folder)
    if run.options is None:
        raise ValueError(run.missing[0])
    history = read_history(folder / METRICS_FILE)
    expectation = Expectation.read(file) if file else find_expectation(run, [ROOT / name for name in FOLDERS])
    loss = expectation.loss
    compared = RunComparison(expectation, run, differences=expectation.differences(run))
    compared.ranks, compared.device = int(run.facts.get("world_size", 1)), str(run.facts.get("device", ""))
    _add_costs(compared, history)
    data = loss.get("data", {})
    fingerprint = run.facts.get("train.fingerprint")
    compared.same_data = fingerprint is not None and fingerprint == data.get("fingerprint")
    compared.published = [*_published(loss, history)]
    if model := other_model(compared.differences):
        compared.reason = f"the model of the run is another: {'; '.join(model)} (recipe | run)"
    elif "points" not in loss:
        compared.reason = loss.get("absent", "published losses are those of other data and of one run")
    elif not (compared.same_data or any_data):
        compared.reason = (
            f"the band is of {data['name']}, the run of other data; fix: {data['prepare']} && {data['command']}"
        )
    else:
        compared.spans = compare_losses(history, loss["points"], run.options["log_interval"])
        if not compared.spans:
            compared.reason = f"no log line is of one of the {len(loss['points'])} numbers of tokens of the band"
            return compared
        verdicts = [span.verdict for span in compared.spans]
        compared.verdict = max((ABOVE, BELOW), key=verdicts.count) if compared.outside else ON
    return compared


def _add_costs(compared: RunComparison, history: RunHistory) -> None:
    """Add the memory and the median time of a step of the log lines after the first, which includes start-up."""
    lines = [point.line for point in history.train]
    seconds = sorted(float(line["iteration-time"]) for line in lines[1:] or lines if "iteration-time" in line)
    compared.seconds = seconds[len(seconds) // 2] if seconds else None
    compared.memory = max((float(line.get("mem-max-allocated-bytes") or 0.0) for line in lines), default=0.0) or None


def _published(loss: Mapping[str, Any], history: RunHistory) -> Iterator[tuple[int, float, float | None, str]]:
    """Yield published losses with that of the last evaluation of validation data within 2 % of their tokens."""
    evaluations = [point for point in history.evaluations if point.name == "validation" and math.isfinite(point.loss)]
    for each in loss.get("published", ()):
        near = [point.loss for point in evaluations if abs(point.tokens / each["tokens"] - 1) < 0.02]
        value = near[-1] if near else None
        yield int(each["tokens"]), float(each["loss"]), value, str(each["source"])


def report(compared: RunComparison) -> Iterator[str]:
    """Yield the lines of the comparison."""
    content = compared.expectation.content
    loss = compared.expectation.loss
    yield f"recipe     {content['script']}: {compared.expectation.file.name}"
    yield "options    " + ("those of the recipe" if not compared.differences else "recipe | run")
    yield from (f"  {line}" for line in compared.differences)
    if "points" in loss:
        yield f"data       {'those' if compared.same_data else 'not those'} of the band: {loss['data']['name']}"
        measured = loss["measured"]
        yield f"band       {measured['band']}; {len(measured['seeds'])} seeds, {measured['date']}"
    if compared.spans:
        yield f"{'step':>10} {'tokens':>14} {'loss':>9}   {'expected':<19}"
        for span in compared.spans:
            band = f"{span.low:.4f} to {span.high:.4f}"
            yield f"{span.step:>10,} {span.tokens:>14,} {span.loss:>9.4f}   {band:<19} {span.verdict}"
    for tokens, value, of_run, source in compared.published:
        beside = "no evaluation of the run is near" if of_run is None else f"the run has {of_run:.4f}"
        yield f"published  {value:.4f} at {tokens:,} tokens, {beside}; {source}"
    yield from _costs(compared, content)
    outside = compared.outside
    if compared.verdict == NOT_JUDGED:
        yield f"verdict    not judged: {compared.reason}"
    elif outside is None:
        yield f"verdict    {ON}, up to step {compared.spans[-1].step:,}"
    else:
        count = f"{sum(span.verdict != ON for span in compared.spans)} of {len(compared.spans)} spans"
        yield f"verdict    {compared.verdict}: {count} are outside, the first is that up to step {outside.step:,}"


def _costs(compared: RunComparison, content: Mapping[str, Any]) -> Iterator[str]:
    """Yield memory and time beside the predictions."""
    sized = ""
    if compared.ranks != content["ranks"]:
        sized = f"; predicted for {content['ranks']:,} ranks, the run has {compared.ranks:,}"
    for title, value, name, unit in (
        ("memory", compared.memory and compared.memory / 2**30, "memory_per_rank", "GiB a rank"),
        ("step", compared.seconds, "time_per_step", "s a step"),
    ):
        planned = content[name]
        predicted = planned.get("bytes", 0) / 2**30 or planned.get("seconds", 0.0)
        measured = f"{value:.4g} {unit}" if value else "not logged"
        if not predicted:
            yield f"{title:<10} {measured}; no prediction: {planned['absent']}"
            continue
        ratio = f", {value / predicted:.2f} of it" if value and compared.device != "cpu" else ""
        if title == "memory" and value and compared.device == "cpu":
            measured += " (the whole process)"
        on = f" on {planned['gpu']}" if "gpu" in planned else ""
        yield f"{title:<10} {measured}; prediction {predicted:.4g} {unit}{on}{ratio}{sized}"


def to_json(compared: RunComparison) -> str:
    """Return all numbers as JSON."""
    return json.dumps(compared.as_dict(), indent=2)
