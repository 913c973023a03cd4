"""The run folder: configuration, command, environment, data, metrics and incidents of a run.

`write_run_folder` writes what is known before the first step and renames files of an earlier start that differ.
`JsonLinesLogger` appends metrics to `metrics.jsonl`, one JSON object per line, and `IncidentLogger` appends starts,
skipped updates, warnings and errors to `incidents.md`. `read_json_lines` reads such a file back, and `read_history`
reads the metrics without the steps that a restart discarded.
"""

from __future__ import annotations

import importlib.metadata
import json
import math
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from megatron.checkpoint.durable_files import make_folder, publish_file
from megatron.config.batch import WHOLE_RUN
from megatron.config.files import open_regular, parse_json
from megatron.config.privacy import check_access, redact
from megatron.config.text import printable
from megatron.data.loader import DataSource
from megatron.data.skipped_dataset import SKIPPED
from megatron.training.loggers.base import BY_LAYER, WENT_BACK, Metrics
from megatron.training.loggers.feature_metrics import FURTHER_LOSSES
from megatron.training.startup import start_phrase

CONFIG_FILE = "config.yaml"
COMMAND_FILE = "command.sh"
ENVIRONMENT_FILE = "environment.json"
DIFF_FILE = "uncommitted.diff"
DATA_FILE = "data.json"
METRICS_FILE = "metrics.jsonl"
LOSS_CURVE_FILE = "loss.png"
HEALTH_FILE = "health.png"
EXPERTS_FILE = "experts.png"
PACKAGES = (
    *("megatron-pretrain", "torch", "numpy", "transformers", "tokenizers", "gigatoken", "wandb", "tensorboard"),
    *("triton", "apex", "flash-attn", "transformer-engine", "liger-kernel"),  # optional
)
INCIDENTS_FILE = "incidents.md"
TAIL_BYTES = 1 << 20  # of metrics, in which the newest counts of samples and tokens are looked for
MAX_LINE_BYTES = 16 << 20  # of metrics; those of a layer take about 100 bytes


def write_run_folder(
    folder: Path,
    resolved_config: str,
    device_name: str,
    world_size: int,
    data: Mapping[str, object] | None = None,
    warn: Callable[[str], None] = lambda text: None,
    keep: bool = True,
) -> list[Path]:
    """Create the folder and write config, command, environment, uncommitted changes and a summary of the data.

    Files of an earlier start with other content are renamed to ``name.1.ext``, those of the next to ``name.2.ext``...

    Args:
        folder: of the run.
        resolved_config: content of ``config.yaml``.
        device_name: for the environment.
        world_size: number of ranks.
        data: summary of the data.
        warn: called if the changes hold credentials, which are left out.
        keep: False to replace files instead of renaming them.

    Returns:
        New paths of the renamed files.

    Raises:
        OSError: if the folder cannot be written, or may hold another user's files.
    """
    make_folder(folder, private=True)
    check_access(folder, shared=True)
    commit, changes = git_state(Path(__file__).parent)
    diff = redact(changes)
    if diff != changes:
        warn(f"the uncommitted changes hold what looks like credentials, which {folder / DIFF_FILE} has as ***")
    git_facts = {"git_commit": commit, "git_uncommitted_changes": bool(diff) if commit else None}
    texts = {
        CONFIG_FILE: resolved_config,
        COMMAND_FILE: restart_command(os.environ, sys.argv, world_size),
        ENVIRONMENT_FILE: json.dumps(environment_info(device_name, world_size) | git_facts, indent=2) + "\n",
        DIFF_FILE: diff,
        DATA_FILE: json.dumps(data, indent=2) + "\n" if data else "",
    }
    paths = {folder / name: text for name, text in texts.items()}
    number = 1
    while any(path.with_stem(f"{path.stem}.{number}").exists() for path in paths):
        number += 1
    changed = [path for path, text in paths.items() if keep and path.exists() and path.read_bytes() != text.encode()]
    renamed = [path.rename(path.with_stem(f"{path.stem}.{number}")) for path in changed]
    for path, text in paths.items():
        if text:
            publish_file(path, text.encode())
    return renamed


def restart_command(variables: Mapping[str, str], argv: Sequence[str], world_size: int) -> str:
    """Return a shell script that starts this run again. The launcher is guessed from the environment ``variables``."""
    start = [Path(sys.executable).name]
    hint = ""
    if world_size > 1 and variables.get("LOCAL_WORLD_SIZE") == str(world_size):
        start = ["torchrun", "--standalone", "--nproc-per-node", str(world_size)]
    elif world_size > 1:
        hint = f"# on {world_size} processes, with the cluster's launcher (srun, or torchrun on every node)\n"
    if path := variables.get("PYTHONPATH"):
        start = ["env", f"PYTHONPATH={path}", *start]
    return f"#!/bin/sh\n{hint}cd {shlex.quote(os.getcwd())} && {shlex.join([*start, *argv])}\n"


