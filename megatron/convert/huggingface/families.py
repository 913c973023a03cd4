"""Supported model types of transformers: their ``config.json``, and the tensors in their files.

A `ModelFamily` is one record used in both directions: the keys of config.json that correspond to one of our fields,
keys with fixed values, functions for the rest, which of our options the family can express, and where each of our
tensors is stored. `weights` and `config` apply the records. `model_families` returns the built-in ones and those
that plugins register.

A row of the weights names one of our tensors and the axes of its view, and the Hugging Face tensors that it consists
of. These are described by the same axes: commas separate the dimensions of the stored tensor, and brackets select a
part of an axis. So ``"h, x g d"`` is stored as ``[h, x * g * d]``, and ``"g x[-1:] d, h"`` is the last element of each
group's ``x``, stored as ``[g * d, h]``. A name with ``{e}`` stands for one tensor per expert, which ``e[{e}]`` selects.
Rows contain only views, permutations and slices, so they are invertible, and a box of our tensor is a set of slices of
theirs.

Axes: v vocabulary, t positions, h hidden, g key/value heads, x queries, key and value of a group, d channels of a head,
o outputs of all heads, p gate and up, f width of the MLP, e experts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from megatron.config.model import ModelConfig
from megatron.config.plugins import registered

JsonObject = dict[str, Any]
FieldValues = dict[str, Any]

WeightRow = tuple[str, str, tuple[tuple[str, str], ...]]
"""Our name, axes of our view, (name, axes) of each Hugging Face tensor. ``{i}`` is the layer, ``{e}`` the expert."""

Capabilities = Mapping[str, Callable[[ModelConfig], bool]]
"""Option -> whether a family can express a model's value of it."""


@dataclass(frozen=True)
class ConfigKey:
    """A numeric key of config.json with the same meaning as a field of `ModelConfig`."""

    ours: str  # field of ModelConfig
    theirs: str  # key in config.json
    default: Any  # value of a missing key, as in the transformers class
    optional: bool = False  # null is allowed although the default is not null


@dataclass(frozen=True)
class WeightTable:
    """Stored tensors of a family."""

    rows: tuple[WeightRow, ...]  # all tensors that a model can have
    prefix: str  # of all names except the head's; missing in files of a model without head
    buffers: tuple[str, ...]  # patterns of names, without the prefix, that are not weights


@dataclass(frozen=True)
class ModelFamily:
    """One model type of transformers."""

    # transformers' class with a language-modelling head
    architecture: str
    # keys that correspond to one field of ModelConfig
    keys: tuple[ConfigKey, ...]
    # keys with the only supported values; the first is the value of a missing key
    fixed: Mapping[str, tuple[Any, ...]]
    # the other keys that read uses
    reads: tuple[str, ...]
    # further fields of ModelConfig from a config.json; raises UnsupportedConfigError
    read: Callable[[JsonObject], FieldValues]
    # further keys of config.json for a model that the family can express
    write: Callable[[ModelConfig], FieldValues]
    # what the family can express
    can: Capabilities
    # where its tensors are stored
    weights: WeightTable
    # transformers' default of tie_word_embeddings
    tied_by_default: bool = False


class UnsupportedConfigError(ValueError):
    """A value in config.json that is not supported. Raised by all functions here that read one."""


def read_number(key: ConfigKey, config: JsonObject) -> Any:
    """Return the value of a key: a float if its default is one, else an int; or None where null is allowed."""
    value = config.get(key.theirs, key.default)
    fractional = isinstance(key.default, float)
    if value is None and (key.default is None or key.optional):
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float) if fractional else int):
        raise UnsupportedConfigError(f"{key.theirs} is {value!r}, not {'a number' if fractional else 'a whole number'}")
    return float(value) if fractional else value


def read_bool(config: JsonObject, name: str, default: bool) -> bool:
    """Return the boolean value of a key."""
    value = config.get(name, default)
    if not isinstance(value, bool):
        raise UnsupportedConfigError(f"{name} is {value!r}, not true or false")
    return value


