"""Supported model types of transformers, each one record: its ``config.json``, and where its tensors are stored.

:mod:`megatron.convert.huggingface.keys` explains the records.
"""

from __future__ import annotations

from collections.abc import Mapping

from megatron.config.plugins import registered
from megatron.convert.huggingface import deepseek_families as deepseek
from megatron.convert.huggingface import delta_net_families as delta_net
from megatron.convert.huggingface import dense_families as dense
from megatron.convert.huggingface import expert_families as experts
from megatron.convert.huggingface import hybrid_families as hybrid
from megatron.convert.huggingface.keys import ModelFamily

MODEL_FAMILIES: dict[str, ModelFamily] = {
    "gpt2": dense.GPT2,
    "llama": dense.LLAMA,
    "mistral": dense.MISTRAL,
    "qwen2": dense.QWEN2,
    "qwen3": dense.QWEN3,
    "mixtral": experts.MIXTRAL,
    "qwen3_moe": experts.QWEN3_MOE,
    "gpt_oss": experts.GPT_OSS,
    "ministral": dense.MINISTRAL,
    "gpt_neox": dense.NEOX,
    "olmo2": dense.OLMO2,
    "olmo3": dense.OLMO3,
    "gemma2": dense.GEMMA2,
    "gemma3_text": dense.GEMMA3,
    "phi3": dense.PHI3,
    "smollm3": dense.SMOLLM3,
    "starcoder2": dense.STARCODER2,
    "granite": dense.GRANITE,
    "qwen2_moe": experts.QWEN2_MOE,
    "olmoe": experts.OLMOE,
    "granitemoe": experts.GRANITE_MOE,
    "glm4_moe": deepseek.GLM4_MOE,
    "dots1": deepseek.DOTS1,
    "ernie4_5_moe": deepseek.ERNIE4_5_MOE,
    "deepseek_v2": deepseek.DEEPSEEK_V2,
    "deepseek_v3": deepseek.DEEPSEEK_V3,
    "kimi_k2": deepseek.KIMI_K2,
    "mamba2": hybrid.MAMBA2,
    "nemotron_h": hybrid.NEMOTRON_H,
    "bamba": hybrid.BAMBA,
    "granitemoehybrid": hybrid.GRANITE_HYBRID,
    "qwen3_next": delta_net.QWEN3_NEXT,
    "qwen3_5_text": delta_net.QWEN3_5,
    "qwen3_5_moe_text": delta_net.QWEN3_5_MOE,
}
"""Built-in families by transformers' ``model_type``."""

_ONE_NORM = "one norm that attention and MLP share"
_STATES = "recurrent layers other than Mamba-2 and gated DeltaNet"
MISSING: Mapping[str, str] = {
    "bloom": "position biases of attention (ALiBi)",
    "mpt": "position biases of attention (ALiBi)",
    "falcon": _ONE_NORM,
    "phi": _ONE_NORM,
    "gptj": _ONE_NORM,
    "codegen": _ONE_NORM,
    "cohere": _ONE_NORM,
    "cohere2": _ONE_NORM,
    "olmo": "norms without weights",
    "opt": "learned positions with an offset",
    "stablelm": "a family of a plugin, as in docs/extending.md",
    "dbrx": "clipped queries, keys and values",
    "llama4_text": "norms of queries and keys without weights",
    "gemma3n_text": "embeddings in every layer",
    "mamba": _STATES,
    "falcon_h1": "attention and Mamba-2 of the same input, with a factor of each",
    "jamba": _STATES,
    "rwkv": _STATES,
    "recurrent_gemma": _STATES,
    "t5": "an encoder beside the decoder",
    "bert": "attention in both directions",
    "gemma3": "images; its text model alone is a gemma3_text",
    "qwen3_5": "images; its text model alone is a qwen3_5_text",
    "qwen3_5_moe": "images; its text model alone is a qwen3_5_moe_text",
}
"""Model types that are refused -> what they need that is not supported."""


def model_families() -> Mapping[str, ModelFamily]:
    """Return all families by ``model_type``: the built-in ones, then those that plugins register.

    A plugin may replace a built-in family. An export uses the first family that can express the model.
    """
    return {**MODEL_FAMILIES, **registered("model_family")}
