"""Short texts of numbers, for console lines, plots and reports."""

from __future__ import annotations

import math


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