def _weight(ours: str, axes: str, *theirs: tuple[str, str]) -> WeightRow:
    """Return the row of a module's weight; names are those of modules."""
    return f"{ours}.weight", axes, tuple((f"{name}.weight", their_axes) for name, their_axes in theirs)


def _weight_and_bias(ours: str, axes: str, *theirs: tuple[str, str]) -> tuple[WeightRow, WeightRow]:
    """Return the rows of a weight and of its bias, which has the same axes without the weight's inputs, our last."""
    *outputs, inputs = axes.split()
    if not outputs:  # a norm's
        outputs, inputs = [inputs], ""
    biases = tuple(
        (f"{name}.bias", ", ".join(dimension for dimension in their_axes.split(", ") if dimension != inputs))
        for name, their_axes in theirs
    )
    return _weight(ours, axes, *theirs), (f"{ours}.bias", " ".join(outputs), biases)


# ---- Rotary embeddings ----

_LENGTH = "original_max_position_embeddings"
_LLAMA3 = (
    ConfigKey("rope_scaling_factor", "factor", 8.0),
    ConfigKey("rope_low_freq_factor", "low_freq_factor", 1.0),
    ConfigKey("rope_high_freq_factor", "high_freq_factor", 4.0),
    ConfigKey("rope_original_max_position", _LENGTH, None),
)
_YARN = (
    ConfigKey("rotary_scaling_factor", "factor", 1.0),
    ConfigKey("yarn_original_max_position_embeddings", _LENGTH, None),
    ConfigKey("yarn_beta_fast", "beta_fast", 32.0),
    ConfigKey("yarn_beta_slow", "beta_slow", 1.0),
)
_SCALINGS: dict[str, tuple[ConfigKey, ...]] = {"default": (), "llama3": _LLAMA3, "yarn": _YARN}
_YARN_BETAS = {"beta_fast": 32.0, "beta_slow": 1.0}  # transformers uses these in place of 0 and null
_YARN_FIXED = {"attention_factor", "mscale", "mscale_all_dim", "truncate"}  # supported with one value only
_THETA = ConfigKey("rotary_base", "rope_theta", 10000.0)
ROPE_KEYS = (
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "partial_rotary_factor",
    "original_max_position_embeddings",
)


def read_rope(config: JsonObject) -> FieldValues:
    """Return the fields of `ModelConfig` for the rotary embedding of a config.json.

    Transformers 5 writes ``rope_parameters``; earlier versions write ``rope_theta`` and ``rope_scaling``.
    """
    rope = _rope_parameters(config)
    theta = read_number(_THETA, config | rope)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in tuple(_SCALINGS):  # a tuple, because kind may be unhashable
        raise UnsupportedConfigError(f"rope_type {kind!r} is not supported, only {', '.join(_SCALINGS)}")
    if kind == "yarn":
        _check_yarn(rope)
        rope |= {name: rope.get(name) or default for name, default in _YARN_BETAS.items()}
    missing = [key.theirs for key in _SCALINGS[kind] if rope.get(key.theirs) is None]
    if missing:
        raise UnsupportedConfigError(f"rope_type {kind!r} lacks {', '.join(missing)}")
    known = {*ROPE_KEYS, "rope_type", "type", *(key.theirs for key in _SCALINGS[kind])}
    unknown = sorted(rope.keys() - known - (_YARN_FIXED if kind == "yarn" else set()))
    if unknown:
        raise UnsupportedConfigError(f"rope_type {kind!r} with {', '.join(unknown)} is not supported")
    return {
        "position_embedding_type": "yarn" if kind == "yarn" else "rope",
        "rotary_base": theta,
        "use_rope_scaling": kind == "llama3",
        **{key.ours: read_number(key, rope) for key in _SCALINGS[kind]},
    }


