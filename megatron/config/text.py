"""Parts of messages: formatted numbers and bytes, and values to suggest in place of wrong ones; printing them."""

from __future__ import annotations

import ast
import logging
import math
import os
import re
import shlex
import tomllib
from collections.abc import Iterable, Sequence
from difflib import SequenceMatcher
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import TextIO

CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Characters that control a terminal or reverse a text, except tab and line end; and parts of no character."""


def printable(text: str) -> str:
    """Return a text with control characters escaped, as \\x1b. Names in files may contain any."""
    return CONTROL.sub(lambda found: ascii(found[0])[1:-1], text)


def echo(*values: object, sep: str = " ", end: str = "\n", file: TextIO | None = None, flush: bool = False) -> None:
    """Print texts in which names from files may occur, as ``print`` does but `printable`."""
    print(printable(sep.join(map(str, values))), end=end, file=file, flush=flush)


class PrintableRecord(logging.LogRecord):
    """A log message whose names from files are `printable`."""

    def getMessage(self) -> str:  # noqa: N802
        """Return the message."""
        return printable(super().getMessage())


def escape_library_logs() -> None:
    """Make messages printable that libraries log in this process, such as those of transformers on its files."""
    if logging.getLogRecordFactory() is logging.LogRecord:
        logging.setLogRecordFactory(PrintableRecord)


def shell_word(word: str) -> str:
    """Quote a word for bash, on one line and without control characters, which :func:`echo` would change."""
    if printable(word) == word and "\n" not in word:
        return shlex.quote(word)
    characters = (chr(byte) if chr(byte).isalnum() and byte < 0x80 else f"\\x{byte:02x}" for byte in os.fsencode(word))
    return f"$'{''.join(characters)}'"


def did_you_mean(word: str, known: Iterable[str]) -> str | None:
    """Return the one known name that ``word`` is a misspelling of, or None.

    At most one character in five differs, and no other name is as near. A different name is no misspelling, however
    much of it is the same: numbers, negation and the count of words are equal, and no word that differs is one of
    another name.
    """
    names, (parts, *shape) = [*known], _shape(word)
    vocabulary, letters = {part for name in names for part in _shape(name)[0]}, "".join(parts)
    distances = {}
    for name in names:
        words, *other = _shape(name)
        meant = "".join(words)
        if meant == letters:  # only hyphens differ
            return name
        same_words = all(typed == part or typed not in vocabulary for typed, part in zip(parts, words))
        if shape == other and same_words and letters.startswith("no") <= meant.startswith("no"):
            edits = SequenceMatcher(None, letters, meant, autojunk=False).get_opcodes()
            differing = sum(max(i2 - i1, j2 - j1) for tag, i1, i2, j1, j2 in edits if tag != "equal")
            swapped = sorted(letters) == sorted(meant)  # two letters changed places
            distances[name] = 1 if swapped else differing if differing <= max(1, len(meant) // 5) else math.inf
    least = min(distances.values(), default=math.inf)
    closest = [name for name, distance in distances.items() if distance == least < math.inf]
    return closest[0] if len(closest) == 1 else None


def _shape(name: str) -> tuple[list[str], list[str], bool, int]:
    """Return the words of a name, and what a misspelling does not change: numbers, negation, and the count of words."""
    parts = re.split(r"[-_]+", name.lower())
    negated = re.match(r"-*(no|disable|skip)[-_]", name) is not None
    return parts, re.findall(r"\d+", name), negated, len(parts)


def nearest(value: int, among: Iterable[int]) -> list[int]:
    """Return the nearest of ``among`` below ``value`` and the nearest above it."""
    numbers = sorted(among)
    return [*[n for n in numbers if n < value][-1:], *[n for n in numbers if n > value][:1]]


def nearest_multiples(value: int, of: int) -> list[int]:
    """Return the nearest positive multiples of ``of`` below and above ``value``."""
    return nearest(value, (n for n in (value // of * of, (value // of + 1) * of, (-(-value // of) - 1) * of) if n > 0))


MAX_TRIED = 1_000_000  # trial divisors; bounds the time for a mistyped number of 30 digits


def divisors(of: int) -> list[int]:
    """Return all divisors, ascending; above ``MAX_TRIED`` squared only those that pair with a smaller one."""
    small = [d for d in range(1, min(math.isqrt(of), MAX_TRIED) + 1) if of % d == 0]
    return sorted({*small, *(of // d for d in small)})


def flag(name: str) -> str:
    """Return the flag of a field: ``hidden_size`` -> ``--hidden-size``."""
    return "--" + name.replace("_", "-")


def flag_fixes(flag: str, numbers: Iterable[int]) -> tuple[str, ...]:
    """Return one fix for each number."""
    return tuple(f"{flag} {n}" for n in numbers)


def multiples_as_fixes(flag: str, value: int, of: int) -> tuple[str, ...]:
    """Return the flags that set the nearest multiples of ``of`` in place of ``value``."""
    return flag_fixes(flag, nearest_multiples(value, of))


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: ``1 batch``, ``2 batches``, ``1,000 steps``."""
    plural = "" if number == 1 else "es" if noun.endswith("ch") else "s"
    return f"{number:,} {noun}{plural}"


