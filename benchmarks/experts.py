"""Cost of the options of a mixture of experts on a CPU: steps with each beside steps without, taking turns.

    python -m benchmarks.experts            # prints; --write keeps the result

A ratio is the time of a step over that of the plain mixture, the median over rounds of neighbouring steps.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from benchmarks.record import CLOCKS, conditions, options, ratios, rounds_of, run, spreads, take_turns
from benchmarks.train_step import our_step
from megatron.arguments.cli import parse
from megatron.training.build import build_trainer

TITLE = "# A step with options of experts over one without, CPU, fp32, one thread"
BASE = (
    "--hidden-size 256 --num-layers 4 --num-attention-heads 4 --seq-length 512 --micro-batch-size 1 --swiglu"
    " --disable-bias-linear --normalization RMSNorm --position-embedding-type rope --vocab-size 2048 --mock-data"
    " --train-iters 1000 --device cpu --num-experts 32 --moe-router-topk 4 --moe-ffn-hidden-size 256"
    " --moe-router-load-balancing-type none"
)
SIGMOID = "--moe-router-score-function sigmoid"
SHARED = "--moe-shared-expert-intermediate-size 256"
OPTIONS = {
    "sequence loss": "--moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 0.01",
    "z-loss": "--moe-z-loss-coeff 0.001",
    "sigmoid, expert bias": f"{SIGMOID} --moe-router-enable-expert-bias",
    "sigmoid, expert bias, 2 of 8 groups": (
        f"{SIGMOID} --moe-router-enable-expert-bias --moe-router-num-groups 8 --moe-router-group-topk 2"
    ),
    "capacity 1": "--moe-expert-capacity-factor 1",
    "shared expert": SHARED,
    "shared expert, gate": f"{SHARED} --moe-shared-expert-gate",
    "latent 128": "--moe-latent-size 128",
    "no experts, MLP of 1024": "--num-experts null --ffn-hidden-size 1024",
}
"""Flags by name; the MLP multiplies as often as the four experts of a token."""


def measure(args: argparse.Namespace) -> Mapping[str, Any]:
    """Return the ratios by option."""
    torch.set_num_threads(1)
    steps = {}
    for name, flags in {"plain": "", **OPTIONS}.items():
        config = parse([*BASE.split(), *flags.split()], {"RANK": "0", "WORLD_SIZE": "1"}).config
        steps[name] = our_step(build_trainer(config, 0, 1))
        steps[name]()  # warms up
    plain, *others = (seconds := take_turns(steps, args.repeats, CLOCKS[args.clock])).values()
    return {"ratios": {name: ratios(values, plain) for name, values in zip([*seconds][1:], others)}}


def page(result: dict[str, Any]) -> str:
    """Return the page."""
    shape = "4 layers, hidden size 256, 32 experts of 256, top 4, 512 tokens a step."
    text = [TITLE, "", shape, *spreads("time over that of the plain mixture", result["ratios"])]
    return "\n".join([*text, "", f"{rounds_of(result)}; {conditions(result, 'torch')}"])


def main(argv: Sequence[str]) -> int:
    """Measure and print."""
    return run("experts", options(__doc__, rounds=9, clock=True), argv, measure, page)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
