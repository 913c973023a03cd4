"""Families whose blocks have experts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from megatron.config.model import ModelConfig
from megatron.convert.huggingface.dense_families import (
    DIVIDES_HIDDEN,
    GRANITE_KEYS,
    LLAMA,
    NO_BIAS,
    NORMS_OF_ALL_HEADS,
    SWIGLU,
    llama_keys,
)
from megatron.convert.huggingface.keys import (
    WINDOW,
    Capabilities,
    ConfigKey,
    FieldValues,
    JsonObject,
    KeyGroup,
    UnsupportedConfigError,
    WeightRows,
    either_key,
    layer_types,
    layers_with_experts,
    read_bool,
    read_number,
    rope,
    windows_by_limit,
    write_layer_types,
)

HAS_EXPERTS: Capabilities = {"num_experts": lambda m: m.num_experts is not None}
_IN_ALL_LAYERS: Capabilities = {**HAS_EXPERTS, "moe_layer_freq": lambda m: m.dense_layers == 0}
_LOGITS, _COEFFICIENT = "output_router_logits", "router_aux_loss_coef"


def _read_balancing_loss(config: JsonObject) -> FieldValues:
    """Read the coefficient of the balancing loss if transformers uses it; published models have one without use."""
    coefficient = read_number(ConfigKey("", _COEFFICIENT, 0.001, optional=True), config)
    return {"moe_aux_loss_coeff": (coefficient or 0.0,)} if config.get(_LOGITS) is True else {}


def _write_balancing_loss(model: ModelConfig) -> FieldValues:
    coefficient = sum(model.balancing_losses.values())
    return {_COEFFICIENT: coefficient} if coefficient else {}


BALANCING_LOSS = KeyGroup((_LOGITS, _COEFFICIENT), _read_balancing_loss, _write_balancing_loss)
"""Keys of transformers' balancing loss, of all layers together: with several it differs from ours, which is a sum."""


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


STACKED: WeightRows = {
    "layers.{i}.mlp.router": ("e h", {"model.layers.{i}.mlp.gate": "e, h"}),
    "layers.{i}.mlp.experts.linear_fc1.weight": ("e p f h", {"model.layers.{i}.mlp.experts.gate_up_proj": "e, p f, h"}),
    "layers.{i}.mlp.experts.linear_fc2.weight": ("e h f", {"model.layers.{i}.mlp.experts.down_proj": "e, h, f"}),
}
_EXPERT_WIDTH = KeyGroup(
    read=lambda c: {"moe_ffn_hidden_size": None},
    write=lambda m: {"intermediate_size": m.expert_ffn},
    options=("moe_ffn_hidden_size",),
)
"""The width of the experts, where it has no key of its own."""


MIXTRAL = replace(
    LLAMA,
    architecture="MixtralForCausalLM",
    keys=(
        *llama_keys("mixtral"),
        ConfigKey("moe_router_topk", "num_experts_per_tok", 2),
        rope(theta=1e6),
        ConfigKey("window_size", "sliding_window", None),
        ConfigKey("num_experts", "num_local_experts", 8, can=_IN_ALL_LAYERS),
        _EXPERT_WIDTH,
        BALANCING_LOSS,
    ),
    fixed={**LLAMA.fixed, "router_jitter_noise": (0.0,)},
    always={**SWIGLU, **NO_BIAS},
    weights={**LLAMA.weights, **expert_weights("model.layers.{i}.block_sparse_moe", "w1", "w3", "w2")},
    stacked=STACKED,
)


def normed_weights(default: bool) -> KeyGroup:
    """Return the key of the division of the chosen experts' weights by their sum."""
    return KeyGroup(
        ("norm_topk_prob",),
        lambda c: {"moe_router_pre_softmax": not read_bool(c, "norm_topk_prob", default)},
        lambda m: {"norm_topk_prob": not m.moe_router_pre_softmax},
        options=("moe_router_pre_softmax",),
    )


