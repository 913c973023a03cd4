"""Console lines of a run: compact numbers, and fewer columns on narrow terminals.

A line is a list of `ConsoleColumn`s in groups. If the terminal is too narrow, the columns with the highest
`drop_order` are left out. The `format_*` functions are also used by plots and health reports.
"""

from __future__ import annotations

import math
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from megatron.config.errors import format_bytes
from megatron.training.loggers.base import MEMORY_CAPACITY, Metrics
from megatron.training.startup import startup_line

if TYPE_CHECKING:  # its module imports torch, which tools that draw plots do without
    from megatron.training.metrics import ThroughputModel

MIN_SHOWN_SHARE = 0.005
"""Smallest share that is shown; whole percents would show smaller ones as 0%."""

ROUTER_LABELS = {"load_balancing_loss": "balance", "seq_load_balancing_loss": "balance", "z_loss": "router z"}
"""Column titles of the MoE router losses."""

SLOW_RANK_EXCESS = 0.03
"""The slowest rank is shown if its own time exceeds the median rank's by this share."""

GOODPUT_MIN_SECONDS = 600.0
"""Goodput is shown from this age of a run on; before, it mostly measures the start-up time."""


def print_line(text: str) -> None:
    """Print a line; ignore errors of the console, such as a full disk or a broken pipe."""
    with suppress(OSError):
        print(text, flush=True)


def print_warning(text: str) -> None:
    """Print a warning to stderr, from any rank; ignore errors of the console."""
    with suppress(OSError):
        print(f"warning: {text}", file=sys.stderr, flush=True)


class ConsoleLogger:
    """Prints one line per log step, evaluation, health report and event."""

    def __init__(self, throughput_model: ThroughputModel) -> None:
        self._throughput_model = throughput_model

    def log(self, step: int, metrics: Metrics) -> None:
        """Print the metrics of a step."""
        if "lm loss" in metrics:
            width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
            print_line(progress_line(step, metrics, self._throughput_model, width))
            if (times := timing_line(metrics)) is not None:
                print_line(times)
        elif "lm loss validation" in metrics or "lm loss test" in metrics:
            print_line(evaluation_line(step, metrics))
        elif "health/update-ratio/total" in metrics:
            print_line(health_line(step, metrics))

    def event(self, step: int, kind: str, fields: Metrics) -> None:
        """Print an event. Starts are in the summary of the run, and errors are printed when the process ends."""
        if kind in ("note", "stop"):
            print_line(fields["text"])
        elif kind == "warning":
            print_warning(fields["text"])
        elif kind == "start-up":
            print_line(startup_line(fields["phases"], fields["slowest"]))
        elif kind == "checkpoint":
            size, seconds, blocking = fields["bytes"], fields["seconds"], fields["blocking-seconds"]
            speed = f"{format_bytes(size)} in {seconds:.1f}s, {format_bytes(size / seconds)}/s"
            blocked = "" if blocking == seconds else f", training stood still for {blocking:.2f}s"
            print_line(f"saved {fields['path']}: {speed}{blocked}")


class ConsoleColumn(NamedTuple):
    """A column of a console line."""

    group: int  # groups are separated by ``|``
    drop_order: int  # on a narrow terminal, the column with the highest number is dropped first
    text: str


def progress_line(step: int, metrics: Metrics, throughput_model: ThroughputModel, width: int | None = None) -> str:
    """Return the line of one log step, at most ``width`` characters wide (None: all columns).

    ``1240/95368 3.90B tok | loss 2.4137 gnorm .41 lr 6.0e-5 | 7.60s 404 tok/s/gpu MFU 44.0%``
    ``| comm 11% (tp6 pp3 dp2) data 0% | mem 27/80G r113 | slow r731 +4% | goodput 97.9% ETA 8d7h``

    Loss, time and speed are means over the steps since the previous line; the rest is of the last step. Columns of the
    second half are shown only if they apply: on several ranks, with a slow rank, after a restart.
    """
    eta = ConsoleColumn(8, 2, f"ETA {format_duration(throughput_model.seconds_left(metrics))}")
    return fit_columns([*_training_columns(step, metrics, throughput_model), *_rank_columns(metrics), eta], width)


