"""Supported model types of transformers, with the mapping between their ``config.json`` and `ModelConfig`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from megatron.config.hf_keys import Json, Key, RefusedError, Values, switch, value_of
from megatron.config.hf_rope import ROPE_KEYS, read_rope, write_rope
from megatron.config.model import ModelConfig


@dataclass(frozen=True)
class Family:
    """One model type of transformers, used in both directions."""

    # transformers' class with a language-modelling head
    architecture: str
    # keys that correspond to one field of ModelConfig
    keys: tuple[Key, ...]
    # keys with the only supported values; the first is the value of a missing key
    fixed: Mapping[str, tuple[Any, ...]]
    # the other keys that read uses
    reads: tuple[str, ...]
    # further fields of ModelConfig from a config.json; raises RefusedError
    read: Callable[[Json], Values]
    # further keys of config.json for a model that the family can express
    write: Callable[[ModelConfig], Values]
    # option -> whether the family can express the model's value of it
    can: Mapping[str, Callable[[ModelConfig], bool]]


# ---- GPT-2 ----

_GELUS = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu", "relu2": "relu2"}
"""GPT-2's names of activations; an export writes the first name of a function."""

_WIDTH = Key("hidden_size", "n_embd", 768)


def _read_gpt2(config: Json) -> Values:
    activation = config.get("activation_function", "gelu_new")
    if activation not in tuple(_GELUS):  # a tuple, because activation may be unhashable
        raise RefusedError(f"activation_function {activation!r} is not supported, only {', '.join(_GELUS)}")
    residual_dropout, embedding_dropout = config.get("resid_pdrop", 0.1), config.get("embd_pdrop", 0.1)
    if residual_dropout != embedding_dropout:
        raise RefusedError(f"resid_pdrop {residual_dropout} and embd_pdrop {embedding_dropout} must be equal")
    values: Values = {
        "position_embedding_type": "learned_absolute",
        "normalization": "LayerNorm",
        "activation": _GELUS[activation],
        "add_bias_linear": True,
        "num_experts": None,
    }
    four_times = config.get("n_inner") == 4 * value_of(_WIDTH, config)
    return values | {"ffn_hidden_size": None} if four_times else values


def _write_gpt2(model: ModelConfig) -> Values:
    return {
        "activation_function": next(theirs for theirs, ours in _GELUS.items() if ours == model.activation),
        "embd_pdrop": model.hidden_dropout,
    }


_GPT2 = Family(
    architecture="GPT2LMHeadModel",
    keys=(
        Key("num_layers", "n_layer", 12),
        _WIDTH,
        Key("ffn_hidden_size", "n_inner", None),
        Key("num_attention_heads", "n_head", 12),
        Key("vocab_size", "vocab_size", 50257),
        Key("max_position_embeddings", "n_positions", 1024),
        Key("norm_epsilon", "layer_norm_epsilon", 1e-5),
        Key("hidden_dropout", "resid_pdrop", 0.1),
        Key("attention_dropout", "attn_pdrop", 0.1),
        Key("init_method_std", "initializer_range", 0.02),
    ),
    fixed={
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "add_cross_attention": (False,),
    },
    reads=("activation_function", "embd_pdrop"),
    read=_read_gpt2,
    write=_write_gpt2,
    can={
        "position_embedding_type": lambda m: m.position_embedding_type == "learned_absolute",
        "normalization": lambda m: m.normalization == "LayerNorm",
        "activation": lambda m: m.activation in _GELUS.values(),
        "add_bias_linear": lambda m: m.add_bias_linear,
        "num_query_groups": lambda m: m.kv_groups == m.num_attention_heads,
        "kv_channels": lambda m: m.head_dim * m.num_attention_heads == m.hidden_size,
        "qk_layernorm": lambda m: not m.qk_layernorm,
        "window_size": lambda m: m.window_size is None,
        "num_experts": lambda m: m.num_experts is None,
    },
)

