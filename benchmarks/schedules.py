"""Speed of what a pipeline's schedule goes through before anything runs: made, given its communication, proved, timed.

    python -m benchmarks.schedules            # prints; --write keeps the result

By default 64 ranks and 512 micro-batches, with 8 stages on each rank where a schedule lets them be chosen: a million
and a half actions. Figures are microseconds per action of the program, sends and receives included; the last column is
the sum per action that computes. Each round rebuilds everything, with Python's garbage collector on as it is in a
run; its share is shown.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import io
import pstats
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from benchmarks.record import CLOCKS, options, run, table
from megatron.pipeline.communication import add_communication
from megatron.pipeline.schedules import SCHEDULES, make_schedule
from megatron.pipeline.simulate import StageCosts, simulate
from megatron.pipeline.validate import validate_program

TITLE = "# Schedules before they run: microseconds per action"
PASSES = ("made", "communication", "proof", "simulation")
COLLECTOR = "garbage collection"
LIMIT = 10.0
"""Microseconds per action that everything together should stay below."""


def stages_on_rank(name: str, chunks: int) -> int:
    """Return the stages per rank that the schedule needs, or ``chunks`` if it accepts any."""
    return SCHEDULES[name].chunks or chunks


def one_round(
    name: str, ranks: int, chunks: int, microbatches: int, clock: Callable[[], float]
) -> tuple[dict[str, float], int, int]:
    """Seconds of each pass, and of the garbage collector in all; how many actions, and how many that compute."""
    gc.collect()
    with collecting(clock) as collected:
        times = [clock()]
        schedule = make_schedule(name, ranks, chunks, microbatches)
        times.append(clock())
        program = add_communication(schedule)
        times.append(clock())
        validate_program(program)
        times.append(clock())
        simulate(program, StageCosts.uniform(ranks * chunks))
        times.append(clock())
    seconds = dict(zip(PASSES, (end - start for start, end in zip(times, times[1:]))))
    return seconds | {COLLECTOR: sum(collected)}, sum(map(len, program.ranks)), sum(map(len, schedule.ranks))


@contextmanager
def collecting(clock: Callable[[], float]) -> Iterator[list[float]]:
    """Collect the seconds of every garbage collection inside the block."""
    seconds: list[float] = []
    began = clock()

    def note(phase: str, _: object) -> None:
        nonlocal began
        if phase == "start":
            began = clock()
        else:
            seconds.append(clock() - began)

    gc.callbacks.append(note)
    try:
        yield seconds
    finally:
        gc.callbacks.remove(note)


def measure_one(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Sizes of a schedule, and by pass the microseconds per action of every round."""
    chunks = stages_on_rank(name, args.chunks)
    micros: dict[str, list[float]] = {column: [] for column in (*PASSES, COLLECTOR)}
    for _ in range(args.repeats):
        seconds, actions, computing = one_round(name, args.ranks, chunks, args.microbatches, CLOCKS[args.clock])
        for column, spent in seconds.items():
            micros[column].append(spent / actions * 1e6)
    return {"chunks": chunks, "actions": actions, "computing": computing, "micros": micros}


def total(row: Mapping[str, Any]) -> list[float]:
    """Microseconds per action of all passes together, by round."""
    return [sum(spent) for spent in zip(*(row["micros"][column] for column in PASSES))]


def page(result: Mapping[str, Any]) -> str:
    """Return the page of results."""
    figures = ("all", "lowest", "highest", f"of all, {COLLECTOR}", "all, per computing action")
    rows = []
    for name, row in result["schedules"].items():
        medians = {column: statistics.median(spent) for column, spent in row["micros"].items()}
        whole = total(row)
        whole = [statistics.median(whole), min(whole), max(whole)]
        shown = [f"{x:.2f}" for x in (*(medians[column] for column in PASSES), *whole, medians[COLLECTOR])]
        rows.append([name, row["chunks"], f"{row['actions']:,}", *shown])
        rows[-1].append(f"{whole[0] * row['actions'] / row['computing']:.1f}")
    above = [name for name, row in result["schedules"].items() if statistics.median(total(row)) > LIMIT]
    verdict = f"above {LIMIT:.0f} microseconds: {', '.join(above)}" if above else f"all below {LIMIT:.0f} microseconds"
    text = [
        TITLE,
        *table(("schedule", "stages on a rank", "actions", *PASSES, *figures), rows),
        "",
        f"{result['ranks']} ranks, {result['microbatches']} micro-batches; {verdict}. An action is one of the program: "
        "something computed, sent or received.",
        "",
        f"Median of {result['rounds']} rounds, {result['clock']} time; {result['processor']}, "
        f"load {result['load']:.1f} before the start; python {result['python']}.",
    ]
    return "\n".join(text)


def profile(name: str, args: argparse.Namespace) -> str:
    """Return the functions that take most of a round's time."""
    profiler = cProfile.Profile()
    profiler.runcall(
        one_round, name, args.ranks, stages_on_rank(name, args.chunks), args.microbatches, CLOCKS[args.clock]
    )
    text = io.StringIO()
    pstats.Stats(profiler, stream=text).sort_stats("tottime").print_stats(15)
    return text.getvalue()


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of all schedules."""
    found = {name: measure_one(name, args) for name in args.schedules}
    return {"schedules": found, "ranks": args.ranks, "microbatches": args.microbatches}


def main(argv: Sequence[str]) -> int:
    """Run the benchmark."""
    parser = options(__doc__, clock=True)
    parser.add_argument("--schedules", nargs="+", choices=SCHEDULES, default=list(SCHEDULES))
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--chunks", type=int, default=8, help="stages on each rank, where they can be chosen")
    parser.add_argument("--microbatches", type=int, default=512)
    parser.add_argument("--profile", action="store_true", help="show where the time goes instead")
    args = parser.parse_args(argv)
    if args.profile:
        print("\n".join(profile(name, args) for name in args.schedules))
        return 0
    return run("schedules", parser, argv, measure, page, packages=())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