def read_sparse_layers(config: JsonObject, layers: int) -> list[bool]:
    """Read which layers have experts: every ``decoder_sparse_step``-th, except ``mlp_only_layers``."""
    step, dense = config.get("decoder_sparse_step", 1), config.get("mlp_only_layers") or []
    if isinstance(step, bool) or not isinstance(step, int) or step < 1:
        raise UnsupportedConfigError(f"decoder_sparse_step is {step!r}, not a whole number above 0")
    if not isinstance(dense, list) or not all(isinstance(layer, int) for layer in dense):
        raise UnsupportedConfigError(f"mlp_only_layers are {dense!r}, not a list of layers")
    return [(layer + 1) % step == 0 and layer not in dense for layer in range(layers)]


def _write_sparse_layers(chosen: Sequence[bool]) -> FieldValues:
    return {"decoder_sparse_step": 1, "mlp_only_layers": [layer for layer, experts in enumerate(chosen) if not experts]}


EXPERT_ROWS = expert_weights("model.layers.{i}.mlp", "gate_proj", "up_proj", "down_proj")

_MIXTURE = replace(
    LLAMA,
    fixed={**LLAMA.fixed, "attention_bias": (False,)},
    always={**SWIGLU, **NO_BIAS},
    weights={**LLAMA.weights, **EXPERT_ROWS},
    stacked=STACKED,
)
_SPARSE = layers_with_experts(24, ("decoder_sparse_step", "mlp_only_layers"), read_sparse_layers, _write_sparse_layers)

QWEN3_MOE = replace(
    _MIXTURE,
    architecture="Qwen3MoeForCausalLM",
    keys=(
        *llama_keys("qwen3_moe"),
        ConfigKey("moe_ffn_hidden_size", "moe_intermediate_size", 768),
        ConfigKey("moe_router_topk", "num_experts_per_tok", 8),
        rope(),
        KeyGroup(
            ("use_sliding_window", "sliding_window", "max_window_layers"),
            lambda c: {"window_size": read_number(WINDOW, c) if read_bool(c, "use_sliding_window", False) else None},
            lambda m: {"use_sliding_window": m.window_size is not None, "sliding_window": m.window_size},
            options=("window_size",),
        ),
        either_key("num_experts", 128, "num_experts", "num_local_experts", can=HAS_EXPERTS),
        _SPARSE,
        normed_weights(False),
        BALANCING_LOSS,
    ),
    always={**_MIXTURE.always, "qk_layernorm": True},
)


def shared_expert(module: str) -> WeightRows:
    """Return the rows of the shared expert in ``module`` of a layer."""
    return {
        "layers.{i}.mlp.shared_experts.linear_fc1": (
            "p f h",
            {f"{module}.gate_proj": "p[:1] f, h", f"{module}.up_proj": "p[1:] f, h"},
        ),
        "layers.{i}.mlp.shared_experts.linear_fc2": ("h f", {f"{module}.down_proj": "h, f"}),
    }


SHARED_EXPERT_GATE: WeightRows = {
    "layers.{i}.mlp.shared_experts.gate_weight": ("u h", {"model.layers.{i}.mlp.shared_expert_gate.weight": "u, h"}),
}


def _write_alternating_window(model: ModelConfig) -> FieldValues:
    keys = write_layer_types(model, always=True)
    return {"use_sliding_window": keys["sliding_window"] is not None} | keys


QWEN2_MOE = replace(
    _MIXTURE,
    architecture="Qwen2MoeForCausalLM",
    keys=(
        *llama_keys("qwen2_moe"),
        ConfigKey("moe_ffn_hidden_size", "moe_intermediate_size", 1408),
        ConfigKey(
            "moe_shared_expert_intermediate_size",
            "shared_expert_intermediate_size",
            5632,
            can={"moe_shared_expert_intermediate_size": lambda m: m.moe_shared_expert_intermediate_size is not None},
        ),
        ConfigKey("moe_router_topk", "num_experts_per_tok", 4),
        rope(),
        windows_by_limit(24, 28, lambda layer, limit: layer % 2 == 0 and layer < limit, _write_alternating_window),
        ConfigKey("add_qkv_bias", "qkv_bias", True),
        ConfigKey("num_experts", "num_experts", 60, can=HAS_EXPERTS),
        _SPARSE,
        normed_weights(False),
        BALANCING_LOSS,
    ),
    fixed=LLAMA.fixed,
    always={**_MIXTURE.always, "moe_shared_expert_gate": True},
    weights={
        **_MIXTURE.weights,
        **shared_expert("model.layers.{i}.mlp.shared_expert"),
        **SHARED_EXPERT_GATE,
    },
)

