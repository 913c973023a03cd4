"""Console lines of a run: compact numbers, and fewer columns on narrow terminals.

A line is a list of `ConsoleColumn`s in groups. If the terminal is too narrow, the columns with the highest
`drop_order` are left out. The `format_*` functions are also used by plots and health reports.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron.training.loggers.base import EvaluationRecord, TimerStats, TrainRecord
from megatron.training.throughput import ThroughputModel


@dataclass(frozen=True)
class ConsoleColumn:
    """A column of a console line. Groups are separated by ``|``."""

    text: str
    group: int
    drop_order: int  # on a narrow terminal, the column with the highest number is dropped first


MIN_SHOWN_SHARE = 0.005
"""Smallest share that is shown; whole percents would show smaller ones as 0%."""

ROUTER_LABELS = {"load_balancing_loss": "balance", "seq_load_balancing_loss": "balance", "z_loss": "router z"}
"""Column titles of the MoE router losses."""

SLOW_RANK_EXCESS = 0.03
"""The slowest rank is shown if its own time exceeds the median rank's by this share."""

GOODPUT_MIN_SECONDS = 600.0
"""Goodput is shown from this age of a run on; before, it mostly measures the start-up time."""


def progress_line(record: TrainRecord, throughput_model: ThroughputModel, width: int | None = None) -> str:
    """Return the line of one log step, at most ``width`` characters wide (None: all columns).

    ``1240/95368 3.90B tok | loss 2.4137 gnorm .41 lr 6.0e-5 | 7.60s 404 tok/s/gpu MFU 44.0%``
    ``| comm 11% (tp6 pp3 dp2) data 0% | mem 27/80G r113 | slow r731 +4% | goodput 97.9% ETA 8d7h``

    Loss, time and speed are means over the steps since the previous line; the rest is of the last step. Columns of the
    second half are shown only if they apply: on several ranks, with a slow rank, after a restart.
    """
    total = str(throughput_model.total_iterations)
    mfu = throughput_model.mfu(record)
    columns = [
        ConsoleColumn(f"{record.iteration:>{len(total)}}/{total}", 0, 0),
        ConsoleColumn(f"{format_compact(record.consumed_tokens)} tok", 0, 5),
        ConsoleColumn(f"loss {format_loss(record.loss)}", 1, 0),
        ConsoleColumn(f"gnorm {format_plain(record.grad_norm)}", 1, 3),
        ConsoleColumn(f"lr {format_exponent(record.learning_rate)}", 1, 6),
        ConsoleColumn(format_step_time(record.seconds_per_step), 2, 4),
        ConsoleColumn(format_speed(record, throughput_model), 2, 2),
    ]
    columns += [
        ConsoleColumn(f"{ROUTER_LABELS.get(name, name)} {format_loss(x)}", 1, 7)
        for name, x in record.router_losses.items()
    ]
    if mfu is not None:
        columns.append(ConsoleColumn(f"MFU {mfu:.1%}", 2, 3))
    columns += [*_wait_columns(record), *_rank_columns(record)]
    if record.loss_scale != 1:
        columns.append(ConsoleColumn(f"scale {format_compact(record.loss_scale)}", 6, 7))
    if record.skipped:
        columns.append(ConsoleColumn(f"skipped {len(record.skipped)}", 7, 1))
    if record.goodput is not None and _shows_goodput(record):
        columns.append(ConsoleColumn(f"goodput {record.goodput:.1%}", 8, 8))
    columns.append(ConsoleColumn(f"ETA {format_duration(throughput_model.seconds_left(record))}", 8, 2))
    return fit_columns(columns, width)


