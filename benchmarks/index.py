"""Speed of building sample indices, beside a literal step-by-step implementation of Megatron-LM's order.

    python -m benchmarks.index            # prints; --write keeps the result

Both sides build the same tables from the same lengths, are compared entry by entry, and alternate; a ratio is the
median over rounds. The larger shapes are ours alone: one process, one core, in memory, without a cache.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks import megatron_order
from benchmarks.record import CLOCKS, conditions, options, run, table, take_turns, timed
from megatron.data import gpt_dataset
from megatron.data.blended_dataset import build_blend_index, normalize_weights
from megatron.data.gpt_dataset import SampleOrder, build_sample_order

TITLE = "# Laying out samples, one core, in memory"
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
    sides: dict[str, dict[str, Callable[[], object]]] = {
        "tables of 400,000 samples": {
            "ours": lambda: build_sample_order(held, part, size, seq_length, SEED),
            "theirs": lambda: megatron_order.tables(listed, list(part), size, seq_length, SEED),
        },
        "blend of 10 sources, 200,000 samples": {
            "ours": lambda: build_blend_index(weights, places),
            "theirs": lambda: megatron_order.interleaved(weights, places),
        },
    }
    taken = {name: take_turns(both, rounds, clock) for name, both in sides.items()}
    return {name: [b / a for a, b in zip(both["ours"], both["theirs"])] for name, both in taken.items()}


def tables_per_second(rounds: int, clock: Callable[[], float]) -> dict[str, dict[str, float]]:
    """By shape: how many million samples, and medians in millions a second: samples, then rows of each table."""
    found = {}
    for name, (sequences, mean, seq_length, size) in SHAPES.items():
        held = lengths(sequences, mean)
        build = partial(build_sample_order, held, range(len(held)), size, seq_length, SEED)
        order = build()
        whole = statistics.median(timed(build, clock) for _ in range(rounds))
        samples = len(order.shuffle_index) / 1e6
        found[name] = {"millions": samples, "epochs": order.epochs, "all": samples / whole}
        for part, make in separately(held, order).items():
            rows = len(make())
            found[name][part] = rows / statistics.median(timed(make, clock) for _ in range(rounds)) / 1e6
    return found


def separately(held: NDArray[np.int32], order: SampleOrder) -> dict[str, Callable[[], NDArray[Any]]]:
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
        seconds = statistics.median(timed(blend, clock) for _ in range(rounds))
        found[name] = places / seconds / 1e6
    return found


def page(result: Mapping[str, Any]) -> str:
    """Return the page of results."""
    compared = {
        name: [f"{x:.0f}" for x in (statistics.median(ratios), min(ratios), max(ratios))]
        for name, ratios in result["ratios"].items()
    }
    heads = ("ratio of times, description / ours", "median", "lowest", "highest")
    text = [TITLE, *table(heads, ((name, *figures) for name, figures in compared.items()))]
    columns = ("millions", "epochs", "all", *TABLES)
    heads = ("shape", "M samples", "epochs", "M samples/s", *(f"M rows/s of {part}" for part in TABLES))
    text += table(heads, ((name, *(f"{row[c]:.3g}" for c in columns)) for name, row in result["tables"].items()))
    text += table(("blend", "M samples/s"), ((name, f"{speed:.1f}") for name, speed in result["blends"].items()))
    text += [
        "",
        "Documents, samples and shuffle are the tables of an order. Where a sample is longer than most sequences, "
        "shuffling the sequences takes most of the time; that generator is part of the order and cannot be another.",
        "",
        f"Median of {result['rounds']} alternating rounds, {result['clock']} time; "
        f"{conditions(result, 'numpy', 'numba')}",
    ]
    return "\n".join(text)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Return all figures."""
    clock = CLOCKS[args.clock]
    return {
        "ratios": against_description(args.repeats, clock),
        "tables": tables_per_second(args.repeats, clock),
        "blends": blends_per_second(args.repeats, clock),
    }


def main(argv: Sequence[str]) -> int:
    """Run the benchmark."""
    return run("index", options(__doc__, clock=True), argv, measure, page, ("numpy", "numba"))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
