"""The record of a run, read from its folder in one pass: columns of its log lines, events, incidents and files.

Unlike :func:`megatron.training.loggers.run_folder.read_history` it keeps numbers in columns, so that a log of a million
lines fits into memory, and what restarts have discarded, from which the lost hours are computed.
"""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from megatron.config.files import TABLE_FILE_BYTES, open_regular, parse_json, parse_yaml, read_small
from megatron.training.incidents import Incident, read_incidents
from megatron.training.loggers.feature_metrics import FURTHER_LOSSES
from megatron.training.loggers.run_folder import (
    COMMAND_FILE,
    CONFIG_FILE,
    DATA_FILE,
    ENVIRONMENT_FILE,
    INCIDENTS_FILE,
    MAX_LINE_BYTES,
    METRICS_FILE,
    point_name,
    read_json_lines,
)

FAILURES_FILE = "failures.jsonl"
ENDED_WELL = "ended in good order"

COLUMNS = (
    *("iteration", "time", "consumed-tokens", "lm loss", "grad-norm", "learning-rate", "batch-size", "loss-scale"),
    *("iteration-time", "tokens-per-second", "mfu", "throughput", "mem-max-allocated-bytes", "data-wait", "bubble"),
    *("communication-share", "slowest-rank", "slowest-rank-excess", "power-watts", "energy-joules", "world-size"),
    *("skipped-iterations-count", "expert-load-max", "expert-load-min", "goodput"),
)
COLUMN_PREFIXES = ("communication-", *FURTHER_LOSSES)
"""Names, and beginnings of names, of the metrics of a log line that are kept."""

MAX_COLUMNS = 200  # a log may name any number of sources
MAX_EVENTS = 20_000  # of each kind, the last ones
MAX_RECORDS = 400  # of the loads of experts
ENDINGS = ("stop", "error", "rewind")
NUMBERS = (int, float)


@dataclass
class Start:
    """One start of the run, or one of its phases, with what it has logged."""

    # Time at which it opened the log, in seconds since 1970, and the step and tokens it began from.
    time: float
    iteration: int
    tokens: int
    # Fields of its event; empty if the log begins without one.
    facts: Mapping[str, Any]
    # False for an evaluation with --skip-train, which discards no step.
    trains: bool = True
    # Log lines before it, which index the columns.
    first_line: int = 0
    # Time of its last record, and the event that ended it, of ENDINGS, or nothing.
    end: float = 0.0
    ending: str = ""
    # Seconds of the start-up by phase, and the time of that record.
    start_up: Mapping[str, float] = field(default_factory=dict)
    start_up_time: float = math.inf
    # Seconds of evaluations and saves, with the times of their records.
    evaluations: list[tuple[float, float]] = field(default_factory=list)
    saves: list[tuple[float, float]] = field(default_factory=list)


@dataclass
class Evaluation:
    """One evaluation of a validation or test set."""

    name: str
    iteration: int
    tokens: int
    loss: float
    start: int