def format_number(number: float) -> str:
    """Return the shortest text that reads back as the same number."""
    short = f"{number:g}"
    return short if float(short) == number else repr(number).removesuffix(".0")


def format_bytes(count: float) -> str:
    """Format a number of bytes in powers of 1024: ``812 bytes``, ``43.30 KiB``, ``12.50 MiB``, ``1.87 GiB``."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if count >= unit:
            return f"{count / unit:,.2f} {name}"
    return f"{round(count)} byte{'' if round(count) == 1 else 's'}"


LONGEST_ITEM, LONGEST_SENTENCE = 500, 10_000
"""Characters of an item and of a sentence in a message; names in files may have any number."""


def clipped(item: object, most: int = LONGEST_ITEM) -> str:
    """Return the text of an item, or of a sentence; of one that is too long the beginning."""
    text = str(item)
    return text if len(text) <= most else f"{text[:most]}..."


def listed(items: Sequence[object], most: int = 4) -> str:
    """Return the first items: ``a, b, c, d and 5 more``."""
    more = f" and {len(items) - most:,} more" if len(items) > most else ""
    return ", ".join(map(clipped, items[:most])) + more


def listed_ranks(ranks: Sequence[int], most: int = 4) -> str:
    """Return the first ranks with their noun: ``rank 1``, or ``ranks 0, 1, 2, 3 and 5 more``."""
    return f"rank{'s' if len(ranks) > 1 else ''} {listed(ranks, most)}"


@cache
def package_version() -> str:
    """Return the name and version of this package, installed or in a checkout."""
    from importlib import metadata  # slow to import, and seldom needed

    project = Path(__file__).resolve().parents[2] / "pyproject.toml"
    if project.exists():
        return f"megatron-pretrain {tomllib.loads(project.read_text())['project']['version']}"
    return f"megatron-pretrain {metadata.version('megatron-pretrain')}"


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


def _layer_list(node: ast.expr, longest: int) -> list[int]:
    """Evaluate sums and multiples of lists of 0 and 1; ValueError for other expressions."""
    match node:
        case ast.List(elts=items) if all(isinstance(item, ast.Constant) and item.value in (0, 1) for item in items):
            return [int(ast.literal_eval(item)) for item in items]
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _layer_list(left, longest) + _layer_list(right, longest)
        case ast.BinOp(left=left, op=ast.Mult(), right=ast.Constant(value=int(times))):
            layers = _layer_list(left, longest)
            if len(layers) * times <= longest:
                return layers * times
    raise ValueError


@cache
def selected_layers(text: str, longest: int, first: bool) -> tuple[int, ...]:
    """Parse ``N``, which selects a layer of every N, or a list such as ``([0]*3+[1]*1)*9``; return 1 for the selected.

    Args:
        text: to parse.
        longest: most entries of the list.
        first: ``N`` selects the first of every N layers, not the last.

    Raises:
        ValueError: for anything else.
    """
    if text.isdecimal() and 0 < int(text) <= longest:
        others = (0,) * (int(text) - 1)
        return (1, *others) if first else (*others, 1)
    try:
        layers = _layer_list(ast.parse(text.strip(), mode="eval").body, longest)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        layers = []
    if not layers:
        raise ValueError(f"{text!r} is neither a number of layers nor a list of 0 and 1, such as ([0]*3+[1]*1)*9")
    return tuple(layers)


def format_selected_layers(layers: Sequence[int]) -> str:
    """Return a text for which :func:`selected_layers`, with ``first``, selects the layers that are not 0."""
    for period in range(1, len(layers) + 1):
        if all(bool(flag) == (n % period == 0) for n, flag in enumerate(layers)):
            return str(period)
    runs = ((int(flag), len([*run])) for flag, run in groupby(map(bool, layers)))
    return "+".join(f"[{flag}]*{length}" for flag, length in runs)
