"""Families with Mamba-2 layers, alone or beside attention, MLPs and experts."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from megatron.config.layer_pattern import LETTERS
from megatron.config.model import ModelConfig
from megatron.convert.huggingface.deepseek_families import Defaults, sigmoid_router
from megatron.convert.huggingface.dense_families import GRANITE_KEYS, LLAMA, NO_BIAS, SWIGLU, llama_keys, sizes
from megatron.convert.huggingface.expert_families import BALANCING_LOSS, GRANITE_MOE
from megatron.convert.huggingface.keys import (
    GELUS,
    ROPE_KEYS,
    Capabilities,
    ConfigKey,
    FieldValues,
    JsonObject,
    KeyGroup,
    ModelFamily,
    UnsupportedConfigError,
    WeightRows,
    activation,
    either_key,
    read_number,
    rope,
)

# ---- Which layers are what ----

LINEAR, FULL = "linear_attention", "full_attention"
"""Kinds of layers in transformers 5: with a state of constant size, and attention."""
_OLD_KINDS = {"mamba": LINEAR, "attention": FULL}
_PATTERN_OPTIONS = ("num_layers", "token_mixers", "moe_layer_freq")
"""Options beside the pattern that say what the layers are."""


def symbols(model: ModelConfig) -> str:
    """Return the symbols of the residual layers of a model; ``?`` for a mixer of a plugin."""
    letters = {name: letter for letter, name in LETTERS.items()}
    return "".join(letters.get(name, "?") for layer in range(model.num_layers) for name in model.mixers(layer))


def read_kinds(config: JsonObject, name: str, known: Mapping[str, str], count: int | None = None) -> str | None:
    """Return the symbols of a list of kinds of layers; None if the key is missing or null.

    Args:
        config: content of config.json.
        name: the key.
        known: symbols by kind.
        count: required number of layers; None for any.
    """
    kinds = config.get(name)
    if kinds is None:
        return None
    if not isinstance(kinds, list) or not kinds or count not in (None, len(kinds)):
        raise UnsupportedConfigError(f"{name} {kinds} are not {'' if count is None else f'{count} '}kinds of layers")
    kinds = [_OLD_KINDS.get(kind, kind) if isinstance(kind, str) else kind for kind in kinds]
    if unknown := [kind for kind in kinds if kind not in tuple(known)]:
        raise UnsupportedConfigError(f"{name} with {unknown[0]!r} are not supported, only {', '.join(known)}")
    return "".join(known[kind] for kind in kinds)


def layers_of_symbols(
    names: tuple[str, ...],
    read: Callable[[JsonObject], str],
    write: Callable[[str], FieldValues | None],
) -> KeyGroup:
    """Return the keys that say what the layers are.

    Args:
        names: the keys.
        read: returns the symbols for a config.json.
        write: returns the keys for symbols, or None if the family does not have such layers.
    """
    can: Capabilities = {"hybrid_layer_pattern": lambda m: write(symbols(m)) is not None}
    return KeyGroup(
        names, lambda c: {"hybrid_layer_pattern": read(c)}, lambda m: write(symbols(m)) or {}, can, _PATTERN_OPTIONS
    )


# ---- Mamba-2 ----


class MambaNames(NamedTuple):
    """Names of the keys of Mamba-2, and transformers' defaults."""

    heads: str = "mamba_n_heads"
    head_dim: str = "mamba_d_head"
    state: str = "mamba_d_state"
    groups: str = "mamba_n_groups"
    kernel: str = "mamba_d_conv"
    expand: str = "mamba_expand"
    conv_bias: str = "mamba_conv_bias"
    proj_bias: str = "mamba_proj_bias"
    chunk: str = "mamba_chunk_size"
    default_state: int = 256
    default_groups: int = 1
    default_chunk: int = 256


