"""Metrics of a run: the table of their names, and the interface of the loggers that receive them.

`METRICS` names every metric of a log line and an evaluation. The console takes its columns from it, and
`tools/generate_docs.py` the tables of docs/operations.md. JSONL, TensorBoard and W&B implement `MetricLogger`, as may
users' plugins; `RunLogger` forwards to them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

from megatron.training.loggers.formatting import (
    format_compact,
    format_duration,
    format_exponent,
    format_loss,
    format_memory,
    format_plain,
    format_step_time,
)

Metrics = Mapping[str, Any]
"""Values by metric name, or event fields by name: numbers, texts, lists of numbers, or None if unknown."""

CONSOLE_PREFIX = "console/"
"""Prefix of metrics for the console only."""

MEMORY_CAPACITY = f"{CONSOLE_PREFIX}mem-capacity-bytes"
TOTAL_ITERATIONS = f"{CONSOLE_PREFIX}total-iterations"
SECONDS_LEFT = f"{CONSOLE_PREFIX}seconds-left"
ON_GPU = f"{CONSOLE_PREFIX}on-gpu"

MIN_SHOWN_SHARE = 0.005
"""Smallest share that is shown; whole percents would show smaller ones as 0%."""

SLOW_RANK_EXCESS = 0.03
"""The slowest rank is shown if its own time exceeds the median rank's by this share."""

GOODPUT_MIN_SECONDS = 600.0
"""Goodput is shown from this age of a run on; before, it mostly measures the start-up time."""


class Column(NamedTuple):
    """Column of the console's log line, for log lines that have the metric."""

    group: int  # groups are separated by ``|``
    drop_order: int  # on a narrow terminal, the column with the highest number is dropped first
    text: Callable[[Metrics], str]  # of the metrics of a log line; empty to leave the column out


class Metric(NamedTuple):
    """Unit and meaning of a metric, and its columns in the console."""

    unit: str
    help: str
    columns: tuple[Column, ...] = ()


def _number(name: str, group: int, drop_order: int, label: str, formatted: Callable[[float], str]) -> tuple[Column]:
    """Return the column of one formatted number behind a label."""
    return (Column(group, drop_order, lambda metrics: f"{label} {formatted(metrics[name])}"),)


def _progress(metrics: Metrics) -> str:
    total = str(metrics[TOTAL_ITERATIONS])
    return f"{metrics['iteration']:>{len(total)}}/{total}"


def _speed(metrics: Metrics, on_gpu: bool) -> str:
    """Format tokens per second: of one rank on GPUs, of all on CPUs."""
    if metrics[ON_GPU] is not on_gpu:
        return ""
    name, unit = ("tokens-per-second-per-gpu", "tok/s/gpu") if on_gpu else ("tokens-per-second", "tok/s")
    return f"{format_compact(metrics[name])} {unit}"


def _waits(metrics: Metrics) -> str:
    """Format the shares of the step by axes: ``(tp6 pp3 dp2)``. They add up to the total."""
    waits = metrics_under("communication-", metrics)
    total = waits.pop("share")
    scale = total / (sum(waits.values()) or 1.0)
    shown = [f"{axes}{x * scale * 100:.0f}" for axes, x in waits.items() if x * scale >= MIN_SHOWN_SHARE]
    return f"({' '.join(shown)})" if shown else ""


def _data(metrics: Metrics, long: bool) -> str:
    share = float(metrics["data-wait"] / metrics["iteration-time"])
    return f"data {share:.0%}" if (share >= MIN_SHOWN_SHARE) is long else ""


def _memory(metrics: Metrics) -> str:
    rank = f" r{metrics['mem-max-rank']}" if "mem-max-rank" in metrics else ""
    return f"mem {format_memory(metrics['mem-max-allocated-bytes'], metrics[MEMORY_CAPACITY])}{rank}"


def _slow_rank(metrics: Metrics) -> str:
    excess = metrics["slowest-rank-excess"]
    return f"slow r{metrics['slowest-rank']} +{excess:.0%}" if excess >= SLOW_RANK_EXCESS else ""


def _goodput(metrics: Metrics) -> str:
    """Format the goodput of a run that was started again, or of an older one that loses time."""
    goodput = metrics["goodput"]
    lossy = metrics["run-seconds"] >= GOODPUT_MIN_SECONDS and goodput < 1 - MIN_SHOWN_SHARE
    return f"goodput {goodput:.1%}" if lossy or metrics["starts"] > 1 else ""


