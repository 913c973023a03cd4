"""Supported model types of transformers, each one record: its ``config.json``, and where its tensors are stored.

:mod:`megatron.convert.huggingface.keys` explains the records.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace

from megatron.config.model import ModelConfig
from megatron.config.plugins import registered
from megatron.convert.huggingface.keys import (
    GEGLUS,
    GELUS,
    HAS_LAYER_TYPES,
    WINDOW,
    Capabilities,
    ConfigKey,
    FieldValues,
    JsonObject,
    KeyGroup,
    ModelFamily,
    UnsupportedConfigError,
    WeightRows,
    activation,
    equal_dropout,
    layer_types,
    read_bool,
    read_layer_types,
    read_no_rope_layers,
    read_number,
    rope,
    rope_of_kinds,
    softcaps,
    softmax_scale,
    write_layer_types,
    write_no_rope_layers,
)

# ---- GPT-2 ----

_WIDTH = ConfigKey("hidden_size", "n_embd", 768)
_DIVIDES_HIDDEN: Capabilities = {"hidden_size": lambda m: m.hidden_size % m.num_attention_heads == 0}
"""Required by transformers."""

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
        *equal_dropout("resid_pdrop", "embd_pdrop", 0.1),
        ConfigKey("attention_dropout", "attn_pdrop", 0.1),
        ConfigKey("init_method_std", "initializer_range", 0.02),
        activation("activation_function", "gelu_new", GELUS),
        # the default of ModelConfig
        KeyGroup(read=lambda c: {"ffn_hidden_size": None} if c.get("n_inner") == 4 * read_number(_WIDTH, c) else {}),
        KeyGroup(can=_DIVIDES_HIDDEN),
    ),
    fixed={
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "add_cross_attention": (False,),
    },
    always={},
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


_SWIGLU: FieldValues = {"normalization": "RMSNorm", "activation": "swiglu"}
_NO_BIAS: FieldValues = {"add_bias_linear": False}

_COLUMNS = (
    ("num_layers", "num_hidden_layers"),
    ("hidden_size", "hidden_size"),
    ("ffn_hidden_size", "intermediate_size"),
    ("num_attention_heads", "num_attention_heads"),
    ("vocab_size", "vocab_size"),
    ("max_position_embeddings", "max_position_embeddings"),
    ("init_method_std", "initializer_range"),
    ("num_query_groups", "num_key_value_heads"),
    ("kv_channels", "head_dim"),
    ("norm_epsilon", "rms_norm_eps"),
)
_DEFAULTS = """
             layers hidden   MLP  heads   words positions      std k/v heads head_dim  eps
llama            32   4096  11008    32   32000      2048     0.02      null     null 1e-6
mistral          32   4096  14336    32   32000    131072     0.02         8     null 1e-6
qwen2            32   4096  22016    32  151936     32768     0.02        32     null 1e-6
qwen3            32   4096  22016    32  151936     32768     0.02        32      128 1e-6
mixtral          32   4096  14336    32   32000    131072     0.02         8     null 1e-5
qwen3_moe        24   2048   6144    32  151936     32768     0.02         4     null 1e-6
gpt_oss          36   2880   2880    64  201088    131072     0.02         8       64 1e-5
gpt_neox         44   6144  24576    64   50432      2048     0.02         -        -    -
olmo2            32   4096  11008    32   50304      2048     0.02      null        - 1e-5
gemma2           26   2304   9216     8  256000      8192     0.02         4      256 1e-6
gemma3_text      26   2304   9216     8  262208    131072     0.02         4      256 1e-6
phi3             32   3072   8192    32   32064      4096     0.02      null        - 1e-5
smollm3          36   2048  11008    16  128256     32768     0.02         4        - 1e-6
granite          32   4096  11008    32   32000      2048     0.02      null        - 1e-6
starcoder2       30   3072  12288    24   49152      4096 0.018042         2        -    -
"""
"""transformers' defaults of the keys in ``_COLUMNS`` by model type; "-" for keys that it does not have."""


def _sizes(kind: str) -> tuple[ConfigKey, ...]:
    """Return the keys of a row of ``_DEFAULTS``."""
    row = next(line.split()[1:] for line in _DEFAULTS.splitlines() if line.startswith(f"{kind} "))
    return tuple(ConfigKey(*names, json.loads(value)) for names, value in zip(_COLUMNS, row) if value != "-")


