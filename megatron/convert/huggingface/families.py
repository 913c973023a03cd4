"""Supported model types of transformers: their ``config.json``, and the tensors in their files.

A `ModelFamily` is one record used in both directions. Its ``keys`` are rows that each read some keys of config.json
into fields of `ModelConfig` and write them back: a `ConfigKey` for a number, a `KeyGroup` for the rest. ``always`` and
``fixed`` are the fields and the keys with one supported value. Its ``weights`` are the places of our tensors. `config`
and `weights` apply the records. `model_families` returns the built-in ones and those that plugins register.

A row of the weights names one of our modules and the axes of its weight, and the Hugging Face modules that it consists
of. These are described by the same axes: commas separate the dimensions of the stored tensor, and brackets select a
part of an axis. So ``"h, x g d"`` is stored as ``[h, x * g * d]``, and ``"g x[-1:] d, h"`` is the last element of each
group's ``x``, stored as ``[g * d, h]``. A name with ``{e}`` stands for one tensor per expert, which ``e[{e}]`` selects.
A bias has the same row, without the weight's last axis, its inputs. Rows contain only views, permutations and slices,
so they are invertible, and a box of our tensor is a set of slices of theirs.

Axes: v vocabulary, t positions, h hidden, g key/value heads, x queries, key and value of a group, d channels of a head,
o outputs of all heads, p gate and up, f width of the MLP, e experts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from megatron.config.attention_pattern import CAUSAL, MAX_LAYERS, MAX_TOKENS, format_layers
from megatron.config.model import ModelConfig
from megatron.config.plugins import registered

JsonObject = dict[str, Any]
FieldValues = dict[str, Any]

WeightRows = Mapping[str, tuple[str, Mapping[str, str]]]
"""Our module -> axes of its weight, Hugging Face module -> axes. ``{i}`` is the layer, ``{e}`` the expert. Names of
tensors that are no module's ``weight`` or ``bias`` are given in full."""

Capabilities = Mapping[str, Callable[[ModelConfig], bool]]
"""Option -> whether a family can express a model's value of it."""

_RESOLVED = {
    "num_query_groups": "kv_groups",
    "kv_channels": "head_dim",
    "ffn_hidden_size": "ffn",
    "moe_ffn_hidden_size": "expert_ffn",
    "add_qkv_bias": "qkv_bias",
}
"""Fields of `ModelConfig` whose value may be implied by others -> the property with the value that applies."""


_RARE = (
    "attention_pattern",
    "softmax_scale",
    "attn_logit_softcapping",
    "softmax_type",
    "final_logit_softcapping",
)
"""Options that only families whose rows or constants name them can express."""


def resolved(model: ModelConfig, name: str) -> Any:
    """Return the value of a field that applies to a model."""
    return getattr(model, _RESOLVED.get(name, name))


def with_one_window(model: ModelConfig) -> ModelConfig:
    """Return the model with ``window_size`` in place of attention patterns that are the same window in all layers."""
    patterns = {model.pattern(layer) for layer in range(model.num_layers)}
    if model.attention_pattern is None or len(patterns) > 1 or not all(p.only_window for p in patterns):
        return model
    return replace(model, attention_pattern=None, window_size=patterns.pop().window)


class UnsupportedConfigError(ValueError):
    """A value in config.json that is not supported. Raised by all functions here that read one."""


@dataclass(frozen=True)
class ConfigKey:
    """A numeric key of config.json with the same meaning as a field of `ModelConfig`."""

    ours: str  # field of ModelConfig
    theirs: str  # key in config.json
    default: Any  # value of a missing key, as in the transformers class
    optional: bool = False  # null is allowed although the default is not null
    can: Capabilities = field(default_factory=dict)  # limits of the family

    @property
    def names(self) -> tuple[str, ...]:
        """Keys of config.json that `read` uses."""
        return (self.theirs,)

    def read(self, config: JsonObject) -> FieldValues:
        """Return our field from a config.json."""
        return {self.ours: read_number(self, config)}

    def write(self, model: ModelConfig) -> FieldValues:
        """Return the key for a model."""
        return {self.theirs: resolved(model, self.ours)}