def _rope_parameters(config: JsonObject) -> FieldValues:
    """Return the rope parameters of either version in one object."""
    new, old = config.get("rope_parameters"), config.get("rope_scaling")
    if new and old and new != old:
        raise UnsupportedConfigError(f"rope_parameters {new} and rope_scaling {old} contradict each other")
    rope = new or old or {}
    if not isinstance(rope, dict):
        raise UnsupportedConfigError(f"rope_parameters are {rope!r}, not an object")
    fraction = rope.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if fraction not in (1, None):
        raise UnsupportedConfigError(f"partial_rotary_factor {fraction} is not supported for this model type")
    top_level = {_LENGTH: config[_LENGTH]} if _LENGTH in config else {}  # takes precedence in transformers
    return {_LENGTH: config.get("max_position_embeddings")} | rope | top_level


def _check_yarn(rope: JsonObject) -> None:
    """Raise UnsupportedConfigError if an option of YaRN differs from the paper."""
    factor, attention = rope.get("factor"), rope.get("attention_factor")
    if not isinstance(factor, int | float) or factor < 1:
        raise UnsupportedConfigError(f"yarn's factor is {factor!r}, not a number of at least 1")
    usual = 0.1 * math.log(factor) + 1.0
    if attention is not None and not (isinstance(attention, float) and math.isclose(attention, usual, rel_tol=1e-6)):
        raise UnsupportedConfigError(
            f"yarn's attention_factor {attention!r} is not 0.1 ln(factor) + 1, the only one supported"
        )
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        raise UnsupportedConfigError("yarn's mscale and mscale_all_dim are not supported")
    if rope.get("truncate", True) is not True:
        raise UnsupportedConfigError("yarn with truncate false is not supported")


def write_rope(model: ModelConfig) -> FieldValues:
    """Return the rotary keys of a config.json, in the form that transformers 4 and 5 both read."""
    kind = "yarn" if model.position_embedding_type == "yarn" else "llama3" if model.use_rope_scaling else "default"
    scaling = {key.theirs: getattr(model, key.ours) for key in _SCALINGS[kind]}
    return {"rope_theta": model.rotary_base, "rope_scaling": {"rope_type": kind, **scaling} if scaling else None}


# ---- GPT-2 ----

_GELUS = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu", "relu2": "relu2"}
"""GPT-2's names of activations; an export writes the first name of a function."""

_WIDTH = ConfigKey("hidden_size", "n_embd", 768)


def _read_gpt2(config: JsonObject) -> FieldValues:
    activation = config.get("activation_function", "gelu_new")
    if activation not in tuple(_GELUS):  # a tuple, because activation may be unhashable
        raise UnsupportedConfigError(f"activation_function {activation!r} is not supported, only {', '.join(_GELUS)}")
    residual_dropout, embedding_dropout = config.get("resid_pdrop", 0.1), config.get("embd_pdrop", 0.1)
    if residual_dropout != embedding_dropout:
        raise UnsupportedConfigError(f"resid_pdrop {residual_dropout} and embd_pdrop {embedding_dropout} must be equal")
    values: FieldValues = {
        "position_embedding_type": "learned_absolute",
        "normalization": "LayerNorm",
        "activation": _GELUS[activation],
        "add_bias_linear": True,
        "num_experts": None,
    }
    four_times = config.get("n_inner") == 4 * read_number(_WIDTH, config)
    return values | {"ffn_hidden_size": None} if four_times else values


