"""Bytes that each rank sends in a step: counted where tensors leave it, beside the closed formulas.

    python -m benchmarks.wire

Four replicas of a small Llama train a step with every way of sharding. The bytes counted by their collectives must
equal the formulas of `megatron/planner/memory.py`. The same formulas are shown for Llama-2 7B, which is not run.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from itertools import product
from typing import Any, NamedTuple

from benchmarks.ranks import run_ranks
from benchmarks.record import keep, versions
from megatron.arguments.cli import parse
from megatron.config.batch import get_num_microbatches
from megatron.config.parallel import ZERO_STAGES
from megatron.config.run import RunConfig
from megatron.optimizer.lr_scheduler import Rates
from megatron.planner.memory import data_parallel_traffic
from megatron.training.build import build_trainer
from megatron.training.step import train_step

RANKS, MICROBATCHES = 4, (1, 4)
OPERATIONS = ("reduce-scatter", "all-to-all", "all-reduce", "all-gather")
SMALL = "--preset tiny-llama --vocab-size 512 --seq-length 32 --train-iters 1 --mock-data --device cpu --bf16"
LARGE = "--preset llama2-7b --train-iters 1 --mock-data --bf16"
SCALARS = 2 * 8
"""Bytes of the tokens of a step and of their loss, which replicas add up; they are taken out of what is counted."""


class Way(NamedTuple):
    """A ZeRO stage, the micro-batches of a step, and whether gradients are sent as bf16."""

    strategy: str
    batches: int
    rounded: bool

    @property
    def flags(self) -> str:
        """Flags of a run."""
        rounded = "--grad-reduce-in-bf16" if self.rounded else ""
        return f"--data-parallel-sharding-strategy {self.strategy} --global-batch-size {RANKS * self.batches} {rounded}"


def config_of(model: str, way: Way) -> RunConfig:
    """Return the run's configuration."""
    environment = {"RANK": "0", "WORLD_SIZE": str(RANKS)}
    return parse([*model.split(), *way.flags.split()], environment).config


def count(rank: int, world_size: int, way: Way) -> dict[str, float]:
    """Return the bytes this rank sends to other replicas in a step, by operation."""
    trainer = build_trainer(config_of(SMALL, way), rank, world_size)
    meter = trainer.mesh.meter
    meter.pop_bytes_sent()
    train_step(trainer, trainer.next_batches(), Rates(1e-3, 0.0))
    found = {operation: count for (axes, operation), count in meter.pop_bytes_sent().items() if axes == "dp"}
    found["all-reduce"] -= 2 * SCALARS * (RANKS - 1) / RANKS
    return {operation: count for operation, count in found.items() if count}


def count_all(rank: int, world_size: int, ways: Sequence[Way]) -> list[dict[str, float]]:
    """Return the bytes sent by this rank, for each way of sharding."""
    return [count(rank, world_size, way) for way in ways]


def check(way: Way, ranks: Sequence[dict[str, float]]) -> dict[str, Any]:
    """Compare the bytes of all ranks with the formula; return a row of results.

    Raises:
        RuntimeError: when a rank sends other bytes than the formula.
    """
    formula = data_parallel_traffic(config_of(SMALL, way), RANKS)
    if any(rank != formula for rank in ranks):
        raise RuntimeError(f"{way}: the ranks sent {ranks}, the formula says {formula}")
    large = config_of(LARGE, way)
    return {
        "stage": ZERO_STAGES[way.strategy],
        "micro-batches": get_num_microbatches(large.training, RANKS),
        "wire": "bf16" if way.rounded else "fp32",
        "small": formula,
        "large": data_parallel_traffic(large, RANKS),
    }


def page(rows: Sequence[dict[str, Any]]) -> str:
    """Return the page of results."""
    text = ["# Bytes that a rank sends in a step, 4 replicas, bf16 weights", ""]
    text += ["| ZeRO | micro-batches | gradients travel as | counted = formula, a small Llama | Llama-2 7B, formula |"]
    text += ["|--:|--:|---|---|---|"]
    for row in rows:
        cells = row["stage"], row["micro-batches"], row["wire"], describe(row["small"], 2**20, "MB")
        text.append("| " + " | ".join(map(str, (*cells, describe(row["large"], 2**30, "GB")))) + " |")
    text += [
        "",
        "As a ring sends them (`megatron/distributed/comm.py`); every rank sends as much; MB are 2^20 bytes, GB 2^30. "
        "Counted on real ranks over gloo, whose own algorithms may send more; all counts were equal to the formula to "
        "the byte.",
    ]
    return "\n".join(text)


def describe(sent: dict[str, float], unit: int, name: str) -> str:
    """Return the sum and its parts as text."""
    parts = ", ".join(f"{op} {sent[op] / unit:,.2f}" for op in OPERATIONS if op in sent)
    return f"{sum(sent.values()) / unit:,.2f} {name}: {parts}"


def main(argv: Sequence[str]) -> int:
    """Count, print, and write if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="keep the result under benchmarks/results")
    args = parser.parse_args(argv)
    ways = [Way(*way) for way in product(ZERO_STAGES, MICROBATCHES, (False, True))]
    by_rank = run_ranks(RANKS, count_all, ways)
    rows = [check(way, ranks) for way, ranks in zip(ways, zip(*by_rank))]
    print(page(rows))
    if args.write:
        keep("wire", {"rows": rows} | versions("torch"), page(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