@dataclass(frozen=True)
class KeyGroup:
    """Keys of config.json and fields of `ModelConfig` that are converted together."""

    # keys that `read` uses; others are unknown and refused
    names: tuple[str, ...] = ()
    # fields of ModelConfig from a config.json; raises UnsupportedConfigError
    read: Callable[[JsonObject], FieldValues] = lambda config: {}
    # keys of config.json for a model that the family can express
    write: Callable[[ModelConfig], FieldValues] = lambda model: {}
    # which values of our options the keys can express
    can: Capabilities = field(default_factory=dict)


@dataclass(frozen=True)
class ModelFamily:
    """One model type of transformers."""

    # transformers' class with a language-modelling head
    architecture: str
    # how keys of config.json and fields of ModelConfig correspond; the last row with a name counts
    keys: tuple[ConfigKey | KeyGroup, ...]
    # keys with the only supported values; the first is the value of a missing key
    fixed: Mapping[str, tuple[Any, ...]]
    # fields of ModelConfig with the only supported value
    always: FieldValues
    # where all tensors are stored that a model can have
    weights: WeightRows
    # of all names in the files except the head's; missing in files of a model without head
    prefix: str
    # patterns of names, without the prefix, that are not weights
    buffers: tuple[str, ...] = ()
    # transformers' default of tie_word_embeddings
    tied_by_default: bool = False

    def lacks(self, model: ModelConfig) -> list[str]:
        """Return the options of a model that the family cannot express."""
        lacking = [name for name, value in self.always.items() if resolved(model, name) != value]
        lacking += [name for row in self.keys for name, can in row.can.items() if not can(model)]
        covered = {*self.always, *(name for row in self.keys for name in (getattr(row, "ours", None), *row.can))}
        rare = (name for name in _RARE if getattr(model, name) != getattr(ModelConfig, name))
        return lacking + [name for name in rare if name not in covered]


def read_number(key: ConfigKey, config: JsonObject) -> Any:
    """Return the value of a key: a float if its default is one, else an int; or None where null is allowed."""
    value = config.get(key.theirs, key.default)
    fractional = isinstance(key.default, float)
    if value is None and (key.default is None or key.optional):
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float) if fractional else int):
        raise UnsupportedConfigError(f"{key.theirs} is {value!r}, not {'a number' if fractional else 'a whole number'}")
    try:
        return float(value) if fractional else value
    except OverflowError:
        raise UnsupportedConfigError(f"{key.theirs} is {value}, larger than any number of 64 bits") from None


def read_bool(config: JsonObject, name: str, default: bool) -> bool:
    """Return the boolean value of a key."""
    value = config.get(name, default)
    if not isinstance(value, bool):
        raise UnsupportedConfigError(f"{name} is {value!r}, not true or false")
    return value


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


def rope(theta: float = 10000.0) -> KeyGroup:
    """Return the keys of rotary embeddings; ``theta`` is transformers' default of ``rope_theta``."""
    return KeyGroup(
        ROPE_KEYS,
        lambda config: read_rope({"rope_theta": theta} | config),
        write_rope,
        {
            "position_embedding_type": lambda m: m.position_embedding_type in ("rope", "yarn"),
            "rotary_percent": lambda m: m.rotary_percent == 1.0,
            "rotary_interleaved": lambda m: not m.rotary_interleaved,
        },
    )


# ---- GPT-2 ----

_GELUS = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu", "relu2": "relu2"}
"""GPT-2's names of activations; an export writes the first name of a function."""

_WIDTH = ConfigKey("hidden_size", "n_embd", 768)


def _read_gelu(config: JsonObject) -> FieldValues:
    activation = config.get("activation_function", "gelu_new")
    if activation not in tuple(_GELUS):  # a tuple, because activation may be unhashable
        raise UnsupportedConfigError(f"activation_function {activation!r} is not supported, only {', '.join(_GELUS)}")
    return {"activation": _GELUS[activation]}


