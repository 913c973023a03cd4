"""Compare the time of training steps, scoring and generation with and without ``--batch-invariant``.

    python -m benchmarks.batch_invariant            # prints; --write keeps the result

Two models with the same weights take turns in one process. A ratio is the median over rounds.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from benchmarks.record import CLOCKS, conditions, options, ratios, rounds_of, run, spread, table, take_turns
from megatron.arguments.cli import parse
from megatron.inference.generate import PipelinedModel, SamplingParams, generate_scored
from megatron.inference.scoring import compute_logprobs
from megatron.optimizer.lr_scheduler import Rates
from megatron.training.build import build_trainer
from megatron.training.step import train_step
from megatron.training.trainer import Trainer

TITLE = "# What --batch-invariant costs, CPU, fp32, one thread"
FLAGS = (
    "--mock-data --vocab-size 8192 --train-iters 1000000 --device cpu --micro-batch-size 4 --global-batch-size 4 "
    "--attention-dropout 0 --hidden-dropout 0 --position-embedding-type rope --normalization RMSNorm "
    "--activation swiglu --disable-bias-linear"
)
SIZES = ("num_layers", "hidden_size", "num_attention_heads", "seq_length")
PLAIN, INVARIANT = "plain", "batch-invariant"


def build(args: argparse.Namespace, *flags: str) -> Trainer:
    """Return a run of the requested size at its start."""
    sizes = [word for name in SIZES for word in (f"--{name.replace('_', '-')}", str(getattr(args, name)))]
    return build_trainer(parse([*FLAGS.split(), *sizes, *flags], {}).config, 0, 1)


def acts(trainer: Trainer, args: argparse.Namespace) -> dict[str, Callable[[], object]]:
    """Return what is timed, by name."""
    tokens = torch.randint(0, 8192, (4, args.seq_length), generator=torch.Generator().manual_seed(0))
    prompts = {count: tokens[:count, :64].tolist() for count in (1, 4)}
    batches = trainer.next_batches()

    def generate(count: int) -> object:
        return generate_scored(PipelinedModel(trainer), prompts[count], args.new_tokens, SamplingParams(0.0))

    return {
        "step of training": lambda: train_step(trainer, batches, Rates(1e-4, 0.1)),
        "scoring": lambda: compute_logprobs(trainer, tokens, 4),
        "generation, 1 prompt": partial(generate, 1),
        "generation, 4 prompts": partial(generate, 4),
    }


def measure(args: argparse.Namespace) -> Mapping[str, Any]:
    """Return milliseconds without the option, and ratios, by what is timed."""
    torch.set_num_threads(1)
    plain, invariant = (acts(build(args, *flags), args) for flags in ((), ("--batch-invariant",)))
    found = {}
    for name in plain:
        contestants = {PLAIN: plain[name], INVARIANT: invariant[name]}
        for act in contestants.values():
            act()
        seconds = take_turns(contestants, args.repeats, CLOCKS[args.clock])
        found[name] = {
            "milliseconds": spread([1e3 * each for each in seconds[PLAIN]]),
            "ratio": ratios(seconds[INVARIANT], seconds[PLAIN]),
        }
    return {"found": found, **{name: getattr(args, name) for name in (*SIZES, "new_tokens")}}


def page(result: dict[str, Any]) -> str:
    """Return the page of a result."""
    rows = [
        [name, f"{each['milliseconds'][0]:,.0f} ms", *(f"{x:.2f}" for x in each["ratio"])]
        for name, each in result["found"].items()
    ]
    lines = [
        TITLE,
        "",
        f"{result['num_layers']} layers, hidden size {result['hidden_size']}, {result['num_attention_heads']} heads; "
        f"4 samples of {result['seq_length']} tokens; prompts of 64 tokens, {result['new_tokens']} new ones.",
        *table(["", "without", "with / without", "lowest", "highest"], rows, " rrrr"),
        "",
        f"`python -m benchmarks.batch_invariant --write`, {rounds_of(result)}; {conditions(result)}",
    ]
    return "\n".join(lines)


def main(argv: Sequence[str]) -> int:
    """Measure, print, and keep with ``--write``."""
    parser = options(__doc__, rounds=5, clock=True)
    for name, default in zip((*SIZES, "new_tokens"), (4, 256, 4, 256, 32)):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default, metavar="N")
    return run("batch_invariant", parser, argv, measure, page, fixed=(*SIZES, "new_tokens"))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
