"""The model types of transformers that are here: what their ``config.json`` says in terms of `ModelConfig`.

Each family is one record read both ways by `megatron.config.hf`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from megatron.config.model import ModelConfig

Json = Mapping[str, Any]
Values = dict[str, Any]


@dataclass(frozen=True)
class Key:
    """A key of config.json that says exactly what one of our fields says.

    Attributes:
        ours: the field of `ModelConfig`.
        theirs: the key.
        default: its value when the key is missing, as in transformers' class.
    """

    ours: str
    theirs: str
    default: Any


@dataclass(frozen=True)
class Family:
    """One model type of transformers.

    Attributes:
        architecture: the class with a language-modelling head.
        keys: what both sides can say.
        fixed: keys with the only values that we have; the first is also what a missing key means.
        reads: the other keys that ``read`` looks at.
        read: further fields, read out of a config.json; raises `RefusedError`.
        write: further keys, of a model that the family can express.
        can: for each group of our options, whether the family can express what a model says with them.
    """

    architecture: str
    keys: tuple[Key, ...]
    fixed: Mapping[str, tuple[Any, ...]]
    reads: tuple[str, ...]
    read: Callable[[Json], Values]
    write: Callable[[ModelConfig], Values]
    can: Mapping[str, Callable[[ModelConfig], bool]]


class RefusedError(ValueError):
    """A sentence on what config.json says and is not here."""


def value_of(key: Key, config: Json) -> Any:
    """What ``config`` says under the key, as a number of the kind the key has.

    Raises:
        RefusedError: when it is no such number.
    """
    value = config.get(key.theirs, key.default)
    fractional = isinstance(key.default, float)
    if value is None and key.default is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float) if fractional else int):
        raise RefusedError(f"{key.theirs} is {value!r}, not a {'number' if fractional else 'whole number'}")
    return float(value) if fractional else value


# ---- rotary positions ----

_LLAMA3 = (
    Key("rope_scaling_factor", "factor", 8.0),
    Key("rope_low_freq_factor", "low_freq_factor", 1.0),
    Key("rope_high_freq_factor", "high_freq_factor", 4.0),
    Key("rope_original_max_position", "original_max_position_embeddings", None),
)
_YARN = (
    Key("rotary_scaling_factor", "factor", 1.0),
    Key("yarn_original_max_position_embeddings", "original_max_position_embeddings", None),
    Key("yarn_beta_fast", "beta_fast", 32.0),
    Key("yarn_beta_slow", "beta_slow", 1.0),
)
_SCALINGS: dict[str, tuple[Key, ...]] = {"default": (), "llama3": _LLAMA3, "yarn": _YARN}
_ROPE = ("rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor", "original_max_position_embeddings")


def _read_rope(config: Json) -> Values:
    """Transformers 5 writes ``rope_parameters``; before, it was ``rope_theta`` and ``rope_scaling``."""
    new, old = config.get("rope_parameters"), config.get("rope_scaling")
    if new and old and new != old:
        raise RefusedError(f"rope_parameters {new} and rope_scaling {old} contradict each other")
    said = dict(new or old or {})
    theta = said.pop("rope_theta", config.get("rope_theta", 10000.0))
    old_spelling = said.pop("type", "default")
    kind = said.pop("rope_type", old_spelling)
    if kind not in _SCALINGS:
        raise RefusedError(f"rope_type {kind!r} is not here; these are: {', '.join(_SCALINGS)}")
    share = said.pop("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    if share not in (1, None):
        raise RefusedError(f"partial_rotary_factor {share} is not what this model type computes")
    values: Values = {
        "position_embedding_type": "yarn" if kind == "yarn" else "rope",
        "rotary_base": float(theta),
        "use_rope_scaling": kind == "llama3",
    }
    if kind != "default":
        length = config.get("original_max_position_embeddings", config.get("max_position_embeddings"))
        said.setdefault("original_max_position_embeddings", length)
    if kind == "yarn":
        _standard_yarn(said)
    for key in _SCALINGS[kind]:
        values[key.ours] = value_of(key, said)
        said.pop(key.theirs, None)
    if said:
        raise RefusedError(f"rope_type {kind!r} with {', '.join(sorted(said))} is not here")
    return values


def _standard_yarn(said: Values) -> None:
    """Take out the options of YaRN that have one value here, the paper's.

    Raises:
        RefusedError: when one has another.
    """
    factor = said.get("factor")
    if not isinstance(factor, int | float):
        raise RefusedError(f"yarn's factor is {factor}, not a number")
    attention = said.pop("attention_factor", None)
    if attention is not None and not math.isclose(attention, 0.1 * math.log(factor) + 1.0, rel_tol=1e-6):
        raise RefusedError(f"yarn's attention_factor {attention} is not 0.1 ln(factor) + 1, the only one here")
    if said.get("mscale") and said.get("mscale_all_dim"):
        raise RefusedError("yarn's mscale and mscale_all_dim are not here")
    if said.pop("truncate", True) is not True:
        raise RefusedError("yarn with truncate false is not here")
    for name in ("mscale", "mscale_all_dim"):
        said.pop(name, None)
    for name, default in (("beta_fast", 32.0), ("beta_slow", 1.0)):  # transformers takes 0 and null as unsaid
        said[name] = said.get(name) or default


def _write_rope(model: ModelConfig) -> Values:
    """In the spelling that transformers 4 and 5 both read."""
    kind = "yarn" if model.position_embedding_type == "yarn" else "llama3" if model.use_rope_scaling else "default"
    scaling = {key.theirs: getattr(model, key.ours) for key in _SCALINGS[kind]}
    return {"rope_theta": model.rotary_base, "rope_scaling": {"rope_type": kind, **scaling} if scaling else None}


# ---- GPT-2 ----

_GELUS = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu", "relu2": "relu2"}
"""Activations of GPT-2's MLP; of two spellings of one function the first is written."""

