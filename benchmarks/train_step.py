"""Speed of a training step beside `transformers`, and of two tensor-parallel processes beside one.

    python -m benchmarks.train_step            # against GPT2LMHeadModel with torch's AdamW, one process on a CPU
    python -m benchmarks.train_step --tp 2     # two processes against one

The model is GPT-2 with 124M parameters in fp32, without dropout, on sequences of 512. Both sides start from the same
weights, their first losses must agree, and they take turns; a ratio is the median over rounds of two neighbouring
steps. `transformers` computes GPT-2's activation in pieces, so it also runs with the fused kernel that we use.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import nn

from benchmarks.ranks import run_ranks
from benchmarks.record import (
    CLOCKS,
    RESULTS,
    check_same,
    conditions,
    keep,
    machine,
    options,
    ratios,
    rounds_of,
    spreads,
    take_turns,
)
from megatron.arguments.cli import parse
from megatron.convert.huggingface.weights import HuggingFaceWeights
from megatron.distributed.micro_batch import MicroBatch
from megatron.optimizer.lr_scheduler import Rates
from megatron.training.build import build_trainer
from megatron.training.checkpoint_contents import restore_weights
from megatron.training.step import train_step
from megatron.training.trainer import Trainer

LEARNING_RATE, WEIGHT_DECAY, CLIP = 1e-4, 0.01, 1.0
TITLE = "# Training step, GPT-2 124M, fp32, sequence 512, CPU, one thread per process"

Step = Callable[[], float]
"""Takes one training step and returns its loss."""


def our_trainer(args: argparse.Namespace, rank: int = 0, tp: int = 1, more: Sequence[str] = ()) -> Trainer:
    """Build a trainer as the command line would."""
    flags = ["--preset", "gpt2-124m", "--num-layers", str(args.num_layers), "--seq-length", "512", "--mock-data"]
    flags += ["--micro-batch-size", str(args.micro_batch_size), "--train-iters", "1000", "--device", "cpu"]
    flags += ["--hidden-dropout", "0", "--attention-dropout", "0", "--clip-grad", str(CLIP)]
    flags += ["--tensor-model-parallel-size", str(tp), *more]
    config = parse(flags, {"RANK": str(rank), "WORLD_SIZE": str(tp)}).config
    return build_trainer(config, rank, tp)


def our_step(trainer: Trainer) -> Step:
    """Return our training step, always on the same batch."""
    batches = trainer.next_batches()
    return lambda: train_step(trainer, batches, Rates(LEARNING_RATE, WEIGHT_DECAY)).loss.item()


def their_model(args: argparse.Namespace, activation: str) -> nn.Module:
    """Build the same architecture in `transformers`."""
    config = transformers.GPT2Config(
        n_layer=args.num_layers, activation_function=activation, attn_implementation="sdpa"
    )
    config.update({"embd_pdrop": 0.0, "resid_pdrop": 0.0, "attn_pdrop": 0.0, "use_cache": False})
    return transformers.GPT2LMHeadModel(config).train()


def their_step(model: nn.Module, batch: MicroBatch) -> Step:
    """Return the usual training step around it."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, fused=True)

    def step() -> float:
        loss = model(input_ids=batch.tokens, labels=batch.labels, shift_labels=batch.labels).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return step


def against_transformers(args: argparse.Namespace) -> dict[str, list[float]]:
    """Return the seconds of each step, by contestant."""
    models = {
        "transformers": their_model(args, "gelu_new"),
        "transformers, fused gelu": their_model(args, "gelu_pytorch_tanh"),
    }
    first, *others = models.values()
    for other in others:
        other.load_state_dict(first.state_dict())
    trainer = our_trainer(args)
    with tempfile.TemporaryDirectory() as folder:
        first.save_pretrained(folder)
        restore_weights(trainer, HuggingFaceWeights(Path(folder), trainer.config.model))
    (batch,) = trainer.next_batches()
    steps = {"ours": our_step(trainer)} | {name: their_step(model, batch) for name, model in models.items()}
    return compare_steps(steps, args)