# ---- Llama and its relatives ----


_LAYERS = Key("num_layers", "num_hidden_layers", 32)


def _llama_keys(**defaults: Any) -> tuple[Key, ...]:
    """Return the keys that all of them share, with the defaults of one class by our field names."""
    keys = (
        _LAYERS,
        Key("hidden_size", "hidden_size", 4096),
        Key("ffn_hidden_size", "intermediate_size", 11008),
        Key("num_attention_heads", "num_attention_heads", 32),
        Key("num_query_groups", "num_key_value_heads", None),
        Key("kv_channels", "head_dim", None),
        Key("vocab_size", "vocab_size", 32000),
        Key("max_position_embeddings", "max_position_embeddings", 2048),
        Key("norm_epsilon", "rms_norm_eps", 1e-6),
        Key("attention_dropout", "attention_dropout", 0.0),
        Key("init_method_std", "initializer_range", 0.02),
    )
    return tuple(Key(k.ours, k.theirs, defaults.get(k.ours, k.default)) for k in keys)


def _read_decoder(config: Json) -> Values:
    """Return what all relatives of Llama share, and Llama's values of what some of them change."""
    shared = {"normalization": "RMSNorm", "activation": "swiglu", "hidden_dropout": 0.0}
    defaults = {"add_bias_linear": False, "add_qkv_bias": False, "qk_layernorm": False, "window_size": None}
    return shared | defaults | {"num_experts": None} | read_rope(config)


def _read_llama(config: Json) -> Values:
    attention, mlp = switch(config, "attention_bias", False), switch(config, "mlp_bias", False)
    if attention != mlp:
        raise RefusedError(f"attention_bias {attention} with mlp_bias {mlp} is not supported: they must be equal")
    return _read_decoder(config) | {"add_bias_linear": attention}


def _write_llama(model: ModelConfig) -> Values:
    return write_rope(model) | {"attention_bias": model.add_bias_linear, "mlp_bias": model.add_bias_linear}


_WINDOW = Key("window_size", "sliding_window", 4096, optional=True)


def _read_mistral(config: Json) -> Values:
    return _read_decoder(config) | {"window_size": value_of(_WINDOW, config)}


def _write_mistral(model: ModelConfig) -> Values:
    return write_rope(model) | {"sliding_window": model.window_size}


_QWEN_WINDOW = ("use_sliding_window", "sliding_window", "max_window_layers", "layer_types")


def _read_qwen_window(config: Json) -> Values:
    """Read Qwen's window, which its first layers may not have; here all layers have the same."""
    layers = value_of(_LAYERS, config)
    full = value_of(Key("", "max_window_layers", 28), config)
    window = value_of(_WINDOW, config) if switch(config, "use_sliding_window", False) else None
    by_place = ["sliding_attention" if window and i >= full else "full_attention" for i in range(layers)]
    layer_types = config.get("layer_types", by_place)
    kinds = set(map(str, layer_types)) if isinstance(layer_types, list) else {repr(layer_types)}
    if len(kinds) > 1 or not kinds <= {"sliding_attention", "full_attention"}:
        raise RefusedError(f"layers of several kinds ({', '.join(sorted(kinds))}) are not supported")
    return {"window_size": window if kinds == {"sliding_attention"} else None}


def _write_qwen_window(model: ModelConfig) -> Values:
    windowed = model.window_size is not None
    first_full = 0 if windowed else model.num_layers
    return {"use_sliding_window": windowed, "sliding_window": model.window_size, "max_window_layers": first_full}


def _read_qwen2(config: Json) -> Values:
    return _read_decoder(config) | _read_qwen_window(config) | {"add_qkv_bias": True}


def _read_qwen3(config: Json) -> Values:
    return _read_decoder(config) | _read_qwen_window(config) | {"qk_layernorm": True}


def _write_qwen(model: ModelConfig) -> Values:
    return write_rope(model) | _write_qwen_window(model)


