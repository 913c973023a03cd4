"""Kernels side by side on a CPU: the loss without full logits, and compiled regions against eager ones.

    python -m benchmarks.kernels             # --write keeps the result under benchmarks/results

The loss is output projection and cross-entropy, forward and backward, beside ``F.linear`` and ``F.cross_entropy`` on
the same numbers. The step is a whole training step of a small Llama. All take turns; a ratio is the median over rounds
of two neighbouring measurements. Memory is the most that was held at a time beyond inputs and gradient buffers.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from benchmarks.record import CLOCKS, check_same, options, ratios, run, table, take_turns
from megatron.arguments.cli import parse
from megatron.distributed.comm import Group
from megatron.distributed.grad_accumulator import GradAccumulator, GradTarget
from megatron.kernels.registry import OPERATIONS, Kernels
from megatron.layers.loss import VocabularyShard, linear_cross_entropy
from megatron.optimizer.lr_scheduler import Rates
from megatron.training.build import build_trainer
from megatron.training.step import train_step

PLAIN = "F.linear + F.cross_entropy"
LLAMA = (
    "--preset tiny-llama --num-layers 4 --hidden-size 256 --ffn-hidden-size 768 --num-attention-heads 4"
    " --num-query-groups 2 --seq-length 512 --max-position-embeddings 512 --vocab-size 8192 --micro-batch-size 2"
    " --train-iters 1000 --mock-data --device cpu"
)
"""Flags of the model that is trained."""


@dataclass
class Weight(GradTarget):
    """The gradient of the only weight; every contribution is added to it."""

    gradient: Tensor

    def claim(self, name: str) -> tuple[Tensor, bool]:
        """Return the gradient, to which contributions are added."""
        return self.gradient, False

    def contributed(self, name: str) -> None:
        """Count nothing."""


def losses(args: argparse.Namespace, dtype: torch.dtype) -> dict[str, Callable[[], Tensor]]:
    """Forward and backward of the loss, by contestant; each returns its value."""
    torch.manual_seed(0)
    tokens, rows, width = args.tokens, args.vocabulary, args.hidden
    x = torch.randn(tokens, width).to(dtype).requires_grad_()
    weight = (0.05 * torch.randn(rows, width)).to(dtype).requires_grad_()
    labels, mask = torch.randint(0, rows, (tokens,)), torch.ones(tokens)
    grad_accumulator = GradAccumulator()
    grad_accumulator.bind(Weight(torch.zeros(rows, width)))

    def plain() -> Tensor:
        x.grad = weight.grad = None
        loss = F.cross_entropy(F.linear(x, weight).float(), labels, reduction="sum")
        loss.backward()
        return loss.detach()

    def fused(name: str) -> Callable[[], Tensor]:
        kernel = OPERATIONS["cross_entropy"].candidates[name].make()
        kernels = Kernels(cross_entropy=kernel)
        vocabulary = VocabularyShard(0, rows, Group(), grad_accumulator, "weight", kernels, args.chunk)

        def run() -> Tensor:
            x.grad = None
            loss, *_ = linear_cross_entropy(x, weight, labels, mask, vocabulary)
            loss.backward()
            return loss.detach()

        return run

    return {
        PLAIN: plain,
        "in chunks, eager": fused("torch"),
        "in chunks, compiled": fused("compiled"),
    }


def steps(dropout: str) -> dict[str, Callable[[], Tensor]]:
    """Return a training step for each choice of kernels, always on the same batch; a step returns the loss."""

    def step(kernels: str) -> Callable[[], Tensor]:
        flags = [*LLAMA.split(), "--hidden-dropout", dropout, "--kernels", kernels]
        trainer = build_trainer(parse(flags, {"RANK": "0", "WORLD_SIZE": "1"}).config, 0, 1)
        batches = trainer.next_batches()
        return lambda: train_step(trainer, batches, Rates(lr=1e-4, weight_decay=0.01)).loss

    return {name: step(name) for name in ("torch", "compiled")}


def speeds(contestants: Mapping[str, Callable[[], Tensor]], args: argparse.Namespace) -> dict[str, list[float]]:
    """Return the spread of the first one's time over each other's, after a call of each that warms up and compiles."""
    check_same({name: lambda act=act: act().item() for name, act in contestants.items()}, 1e-2)
    (_, first), *others = take_turns(contestants, args.repeats, CLOCKS[args.clock]).items()
    return {name: ratios(first, seconds) for name, seconds in others}


def peak(run: Callable[[], Tensor]) -> int:
    """Most bytes held at a time while it runs, beyond what was held before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        run()
    held = most = 0
    for event in record.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    return most


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """All of it: by what was measured, by contestant, the ratio of speed and the megabytes."""
    torch.set_num_threads(1)
    found: dict[str, dict[str, dict[str, list[float] | float]]] = {}
    shape = f"{args.tokens} tokens, vocabulary {args.vocabulary}, width {args.hidden}, chunks of {args.chunk}"
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        runs = losses(args, dtype)
        # Products in bf16 are emulated on many CPUs, so that only their memory is of interest.
        speed = speeds(runs, args if name == "fp32" else argparse.Namespace(repeats=1, clock=args.clock))
        found[f"loss, {name}, {shape}"] = {
            one: {"megabytes": round(peak(run) / 2**20, 1)}
            | ({"speed": speed[one]} if name == "fp32" and one in speed else {})
            for one, run in runs.items()
        }
    for dropout in ("0", "0.1"):
        runs = steps(dropout)
        speed = speeds(runs, args)
        title = f"training step, Llama of 4 layers and width 256, fp32, 2 x 512 tokens, hidden dropout {dropout}"
        found[title] = {one: ({"speed": speed[one]} if one in speed else {}) for one in runs}
    return {"measured": found}


def page(result: Mapping[str, Any]) -> str:
    """Return the results as Markdown."""
    text = ["# Kernels on a CPU, one thread"]
    for title, contestants in result["measured"].items():
        rows = []
        for name, values in contestants.items():
            speed = [f"{x:.2f}" for x in values["speed"]] if "speed" in values else ["", "", ""]
            rows.append([name, *speed, values.get("megabytes", "")])
        text += ["", f"## {title}", *table(("", "speed, times the first", "lowest", "highest", "peak, MB"), rows)]
    facts = {key: value for key, value in result.items() if key != "measured"}
    return "\n".join([*text, "", ", ".join(f"{key} {value}" for key, value in facts.items()) + "."])


def main(argv: Sequence[str]) -> int:
    """Run the benchmark."""
    parser = options(__doc__, clock=True)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--vocabulary", type=int, default=50304)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--chunk", type=int, default=256)
    return run("kernels", parser, argv, measure, page)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