def _read_equal_dropout(config: JsonObject) -> FieldValues:
    residual_dropout, embedding_dropout = config.get("resid_pdrop", 0.1), config.get("embd_pdrop", 0.1)
    if residual_dropout != embedding_dropout:
        raise UnsupportedConfigError(f"resid_pdrop {residual_dropout} and embd_pdrop {embedding_dropout} must be equal")
    return {}


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
        KeyGroup(
            ("activation_function",),
            _read_gelu,
            lambda m: {"activation_function": next(name for name, ours in _GELUS.items() if ours == m.activation)},
            {"activation": lambda m: m.activation in _GELUS.values()},
        ),
        KeyGroup(("embd_pdrop",), _read_equal_dropout, lambda m: {"embd_pdrop": m.hidden_dropout}),
        # the default of ModelConfig
        KeyGroup(read=lambda c: {"ffn_hidden_size": None} if c.get("n_inner") == 4 * read_number(_WIDTH, c) else {}),
        KeyGroup(
            can={
                "num_query_groups": lambda m: m.kv_groups == m.num_attention_heads,
                "kv_channels": lambda m: m.head_dim * m.num_attention_heads == m.hidden_size,
            }
        ),
    ),
    fixed={
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "add_cross_attention": (False,),
    },
    always={
        "position_embedding_type": "learned_absolute",
        "normalization": "LayerNorm",
        "add_bias_linear": True,
        "qk_layernorm": False,
        "window_size": None,
        "num_experts": None,
    },
    weights={
        "embedding.word_embeddings": ("v h", {"transformer.wte": "v, h"}),
        "embedding.position_embeddings": ("t h", {"transformer.wpe": "t, h"}),
        "layers.{i}.input_layernorm": ("h", {"transformer.h.{i}.ln_1": "h"}),
        "layers.{i}.self_attention.linear_qkv": ("g x d h", {"transformer.h.{i}.attn.c_attn": "h, x g d"}),
        "layers.{i}.self_attention.linear_proj": ("h o", {"transformer.h.{i}.attn.c_proj": "o, h"}),
        "layers.{i}.pre_mlp_layernorm": ("h", {"transformer.h.{i}.ln_2": "h"}),
        "layers.{i}.mlp.linear_fc1": ("f h", {"transformer.h.{i}.mlp.c_fc": "h, f"}),
        "layers.{i}.mlp.linear_fc2": ("h f", {"transformer.h.{i}.mlp.c_proj": "f, h"}),
        "final_layernorm": ("h", {"transformer.ln_f": "h"}),
        "output_layer": ("v h", {"lm_head": "v, h"}),
    },
    prefix="transformer.",
    buffers=(r"h\.\d+\.attn\.bias", r"h\.\d+\.attn\.masked_bias"),
    tied_by_default=True,
)

# ---- Llama and its relatives ----


def _read_llama_bias(config: JsonObject) -> FieldValues:
    attention, mlp = read_bool(config, "attention_bias", False), read_bool(config, "mlp_bias", False)
    if attention != mlp:
        raise UnsupportedConfigError(
            f"attention_bias {attention} with mlp_bias {mlp} is not supported: they must be equal"
        )
    return {"add_bias_linear": attention, "add_qkv_bias": False}


_LAYERS = ConfigKey("num_layers", "num_hidden_layers", 32)
_WINDOW = ConfigKey("window_size", "sliding_window", 4096, optional=True)
_SWIGLU: FieldValues = {"normalization": "RMSNorm", "activation": "swiglu"}
_NO_BIAS: FieldValues = {"add_bias_linear": False, "add_qkv_bias": False}

