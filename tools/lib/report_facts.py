"""What a page says about a run: its state, what happened in it, its charts."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron.config.text import counted
from megatron.training.loggers.feature_metrics import FURTHER_LOSSES
from megatron.training.loggers.plots import running_mean
from tools.lib.charts import Chart, Curve, Mark
from tools.lib.run_record import ENDED_WELL, RunRecord

QUIET_SECONDS = 300.0
"""A run without a record for as long, and for ten of its log intervals, is not running."""

AXES = {"dp": 1, "tp": 2, "pp": 3, "cp": 4, "ep": 5, "world": 6}
"""Colours of the groups of ranks that communicate; all others share one."""


@dataclass(frozen=True)
class State:
    """What a run is doing."""

    # running, finished, stopped, failed or silent.
    name: str
    why: str


def run_state(record: RunRecord, now: float) -> State:
    """Return what the records of a run show that it is doing."""
    if not record.starts:
        return State("silent", "it has logged nothing yet")
    last = record.starts[-1]
    for number, event in reversed(record.events):
        if number == len(record.starts) - 1 and event["event"] in ("error", "stop"):
            text = str(event.get("text", "")).strip()
            return State("failed" if event["event"] == "error" else "stopped", text)
    if record.journal and record.journal[-1].endswith(ENDED_WELL):
        return State("finished", "")
    age = now - last.end
    intervals = np.diff(record.column("time")[-20:])
    if age < max(QUIET_SECONDS, 10 * float(np.median(intervals)) if len(intervals) else 0.0):
        return State("running", "")
    return State("silent", f"no record for {duration(age)}: it was killed, hangs, or writes elsewhere")


def duration(seconds: float) -> str:
    """Return a time in the two largest of its units."""
    if not math.isfinite(seconds):
        return "unknown"
    units = (("d", 86400), ("h", 3600), ("m", 60), ("s", 1))
    left = round(seconds)
    if left < 10:
        return f"{seconds:.1f} s"
    found: list[str] = []
    for unit, size in units:
        if left >= size or found:
            found.append(f"{left // size} {unit}")
            left %= size
    return " ".join(found[:2])


def at(seconds: float) -> str:
    """Return a time as a date in UTC."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(seconds))


def planned_tokens(record: RunRecord) -> float:
    """Return the tokens of the whole run or phase, from data.json; NaN if it does not have them."""
    train = record.data.get("train")
    tokens = train.get("tokens") if isinstance(train, Mapping) else None
    return float(tokens) if isinstance(tokens, int) and tokens > 0 else math.nan


def done(record: RunRecord) -> tuple[int, int]:
    """Return the last step and the tokens until then, without what restarts discarded."""
    kept = record.kept()
    if not kept.any():
        return (record.starts[-1].iteration, record.starts[-1].tokens) if record.starts else (0, 0)
    return tuple(int(record.column(name)[kept][-1]) for name in ("iteration", "consumed-tokens"))  # type: ignore[return-value]


def seconds_left(record: RunRecord) -> float:
    """Return the time until the planned tokens, at the speed of the last 50 log lines; NaN if it is not known."""
    speed = record.column("tokens-per-second")[-50:]
    speed = speed[np.isfinite(speed)]
    left = planned_tokens(record) - done(record)[1]
    return max(0.0, left) / float(np.median(speed)) if len(speed) and np.median(speed) > 0 else math.nan


def summary_rows(record: RunRecord) -> dict[str, str]:
    """Return the rows of the last summary in the log, such as ``ranks`` and ``forecast``, by name."""
    for _, event in reversed(record.events):
        text = str(event.get("text", ""))
        if event["event"] == "note" and re.match(r"ranks +\d", text):
            pairs = (line.split(None, 1) for line in text.splitlines())
            return {pair[0]: pair[1] for pair in pairs if len(pair) == 2}
    return {}


# ---- What happened


@dataclass(frozen=True)
class Happening:
    """Something that happened in a run."""

    time: float
    iteration: int
    tokens: float
    kind: str  # of MARKS, or warning
    text: str
    folder: str = ""


def happenings(record: RunRecord) -> list[Happening]:
    """Return what happened, in the order of the log."""
    found = [*_restarts(record), *_skips(record), *_batch_changes(record)]
    kinds = {"error": "error", "stop": "stopped", "warning": "warning", "incident": "incident", "rewind": "rewind"}
    for _, event in record.events:
        if (kind := kinds.get(str(event["event"]))) is not None:
            if event["event"] == "incident" and "rewind" in str(event.get("kind", "")):
                kind = "rewind"
            if str(event.get("kind", "")).startswith("replica-"):
                kind = "replica"
            text, folder = str(event.get("text", "")), str(event.get("folder") or "")
            tokens = event.get("consumed-tokens")
            place = float(tokens) if isinstance(tokens, int | float) else math.nan
            found.append(Happening(float(event["time"]), int(event["iteration"]), place, kind, text, folder))
    return sorted(found, key=lambda each: each.time)