def _llama_keys(kind: str) -> tuple[ConfigKey | KeyGroup, ...]:
    """Return the keys that Llama and its relatives have, but for rotary embeddings and biases."""
    dropout = KeyGroup(read=lambda config: {"hidden_dropout": 0.0})  # an export omits it
    return *_sizes(kind), ConfigKey("attention_dropout", "attention_dropout", 0.0), dropout


_LLAMA = ModelFamily(
    architecture="LlamaForCausalLM",
    keys=(
        *_llama_keys("llama"),
        rope(),
        KeyGroup(
            ("attention_bias", "mlp_bias"),
            _read_llama_bias,
            lambda m: {"attention_bias": m.add_bias_linear, "mlp_bias": m.add_bias_linear},
            {"add_qkv_bias": lambda m: m.qkv_bias == m.add_bias_linear, **_DIVIDES_HIDDEN},
            ("add_bias_linear",),
        ),
    ),
    fixed={"hidden_act": ("silu", "swish")},
    always={**_SWIGLU},
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

_MISTRAL = replace(
    _LLAMA,
    architecture="MistralForCausalLM",
    keys=(
        *_llama_keys("mistral"),
        rope(),
        WINDOW,
    ),
    always={**_SWIGLU, **_NO_BIAS},
)


_MINISTRAL = replace(_MISTRAL, architecture="MinistralForCausalLM", keys=(*_MISTRAL.keys[:-1], layer_types()))


def _read_qwen_window(config: JsonObject) -> FieldValues:
    """Read Qwen's window, which its first layers may not have."""
    full = read_number(ConfigKey("", "max_window_layers", 28), config)
    window = read_number(WINDOW, config) if read_bool(config, "use_sliding_window", False) else None
    return read_layer_types(config, window, lambda layer: layer >= full)


def _write_qwen_window(model: ModelConfig) -> FieldValues:
    """Return the keys of the window, with the number of first layers that do not have it."""
    windows = [model.pattern(layer).window for layer in range(model.num_layers)]
    full = next((layer for layer, window in enumerate(windows) if window), model.num_layers)
    used = {"use_sliding_window": full < model.num_layers, "max_window_layers": full}
    return used | write_layer_types(model)


_QWEN_WINDOW = KeyGroup(
    ("use_sliding_window", "max_window_layers", "sliding_window", "layer_types"),
    _read_qwen_window,
    _write_qwen_window,
    HAS_LAYER_TYPES,
    ("window_size",),
)

_QWEN2 = replace(
    _LLAMA,
    architecture="Qwen2ForCausalLM",
    keys=(*_llama_keys("qwen2"), rope(), _QWEN_WINDOW),
    always={**_SWIGLU, "add_bias_linear": False, "add_qkv_bias": True},
)
_QWEN3 = replace(
    _LLAMA,
    architecture="Qwen3ForCausalLM",
    keys=(*_llama_keys("qwen3"), rope(), _QWEN_WINDOW),
    fixed={**_LLAMA.fixed, "attention_bias": (False,)},
    always={**_SWIGLU, **_NO_BIAS, "qk_layernorm": True},
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


_STACKED: WeightRows = {
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


_MIXTRAL = replace(
    _LLAMA,
    architecture="MixtralForCausalLM",
    keys=(
        *_llama_keys("mixtral"),
        ConfigKey("moe_router_topk", "num_experts_per_tok", 2),
        rope(theta=1e6),
        ConfigKey("window_size", "sliding_window", None),
        ConfigKey("num_experts", "num_local_experts", 8, can=_HAS_EXPERTS),
        _EXPERT_WIDTH,
        _BALANCING_LOSS,
    ),
    fixed={**_LLAMA.fixed, "router_jitter_noise": (0.0,)},
    always={**_SWIGLU, **_NO_BIAS},
    weights={**_LLAMA.weights, **expert_weights("model.layers.{i}.block_sparse_moe", "w1", "w3", "w2")},
    stacked=_STACKED,
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
        *_llama_keys("qwen3_moe"),
        ConfigKey("moe_ffn_hidden_size", "moe_intermediate_size", 768),
        ConfigKey("moe_router_topk", "num_experts_per_tok", 8),
        rope(),
        KeyGroup(
            ("use_sliding_window", "sliding_window", "max_window_layers"),
            lambda c: {"window_size": read_number(WINDOW, c) if read_bool(c, "use_sliding_window", False) else None},
            lambda m: {"use_sliding_window": m.window_size is not None, "sliding_window": m.window_size},
            options=("window_size",),
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
            options=("moe_router_pre_softmax",),
        ),
        _BALANCING_LOSS,
    ),
    fixed={
        **_LLAMA.fixed,
        "attention_bias": (False,),
        "decoder_sparse_step": (1,),
        "mlp_only_layers": ([], None),
    },
    always={**_SWIGLU, **_NO_BIAS, "qk_layernorm": True},
    weights={**_LLAMA.weights, **expert_weights("model.layers.{i}.mlp", "gate_proj", "up_proj", "down_proj")},
    stacked=_STACKED,
)

_GPT_OSS_ROPE: JsonObject = {
    "rope_type": "yarn",
    "factor": 32.0,
    "original_max_position_embeddings": 4096,
    "truncate": False,
}
_GPT_OSS = replace(
    _LLAMA,
    architecture="GptOssForCausalLM",
    keys=(
        *_llama_keys("gpt_oss"),
        ConfigKey("moe_router_topk", "num_experts_per_tok", 4),
        ConfigKey("num_experts", "num_local_experts", 128, can=_HAS_EXPERTS),
        _EXPERT_WIDTH,
        rope(theta=150000.0, scaling=_GPT_OSS_ROPE),
        replace(layer_types(2), read=lambda c: layer_types(2).read({"sliding_window": 128} | c)),
        _BALANCING_LOSS,
        KeyGroup(("experts_per_token", "initial_context_length")),  # published, but not used by transformers
    ),
    fixed={**_LLAMA.fixed, "attention_bias": (True,), "swiglu_limit": (7.0,)},
    always={
        "normalization": "RMSNorm",
        "activation": "quick_geglu",
        "activation_func_clamp_value": 7.0,
        "glu_linear_offset": 1.0,
        "softmax_type": "learnable",
    },
    weights={
        **_LLAMA.weights,
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

# ---- GPT-NeoX ----


_NEOX = ModelFamily(
    architecture="GPTNeoXForCausalLM",
    keys=(
        *_sizes("gpt_neox"),
        ConfigKey("norm_epsilon", "layer_norm_eps", 1e-5),
        ConfigKey("hidden_dropout", "hidden_dropout", 0.0),
        ConfigKey("attention_dropout", "attention_dropout", 0.0),
        activation("hidden_act", "gelu", GELUS),
        rope(fraction=0.25, names=("rotary_emb_base", "rotary_pct")),
        KeyGroup(
            ("use_parallel_residual",),
            lambda c: {"parallel_attention": read_bool(c, "use_parallel_residual", True)},
            lambda m: {"use_parallel_residual": m.parallel_attention},
            options=("parallel_attention",),
        ),
        KeyGroup(("classifier_dropout",)),  # of another head
        KeyGroup(can=_DIVIDES_HIDDEN),
    ),
    fixed={"attention_bias": (True,)},
    always={},
    weights={
        "embedding.word_embeddings": ("v h", {"gpt_neox.embed_in": "v, h"}),
        "layers.{i}.input_layernorm": ("h", {"gpt_neox.layers.{i}.input_layernorm": "h"}),
        "layers.{i}.self_attention.linear_qkv": (
            "g x d h",
            {"gpt_neox.layers.{i}.attention.query_key_value": "g x d, h"},
        ),
        "layers.{i}.self_attention.linear_proj": ("h o", {"gpt_neox.layers.{i}.attention.dense": "h, o"}),
        "layers.{i}.pre_mlp_layernorm": ("h", {"gpt_neox.layers.{i}.post_attention_layernorm": "h"}),
        "layers.{i}.mlp.linear_fc1": ("f h", {"gpt_neox.layers.{i}.mlp.dense_h_to_4h": "f, h"}),
        "layers.{i}.mlp.linear_fc2": ("h f", {"gpt_neox.layers.{i}.mlp.dense_4h_to_h": "h, f"}),
        "final_layernorm": ("h", {"gpt_neox.final_layer_norm": "h"}),
        "output_layer": ("v h", {"embed_out": "v, h"}),
    },
    prefix="gpt_neox.",
    buffers=(r"layers\.\d+\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)",),
)

# ---- Norms after attention and MLP ----

_POST_NORMS: WeightRows = {
    "layers.{i}.post_self_attn_layernorm": ("h", {"model.layers.{i}.post_attention_layernorm": "h"}),
    "layers.{i}.post_mlp_layernorm": ("h", {"model.layers.{i}.post_feedforward_layernorm": "h"}),
}

_OLMO2 = replace(
    _LLAMA,
    architecture="Olmo2ForCausalLM",
    keys=(
        *_llama_keys("olmo2"),
        rope(),
        KeyGroup(can=_DIVIDES_HIDDEN),
    ),
    fixed={**_LLAMA.fixed, "attention_bias": (False,)},
    always={**_SWIGLU, **_NO_BIAS, "layernorm_placement": "post", "qk_layernorm": True, "qk_layernorm_scope": "all"},
    weights={
        **{ours: row for ours, row in _LLAMA.weights.items() if "put_layernorm" not in ours and "pre_mlp" not in ours},
        **_POST_NORMS,
        "layers.{i}.self_attention.q_layernorm": ("o", {"model.layers.{i}.self_attn.q_norm": "o"}),
        "layers.{i}.self_attention.k_layernorm": ("o", {"model.layers.{i}.self_attn.k_norm": "o"}),
    },
)
_OLMO3 = replace(
    _OLMO2,
    architecture="Olmo3ForCausalLM",
    keys=(*_OLMO2.keys[:-2], rope_of_kinds(5e5, 5e5), layer_types(4), _OLMO2.keys[-1]),
)

# ---- Gemma ----


def _scaled_embedding(model: ModelConfig) -> bool:
    return math.isclose(model.embedding_multiplier, math.sqrt(model.hidden_size), rel_tol=1e-12)


_GEMMA_KEYS = (
    activation("hidden_activation", "gelu_pytorch_tanh", GEGLUS),
    KeyGroup(("hidden_act",)),  # published, but not used by transformers
    KeyGroup(
        read=lambda c: {"embedding_multiplier": math.sqrt(max(1, read_number(ConfigKey("", "hidden_size", 2304), c)))},
        can={"embedding_multiplier": _scaled_embedding},
    ),
    softmax_scale("query_pre_attn_scalar", 256, -0.5),
    KeyGroup(can=_DIVIDES_HIDDEN),
)
_GEMMA2 = replace(
    _LLAMA,
    architecture="Gemma2ForCausalLM",
    keys=(*_llama_keys("gemma2"), *_GEMMA_KEYS, softcaps(50.0, 30.0), rope(), layer_types(2)),
    fixed={"attention_bias": (False,), "use_bidirectional_attention": (None, False)},
    always={**_NO_BIAS, "normalization": "RMSNorm", "layernorm_placement": "sandwich", "apply_layernorm_1p": True},
    weights={
        **_LLAMA.weights,
        **_POST_NORMS,
        "layers.{i}.pre_mlp_layernorm": ("h", {"model.layers.{i}.pre_feedforward_layernorm": "h"}),
    },
    tied_by_default=True,
)


def _read_gemma3_layers(config: JsonObject) -> FieldValues:
    period = read_number(ConfigKey("", "sliding_window_pattern", 6), config)
    return layer_types(max(1, period)).read(config)


_GEMMA3 = replace(
    _GEMMA2,
    architecture="Gemma3ForCausalLM",
    keys=(
        *_llama_keys("gemma3_text"),
        *_GEMMA_KEYS,
        softcaps(None, None),
        rope_of_kinds(1e6, 1e4, "rope_local_base_freq"),
        replace(
            layer_types(6),
            names=("sliding_window", "layer_types", "sliding_window_pattern", "_sliding_window_pattern"),
            read=_read_gemma3_layers,
        ),
    ),
    fixed={"attention_bias": (False,), "use_bidirectional_attention": (False, None)},
    always={**_GEMMA2.always, "qk_layernorm": True},
)

# ---- Other relatives of Llama ----


_PHI3 = replace(
    _LLAMA,
    architecture="Phi3ForCausalLM",
    keys=(
        *_llama_keys("phi3"),
        *equal_dropout("resid_pdrop", "embd_pdrop", 0.0),
        rope(fraction=1.0, scaled=False),
        ConfigKey("window_size", "sliding_window", None),
        KeyGroup(("attention_bias",), can=_DIVIDES_HIDDEN),  # published, but not used by transformers
    ),
    always={**_SWIGLU, **_NO_BIAS},
    weights={
        **_LLAMA.weights,
        "layers.{i}.self_attention.linear_qkv": (
            "g x d h",
            {"model.layers.{i}.self_attn.qkv_proj": "g x[:-2] d + g x[-2:-1] d + g x[-1:] d, h"},
        ),
        "layers.{i}.mlp.linear_fc1": ("p f h", {"model.layers.{i}.mlp.gate_up_proj": "p f, h"}),
    },
)


_SMOLLM3 = replace(
    _LLAMA,
    architecture="SmolLM3ForCausalLM",
    keys=(
        *_llama_keys("smollm3"),
        rope(theta=2e6),
        KeyGroup(
            (
                "use_sliding_window",
                "sliding_window",
                "layer_types",
                "max_window_layers",
                "no_rope_layers",
                "no_rope_layer_interval",
            ),
            read_no_rope_layers,
            write_no_rope_layers,
            {**HAS_LAYER_TYPES, **_DIVIDES_HIDDEN},
            ("window_size", "no_rope_freq"),
        ),
        _LLAMA.keys[-1],
    ),
    always={**_SWIGLU},
    tied_by_default=True,
)

_GRANITE = replace(
    _LLAMA,
    architecture="GraniteForCausalLM",
    keys=(
        *_llama_keys("granite"),
        rope(),
        softmax_scale("attention_multiplier", 1.0, 1),
        *(ConfigKey(name, name, 1.0) for name in ("embedding_multiplier", "residual_multiplier", "logits_scaling")),
        _LLAMA.keys[-1],
        KeyGroup(can=_DIVIDES_HIDDEN),
    ),
)

_STARCODER2 = replace(
    _LLAMA,
    architecture="Starcoder2ForCausalLM",
    keys=(
        *_llama_keys("starcoder2"),
        ConfigKey("norm_epsilon", "norm_epsilon", 1e-5),
        *equal_dropout("residual_dropout", "embedding_dropout", 0.0),
        KeyGroup(("activation_function", "mlp_type", "norm_type")),  # published, but not used by transformers
        activation("hidden_act", "gelu_pytorch_tanh", GELUS),
        rope(),
        ConfigKey("window_size", "sliding_window", None),
        KeyGroup(
            ("use_bias",),
            lambda c: {"add_bias_linear": read_bool(c, "use_bias", True), "add_qkv_bias": False},
            lambda m: {"use_bias": m.add_bias_linear},
            {"add_qkv_bias": lambda m: m.qkv_bias == m.add_bias_linear, **_DIVIDES_HIDDEN},
            ("add_bias_linear",),
        ),
    ),
    fixed={},
    always={},
    weights={
        **_LLAMA.weights,
        "layers.{i}.mlp.linear_fc1": ("f h", {"model.layers.{i}.mlp.c_fc": "f, h"}),
        "layers.{i}.mlp.linear_fc2": ("h f", {"model.layers.{i}.mlp.c_proj": "h, f"}),
    },
    tied_by_default=True,
)

MODEL_FAMILIES: dict[str, ModelFamily] = {
    "gpt2": _GPT2,
    "llama": _LLAMA,
    "mistral": _MISTRAL,
    "qwen2": _QWEN2,
    "qwen3": _QWEN3,
    "mixtral": _MIXTRAL,
    "qwen3_moe": _QWEN3_MOE,
    "gpt_oss": _GPT_OSS,
    "ministral": _MINISTRAL,
    "gpt_neox": _NEOX,
    "olmo2": _OLMO2,
    "olmo3": _OLMO3,
    "gemma2": _GEMMA2,
    "gemma3_text": _GEMMA3,
    "phi3": _PHI3,
    "smollm3": _SMOLLM3,
    "starcoder2": _STARCODER2,
    "granite": _GRANITE,
}
"""Built-in families by transformers' ``model_type``."""

_ONE_NORM = "one norm that attention and MLP share"
_STATES = "layers with a recurrent state in place of attention"
MISSING: Mapping[str, str] = {
    "deepseek_v2": "multi-head latent attention",
    "deepseek_v3": "multi-head latent attention",
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
    "qwen2_moe": "a gate of the shared expert",
    "dbrx": "clipped queries, keys and values",
    "llama4_text": "norms of queries and keys without weights",
    "gemma3n_text": "embeddings in every layer",
    "qwen3_next": _STATES,
    "mamba": _STATES,
    "mamba2": _STATES,
    "jamba": _STATES,
    "rwkv": _STATES,
    "recurrent_gemma": _STATES,
    "t5": "an encoder beside the decoder",
    "bert": "attention in both directions",
    "gemma3": "images; its text model alone is a gemma3_text",
}
"""Model types that are refused -> what they need that is not supported."""


def model_families() -> Mapping[str, ModelFamily]:
    """Return all families by ``model_type``: the built-in ones, then those that plugins register.

    A plugin may replace a built-in family. An export uses the first family that can express the model.
    """
    return {**MODEL_FAMILIES, **registered("model_family")}