def environment_info(device_name: str, world_size: int) -> dict[str, Any]:
    """Return versions and hardware."""
    packages = {}
    for name in PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            packages[name] = importlib.metadata.version(name)
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "device": device_name,
        "world_size": world_size,
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS"),
        "packages": packages,
    }


def data_summary(data: DataSource) -> dict[str, dict[str, object]]:
    """Return the size, sources and fingerprint of the data of each split."""
    summary: dict[str, dict[str, object]] = {}
    for split, samples in data.used.items():
        dataset = data.datasets[split]
        tokens = samples * data.seq_length
        sources = [{"source": r.source, "tokens": r.tokens, "epochs": r.epochs} for r in dataset.source_usage(samples)]
        summary[split] = {
            "samples": samples,
            "tokens": tokens,
            "laid_out_for_samples": list(data.segments[split]),
            "fingerprint": data.fingerprints[split],
            "sources": sources or [{"source": dataset.describe(tokens)}],  # generated samples are read from no source
        }
        if split == "train":  # what else tools/inspect_dataset.py needs to find the samples of a step
            summary[split] |= {"stream": list(data.stream), SKIPPED: data.skipped.to_list()}
            summary[split] |= {} if data.origin == WHOLE_RUN else {"phase": data.origin.to_state()}
    return summary


def git_state(source: Path) -> tuple[str | None, str]:
    """Return the commit and the uncommitted changes of the checkout around ``source``; (None, "") outside of one."""
    commit, diff = _git(source, "rev-parse", "HEAD"), _git(source, "diff", "HEAD")
    return (commit.strip(), diff or "") if commit else (None, "")


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, errors="replace", timeout=20
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


class JsonLinesLogger:
    """Appends one JSON object per line. A full disk costs one warning, and the lines until it has space again."""

    def __init__(self, path: Path, warn: Callable[[str], None]) -> None:
        """Open ``path`` for appending."""
        self.path = path
        self._warn = warn
        self._warned = False
        self._file = path.open("a+b", buffering=0)  # unbuffered, so that errors are raised by write
        self._incomplete_line = False  # whether the last line was cut off, by a crash or by a full disk
        if self._file.seek(0, os.SEEK_END):
            self._file.seek(-1, os.SEEK_END)
            self._incomplete_line = self._file.read(1) != b"\n"

    def log(self, step: int, metrics: Metrics) -> None:
        """Append the metrics of a step."""
        self.write({"iteration": step, **metrics})

    def event(self, step: int, kind: str, fields: Metrics) -> None:
        """Append an event."""
        self.write({"event": kind, "iteration": step, **fields})

    def write(self, values: Metrics) -> None:
        """Append a line. NaN and infinity become null, because JSON has neither."""
        finite = {n: None if isinstance(x, float) and not math.isfinite(x) else x for n, x in values.items()}
        data = b"\n" * self._incomplete_line + json.dumps(finite, allow_nan=False).encode() + b"\n"
        try:
            self._incomplete_line = self._file.write(data) != len(data)
            problem = "no space left" if self._incomplete_line else ""
        except OSError as error:
            problem = str(error.strerror)
        if problem and not self._warned:
            self._warned = True
            self._warn(f"{self.path} cannot be written ({problem}): training continues, metrics are lost until it can")

    def close(self) -> None:
        """Close the file."""
        with suppress(OSError):  # nothing is buffered that could be lost
            self._file.close()


def read_json_lines(path: Path) -> Iterator[dict[str, Any] | None]:
    """Yield the object of each line, or None for a line that a crash cut off or damaged, or that is too long.

    Raises:
        OSError: if the file cannot be read.
    """
    with open_regular(path) as file:
        while text := file.readline(MAX_LINE_BYTES):
            whole = len(text) < MAX_LINE_BYTES or text.endswith(b"\n")
            while len(text) == MAX_LINE_BYTES and not text.endswith(b"\n"):
                text = file.readline(MAX_LINE_BYTES)
            try:
                line = parse_json(text.decode(errors="replace")) if whole else None
            except ValueError:
                yield None
            else:
                yield line if isinstance(line, dict) else None