@dataclass
class RunRecord:
    """What a run folder holds."""

    folder: Path
    starts: list[Start] = field(default_factory=list)
    columns: dict[str, array[float]] = field(default_factory=lambda: {name: array("d") for name in COLUMNS})
    evaluations: list[Evaluation] = field(default_factory=list)
    # Events other than starts, with the number of their start.
    events: list[tuple[int, Mapping[str, Any]]] = field(default_factory=list)
    # (start, step, tokens) of skipped updates.
    skipped: list[tuple[int, int, float]] = field(default_factory=list)
    # (start, step, tokens, loads) of all experts, in percent of the mean of their layer.
    expert_loads: list[tuple[int, int, int, list[list[int] | None]]] = field(default_factory=list)
    # (first line, phase) where the name of the phase changes.
    phases: list[tuple[int, str]] = field(default_factory=list)
    lines: int = 0  # log lines of training
    unreadable: int = 0
    config: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    environment: Mapping[str, Any] = field(default_factory=dict)
    data: Mapping[str, Any] = field(default_factory=dict)
    command: str = ""
    journal: list[str] = field(default_factory=list)  # lines of incidents.md, the last ones
    incidents: list[tuple[Path, Incident]] = field(default_factory=list)
    failures: list[Mapping[str, Any]] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)  # sentences about missing and unreadable files

    # ---- Reading

    def add(self, line: dict[str, Any]) -> None:
        """Add the next line of metrics.jsonl. Raises LookupError, TypeError or ValueError if it is none."""
        iteration, seconds = int(line["iteration"]), float(line["time"])
        if not math.isfinite(seconds):
            raise ValueError("no time")
        kind = line.get("event")
        if kind in ("start", "evaluation"):
            tokens, trains = int(line["consumed-tokens"]), kind == "start"
            self.starts.append(Start(seconds, iteration, tokens, line, trains, self.lines, seconds))
            return
        if not self.starts:  # the head of the log is gone
            self.starts.append(Start(seconds, 0, 0, {}, True, 0, seconds))
        start, number = self.starts[-1], len(self.starts) - 1
        name = None if kind else point_name(line)
        if kind:
            self._add_event(start, number, str(kind), line, seconds)
        elif name == "training":
            self._add_training(number, iteration, line)
        elif name not in (None, "health"):
            kind = str(name).partition(" ")[0]
            loss, took = line[f"lm loss {kind}"], float(line.get(f"{kind}-time", 0.0))
            start.evaluations.append((seconds, took if math.isfinite(took) else 0.0))
            value = math.nan if loss is None else float(loss)
            self.evaluations.append(Evaluation(str(name), iteration, int(line["consumed-tokens"]), value, number))
        start.end = max(start.end, seconds)

    def _add_event(self, start: Start, number: int, kind: str, line: Mapping[str, Any], seconds: float) -> None:
        if kind == "start-up":
            start.start_up = {str(name): float(x) for name, x in dict(line["phases"]).items()}
            start.start_up_time = seconds
        elif kind == "checkpoint":
            start.saves.append((seconds, float(line["blocking-seconds"])))
        elif kind in ENDINGS:
            start.ending = kind
        if len(self.events) < MAX_EVENTS or kind != "note":
            self.events.append((number, line))

    def _add_training(self, number: int, iteration: int, line: Mapping[str, Any]) -> None:
        tokens = float(line["consumed-tokens"])
        for name in line:
            if name not in self.columns and is_column(name) and len(self.columns) < MAX_COLUMNS:
                self.columns[name] = array("d", [math.nan]) * self.lines
        for name, column in self.columns.items():
            value: Any = line.get(name)
            column.append(value if type(value) in NUMBERS and abs(value) < 1e100 else math.nan)
        self.lines += 1
        if skipped := line.get("skipped-iterations"):
            each = float(line["batch-size"]) * tokens / float(line["consumed-samples"])
            self.skipped += [(number, int(step), tokens - (iteration - int(step)) * each) for step in skipped]
        if loads := line.get("expert-loads"):
            self.expert_loads.append((number, iteration, int(tokens), checked_loads(loads)))
            if len(self.expert_loads) > 2 * MAX_RECORDS:
                del self.expert_loads[1:-1:2]
        phase = str(line.get("phase", ""))
        if phase != (self.phases[-1][1] if self.phases else ""):
            self.phases.append((self.lines - 1, phase))

    # ---- What counts

    def limits(self) -> list[float]:
        """Return for each start the last step that no later start has taken again."""
        found, least = [], math.inf
        for start in reversed(self.starts):
            found.append(least)
            if start.trains:
                least = min(least, start.iteration)
        return found[::-1]

    def start_of_line(self) -> np.ndarray:
        """Return the number of the start of each log line, ``[lines]``."""
        counts = np.diff([*(start.first_line for start in self.starts), self.lines])
        return np.repeat(np.arange(len(self.starts)), counts)

    def column(self, name: str) -> np.ndarray:
        """Return the values of a metric in all log lines, ``[lines]``; NaN where there is none."""
        values = self.columns.get(name)
        return np.frombuffer(values) if values else np.full(self.lines, np.nan)

    def kept(self) -> np.ndarray:
        """Return True for each log line whose steps no restart has discarded, ``[lines]``."""
        limits = np.array(self.limits() or [math.inf])
        return self.column("iteration") <= limits[self.start_of_line()] if self.lines else np.zeros(0, bool)

    def counts(self, start: int, iteration: int) -> bool:
        """Return True if a step of a start was not discarded."""
        return iteration <= self.limits()[start]

    def option(self, name: str) -> Any:
        """Return the value of an option, from config.yaml; None without it."""
        groups = (group for group in self.config.values() if isinstance(group, Mapping))
        return next((group[name] for group in groups if name in group), None)


