"""Console lines of a run: compact numbers, and fewer columns on narrow terminals."""

from __future__ import annotations

import math
import shutil
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress

from megatron.config.privacy import redact
from megatron.config.text import echo, format_bytes
from megatron.training.loggers.base import LEGEND, METRICS, Column, Metrics, metrics_under
from megatron.training.loggers.formatting import (
    format_compact,
    format_exponent,
    format_loss,
    format_plain,
    format_step_time,
)
from megatron.training.startup import startup_line


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
        print_line(progress_line(step, metrics, width))

    def event(self, step: int, kind: str, fields: Metrics) -> None:
        """Print an event. Starts are in the summary of the run, and errors are printed when the process ends."""
        if kind in ("note", "stop", "samples"):
            print_line(fields["text"])
        elif kind == "warning":
            print_warning(fields["text"])
        elif kind == "start-up":
            print_line(startup_line(fields["phases"], fields["slowest"]))
            self._explains = True
        elif kind == "checkpoint":
            size, seconds, blocking = fields["bytes"], fields["seconds"], fields["blocking-seconds"]
            speed = f"{format_bytes(size)} in {seconds:.1f}s, {format_bytes(size / seconds)}/s"
            blocked = "" if blocking == seconds else f", training stood still for {blocking:.2f}s"
            print_line(f"saved {fields['path']}: {speed}{blocked}")


def progress_line(step: int, metrics: Metrics, width: int | None = None) -> str:
    """Return the line of one log step, at most ``width`` characters wide (None: all columns of ``METRICS``).

    ``1240/95368 3.90B tok | loss 2.4137 gnorm .41 lr 6.0e-5 | 7.60s 404 tok/s/gpu MFU 44.0%``
    ``| comm 11% (tp6 pp3 dp2) data 0% | mem 27/80G r113 | slow r731 +4% | goodput 97.9% ETA 8d7h``

    Loss, time and speed are means over the steps since the previous line; the rest is of the last step. Columns of the
    second half are shown only if they apply: on several ranks, with a slow rank, after a restart.
    """
    shown = [(column, text) for _, column, text in _columns(step, metrics)]
    while True:
        line = _join(shown, " ")
        if width is None or len(line) <= width or len(shown) == 1:
            return line
        shown.remove(max(shown, key=lambda item: item[0].drop_order))


def legend_line(step: int, metrics: Metrics) -> str:
    """Return what the columns of a log step are, in their order."""
    known = {LEGEND[name]: column for name, column, _ in _columns(step, metrics)}
    return _join([(column, text) for text, column in known.items()], ", ")


def _columns(step: int, metrics: Metrics) -> list[tuple[str, Column, str]]:
    """Return the columns that a log step has, with the names of their metrics and their texts."""
    values = {"iteration": step, **metrics}
    columns = [(name, column) for name, metric in METRICS.items() for column in metric.columns if name in values]
    return [(name, column, text) for name, column in columns if (text := column.text(values))]


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
    return (
        f"health at {step}: gradient {format_plain(norms[low])} {low} to {maximum('grad-norm')}"
        f" | update {update}, most {maximum('update-ratio', format_exponent)}"
        f" | activations {maximum('activation-rms')} | attention logit {maximum('attention-logit')}"
        + (f" | busiest expert {maximum('expert-load')}" if layers("expert-load") else "")
    )