def mamba_keys(names: MambaNames, expands: bool = True) -> tuple[ConfigKey | KeyGroup, ...]:
    """Return the keys of Mamba-2 layers, but for limits of the time step.

    Args:
        names: of the keys.
        expands: the width of a layer must be a multiple of the hidden size.
    """

    def width(config: JsonObject) -> int:
        return int(read_number(ConfigKey("", "hidden_size", 4096), config))

    def read(config: JsonObject) -> FieldValues:
        heads = read_number(ConfigKey("", names.heads, 128), config)
        expand = read_number(ConfigKey("", names.expand, 2), config)
        automatic = config.get(names.head_dim, "auto" if names.head_dim == "mamba_d_head" else 64) == "auto"
        inner = expand * width(config)
        if heads < 1:
            raise UnsupportedConfigError(f"{names.heads} is {heads}, not above 0")
        channels = inner // heads if automatic else read_number(ConfigKey("", names.head_dim, 64), config)
        if expands and heads * channels != inner:
            sentence = f"{names.heads} {heads} times {names.head_dim} {channels}"
            raise UnsupportedConfigError(f"{sentence} is not {names.expand} {expand} times the hidden size")
        implied = heads * channels == 2 * width(config)
        return {"mamba_num_heads": None if implied else heads, "mamba_head_dim": channels}

    def write(model: ModelConfig) -> FieldValues:
        keys = {names.heads: model.mamba_heads, names.head_dim: model.mamba_head_dim}
        return keys | ({names.expand: model.mamba_inner_size // model.hidden_size} if expands else {})

    can: Capabilities = {
        "mamba_num_heads": lambda m: not (expands and m.has_mamba) or m.mamba_inner_size % m.hidden_size == 0
    }
    return (
        KeyGroup((names.heads, names.head_dim, names.expand), read, write, can, ("mamba_head_dim",)),
        ConfigKey("mamba_state_dim", names.state, names.default_state),
        ConfigKey("mamba_num_groups", names.groups, names.default_groups),
        ConfigKey("mamba_conv_kernel_dim", names.kernel, 4),
        ConfigKey("mamba_conv_bias", names.conv_bias, True),
        ConfigKey("mamba_proj_bias", names.proj_bias, False),
        ConfigKey("mamba_chunk_size", names.chunk, names.default_chunk),
    )


def _read_limits(config: JsonObject) -> FieldValues:
    """Read the limits of the time step; transformers 5 writes an infinite one as an object."""
    limits = config.get("time_step_limit", (0.0, math.inf))
    try:
        least, most = (float(each["__float__"] if isinstance(each, dict) else each) for each in limits)
    except (KeyError, TypeError, ValueError):
        raise UnsupportedConfigError(f"time_step_limit {limits!r} is not two numbers") from None
    return {"mamba_dt_min": least, "mamba_dt_max": None if most == math.inf else most}


def _limits(model: ModelConfig) -> list[float]:
    return [model.mamba_dt_min, math.inf if model.mamba_dt_max is None else model.mamba_dt_max]


LIMITS = KeyGroup(
    ("time_step_limit",),
    _read_limits,
    lambda m: {"time_step_limit": _limits(m)},
    options=("mamba_dt_min", "mamba_dt_max"),
)


ONE_NORM = KeyGroup(
    read=lambda config: {"mamba_norm_groups": 1},
    can={"mamba_norm_groups": lambda m: not m.has_mamba or m.mamba_norm_group_count == 1},
)
"""The norm of a Mamba-2 mixer divides by one RMS."""


def mamba_rows(module: str) -> WeightRows:
    """Return the rows of a Mamba-2 mixer in ``module``."""
    ours = "layers.{i}.mamba"
    return {
        f"{ours}.linear_in": ("r h", {f"{module}.in_proj": "r, h"}),
        f"{ours}.conv.weight": ("c w", {f"{module}.conv1d.weight": "c, , w"}),
        f"{ours}.conv.bias": ("c", {f"{module}.conv1d.bias": "c"}),
        **{f"{ours}.{name}": ("n", {f"{module}.{name}": "n"}) for name in ("dt_bias", "A_log", "D")},
        f"{ours}.norm": ("o", {f"{module}.norm": "o"}),
        f"{ours}.linear_out": ("h o", {f"{module}.out_proj": "h, o"}),
    }


# ---- Mamba-2 alone ----

_RMS: FieldValues = {"normalization": "RMSNorm", "position_embedding_type": "none", **NO_BIAS}
_OF_TRAINING = ("time_step_min", "time_step_max", "time_step_floor", "rescale_prenorm_residual")
"""Keys of the initial values."""
_LAYERS = ConfigKey("", "num_hidden_layers", 64)


def _read_mamba_layers(config: JsonObject) -> str:
    return "M" * max(1, min(read_number(_LAYERS, config), 10_000))


MAMBA2 = ModelFamily(
    architecture="Mamba2ForCausalLM",
    keys=(
        ConfigKey("hidden_size", "hidden_size", 4096),
        ConfigKey("vocab_size", "vocab_size", 32768),
        ConfigKey("norm_epsilon", "layer_norm_epsilon", 1e-5),
        ConfigKey("init_method_std", "initializer_range", 0.1),
        layers_of_symbols(
            ("num_hidden_layers",),
            _read_mamba_layers,
            lambda text: None if text.strip("M") else {"num_hidden_layers": len(text)},
        ),
        *mamba_keys(
            MambaNames(
                "num_heads",
                "head_dim",
                "state_size",
                "n_groups",
                "conv_kernel",
                "expand",
                "use_conv_bias",
                "use_bias",
                "chunk_size",
                128,
                8,
            )
        ),
        LIMITS,
        ONE_NORM,
        KeyGroup(
            (*_OF_TRAINING, "time_step_rank", "residual_in_fp32", "rms_norm"),  # the last three are not used
            lambda config: {"hidden_dropout": 0.0, "attention_dropout": 0.0},
            options=("max_position_embeddings",),  # it has no limit
        ),
    ),
    fixed={"hidden_act": ("silu",)},
    always=_RMS,
    weights={
        "embedding.word_embeddings": ("v h", {"backbone.embeddings": "v, h"}),
        "layers.{i}.pre_mamba_layernorm": ("h", {"backbone.layers.{symbol}.norm": "h"}),
        **mamba_rows("backbone.layers.{symbol}.mixer"),
        "final_layernorm": ("h", {"backbone.norm_f": "h"}),
        "output_layer": ("v h", {"lm_head": "v, h"}),
    },
    prefix="backbone.",
)

# ---- Nemotron-H ----

_SYMBOLS = {LINEAR: "M", FULL: "*", "mlp": "-", "moe": "E"}
_PATTERN, _KINDS = "hybrid_override_pattern", "layers_block_type"


def _read_nemotron_layers(config: JsonObject) -> str:
    kinds, text = read_kinds(config, _KINDS, _SYMBOLS), config.get(_PATTERN)
    if text is not None and (not isinstance(text, str) or not text or set(text) - {*_SYMBOLS.values()}):
        raise UnsupportedConfigError(f"{_PATTERN} {text!r} has other symbols than {' '.join(_SYMBOLS.values())}")
    if None not in (kinds, text) and kinds != text:
        raise UnsupportedConfigError(f"{_KINDS} and {_PATTERN} {text} contradict each other")
    return kinds or text or "ME*-"


def _write_nemotron_layers(text: str) -> FieldValues | None:
    kinds = {symbol: kind for kind, symbol in _SYMBOLS.items()}
    if set(text) - {*kinds}:
        return None
    return {_PATTERN: text, _KINDS: [kinds[symbol] for symbol in text], "num_hidden_layers": len(text)}


def if_experts(
    present: Callable[[JsonObject], bool], rows: Sequence[ConfigKey | KeyGroup], always: FieldValues
) -> KeyGroup:
    """Return keys that count if a model has experts.

    Args:
        present: returns True for a config.json of a model with experts.
        rows: the keys.
        always: options with the only supported value of a model with experts.
    """

    def read(config: JsonObject) -> FieldValues:
        if not present(config):
            return {"num_experts": None}
        values = dict(always)
        for row in rows:
            values |= row.read(config)
        return values

    def write(model: ModelConfig) -> FieldValues:
        written: FieldValues = {}
        for row in rows if model.num_experts is not None else ():
            written |= row.write(model)
        return written

    def only_if(can: Callable[[ModelConfig], bool]) -> Callable[[ModelConfig], bool]:
        return lambda model: model.num_experts is None or can(model)

    def equals(name: str, value: Any) -> Callable[[ModelConfig], bool]:
        return only_if(lambda model: getattr(model, name) == value)

    can = {name: only_if(can) for row in rows for name, can in row.can.items()}
    can |= {name: equals(name, value) for name, value in always.items()}
    names = tuple(name for row in rows for name in row.names)
    return KeyGroup(names, read, write, can, tuple(name for row in rows for name in row.options))


_NEMOTRON = Defaults(4, 8, 2, 7688, 1, 0, 1.0, 1, 1, True)
_SHARED = "moe_shared_expert_intermediate_size"
_NO_LIMIT = 1e-37
"""Written for a time step without a lower limit, as transformers takes its logarithm for initial values."""


def _read_least_step(config: JsonObject) -> FieldValues:
    """Read the lower limit of the time step: in transformers ``time_step_min``, whatever ``time_step_limit`` is."""
    least = read_number(ConfigKey("", "time_step_min", 0.001), config)
    return {"mamba_dt_min": least if least > _NO_LIMIT else 0.0}


def _write_least_step(model: ModelConfig) -> FieldValues:
    return {"time_step_min": max(model.mamba_dt_min, _NO_LIMIT), "time_step_limit": _limits(model)}


_MIXER = "backbone.layers.{symbol}.mixer"
_NORM = {"backbone.layers.{symbol}.norm": "h"}
NEMOTRON_H = ModelFamily(
    architecture="NemotronHForCausalLM",
    keys=(
        *sizes("nemotron_h"),
        either_key("kv_channels", 128, "head_dim", "attention_head_dim"),
        ConfigKey("attention_dropout", "attention_dropout", 0.0),
        ConfigKey("norm_epsilon", "layer_norm_epsilon", 1e-5),
        activation("mlp_hidden_act", "relu2", GELUS),
        layers_of_symbols((_PATTERN, _KINDS, "num_hidden_layers"), _read_nemotron_layers, _write_nemotron_layers),
        *mamba_keys(
            MambaNames(
                "mamba_num_heads",
                "mamba_head_dim",
                "ssm_state_size",
                "n_groups",
                "conv_kernel",
                "expand",
                "use_conv_bias",
                "use_bias",
                "chunk_size",
                128,
                8,
                128,
            ),
            expands=False,
        ),
        KeyGroup(
            ("time_step_min", "time_step_limit"),
            _read_least_step,
            _write_least_step,
            options=("mamba_dt_min",),
        ),
        KeyGroup(can={"mamba_norm_groups": lambda m: m.mamba_norm_group_count == m.mamba_num_groups}),
        if_experts(
            lambda config: "E" in _read_nemotron_layers(config),
            (
                ConfigKey("num_experts", "n_routed_experts", 8),
                ConfigKey("moe_ffn_hidden_size", "moe_intermediate_size", 7688),
                ConfigKey(_SHARED, _SHARED, 7688, can={_SHARED: lambda m: bool(m.moe_shared_expert_intermediate_size)}),
                ConfigKey("moe_latent_size", "moe_latent_size", None),
                *sigmoid_router(_NEMOTRON),
            ),
            {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True},
        ),
        KeyGroup(
            (
                *_OF_TRAINING,
                "residual_in_fp32",
                "hidden_dropout",
                "num_logits_to_keep",
                "use_mamba_kernels",
                "mamba_ssm_cache_dtype",
                "moe_shared_expert_overlap",
                # layers for further tokens, which transformers ignores
                "num_nextn_predict_layers",
                "mtp_layers_block_type",
                "mtp_hybrid_override_pattern",
                # published, but not used by transformers
                "norm_eps",
                "rms_norm_eps",
                "rope_theta",
                "partial_rotary_factor",
            ),
            lambda config: {"hidden_dropout": 0.0},
        ),
    ),
    fixed={
        "mamba_hidden_act": ("silu",),
        "attention_bias": (False,),
        "mlp_bias": (False,),
        "mamba_proj_bias": (False,),  # not used by transformers: the biases are those of use_bias
        "n_shared_experts": (1,),
        "sliding_window": (None,),
        "tie_word_embeddings": (False,),  # transformers does not tie them, whatever the key
    },
    always={**_RMS, "untie_embeddings_and_output_weights": True},
    weights={
        "embedding.word_embeddings": ("v h", {"backbone.embeddings": "v, h"}),
        **{f"layers.{{i}}.{norm}_layernorm": ("h", _NORM) for norm in ("pre_mamba", "input", "pre_mlp")},
        **mamba_rows(_MIXER),
        "layers.{i}.self_attention.linear_qkv": (
            "g x d h",
            {
                f"{_MIXER}.q_proj": "g x[:-2] d, h",
                f"{_MIXER}.k_proj": "g x[-2:-1] d, h",
                f"{_MIXER}.v_proj": "g x[-1:] d, h",
            },
        ),
        "layers.{i}.self_attention.linear_proj": ("h o", {f"{_MIXER}.o_proj": "h, o"}),
        "layers.{i}.mlp.linear_fc1": ("f h", {f"{_MIXER}.up_proj": "f, h"}),
        "layers.{i}.mlp.linear_fc2": ("h f", {f"{_MIXER}.down_proj": "h, f"}),
        "layers.{i}.mlp.router": ("e h", {f"{_MIXER}.gate": "e, h"}),
        "layers.{i}.mlp.router.expert_bias": ("e", {f"{_MIXER}.gate.e_score_correction_bias": "e"}),
        "layers.{i}.mlp.fc1_latent_proj": ("r h", {f"{_MIXER}.fc1_latent_proj": "r, h"}),
        "layers.{i}.mlp.fc2_latent_proj": ("h r", {f"{_MIXER}.fc2_latent_proj": "h, r"}),
        "layers.{i}.mlp.experts.linear_fc1": ("e f h", {f"{_MIXER}.experts.{{e}}.up_proj": "e[{e}] f, h"}),
        "layers.{i}.mlp.experts.linear_fc2": ("e h f", {f"{_MIXER}.experts.{{e}}.down_proj": "e[{e}] h, f"}),
        "layers.{i}.mlp.shared_experts.linear_fc1": ("f h", {f"{_MIXER}.shared_experts.up_proj": "f, h"}),
        "layers.{i}.mlp.shared_experts.linear_fc2": ("h f", {f"{_MIXER}.shared_experts.down_proj": "h, f"}),
        "final_layernorm": ("h", {"backbone.norm_f": "h"}),
        "output_layer": ("v h", {"lm_head": "v, h"}),
    },
    stacked={
        "layers.{i}.mlp.experts.linear_fc1.weight": ("e f h", {f"{_MIXER}.experts.up_proj": "e, f, h"}),
        "layers.{i}.mlp.experts.linear_fc2.weight": ("e h f", {f"{_MIXER}.experts.down_proj": "e, h, f"}),
    },
    prefix="backbone.",
    loaded_prefix="model.",
    buffers=(r"mtp\..*",),
)

# ---- Blocks of Mamba-2 or attention, and an MLP or experts ----


def blocks_of(text: str, kinds: Mapping[str, str], feed_forward: str) -> list[str] | None:
    """Return the kind of the mixer of tokens of each block; None unless each has one, and a ``feed_forward`` symbol."""
    mixers, others = text[::2], text[1::2]
    known = {symbol: kind for kind, symbol in kinds.items()}
    if len(mixers) != len(others) or others.strip(feed_forward) or set(mixers) - {*known}:
        return None
    return [known[symbol] for symbol in mixers]


_MIXERS = {LINEAR: "M", FULL: "*"}
_HEAD_DIM = KeyGroup(
    ("head_dim",),  # not of the configuration's class, but read by attention
    lambda c: {"kv_channels": read_number(ConfigKey("", "head_dim", None), c)},
    lambda m: {} if m.head_dim * m.num_attention_heads == m.hidden_size else {"head_dim": m.head_dim},
    options=("kv_channels",),
)
_HALF_ROPE = rope(fraction=0.5)


def _read_bamba_layers(config: JsonObject) -> str:
    layers = min(read_number(ConfigKey("", "num_hidden_layers", 32), config), 10_000)
    with_attention = config.get("attn_layer_indices") or []
    if not isinstance(with_attention, list) or not all(isinstance(layer, int) for layer in with_attention):
        raise UnsupportedConfigError(f"attn_layer_indices are {with_attention!r}, not a list of layers")
    return "".join("*-" if layer in with_attention else "M-" for layer in range(layers))


def _write_bamba_layers(text: str) -> FieldValues | None:
    kinds = blocks_of(text, _MIXERS, "-")
    if kinds is None:
        return None
    return {"attn_layer_indices": [layer for layer, kind in enumerate(kinds) if kind == FULL]}


_IN_BLOCKS: WeightRows = {
    **LLAMA.weights,
    "layers.{i}.pre_mamba_layernorm": ("h", {"model.layers.{i}.input_layernorm": "h"}),
    **mamba_rows("model.layers.{i}.mamba"),
}
BAMBA = replace(
    LLAMA,
    architecture="BambaForCausalLM",
    keys=(
        *llama_keys("bamba"),
        _HEAD_DIM,
        replace(_HALF_ROPE, can={**_HALF_ROPE.can, "rotary_percent": lambda m: m.rotary_percent == 0.5}),
        layers_of_symbols(("attn_layer_indices",), _read_bamba_layers, _write_bamba_layers),
        *mamba_keys(MambaNames()),
        LIMITS,
        ONE_NORM,
        replace(LLAMA.keys[-1], can={"add_qkv_bias": lambda m: m.qkv_bias == m.add_bias_linear}),
        # of another mask, of programs, and published, but not used by transformers
        KeyGroup(("num_logits_to_keep", "z_loss_coefficient", "attn_rotary_emb")),
    ),
    always={**SWIGLU},
    weights={
        **_IN_BLOCKS,
        "layers.{i}.pre_mlp_layernorm": ("h", {"model.layers.{i}.pre_ff_layernorm": "h"}),
        "layers.{i}.mlp.linear_fc1": (
            "p f h",
            {
                "model.layers.{i}.feed_forward.gate_proj": "p[:1] f, h",
                "model.layers.{i}.feed_forward.up_proj": "p[1:] f, h",
            },
        ),
        "layers.{i}.mlp.linear_fc2": ("h f", {"model.layers.{i}.feed_forward.down_proj": "h, f"}),
        "final_layernorm": ("h", {"model.final_layernorm": "h"}),
    },
)

# ---- Granite 4 ----

_EXPERTS = ConfigKey("num_experts", "num_local_experts", 8, optional=True)


def _has_granite_experts(config: JsonObject) -> bool:
    return bool(read_number(_EXPERTS, config))


def _read_granite_layers(config: JsonObject) -> str:
    layers = min(read_number(ConfigKey("", "num_hidden_layers", 32), config), 10_000)
    mixers = read_kinds(config, "layer_types", _MIXERS, layers) or "M" * layers
    return "".join(f"{mixer}{'E' if _has_granite_experts(config) else '-'}" for mixer in mixers)


def _write_granite_layers(text: str) -> FieldValues | None:
    kinds = blocks_of(text, _MIXERS, text[-1])
    if kinds is None or text[-1] not in "-E":
        return None
    published = {kind: name for name, kind in _OLD_KINDS.items()}  # llama.cpp knows only these
    return {"layer_types": [published[kind] for kind in kinds], "num_local_experts": 0}  # experts write their number


_WIDTH, _EXPERT_WIDTH = ConfigKey("", "shared_intermediate_size", 1024), ConfigKey("", "intermediate_size", 11008)
_GRANITE_ROPE, *_GRANITE_FACTORS, _ = GRANITE_KEYS
_POSITIONS = "position_embedding_type"


def _read_positions(config: JsonObject) -> FieldValues:
    kind = config.get(_POSITIONS)
    if kind not in ("rope", "nope", None):
        raise UnsupportedConfigError(f"{_POSITIONS} {kind!r} is not supported, only rope and nope")
    return _GRANITE_ROPE.read(config) if kind == "rope" else {_POSITIONS: "none"}


def _write_positions(model: ModelConfig) -> FieldValues:
    if model.position_embedding_type == "none":
        return {_POSITIONS: "nope"}
    return {_POSITIONS: "rope", **_GRANITE_ROPE.write(model)}


_SHARED_MLP = "model.layers.{i}.shared_mlp"
_SHARED_MLP_ROWS = {
    "linear_fc1": ("p f h", {f"{_SHARED_MLP}.input_linear": "p f, h"}),
    "linear_fc2": ("h f", {f"{_SHARED_MLP}.output_linear": "h, f"}),
}

GRANITE_HYBRID = replace(
    LLAMA,
    architecture="GraniteMoeHybridForCausalLM",
    keys=(
        *llama_keys("granitemoehybrid"),
        _HEAD_DIM,
        layers_of_symbols(("layer_types", "num_local_experts"), _read_granite_layers, _write_granite_layers),
        KeyGroup(
            (_WIDTH.theirs, _EXPERT_WIDTH.theirs),
            lambda c: {"ffn_hidden_size": read_number(_EXPERT_WIDTH if _has_granite_experts(c) else _WIDTH, c)},
            lambda m: {_WIDTH.theirs: m.ffn, _EXPERT_WIDTH.theirs: m.ffn},
            options=("ffn_hidden_size",),
        ),
        if_experts(
            _has_granite_experts,
            (
                _EXPERTS,
                ConfigKey("moe_router_topk", "num_experts_per_tok", 2),
                replace(_EXPERT_WIDTH, ours="moe_ffn_hidden_size"),
                ConfigKey(
                    _SHARED, _WIDTH.theirs, 1024, can={_SHARED: lambda m: bool(m.moe_shared_expert_intermediate_size)}
                ),
                BALANCING_LOSS,
            ),
            {},
        ),
        *mamba_keys(MambaNames()),
        LIMITS,
        ONE_NORM,
        KeyGroup(
            (*ROPE_KEYS, _POSITIONS),
            _read_positions,
            _write_positions,
            {**_GRANITE_ROPE.can, _POSITIONS: lambda m: m.position_embedding_type in ("rope", "yarn", "none")},
            _GRANITE_ROPE.options,
        ),
        *_GRANITE_FACTORS,
        KeyGroup(("normalization_function", "init_method")),  # published, but not used by transformers
    ),
    fixed={**LLAMA.fixed, "attention_bias": (False,)},
    always={**SWIGLU, **NO_BIAS},
    weights={
        **_IN_BLOCKS,
        **{ours: row for ours, row in GRANITE_MOE.weights.items() if "router" in ours or "experts" in ours},
        **{f"layers.{{i}}.mlp.{name}": row for name, row in _SHARED_MLP_ROWS.items()},
        **{f"layers.{{i}}.mlp.shared_experts.{name}": row for name, row in _SHARED_MLP_ROWS.items()},
    },
)
