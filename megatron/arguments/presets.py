"""Known models: shape, sequence length and the optimizer settings of their papers. Dropout is 0 in all.

A preset sets neither layout, precision, batch nor length: those depend on the machine and the budget.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

Preset = dict[str, Any]

_GPT: Preset = {
    "position_embedding_type": "learned_absolute",
    "normalization": "LayerNorm",
    "activation": "gelu_tanh",
    "add_bias_linear": True,
    "untie_embeddings_and_output_weights": False,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    # Brown et al. 2020, appendix B: warm-up over 375M of 300B tokens, decay to a tenth
    "lr_decay_style": "cosine",
    "lr_warmup_fraction": 0.00125,
    "weight_decay": 0.1,
    "adam_beta1": 0.9,
    "adam_beta2": 0.95,
    "adam_eps": 1e-8,
    "clip_grad": 1.0,
}

_LLAMA: Preset = {
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "activation": "swiglu",
    "add_bias_linear": False,
    "untie_embeddings_and_output_weights": True,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    # Touvron et al. 2023: warm-up of 2,000 of about 500,000 steps, decay to a tenth
    "lr_decay_style": "cosine",
    "lr_warmup_fraction": 0.004,
    "weight_decay": 0.1,
    "adam_beta1": 0.9,
    "adam_beta2": 0.95,
    "adam_eps": 1e-5,
    "clip_grad": 1.0,
}

# Grattafiori et al. 2024, section 3.4.1: warm-up of 8,000 of 1,200,000 steps, decay to a hundredth
_LLAMA3: Preset = _LLAMA | {
    "vocab_size": 128256,
    "num_query_groups": 8,
    "rotary_base": 500000.0,
    "seq_length": 8192,
    "max_position_embeddings": 8192,
    "lr_warmup_fraction": 8000 / 1_200_000,
}


def _gpt(layers: int, hidden: int, heads: int, length: int, lr: float) -> Preset:
    shape = {"num_layers": layers, "hidden_size": hidden, "num_attention_heads": heads, "vocab_size": 50257}
    places = {"seq_length": length, "max_position_embeddings": length}
    return _GPT | shape | places | {"lr": lr, "min_lr": lr / 10}


def _llama3(layers: int, hidden: int, heads: int, ffn: int, lr: float) -> Preset:
    shape = {"num_layers": layers, "hidden_size": hidden, "num_attention_heads": heads, "ffn_hidden_size": ffn}
    return _LLAMA3 | shape | {"lr": lr, "min_lr": lr / 100}


_LLAMA2_7B: Preset = _LLAMA | {
    "num_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "ffn_hidden_size": 11008,
    "vocab_size": 32000,
    "seq_length": 4096,
    "max_position_embeddings": 4096,
    "lr": 3e-4,
    "min_lr": 3e-5,
}

# Small enough for a laptop's CPU; the vocabulary is the tokenizer's.
_TINY: Preset = {
    "seq_length": 256,
    "max_position_embeddings": 256,
    "lr": 1e-3,
    "min_lr": 1e-4,
    "lr_warmup_fraction": 0.05,
}
_TINY_GPT2: Preset = _GPT | _TINY | {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4}
_TINY_LLAMA: Preset = (
    _LLAMA
    | _TINY
    | {
        "num_layers": 4,
        "hidden_size": 128,
        "num_attention_heads": 8,
        "num_query_groups": 4,
        "ffn_hidden_size": 384,
    }
)

# Learning rates of the GPT family: Brown et al. 2020, table 2.1, at the nearest size.
PRESETS = MappingProxyType(
    {
        "gpt2-124m": _gpt(12, 768, 12, 1024, 6e-4),
        "gpt2-355m": _gpt(24, 1024, 16, 1024, 3e-4),
        "gpt2-774m": _gpt(36, 1280, 20, 1024, 2.5e-4),
        "gpt2-1.5b": _gpt(48, 1600, 25, 1024, 2e-4),
        "gpt3-175b": _gpt(96, 12288, 96, 2048, 0.6e-4),
        "llama2-7b": _LLAMA2_7B,
        "llama3-8b": _llama3(32, 4096, 32, 14336, 3e-4),
        "llama3-70b": _llama3(80, 8192, 64, 28672, 1.5e-4),
        "llama3-405b": _llama3(126, 16384, 128, 53248, 8e-5),
        "tiny-gpt2": _TINY_GPT2,
        "tiny-llama": _TINY_LLAMA,
    }
)
