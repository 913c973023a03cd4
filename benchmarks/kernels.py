"""Kernels side by side on a CPU: the loss without full logits, and compiled regions against eager ones.

    python -m benchmarks.kernels             # --write keeps the result under benchmarks/results

The loss is output projection and cross-entropy, forward and backward, beside ``F.linear`` and ``F.cross_entropy`` on
the same numbers. The step is a whole training step of a small Llama. All take turns; a ratio is the median over rounds
of two neighbouring measurements. Memory is the most that was held at a time beyond inputs and gradient buffers.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from benchmarks.record import keep, machine
from megatron.arguments.cli import parse
from megatron.distributed.comm import Group
from megatron.distributed.grad_accumulator import GradAccumulator, GradTarget
from megatron.kernels.registry import OPERATIONS, Kernels
from megatron.layers.loss import VocabularyShard, linear_cross_entropy
from megatron.optimizer.lr_scheduler import Rates
from megatron.training.build import build_trainer
from megatron.training.step import train_step

PLAIN = "F.linear + F.cross_entropy"
CLOCKS = {"wall": time.perf_counter, "processor": time.process_time}
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
            loss, _ = linear_cross_entropy(x, weight, labels, mask, vocabulary)
            loss.backward()
            return loss.detach()

        return run

    return {
        "F.linear + F.cross_entropy": plain,
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


def take_turns(contestants: Mapping[str, Callable[[], Tensor]], args: argparse.Namespace) -> dict[str, list[float]]:
    """Seconds of each, round by round, after a round that warms up and compiles.

    Raises:
        RuntimeError: when they do not compute the same.

    """
    first, *others = (run().item() for run in contestants.values())
    if any(abs(value - first) > 1e-2 * abs(first) for value in others):
        raise RuntimeError(f"the contestants do not compute the same: {first}, {others}")
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(args.repeats):
        for name, run in contestants.items():
            began = CLOCKS[args.clock]()
            run()
            seconds[name].append(CLOCKS[args.clock]() - began)
    return seconds


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


def ratios(seconds: Mapping[str, Sequence[float]]) -> dict[str, list[float]]:
    """``[median, lowest, highest]`` over rounds of the first one's time over each other's."""
    first, *_ = seconds.values()
    found = {}
    for name, values in list(seconds.items())[1:]:
        each = sorted(a / b for a, b in zip(first, values))
        found[name] = [round(x, 3) for x in (statistics.median(each), each[0], each[-1])]
    return found


def measure(args: argparse.Namespace) -> dict[str, dict[str, dict[str, list[float] | float]]]:
    """All of it: by what was measured, by contestant, the ratio of speed and the megabytes."""
    found: dict[str, dict[str, dict[str, list[float] | float]]] = {}
    shape = f"{args.tokens} tokens, vocabulary {args.vocabulary}, width {args.hidden}, chunks of {args.chunk}"
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        runs = losses(args, dtype)
        # Products in bf16 are emulated on many CPUs, so that only their memory is of interest.
        seconds = take_turns(runs, args if name == "fp32" else argparse.Namespace(repeats=1, clock=args.clock))
        speed = ratios(seconds) if name == "fp32" else {}
        found[f"loss, {name}, {shape}"] = {
            one: {"megabytes": round(peak(run) / 2**20, 1)} | ({"speed": speed[one]} if one in speed else {})
            for one, run in runs.items()
        }
    for dropout in ("0", "0.1"):
        runs = steps(dropout)
        speed = ratios(take_turns(runs, args))
        title = f"training step, Llama of 4 layers and width 256, fp32, 2 x 512 tokens, hidden dropout {dropout}"
        found[title] = {one: ({"speed": speed[one]} if one in speed else {}) for one in runs}
    return found


def table(found: Mapping[str, Mapping[str, Mapping[str, object]]], facts: Mapping[str, object]) -> str:
    """Return the results as Markdown."""
    text = ["# Kernels on a CPU, one thread"]
    for title, contestants in found.items():
        text += [
            "",
            f"## {title}",
            "",
            "| | speed, times the first | lowest | highest | peak, MB |",
            "|---|---|---|---|---|",
        ]
        for name, values in contestants.items():
            speed = values.get("speed")
            shown = " | ".join(f"{x:.2f}" for x in speed) if isinstance(speed, list) else " |  | "
            text.append(f"| {name} | {shown} | {values.get('megabytes', '')} |")
    text += ["", ", ".join(f"{key} {value}" for key, value in facts.items()) + "."]
    return "\n".join(text) + "\n"


def main(argv: Sequence[str]) -> int:
    """Measure, print, and write if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--vocabulary", type=int, default=50304)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--chunk", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=5, help="rounds")
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="processor: where others use the machine too")
    parser.add_argument("--write", action="store_true", help="keep the result under benchmarks/results")
    args = parser.parse_args(argv)
    load = os.getloadavg()[0]
    torch.set_num_threads(1)
    found = measure(args)
    facts = {
        "rounds": args.repeats,
        "clock": args.clock,
        "load before the start": round(load, 1),
    } | machine("torch")
    print(table(found, facts))
    if args.write:
        keep("kernels", {"measured": found} | facts, table(found, facts))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
