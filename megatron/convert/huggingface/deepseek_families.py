"""DeepSeek, and families with its router: first layers without experts, groups of experts, shared experts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from megatron.config.model import ModelConfig
from megatron.convert.huggingface.dense_families import LLAMA, NO_BIAS, SWIGLU, llama_keys, sizes
from megatron.convert.huggingface.expert_families import (
    BALANCING_LOSS,
    EXPERT_ROWS,
    HAS_EXPERTS,
    STACKED,
    shared_expert,
)
from megatron.convert.huggingface.keys import (
    Capabilities,
    ConfigKey,
    FieldValues,
    JsonObject,
    KeyGroup,
    UnsupportedConfigError,
    WeightRows,
    either_key,
    latent_rope,
    layers_with_experts,
    read_bool,
    read_number,
    rope,
    windows_by_limit,
    write_layer_types,
)

# ---- Keys of the router and of the experts ----


class Defaults(NamedTuple):
    """transformers' defaults of the keys of routers and experts."""

    layers: int
    experts: int | None
    topk: int | None
    width: int
    shared: int | None
    dense: int
    scale: float
    groups: int | None
    topk_group: int | None
    normed: bool


_DEEPSEEK_V3 = Defaults(61, 256, 8, 2048, 1, 3, 2.5, 8, 4, True)
_DEEPSEEK_V2 = Defaults(32, 64, None, 1407, 2, 0, 1.0, None, None, False)
_GLM4_MOE = Defaults(46, 128, 8, 1408, 1, 1, 1.0, 1, 1, True)
_DOTS1 = Defaults(62, None, None, 1408, None, 0, 1.0, 1, 1, False)

_COUNTED = "num_experts_per_tok"


def _write_first_dense(chosen: Sequence[bool]) -> FieldValues:
    dense = next((layer for layer, experts in enumerate(chosen) if experts), len(chosen))
    return {"first_k_dense_replace": dense} if all(chosen[dense:]) else {}


def shared_experts(key: ConfigKey, width: ConfigKey, least: int) -> KeyGroup:
    """Return the key of the number of shared experts: one MLP, this many times as wide as an expert.

    Args:
        key: the key, of no field.
        width: the key of the width of an expert.
        least: the smallest number that transformers can build.
    """
    field = "moe_shared_expert_intermediate_size"

    def read(config: JsonObject) -> FieldValues:
        count = read_number(key, config)
        if count is None or count < least:
            raise UnsupportedConfigError(f"{key.theirs} is {count}, not at least {least}")
        return {field: count * read_number(width, config) or None}

    def count(model: ModelConfig) -> float:
        return (model.moe_shared_expert_intermediate_size or 0) / model.expert_ffn

    def can(model: ModelConfig) -> bool:
        return count(model).is_integer() and count(model) >= least

    return KeyGroup((key.theirs,), read, lambda m: {key.theirs: int(count(m))}, {field: can})


def _experts(default: Defaults) -> tuple[ConfigKey | KeyGroup, ...]:
    """Return the keys of the experts and of the layers that have them."""
    width = ConfigKey("moe_ffn_hidden_size", "moe_intermediate_size", default.width)
    dense = ConfigKey("", "first_k_dense_replace", default.dense)

    def read_count(config: JsonObject) -> FieldValues:
        count = read_number(ConfigKey("", "n_routed_experts", default.experts), config)
        if count is None:
            raise UnsupportedConfigError("n_routed_experts is not given")
        return {"num_experts": count}

    return (
        width,
        KeyGroup(("n_routed_experts",), read_count, lambda m: {"n_routed_experts": m.num_experts}, HAS_EXPERTS),
        shared_experts(ConfigKey("", "n_shared_experts", default.shared), width, 1),
        layers_with_experts(
            default.layers,
            (dense.theirs,),
            lambda config, layers: [layer >= read_number(dense, config) for layer in range(layers)],
            _write_first_dense,
        ),
        KeyGroup(("ep_size", "aux_loss_alpha", "seq_aux")),  # published; of training, or not used by transformers
    )


def _read_topk(config: JsonObject, default: Defaults) -> int:
    topk = read_number(ConfigKey("", _COUNTED, default.topk), config)
    if topk is None:
        raise UnsupportedConfigError(f"{_COUNTED} is not given")
    return int(topk)


def _scale(default: Defaults) -> KeyGroup:
    key, field = ConfigKey("", "routed_scaling_factor", default.scale), "moe_router_topk_scaling_factor"

    def read(config: JsonObject) -> FieldValues:
        factor = read_number(key, config)
        return {field: None if factor == 1.0 else factor}

    return KeyGroup((key.theirs,), read, lambda m: {key.theirs: getattr(m, field) or 1.0}, options=(field,))


_GROUPED = ("n_group", "topk_group")
_GROUP_OPTIONS = ("moe_router_group_topk", "moe_router_group_score_topk")


