"""Metrics of a run by name, and their lines on the console, with fewer columns on narrow terminals.

`METRICS` names every metric of a log line, for which `tools/generate_docs.py` writes the tables of docs/logs.md.
`COLUMNS` are those that the console shows.
"""

from __future__ import annotations

import math
import shutil
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

from megatron.config.privacy import redact
from megatron.config.text import (
    echo,
    format_bytes,
    format_compact,
    format_duration,
    format_exponent,
    format_loss,
    format_memory,
    format_plain,
    format_step_time,
)
from megatron.training.loggers.base import WENT_BACK, Column, Metric, Metrics, metrics_under
from megatron.training.loggers.feature_metrics import (
    FEATURE_COLUMNS,
    HEALTH_MAXIMA,
    LOSS_METRICS,
    POWER_METRICS,
    UPDATE_METRICS,
    VALIDATION_METRICS,
)
from megatron.training.startup import startup_line

CONSOLE_PREFIX = "console/"
"""Prefix of metrics for the console only."""

MEMORY_CAPACITY = f"{CONSOLE_PREFIX}mem-capacity-bytes"
TOTAL_ITERATIONS = f"{CONSOLE_PREFIX}total-iterations"
SECONDS_LEFT = f"{CONSOLE_PREFIX}seconds-left"
ON_GPU = f"{CONSOLE_PREFIX}on-gpu"
ENDS_RUN = f"{CONSOLE_PREFIX}ends-run"

MIN_SHOWN_SHARE = 0.005
"""Smallest share that is shown; whole percents would show smaller ones as 0%."""

SLOW_RANK_EXCESS = 0.03
"""The slowest rank is shown if its own time exceeds the median rank's by this share."""

GOODPUT_MIN_SECONDS = 600.0
"""Goodput is shown from this age of a run on; before, it mostly measures the start-up time."""


def _speed(tokens: float, metrics: Metrics, of_gpu: bool) -> str:
    """Format tokens per second: of one rank on GPUs, of all on CPUs."""
    return f"{format_compact(tokens)} tok/s{'/gpu' * of_gpu}" if metrics[ON_GPU] is of_gpu else ""


def _waits(total: float, metrics: Metrics) -> str:
    """Format the shares of the step by axes: ``(tp6 pp3 dp2)``. They add up to the total."""
    waits = {n: x for n, x in metrics_under("communication-", metrics).items() if n != "share"}
    scale = total / (sum(waits.values()) or 1.0)
    shown = [f"{axes}{x * scale * 100:.0f}" for axes, x in waits.items() if x * scale >= MIN_SHOWN_SHARE]
    return f"({' '.join(shown)})" if shown else ""


def _data(wait: float, metrics: Metrics, long: bool) -> str:
    share = wait / metrics["iteration-time"]
    return f"data {share:.0%}" if (share >= MIN_SHOWN_SHARE) is long else ""


def _memory(used: int, metrics: Metrics) -> str:
    rank = f" r{metrics['mem-max-rank']}" if "mem-max-rank" in metrics else ""
    return f"mem {format_memory(used, metrics[MEMORY_CAPACITY])}{rank}"


def _slow_rank(excess: float, metrics: Metrics) -> str:
    return f"slow r{metrics['slowest-rank']} +{excess:.0%}" if excess >= SLOW_RANK_EXCESS else ""


def _goodput(goodput: float, metrics: Metrics) -> str:
    """Format the goodput of a run that was started again, or of an older one that loses time."""
    lossy = metrics["run-seconds"] >= GOODPUT_MIN_SECONDS and goodput < 1 - MIN_SHOWN_SHARE
    return f"goodput {goodput:.1%}" if lossy or metrics["starts"] > 1 else ""


