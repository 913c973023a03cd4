"""Read the history of a run from its metrics.jsonl."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any

EVALUATIONS = ("validation", "test")


@dataclass(frozen=True)
class TrainPoint:
    """One log line of training."""

    iteration: int
    tokens: int  # consumed so far
    last_step_from: float  # tokens consumed before the last step
    loss: float
    learning_rate: float
    batch_size: int  # samples of the last step
    skipped: tuple[float, ...]  # positions of the skipped updates, in consumed tokens


@dataclass(frozen=True)
class EvaluationPoint:
    """One evaluation."""

    name: str  # validation, validation NAME or test
    iteration: int
    tokens: int
    loss: float


@dataclass
class History:
    """Log lines of a run, oldest first, without steps that a restart discarded."""

    train: list[TrainPoint] = field(default_factory=list)
    evaluations: list[EvaluationPoint] = field(default_factory=list)
    restarts: list[int] = field(default_factory=list)  # in consumed tokens
    errors: list[int] = field(default_factory=list)  # in consumed tokens
    unreadable: list[int] = field(default_factory=list)  # line numbers; a crash can cut a line off

    def add(self, line: dict[str, Any]) -> None:
        """Add the next line of the file."""
        if line.get("event") == "start":
            self._restart(line["iteration"], line["consumed-tokens"])
        elif line.get("event") == "error":
            self.errors.append(int(line["consumed-tokens"]))
        elif "lm loss" in line:
            self.train.append(_train_point(line))
        elif kind := next((kind for kind in EVALUATIONS if f"lm loss {kind}" in line), None):
            self._add_evaluation(_evaluation_point(kind, line))

    def _add_evaluation(self, point: EvaluationPoint) -> None:
        """Add an evaluation; after a restart it replaces the earlier one of the same step."""
        same_step = list(takewhile(lambda p: p.iteration == point.iteration, reversed(self.evaluations)))
        for earlier in (p for p in same_step if p.name == point.name):
            self.evaluations.remove(earlier)
        self.evaluations.append(point)

    def _restart(self, iteration: int, tokens: int) -> None:
        self.train = [point for point in self.train if point.iteration <= iteration]
        self.evaluations = [point for point in self.evaluations if point.iteration <= iteration]
        self.restarts = [at for at in self.restarts if at < tokens]
        self.errors = [at for at in self.errors if at <= tokens]
        if self.train:
            self.restarts.append(tokens)


def read_history(path: Path) -> History:
    """Read a metrics.jsonl.

    Raises:
        ValueError: if the file is missing or has no log line of a training step.
    """
    if not path.is_file():
        raise ValueError(f"{path} does not exist: pass the folder given to the run as --run-dir")
    history = History()
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, text in enumerate(file, start=1):
            try:
                history.add(json.loads(text))
            except (ValueError, AttributeError, LookupError, TypeError, ArithmeticError):
                history.unreadable.append(number)
    if not history.train:
        count = len(history.unreadable)
        unreadable = f" ({count} line{'' if count == 1 else 's'} could not be read)" if count else ""
        raise ValueError(f"{path} holds no log line of a training step{unreadable}")
    return history


def _train_point(line: dict[str, Any]) -> TrainPoint:
    iteration, tokens, batch_size = int(line["iteration"]), int(line["consumed-tokens"]), int(line["batch-size"])
    tokens_per_step = batch_size * tokens / int(line["consumed-samples"])
    return TrainPoint(
        iteration=iteration,
        tokens=tokens,
        last_step_from=tokens - tokens_per_step,
        loss=_number(line["lm loss"]),
        learning_rate=_number(line["learning-rate"]),
        batch_size=batch_size,
        skipped=tuple(tokens - (iteration - step) * tokens_per_step for step in line["skipped-iterations"]),
    )


def _evaluation_point(kind: str, line: dict[str, Any]) -> EvaluationPoint:
    name = f"{kind} {line.get('validation-set', '')}".strip()
    return EvaluationPoint(name, int(line["iteration"]), int(line["consumed-tokens"]), _number(line[f"lm loss {kind}"]))


def _number(value: float | None) -> float:
    """Return NaN for null, which the log writes because JSON has no NaN."""
    return math.nan if value is None else float(value)