METRICS = {
    "iteration": Metric("steps", "number of the step, from 1", (Column(0, 0, _progress),)),
    "consumed-samples": Metric("samples", "of all steps so far"),
    "consumed-tokens": Metric(
        "tokens", "of all steps so far", (Column(0, 5, lambda m: f"{format_compact(m['consumed-tokens'])} tok"),)
    ),
    "lm loss": Metric(
        "nats per token",
        "window: mean over its steps with a finite loss, skipped updates included",
        _number("lm loss", 1, 0, "loss", format_loss),
    ),
    "grad-norm": Metric(
        "", "step: global gradient norm before clipping", _number("grad-norm", 1, 3, "gnorm", format_plain)
    ),
    "learning-rate": Metric("", "step", _number("learning-rate", 1, 6, "lr", format_exponent)),
    "seq_load_balancing_loss": Metric(
        "",
        "window: balance of experts per sequence, without coefficient, mean over layers; "
        "from 1 (balanced) to the number of experts",
        _number("seq_load_balancing_loss", 1, 7, "balance", format_loss),
    ),
    "load_balancing_loss": Metric(
        "", "window: the same per micro-batch", _number("load_balancing_loss", 1, 7, "balance", format_loss)
    ),
    "z_loss": Metric(
        "",
        "window: squared log-partition of the routers, without coefficient, mean over layers",
        _number("z_loss", 1, 7, "router z", format_loss),
    ),
    "decoupled-learning-rate": Metric("", "step: of embedding and output layer, with `--decoupled-lr`"),
    "weight-decay": Metric("", "step"),
    "batch-size": Metric("samples", "step"),
    "loss-scale": Metric(
        "",
        "step",
        (Column(6, 7, lambda m: f"scale {format_compact(m['loss-scale'])}" if m["loss-scale"] != 1 else ""),),
    ),
    "iteration-time": Metric(
        "seconds per step",
        "window: wall time, without evaluations, saves, health reports and comparisons of weight copies",
        (Column(2, 4, lambda m: format_step_time(m["iteration-time"])),),
    ),
    "tokens-per-second": Metric(
        "tokens/s", "window: of all ranks together", (Column(2, 2, lambda m: _speed(m, False)),)
    ),
    "tokens-per-second-per-gpu": Metric("tokens/s", "window: of one rank", (Column(2, 2, lambda m: _speed(m, True)),)),
    "throughput": Metric("TFLOP/s", "window: of one rank, as counted by Megatron-LM"),
    "mfu": Metric(
        "0 to 1",
        "window: [model FLOPs utilisation](performance.md#mfu-and-hfu) by 6N + 12Lhs; null if the peak is unknown",
        (Column(2, 3, lambda m: "" if m["mfu"] is None else f"MFU {m['mfu']:.1%}"),),
    ),
    "mfu-causal": Metric("0 to 1", "window: utilisation that counts unmasked attention scores only"),
    "hfu": Metric("0 to 1", "window: utilisation including recomputation"),
    "skipped-iterations": Metric("list of steps", "window: with a skipped update; `metrics.jsonl` only"),
    "skipped-iterations-count": Metric(
        "steps",
        "window: their number",
        (Column(7, 1, lambda m: f"skipped {n}" if (n := m["skipped-iterations-count"]) else ""),),
    ),
    "spikes-skipped": Metric("steps", "window: those of them with a finite gradient that was an outlier"),
    "communication-share": Metric(
        "0 to 1",
        "window: sum of all `communication-AXES` as a share of the step",
        (Column(3, 6, lambda m: f"comm {m['communication-share']:.0%}"), Column(3, 10, _waits)),
    ),
    "communication-AXES": Metric(
        "seconds per step", "window: waiting for other ranks, by `tp`, `dp`, ..., `world`; mean of the ranks"
    ),
    "sent-bytes-AXES": Metric(
        "bytes per step",
        "window: sent by a rank in [a ring](performance.md#bytes-on-the-wire), by the same axes, `pp` for pipeline "
        "neighbours; mean of the ranks",
    ),
    "bubble": Metric(
        "0 to 1",
        "window: share of the step waiting for other ranks of the pipeline; mean of the ranks",
        (Column(3, 5, lambda m: f"bubble {m['bubble']:.1%}"),),
    ),
    "data-wait": Metric(
        "seconds per step",
        "window: waiting for micro-batches, on the slowest rank",
        (Column(3, 9, lambda m: _data(m, long=False)), Column(3, 4, lambda m: _data(m, long=True))),
    ),
    "slowest-rank": Metric("rank", "window: with the longest own time: the step less its waits for other ranks"),
    "slowest-rank-excess": Metric(
        "0 to 1", "window: excess of that time over the median rank's", (Column(5, 7, _slow_rank),)
    ),
    "mem-max-allocated-bytes": Metric(
        "bytes",
        "peak so far on the fullest rank: allocated on its GPU, or resident on a CPU",
        (Column(4, 8, _memory),),
    ),
    "mem-max-rank": Metric("rank", "the fullest rank"),
    "goodput": Metric("0 to 1", "share of `run-seconds` spent in steps that were not lost", (Column(8, 8, _goodput),)),
    "run-seconds": Metric("seconds", "since the run's first start"),
    "starts": Metric("", "of the run so far"),
    SECONDS_LEFT: Metric(
        "seconds", "for the remaining samples", (Column(8, 2, lambda m: f"ETA {format_duration(m[SECONDS_LEFT])}"),)
    ),
    "samples-digest": Metric("16 digits", "of all samples consumed: equal if two runs read the same"),
    "world-size": Metric("ranks", "number of ranks"),
    "TIMER-time": Metric("seconds per step", "window: longest of all ranks, with `--timing-log-level` 1 or higher"),
    "TIMER-time-min": Metric("seconds per step", "window: shortest, with `--timing-log-option minmax`"),
    "TIMER-time-by-rank": Metric("list of seconds", "window: of each rank, with `--timing-log-option all`"),
}
"""Every metric of a log line, by Megatron-LM's name where it has the metric, with its columns in console order.

"Step" is the last step, "window" all steps since the previous line. ``AXES`` and ``TIMER`` stand for mesh axes and for
the phases of ``distributed.timing.PHASES``. Metrics that do not apply, such as communication on one rank, are left out.
"""