def _restarts(record: RunRecord) -> Iterator[Happening]:
    highest, before = 0, None
    for start, end in zip(record.starts, [*record.starts[1:], None]):
        if before is not None and start.trains:
            name = start.facts.get("phase")
            if name != before.facts.get("phase"):
                yield Happening(start.time, start.iteration, start.tokens, "phase", f"phase {name} begins")
            elif before.ending != "rewind":
                ranks = start.facts.get("world-size")
                text = f"started again on {counted(ranks, 'rank') if isinstance(ranks, int) else 'ranks'}"
                if highest > start.iteration:
                    text += f"; steps {start.iteration + 1:,} to {highest:,} are taken again"
                yield Happening(start.time, start.iteration, start.tokens, "restart", text)
        stop = record.lines if end is None else end.first_line
        lines = record.column("iteration")[start.first_line : stop]
        highest = int(max(start.iteration, lines.max() if len(lines) else 0))
        before = start


def _skips(record: RunRecord) -> Iterator[Happening]:
    times, iterations, numbers = record.column("time"), record.column("iteration"), record.start_of_line()
    for number, step, tokens in record.skipped:
        if record.counts(number, step):
            line = int(np.flatnonzero((numbers == number) & (iterations >= step))[0]) if record.lines < 20_000 else -1
            text = f"the update of step {step:,} was skipped"
            yield Happening(times[line], step, tokens, "skipped", text)


def _batch_changes(record: RunRecord) -> Iterator[Happening]:
    kept = record.kept()
    batch, lines = record.column("batch-size")[kept], np.flatnonzero(kept)
    changes = np.flatnonzero(np.diff(batch)) + 1
    for place in changes[:50]:
        line = lines[place]
        iteration, tokens = int(record.column("iteration")[line]), record.column("consumed-tokens")[line]
        text = f"the batch grows from {batch[place - 1]:.0f} to {batch[place]:.0f} samples"
        text = text if batch[place] > batch[place - 1] else text.replace("grows", "shrinks")
        yield Happening(record.column("time")[line], iteration, tokens, "batch", text)


def marks(found: Sequence[Happening]) -> list[Mark]:
    """Return the marks of what happened, on the axis of tokens."""
    shown = [each for each in found if each.kind != "warning" and math.isfinite(each.tokens)]
    return [Mark(each.kind, each.tokens, f"step {each.iteration:,}: {each.text}") for each in shown]


def phase_spans(record: RunRecord, last: float) -> list[tuple[str, float, float]]:
    """Return name, first and last token of each phase."""
    starts: list[tuple[str, float]] = []
    for start in record.starts:
        name = str(start.facts.get("phase") or "")
        if start.trains and (not starts or starts[-1][0] != name):
            starts.append((name, float(start.tokens)))
    if not any(name for name, _ in starts):
        return []
    ends = [*(first for _, first in starts[1:]), last]
    return [(name, first, end) for (name, first), end in zip(starts, ends) if end > first]


# ---- Charts


class Curves:
    """Curves of the log lines of a run that count."""

    def __init__(self, record: RunRecord) -> None:
        """Read the columns of ``record``."""
        self._record, self._kept = record, record.kept()
        self.tokens = record.column("consumed-tokens")[self._kept]

    def values(self, name: str) -> np.ndarray:
        """Return the values of a metric ``[n]``."""
        return self._record.column(name)[self._kept]

    def curve(self, name: str, label: str, color: int = 1, shape: str = "line") -> Curve:
        """Return the curve of a metric."""
        return Curve(label, self.tokens, self.values(name), color, shape)

    def names(self, prefix: str) -> list[str]:
        """Return the metrics whose names begin so."""
        return [name for name in self._record.columns if name.startswith(prefix)]

    def smoothed(self, name: str, label: str, color: int, shape: str = "line") -> Iterator[Curve]:
        """Yield the curve of a metric, faint and smoothed; only the latter if it is not ``line``."""
        y = self.values(name)
        finite = np.isfinite(y)
        if shape == "line":
            yield Curve(f"{label}, every line", self.tokens, y, color, "faint", listed=False)
        if finite.any():
            yield Curve(label, self.tokens[finite], running_mean(y[finite]), color, shape)