# ---- Mixtures of experts ----

_TRAINING = ("output_router_logits", "router_aux_loss_coef")
"""Keys of transformers' load-balancing loss, which do not change what the model computes. They are ignored: the loss
differs from ours (one loss over all layers) and is off by default."""

_NO_SHARED_EXPERT: Values = {"moe_shared_expert_intermediate_size": None}
_MIXTRAL = Key("window_size", "sliding_window", None), Key("num_experts", "num_local_experts", 8)


def _read_mixtral(config: Json) -> Values:
    own = {key.ours: value_of(key, config) for key in _MIXTRAL}
    experts = {"moe_ffn_hidden_size": None, "moe_router_pre_softmax": False}
    return _read_decoder({"rope_theta": 1e6} | config) | own | experts | _NO_SHARED_EXPERT


def _write_mixtral(model: ModelConfig) -> Values:
    return _write_mistral(model) | {"num_local_experts": model.num_experts, "intermediate_size": model.expert_ffn}


_QWEN_EXPERTS = ("num_experts", "num_local_experts")
"""The spelling of transformers 4, which version 5 reads too, and that of version 5."""


def _read_qwen3_moe(config: Json) -> Values:
    window = value_of(_WINDOW, config) if switch(config, "use_sliding_window", False) else None
    pre_softmax = not switch(config, "norm_topk_prob", False)
    counts = {name: value_of(Key("num_experts", name, 128), config) for name in _QWEN_EXPERTS if name in config}
    if len({*counts.values()}) > 1:
        raise RefusedError(" and ".join(f"{name} {n}" for name, n in counts.items()) + " contradict each other")
    experts = {"num_experts": next(iter(counts.values()), 128), "moe_router_pre_softmax": pre_softmax}
    others = {"qk_layernorm": True, "window_size": window}
    return _read_decoder(config) | experts | others | _NO_SHARED_EXPERT


def _write_qwen3_moe(model: ModelConfig) -> Values:
    window = {"use_sliding_window": model.window_size is not None, "sliding_window": model.window_size}
    experts = {"num_experts": model.num_experts, "norm_topk_prob": not model.moe_router_pre_softmax}
    return write_rope(model) | window | experts