def compare_steps(
    steps: Mapping[str, Step], args: argparse.Namespace, together: Callable[[], object] = lambda: None
) -> dict[str, list[float]]:
    """Return the seconds of each step, by contestant; all must compute the same loss from the same weights."""
    check_same(steps, 1e-5)
    seconds = take_turns(steps, args.repeats, CLOCKS[args.clock], together)
    together()
    return seconds


def tensor_parallel_rank(rank: int, world_size: int, args: argparse.Namespace) -> dict[str, list[float]]:
    """Return the seconds of each step, by contestant, on one of the processes; rank 0 also takes those of one alone."""
    alone = our_step(our_trainer(args)) if rank == 0 else lambda: 0.0

    def one_process() -> float:
        loss = torch.tensor(alone(), dtype=torch.float64)
        dist.broadcast(loss, 0)  # the other ranks wait and receive the loss
        return loss.item()

    variants = {
        f"TP={args.tp}": (),
        f"TP={args.tp}, sequence parallel": ("--sequence-parallel",),
        f"TP={args.tp}, sequence parallel, overlap": ("--sequence-parallel", "--tp-comm-overlap"),
    }
    steps = {name: our_step(our_trainer(args, rank, args.tp, flags)) for name, flags in variants.items()}
    return compare_steps({"one process": one_process} | steps, args, dist.barrier)


def lines(args: argparse.Namespace, seconds: Mapping[str, Sequence[float]]) -> dict[str, list[float]]:
    """Return the reported ratios as ``[median, lowest, highest]``, by sentence."""
    (_, first), *others = seconds.items()
    if args.tp == 1:
        return {f"tokens/s of ours / {name}": ratios(other, first) for name, other in others}
    work = {name: [args.tp * x for x in other] for name, other in others}
    return {f"process-seconds of {name} / one process": ratios(other, first) for name, other in work.items()}


def page(results: Mapping[str, Any]) -> str:
    """Return the page of all kinds of comparisons."""
    text = [TITLE]
    for kind, result in results.items():
        text += ["", f"## {kind}", *spreads("ratio", result["ratios"])]
        text += ["", f"{rounds_of(result)}; {conditions(result, 'torch', 'transformers')}"]
    return "\n".join(text)


def main(argv: Sequence[str]) -> int:
    """Measure, print, and with ``--write`` replace the results of the same kind."""
    parser = options(__doc__, clock=True)
    parser.add_argument(
        "--tp", type=int, default=1, help="processes to compare with one (1: compare with transformers)"
    )
    parser.add_argument("--micro-batch-size", type=int, default=1, help="sequences of a step")
    parser.add_argument("--num-layers", type=int, default=12, help="fewer for a quick look")
    args = parser.parse_args(argv)
    if args.tp > 1 and args.clock != "wall":
        parser.error("with --tp only the wall clock counts the time spent waiting for one another: --clock wall")
    if args.write and args.num_layers != 12:
        parser.error("results are kept for 12 layers only: leave out --write or --num-layers")
    load = os.getloadavg()[0]
    torch.set_num_threads(1)
    seconds = against_transformers(args) if args.tp == 1 else run_ranks(args.tp, tensor_parallel_rank, args)[0]
    for name, values in seconds.items():
        print(f"{name:26} {512 * args.micro_batch_size / statistics.median(values):8.1f} tokens/s")
    kind = "transformers" if args.tp == 1 else f"{args.tp} processes beside one"
    measured = {"ratios": lines(args, seconds), "rounds": args.repeats, "clock": args.clock, "load": load}
    results = {f"{kind}, micro-batch {args.micro_batch_size}": measured | machine("torch", "transformers")}
    print(page(results))
    if args.write:
        path = RESULTS / "train_step.json"
        results = (json.loads(path.read_text()) if path.exists() else {}) | results
        keep("train_step", results, page(results))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
