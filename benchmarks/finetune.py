"""Speed of a step that trains adapters, beside `peft` and beside full training.

    python -m benchmarks.finetune

The model is a Llama of 12 layers, 768 channels and 32,000 tokens with random weights in fp32, on sequences of 512; LoRA
of rank 16 on all linears of its blocks. All contestants start from the same weights, their first losses must agree, and
they take turns in one process with one thread; a ratio is the median over rounds of neighbouring steps.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import peft
import torch
import transformers

from benchmarks.record import keep, machine
from benchmarks.train_step import CLOCKS, Step, compare, our_step, take_turns, their_step
from megatron.arguments.cli import parse
from megatron.convert.huggingface.config import read_model_values
from megatron.training.build import build_trainer
from megatron.training.checkpointer import Checkpointer
from megatron.training.resume_source import find_resume_source
from megatron.training.trainer import Trainer

SEQUENCE, RANK = 512, 16
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def their_model(layers: int) -> transformers.LlamaForCausalLM:
    """Build the model in `transformers`."""
    sizes = {"hidden_size": 768, "intermediate_size": 2048, "num_attention_heads": 12, "num_hidden_layers": layers}
    config = transformers.LlamaConfig(**sizes, vocab_size=32000, max_position_embeddings=SEQUENCE, use_cache=False)
    return transformers.LlamaForCausalLM(config).train()


def our_trainer(folder: Path, flags: Sequence[str]) -> Trainer:
    """Build a trainer that starts from the model in ``folder`` as the command line would."""
    common = [
        "--pretrained-checkpoint",
        f"hf:{folder}",
        "--seq-length",
        str(SEQUENCE),
        "--mock-data",
        "--device",
        "cpu",
    ]
    config = parse([*common, "--train-iters", "1000", *flags], {}, read_model=read_model_values).config
    source = find_resume_source(config.resume_options)
    trainer = build_trainer(config, 0, 1, fresh=source.fresh)
    Checkpointer(trainer).load(source)
    return trainer


def contestants(folder: Path, layers: int) -> dict[str, Step]:
    """Return a step of each contestant by name, ours first."""
    model = their_model(layers)
    model.save_pretrained(folder)
    adapted = our_trainer(folder, ["--lora-rank", str(RANK)])
    full = our_trainer(folder, [])
    (batch,) = adapted.next_batches()
    config = peft.LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=TARGETS, task_type="CAUSAL_LM")
    return {
        "ours, LoRA": our_step(adapted),
        "peft, LoRA": their_step(peft.get_peft_model(model, config), batch),
        "ours, all weights": our_step(full),
    }


def report(seconds: Mapping[str, Sequence[float]], args: argparse.Namespace) -> str:
    """Return the ratios and where they were measured, as Markdown."""
    ratios = {
        f"tokens/s of ours, LoRA / {name}": ratio
        for name, ratio in compare(seconds, [name for name in seconds if name != "ours, LoRA"]).items()
    }
    facts = machine("torch", "transformers", "peft")
    lines = ["# Training adapters, Llama of 134M parameters, LoRA of rank 16, fp32, sequence 512, CPU, one thread", ""]
    lines += ["| ratio | median | lowest | highest |", "|---|---|---|---|"]
    lines += [f"| {name} | {middle:.2f} | {low:.2f} | {high:.2f} |" for name, (middle, low, high) in ratios.items()]
    versions = ", ".join(f"{key} {facts[key]}" for key in ("python", "torch", "transformers", "peft"))
    lines += ["", f"{args.repeats} alternating rounds, {args.clock} time; {facts['processor']}, load {args.load:.1f}"]
    text = "\n".join(lines) + f" before the start; {versions}."
    if args.write:
        results = {"ratios": ratios, "rounds": args.repeats, "clock": args.clock, "load": args.load} | facts
        keep("finetune", results, text)
    return text


def main(argv: Sequence[str]) -> int:
    """Measure, print, and write if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-layers", type=int, default=12, help="fewer for a quick look")
    parser.add_argument("--repeats", type=int, default=5, help="rounds")
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="processor: where others use the machine too")
    parser.add_argument("--write", action="store_true", help="keep the result under benchmarks/results")
    args = parser.parse_args(argv)
    if args.write and args.num_layers != 12:
        parser.error("results are kept for 12 layers only: leave out --write or --num-layers")
    args.load = os.getloadavg()[0]  # of the last minute: other work on the machine
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        seconds = take_turns(contestants(Path(folder), args.num_layers), args)
    for name, values in seconds.items():
        print(f"{name:20} {SEQUENCE / statistics.median(values):8.1f} tokens/s")
    print(report(seconds, args))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
