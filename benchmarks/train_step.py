"""Speed of a training step beside `transformers`, and of two tensor-parallel processes beside one.

    python -m benchmarks.train_step                     # against GPT2LMHeadModel with torch's AdamW, on a CPU
    python -m benchmarks.train_step --model mixtral     # against MixtralForCausalLM; or llama, qwen3-moe
    python -m benchmarks.train_step --tp 2              # two processes against one

Models are GPT-2 with 124M parameters, and Llama, Mixtral and Qwen3-MoE with fewer and narrower layers, in fp32,
without dropout, on sequences of 512. Both sides start from the same weights, their first losses must agree, and they
take turns; a ratio is the median over rounds of two neighbouring steps. `transformers` computes GPT-2's activation in
pieces, so it also runs with the fused kernel that we use; experts run in both of its implementations.
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
from megatron.config.model import ModelConfig
from megatron.convert.huggingface.weights import HuggingFaceWeights
from megatron.distributed.micro_batch import MicroBatch
from megatron.optimizer.lr_scheduler import Rates
from megatron.training.build import build_trainer
from megatron.training.checkpoint_contents import restore_weights
from megatron.training.step import train_step
from megatron.training.trainer import Trainer

LEARNING_RATE, WEIGHT_DECAY, CLIP = 1e-4, 0.01, 1.0
TITLE = "# Training step, fp32, sequence 512, CPU, one thread per process"

Step = Callable[[], float]
"""Takes one training step and returns its loss."""

LLAMA = (
    "--hidden-size 512 --num-attention-heads 8 --group-query-attention --num-query-groups 2 --swiglu"
    " --normalization RMSNorm --position-embedding-type rope --disable-bias-linear --vocab-size 8192"
    " --untie-embeddings-and-output-weights"
)
MODELS = {
    "gpt2": ("GPT-2 124M", 12, "--preset gpt2-124m"),
    "llama": ("Llama of hidden size 512, MLP of 1792", 4, f"{LLAMA} --ffn-hidden-size 1792"),
    "mixtral": (
        "Mixtral of hidden size 512, 8 experts of 1792, top 2",
        4,
        f"{LLAMA} --rotary-base 1000000 --norm-epsilon 1e-5 --num-experts 8 --moe-ffn-hidden-size 1792"
        " --moe-aux-loss-coeff 0",
    ),
    "qwen3-moe": (
        "Qwen3-MoE of hidden size 512, 64 experts of 192, top 8",
        4,
        f"{LLAMA} --rotary-base 1000000 --norm-epsilon 1e-6 --qk-layernorm --num-experts 64 --moe-router-topk 8"
        " --moe-ffn-hidden-size 192 --moe-aux-loss-coeff 0",
    ),
}
"""By name: a title, the layers, and the flags."""


def our_trainer(args: argparse.Namespace, rank: int = 0, tp: int = 1, more: Sequence[str] = ()) -> Trainer:
    """Build a trainer as the command line would."""
    flags = [*MODELS[args.model][2].split(), "--num-layers", str(args.num_layers), "--seq-length", "512", "--mock-data"]
    flags += ["--micro-batch-size", str(args.micro_batch_size), "--train-iters", "1000", "--device", "cpu"]
    flags += ["--hidden-dropout", "0", "--attention-dropout", "0", "--clip-grad", str(CLIP)]
    flags += ["--tensor-model-parallel-size", str(tp), *more]
    config = parse(flags, {"RANK": str(rank), "WORLD_SIZE": str(tp)}).config
    return build_trainer(config, rank, tp)


def our_step(trainer: Trainer) -> Step:
    """Return our training step, always on the same batch."""
    batches = trainer.next_batches()
    return lambda: train_step(trainer, batches, Rates(LEARNING_RATE, WEIGHT_DECAY)).loss.item()


def their_models(args: argparse.Namespace, model: ModelConfig) -> dict[str, nn.Module]:
    """Build the same architecture in `transformers`, in its variants by name."""
    if args.model == "gpt2":
        models = {}
        for name, activation in (("transformers", "gelu_new"), ("transformers, fused gelu", "gelu_pytorch_tanh")):
            config = transformers.GPT2Config(
                n_layer=args.num_layers, activation_function=activation, attn_implementation="sdpa"
            )
            config.update({"embd_pdrop": 0.0, "resid_pdrop": 0.0, "attn_pdrop": 0.0, "use_cache": False})
            models[name] = transformers.GPT2LMHeadModel(config)
        return models
    shape = {
        "hidden_size": model.hidden_size,
        "num_hidden_layers": args.num_layers,
        "num_attention_heads": model.num_attention_heads,
        "num_key_value_heads": model.kv_groups,
        "head_dim": model.head_dim,
        "vocab_size": model.vocab,
        "rms_norm_eps": model.norm_epsilon,
        "rope_theta": model.rotary_base,
        "max_position_embeddings": 512,
        "use_cache": False,
        "attn_implementation": "sdpa",
    }
    if args.model == "llama":
        llama = transformers.LlamaConfig(**shape, intermediate_size=model.ffn)
        return {"transformers": transformers.LlamaForCausalLM(llama)}
    shape["num_experts_per_tok"] = model.moe_router_topk
    if args.model == "mixtral":
        kind: Any = transformers.MixtralForCausalLM
        shape |= {"num_local_experts": model.num_experts, "intermediate_size": model.expert_ffn}
    else:
        kind = transformers.Qwen3MoeForCausalLM
        shape |= {"num_experts": model.num_experts, "moe_intermediate_size": model.expert_ffn, "norm_topk_prob": True}
    names = {"transformers, expert by expert": "eager", "transformers, grouped_mm": "grouped_mm"}
    return {
        name: kind(kind.config_class(**shape, experts_implementation=implementation))
        for name, implementation in names.items()
    }


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
    trainer = our_trainer(args)
    first, *others = (models := their_models(args, trainer.config.model)).values()
    for other in others:
        other.load_state_dict(first.state_dict())
    with tempfile.TemporaryDirectory() as folder:
        first.save_pretrained(folder)
        restore_weights(trainer, HuggingFaceWeights(Path(folder), trainer.config.model))
    (batch,) = trainer.next_batches()
    steps = {"ours": our_step(trainer)} | {name: their_step(model.train(), batch) for name, model in models.items()}
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
    parser.add_argument("--model", choices=MODELS, default="gpt2")
    parser.add_argument("--num-layers", type=int, help="fewer for a quick look")
    args = parser.parse_args(argv)
    title, layers, _ = MODELS[args.model]
    args.num_layers = args.num_layers or layers
    if args.tp > 1 and args.clock != "wall":
        parser.error("with --tp only the wall clock counts the time spent waiting for one another: --clock wall")
    if args.write and args.num_layers != layers:
        parser.error(f"results are kept for {layers} layers only: leave out --write or --num-layers")
    load = os.getloadavg()[0]
    torch.set_num_threads(1)
    seconds = against_transformers(args) if args.tp == 1 else run_ranks(args.tp, tensor_parallel_rank, args)[0]
    for name, values in seconds.items():
        print(f"{name:26} {512 * args.micro_batch_size / statistics.median(values):8.1f} tokens/s")
    kind = "transformers" if args.tp == 1 else f"{args.tp} processes beside one"
    measured = {"ratios": lines(args, seconds), "rounds": args.repeats, "clock": args.clock, "load": load}
    kind = f"{title}, {kind}, micro-batch {args.micro_batch_size}"
    results = {kind: measured | machine("torch", "transformers")}
    print(page(results))
    if args.write:
        path = RESULTS / "train_step.json"
        results = (json.loads(path.read_text()) if path.exists() else {}) | results
        keep("train_step", results, page(results))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