WAITS = "comm: share of waiting for other ranks, by axes"
COLUMNS = (
    Column("iteration", 0, 0, lambda x, m: f"{x:>{len(str(m[TOTAL_ITERATIONS]))}}/{m[TOTAL_ITERATIONS]}", "step/steps"),
    Column("consumed-tokens", 0, 5, lambda x, _: f"{format_compact(x)} tok", "tokens so far"),
    Column("phase", 0, 9, lambda x, _: str(x), "phase"),
    Column("lm loss", 1, 0, lambda x, _: f"loss {format_loss(x)}", "loss: mean since the last line"),
    Column("grad-norm", 1, 3, lambda x, _: f"gnorm {format_plain(x)}", "gnorm: norm of the gradient"),
    Column("learning-rate", 1, 6, lambda x, _: f"lr {format_exponent(x)}", "lr: learning rate"),
    *FEATURE_COLUMNS,
    Column(
        "loss-scale", 6, 7, lambda x, _: "" if x == 1 else f"scale {format_compact(x)}", "scale: of the loss in fp16"
    ),
    Column("iteration-time", 2, 4, lambda x, _: format_step_time(x), "time of a step"),
    Column(
        "tokens-per-second", 2, 2, lambda x, m: "" if m[ON_GPU] else f"{format_compact(x)} tok/s", "tokens per second"
    ),
    Column("tokens-per-second-per-gpu", 2, 2, partial(_speed, of_gpu=True), "the same of a GPU"),
    Column("mfu", 2, 3, lambda x, _: "" if x is None else f"MFU {x:.1%}", "MFU: share of the peak FLOP/s"),
    Column("skipped-iterations-count", 7, 1, lambda x, _: f"skipped {x}" if x else "", "skipped: updates left out"),
    Column(
        "communication-share", 3, 6, lambda x, _: f"comm {x:.0%}", "comm: share of waiting for other ranks, by axes"
    ),
    Column("communication-share", 3, 10, _waits, "comm: share of waiting for other ranks, by axes"),
    Column("bubble", 3, 5, lambda x, _: f"bubble {x:.1%}", "bubble: of the pipeline"),
    Column("data-wait", 3, 9, partial(_data, long=False), "data: share of waiting for data"),
    Column("data-wait", 3, 4, partial(_data, long=True), "data: share of waiting for data"),
    Column("slowest-rank-excess", 5, 7, _slow_rank, "slow: the slowest rank, over the median"),
    Column("mem-max-allocated-bytes", 4, 8, _memory, "mem: peak/capacity"),
    Column("goodput", 8, 8, _goodput, "goodput: share of time in steps that count"),
    Column(SECONDS_LEFT, 8, 2, lambda x, _: f"ETA {format_duration(x)}", "ETA: time left"),
)

METRICS = {
    "iteration": Metric("steps", "number of the step, from 1"),
    "consumed-samples": Metric("samples", "of all steps so far"),
    "consumed-tokens": Metric("tokens", "of all steps so far"),
    "phase": Metric("name", "of the phase, with `--phases` or `--phase-name`"),
    "lm loss": Metric("nats per token", "window: mean over its steps with a finite loss, skipped updates included"),
    "grad-norm": Metric("", "step: global gradient norm before clipping"),
    "learning-rate": Metric("", "step"),
    **LOSS_METRICS,
    "decoupled-learning-rate": Metric("", "step: of embedding and output layer, with `--decoupled-lr`"),
    "weight-decay": Metric("", "step"),
    "batch-size": Metric("samples", "step"),
    "loss-scale": Metric("", "step"),
    "iteration-time": Metric(
        "seconds per step",
        "window: wall time, without evaluations, saves, health reports and comparisons of weight copies",
    ),
    "tokens-per-second": Metric("tokens/s", "window: of all ranks together"),
    "tokens-per-second-per-gpu": Metric("tokens/s", "window: of one rank"),
    "throughput": Metric("TFLOP/s", "window: of one rank, as counted by Megatron-LM"),
    "mfu": Metric(
        "0 to 1",
        "window: [model FLOPs utilisation](performance.md#mfu-and-hfu) by 6N + 12Lhs; null if the peak is unknown",
    ),
    "mfu-causal": Metric("0 to 1", "window: utilisation that counts unmasked attention scores only"),
    "hfu": Metric("0 to 1", "window: utilisation including recomputation"),
    "skipped-iterations": Metric("list of steps", "window: with a skipped update; `metrics.jsonl` only"),
    "skipped-iterations-count": Metric("steps", "window: their number"),
    **UPDATE_METRICS,
    "communication-share": Metric("0 to 1", "window: sum of all `communication-AXES` as a share of the step"),
    "communication-AXES": Metric(
        "seconds per step", "window: waiting for other ranks, by `tp`, `dp`, ..., `world`; mean of the ranks"
    ),
    "sent-bytes-AXES": Metric(
        "bytes per step",
        "window: sent by a rank in [a ring](performance.md#bytes-on-the-wire), by the same axes, `pp` for pipeline "
        "neighbours; mean of the ranks",
    ),
    "bubble": Metric("0 to 1", "window: share of the step waiting for other ranks of the pipeline; mean of the ranks"),
    "data-wait": Metric("seconds per step", "window: waiting for micro-batches, on the slowest rank"),
    "slowest-rank": Metric("rank", "window: with the longest own time: the step less its waits for other ranks"),
    "slowest-rank-excess": Metric("0 to 1", "window: excess of that time over the median rank's"),
    "mem-max-allocated-bytes": Metric(
        "bytes", "peak so far on the fullest rank: allocated on its GPU, or resident on a CPU"
    ),
    "mem-max-rank": Metric("rank", "the fullest rank"),
    **POWER_METRICS,
    "goodput": Metric("0 to 1", "share of `run-seconds` spent in steps that were neither lost nor skipped"),
    "run-seconds": Metric("seconds", "since the run's first start"),
    "starts": Metric("", "of the run so far"),
    SECONDS_LEFT: Metric("seconds", "for the remaining samples"),
    "samples-digest": Metric("16 digits", "of all samples consumed: equal if two runs read the same"),
    "world-size": Metric("ranks", "number of ranks"),
    "TIMER-time": Metric("seconds per step", "window: longest of all ranks, with `--timing-log-level` 1 or higher"),
    "TIMER-time-min": Metric("seconds per step", "window: shortest, with `--timing-log-option minmax`"),
    "TIMER-time-by-rank": Metric("list of seconds", "window: of each rank, with `--timing-log-option all`"),
}
"""Every metric of a log line, by Megatron-LM's name where it has the metric.

"Step" is the last step, "window" all steps since the previous line. ``AXES`` and ``TIMER`` stand for mesh axes and for
the phases of ``distributed.timing.PHASES``. Metrics that do not apply, such as communication on one rank, are left out.
"""