class IncidentLogger:
    """Writes one line of Markdown per incident, with its time (UTC) and step."""

    def __init__(self, path: Path) -> None:
        """Open ``path`` for appending."""
        self._start = "started again" if path.exists() else "started"
        self._step = 0
        self._end = "ended in good order"
        self._file = path.open("a", encoding="utf-8", buffering=1)  # line buffered

    def log(self, step: int, metrics: Metrics) -> None:
        """Log skipped updates."""
        self._step = step
        if skipped := metrics.get("skipped-iterations"):
            which = "update of step" if len(skipped) == 1 else "updates of steps"
            self._write(metrics["time"], f"skipped the {which} {', '.join(map(str, skipped))}")

    def event(self, step: int, kind: str, fields: Metrics) -> None:
        """Log starts, warnings, errors and stops."""
        self._step = step
        if kind in ("start", "evaluation") and WENT_BACK not in fields:
            began = self._start if kind == "start" else "an evaluation alone"
            ranks = "1 rank" if fields["world-size"] == 1 else f"{fields['world-size']} ranks"
            run = f", run {fields['run-id']}" if fields["run-id"] else ""
            which = f", {phrase}" if (phrase := start_phrase(fields)) else ""
            self._write(fields["time"], f"{began} on {ranks}{run}{which}")
        elif kind in ("warning", "incident", "error", "stop", "rewind", "control"):
            self._end = {"error": "ended by an error", "rewind": ""}.get(kind, self._end)
            plain = kind in ("stop", "rewind")
            folder = f"; {folder}" if (folder := fields.get("folder")) else ""
            self._write(fields["time"], fields["text"] if plain else f"{kind}: {fields['text']}{folder}")

    def close(self) -> None:
        """Log the end, unless the run goes back, and close the file."""
        if self._end:
            self._write(time.time(), self._end)
        self._file.close()

    def _write(self, seconds: float, text: str) -> None:
        self._file.write(journal_line(seconds, self._step, text))


def journal_line(seconds: float, step: int, text: str) -> str:
    """Return a line of ``incidents.md``, of a time in seconds since the epoch."""
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(seconds))
    return f"- {at} step {step}: {printable(' '.join(text.split()))}\n"


def append_incident(run_dir: Path, kind: str, step: int, text: str, folder: Path) -> None:
    """Append an incident to the log of a run from any rank, when the log of rank 0 may be closed or stuck.

    Args:
        run_dir: folder of the run.
        kind: of the incident.
        step: number of the step, from 1.
        text: what was found.
        folder: of the incident.

    Raises:
        OSError: if it cannot be written.
    """
    now, metrics = time.time(), run_dir / METRICS_FILE
    with metrics.open("rb") as file:
        file.seek(-min(TAIL_BYTES, metrics.stat().st_size), os.SEEK_END)
        counts: Metrics = {}
        for raw in reversed(file.read().splitlines()):
            with suppress(ValueError):
                if isinstance(line := parse_json(raw.decode(errors="replace")), dict) and "consumed-tokens" in line:
                    counts = {name: line[name] for name in ("consumed-samples", "consumed-tokens") if name in line}
                    break
    log = JsonLinesLogger(metrics, warn=lambda text: None)
    log.event(step - 1, "incident", {**counts, "kind": kind, "text": text, "folder": str(folder), "time": now})
    log.close()
    with (run_dir / INCIDENTS_FILE).open("a", encoding="utf-8") as journal:
        journal.write(journal_line(now, step - 1, f"incident: {text}; {folder}"))


COUNTS = (("consumed-tokens",), ("consumed-tokens", "consumed-samples", "batch-size"))
"""Numbers that a line of an evaluation, and of training, must have."""

NUMBERS_OR_NULL = ("lm loss", "health/", "learning-rate", "weight-decay", "loss-scale", "grad-norm", *FURTHER_LOSSES)
"""Beginnings of the names of other numbers, which may be missing, and infinite or NaN in a diverged run."""


class HistoryPoint(NamedTuple):
    """One line of metrics."""

    name: str  # training, validation, validation NAME, test or health
    iteration: int
    line: dict[str, Any]

    def check(self) -> None:
        """Raise ValueError, or LookupError for a missing one, unless what is drawn and compared are numbers."""
        counts = [self.iteration, *self.line.get("skipped-iterations", [])]
        for row in self.loads_of_experts:
            counts += row
        counts += [self.line[name] for name in (() if self.name == "health" else COUNTS[self.name == "training"])]
        metrics = [x for name, x in self.line.items() if name.startswith(NUMBERS_OR_NULL) and x is not None]
        metrics += [x for name, xs in self.line.items() if name.endswith(BY_LAYER) for x in xs if x is not None]
        finite = [x for x in metrics if not isinstance(x, float) or math.isfinite(x)]
        if not all(isinstance(x, int | float) and abs(x) < 1e100 for x in counts + finite):
            raise ValueError("a metric is not a number")
        if self.name == "training" and not self.line["consumed-samples"]:
            raise ValueError("no samples are consumed")

    @property
    def loads_of_experts(self) -> list[list[int]]:
        """Percent of the mean load, of all experts of each layer that has some; empty without such a record."""
        return [row for row in self.line.get("expert-loads", ()) if row is not None]

    @property
    def tokens(self) -> int:
        """Tokens consumed so far."""
        return int(self.line["consumed-tokens"])

    @property
    def tokens_per_step(self) -> float:
        """Tokens of the last step of a line of training; with phases, whose samples differ, of the mean one."""
        if "phase" in self.line:
            return float(self.line["tokens-per-second"] * self.line["iteration-time"])
        return float(self.line["batch-size"] * self.tokens / self.line["consumed-samples"])

    @property
    def learning_rate(self) -> float:
        """Learning rate of a line of training; NaN without one."""
        rate = self.line.get("learning-rate")
        return math.nan if rate is None else float(rate)

    @property
    def loss(self) -> float:
        """Loss of training or of an evaluation; NaN for null, which the log writes because JSON has no NaN."""
        loss = self.line["lm loss" if self.name == "training" else f"lm loss {self.name.partition(' ')[0]}"]
        return math.nan if loss is None else float(loss)


