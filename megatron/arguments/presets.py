"""Known models: shape, sequence length and the optimizer settings of their papers. Dropout is 0 in all.

A preset sets neither layout, precision, batch nor length: those depend on the machine and the budget. A batch far from
that of the paper is noted, because the learning rate was chosen for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import MappingProxyType
from typing import Any

from megatron.config.batch import full_global_batch_size
from megatron.config.run import RunConfig

Preset = dict[str, Any]

_PAPERS: Preset = {
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "lr_decay_style": "cosine",
    "weight_decay": 0.1,
    "adam_beta1": 0.9,
    "adam_beta2": 0.95,
    "clip_grad": 1.0,
}

_GPT: Preset = _PAPERS | {
    "position_embedding_type": "learned_absolute",
    "normalization": "LayerNorm",
    "activation": "gelu_tanh",
    "add_bias_linear": True,
    "untie_embeddings_and_output_weights": False,
    # Brown et al. 2020, appendix B: warm-up over 375M of 300B tokens, decay to a tenth
    "lr_warmup_fraction": 0.00125,
    "adam_eps": 1e-8,
}

_LLAMA: Preset = _PAPERS | {
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "activation": "swiglu",
    "add_bias_linear": False,
    "untie_embeddings_and_output_weights": True,
    # Touvron et al. 2023: warm-up of 2,000 of about 500,000 steps, decay to a tenth
    "lr_warmup_fraction": 0.004,
    "adam_eps": 1e-5,
}


def _shape(layers: int, hidden: int, heads: int, length: int, lr: float, min_lr: float) -> Preset:
    shape = {"num_layers": layers, "hidden_size": hidden, "num_attention_heads": heads}
    return shape | {"seq_length": length, "max_position_embeddings": length, "lr": lr, "min_lr": min_lr}


def _gpt(layers: int, hidden: int, heads: int, length: int, lr: float) -> Preset:
    return _GPT | _shape(layers, hidden, heads, length, lr, lr / 10) | {"vocab_size": 50257}


def _llama3(layers: int, hidden: int, heads: int, ffn: int, lr: float) -> Preset:
    # Grattafiori et al. 2024, section 3.4.1: warm-up of 8,000 of 1,200,000 steps, decay to a hundredth
    model = {"ffn_hidden_size": ffn, "vocab_size": 128256, "num_query_groups": 8, "rotary_base": 500000.0}
    warmup = {"lr_warmup_fraction": 8000 / 1_200_000}
    return _LLAMA | _shape(layers, hidden, heads, 8192, lr, lr / 100) | model | warmup


# Learning rates of the GPT family: Brown et al. 2020, table 2.1, at the nearest size. The tiny models are small enough
# for a laptop's CPU; their vocabulary is the tokenizer's.
PRESETS = MappingProxyType(
    {
        "gpt2-124m": _gpt(12, 768, 12, 1024, 6e-4),
        "gpt2-355m": _gpt(24, 1024, 16, 1024, 3e-4),
        "gpt2-774m": _gpt(36, 1280, 20, 1024, 2.5e-4),
        "gpt2-1.5b": _gpt(48, 1600, 25, 1024, 2e-4),
        "gpt3-175b": _gpt(96, 12288, 96, 2048, 0.6e-4),
        "llama2-7b": _LLAMA | _shape(32, 4096, 32, 4096, 3e-4, 3e-5) | {"ffn_hidden_size": 11008, "vocab_size": 32000},
        "llama3-8b": _llama3(32, 4096, 32, 14336, 3e-4),
        "llama3-70b": _llama3(80, 8192, 64, 28672, 1.5e-4),
        "llama3-405b": _llama3(126, 16384, 128, 53248, 8e-5),
        "tiny-gpt2": _GPT | _shape(2, 64, 4, 256, 1e-3, 1e-4) | {"lr_warmup_fraction": 0.05},
        "tiny-llama": _LLAMA
        | _shape(4, 128, 8, 256, 1e-3, 1e-4)
        | {"lr_warmup_fraction": 0.05, "num_query_groups": 4, "ffn_hidden_size": 384},
    }
)

# GPT: Brown et al. 2020, table 2.1. Llama 2: Touvron et al. 2023, section 2.2. Llama 3: Grattafiori et al. 2024,
# section 3.4.1, for 405B the last stage of its ramp, for the others, whose batches are not published, the first.
PAPER_TOKENS_PER_STEP = MappingProxyType(
    dict.fromkeys(("gpt2-124m", "gpt2-355m", "gpt2-774m"), 500_000)
    | {"gpt2-1.5b": 1_000_000, "gpt3-175b": 3_200_000, "llama2-7b": 4_000_000}
    | {"llama3-8b": 4_000_000, "llama3-70b": 4_000_000, "llama3-405b": 16_000_000}
)
"""Tokens per step for which the learning rate of a preset was chosen."""


def preset_batch_notes(name: str | None, config: RunConfig, world_size: int) -> Iterator[str]:
    """Yield a note if a preset's learning rate is used with less than half or more than twice its paper's batch."""
    paper, training = PAPER_TOKENS_PER_STEP.get(name or ""), config.training
    scaled = config.optimizer.lr_scaling != "none"
    if scaled or paper is None or name is None or config.optimizer.lr != PRESETS[name]["lr"]:
        return
    tokens = full_global_batch_size(training, config.parallel.data_parallel_size(world_size)) * training.seq_length
    if not paper / 2 <= tokens <= 2 * paper:
        samples = 16 * max(1, round(paper / training.seq_length / 16))
        yield (
            f"TOKENS PER STEP: {tokens:,} here, {paper:,} in the paper that the learning rate "
            f"{config.optimizer.lr:g} of --preset {name} comes from; set --global-batch-size {samples}, another --lr, "
            f"or --lr-scaling sqrt --lr-base-batch-size {samples}"
        )