EVALUATION_METRICS = {
    "lm loss validation": Metric("nats per token", "mean over `--eval-iters` batches"),
    "lm loss validation ppl": Metric("", "exp of the loss, if it is a cross-entropy"),
    **VALIDATION_METRICS,
    "validation-time": Metric("seconds", "that it took"),
    "validation-set": Metric("name", "which one, if there are several"),
}
"""Every metric of an evaluation; evaluations of test data have ``test`` in place of ``validation``."""


def print_line(text: str) -> None:
    """Print a line; ignore errors of the console, such as a full disk or a broken pipe."""
    with suppress(OSError):
        echo(text, flush=True)


def print_warning(text: str) -> None:
    """Print a warning to stderr, from any rank; ignore errors of the console."""
    with suppress(OSError):
        echo(f"warning: {redact(text)}", file=sys.stderr, flush=True)


class ConsoleLogger:
    """Prints one line per log step, evaluation, health report and event, and a legend after the start-up."""

    _explains = False  # the next log step
    _went_back = False

    def stepped(self, step: int) -> None:
        """Note that a step was taken."""

    def close(self) -> None:
        """Finish, before the program prints anything else."""

    def log(self, step: int, metrics: Metrics) -> None:
        """Print the metrics of a step."""
        if "lm loss" in metrics:
            if self._explains:
                print_line(f"legend: {legend_line(step, metrics)}")
                self._explains = False
            self.log_step(step, metrics)
            if (times := timing_line(metrics)) is not None:
                print_line(times)
        elif "lm loss validation" in metrics or "lm loss test" in metrics:
            print_line(evaluation_line(step, metrics))
        elif "health/update-ratio/total" in metrics:
            print_line(health_line(step, metrics))

    def log_step(self, step: int, metrics: Metrics) -> None:
        """Print the line of a log step."""
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
        with suppress(OSError):  # as in print_line; the line has numbers alone
            sys.stdout.write(f"{progress_line(step, metrics, width)}\n")
            sys.stdout.flush()

    def event(self, step: int, kind: str, fields: Metrics) -> None:
        """Print an event. Starts are in the summary of the run, and errors are printed when the process ends."""
        if kind in ("note", "stop", "samples", "rewind"):
            print_line(fields["text"])
        elif kind in ("warning", "incident") and not fields.get(ENDS_RUN):
            print_warning(fields["text"])
        elif kind == "control":
            (print_line if fields["done"] else print_warning)(fields["text"])
        elif kind == "start" and WENT_BACK in fields:
            self._went_back = True
        elif kind == "start-up" and not self._went_back:
            print_line(startup_line(fields["phases"], fields["slowest"]))
            self._explains = True
        elif kind == "checkpoint":
            size, seconds, blocking = fields["bytes"], fields["seconds"], fields["blocking-seconds"]
            speed = f"{format_bytes(size)} in {seconds:.1f}s, {format_bytes(size / seconds)}/s"
            blocked = "" if blocking == seconds else f", training stood still for {blocking:.2f}s"
            print_line(f"saved {fields['path']}: {speed}{blocked}")


