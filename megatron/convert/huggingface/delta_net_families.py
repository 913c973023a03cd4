"""Families with gated DeltaNet in most layers, and gated attention in the others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from megatron.config.model import ModelConfig
from megatron.convert.huggingface.dense_families import LLAMA, NO_BIAS, SWIGLU, llama_keys
from megatron.convert.huggingface.expert_families import (
    BALANCING_LOSS,
    EXPERT_ROWS,
    HAS_EXPERTS,
    SHARED_EXPERT_GATE,
    STACKED,
    normed_weights,
    read_sparse_layers,
    shared_expert,
)
from megatron.convert.huggingface.hybrid_families import FULL, LINEAR, blocks_of, layers_of_symbols, read_kinds
from megatron.convert.huggingface.keys import (
    ConfigKey,
    FieldValues,
    JsonObject,
    KeyGroup,
    UnsupportedConfigError,
    WeightRows,
    either_key,
    read_number,
    rope,
)

_MIXERS = {LINEAR: "G", FULL: "*"}


def _read_mixers(config: JsonObject, default: int) -> str:
    """Return the symbols of the mixers of tokens: attention in every fourth layer, or as ``layer_types`` says."""
    layers = min(read_number(ConfigKey("", "num_hidden_layers", default), config), 10_000)
    interval = read_number(ConfigKey("", "full_attention_interval", 4), config)
    if interval < 1:
        raise UnsupportedConfigError(f"full_attention_interval is {interval}, not above 0")
    regular = "".join("G" if (layer + 1) % interval else "*" for layer in range(layers))
    return read_kinds(config, "layer_types", _MIXERS, layers) or regular


def _write_mixers(text: str, feed_forward: str) -> FieldValues | None:
    kinds = blocks_of(text, _MIXERS, feed_forward)
    return None if kinds is None else {"layer_types": kinds}


def _alternate(mixers: str, feed_forward: str) -> str:
    return "".join(f"{mixer}{other}" for mixer, other in zip(mixers, feed_forward))


def _read_next_layers(config: JsonObject) -> str:
    mixers = _read_mixers(config, 48)
    return _alternate(mixers, "".join("E" if each else "-" for each in read_sparse_layers(config, len(mixers))))


def _write_next_layers(text: str) -> FieldValues | None:
    keys = _write_mixers(text, "-E")
    if keys is None:
        return None
    dense = [layer for layer, symbol in enumerate(text[1::2]) if symbol == "-"]
    return keys | {"decoder_sparse_step": 1, "mlp_only_layers": dense}


_LINEAR_KEYS = (
    ConfigKey("linear_conv_kernel_dim", "linear_conv_kernel_dim", 4),
    ConfigKey("linear_key_head_dim", "linear_key_head_dim", 128),
    ConfigKey("linear_value_head_dim", "linear_value_head_dim", 128),
    ConfigKey("linear_num_key_heads", "linear_num_key_heads", 16),
    ConfigKey("linear_num_value_heads", "linear_num_value_heads", 32),
)


def _numbers(model: ModelConfig) -> Mapping[str, int]:
    """Return numbers of heads, and where the parts of the rows of gated DeltaNet end: Q, K, V, Z and B."""
    heads = model.linear_num_key_heads
    keys = heads * model.linear_key_head_dim
    values = model.linear_num_value_heads * model.linear_value_head_dim
    ends = {"Q": keys, "K": 2 * keys, "V": 2 * keys + values, "Z": 2 * keys + 2 * values}
    return {"G": heads, "N": model.heads_per_group, **ends, "B": ends["Z"] + model.linear_num_value_heads}


_OURS, _THEIRS = "layers.{i}.gated_delta_net", "model.layers.{i}.linear_attn"
_ROWS: WeightRows = {
    **LLAMA.weights,
    "layers.{i}.pre_gated_delta_net_layernorm": ("h", {"model.layers.{i}.input_layernorm": "h"}),
    # the queries of a head before its gates
    "layers.{i}.self_attention.linear_qkv": (
        "g x d h",
        {
            "model.layers.{i}.self_attn.q_proj": "g*N*(x[:N] d + x[N:-2] d), h",
            "model.layers.{i}.self_attn.k_proj": "g x[-2:-1] d, h",
            "model.layers.{i}.self_attn.v_proj": "g x[-1:] d, h",
        },
    ),
    f"{_OURS}.conv.weight": ("c w", {f"{_THEIRS}.conv1d.weight": "c, , w"}),
    **{f"{_OURS}.{name}": ("n", {f"{_THEIRS}.{name}": "n"}) for name in ("dt_bias", "A_log")},
    f"{_OURS}.norm": ("o", {f"{_THEIRS}.norm": "o"}),
    f"{_OURS}.linear_out": ("h o", {f"{_THEIRS}.out_proj": "h, o"}),
}
_ALWAYS: FieldValues = {
    **SWIGLU,
    **NO_BIAS,
    "apply_layernorm_1p": True,
    "attention_output_gate": True,
    "qk_layernorm": True,
}
_SHARED = "moe_shared_expert_intermediate_size"
_EXPERT_KEYS = (
    ConfigKey("moe_ffn_hidden_size", "moe_intermediate_size", 512),
    ConfigKey(
        _SHARED,
        "shared_expert_intermediate_size",
        512,
        can={_SHARED: lambda m: bool(m.moe_shared_expert_intermediate_size)},
    ),
    BALANCING_LOSS,
)
_EXPERTS: WeightRows = {**EXPERT_ROWS, **shared_expert("model.layers.{i}.mlp.shared_expert"), **SHARED_EXPERT_GATE}
_FURTHER = (r"mtp\..*",)
"""Layers for further tokens, which transformers ignores."""

# ---- Qwen3-Next ----

QWEN3_NEXT = replace(
    LLAMA,
    architecture="Qwen3NextForCausalLM",
    keys=(
        *llama_keys("qwen3_next"),
        rope(fraction=0.25),
        *_LINEAR_KEYS,
        layers_of_symbols(
            ("layer_types", "full_attention_interval", "decoder_sparse_step", "mlp_only_layers"),
            _read_next_layers,
            _write_next_layers,
        ),
        either_key("num_experts", 512, "num_experts", "num_local_experts", can=HAS_EXPERTS),
        ConfigKey("moe_router_topk", "num_experts_per_tok", 10),
        *_EXPERT_KEYS,
        normed_weights(True),
    ),
    fixed={**LLAMA.fixed, "attention_bias": (False,)},
    always={**_ALWAYS, "moe_shared_expert_gate": True},
    weights={
        **_ROWS,
        **_EXPERTS,
        # the parts of a key head beside one another
        f"{_OURS}.linear_in": (
            "r h",
            {
                f"{_THEIRS}.in_proj_qkvz": "G*(r[:Q] + r[Q:K] + r[K:V] + r[V:Z]), h",
                f"{_THEIRS}.in_proj_ba": "G*(r[Z:B] + r[B:]), h",
            },
        ),
    },
    stacked=STACKED,
    numbers=_numbers,
    buffers=(*LLAMA.buffers, *_FURTHER),
)

# ---- Qwen3.5, whose text model alone is one ----

_SECTIONS = {"mrope_section", "mrope_interleaved"}
"""Parameters of positions of images; those of text are equal in all sections."""
_ROPE = rope(fraction=0.25)


def _read_rope(config: JsonObject) -> FieldValues:
    parameters = config.get("rope_parameters")
    if isinstance(parameters, dict):
        config = config | {"rope_parameters": {k: v for k, v in parameters.items() if k not in _SECTIONS}}
    return _ROPE.read(config)


_TEXT_ROWS: WeightRows = {
    **_ROWS,
    f"{_OURS}.linear_in": (
        "r h",
        {
            f"{_THEIRS}.in_proj_qkv": "r[:V], h",
            f"{_THEIRS}.in_proj_z": "r[V:Z], h",
            f"{_THEIRS}.in_proj_b": "r[Z:B], h",
            f"{_THEIRS}.in_proj_a": "r[B:], h",
        },
    ),
}
_TEXT_KEYS = (
    replace(_ROPE, read=_read_rope),
    *_LINEAR_KEYS,
    # of layers for further tokens and of programs; published, but not used by transformers
    KeyGroup(("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings", "mamba_ssm_dtype", "output_gate_type")),
)
_LAYERS = ("layer_types", "full_attention_interval")

QWEN3_5 = replace(
    QWEN3_NEXT,
    architecture="Qwen3_5ForCausalLM",
    keys=(
        *llama_keys("qwen3_5_text"),
        *_TEXT_KEYS,
        layers_of_symbols(
            _LAYERS,
            lambda config: "".join(f"{mixer}-" for mixer in _read_mixers(config, 32)),
            lambda text: _write_mixers(text, "-"),
        ),
    ),
    fixed={**QWEN3_NEXT.fixed, "attn_output_gate": (True,)},
    always=_ALWAYS,
    weights=_TEXT_ROWS,
    stacked={},
)
QWEN3_5_MOE = replace(
    QWEN3_NEXT,
    architecture="Qwen3_5MoeForCausalLM",
    keys=(
        *llama_keys("qwen3_5_moe_text"),
        *_TEXT_KEYS,
        layers_of_symbols(
            _LAYERS,
            lambda config: "".join(f"{mixer}E" for mixer in _read_mixers(config, 40)),
            lambda text: _write_mixers(text, "E"),
        ),
        either_key("num_experts", 256, "num_experts", "num_local_experts", can=HAS_EXPERTS),
        ConfigKey("moe_router_topk", "num_experts_per_tok", 8),
        *_EXPERT_KEYS,
    ),
    fixed=QWEN3_5.fixed,
    weights={**_TEXT_ROWS, **_EXPERTS},
)
