"""Interface of the loggers that receive the metrics of a run: JSONL, TensorBoard, W&B, and those of users' plugins.

Also the types of metrics and of the console's columns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

Metrics = Mapping[str, Any]
"""Values by metric name, or event fields by name: numbers, texts, lists of numbers, or None if unknown."""

BY_LAYER = "-by-layer"
"""End of the names of metrics that are lists of a value per layer."""

WENT_BACK = "went-back"
"""Field of the event ``start`` where the run goes on from an earlier step, in the same processes."""


class MetricLogger(Protocol):
    """Receives the metrics of a run on rank 0. Any method may raise: training continues without the logger.

    Two further methods are optional. ``event(step: int, kind: str, fields: Metrics)`` receives starts, warnings, notes,
    checkpoints and errors; ``flush()`` writes what is buffered, before a checkpoint is saved.
    """

    def log(self, step: int, metrics: Metrics) -> None:
        """Record the metrics of training, an evaluation or a health report after ``step`` steps."""

    def close(self) -> None:
        """Finish the record. After an ``error`` event the run has failed."""


def scalar_metrics(metrics: Metrics) -> dict[str, float]:
    """Return the numeric values, without text and lists.

    The name of a validation set is inserted into its metric names after ``validation``, as in Megatron-LM.
    """
    validation_set = metrics.get("validation-set")
    return {
        name.replace("validation", f"validation-{validation_set}") if validation_set else name: value
        for name, value in metrics.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }


def metrics_under(prefix: str, metrics: Metrics) -> dict[str, Any]:
    """Return the metrics whose names begin with ``prefix``, by the rest of their names."""
    return {name.removeprefix(prefix): value for name, value in metrics.items() if name.startswith(prefix)}


def error_summary(error: BaseException) -> str:
    """Return the error's message in one line, or its type if there is none."""
    if isinstance(error, ModuleNotFoundError) and error.name:
        package = error.name.partition(".")[0]
        wanted = f"'megatron-pretrain[{package}]'" if package in ("tensorboard", "wandb") else package
        return f"{error.name} is not installed: pip install {wanted}"
    return " ".join(str(error).split()).rstrip(".") or f"it raised {type(error).__name__}"


# ---- On the console


class Column(NamedTuple):
    """Column of the console's log line, for log lines that have the metric."""

    metric: str
    group: int  # groups are separated by ``|``
    drop_order: int  # on a narrow terminal, the column with the highest number is dropped first
    text: Callable[[Any, Metrics], str]  # of its value and all of the log line; empty to leave the column out
    meaning: str  # for the legend


class Metric(NamedTuple):
    """Unit and meaning of a metric."""

    unit: str
    help: str
