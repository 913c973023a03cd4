"""Interface between a run and the loggers of its metrics: names, protocol, and errors.

`METRICS` names every metric of a log line and an evaluation. JSONL, TensorBoard and W&B implement `MetricLogger`, as
may users' plugins; `RunLogger` forwards to them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

Metrics = Mapping[str, Any]
"""Values by metric name, or event fields by name: numbers, texts, lists of numbers, or None if unknown."""


class Metric(NamedTuple):
    """Unit and meaning of a metric."""

    unit: str
    help: str


METRICS = {
    "iteration": Metric("steps", "number of the step, from 1"),
    "consumed-samples": Metric("samples", "samples of all steps so far"),
    "consumed-tokens": Metric("tokens", "tokens of all steps so far"),
    "lm loss": Metric("nats per token", "mean over the steps with a finite loss, skipped updates included"),
    "seq_load_balancing_loss": Metric("", "router loss per sequence, without coefficient, mean over layers"),
    "load_balancing_loss": Metric("", "router loss per micro-batch, without coefficient, mean over layers"),
    "z_loss": Metric("", "squared log-partition of the routers, without coefficient, mean over layers"),
    "grad-norm": Metric("", "global gradient norm of the last step, before clipping"),
    "learning-rate": Metric("", "of the last step"),
    "decoupled-learning-rate": Metric("", "learning rate of embedding and output layer, with --decoupled-lr"),
    "weight-decay": Metric("", "of the last step"),
    "batch-size": Metric("samples", "of the last step"),
    "loss-scale": Metric("", "of the last step"),
    "iteration-time": Metric("seconds per step", "mean wall-clock time"),
    "tokens-per-second": Metric("tokens/s", "of all ranks together"),
    "tokens-per-second-per-gpu": Metric("tokens/s", "of one rank"),
    "throughput": Metric("TFLOP/s", "of one rank, as counted by Megatron-LM"),
    "mfu": Metric("0 to 1", "model FLOPs utilisation by 6N + 12Lhs; None if the peak is unknown"),
    "mfu-causal": Metric("0 to 1", "utilisation that counts unmasked attention scores only"),
    "hfu": Metric("0 to 1", "utilisation including recomputation"),
    "skipped-iterations": Metric("list of steps", "steps whose update was skipped"),
    "skipped-iterations-count": Metric("steps", "their number"),
    "spikes-skipped": Metric("steps", "number of skipped steps whose gradient was finite, but an outlier"),
    "data-wait": Metric("seconds per step", "wait for data, on the rank that waited longest"),
    "communication-AXES": Metric("seconds per step", "wait for other ranks by mesh axes, mean over ranks"),
    "communication-share": Metric("0 to 1", "all of these as a share of the step"),
    "sent-bytes-AXES": Metric("bytes per step", "bytes that a rank sends by mesh axes, mean over ranks"),
    "bubble": Metric("0 to 1", "share of the step spent waiting for other pipeline stages; not in communication"),
    "slowest-rank": Metric("rank", "rank with the largest own time: the step less its waits for other ranks"),
    "slowest-rank-excess": Metric("0 to 1", "excess of that time over the median rank's"),
    "mem-max-allocated-bytes": Metric("bytes", "peak of the fullest rank: GPU memory, or resident set size on CPUs"),
    "mem-max-rank": Metric("rank", "the fullest rank"),
    "goodput": Metric("0 to 1", "share of run-seconds spent in steps that were not lost"),
    "run-seconds": Metric("seconds", "time since the run was first started"),
    "starts": Metric("", "starts of the run so far"),
    "samples-digest": Metric("16 digits", "digest of all samples consumed so far"),
    "TIMER-time": Metric("seconds per step", "longest time of a timer on any rank"),
    "TIMER-time-min": Metric("seconds per step", "shortest, with --timing-log-option minmax"),
    "TIMER-time-by-rank": Metric("list of seconds", "time of each rank, with --timing-log-option all"),
    "world-size": Metric("ranks", "number of ranks"),
    "lm loss validation": Metric("nats per token", "mean over the evaluation batches"),
    "lm loss validation ppl": Metric("", "exp of the loss"),
    "lm loss validation ema": Metric("nats per token", "loss with the moving average of the weights"),
    "validation-set": Metric("name", "which of several validation sets"),
}
"""Every metric of a log line or an evaluation, by Megatron-LM's name where it has the metric.

``AXES`` and ``TIMER`` stand for mesh axes and for the phases of ``distributed.timing.PHASES``; evaluations of test data
have ``test`` in place of ``validation``. A metric that does not apply, such as communication on one rank, is left out.
"""

MEMORY_CAPACITY = "mem-capacity-bytes"
"""Memory of the fullest rank's device: for the console only."""


class MetricLogger(Protocol):
    """Receives the metrics of a run on rank 0. Any method may raise: training continues without the logger.

    Two further methods are optional. ``event(step: int, kind: str, fields: Metrics)`` receives starts, warnings, notes,
    checkpoints and errors; ``flush()`` makes everything logged so far durable before a checkpoint is saved.
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


class LoggerOpenError(Exception):
    """A logger could not be opened."""


class LoggerFailedError(Exception):
    """A logger raised in its thread, cannot keep up, or did not finish in time."""


def error_summary(error: BaseException) -> str:
    """Return the error's message in one line, or its type if there is none."""
    return " ".join(str(error).split()).rstrip(".") or f"it raised {type(error).__name__}"