def _wait_columns(record: TrainRecord) -> list[ConsoleColumn]:
    """Return the shares of the step spent in communication, in pipeline bubbles and waiting for data."""
    columns = []
    if record.communication_share is not None:
        scale = record.communication_share / (sum(record.communication.values()) or 1.0)  # shares add up to the total
        shares = {axes: seconds * scale for axes, seconds in record.communication.items()}
        shown = [f"{axes}{share * 100:.0f}" for axes, share in shares.items() if share >= MIN_SHOWN_SHARE]
        columns.append(ConsoleColumn(f"comm {record.communication_share:.0%}", 3, 6))
        if shown:
            columns.append(ConsoleColumn(f"({' '.join(shown)})", 3, 10))
    if record.bubble is not None:
        columns.append(ConsoleColumn(f"bubble {record.bubble:.1%}", 3, 5))
    if record.data_wait is not None:
        share = record.data_wait / record.seconds_per_step
        columns.append(ConsoleColumn(f"data {share:.0%}", 3, 9 if share < MIN_SHOWN_SHARE else 4))
    return columns


def _rank_columns(record: TrainRecord) -> list[ConsoleColumn]:
    """Return the memory of the fullest rank, and the slowest rank if it delays the others."""
    columns = []
    if record.memory_bytes is not None and record.memory_total_bytes is not None:
        rank = "" if record.memory_rank is None else f" r{record.memory_rank}"
        columns.append(
            ConsoleColumn(f"mem {format_memory(record.memory_bytes, record.memory_total_bytes)}{rank}", 4, 8)
        )
    if record.slowest_excess is not None and record.slowest_excess >= SLOW_RANK_EXCESS:
        columns.append(ConsoleColumn(f"slow r{record.slowest_rank} +{record.slowest_excess:.0%}", 5, 7))
    return columns


def _shows_goodput(record: TrainRecord) -> bool:
    """Return True after a restart, or if the run loses time long after its start."""
    settled = record.run_seconds is not None and record.run_seconds >= GOODPUT_MIN_SECONDS
    lossy = record.goodput is not None and record.goodput < 1 - MIN_SHOWN_SHARE
    return (record.starts or 1) > 1 or (settled and lossy)


def timing_line(record: TrainRecord) -> str | None:
    """Return the line of the timers, in time per step, or None without timers.

    ``times: forward-backward 120ms to 131ms, optimizer 8.00ms to 9.10ms``: the shortest and longest over all ranks, the
    longest, or one time per rank, as set by ``--timing-log-option``.
    """
    texts = [f"{name} {format_timing(times)}" for name, times in record.timings.items()]
    return f"times: {', '.join(texts)}" if texts else None


def format_timing(times: TimerStats) -> str:
    """Format as ``8.00ms to 9.10ms``, as ``9.10ms``, or as one time per rank."""
    if times.by_rank is not None:
        return " ".join(map(format_step_time, times.by_rank))
    low = "" if times.shortest is None else f"{format_step_time(times.shortest)} to "
    return low + format_step_time(times.longest)


def evaluation_line(record: EvaluationRecord) -> str:
    """Return the line of one evaluation."""
    average = "" if record.average is None else f" ema {format_loss(record.average)}"
    return (
        f"{record.title} at {record.iteration}: loss {format_loss(record.loss)} "
        f"ppl {format_plain(record.perplexity)}{average}"
        f" ({format_compact(record.consumed_tokens)} tok)"
    )


def fit_columns(columns: list[ConsoleColumn], width: int | None) -> str:
    """Join the columns into one line; drop the least important ones until it fits into ``width`` characters."""
    line = _join(columns)
    while width is not None and len(line) > width and len(columns) > 1:
        dropped = max(columns, key=lambda column: column.drop_order)
        columns = [column for column in columns if column is not dropped]
        line = _join(columns)
    return line


def _join(columns: list[ConsoleColumn]) -> str:
    groups: dict[int, list[str]] = {}
    for column in columns:
        groups.setdefault(column.group, []).append(column.text)
    return " | ".join(" ".join(texts) for texts in groups.values())


def format_loss(nats: float) -> str:
    """Format with four decimals; ``-`` if not finite."""
    return f"{nats:.4f}" if math.isfinite(nats) else "-"


def format_speed(record: TrainRecord, throughput_model: ThroughputModel) -> str:
    """Format tokens per second: per GPU, or of all CPU ranks together."""
    if throughput_model.on_gpu:
        return f"{format_compact(record.tokens_per_second / throughput_model.world_size)} tok/s/gpu"
    return f"{format_compact(record.tokens_per_second)} tok/s"


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
