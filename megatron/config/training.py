"""Run length, batch sizes, evaluation, recomputation, objectives, and the language of batch steps."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from megatron.config.objective import ObjectiveOptions
from megatron.config.offload import ActivationOffloadOptions
from megatron.config.option import MAX_SIZE, ZERO_IS_NONE, MegatronOption, Need, WithPluginOptions, option
from megatron.config.phases import PhaseOptions
from megatron.config.reliability import parse_nonfinite_policy

MAX_BATCH = 10**6
"""Samples in a batch; a ramp has at most as many steps."""

CHAT_DATA = Need("chat_data_path")
FULL_RECOMPUTE = Need("recompute_granularity=full")
DENSE_MLP = Need("not num_experts or moe_shared_expert_intermediate_size", "an MLP beside the experts")
EVALUATION = Need("eval_iters>0 or valid_chat_data_path", "--eval-iters above 0")
TRAINING_STEPS = Need("not skip_train", "training steps (--skip-train takes none)")


def parse_batch_steps(words: str | Iterable[str]) -> list[tuple[int, int]]:
    """Parse ``--step-batch-size-schedule``; returns each global batch after the number of tokens it begins at.

    Raises:
        ValueError: for a word that is not ``TOKENS:BATCH``.
    """
    steps = []
    for word in (words if isinstance(words, str) else " ".join(words)).replace(",", " ").split():
        match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMBT]?):([1-9]\d*)", word, re.IGNORECASE)
        if match is None:
            raise ValueError(f"{word!r} is not TOKENS:BATCH, such as 200B:768")
        number, unit, size = match.groups()
        steps.append((round(float(number) * 1000 ** " KMBT".index(unit.upper() or " ")), int(size)))
    return steps


@dataclass(frozen=True, init=False, eq=False, repr=False)
class StepOptions(WithPluginOptions):
    """Options of samples and steps, of their evaluation, and of recomputation."""

    seq_length: int = option(1024, role="data", at_least=1, at_most=MAX_SIZE, spellings=("--encoder-seq-length",))
    """Tokens per sample."""
    micro_batch_size: int = option(1, role="free", at_least=1, at_most=MAX_BATCH, spellings=("--batch-size",))
    """Samples per micro-batch of a rank."""
    global_batch_size: int | None = option(None, role="schedule", at_least=1, at_most=MAX_BATCH)
    """Samples per step over all ranks. Default: micro_batch_size x DP."""
    pad_global_batch: bool = option(False, role="free")
    """Pad a global batch that DP x micro_batch_size does not divide with samples that do not count."""
    rampup_batch_size: tuple[int, int, int] | None = option(None, role="schedule", at_least=1)
    """START INCREMENT SAMPLES: grow the global batch from START by INCREMENT over the first SAMPLES samples."""
    step_batch_size_schedule: tuple[str, ...] = option((), role="schedule", check=parse_batch_steps)
    """TOKENS:BATCH ...: global batch from a number of tokens on, such as 0:384 200B:768, with K, M, B or T."""
    train_iters: int | None = option(None, role="schedule", at_least=1)
    """Steps to train for."""
    train_samples: int | None = option(None, role="schedule", at_least=1)
    """Samples to train on, instead of train_iters."""
    num_epochs: int | None = option(None, role="schedule", at_least=1, needs=CHAT_DATA)
    """Passes over chat_data_path to train for, instead of train_iters."""
    eval_interval: int | None = option(
        1000, role="free", at_least=1, needs=(EVALUATION, TRAINING_STEPS), megatron=ZERO_IS_NONE
    )
    """Steps between evaluations, besides the one at the end; null for only that one, or with num_epochs for one at the
    end of each epoch."""
    eval_iters: int = option(0, role="free", at_least=0, megatron=MegatronOption("100", "evaluation is opt-in"))
    """Global batches per evaluation; 0 turns evaluation off."""
    exit_interval: int | None = option(None, role="start", at_least=1, needs=TRAINING_STEPS, megatron=ZERO_IS_NONE)
    """Stop cleanly after a step that is a multiple of this."""
    exit_duration_in_mins: float | None = option(
        None, role="start", above=0, example=60, needs=TRAINING_STEPS, megatron=ZERO_IS_NONE
    )
    """Stop cleanly with exit status 124 after the first step that ends this many minutes after the start."""
    stop_file: str | None = option(None, role="start", needs=TRAINING_STEPS, spellings=("--kill-switch-path",))
    """Stop cleanly with exit status 0 after the next step once this file exists."""
    skip_train: bool = option(False, role="start")
    """Only evaluate the loaded checkpoint on the validation and test data."""
    seed: int = option(1234, role="data", at_least=0, below=2**32)
    """Seed of initialization, dropout and sample order."""
    device: str = option("auto", role="free", choices=("auto", "cpu", "cuda"))
    """Device to compute on."""
    on_nonfinite: str = option("stop", role="free", check=parse_nonfinite_policy)
    """Action when the loss or a gradient is NaN or infinite: skip the update, stop the run, or rewind:N as on_spike."""
    recompute_granularity: str | None = option(
        None,
        role="free",
        choices=("full", "selective"),
        aliases={"--recompute-activations": "selective"},
        spellings=("--activations-checkpoint-granularity",),
    )
    """Activation recomputation in the backward pass: full (whole blocks) or selective (recompute_modules)."""
    recompute_method: str | None = option(None, role="free", choices=("uniform", "block"), needs=FULL_RECOMPUTE)
    """full: uniform (groups of recompute_num_layers; the default) or block (the first recompute_num_layers blocks)."""
    recompute_num_layers: int | None = option(
        None,
        role="free",
        at_least=1,
        needs=FULL_RECOMPUTE,
        spellings=("--activations-checkpoint-num-layers", "--checkpoint-num-layers"),
    )
    """full: blocks per group (uniform, default 1) or recomputed per stage (block, default all)."""
    recompute_modules: tuple[str, ...] = option(
        ("layernorm", "activation"),
        role="free",
        choices=("layernorm", "activation", "core_attn", "mlp", "mla_up_proj"),
        needs=Need("recompute_granularity=selective"),
        megatron=MegatronOption(
            "core_attn",
            "recomputing attention saves nothing with SDPA",
            values={"moe_act": "activation", "moe": "mlp", "shared_experts": "mlp"},
        ),
    )
    """selective: modules to recompute; mla_up_proj are the projections of latent attention from the latents."""

    other_meanings: ClassVar = """
    --rampup-batch-size
      --rampup-batch-size: the batch grows, as in Megatron-LM's earlier releases; release 0.20 reads the flag and
      trains with full batches
    """

    refused: ClassVar = """
    skip_train and not eval_iters>0
    E312 --skip-train only evaluates, and --eval-iters 0 turns evaluation off
      fix: --eval-iters 100 | drop --skip-train

    recompute_granularity=full and recompute_num_layers>num_layers
    E306 {recompute_num_layers} layers cannot be recomputed: the model has {num_layers}
      fix: --recompute-num-layers {num_layers}

    recompute_granularity=selective and not recompute_modules
    E306 --recompute-granularity selective needs --recompute-modules
      fix: --recompute-modules layernorm activation | drop --recompute-granularity
    """


@dataclass(frozen=True)
class TrainingConfig(ObjectiveOptions, ActivationOffloadOptions, PhaseOptions, StepOptions):
    """Run length, batch size, recomputation and evaluation."""

    neftune_alpha: float = option(0.0, role="schedule", at_least=0)
    """Noise on the embeddings in training (NEFTune): uniform, of up to this / sqrt(tokens of the document x hidden
    size)."""
    cross_entropy_chunk_size: int | None = option(None, role="free", at_least=1)
    """Tokens per chunk of the loss; only one chunk of logits exists at a time. Default: as many as give 1 GiB of logits
    on a GPU; 1,024 on a CPU."""
    mlp_chunk_size: int | None = option(None, role="free", at_least=1, needs=DENSE_MLP)
    """Tokens per chunk of the MLP on a rank: chunks are computed one after the other, and again in backward. Default:
    all at once."""

    refused: ClassVar = """
    cuda_graph=step and neftune_alpha>0
    E907 --cuda-graph step does not support --neftune-alpha: every step would add the same noise
      fix: --neftune-alpha 0 | --cuda-graph optimizer | --cuda-graph none
    """
