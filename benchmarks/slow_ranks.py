"""Cost of comparing ranks: steps with ``--log-slowest-ranks-interval`` beside steps without, on two ranks (TP 2, CPU).

    python -m benchmarks.slow_ranks                  # prints; --write keeps the result

One trainer takes turns, 10 steps and a report, then 10 steps bare. Ratios are of the processor time of the thread that
trains, because other work on the machine, and waits for the other rank, are not in it.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.ranks import run_ranks
from benchmarks.record import conditions, options, ratios, run, spread, spreads, take_turns
from megatron.arguments.cli import parse
from megatron.distributed import comm
from megatron.distributed.timing import Timers
from megatron.training.build import build_trainer
from megatron.training.components.slow_ranks import PhaseTimers, find_slow_ranks
from megatron.training.step import train_step

CPU = torch.device("cpu")
FLAGS = (
    "--mock-data --vocab-size 8192 --num-attention-heads 4 --train-iters 1000000 --device cpu --global-batch-size 4 "
    "--micro-batch-size 1 --tensor-model-parallel-size 2 --num-layers {} --hidden-size {} --seq-length {}"
)


def run_rank(rank: int, world_size: int, flags: str, steps: int, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of the blocks of a rank."""
    config = parse(flags.split(), {"RANK": "0", "WORLD_SIZE": str(world_size)}).config
    trainer = build_trainer(config, rank, world_size)
    trainer.start_at(0, 0)
    world, plain = trainer.mesh.world, Timers(0, CPU)
    phases = PhaseTimers(0, CPU, trainer.mesh.meter)

    def take(timers: Timers) -> None:
        trainer.timers = timers
        for _ in range(steps):
            with timers("batch-generator"):
                batches = trainer.next_batches()
            train_step(trainer, batches, trainer.schedule.rates(trainer.consumed_samples))
            trainer.progress.iteration += 1
            trainer.progress.consumed_samples += 4
        world.meter.pop()
        timers.read(steps)

    def compared() -> None:
        take(phases)
        rows = comm.all_gather(torch.tensor(phases.take(), dtype=torch.float64), world).view(world_size, -1).tolist()
        find_slow_ranks(rows, [0] * world_size)

    blocks = {"compared": compared, "bare": lambda: take(plain)}
    take_turns(blocks, 1)  # warm up
    return take_turns(blocks, rounds, time.thread_time)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of rank 0."""
    flags = FLAGS.format(args.num_layers, args.hidden_size, args.seq_length)
    found = run_ranks(2, run_rank, flags, args.steps, args.repeats)[0]
    return {
        "bare_step_ms": spread([seconds / args.steps * 1e3 for seconds in found["bare"]])[0],
        "ratio": ratios(found["compared"], found["bare"]),
    }


def page(result: dict[str, Any]) -> str:
    """Return the result as Markdown."""
    text = [
        "# What comparing ranks adds to a step, two ranks, CPU",
        "",
        f"A bare step takes {result['bare_step_ms']} ms of the thread that trains.",
        *spreads("processor time, compared / bare", {"step": result["ratio"]}, ".4f"),
        "",
        f"{result['rounds']} rounds; {conditions(result)}",
    ]
    return "\n".join(text)


def main(argv: Sequence[str]) -> int:
    """Run the benchmark."""
    parser = options(__doc__, rounds=21)
    parser.add_argument("--num-layers", type=int, default=4)
    parser.add_argument("--hidden-size", type=int, default=128)
    parser.add_argument("--seq-length", type=int, default=128)
    parser.add_argument("--steps", type=int, default=10, help="of a block, and so from report to report")
    return run("slow_ranks", parser, argv, measure, page)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