def _training_columns(step: int, metrics: Metrics, throughput_model: ThroughputModel) -> Iterator[ConsoleColumn]:
    """Yield progress, loss and speed."""
    total = str(throughput_model.total_iterations)
    yield ConsoleColumn(0, 0, f"{step:>{len(total)}}/{total}")
    yield ConsoleColumn(0, 5, f"{format_compact(metrics['consumed-tokens'])} tok")
    yield ConsoleColumn(1, 0, f"loss {format_loss(metrics['lm loss'])}")
    yield ConsoleColumn(1, 3, f"gnorm {format_plain(metrics['grad-norm'])}")
    yield ConsoleColumn(1, 6, f"lr {format_exponent(metrics['learning-rate'])}")
    for name, label in ROUTER_LABELS.items():
        if name in metrics:
            yield ConsoleColumn(1, 7, f"{label} {format_loss(metrics[name])}")
    yield ConsoleColumn(2, 4, format_step_time(metrics["iteration-time"]))
    ranks, unit = (throughput_model.world_size, "tok/s/gpu") if throughput_model.on_gpu else (1, "tok/s")
    yield ConsoleColumn(2, 2, f"{format_compact(metrics['tokens-per-second'] / ranks)} {unit}")
    if (mfu := metrics.get("mfu")) is not None:
        yield ConsoleColumn(2, 3, f"MFU {mfu:.1%}")
    if metrics["loss-scale"] != 1:
        yield ConsoleColumn(6, 7, f"scale {format_compact(metrics['loss-scale'])}")
    if skipped := len(metrics["skipped-iterations"]):
        yield ConsoleColumn(7, 1, f"skipped {skipped}")


def _rank_columns(metrics: Metrics) -> Iterator[ConsoleColumn]:
    """Yield waits for other ranks and for data, memory of the fullest rank, a slow rank, and goodput."""
    if (total := metrics.get("communication-share")) is not None:
        waits = _without_prefix(metrics, "communication-")
        del waits["share"]
        scale = total / (sum(waits.values()) or 1.0)  # shares add up to the total
        shown = [f"{axes}{x * scale * 100:.0f}" for axes, x in waits.items() if x * scale >= MIN_SHOWN_SHARE]
        yield ConsoleColumn(3, 6, f"comm {total:.0%}")
        if shown:
            yield ConsoleColumn(3, 10, f"({' '.join(shown)})")
    if "bubble" in metrics:
        yield ConsoleColumn(3, 5, f"bubble {metrics['bubble']:.1%}")
    if "data-wait" in metrics:
        share = metrics["data-wait"] / metrics["iteration-time"]
        yield ConsoleColumn(3, 9 if share < MIN_SHOWN_SHARE else 4, f"data {share:.0%}")
    used, capacity = metrics.get("mem-max-allocated-bytes"), metrics.get(MEMORY_CAPACITY)
    if used is not None and capacity is not None:
        rank = f" r{metrics['mem-max-rank']}" if "mem-max-rank" in metrics else ""
        yield ConsoleColumn(4, 8, f"mem {format_memory(used, capacity)}{rank}")
    if metrics.get("slowest-rank-excess", 0.0) >= SLOW_RANK_EXCESS:
        yield ConsoleColumn(5, 7, f"slow r{metrics['slowest-rank']} +{metrics['slowest-rank-excess']:.0%}")
    if (goodput := metrics.get("goodput")) is not None:
        lossy = metrics.get("run-seconds", 0.0) >= GOODPUT_MIN_SECONDS and goodput < 1 - MIN_SHOWN_SHARE
        if lossy or metrics.get("starts", 1) > 1:
            yield ConsoleColumn(8, 8, f"goodput {goodput:.1%}")


