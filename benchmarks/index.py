"""Speed of building sample indices, beside a literal step-by-step implementation of Megatron-LM's order.

    python -m benchmarks.index            # prints; --write keeps the result

Both sides build the same tables from the same lengths, are compared entry by entry, and alternate; a ratio is the
median over rounds. The larger shapes are ours alone: one process, one core, in memory, without a cache.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks import megatron_order
from benchmarks.record import keep, machine
from megatron.data import gpt_dataset
from megatron.data.blended_dataset import build_blend_index, normalize_weights
from megatron.data.gpt_dataset import SampleOrder, build_sample_order

TITLE = "# Laying out samples, one core, in memory"
CLOCKS = {"wall": time.perf_counter, "processor": time.process_time}
SEED = 1234

SHAPES = {
    "2 M sequences of 640, sample of 128": (2_000_000, 640, 128, 9_900_000),
    "1 M sequences of 20,000, sample of 1,024": (1_000_000, 20_000, 1024, 10_000_000),
    "0.5 M sequences of 50,000, sample of 4,096": (500_000, 50_000, 4096, 10_000_000),
    "10 M sequences of 1,000, sample of 4,096": (10_000_000, 1_000, 4096, 6_000_000),
}
"""Sequences, mean tokens of one, tokens of a sample, samples asked for."""

TABLES = ("documents", "samples", "shuffle")

BLENDS = {"2 sources": 2, "10 sources": 10, "50 sources": 50, "300 sources": 300}


def lengths(sequences: int, mean: int) -> NDArray[np.int32]:
    """Lengths as of web text: most are short, a few are very long."""
    drawn = np.random.RandomState(0).lognormal(np.log(mean) - 0.5, 1.0, sequences)
    return np.clip(drawn, 1, 2**30).astype(np.int32)


def weights_of(sources: int) -> list[float]:
    """Weights that differ."""
    return normalize_weights(np.random.RandomState(sources).random_sample(sources) + 0.1).tolist()


def take_turns(
    rounds: int, clock: Callable[[], float], ours: Callable[[], object], theirs: Callable[[], object]
) -> list[float]:
    """Return the time of ``theirs`` over ``ours`` in each round."""
    ratios = []
    for _ in range(rounds):
        seconds = [timed(clock, action) for action in (ours, theirs)]
        ratios.append(seconds[1] / seconds[0])
    return ratios


def timed(clock: Callable[[], float], action: Callable[[], object]) -> float:
    """Seconds an action takes."""
    start = clock()
    action()
    return clock() - start


def against_description(rounds: int, clock: Callable[[], float]) -> dict[str, list[float]]:
    """Ratios of one round after another, by what is made.

    Raises:
        RuntimeError: when the two sides do not make the same.
    """
    held, size, seq_length = lengths(100_000, 640), 400_000, 128
    listed, part = held.tolist(), range(len(held))
    order = build_sample_order(held, part, size, seq_length, SEED)
    expected = megatron_order.tables(listed, list(part), size, seq_length, SEED)
    weights, places = weights_of(10), 200_000
    index = build_blend_index(weights, places)
    agree = [
        order.document_index.tolist() == expected.documents.tolist(),
        order.sample_index.tolist() == [list(row) for row in expected.samples],
        order.shuffle_index.tolist() == expected.shuffle,
        list(zip(*(column.tolist() for column in index)))
        == megatron_order.interleaved(megatron_order.normalised(weights), places),
    ]
    if not all(agree):
        raise RuntimeError(f"the two sides do not make the same: {agree}")
    return {
        "tables of 400,000 samples": take_turns(
            rounds,
            clock,
            lambda: build_sample_order(held, part, size, seq_length, SEED),
            lambda: megatron_order.tables(listed, list(part), size, seq_length, SEED),
        ),
        "blend of 10 sources, 200,000 samples": take_turns(
            rounds,
            clock,
            lambda: build_blend_index(weights, places),
            lambda: megatron_order.interleaved(weights, places),
        ),
    }


def tables_per_second(rounds: int, clock: Callable[[], float]) -> dict[str, dict[str, float]]:
    """By shape: how many million samples, and medians in millions a second: samples, then rows of each table."""
    found = {}
    for name, (sequences, mean, seq_length, size) in SHAPES.items():
        held = lengths(sequences, mean)
        build = partial(build_sample_order, held, range(len(held)), size, seq_length, SEED)
        order = build()
        whole = statistics.median(timed(clock, build) for _ in range(rounds))
        samples = len(order.shuffle_index) / 1e6
        found[name] = {"millions": samples, "epochs": order.epochs, "all": samples / whole}
        for table, make in separately(held, order).items():
            seconds = statistics.median(timed(clock, make) for _ in range(rounds))
            found[name][table] = len(order.tables[table]) / seconds / 1e6
    return found


def separately(held: NDArray[np.int32], order: SampleOrder) -> dict[str, Callable[[], object]]:
    """Return a function for each table of an order that builds it alone."""
    samples, random = len(order.shuffle_index), np.random.RandomState(SEED)
    sequences = np.arange(order.part.start, order.part.stop)
    return {
        "documents": lambda: gpt_dataset._shuffled([np.tile(sequences, order.epochs)], np.int32, random),
        "samples": partial(gpt_dataset._sample_index, held, order.document_index, samples, order.seq_length),
        "shuffle": lambda: gpt_dataset._shuffled([np.arange(samples)], np.uint32, random),
    }


def blends_per_second(rounds: int, clock: Callable[[], float]) -> dict[str, float]:
    """Medians by number of sources: million samples a second."""
    found = {}
    for name, sources in BLENDS.items():
        weights, places = weights_of(sources), max(200_000, 20_000_000 // sources)
        blend = partial(build_blend_index, weights, places)
        blend()  # compiles
        seconds = statistics.median(timed(clock, blend) for _ in range(rounds))
        found[name] = places / seconds / 1e6
    return found


def report(result: Mapping[str, Any]) -> str:
    """Return the page of results."""
    text = [TITLE, "", "| ratio of times, description / ours | median | lowest | highest |", "|---|---|---|---|"]
    for name, ratios in result["ratios"].items():
        text.append(f"| {name} | {statistics.median(ratios):.0f} | {min(ratios):.0f} | {max(ratios):.0f} |")
    columns = ("millions", "epochs", "all", *TABLES)
    heads = ("M samples", "epochs", "M samples/s", *(f"M rows/s of {table}" for table in TABLES))
    text += ["", f"| shape | {' | '.join(heads)} |", "|---" * (len(heads) + 1) + "|"]
    for name, row in result["tables"].items():
        text.append(f"| {name} | {' | '.join(f'{row[column]:.3g}' for column in columns)} |")
    text += ["", "| blend | M samples/s |", "|---|---|"]
    text += [f"| {name} | {speed:.1f} |" for name, speed in result["blends"].items()]
    versions = ", ".join(f"{key} {result[key]}" for key in ("python", "numpy", "numba"))
    text += [
        "",
        "Documents, samples and shuffle are the tables of an order. Where a sample is longer than most sequences, "
        "shuffling the sequences takes most of the time; that generator is part of the order and cannot be another.",
        "",
        f"Median of {result['rounds']} alternating rounds, {result['clock']} time; {result['processor']}, "
        f"load {result['load']:.1f} before the start; {versions}.",
    ]
    return "\n".join(text)


def main(argv: Sequence[str]) -> int:
    """Measure, print, and write if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5, help="rounds")
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="processor: where others use the machine too")
    parser.add_argument("--write", action="store_true", help="keep the result under benchmarks/results")
    args = parser.parse_args(argv)
    clock, load = CLOCKS[args.clock], os.getloadavg()[0]
    result: dict[str, Any] = {
        "ratios": against_description(args.repeats, clock),
        "tables": tables_per_second(args.repeats, clock),
        "blends": blends_per_second(args.repeats, clock),
        "rounds": args.repeats,
        "clock": args.clock,
        "load": load,
    } | machine("numpy", "numba")
    page = report(result)
    print(page)
    if args.write:
        keep("index", result, page)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