@cache
def is_column(name: str) -> bool:
    """Return True for a metric that is kept."""
    return name.startswith(COLUMN_PREFIXES)


def checked_loads(loads: Any) -> list[list[int] | None]:
    """Return the loads of all experts by layer. Raises TypeError or ValueError if they are none."""
    return [None if row is None else [int(x) for x in row] for row in loads]


def read_record(folder: Path) -> RunRecord:
    """Read a run folder; missing and damaged files are named in ``missing``.

    Raises:
        ValueError: if it is no run folder.
    """
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder: pass the folder given to the run as --run-dir")
    record = RunRecord(folder)
    try:
        for line in fast_lines(folder / METRICS_FILE):
            try:
                record.add(line or {})
            except (LookupError, TypeError, ValueError, OverflowError, AttributeError):
                record.unreadable += 1
    except OSError as error:
        record.missing.append(f"{METRICS_FILE} cannot be read: {error.strerror}")
    record.config = _mapping(record, CONFIG_FILE, parse_yaml)
    if not record.starts and not record.config:
        raise ValueError(f"{folder} is not a run folder: it has neither {METRICS_FILE} with a line nor {CONFIG_FILE}")
    record.environment = _mapping(record, ENVIRONMENT_FILE, parse_json)
    record.data = _mapping(record, DATA_FILE, parse_json)
    record.command = _text(folder / COMMAND_FILE)
    record.journal = _text(folder / INCIDENTS_FILE).splitlines()[-2000:]
    record.incidents = [*read_incidents(folder)]
    with suppress(OSError):
        record.failures = [line for line in read_json_lines(folder / FAILURES_FILE) if line]
    if record.unreadable:
        record.missing.append(f"{METRICS_FILE}: {record.unreadable:,} lines cannot be read and are left out")
    return record


def fast_lines(path: Path) -> Iterator[dict[str, Any] | None]:
    """Yield as :func:`read_json_lines` does, with the parser of orjson if it is installed."""
    loads: Callable[[bytes], Any] = json.loads
    with suppress(ImportError):
        from orjson import loads
    with open_regular(path) as file:
        while text := file.readline(MAX_LINE_BYTES):
            if not text.endswith(b"\n"):
                if len(text) < MAX_LINE_BYTES:
                    return  # the last line is being written, or was cut off
                yield None
                while text and not text.endswith(b"\n"):
                    text = file.readline(MAX_LINE_BYTES)
                continue
            try:
                line = loads(text)
            except (ValueError, RecursionError):  # NaN is no JSON, but Python's parser takes it
                try:
                    line = parse_json(text.decode(errors="replace"))
                except ValueError:
                    line = None
            yield line if isinstance(line, dict) else None


def _mapping(record: RunRecord, name: str, parse: Any) -> Mapping[str, Any]:
    """Return the content of a file; empty, with a sentence in ``missing``, if there is none."""
    path = record.folder / name
    if not path.exists():
        record.missing.append(f"there is no {name}")
        return {}
    try:
        content = parse(read_small(path))
    except (OSError, ValueError) as error:
        record.missing.append(f"{name} cannot be read: {' '.join(str(error).split())[:200]}")
        return {}
    return content if isinstance(content, Mapping) else {}


def _text(path: Path) -> str:
    with suppress(OSError, ValueError):
        return read_small(path, TABLE_FILE_BYTES).decode(errors="replace")
    return ""