_GPT2_ROWS: tuple[WeightRow, ...] = (
    _weight("embedding.word_embeddings", "v h", ("transformer.wte", "v, h")),
    _weight("embedding.position_embeddings", "t h", ("transformer.wpe", "t, h")),
    *_weight_and_bias("layers.{i}.input_layernorm", "h", ("transformer.h.{i}.ln_1", "h")),
    *_weight_and_bias("layers.{i}.self_attention.linear_qkv", "g x d h", ("transformer.h.{i}.attn.c_attn", "h, x g d")),
    *_weight_and_bias("layers.{i}.self_attention.linear_proj", "h o", ("transformer.h.{i}.attn.c_proj", "o, h")),
    *_weight_and_bias("layers.{i}.pre_mlp_layernorm", "h", ("transformer.h.{i}.ln_2", "h")),
    *_weight_and_bias("layers.{i}.mlp.linear_fc1", "f h", ("transformer.h.{i}.mlp.c_fc", "h, f")),
    *_weight_and_bias("layers.{i}.mlp.linear_fc2", "h f", ("transformer.h.{i}.mlp.c_proj", "f, h")),
    *_weight_and_bias("final_layernorm", "h", ("transformer.ln_f", "h")),
    _weight("output_layer", "v h", ("lm_head", "v, h")),
)
_GPT2 = ModelFamily(
    architecture="GPT2LMHeadModel",
    keys=(
        ConfigKey("num_layers", "n_layer", 12),
        _WIDTH,
        ConfigKey("ffn_hidden_size", "n_inner", None),
        ConfigKey("num_attention_heads", "n_head", 12),
        ConfigKey("vocab_size", "vocab_size", 50257),
        ConfigKey("max_position_embeddings", "n_positions", 1024),
        ConfigKey("norm_epsilon", "layer_norm_epsilon", 1e-5),
        ConfigKey("hidden_dropout", "resid_pdrop", 0.1),
        ConfigKey("attention_dropout", "attn_pdrop", 0.1),
        ConfigKey("init_method_std", "initializer_range", 0.02),
    ),
    fixed={
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "add_cross_attention": (False,),
    },
    reads=("activation_function", "embd_pdrop"),
    read=_read_gpt2,
    write=lambda model: {
        "activation_function": next(theirs for theirs, ours in _GELUS.items() if ours == model.activation),
        "embd_pdrop": model.hidden_dropout,
    },
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
    weights=WeightTable(
        _GPT2_ROWS, prefix="transformer.", buffers=(r"h\.\d+\.attn\.bias", r"h\.\d+\.attn\.masked_bias")
    ),
    tied_by_default=True,
)

# ---- Llama and its relatives ----


_LAYERS = ConfigKey("num_layers", "num_hidden_layers", 32)


def _llama_keys(**defaults: Any) -> tuple[ConfigKey, ...]:
    """Return the keys that all of them share, with the defaults of one class by our field names."""
    keys = (
        _LAYERS,
        ConfigKey("hidden_size", "hidden_size", 4096),
        ConfigKey("ffn_hidden_size", "intermediate_size", 11008),
        ConfigKey("num_attention_heads", "num_attention_heads", 32),
        ConfigKey("num_query_groups", "num_key_value_heads", None),
        ConfigKey("kv_channels", "head_dim", None),
        ConfigKey("vocab_size", "vocab_size", 32000),
        ConfigKey("max_position_embeddings", "max_position_embeddings", 2048),
        ConfigKey("norm_epsilon", "rms_norm_eps", 1e-6),
        ConfigKey("attention_dropout", "attention_dropout", 0.0),
        ConfigKey("init_method_std", "initializer_range", 0.02),
    )
    return tuple(ConfigKey(k.ours, k.theirs, defaults.get(k.ours, k.default)) for k in keys)


def _read_decoder(config: JsonObject) -> FieldValues:
    """Return what all relatives of Llama share, and Llama's values of what some of them change."""
    shared = {"normalization": "RMSNorm", "activation": "swiglu", "hidden_dropout": 0.0}
    defaults = {"add_bias_linear": False, "add_qkv_bias": False, "qk_layernorm": False, "window_size": None}
    return shared | defaults | {"num_experts": None} | read_rope(config)


_DECODER: Capabilities = {
    "position_embedding_type": lambda m: m.position_embedding_type in ("rope", "yarn"),
    "rotary_percent": lambda m: m.rotary_percent == 1.0,
    "rotary_interleaved": lambda m: not m.rotary_interleaved,
    "normalization": lambda m: m.normalization == "RMSNorm",
    "activation": lambda m: m.activation == "swiglu",
}
_NO_BIAS: Capabilities = {
    "add_bias_linear": lambda m: not m.add_bias_linear,
    "add_qkv_bias": lambda m: not m.qkv_bias,
}
_NO_QK_NORM: Capabilities = {"qk_layernorm": lambda m: not m.qk_layernorm}
_NO_EXPERTS: Capabilities = {"num_experts": lambda m: m.num_experts is None}
_SILU = {"hidden_act": ("silu", "swish")}

