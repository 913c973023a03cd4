"""A run as its metrics.jsonl tells it."""

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
    """One log line of training.

    Attributes:
        tokens: consumed.
        last_step_from: consumed before the last step, which had this ``batch_size``.
        skipped: consumed at which updates were skipped.
    """

    iteration: int
    tokens: int
    last_step_from: float
    loss: float
    learning_rate: float
    batch_size: int
    skipped: tuple[float, ...]


@dataclass(frozen=True)
class EvaluationPoint:
    """One evaluation; ``name`` says on what: ``validation``, ``validation NAME`` or ``test``."""

    name: str
    iteration: int
    tokens: int
    loss: float


@dataclass
class History:
    """The steps that count, oldest first: what a restart threw away is gone.

    Attributes:
        train: log lines.
        evaluations: of all kinds.
        restarts: consumed tokens at which the run was started again.
        errors: consumed tokens at which it ended by an error.
        unreadable: numbers of lines that make no sense (a crash can cut a line off).
    """

    train: list[TrainPoint] = field(default_factory=list)
    evaluations: list[EvaluationPoint] = field(default_factory=list)
    restarts: list[int] = field(default_factory=list)
    errors: list[int] = field(default_factory=list)
    unreadable: list[int] = field(default_factory=list)

    def add(self, line: dict[str, Any]) -> None:
        """Take the next line of the file."""
        if line.get("event") == "start":
            self._restart(line["iteration"], line["consumed-tokens"])
        elif line.get("event") == "error":
            self.errors.append(int(line["consumed-tokens"]))
        elif "lm loss" in line:
            self.train.append(_train_point(line))
        elif kind := next((kind for kind in EVALUATIONS if f"lm loss {kind}" in line), None):
            self._evaluated(_evaluation_point(kind, line))

    def _evaluated(self, point: EvaluationPoint) -> None:
        """Take an evaluation, in the place of one that a restart made again."""
        now = list(takewhile(lambda p: p.iteration == point.iteration, reversed(self.evaluations)))
        for before in (p for p in now if p.name == point.name):
            self.evaluations.remove(before)
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
        ValueError: when the file is missing or holds no log line of a training step.
    """
    if not path.is_file():
        raise ValueError(f"{path} does not exist: give the folder that the run was told with --run-dir")
    history = History()
    with path.open(encoding="utf-8", errors="replace") as file:
        for number, text in enumerate(file, start=1):
            try:
                history.add(json.loads(text))
            except (ValueError, AttributeError, LookupError, TypeError, ArithmeticError):
                history.unreadable.append(number)
    if not history.train:
        bad = len(history.unreadable)
        unreadable = f" ({bad} line{'' if bad == 1 else 's'} could not be read)" if bad else ""
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
    """JSON has no NaN; the log writes null."""
    return math.nan if value is None else float(value)