_LLAMA = ModelFamily(
    architecture="LlamaForCausalLM",
    keys=(
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
        KeyGroup(read=lambda config: {"hidden_dropout": 0.0}),  # an export omits it
        rope(),
        KeyGroup(
            ("attention_bias", "mlp_bias"),
            _read_llama_bias,
            lambda m: {"attention_bias": m.add_bias_linear, "mlp_bias": m.add_bias_linear},
            {
                "add_qkv_bias": lambda m: m.qkv_bias == m.add_bias_linear,
                "hidden_size": lambda m: m.hidden_size % m.num_attention_heads == 0,  # required by transformers
            },
        ),
    ),
    fixed={"hidden_act": ("silu", "swish")},
    always={**_SWIGLU, "qk_layernorm": False, "window_size": None, "num_experts": None},
    weights={
        "embedding.word_embeddings": ("v h", {"model.embed_tokens": "v, h"}),
        "layers.{i}.input_layernorm": ("h", {"model.layers.{i}.input_layernorm": "h"}),
        "layers.{i}.self_attention.linear_qkv": (
            "g x d h",
            {
                "model.layers.{i}.self_attn.q_proj": "g x[:-2] d, h",
                "model.layers.{i}.self_attn.k_proj": "g x[-2:-1] d, h",
                "model.layers.{i}.self_attn.v_proj": "g x[-1:] d, h",
            },
        ),
        "layers.{i}.self_attention.q_layernorm": ("d", {"model.layers.{i}.self_attn.q_norm": "d"}),
        "layers.{i}.self_attention.k_layernorm": ("d", {"model.layers.{i}.self_attn.k_norm": "d"}),
        "layers.{i}.self_attention.linear_proj": ("h o", {"model.layers.{i}.self_attn.o_proj": "h, o"}),
        "layers.{i}.pre_mlp_layernorm": ("h", {"model.layers.{i}.post_attention_layernorm": "h"}),
        "layers.{i}.mlp.linear_fc1": (
            "p f h",
            {"model.layers.{i}.mlp.gate_proj": "p[:1] f, h", "model.layers.{i}.mlp.up_proj": "p[1:] f, h"},
        ),
        "layers.{i}.mlp.linear_fc2": ("h f", {"model.layers.{i}.mlp.down_proj": "h, f"}),
        "final_layernorm": ("h", {"model.norm": "h"}),
        "output_layer": ("v h", {"lm_head": "v, h"}),
    },
    prefix="model.",
    buffers=(r"layers\.\d+\.self_attn\.rotary_emb\.inv_freq", r"rotary_emb\.inv_freq"),
)
_SHARED_KEYS = _LLAMA.keys[:-2]
"""Llama's keys that its relatives have too: those before its rotary embeddings and biases."""


def with_defaults(*keys: ConfigKey | KeyGroup, **defaults: Any) -> tuple[ConfigKey | KeyGroup, ...]:
    """Return keys with the defaults of another class, by the names in its config.json."""
    return tuple(
        replace(key, default=defaults.get(key.theirs, key.default)) if isinstance(key, ConfigKey) else key
        for key in keys
    )


_MISTRAL = replace(
    _LLAMA,
    architecture="MistralForCausalLM",
    keys=(
        *with_defaults(*_SHARED_KEYS, intermediate_size=14336, num_key_value_heads=8, max_position_embeddings=131072),
        rope(),
        _WINDOW,
    ),
    always={**_SWIGLU, **_NO_BIAS, "qk_layernorm": False, "num_experts": None},
)


WINDOWED, FULL = "sliding_attention", "full_attention"
"""Values of ``layer_types``."""


def _read_layer_types(config: JsonObject, window: int | None, full: int) -> FieldValues:
    """Read which layers have the window; without ``layer_types``, those from layer ``full`` on."""
    layers = read_number(_LAYERS, config)
    kinds = config.get("layer_types")
    if kinds is None:
        first = layers if window is None else max(0, min(full, layers))
        kinds = [FULL] * min(first, MAX_LAYERS) + [WINDOWED] * min(layers - first, MAX_LAYERS)
    elif not isinstance(kinds, list) or len(kinds) != layers or any(kind not in (WINDOWED, FULL) for kind in kinds):
        raise UnsupportedConfigError(f"layer_types {kinds} are not {layers} times {FULL} or {WINDOWED}")
    if WINDOWED not in kinds:
        return {"window_size": None, "attention_pattern": None}
    if window is None:
        raise UnsupportedConfigError(f"layer_types with {WINDOWED} need a sliding_window that is in use")
    if FULL not in kinds:
        return {"window_size": window, "attention_pattern": None}
    if not 0 < window <= MAX_TOKENS:
        raise UnsupportedConfigError(f"sliding_window is {window}, not 1 to {MAX_TOKENS:g}")
    patterns = {WINDOWED: f"local:{window}", FULL: "global"}
    return {"window_size": None, "attention_pattern": format_layers([patterns[kind] for kind in kinds])}