OLMOE = replace(
    _MIXTURE,
    architecture="OlmoeForCausalLM",
    keys=(
        *llama_keys("olmoe"),
        _EXPERT_WIDTH,
        ConfigKey("moe_router_topk", "num_experts_per_tok", 8),
        rope(),
        either_key("num_experts", 64, "num_experts", "num_local_experts", can=_IN_ALL_LAYERS),
        normed_weights(False),
        BALANCING_LOSS,
        KeyGroup(can=DIVIDES_HIDDEN),
    ),
    fixed={**_MIXTURE.fixed, "clip_qkv": (None,)},
    always={**_MIXTURE.always, "qk_layernorm": True, "qk_layernorm_scope": "all"},
    weights={**_MIXTURE.weights, **NORMS_OF_ALL_HEADS},
)

GRANITE_MOE = replace(
    LLAMA,
    architecture="GraniteMoeForCausalLM",
    keys=(
        *llama_keys("granitemoe"),
        _EXPERT_WIDTH,
        ConfigKey("moe_router_topk", "num_experts_per_tok", 2),
        ConfigKey("num_experts", "num_local_experts", 8, can=_IN_ALL_LAYERS),
        *GRANITE_KEYS,
        BALANCING_LOSS,
    ),
    fixed={**LLAMA.fixed, "attention_bias": (False,)},
    always={**SWIGLU, **NO_BIAS},
    weights={
        **LLAMA.weights,
        "layers.{i}.mlp.router": ("e h", {"model.layers.{i}.block_sparse_moe.router.layer": "e, h"}),
        "layers.{i}.mlp.experts.linear_fc1": (
            "e p f h",
            {"model.layers.{i}.block_sparse_moe.input_linear": "e, p f, h"},
        ),
        "layers.{i}.mlp.experts.linear_fc2": ("e h f", {"model.layers.{i}.block_sparse_moe.output_linear": "e, h, f"}),
    },
)

_GPT_OSS_ROPE: JsonObject = {
    "rope_type": "yarn",
    "factor": 32.0,
    "original_max_position_embeddings": 4096,
    "truncate": False,
}
GPT_OSS = replace(
    LLAMA,
    architecture="GptOssForCausalLM",
    keys=(
        *llama_keys("gpt_oss"),
        ConfigKey("moe_router_topk", "num_experts_per_tok", 4),
        ConfigKey("num_experts", "num_local_experts", 128, can=_IN_ALL_LAYERS),
        _EXPERT_WIDTH,
        rope(theta=150000.0, scaling=_GPT_OSS_ROPE),
        replace(layer_types(2), read=lambda c: layer_types(2).read({"sliding_window": 128} | c)),
        BALANCING_LOSS,
        KeyGroup(("experts_per_token", "initial_context_length")),  # published, but not used by transformers
    ),
    fixed={**LLAMA.fixed, "attention_bias": (True,), "swiglu_limit": (7.0,)},
    always={
        "normalization": "RMSNorm",
        "activation": "quick_geglu",
        "activation_func_clamp_value": 7.0,
        "glu_linear_offset": 1.0,
        "softmax_type": "learnable",
    },
    weights={
        **LLAMA.weights,
        "layers.{i}.self_attention.core_attention.softmax_offset": ("n", {"model.layers.{i}.self_attn.sinks": "n"}),
        "layers.{i}.mlp.router": ("e h", {"model.layers.{i}.mlp.router": "e, h"}),
        "layers.{i}.mlp.experts.linear_fc1.weight": (
            "e p f h",
            {"model.layers.{i}.mlp.experts.gate_up_proj": "e, h, f p"},
        ),
        "layers.{i}.mlp.experts.linear_fc1.bias": (
            "e p f",
            {"model.layers.{i}.mlp.experts.gate_up_proj_bias": "e, f p"},
        ),
        "layers.{i}.mlp.experts.linear_fc2.weight": ("e h f", {"model.layers.{i}.mlp.experts.down_proj": "e, f, h"}),
        "layers.{i}.mlp.experts.linear_fc2.bias": ("e h", {"model.layers.{i}.mlp.experts.down_proj_bias": "e, h"}),
    },
)