def _read_groups(config: JsonObject, default: Defaults, best: int) -> FieldValues:
    """Read the groups of experts, whose score is the sum of their ``best`` scores."""
    topk, keys = _read_topk(config, default), zip(_GROUPED, (default.groups, default.topk_group))
    groups, chosen = (read_number(ConfigKey("", name, value, optional=True), config) or 1 for name, value in keys)
    if chosen >= groups:  # a token chooses among all experts
        return dict.fromkeys(("moe_router_num_groups", *_GROUP_OPTIONS))
    implied = max(1, topk // chosen) == best
    values = (chosen, None if implied else best)
    return {"moe_router_num_groups": groups, **dict(zip(_GROUP_OPTIONS, values))}


def _is_grouped(model: ModelConfig) -> bool:
    return (model.moe_router_group_topk or 1) < (model.moe_router_num_groups or 1)


def _write_groups(model: ModelConfig) -> FieldValues:
    groups = (model.moe_router_num_groups, model.moe_router_group_topk) if _is_grouped(model) else (1, 1)
    return dict(zip(_GROUPED, groups))


def _can_group(best: int) -> Capabilities:
    """Return which groups a family can express whose score is the sum of their ``best`` scores."""

    def can(model: ModelConfig) -> bool:
        held = (model.num_experts or 0) // (model.moe_router_num_groups or 1)
        return not _is_grouped(model) or (model.group_score_topk == best and held >= best)

    return {"moe_router_num_groups": can}


def sigmoid_router(default: Defaults) -> tuple[KeyGroup, ...]:
    """Return the keys of a router with sigmoid scores, whose groups are chosen by their two best experts.

    Here the weights of several experts are divided by their sum.
    """

    def read(config: JsonObject) -> FieldValues:
        topk = _read_topk(config, default)
        if read_bool(config, "norm_topk_prob", default.normed) != (topk > 1):
            raise UnsupportedConfigError(
                f"norm_topk_prob {topk == 1} with {_COUNTED} {topk} is not supported: weights of several experts are "
                "divided by their sum, and that of one is its score"
            )
        return {"moe_router_topk": topk, **_read_groups(config, default, best=2)}

    def write(model: ModelConfig) -> FieldValues:
        topk = model.moe_router_topk
        return {_COUNTED: topk, "norm_topk_prob": topk > 1, **_write_groups(model)}

    names, options = (_COUNTED, "norm_topk_prob", *_GROUPED), ("moe_router_topk", *_GROUP_OPTIONS)
    return KeyGroup(names, read, write, _can_group(best=2), options), _scale(default)


def _softmax_router(default: Defaults) -> tuple[KeyGroup, ...]:
    """Return the keys of DeepSeek-V2's router, whose groups, if it has some, are chosen by their best expert."""
    key, methods = "topk_method", ("greedy", "group_limited_greedy")

    def read(config: JsonObject) -> FieldValues:
        method = config.get(key, methods[0])
        if method not in methods:
            raise UnsupportedConfigError(f"{key} {method!r} is not supported, only {' or '.join(methods)}")
        grouped = config if method == methods[1] else {**config, **dict.fromkeys(_GROUPED)}
        return {"moe_router_topk": _read_topk(config, default), **_read_groups(grouped, default, best=1)}

    def write(model: ModelConfig) -> FieldValues:
        return {_COUNTED: model.moe_router_topk, key: methods[_is_grouped(model)], **_write_groups(model)}

    names, options = (_COUNTED, key, *_GROUPED), ("moe_router_topk", *_GROUP_OPTIONS)
    return KeyGroup(names, read, write, _can_group(best=1), options), _scale(default)


_SIGMOID: FieldValues = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
_EXPERT_BIAS: WeightRows = {
    "layers.{i}.mlp.router.expert_bias": ("e", {"model.layers.{i}.mlp.gate.e_score_correction_bias": "e"}),
}
_ROWS: WeightRows = {**EXPERT_ROWS, **_EXPERT_BIAS, **shared_expert("model.layers.{i}.mlp.shared_experts")}

# ---- Multi-token prediction ----


_DEPTHS = either_key("mtp_num_layers", 1, "num_nextn_predict_layers", "num_mtp_layers")
"""The number of layers for further tokens, which follow those of the model."""


def _read_depths(config: JsonObject) -> FieldValues:
    return {"mtp_num_layers": _DEPTHS.read(config)["mtp_num_layers"] or None}


_HEADS = replace(_DEPTHS, read=_read_depths)

_LAYER = "model.layers.{i}"
_COPIES = {
    f"{_LAYER}.embed_tokens.weight": "embedding.word_embeddings.weight",
    f"{_LAYER}.shared_head.head.weight": "output_layer.weight",
}
_HEAD_ROWS: WeightRows = {
    "mtp.layers.{i}.enorm": ("h", {f"{_LAYER}.enorm": "h"}),
    "mtp.layers.{i}.hnorm": ("h", {f"{_LAYER}.hnorm": "h"}),
    "mtp.layers.{i}.eh_proj": ("h t", {f"{_LAYER}.eh_proj": "h, t"}),
    "mtp.layers.{i}.final_layernorm": ("h", {f"{_LAYER}.shared_head.norm": "h"}),
}

# ---- Families ----

GLM4_MOE = replace(
    LLAMA,
    architecture="Glm4MoeForCausalLM",
    keys=(
        *llama_keys("glm4_moe"),
        rope(fraction=0.5),
        *_experts(_GLM4_MOE),
        *sigmoid_router(_GLM4_MOE),
        _HEADS,
        ConfigKey("add_qkv_bias", "attention_bias", False),
        ConfigKey("qk_layernorm", "use_qk_norm", False),
    ),
    always={**SWIGLU, **NO_BIAS, **_SIGMOID},
    weights={**LLAMA.weights, **_ROWS, **_HEAD_ROWS},
    stacked=STACKED,
    copies=_COPIES,
)


def _write_last_windows(model: ModelConfig) -> FieldValues:
    return {"max_window_layers": model.num_layers, **write_layer_types(model, always=True)}


DOTS1 = replace(
    LLAMA,
    architecture="Dots1ForCausalLM",
    keys=(
        *llama_keys("dots1"),
        rope(),
        *_experts(_DOTS1),
        *sigmoid_router(_DOTS1),
        windows_by_limit(62, 62, lambda layer, limit: layer >= limit, _write_last_windows, switched=False),
    ),
    fixed={
        **LLAMA.fixed,
        "attention_bias": (False,),
        "moe_layer_freq": (1,),
        "scoring_func": ("sigmoid", "noaux_tc"),
        "topk_method": ("noaux_tc",),
    },
    always={**SWIGLU, **NO_BIAS, **_SIGMOID, "qk_layernorm": True},
    weights={**LLAMA.weights, **_ROWS},
    stacked=STACKED,
)


def _read_chosen_layers(config: JsonObject, layers: int) -> list[bool]:
    """Read which layers have experts: every ``moe_layer_interval``-th from one layer to another."""
    names = {"moe_layer_start_index": 1, "moe_layer_end_index": -1, "moe_layer_interval": 1}
    first, last, interval = (read_number(ConfigKey("", *item), config) for item in names.items())
    if interval < 1:
        raise UnsupportedConfigError(f"moe_layer_interval is {interval}, not above 0")
    last = layers - 1 if last == -1 else last
    return [(layer + 1) % interval == 0 and first <= layer <= last for layer in range(layers)]


def _write_chosen_layers(chosen: Sequence[bool]) -> FieldValues:
    layers = [layer for layer, experts in enumerate(chosen) if experts] or [len(chosen)]
    interval = layers[1] - layers[0] if len(layers) > 1 else 1
    keys = {
        "moe_layer_start_index": layers[0],
        "moe_layer_end_index": layers[-1],
        "moe_layer_interval": interval,
    }
    return keys if _read_chosen_layers(keys, len(chosen)) == [*chosen] else {}


_ERNIE_WIDTH = ConfigKey("moe_ffn_hidden_size", "moe_intermediate_size", 1536)
ERNIE4_5_MOE = replace(
    LLAMA,
    architecture="Ernie4_5_MoeForCausalLM",
    keys=(
        *sizes("ernie4_5_moe"),
        KeyGroup(read=lambda config: {"hidden_dropout": 0.0, "attention_dropout": 0.0}),
        rope(theta=500000.0),
        _ERNIE_WIDTH,
        ConfigKey("moe_router_topk", "moe_k", 6),
        ConfigKey("num_experts", "moe_num_experts", 64, can=HAS_EXPERTS),
        shared_experts(ConfigKey("", "moe_num_shared_experts", 2), _ERNIE_WIDTH, 0),
        layers_with_experts(
            28,
            ("moe_layer_start_index", "moe_layer_end_index", "moe_layer_interval"),
            _read_chosen_layers,
            _write_chosen_layers,
        ),
        BALANCING_LOSS,
        # published; of training, or not used by transformers
        KeyGroup(("moe_capacity", "moe_gate", "moe_use_aux_free", "num_nextn_predict_layers", "use_rmsnorm")),
    ),
    fixed={**LLAMA.fixed, "use_bias": (False,), "moe_norm_min": (1e-12,)},
    always={**SWIGLU, **NO_BIAS, "rotary_interleaved": True, "moe_router_enable_expert_bias": True},
    weights={
        **LLAMA.weights,
        **_ROWS,
        "layers.{i}.mlp.router.expert_bias": (
            "e",
            {"model.layers.{i}.mlp.moe_statics.e_score_correction_bias": ", e"},
        ),
    },
    stacked=STACKED,
    # layers for further tokens, which transformers ignores
    buffers=(*LLAMA.buffers, r"mtp_.*"),
    tied_by_default=True,
)


def _check_epsilon(config: JsonObject) -> FieldValues:
    """Refuse another epsilon than 1e-6, which the norms of latents have in transformers."""
    epsilon = read_number(ConfigKey("", "rms_norm_eps", 1e-6), config)
    if epsilon != 1e-6:
        raise UnsupportedConfigError(f"rms_norm_eps {epsilon:g} is not supported: in the norms of latents it is 1e-06")
    return {}


_LATENT_KEYS = (
    ConfigKey("q_lora_rank", "q_lora_rank", 1536, optional=True),
    ConfigKey("kv_lora_rank", "kv_lora_rank", 512),
    ConfigKey("qk_head_dim", "qk_nope_head_dim", 128),
    ConfigKey("qk_pos_emb_head_dim", "qk_rope_head_dim", 64),
    ConfigKey("v_head_dim", "v_head_dim", 128),
    KeyGroup(
        ("num_key_value_heads", "head_dim", "qk_head_dim"),  # implied by the others
        _check_epsilon,
        lambda m: {"num_key_value_heads": m.num_attention_heads},
        {"norm_epsilon": lambda m: m.norm_epsilon == 1e-6},
        ("num_query_groups", "kv_channels"),
    ),
    latent_rope(),
)
_LATENT: FieldValues = {"multi_latent_attention": True, "qk_layernorm": True}
_ATTENTION = "model.layers.{i}.self_attn"
_LATENT_ROWS: WeightRows = {
    **{ours: row for ours, row in LLAMA.weights.items() if "linear_qkv" not in ours and "k_layernorm" not in ours},
    "layers.{i}.self_attention.linear_q_proj": ("o h", {f"{_ATTENTION}.q_proj": "o, h"}),
    "layers.{i}.self_attention.linear_q_down_proj": ("r h", {f"{_ATTENTION}.q_a_proj": "r, h"}),
    "layers.{i}.self_attention.q_layernorm": ("r", {f"{_ATTENTION}.q_a_layernorm": "r"}),
    "layers.{i}.self_attention.linear_q_up_proj": ("o r", {f"{_ATTENTION}.q_b_proj": "o, r"}),
    "layers.{i}.self_attention.linear_kv_down_proj": ("r h", {f"{_ATTENTION}.kv_a_proj_with_mqa": "r, h"}),
    "layers.{i}.self_attention.kv_layernorm": ("r", {f"{_ATTENTION}.kv_a_layernorm": "r"}),
    "layers.{i}.self_attention.linear_kv_up_proj": ("o r", {f"{_ATTENTION}.kv_b_proj": "o, r"}),
}
_DEEPSEEK_FIXED = {**LLAMA.fixed, "attention_bias": (False,), "moe_layer_freq": (1,)}

DEEPSEEK_V3 = replace(
    LLAMA,
    architecture="DeepseekV3ForCausalLM",
    keys=(
        *llama_keys("deepseek_v3"),
        *_LATENT_KEYS,
        *_experts(_DEEPSEEK_V3),
        *sigmoid_router(_DEEPSEEK_V3),
        _HEADS,
    ),
    fixed={
        **_DEEPSEEK_FIXED,
        "rope_interleave": (True,),
        "scoring_func": ("sigmoid",),
        "topk_method": ("noaux_tc",),
    },
    always={**SWIGLU, **NO_BIAS, **_SIGMOID, **_LATENT},
    weights={**_LATENT_ROWS, **_ROWS, **_HEAD_ROWS},
    stacked=STACKED,
    copies=_COPIES,
)
KIMI_K2 = replace(DEEPSEEK_V3, known_as="deepseek_v3")

DEEPSEEK_V2 = replace(
    LLAMA,
    architecture="DeepseekV2ForCausalLM",
    keys=(
        *llama_keys("deepseek_v2"),
        *_LATENT_KEYS,
        *_experts(_DEEPSEEK_V2),
        *_softmax_router(_DEEPSEEK_V2),
        KeyGroup(can={"hidden_size": lambda m: m.hidden_size % m.num_attention_heads == 0}),
    ),
    fixed={
        **_DEEPSEEK_FIXED,
        "mlp_bias": (False,),
        "norm_topk_prob": (False, None),
        "scoring_func": ("softmax",),
    },
    always={**SWIGLU, **NO_BIAS, **_LATENT, "moe_router_pre_softmax": True},
    weights={**_LATENT_ROWS, **EXPERT_ROWS, **shared_expert("model.layers.{i}.mlp.shared_experts")},
    stacked=STACKED,
)