def _write_layer_types(model: ModelConfig) -> FieldValues:
    """Return the window, and which layers have it unless all are equal."""
    windows = [model.pattern(layer).window for layer in range(model.num_layers)]
    kinds = [FULL if window is None else WINDOWED for window in windows]
    size = next(filter(None, windows), None)
    return {"sliding_window": size} | ({"layer_types": kinds} if len({*kinds}) > 1 else {})


def _layers_have_one_window(model: ModelConfig) -> bool:
    """Return True if every layer has full attention or the same window."""
    patterns = {model.pattern(layer) for layer in range(model.num_layers)}
    return all(pattern.only_window for pattern in patterns) and len(patterns - {CAUSAL}) <= 1


_LAYER_TYPES = KeyGroup(
    ("sliding_window", "layer_types"),
    lambda c: _read_layer_types(c, read_number(_WINDOW, c), 0),
    _write_layer_types,
    {"attention_pattern": _layers_have_one_window},
)

_MINISTRAL = replace(_MISTRAL, architecture="MinistralForCausalLM", keys=(*_MISTRAL.keys[:-1], _LAYER_TYPES))


def _read_qwen_window(config: JsonObject) -> FieldValues:
    """Read Qwen's window, which its first layers may not have."""
    full = read_number(ConfigKey("", "max_window_layers", 28), config)
    window = read_number(_WINDOW, config) if read_bool(config, "use_sliding_window", False) else None
    return _read_layer_types(config, window, full)


def _write_qwen_window(model: ModelConfig) -> FieldValues:
    """Return the keys of the window, with the number of first layers that do not have it."""
    windows = [model.pattern(layer).window for layer in range(model.num_layers)]
    full = next((layer for layer, window in enumerate(windows) if window), model.num_layers)
    used = {"use_sliding_window": full < model.num_layers, "max_window_layers": full}
    return used | _write_layer_types(model)


_QWEN_WINDOW = KeyGroup(
    ("use_sliding_window", "max_window_layers", *_LAYER_TYPES.names),
    _read_qwen_window,
    _write_qwen_window,
    _LAYER_TYPES.can,
)
_QWEN_KEYS = with_defaults(
    *_SHARED_KEYS, intermediate_size=22016, num_key_value_heads=32, vocab_size=151936, max_position_embeddings=32768
)

_QWEN2 = replace(
    _LLAMA,
    architecture="Qwen2ForCausalLM",
    keys=(*_QWEN_KEYS, rope(), _QWEN_WINDOW),
    always={**_SWIGLU, "qk_layernorm": False, "num_experts": None, "add_bias_linear": False, "add_qkv_bias": True},
)
_QWEN3 = replace(
    _LLAMA,
    architecture="Qwen3ForCausalLM",
    keys=(*with_defaults(*_QWEN_KEYS, head_dim=128), rope(), _QWEN_WINDOW),
    fixed={**_LLAMA.fixed, "attention_bias": (False,)},
    always={**_SWIGLU, **_NO_BIAS, "num_experts": None, "qk_layernorm": True},
)

# ---- Mixtures of experts ----

_HAS_EXPERTS: Capabilities = {"num_experts": lambda m: m.num_experts is not None}
_BALANCING_LOSS = KeyGroup(("output_router_logits", "router_aux_loss_coef"))
"""Keys of transformers' load-balancing loss, which do not change what the model computes. They are ignored: the loss
differs from ours (one loss over all layers) and is off by default."""


def expert_weights(module: str, gate: str, up: str, down: str) -> WeightRows:
    """Return the rows of a router and of experts in ``module`` of a layer, with these names of their matrices."""
    experts = f"{module}.experts.{{e}}"
    return {
        "layers.{i}.mlp.router": ("e h", {f"{module}.gate": "e, h"}),
        "layers.{i}.mlp.experts.linear_fc1": (
            "e p f h",
            {f"{experts}.{gate}": "e[{e}] p[:1] f, h", f"{experts}.{up}": "e[{e}] p[1:] f, h"},
        ),
        "layers.{i}.mlp.experts.linear_fc2": ("e h f", {f"{experts}.{down}": "e[{e}] h, f"}),
    }


