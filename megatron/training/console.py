"""Progress lines: compact numbers, and fewer columns where the terminal is narrow."""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron.training.records import EvaluationRecord, TrainRecord
from megatron.training.throughput import Yardstick


@dataclass(frozen=True)
class Column:
    """A piece of a line; columns of one group stand together, and the highest ``rank`` leaves first."""

    text: str
    group: int
    rank: int


def progress_line(record: TrainRecord, yardstick: Yardstick, width: int | None = None) -> str:
    """The line of one log step, at most ``width`` characters wide (None: all columns).

    ``1240/95368 3.90B tok | loss 2.4137 gnorm .41 lr 6.0e-5 | 7.60s 404 tok/s/gpu MFU 44.0% | mem 27/80G | ETA 8d7h``

    Loss, time and speed are means over the steps since the line before; all else is of the last of them.
    """
    total = str(yardstick.total_iterations)
    mfu = yardstick.mfu(record)
    columns = [
        Column(f"{record.iteration:>{len(total)}}/{total}", 0, 0),
        Column(f"{compact(record.consumed_tokens)} tok", 0, 5),
        Column(f"loss {loss(record.loss)}", 1, 0),
        Column(f"gnorm {plain(record.grad_norm)}", 1, 3),
        Column(f"lr {exponent(record.learning_rate)}", 1, 6),
        Column(step_time(record.seconds_per_step), 2, 4),
        Column(speed(record, yardstick), 2, 2),
    ]
    if mfu is not None:
        columns.append(Column(f"MFU {mfu:.1%}", 2, 3))
    if record.memory_bytes is not None and record.memory_total_bytes is not None:
        columns.append(Column(f"mem {memory(record.memory_bytes, record.memory_total_bytes)}", 3, 8))
    if record.loss_scale != 1:
        columns.append(Column(f"scale {compact(record.loss_scale)}", 4, 7))
    if record.skipped:
        columns.append(Column(f"skipped {len(record.skipped)}", 5, 1))
    columns.append(Column(f"ETA {duration(yardstick.seconds_left(record))}", 6, 2))
    return fit(columns, width)


def evaluation_line(record: EvaluationRecord) -> str:
    """The line of one evaluation."""
    return (
        f"{record.title} at {record.iteration}: loss {loss(record.loss)} ppl {plain(record.perplexity)}"
        f" ({compact(record.consumed_tokens)} tok)"
    )


def fit(columns: list[Column], width: int | None) -> str:
    """The columns as one line, the least important left out until it fits into ``width`` characters."""
    line = _join(columns)
    while width is not None and len(line) > width and len(columns) > 1:
        least = max(columns, key=lambda column: column.rank)
        columns = [column for column in columns if column is not least]
        line = _join(columns)
    return line


def _join(columns: list[Column]) -> str:
    groups: dict[int, list[str]] = {}
    for column in columns:
        groups.setdefault(column.group, []).append(column.text)
    return " | ".join(" ".join(texts) for texts in groups.values())


def loss(nats: float) -> str:
    """Four decimals; ``-`` where there is no finite loss to tell."""
    return f"{nats:.4f}" if math.isfinite(nats) else "-"


def speed(record: TrainRecord, yardstick: Yardstick) -> str:
    """Tokens per second: of one GPU, or of all CPU ranks together."""
    if yardstick.on_gpu:
        return f"{compact(record.tokens_per_second / yardstick.world_size)} tok/s/gpu"
    return f"{compact(record.tokens_per_second)} tok/s"


def compact(number: float, *, trim: bool = False) -> str:
    """Three digits and a power of a thousand: ``3.90B``, ``12.3K``, ``404``; ``trim`` drops zeros, ``3.9B``."""
    if abs(number) < 999.5 and number == int(number):
        return f"{number:.0f}"
    for unit in ("", "K", "M", "B", "T"):
        if abs(number) < 999.5 or unit == "T":
            break
        number /= 1000
    digits = three_digits(number)
    return (digits.rstrip("0").rstrip(".") if trim and "." in digits else digits) + unit


def three_digits(number: float) -> str:
    """Up to two decimals: ``1.23``, ``12.3``, ``123``."""
    decimals = 2 if abs(number) < 9.995 else 1 if abs(number) < 99.95 else 0
    return f"{number:.{decimals}f}"


def plain(number: float) -> str:
    """Three digits without a leading zero, as a power of ten where that would not do: ``.41``, ``12.3``, ``4.1e5``."""
    if not math.isfinite(number) or number == 0:
        return f"{number:.0f}"
    if not 0.01 <= abs(number) < 99_999.5:
        return exponent(number)
    return three_digits(number).removeprefix("0")


def exponent(number: float) -> str:
    """Two digits and a power of ten: ``6.0e-5``; ``0``."""
    if number == 0 or not math.isfinite(number):
        return f"{number:.0f}"
    digits, power = f"{number:.1e}".split("e")
    return f"{digits}e{int(power)}"


def step_time(seconds: float) -> str:
    """``7.60s``, or milliseconds below a tenth of a second."""
    return f"{three_digits(seconds)}s" if seconds >= 0.0995 else f"{three_digits(seconds * 1000)}ms"


def duration(seconds: float) -> str:
    """The two largest units, rounded: ``8d7h``, ``3h05m``, ``4m09s``, ``12s``."""
    for name, size, lower_name, lower in (("d", 86400, "h", 3600), ("h", 3600, "m", 60), ("m", 60, "s", 1)):
        rounded = round(seconds / lower) * lower
        if rounded >= size:
            rest = rounded % size // lower
            return f"{rounded // size}{name}{rest if name == 'd' else f'{rest:02d}'}{lower_name}"
    return f"{round(seconds)}s"


def memory(used_bytes: int, total_bytes: int) -> str:
    """Gibibytes: ``27/80G``, ``0.6/16G``."""
    used, total = used_bytes / 2**30, total_bytes / 2**30
    return f"{used:.{1 if used < 9.95 else 0}f}/{total:.0f}G"
