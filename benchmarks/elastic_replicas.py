"""Cost of a step of elastic replicas, beside plain data parallelism of as many ranks (CPU).

    python -m benchmarks.elastic_replicas            # prints; --write keeps the result

Two processes have two trainers each: of a run with data parallelism 2, and of a replica with one rank. They take
turns, a block of steps each.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from benchmarks.ranks import run_ranks
from benchmarks.record import conditions, options, ratios, run, spread, spreads, take_turns
from megatron.arguments.cli import parse
from megatron.training.build import build_trainer
from megatron.training.replicas.store import serve
from megatron.training.resume_source import ResumeSource
from megatron.training.step import train_step
from megatron.training.trainer import Trainer

FLAGS = (
    "--mock-data --vocab-size 8192 --num-attention-heads 4 --train-iters 1000000 --device cpu --global-batch-size 8 "
    "--micro-batch-size 1 --num-layers {} --hidden-size {} --seq-length {}"
)


def run_rank(rank: int, world_size: int, flags: str, port: int, steps: int, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of the blocks of a rank."""
    plain = build_trainer(parse(flags.split(), {"RANK": "0", "WORLD_SIZE": str(world_size)}).config, rank, world_size)
    own = f"{flags} --elastic-replicas {world_size} --elastic-replica {rank} --elastic-server 127.0.0.1:{port}"
    elastic = build_trainer(parse(own.split(), {"RANK": "0", "WORLD_SIZE": "1"}).config, 0, 1)
    for component in elastic.components:
        component.before_load(ResumeSource())
    for component in elastic.components:
        component.on_start(lambda: False)

    def take(trainer: Trainer) -> None:
        for _ in range(steps):
            for component in trainer.components:
                component.on_step_start()
            batches = trainer.next_batches()
            train_step(trainer, batches, trainer.schedule.rates(trainer.consumed_samples))
            trainer.progress.iteration += 1
            trainer.progress.consumed_samples += 8

    blocks = {"plain": lambda: take(plain), "elastic": lambda: take(elastic)}
    take_turns(blocks, 1)  # warm up
    found = take_turns(blocks, rounds)
    for component in elastic.components:
        component.on_stop(None)
    return found


def measure(args: Any) -> dict[str, Any]:
    """Return the figures of rank 0."""
    flags = FLAGS.format(args.num_layers, args.hidden_size, args.seq_length)
    server, port = serve("127.0.0.1", 0)
    found = run_ranks(2, run_rank, flags, port, args.steps, args.repeats)[0]
    server.stop()
    return {
        "plain_step_ms": spread([seconds / args.steps * 1e3 for seconds in found["plain"]])[0],
        "elastic_step_ms": spread([seconds / args.steps * 1e3 for seconds in found["elastic"]])[0],
        "ratio": ratios(found["elastic"], found["plain"]),
    }


def page(result: dict[str, Any]) -> str:
    """Return the result as Markdown."""
    text = [
        "# A step of two elastic replicas beside data parallelism 2, CPU",
        "",
        f"A plain step takes {result['plain_step_ms']} ms, an elastic one {result['elastic_step_ms']} ms.",
        *spreads("time, elastic / plain", {"step": result["ratio"]}, ".3f"),
        "",
        f"{result['rounds']} rounds; {conditions(result)}",
    ]
    return "\n".join(text)


def main(argv: Sequence[str]) -> int:
    """Run the benchmark."""
    parser = options(__doc__, rounds=11)
    parser.add_argument("--num-layers", type=int, default=4)
    parser.add_argument("--hidden-size", type=int, default=128)
    parser.add_argument("--seq-length", type=int, default=128)
    parser.add_argument("--steps", type=int, default=5, help="of a block")
    return run("elastic_replicas", parser, argv, measure, page)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