_MIXTRAL = replace(
    _LLAMA,
    architecture="MixtralForCausalLM",
    keys=(
        *with_defaults(
            *_SHARED_KEYS,
            intermediate_size=14336,
            num_key_value_heads=8,
            max_position_embeddings=131072,
            rms_norm_eps=1e-5,
        ),
        ConfigKey("moe_router_topk", "num_experts_per_tok", 2),
        rope(theta=1e6),
        ConfigKey("window_size", "sliding_window", None),
        ConfigKey("num_experts", "num_local_experts", 8, can=_HAS_EXPERTS),
        # the width of the experts, which has no key of its own
        KeyGroup((), lambda c: {"moe_ffn_hidden_size": None}, lambda m: {"intermediate_size": m.expert_ffn}),
        _BALANCING_LOSS,
    ),
    fixed={**_LLAMA.fixed, "router_jitter_noise": (0.0,)},
    always={
        **_SWIGLU,
        **_NO_BIAS,
        "qk_layernorm": False,
        "moe_shared_expert_intermediate_size": None,
        "moe_router_pre_softmax": False,
    },
    weights={**_LLAMA.weights, **expert_weights("model.layers.{i}.block_sparse_moe", "w1", "w3", "w2")},
)


def _read_qwen_experts(config: JsonObject) -> FieldValues:
    """Read the number of experts in the spelling of transformers 4, which version 5 reads too, or that of version 5."""
    spellings = [name for name in ("num_experts", "num_local_experts") if name in config]
    counts = {name: read_number(ConfigKey("num_experts", name, 128), config) for name in spellings}
    if len({*counts.values()}) > 1:
        raise UnsupportedConfigError(
            " and ".join(f"{name} {n}" for name, n in counts.items()) + " contradict each other"
        )
    return {"num_experts": next(iter(counts.values()), 128)}


_QWEN3_MOE = replace(
    _LLAMA,
    architecture="Qwen3MoeForCausalLM",
    keys=(
        *with_defaults(
            *_SHARED_KEYS,
            num_hidden_layers=24,
            hidden_size=2048,
            intermediate_size=6144,
            num_key_value_heads=4,
            vocab_size=151936,
            max_position_embeddings=32768,
        ),
        ConfigKey("moe_ffn_hidden_size", "moe_intermediate_size", 768),
        ConfigKey("moe_router_topk", "num_experts_per_tok", 8),
        rope(),
        KeyGroup(
            ("use_sliding_window", "sliding_window", "max_window_layers"),
            lambda c: {"window_size": read_number(_WINDOW, c) if read_bool(c, "use_sliding_window", False) else None},
            lambda m: {"use_sliding_window": m.window_size is not None, "sliding_window": m.window_size},
        ),
        KeyGroup(
            ("num_experts", "num_local_experts"),
            _read_qwen_experts,
            lambda m: {"num_experts": m.num_experts},
            _HAS_EXPERTS,
        ),
        KeyGroup(
            ("norm_topk_prob",),
            lambda c: {"moe_router_pre_softmax": not read_bool(c, "norm_topk_prob", False)},
            lambda m: {"norm_topk_prob": not m.moe_router_pre_softmax},
        ),
        _BALANCING_LOSS,
    ),
    fixed={
        **_LLAMA.fixed,
        "attention_bias": (False,),
        "decoder_sparse_step": (1,),
        "mlp_only_layers": ([], None),
    },
    always={**_SWIGLU, **_NO_BIAS, "qk_layernorm": True, "moe_shared_expert_intermediate_size": None},
    weights={**_LLAMA.weights, **expert_weights("model.layers.{i}.mlp", "gate_proj", "up_proj", "down_proj")},
)

MODEL_FAMILIES: dict[str, ModelFamily] = {
    "gpt2": _GPT2,
    "llama": _LLAMA,
    "mistral": _MISTRAL,
    "qwen2": _QWEN2,
    "qwen3": _QWEN3,
    "mixtral": _MIXTRAL,
    "qwen3_moe": _QWEN3_MOE,
    "ministral": _MINISTRAL,
}
"""Built-in families by transformers' ``model_type``."""


def model_families() -> Mapping[str, ModelFamily]:
    """Return all families by ``model_type``: the built-in ones, then those that plugins register.

    A plugin may replace a built-in family. An export uses the first family that can express the model.
    """
    return {**MODEL_FAMILIES, **registered("model_family")}