LEGEND = {
    "iteration": "step/steps",
    "consumed-tokens": "tokens so far",
    "lm loss": "loss: mean since the last line",
    "grad-norm": "gnorm: norm of the gradient",
    "learning-rate": "lr: learning rate",
    "seq_load_balancing_loss": "balance: of experts, 1 is best",
    "load_balancing_loss": "balance: of experts, 1 is best",
    "z_loss": "router z: z-loss",
    "loss-scale": "scale: of the loss in fp16",
    "iteration-time": "time of a step",
    "tokens-per-second": "tokens per second",
    "tokens-per-second-per-gpu": "the same of a GPU",
    "mfu": "MFU: share of the peak FLOP/s",
    "skipped-iterations-count": "skipped: updates left out",
    "communication-share": "comm: share of waiting for other ranks, by axes",
    "bubble": "bubble: of the pipeline",
    "data-wait": "data: share of waiting for data",
    "slowest-rank-excess": "slow: the slowest rank, over the median",
    "mem-max-allocated-bytes": "mem: peak/capacity",
    "goodput": "goodput: share of time in steps that count",
    SECONDS_LEFT: "ETA: time left",
}
"""Meaning of each column of the console, for the legend."""

DILOCO_METRICS = {
    "diloco-round": Metric("", "rounds so far"),
    "diloco-members": Metric("replicas", "that took part"),
    "diloco-attempts": Metric("", "exchanges until one was committed; above 1 after the loss of a member"),
    "diloco-seconds": Metric("seconds", "from the arrival of this replica to the end of the exchange"),
    "diloco-blocked-seconds": Metric("seconds", "of these in which no step was taken"),
    "diloco-sent-bytes": Metric("bytes", "sent by rank 0"),
    "diloco-outer-grad-norm": Metric("", "norm of the averaged progress"),
}
"""Metrics of a round of DiLoCo."""

EVALUATION_METRICS = {
    "lm loss validation": Metric("nats per token", "mean over `--eval-iters` batches"),
    "lm loss validation ppl": Metric("", "exp of the loss, if it is a cross-entropy"),
    "lm loss validation ema": Metric("nats per token", "loss with the average of the weights, with `--ema-decay`"),
    "validation-set": Metric("name", "which one, if there are several"),
}
"""Every metric of an evaluation; evaluations of test data have ``test`` in place of ``validation``."""


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