def _without_prefix(metrics: Metrics, prefix: str) -> dict[str, float]:
    return {name.removeprefix(prefix): x for name, x in metrics.items() if name.startswith(prefix)}


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
    average = f" ema {format_loss(metrics[f'{loss} ema'])}" if f"{loss} ema" in metrics else ""
    return (
        f"{title} at {step}: loss {format_loss(metrics[loss])} ppl {format_plain(metrics[f'{loss} ppl'])}{average}"
        f" ({format_compact(metrics['consumed-tokens'])} tok)"
    )


def health_line(step: int, metrics: Metrics) -> str:
    """Return the extreme values of a health report and their layers."""

    def layers(quantity: str) -> dict[str, float]:
        values = _without_prefix(metrics, f"health/{quantity}/")
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


def fit_columns(columns: list[ConsoleColumn], width: int | None) -> str:
    """Join the columns into one line; drop the least important ones until it fits into ``width`` characters."""
    while True:
        groups: dict[int, list[str]] = {}
        for column in sorted(columns, key=lambda column: column.group):
            groups.setdefault(column.group, []).append(column.text)
        line = " | ".join(" ".join(texts) for texts in groups.values())
        if width is None or len(line) <= width or len(columns) == 1:
            return line
        columns.remove(max(columns, key=lambda column: column.drop_order))


def format_loss(nats: float) -> str:
    """Format with four decimals; ``-`` if not finite."""
    return f"{nats:.4f}" if math.isfinite(nats) else "-"


def format_compact(number: float, *, trim: bool = False) -> str:
    """Format with three digits and a unit: ``3.90B``, ``12.3K``, ``404``; ``trim`` drops trailing zeros: ``3.9B``."""
    if abs(number) < 999.5 and number == int(number):
        return f"{number:.0f}"
    for unit in ("", "K", "M", "B", "T"):
        if abs(number) < 999.5 or unit == "T":
            break
        number /= 1000
    digits = format_three_digits(number)
    return (digits.rstrip("0").rstrip(".") if trim and "." in digits else digits) + unit


def format_three_digits(number: float) -> str:
    """Format with up to two decimals: ``1.23``, ``12.3``, ``123``."""
    decimals = 2 if abs(number) < 9.995 else 1 if abs(number) < 99.95 else 0
    return f"{number:.{decimals}f}"


def format_plain(number: float) -> str:
    """Format with three digits and no leading zero, or in scientific notation: ``.41``, ``12.3``, ``4.1e5``."""
    if not math.isfinite(number) or number == 0:
        return f"{number:.0f}"
    if not 0.01 <= abs(number) < 99_999.5:
        return format_exponent(number)
    return format_three_digits(number).removeprefix("0")


def format_exponent(number: float) -> str:
    """Format in scientific notation with two digits: ``6.0e-5``; ``0``."""
    if number == 0 or not math.isfinite(number):
        return f"{number:.0f}"
    digits, power = f"{number:.1e}".split("e")
    return f"{digits}e{int(power)}"


def format_step_time(seconds: float) -> str:
    """Format as ``7.60s``, or as ``76.0ms`` below a tenth of a second."""
    return f"{format_three_digits(seconds)}s" if seconds >= 0.0995 else f"{format_three_digits(seconds * 1000)}ms"


def format_duration(seconds: float) -> str:
    """Format in the two largest units: ``8d7h``, ``3h05m``, ``4m09s``, ``12s``."""
    for name, size, lower_name, lower in (("d", 86400, "h", 3600), ("h", 3600, "m", 60), ("m", 60, "s", 1)):
        rounded = round(seconds / lower) * lower
        if rounded >= size:
            rest = rounded % size // lower
            return f"{rounded // size}{name}{rest if name == 'd' else f'{rest:02d}'}{lower_name}"
    return f"{round(seconds)}s"


def format_memory(used_bytes: int, total_bytes: int) -> str:
    """Format used and total memory in GiB: ``27/80G``, ``0.6/16G``."""
    used, total = used_bytes / 2**30, total_bytes / 2**30
    return f"{used:.{1 if used < 9.95 else 0}f}/{total:.0f}G"