@dataclass
class RunHistory:
    """Metrics of a run, oldest first, without steps that a restart discarded."""

    points: dict[tuple[str, int], HistoryPoint] = field(default_factory=dict)  # by name and iteration
    restarts: list[int] = field(default_factory=list)  # in consumed tokens
    rewinds: list[int] = field(default_factory=list)  # where the run goes on after it went back, in consumed tokens
    errors: list[int] = field(default_factory=list)  # in consumed tokens
    unreadable: list[int] = field(default_factory=list)  # line numbers; a crash can cut a line off
    _goes_back: bool = False  # the next start continues from an earlier step of the same start

    def add(self, line: dict[str, Any]) -> None:
        """Add the next line of the file; an evaluation that a restart repeated replaces the earlier one."""
        iteration = int(line["iteration"])
        if line.get("event") == "start":
            tokens = int(line["consumed-tokens"])
            self.points = {key: point for key, point in self.points.items() if point.iteration <= iteration}
            self.restarts = [at for at in self.restarts if at < tokens]
            self.errors = [at for at in self.errors if at <= tokens]
            if self._goes_back:
                self.rewinds = [*(at for at in self.rewinds if at < tokens), tokens]
            elif self.train and self.train[-1].line.get("phase") == line.get("phase"):  # else a phase begins
                self.restarts.append(tokens)
            self._goes_back = False
        elif line.get("event") == "rewind":
            self._goes_back = True
        elif line.get("event") == "error":
            self.errors.append(int(line["consumed-tokens"]))
        elif "event" not in line and (name := point_name(line)):
            point = HistoryPoint(name, iteration, line)
            point.check()
            self.points[name, iteration] = point

    @property
    def train(self) -> list[HistoryPoint]:
        """Log lines of training."""
        return [point for point in self.points.values() if point.name == "training"]

    @property
    def phases(self) -> list[tuple[str, int, int]]:
        """Name, first and last token of each phase; empty for a run without names of phases."""
        begins, found = 0, list[tuple[str, int, int]]()
        for name, points in groupby(self.train, lambda point: str(point.line.get("phase", ""))):
            ends = [*points][-1].tokens
            found.append((name, begins, ends))
            begins = ends
        return found if any(name for name, _, _ in found) else []

    @property
    def evaluations(self) -> list[HistoryPoint]:
        """Evaluations of all validation sets and of test data."""
        return [point for point in self.points.values() if point.name not in ("training", "health")]

    @property
    def health(self) -> list[HistoryPoint]:
        """Health reports."""
        return [point for point in self.points.values() if point.name == "health"]


def point_name(line: Mapping[str, Any]) -> str | None:
    """Return the name of a line of metrics in the history."""
    if "lm loss" in line:
        return "training"
    for kind in ("validation", "test"):
        if f"lm loss {kind}" in line:
            return f"{kind} {line.get('validation-set', '')}".strip()
    return "health" if any(name.startswith("health/") for name in line) else None


def read_history(path: Path) -> RunHistory:
    """Read a metrics.jsonl.

    Raises:
        ValueError: if the file is missing or has no log line of a training step.
    """
    if not path.is_file():
        raise ValueError(f"{path} does not exist: pass the folder given to the run as --run-dir")
    history = RunHistory()
    for number, line in enumerate(read_json_lines(path), start=1):
        try:
            history.add(line or {})
        except (LookupError, TypeError, ValueError, OverflowError):
            history.unreadable.append(number)
    if not history.train:
        count = len(history.unreadable)
        unreadable = f" ({count} line{'' if count == 1 else 's'} could not be read)" if count else ""
        raise ValueError(f"{path} holds no log line of a training step{unreadable}")
    return history
