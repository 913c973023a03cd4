"""Families whose blocks have an MLP, and what those with experts share with them."""

from __future__ import annotations

import json
import math
from dataclasses import replace

from megatron.config.model import ModelConfig
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
    read_no_rope_layers,
    read_number,
    resolved,
    rope,
    rope_of_kinds,
    softcaps,
    softmax_scale,
    windows_by_limit,
    write_layer_types,
    write_no_rope_layers,
)

# ---- GPT-2 ----

_WIDTH = ConfigKey("hidden_size", "n_embd", 768)
DIVIDES_HIDDEN: Capabilities = {"hidden_size": lambda m: m.hidden_size % m.num_attention_heads == 0}
"""Required by transformers."""

GPT2 = ModelFamily(
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
        # of published models, and required by llama.cpp
        KeyGroup(write=lambda m: {"n_ctx": resolved(m, "max_position_embeddings")}),
        KeyGroup(can=DIVIDES_HIDDEN),
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


SWIGLU: FieldValues = {"normalization": "RMSNorm", "activation": "swiglu"}
NO_BIAS: FieldValues = {"add_bias_linear": False}

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
qwen2_moe        24   2048   5632    16  151936     32768     0.02        16     null 1e-6
qwen3_moe        24   2048   6144    32  151936     32768     0.02         4     null 1e-6
glm4_moe         46   4096  10944    96  151552    131072     0.02         8     null 1e-5
dots1            62   4608  10944    32  152064      2048     0.02        32     null 1e-6
ernie4_5_moe     28   2560  12288    20  103424    131072     0.02         4     null 1e-5
deepseek_v2      32   4096  11008    32  102400      2048     0.02         -        - 1e-6
deepseek_v3      61   7168  18432   128  129280      4096     0.02         -        - 1e-6
gpt_oss          36   2880   2880    64  201088    131072     0.02         8       64 1e-5
gpt_neox         44   6144  24576    64   50432      2048     0.02         -        -    -
olmo2            32   4096  11008    32   50304      2048     0.02      null        - 1e-5
gemma2           26   2304   9216     8  256000      8192     0.02         4      256 1e-6
gemma3_text      26   2304   9216     8  262208    131072     0.02         4      256 1e-6
phi3             32   3072   8192    32   32064      4096     0.02      null        - 1e-5
smollm3          36   2048  11008    16  128256     32768     0.02         4        - 1e-6
granite          32   4096  11008    32   32000      2048     0.02      null        - 1e-6
granitemoe       32   4096  11008    32   32000      2048     0.02      null        - 1e-6
olmoe            16   2048   2048    16   50304      4096     0.02      null        - 1e-5
starcoder2       30   3072  12288    24   49152      4096 0.018042         2        -    -
nemotron_h        -   4096  21504    32  131072      4096     0.02         8        -    -
bamba            32   4096  14336    32  128000    262144     0.02         8        - 1e-5
granitemoehybrid 32   4096      -    32   32000      2048     0.02      null        - 1e-6
qwen3_next       48   2048   5632    16  151936     32768     0.02         2      256 1e-6
qwen3_5_text     32   4096  12288    16  248320     32768     0.02         4      256 1e-6
qwen3_5_moe_text 40   2048      -    16  248320     32768     0.02         2      256 1e-6
"""
"""transformers' defaults of the keys in ``_COLUMNS`` by model type; "-" for keys that it does not have."""


def sizes(kind: str) -> tuple[ConfigKey, ...]:
    """Return the keys of a row of ``_DEFAULTS``."""
    row = next(line.split()[1:] for line in _DEFAULTS.splitlines() if line.startswith(f"{kind} "))
    return tuple(ConfigKey(*names, json.loads(value)) for names, value in zip(_COLUMNS, row) if value != "-")


def llama_keys(kind: str) -> tuple[ConfigKey | KeyGroup, ...]:
    """Return the keys that Llama and its relatives have, but for rotary embeddings and biases."""
    dropout = KeyGroup(read=lambda config: {"hidden_dropout": 0.0})  # an export omits it
    return *sizes(kind), ConfigKey("attention_dropout", "attention_dropout", 0.0), dropout


LLAMA = ModelFamily(
    architecture="LlamaForCausalLM",
    keys=(
        *llama_keys("llama"),
        rope(),
        KeyGroup(
            ("attention_bias", "mlp_bias"),
            _read_llama_bias,
            lambda m: {"attention_bias": m.add_bias_linear, "mlp_bias": m.add_bias_linear},
            {"add_qkv_bias": lambda m: m.qkv_bias == m.add_bias_linear, **DIVIDES_HIDDEN},
            ("add_bias_linear",),
        ),
    ),
    fixed={"hidden_act": ("silu", "swish")},
    always={**SWIGLU},
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

MISTRAL = replace(
    LLAMA,
    architecture="MistralForCausalLM",
    keys=(*llama_keys("mistral"), rope(), WINDOW),
    always={**SWIGLU, **NO_BIAS},
)


MINISTRAL = replace(MISTRAL, architecture="MinistralForCausalLM", keys=(*MISTRAL.keys[:-1], layer_types()))


def _write_qwen_window(model: ModelConfig) -> FieldValues:
    """Return the keys of the window, with the number of first layers that do not have it."""
    windows = [model.pattern(layer).window for layer in range(model.num_layers)]
    full = next((layer for layer, window in enumerate(windows) if window), model.num_layers)
    used = {"use_sliding_window": full < model.num_layers, "max_window_layers": full}
    return used | write_layer_types(model)


QWEN_WINDOW = windows_by_limit(32, 28, lambda layer, limit: layer >= limit, _write_qwen_window)

QWEN2 = replace(
    LLAMA,
    architecture="Qwen2ForCausalLM",
    keys=(*llama_keys("qwen2"), rope(), QWEN_WINDOW),
    always={**SWIGLU, "add_bias_linear": False, "add_qkv_bias": True},
)
QWEN3 = replace(
    LLAMA,
    architecture="Qwen3ForCausalLM",
    keys=(*llama_keys("qwen3"), rope(), QWEN_WINDOW),
    fixed={**LLAMA.fixed, "attention_bias": (False,)},
    always={**SWIGLU, **NO_BIAS, "qk_layernorm": True},
)

# ---- GPT-NeoX ----


NEOX = ModelFamily(
    architecture="GPTNeoXForCausalLM",
    keys=(
        *sizes("gpt_neox"),
        ConfigKey("norm_epsilon", "layer_norm_eps", 1e-5),
        ConfigKey("hidden_dropout", "hidden_dropout", 0.0),
        ConfigKey("attention_dropout", "attention_dropout", 0.0),
        activation("hidden_act", "gelu", GELUS),
        rope(fraction=0.25, names=("rotary_emb_base", "rotary_pct")),
        ConfigKey("parallel_attention", "use_parallel_residual", True),
        KeyGroup(("classifier_dropout",)),  # of another head
        KeyGroup(can=DIVIDES_HIDDEN),
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
NORMS_OF_ALL_HEADS: WeightRows = {
    "layers.{i}.self_attention.q_layernorm": ("o", {"model.layers.{i}.self_attn.q_norm": "o"}),
    "layers.{i}.self_attention.k_layernorm": ("o", {"model.layers.{i}.self_attn.k_norm": "o"}),
}

OLMO2 = replace(
    LLAMA,
    architecture="Olmo2ForCausalLM",
    keys=(*llama_keys("olmo2"), rope(), KeyGroup(can=DIVIDES_HIDDEN)),
    fixed={**LLAMA.fixed, "attention_bias": (False,)},
    always={**SWIGLU, **NO_BIAS, "layernorm_placement": "post", "qk_layernorm": True, "qk_layernorm_scope": "all"},
    weights={
        **{ours: row for ours, row in LLAMA.weights.items() if "put_layernorm" not in ours and "pre_mlp" not in ours},
        **_POST_NORMS,
        **NORMS_OF_ALL_HEADS,
    },
)
OLMO3 = replace(
    OLMO2,
    architecture="Olmo3ForCausalLM",
    keys=(*OLMO2.keys[:-2], rope_of_kinds(5e5, 5e5), layer_types(4), OLMO2.keys[-1]),
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
    KeyGroup(can=DIVIDES_HIDDEN),
)
GEMMA2 = replace(
    LLAMA,
    architecture="Gemma2ForCausalLM",
    keys=(*llama_keys("gemma2"), *_GEMMA_KEYS, softcaps(50.0, 30.0), rope(), layer_types(2)),
    fixed={"attention_bias": (False,), "use_bidirectional_attention": (None, False)},
    always={**NO_BIAS, "normalization": "RMSNorm", "layernorm_placement": "sandwich", "apply_layernorm_1p": True},
    weights={
        **LLAMA.weights,
        **_POST_NORMS,
        "layers.{i}.pre_mlp_layernorm": ("h", {"model.layers.{i}.pre_feedforward_layernorm": "h"}),
    },
    tied_by_default=True,
)


def _read_gemma3_layers(config: JsonObject) -> FieldValues:
    period = read_number(ConfigKey("", "sliding_window_pattern", 6), config)
    return layer_types(max(1, period)).read(config)


GEMMA3 = replace(
    GEMMA2,
    architecture="Gemma3ForCausalLM",
    keys=(
        *llama_keys("gemma3_text"),
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
    always={**GEMMA2.always, "qk_layernorm": True},
)

# ---- Other relatives of Llama ----


PHI3 = replace(
    LLAMA,
    architecture="Phi3ForCausalLM",
    keys=(
        *llama_keys("phi3"),
        *equal_dropout("resid_pdrop", "embd_pdrop", 0.0),
        rope(fraction=1.0, scaled=False),
        ConfigKey("window_size", "sliding_window", None),
        KeyGroup(("attention_bias",), can=DIVIDES_HIDDEN),  # published, but not used by transformers
    ),
    always={**SWIGLU, **NO_BIAS},
    weights={
        **LLAMA.weights,
        "layers.{i}.self_attention.linear_qkv": (
            "g x d h",
            {"model.layers.{i}.self_attn.qkv_proj": "g x[:-2] d + g x[-2:-1] d + g x[-1:] d, h"},
        ),
        "layers.{i}.mlp.linear_fc1": ("p f h", {"model.layers.{i}.mlp.gate_up_proj": "p f, h"}),
    },
)


SMOLLM3 = replace(
    LLAMA,
    architecture="SmolLM3ForCausalLM",
    keys=(
        *llama_keys("smollm3"),
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
            {**HAS_LAYER_TYPES, **DIVIDES_HIDDEN},
            ("window_size", "no_rope_freq"),
        ),
        LLAMA.keys[-1],
    ),
    always={**SWIGLU},
    tied_by_default=True,
)

GRANITE_KEYS: tuple[ConfigKey | KeyGroup, ...] = (
    rope(),
    softmax_scale("attention_multiplier", 1.0, 1),
    *(ConfigKey(name, name, 1.0) for name in ("embedding_multiplier", "residual_multiplier", "logits_scaling")),
    KeyGroup(can=DIVIDES_HIDDEN),
)
GRANITE = replace(
    LLAMA, architecture="GraniteForCausalLM", keys=(*llama_keys("granite"), *GRANITE_KEYS, LLAMA.keys[-1])
)

STARCODER2 = replace(
    LLAMA,
    architecture="Starcoder2ForCausalLM",
    keys=(
        *llama_keys("starcoder2"),
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
            {"add_qkv_bias": lambda m: m.qkv_bias == m.add_bias_linear, **DIVIDES_HIDDEN},
            ("add_bias_linear",),
        ),
    ),
    fixed={},
    always={},
    weights={
        **LLAMA.weights,
        "layers.{i}.mlp.linear_fc1": ("f h", {"model.layers.{i}.mlp.c_fc": "f, h"}),
        "layers.{i}.mlp.linear_fc2": ("h f", {"model.layers.{i}.mlp.c_proj": "h, f"}),
    },
    tied_by_default=True,
)