def learning_charts(record: RunRecord, other: RunRecord | None, other_name: str) -> Iterator[Chart]:
    """Yield the charts of loss, norm, rate and batch."""
    curves = Curves(record)
    drawn = [*curves.smoothed("lm loss", "training, smoothed", 1)]
    color = 2
    for prefix, label in FURTHER_LOSSES.items():
        for name in curves.names(prefix)[:12]:
            shown = f"{label}{Path(name.removeprefix(prefix)).name}"
            drawn += curves.smoothed(name, shown, 3 + (color % 4), "thin")
            color += 1
    sets = dict.fromkeys(each.name for each in record.evaluations)
    for number, name in enumerate(sets):
        kept = {e.iteration: e for e in record.evaluations if e.name == name and record.counts(e.start, e.iteration)}
        points = [kept[step] for step in sorted(kept)]
        x, y = np.array([p.tokens for p in points], float), np.array([p.loss for p in points], float)
        drawn.append(Curve(name, x, y, 2 + number % 6, "dots"))
    if other is not None:
        drawn += Curves(other).smoothed("lm loss", f"{other_name}, smoothed", 7, "dashed")
    yield Chart("loss", "Loss", drawn, note="nats per token", tall=True, labels=True)
    norms = [curves.curve("grad-norm", "before clipping", 1)]
    if other is not None:
        norms.append(Curves(other).curve("grad-norm", other_name, 7, "dashed"))
    yield Chart("norm", "Gradient norm", norms)
    yield Chart("rate", "Learning rate", [curves.curve("learning-rate", "rate", 3)], from_zero=True)
    yield Chart("batch", "Batch", [curves.curve("batch-size", "samples", 4, "steps")], from_zero=True)
    scale = curves.values("loss-scale")
    if len({*scale[np.isfinite(scale)].tolist()}) > 1:
        yield Chart("scale", "Loss scale", [curves.curve("loss-scale", "scale", 5, "steps")], unit="si")


def speed_charts(record: RunRecord) -> Iterator[Chart]:
    """Yield the charts of throughput, waits and memory."""
    curves = Curves(record)
    speed = curves.curve("tokens-per-second", "tokens/s", 1)
    yield Chart("speed", "Throughput", [speed], "si", from_zero=True, note="all ranks")
    yield Chart("mfu", "MFU", [curves.curve("mfu", "of the peak", 3)], "percent", from_zero=True)
    yield Chart("step", "Time of a step", [curves.curve("iteration-time", "mean of the line", 4)], "seconds", True)
    waits = [name for name in curves.names("communication-") if name != "communication-share"]
    if waits:
        axes = [
            curves.curve(name, label, AXES.get(label, 7), "line" if label in AXES else "dashed")
            for name in waits
            if (label := name.removeprefix("communication-"))
        ]
        note = "seconds of a step in which ranks wait for each other, by group"
        yield Chart("waits", "Communication", axes, "seconds", from_zero=True, note=note)
    yield Chart("bubble", "Pipeline bubble", [curves.curve("bubble", "of a step", 5)], "percent", from_zero=True)
    yield Chart("data", "Wait for data", [curves.curve("data-wait", "of a step", 2)], "seconds", from_zero=True)
    slow = curves.curve("slowest-rank-excess", "slowest rank, above the median", 6)
    yield Chart("slow", "Slow ranks", [slow], "percent", from_zero=True)
    memory = curves.curve("mem-max-allocated-bytes", "fullest rank, peak so far", 4)
    yield Chart("memory", "Memory", [memory], "bytes", from_zero=True)
    yield Chart("power", "Power", [curves.curve("power-watts", "watts, all ranks", 5)], "si", from_zero=True)
    loads = [curves.curve("expert-load-max", "busiest", 2), curves.curve("expert-load-min", "idlest", 1)]
    yield Chart("load", "Load of experts", loads, from_zero=True, note="tokens over the mean, worst layers")


def forecast_rows(record: RunRecord) -> list[list[str]]:
    """Return the planner's forecast of the summary beside what was measured; only a head without one."""
    row = summary_rows(record).get("forecast", "")
    found = re.match(r"([\d.e+-]+) s a step on (\S+), ([\d,]+) tokens/s, MFU ([\d.]+)%", row)
    rows = [["", "forecast", "measured", "difference"]]
    if found is None:
        return rows
    curves = Curves(record)
    for label, expected, name, scale in (
        ("seconds a step", float(found[1]), "iteration-time", 1.0),
        ("tokens/s", float(found[3].replace(",", "")), "tokens-per-second", 1.0),
        ("MFU, %", float(found[4]), "mfu", 100.0),
    ):
        values = curves.values(name)
        values = values[np.isfinite(values)] * scale
        if len(values):
            median = float(np.median(values))
            rows.append([label, f"{expected:,.4g}", f"{median:,.4g}", f"{median / expected - 1:+.1%}"])
    return rows


def slow_ranks(record: RunRecord, most: int = 8) -> list[list[str]]:
    """Return which ranks were the slowest of log lines, how often and by how much."""
    ranks, excess = record.column("slowest-rank"), record.column("slowest-rank-excess")
    rows = [["rank", "slowest in lines", "median excess"]]
    finite = np.isfinite(ranks)
    if finite.any():
        numbers, counts = np.unique(ranks[finite], return_counts=True)
        for place in np.argsort(-counts)[:most]:
            above = np.median(excess[finite][ranks[finite] == numbers[place]])
            rows.append([f"{numbers[place]:.0f}", f"{counts[place]:,} of {finite.sum():,}", f"{above:.1%}"])
    return rows


def option_text(value: Any) -> str:
    """Return a value of an option, as it is written on the command line."""
    if isinstance(value, list | tuple):
        return " ".join(map(str, value))
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