def progress_line(step: int, metrics: Metrics, width: int | None = None) -> str:
    """Return the line of one log step, at most ``width`` characters wide (None: all columns of ``COLUMNS``).

    ``1240/95368 3.90B tok | loss 2.4137 gnorm .41 lr 6.0e-5 | 7.60s 404 tok/s/gpu MFU 44.0%``
    ``| comm 11% (tp6 pp3 dp2) data 0% | mem 27/80G r113 | slow r731 +4% | goodput 97.9% ETA 8d7h``

    Loss, time and speed are means over the steps since the previous line; the rest is of the last step. Columns of the
    second half are shown only if they apply: on several ranks, with a slow rank, after a restart.
    """
    shown = _columns(step, metrics)
    while True:
        line = _join(shown, " ")
        if width is None or len(line) <= width or len(shown) == 1:
            return line
        shown.remove(max(shown, key=lambda item: item[0].drop_order))


def legend_line(step: int, metrics: Metrics) -> str:
    """Return what the columns of a log step are, in their order."""
    known = {column.meaning: column for column, _ in _columns(step, metrics)}
    return _join([(column, meaning) for meaning, column in known.items()], ", ")


def _columns(step: int, metrics: Metrics) -> list[tuple[Column, str]]:
    """Return the columns that a log step has, with their texts."""
    values = {"iteration": step, **metrics}
    columns = [column for column in COLUMNS if column.metric in values]
    return [(column, text) for column in columns if (text := column.text(values[column.metric], values))]


def _join(columns: Sequence[tuple[Column, str]], separator: str) -> str:
    groups: dict[int, list[str]] = {}
    for column, text in sorted(columns, key=lambda item: item[0].group):
        groups.setdefault(column.group, []).append(text)
    return " | ".join(separator.join(texts) for texts in groups.values())


def timing_line(metrics: Metrics) -> str | None:
    """Return the line of the timers, in time per step, or None without timers.

    ``times: forward-backward 120ms to 131ms, optimizer 8.00ms to 9.10ms``: the shortest and longest over all ranks, the
    longest, or one time per rank, as set by ``--timing-log-option``.
    """
    texts = []
    for name in metrics:
        if name.endswith("-time") and name != "iteration-time":
            bounds = [metrics[key] for key in (f"{name}-min", name) if key in metrics]
            by_rank = metrics.get(f"{name}-by-rank")
            times = " to ".join(map(format_step_time, bounds))
            if by_rank is not None:
                times = " ".join(map(format_step_time, by_rank))
            texts.append(f"{name.removesuffix('-time')} {times}")
    return f"times: {', '.join(texts)}" if texts else None


def evaluation_line(step: int, metrics: Metrics) -> str:
    """Return the line of one evaluation."""
    kind = "test" if "lm loss test" in metrics else "validation"
    title = f"{kind} {metrics.get('validation-set', '')}".strip()
    loss = f"lm loss {kind}"
    perplexity = f" ppl {format_plain(metrics[f'{loss} ppl'])}" if f"{loss} ppl" in metrics else ""
    average = f" ema {format_loss(metrics[f'{loss} ema'])}" if f"{loss} ema" in metrics else ""
    tokens = format_compact(metrics["consumed-tokens"])
    return f"{title} at {step}: loss {format_loss(metrics[loss])}{perplexity}{average} ({tokens} tok)"


def health_line(step: int, metrics: Metrics) -> str:
    """Return the extreme values of a health report and their layers."""

    def layers(quantity: str) -> dict[str, float]:
        values = metrics_under(f"health/{quantity}/", metrics)
        values.pop("total", None)
        return values

    def maximum(quantity: str, formatted: Callable[[float], str] = format_plain) -> str:
        """Format as ``4.1e-3 layers.7``; NaN counts as the largest."""
        values = layers(quantity)
        layer = max(values, key=lambda name: (math.isnan(values[name]), values[name]))
        return f"{formatted(values[layer])} {layer}"

    norms = layers("grad-norm")
    low = min(norms, key=lambda layer: norms[layer])
    update = format_exponent(metrics["health/update-ratio/total"])
    gradient = f"gradient {format_plain(norms[low])} {low} to {maximum('grad-norm')}"
    largest = (f"{label} {maximum(quantity)}" for quantity, label in HEALTH_MAXIMA.items() if layers(quantity))
    most = maximum("update-ratio", format_exponent)
    return " | ".join((f"health at {step}: {gradient}", f"update {update}, most {most}", *largest))