_LLAMA_ROWS: tuple[WeightRow, ...] = (
    _weight("embedding.word_embeddings", "v h", ("model.embed_tokens", "v, h")),
    _weight("layers.{i}.input_layernorm", "h", ("model.layers.{i}.input_layernorm", "h")),
    *_weight_and_bias(
        "layers.{i}.self_attention.linear_qkv",
        "g x d h",
        ("model.layers.{i}.self_attn.q_proj", "g x[:-2] d, h"),
        ("model.layers.{i}.self_attn.k_proj", "g x[-2:-1] d, h"),
        ("model.layers.{i}.self_attn.v_proj", "g x[-1:] d, h"),
    ),
    _weight("layers.{i}.self_attention.q_layernorm", "d", ("model.layers.{i}.self_attn.q_norm", "d")),
    _weight("layers.{i}.self_attention.k_layernorm", "d", ("model.layers.{i}.self_attn.k_norm", "d")),
    *_weight_and_bias("layers.{i}.self_attention.linear_proj", "h o", ("model.layers.{i}.self_attn.o_proj", "h, o")),
    _weight("layers.{i}.pre_mlp_layernorm", "h", ("model.layers.{i}.post_attention_layernorm", "h")),
    *_weight_and_bias(
        "layers.{i}.mlp.linear_fc1",
        "p f h",
        ("model.layers.{i}.mlp.gate_proj", "p[:1] f, h"),
        ("model.layers.{i}.mlp.up_proj", "p[1:] f, h"),
    ),
    *_weight_and_bias("layers.{i}.mlp.linear_fc2", "h f", ("model.layers.{i}.mlp.down_proj", "h, f")),
    _weight("final_layernorm", "h", ("model.norm", "h")),
    _weight("output_layer", "v h", ("lm_head", "v, h")),
)
_ROTARY = (r"layers\.\d+\.self_attn\.rotary_emb\.inv_freq", r"rotary_emb\.inv_freq")
_LLAMA_WEIGHTS = WeightTable(_LLAMA_ROWS, "model.", _ROTARY)


def _read_llama(config: JsonObject) -> FieldValues:
    attention, mlp = read_bool(config, "attention_bias", False), read_bool(config, "mlp_bias", False)
    if attention != mlp:
        raise UnsupportedConfigError(
            f"attention_bias {attention} with mlp_bias {mlp} is not supported: they must be equal"
        )
    return _read_decoder(config) | {"add_bias_linear": attention}


_LLAMA = ModelFamily(
    architecture="LlamaForCausalLM",
    keys=_llama_keys(),
    fixed=_SILU,
    reads=(*ROPE_KEYS, "attention_bias", "mlp_bias"),
    read=_read_llama,
    write=lambda model: {
        **write_rope(model),
        "attention_bias": model.add_bias_linear,
        "mlp_bias": model.add_bias_linear,
    },
    can={
        **_DECODER,
        **_NO_QK_NORM,
        **_NO_EXPERTS,
        "add_qkv_bias": lambda m: m.qkv_bias == m.add_bias_linear,
        "window_size": lambda m: m.window_size is None,
        "hidden_size": lambda m: m.hidden_size % m.num_attention_heads == 0,  # required by transformers
    },
    weights=_LLAMA_WEIGHTS,
)


_WINDOW = ConfigKey("window_size", "sliding_window", 4096, optional=True)


_MISTRAL = ModelFamily(
    architecture="MistralForCausalLM",
    keys=_llama_keys(ffn_hidden_size=14336, num_query_groups=8, max_position_embeddings=131072),
    fixed=_SILU,
    reads=(*ROPE_KEYS, "sliding_window"),
    read=lambda config: _read_decoder(config) | {"window_size": read_number(_WINDOW, config)},
    write=lambda model: write_rope(model) | {"sliding_window": model.window_size},
    can={**_DECODER, **_NO_BIAS, **_NO_QK_NORM, **_NO_EXPERTS},
    weights=_LLAMA_WEIGHTS,
)


_QWEN_WINDOW = ("use_sliding_window", "sliding_window", "max_window_layers", "layer_types")


