"""Common parts of benchmarks: options, rounds, tables, machine and versions of a measurement, folder of results."""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
"""One page and one file of figures for each benchmark."""

CLOCKS = {"wall": time.perf_counter, "processor": time.process_time}


def options(text: str | None, rounds: int | None = 5, clock: bool = False) -> argparse.ArgumentParser:
    """Return a parser with the options that benchmarks have in common.

    Args:
        text: the description.
        rounds: default of ``--repeats``; None for a benchmark without rounds.
        clock: add ``--clock``.
    """
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    if rounds is not None:
        parser.add_argument("--repeats", type=int, default=rounds, help="rounds")
    if clock:
        text = "processor: where others use the machine too"
        parser.add_argument("--clock", choices=CLOCKS, default="wall", help=text)
    parser.add_argument("--write", action="store_true", help="keep the result under benchmarks/results")
    return parser


def run(
    name: str,
    parser: argparse.ArgumentParser,
    argv: Sequence[str],
    measure: Callable[[argparse.Namespace], Mapping[str, Any]],
    page: Callable[[dict[str, Any]], str],
    packages: Sequence[str] = ("torch",),
    fixed: Sequence[str] = (),
) -> int:
    """Measure, print the page, and keep both with ``--write``; return the exit status.

    Args:
        name: of the files of results.
        parser: made by :func:`options`.
        argv: the command line.
        measure: returns the figures.
        page: returns the page of the figures with their conditions.
        packages: whose versions are kept.
        fixed: options whose defaults are the sizes of the committed results.
    """
    args = parser.parse_args(argv)
    if args.write and any(getattr(args, option) != parser.get_default(option) for option in fixed):
        flags = " and ".join(f"--{option.replace('_', '-')}" for option in fixed)
        parser.error(f"results are kept for the default size only: leave out --write, or {flags}")
    where: dict[str, Any] = {"load": round(os.getloadavg()[0], 1)}  # of the last minute: other work on the machine
    where |= {
        key: getattr(args, option) for option, key in (("repeats", "rounds"), ("clock", "clock")) if option in args
    }
    result = {**measure(args), **where, **machine(*packages)}
    print(page(result).rstrip("\n"))
    if args.write:
        keep(name, result, page(result))
    return 0


def check_same(contestants: Mapping[str, Callable[[], float]], tolerance: float) -> None:
    """Call each contestant once, which warms it up.

    Raises:
        RuntimeError: when their results differ by more than a relative ``tolerance``.
    """
    found = {name: act() for name, act in contestants.items()}
    first = next(iter(found.values()))
    if not all(math.isclose(value, first, rel_tol=tolerance) for value in found.values()):
        raise RuntimeError(f"the contestants do not compute the same: {found}")


def take_turns(
    contestants: Mapping[str, Callable[[], object]],
    rounds: int,
    clock: Callable[[], float] = time.perf_counter,
    together: Callable[[], object] = lambda: None,
) -> dict[str, list[float]]:
    """Return the seconds of each contestant, round by round; ``together`` is called before each measurement."""
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(rounds):
        for name, act in contestants.items():
            together()
            seconds[name].append(timed(act, clock))
    return seconds


def timed(act: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    """Return the seconds of a call."""
    start = clock()
    act()
    return clock() - start


def spread(values: Sequence[float]) -> list[float]:
    """Return ``[median, lowest, highest]`` to four digits."""
    return [float(f"{x:.4g}") for x in (statistics.median(values), min(values), max(values))]


def price(part: Callable[[], object], calls: int, rounds: int) -> list[float]:
    """Return microseconds of this thread in a call: median, lowest and highest over rounds, after a warm-up."""
    costs = []
    for _ in range(rounds + 1):
        start = time.thread_time()
        for _ in range(calls):
            part()
        costs.append((time.thread_time() - start) / calls * 1e6)
    return spread(costs[1:])


def ratios(above: Sequence[float], below: Sequence[float]) -> list[float]:
    """Return the spread over rounds of the quotients of neighbouring measurements."""
    return spread([a / b for a, b in zip(above, below)])


def table(heads: Sequence[object], rows: Iterable[Sequence[object]], align: str = "") -> list[str]:
    """Return the lines of a table in Markdown, after an empty one; in ``align``, ``r`` is a column of numbers."""
    lines = ["".join("| " if cell == "" else f"| {cell} " for cell in cells) + "|" for cells in (heads, *rows)]
    rule = "".join("|--:" if kind == "r" else "|---" for kind in align.ljust(len(heads)))
    return ["", lines[0], f"{rule}|", *lines[1:]]


def spreads(head: str, found: Mapping[str, Sequence[float]], style: str = ".2f") -> list[str]:
    """Return a table of ``[median, lowest, highest]`` by name."""
    rows = [[name, *(f"{x:{style}}" for x in values)] for name, values in found.items()]
    return table([head, "median", "lowest", "highest"], rows)


def processor() -> str:
    """Return the name of the processor and the number of cores."""
    name, info = platform.processor(), Path("/proc/cpuinfo")
    if info.exists():  # elsewhere, Linux gives only the architecture
        named = [line.split(":")[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
        name = named[0] if named else name
    return f"{name}, {os.cpu_count()} cores"


def versions(*packages: str) -> dict[str, str]:
    """Return the versions of Python and of the packages."""
    return {"python": platform.python_version()} | {name: version(name) for name in packages}


def machine(*packages: str) -> dict[str, str]:
    """Return the processor and :func:`versions`."""
    return {"processor": processor()} | versions(*packages)


def conditions(result: Mapping[str, Any], *packages: str) -> str:
    """Return the end of a page: processor, load before the start, and versions (of torch if no package is named)."""
    shown = ", ".join(f"{name} {result[name]}" for name in ("python", *(packages or ("torch",))))
    return f"{result['processor']}, load {result['load']:.1f} before the start; {shown}."


def rounds_of(result: Mapping[str, Any]) -> str:
    """Return how the figures of a page were taken."""
    return f"{result['rounds']} alternating rounds, {result['clock']} time"


def keep(name: str, result: Mapping[str, Any], page: str) -> None:
    """Write the figures of a benchmark and its page into the folder of results."""
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps(result, indent=2) + "\n")
    (RESULTS / f"{name}.md").write_text(page.rstrip("\n") + "\n")


def status_bytes(field: str) -> int:
    """Return a figure of this process in ``/proc/self/status``, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))


def reset_peak_memory() -> int:
    """Let the peak (``VmHWM``) start from the memory in use; return that, in bytes. Linux only."""
    Path("/proc/self/clear_refs").write_text("5")
    return status_bytes("VmRSS")