_DECODER: dict[str, Callable[[ModelConfig], bool]] = {
    "position_embedding_type": lambda m: m.position_embedding_type in ("rope", "yarn"),
    "rotary_percent": lambda m: m.rotary_percent == 1.0,
    "rotary_interleaved": lambda m: not m.rotary_interleaved,
    "normalization": lambda m: m.normalization == "RMSNorm",
    "activation": lambda m: m.activation == "swiglu",
}
_NO_BIAS: dict[str, Callable[[ModelConfig], bool]] = {
    "add_bias_linear": lambda m: not m.add_bias_linear,
    "add_qkv_bias": lambda m: not m.qkv_bias,
}
_NO_QK_NORM: dict[str, Callable[[ModelConfig], bool]] = {"qk_layernorm": lambda m: not m.qk_layernorm}
_NO_EXPERTS: dict[str, Callable[[ModelConfig], bool]] = {"num_experts": lambda m: m.num_experts is None}
_EXPERTS: dict[str, Callable[[ModelConfig], bool]] = {
    "num_experts": lambda m: m.num_experts is not None,
    "moe_shared_expert_intermediate_size": lambda m: m.moe_shared_expert_intermediate_size is None,
}
_SILU = {"hidden_act": ("silu", "swish")}

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "gpt2": _GPT2,
        "llama": Family(
            architecture="LlamaForCausalLM",
            keys=_llama_keys(),
            fixed=_SILU,
            reads=(*ROPE_KEYS, "attention_bias", "mlp_bias"),
            read=_read_llama,
            write=_write_llama,
            can={
                **_DECODER,
                **_NO_QK_NORM,
                **_NO_EXPERTS,
                "add_qkv_bias": lambda m: m.qkv_bias == m.add_bias_linear,
                "window_size": lambda m: m.window_size is None,
                "hidden_size": lambda m: m.hidden_size % m.num_attention_heads == 0,  # required by transformers
            },
        ),
        "mistral": Family(
            architecture="MistralForCausalLM",
            keys=_llama_keys(ffn_hidden_size=14336, num_query_groups=8, max_position_embeddings=131072),
            fixed=_SILU,
            reads=(*ROPE_KEYS, "sliding_window"),
            read=_read_mistral,
            write=_write_mistral,
            can={**_DECODER, **_NO_BIAS, **_NO_QK_NORM, **_NO_EXPERTS},
        ),
        "qwen2": Family(
            architecture="Qwen2ForCausalLM",
            keys=_llama_keys(
                ffn_hidden_size=22016, num_query_groups=32, vocab_size=151936, max_position_embeddings=32768
            ),
            fixed=_SILU,
            reads=(*ROPE_KEYS, *_QWEN_WINDOW),
            read=_read_qwen2,
            write=_write_qwen,
            can={
                **_DECODER,
                **_NO_QK_NORM,
                **_NO_EXPERTS,
                "add_bias_linear": lambda m: not m.add_bias_linear,
                "add_qkv_bias": lambda m: m.qkv_bias,
            },
        ),
        "qwen3": Family(
            architecture="Qwen3ForCausalLM",
            keys=_llama_keys(
                ffn_hidden_size=22016,
                num_query_groups=32,
                kv_channels=128,
                vocab_size=151936,
                max_position_embeddings=32768,
            ),
            fixed={**_SILU, "attention_bias": (False,)},
            reads=(*ROPE_KEYS, *_QWEN_WINDOW),
            read=_read_qwen3,
            write=_write_qwen,
            can={**_DECODER, **_NO_BIAS, **_NO_EXPERTS, "qk_layernorm": lambda m: m.qk_layernorm},
        ),
        "mixtral": Family(
            architecture="MixtralForCausalLM",
            keys=(
                *_llama_keys(
                    ffn_hidden_size=14336,
                    num_query_groups=8,
                    max_position_embeddings=131072,
                    norm_epsilon=1e-5,
                ),
                Key("moe_router_topk", "num_experts_per_tok", 2),
            ),
            fixed={**_SILU, "router_jitter_noise": (0.0,)},
            reads=(*ROPE_KEYS, *_TRAINING, "sliding_window", "num_local_experts"),
            read=_read_mixtral,
            write=_write_mixtral,
            can={
                **_DECODER,
                **_NO_BIAS,
                **_NO_QK_NORM,
                **_EXPERTS,
                "moe_router_pre_softmax": lambda m: not m.moe_router_pre_softmax,
            },
        ),
        "qwen3_moe": Family(
            architecture="Qwen3MoeForCausalLM",
            keys=(
                *_llama_keys(
                    num_layers=24,
                    hidden_size=2048,
                    ffn_hidden_size=6144,
                    num_query_groups=4,
                    vocab_size=151936,
                    max_position_embeddings=32768,
                ),
                Key("moe_ffn_hidden_size", "moe_intermediate_size", 768),
                Key("moe_router_topk", "num_experts_per_tok", 8),
            ),
            fixed={**_SILU, "attention_bias": (False,), "decoder_sparse_step": (1,), "mlp_only_layers": ([], None)},
            reads=(*ROPE_KEYS, *_TRAINING, *_QWEN_WINDOW[:3], *_QWEN_EXPERTS, "norm_topk_prob"),
            read=_read_qwen3_moe,
            write=_write_qwen3_moe,
            can={**_DECODER, **_NO_BIAS, **_EXPERTS, "qk_layernorm": lambda m: m.qk_layernorm},
        ),
    }
)
"""Supported families by transformers' ``model_type``. An export uses the first one that can express the model."""
