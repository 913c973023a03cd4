"""Speed of a step that trains adapters, beside `peft` and beside full training.

    python -m benchmarks.finetune

The model is a Llama of 12 layers, 768 channels and 32,000 tokens with random weights in fp32, on sequences of 512; LoRA
of rank 16 on all linears of its blocks. All contestants start from the same weights, their first losses must agree, and
they take turns in one process with one thread; a ratio is the median over rounds of neighbouring steps.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import peft
import torch
import transformers

from benchmarks.record import conditions, options, ratios, rounds_of, run, spreads
from benchmarks.train_step import Step, compare_steps, our_step, their_step
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
    common = ["--pretrained-checkpoint", f"hf:{folder}", "--seq-length", str(SEQUENCE), "--mock-data"]
    common += ["--device", "cpu", "--train-iters", "1000"]
    config = parse([*common, *flags], {}, read_model=read_model_values).config
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


def page(result: dict[str, Any]) -> str:
    """Return the ratios and where they were measured, as Markdown."""
    title = "# Training adapters, Llama of 134M parameters, LoRA of rank 16, fp32, sequence 512, CPU, one thread"
    where = f"{rounds_of(result)}; {conditions(result, 'torch', 'transformers', 'peft')}"
    return "\n".join([title, *spreads("ratio", result["ratios"]), "", where])


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Return the ratios."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        (ours, first), *others = compare_steps(contestants(Path(folder), args.num_layers), args).items()
    return {"ratios": {f"tokens/s of {ours} / {name}": ratios(seconds, first) for name, seconds in others}}


def main(argv: Sequence[str]) -> int:
    """Run the benchmark."""
    parser = options(__doc__, clock=True)
    parser.add_argument("--num-layers", type=int, default=12, help="fewer for a quick look")
    packages = ("torch", "transformers", "peft")
    return run("finetune", parser, argv, measure, page, packages, fixed=("num_layers",))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