_WIDTH = Key("hidden_size", "n_embd", 768)


def _read_gpt2(config: Json) -> Values:
    activation = config.get("activation_function", "gelu_new")
    if activation not in _GELUS:
        raise RefusedError(f"activation_function {activation!r} is not here; these are: {', '.join(_GELUS)}")
    after_blocks, after_embedding = config.get("resid_pdrop", 0.1), config.get("embd_pdrop", 0.1)
    if after_blocks != after_embedding:
        raise RefusedError(f"resid_pdrop {after_blocks} and embd_pdrop {after_embedding} differ; here they are one")
    values: Values = {
        "position_embedding_type": "learned_absolute",
        "normalization": "LayerNorm",
        "activation": _GELUS[activation],
        "add_bias_linear": True,
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
    },
)

# ---- Llama and its relatives ----


def _llama_keys(**defaults: Any) -> tuple[Key, ...]:
    """The keys that all of them share; ``defaults`` of one class by our field's name."""
    keys = (
        Key("num_layers", "num_hidden_layers", 32),
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
    """What all relatives of Llama have in common, and what only some of them have as the others have it."""
    fixed = {"normalization": "RMSNorm", "activation": "swiglu", "hidden_dropout": 0.0}
    plain = {"add_bias_linear": False, "add_qkv_bias": False, "qk_layernorm": False, "window_size": None}
    return fixed | plain | _read_rope(config)


def _read_llama(config: Json) -> Values:
    attention, mlp = config.get("attention_bias", False), config.get("mlp_bias", False)
    if attention != mlp:
        raise RefusedError(f"attention_bias {attention} with mlp_bias {mlp} is not here: all have one or none")
    return _read_decoder(config) | {"add_bias_linear": bool(attention)}


def _write_llama(model: ModelConfig) -> Values:
    return _write_rope(model) | {"attention_bias": model.add_bias_linear, "mlp_bias": model.add_bias_linear}


def _read_mistral(config: Json) -> Values:
    return _read_decoder(config) | {"window_size": config.get("sliding_window", 4096)}


def _write_mistral(model: ModelConfig) -> Values:
    return _write_rope(model) | {"sliding_window": model.window_size}


_QWEN_WINDOW = ("use_sliding_window", "sliding_window", "max_window_layers", "layer_types")


def _read_qwen_window(config: Json) -> Values:
    """Qwen's first layers may look at everything while the others have a window; here all layers are alike."""
    layers, full = config.get("num_hidden_layers", 32), config.get("max_window_layers", 28)
    window = config.get("sliding_window", 4096) if config.get("use_sliding_window", False) else None
    by_place = ["sliding_attention" if window and i >= full else "full_attention" for i in range(layers)]
    kinds = set(config.get("layer_types") or by_place)
    if len(kinds) > 1 or not kinds <= {"sliding_attention", "full_attention"}:
        raise RefusedError(f"layers of several kinds ({', '.join(sorted(kinds))}) are not here: all layers are alike")
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
    return _write_rope(model) | _write_qwen_window(model)


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
_SILU = {"hidden_act": ("silu", "swish")}

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "gpt2": _GPT2,
        "llama": Family(
            architecture="LlamaForCausalLM",
            keys=_llama_keys(),
            fixed=_SILU,
            reads=(*_ROPE, "attention_bias", "mlp_bias"),
            read=_read_llama,
            write=_write_llama,
            can={
                **_DECODER,
                **_NO_QK_NORM,
                "add_qkv_bias": lambda m: m.qkv_bias == m.add_bias_linear,
                "window_size": lambda m: m.window_size is None,
                "hidden_size": lambda m: m.hidden_size % m.num_attention_heads == 0,  # transformers insists
            },
        ),
        "mistral": Family(
            architecture="MistralForCausalLM",
            keys=_llama_keys(ffn_hidden_size=14336, num_query_groups=8, max_position_embeddings=131072),
            fixed=_SILU,
            reads=(*_ROPE, "sliding_window"),
            read=_read_mistral,
            write=_write_mistral,
            can={**_DECODER, **_NO_BIAS, **_NO_QK_NORM},
        ),
        "qwen2": Family(
            architecture="Qwen2ForCausalLM",
            keys=_llama_keys(
                ffn_hidden_size=22016, num_query_groups=32, vocab_size=151936, max_position_embeddings=32768
            ),
            fixed=_SILU,
            reads=(*_ROPE, *_QWEN_WINDOW),
            read=_read_qwen2,
            write=_write_qwen,
            can={
                **_DECODER,
                **_NO_QK_NORM,
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
            reads=(*_ROPE, *_QWEN_WINDOW),
            read=_read_qwen3,
            write=_write_qwen,
            can={**_DECODER, **_NO_BIAS, "qk_layernorm": lambda m: m.qk_layernorm},
        ),
    }
)
"""By transformers' ``model_type``. On export the first that can express a model is taken."""