def _read_qwen_window(config: JsonObject) -> FieldValues:
    """Read Qwen's window, which its first layers may not have; here all layers have the same."""
    layers = read_number(_LAYERS, config)
    full = read_number(ConfigKey("", "max_window_layers", 28), config)
    window = read_number(_WINDOW, config) if read_bool(config, "use_sliding_window", False) else None
    by_place = ["sliding_attention" if window and i >= full else "full_attention" for i in range(layers)]
    layer_types = config.get("layer_types", by_place)
    kinds = set(map(str, layer_types)) if isinstance(layer_types, list) else {repr(layer_types)}
    if len(kinds) > 1 or not kinds <= {"sliding_attention", "full_attention"}:
        raise UnsupportedConfigError(f"layers of several kinds ({', '.join(sorted(kinds))}) are not supported")
    return {"window_size": window if kinds == {"sliding_attention"} else None}


def _write_qwen(model: ModelConfig) -> FieldValues:
    windowed = model.window_size is not None
    return write_rope(model) | {
        "use_sliding_window": windowed,
        "sliding_window": model.window_size,
        "max_window_layers": 0 if windowed else model.num_layers,  # the first layers, without a window
    }


_QWEN2 = ModelFamily(
    architecture="Qwen2ForCausalLM",
    keys=_llama_keys(ffn_hidden_size=22016, num_query_groups=32, vocab_size=151936, max_position_embeddings=32768),
    fixed=_SILU,
    reads=(*ROPE_KEYS, *_QWEN_WINDOW),
    read=lambda config: _read_decoder(config) | _read_qwen_window(config) | {"add_qkv_bias": True},
    write=_write_qwen,
    can={
        **_DECODER,
        **_NO_QK_NORM,
        **_NO_EXPERTS,
        "add_bias_linear": lambda m: not m.add_bias_linear,
        "add_qkv_bias": lambda m: m.qkv_bias,
    },
    weights=_LLAMA_WEIGHTS,
)

_QWEN3 = ModelFamily(
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
    read=lambda config: _read_decoder(config) | _read_qwen_window(config) | {"qk_layernorm": True},
    write=_write_qwen,
    can={**_DECODER, **_NO_BIAS, **_NO_EXPERTS, "qk_layernorm": lambda m: m.qk_layernorm},
    weights=_LLAMA_WEIGHTS,
)

# ---- Mixtures of experts ----

_TRAINING = ("output_router_logits", "router_aux_loss_coef")
"""Keys of transformers' load-balancing loss, which do not change what the model computes. They are ignored: the loss
differs from ours (one loss over all layers) and is off by default."""

_NO_SHARED_EXPERT: FieldValues = {"moe_shared_expert_intermediate_size": None}
_EXPERTS: Capabilities = {
    "num_experts": lambda m: m.num_experts is not None,
    "moe_shared_expert_intermediate_size": lambda m: m.moe_shared_expert_intermediate_size is None,
}


def _expert_weights(module: str, gate: str, up: str, down: str) -> WeightTable:
    """Return Llama's rows and those of the router and the experts in ``module``, with these names of their matrices."""
    at = f"model.layers.{{i}}.{module}"
    rows = (
        _weight("layers.{i}.mlp.router", "e h", (f"{at}.gate", "e, h")),
        _weight(
            "layers.{i}.mlp.experts.linear_fc1",
            "e p f h",
            (f"{at}.experts.{{e}}.{gate}", "e[{e}] p[:1] f, h"),
            (f"{at}.experts.{{e}}.{up}", "e[{e}] p[1:] f, h"),
        ),
        _weight("layers.{i}.mlp.experts.linear_fc2", "e h f", (f"{at}.experts.{{e}}.{down}", "e[{e}] h, f")),
    )
    return WeightTable((*_LLAMA_ROWS, *rows), "model.", _ROTARY)


_MIXTRAL_KEYS = ConfigKey("window_size", "sliding_window", None), ConfigKey("num_experts", "num_local_experts", 8)


def _read_mixtral(config: JsonObject) -> FieldValues:
    own = {key.ours: read_number(key, config) for key in _MIXTRAL_KEYS}
    experts = {"moe_ffn_hidden_size": None, "moe_router_pre_softmax": False}
    return _read_decoder({"rope_theta": 1e6} | config) | own | experts | _NO_SHARED_EXPERT


_MIXTRAL = ModelFamily(
    architecture="MixtralForCausalLM",
    keys=(
        *_llama_keys(
            ffn_hidden_size=14336,
            num_query_groups=8,
            max_position_embeddings=131072,
            norm_epsilon=1e-5,
        ),
        ConfigKey("moe_router_topk", "num_experts_per_tok", 2),
    ),
    fixed={**_SILU, "router_jitter_noise": (0.0,)},
    reads=(*ROPE_KEYS, *_TRAINING, "sliding_window", "num_local_experts"),
    read=_read_mixtral,
    write=lambda model: {
        **write_rope(model),
        "sliding_window": model.window_size,
        "num_local_experts": model.num_experts,
        "intermediate_size": model.expert_ffn,
    },
    can={
        **_DECODER,
        **_NO_BIAS,
        **_NO_QK_NORM,
        **_EXPERTS,
        "moe_router_pre_softmax": lambda m: not m.moe_router_pre_softmax,
    },
    weights=_expert_weights("block_sparse_moe", "w1", "w3", "w2"),
)

_QWEN_EXPERTS = ("num_experts", "num_local_experts")
"""The spelling of transformers 4, which version 5 reads too, and that of version 5."""


def _read_qwen3_moe(config: JsonObject) -> FieldValues:
    window = read_number(_WINDOW, config) if read_bool(config, "use_sliding_window", False) else None
    pre_softmax = not read_bool(config, "norm_topk_prob", False)
    counts = {
        name: read_number(ConfigKey("num_experts", name, 128), config) for name in _QWEN_EXPERTS if name in config
    }
    if len({*counts.values()}) > 1:
        raise UnsupportedConfigError(
            " and ".join(f"{name} {n}" for name, n in counts.items()) + " contradict each other"
        )
    experts = {"num_experts": next(iter(counts.values()), 128), "moe_router_pre_softmax": pre_softmax}
    others = {"qk_layernorm": True, "window_size": window}
    return _read_decoder(config) | experts | others | _NO_SHARED_EXPERT


_QWEN3_MOE = ModelFamily(
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
        ConfigKey("moe_ffn_hidden_size", "moe_intermediate_size", 768),
        ConfigKey("moe_router_topk", "num_experts_per_tok", 8),
    ),
    fixed={**_SILU, "attention_bias": (False,), "decoder_sparse_step": (1,), "mlp_only_layers": ([], None)},
    reads=(*ROPE_KEYS, *_TRAINING, *_QWEN_WINDOW[:3], *_QWEN_EXPERTS, "norm_topk_prob"),
    read=_read_qwen3_moe,
    write=lambda model: {
        **write_rope(model),
        "use_sliding_window": model.window_size is not None,
        "sliding_window": model.window_size,
        "num_experts": model.num_experts,
        "norm_topk_prob": not model.moe_router_pre_softmax,
    },
    can={**_DECODER, **_NO_BIAS, **_EXPERTS, "qk_layernorm": lambda m: m.qk_layernorm},
    weights=_expert_weights("mlp", "gate_proj", "up_proj", "down_proj"),
)

MODEL_FAMILIES: dict[str, ModelFamily] = {
    "gpt2": _GPT2,
    "llama": _LLAMA,
    "mistral": _MISTRAL,
    "qwen2": _QWEN2,
    "qwen3": _QWEN3,
    "mixtral": _MIXTRAL,
    "qwen3_moe": _QWEN3_MOE,
}
"""Built-in families by transformers' ``model_type``."""


def model_families() -> Mapping[str, ModelFamily]:
    """Return all families by ``model_type``: the built-in ones, then those that plugins register.

    A plugin may replace a built-in family. An export uses the first family that can express the model.
    """
    return {**MODEL_FAMILIES, **registered("model_family")}
