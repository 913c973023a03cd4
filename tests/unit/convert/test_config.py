"""``config.json`` of Hugging Face from and to our options, and families that plugins register."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from megatron.arguments.presets import PRESETS
from megatron.config import plugins
from megatron.config.errors import UserError
from megatron.config.model import ModelConfig
from megatron.config.option import Role, option
from megatron.config.settings import SETTINGS
from megatron.convert.huggingface import families
from megatron.convert.huggingface.config import (
    CONFIG_FILE,
    build_config_json,
    check_model_config,
    model_config_values,
    model_folder,
    model_type_for,
    read_config,
    read_model_config,
)
from megatron.convert.huggingface.convert import convert_from_huggingface, convert_to_huggingface
from megatron.convert.huggingface.families import MODEL_FAMILIES, model_families
from megatron.convert.huggingface.keys import ConfigKey, ModelFamily, resolved
from megatron.convert.megatron_lm.model import unwritable_options
from megatron.convert.saved_model import SavedModel
from megatron.convert.sources import open_checkpoint
from megatron.layers.parameters import num_parameters
from tests.unit.convert.folders import ignore, llama, opened, random_weights, write_folder

FIELDS = {field.name for field in fields(ModelConfig)}

PUBLISHED: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parents[2] / "golden" / "hf_configs.json").read_text()
)
"""The config.json of models of the hub."""

GPT2, LLAMA2, MISTRAL, QWEN2, QWEN3_MOE = (
    PUBLISHED[name] for name in ("gpt2", "llama2", "mistral", "qwen2", "qwen3_moe")
)
PYTHIA, OLMO2, GEMMA2, GEMMA3, PHI3 = (PUBLISHED[name] for name in ("pythia", "olmo2", "gemma2", "gemma3", "phi3"))
SMOLLM3, GRANITE, STARCODER2, GPT_OSS = (PUBLISHED[name] for name in ("smollm3", "granite", "starcoder2", "gpt_oss"))
LLAMA3 = LLAMA2 | {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "intermediate_size": 14336,
    "max_position_embeddings": 8192,
    "num_key_value_heads": 8,
    "rope_theta": 500000.0,
    "vocab_size": 128256,
}
SIZES_70B = {"hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64, "num_hidden_layers": 80}
LENGTHS_31 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
LLAMA31 = LLAMA3 | {
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "rope_scaling": {**LENGTHS_31, "rope_type": "llama3"},
}
MINISTRAL = MISTRAL | {
    "architectures": ["MinistralForCausalLM"],
    "model_type": "ministral",
    "layer_types": ["sliding_attention", "full_attention"] * 16,
}
QWEN3 = QWEN2 | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 128, "attention_bias": False}
MIXTRAL = MISTRAL | {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "num_experts_per_tok": 2,
    "num_local_experts": 8,
    "output_router_logits": False,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.02,
    "sliding_window": None,
}


def preset(name: str) -> ModelConfig:
    shape = {field: value for field, value in PRESETS[name].items() if field in FIELDS}
    return replace(ModelConfig(**shape), vocab_size=shape.get("vocab_size", 300))


def model(config: dict[str, Any]) -> ModelConfig:
    return ModelConfig(**model_config_values(config, "config.json"))


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("gpt2-124m", GPT2),
        ("llama2-7b", LLAMA2),
        ("llama3-8b", LLAMA3),
        ("llama3-70b", LLAMA3 | SIZES_70B),
    ],
)
def test_published_config_is_the_preset(name: str, config: dict[str, Any]) -> None:
    dropout = {"hidden_dropout": 0.1, "attention_dropout": 0.1} if config is GPT2 else {}  # presets have none
    assert model(config) == replace(preset(name), **dropout)


def test_published_gpt_oss_has_its_published_size() -> None:
    ours = model(GPT_OSS)
    assert ours.attention_pattern == "local:128,global"
    assert num_parameters(ours) == 20_914_757_184
    words = ours.vocab * ours.hidden_size
    assert round((num_parameters(ours, active=True) - words) / 1e9, 2) == 3.61, "without the embedding"
    written = build_config_json(ours)
    assert written["rope_scaling"]["truncate"] is False
    theirs = AutoConfig.for_model(**written)
    assert theirs.to_dict()["rope_parameters"] == {"rope_theta": 150000.0, **GPT_OSS["rope_scaling"]}
    assert model(theirs.to_dict()) == model(written) == ours
    defaults = {"rope_scaling", "rope_theta", "sliding_window", "num_attention_heads", "head_dim", "hidden_size"}
    assert model({name: value for name, value in GPT_OSS.items() if name not in defaults}) == ours


@pytest.mark.parametrize(
    ("config", "millions"),
    [
        (GPT2, 124.4),
        (LLAMA31, 8030.3),
        (PYTHIA, 1011.8),
        (OLMO2, 7298.6),
        (GEMMA2, 2614.3),
        (GEMMA3, 999.9),
        (PHI3, 3821.1),
        (SMOLLM3, 3075.1),
        (GRANITE, 2533.5),
        (STARCODER2, 3030.4),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else "",
)
def test_published_models_have_the_published_sizes(config: dict[str, Any], millions: float) -> None:
    ours = model(config)
    assert num_parameters(ours) / 1e6 == pytest.approx(millions, abs=0.1)
    written = build_config_json(ours, "bfloat16", kind=config["model_type"])
    assert written["architectures"] == config["architectures"]
    assert model(written) == ours
    theirs = AutoConfig.for_model(**written)
    assert str(theirs.dtype) == "torch.bfloat16"
    given = {key: value for key, value in theirs.to_dict().items() if key != "head_dim" or "head_dim" in written}
    assert model(given) == ours, "as transformers would write it"


def test_scores_are_scaled_for_the_default_head_size() -> None:
    config = {"model_type": "gemma2", "hidden_size": 2304, "num_attention_heads": 8, "query_pre_attn_scalar": 288}
    assert model(config).head_dim == 256
    assert model(config).softmax_scale == 288**-0.5
    assert model(config | {"query_pre_attn_scalar": 256}).softmax_scale is None


@pytest.mark.parametrize("name", PRESETS)
def test_preset_there_and_back(name: str) -> None:
    """In all but how weights are drawn and routers are balanced, which a config.json does not have."""
    there, back = preset(name), model(build_config_json(preset(name)))
    for field, setting in SETTINGS.items():
        if setting.group == "model" and setting.option.role in (Role.SHAPE, Role.FUNCTION):
            assert resolved(back, field) == resolved(there, field), field


def test_published_config_of_other_families() -> None:
    scaled = model(LLAMA31)
    assert scaled == replace(preset("llama3-8b"), max_position_embeddings=131072, use_rope_scaling=True)
    assert model(MISTRAL).window_size == 4096
    assert model(MISTRAL | {"sliding_window": None}).window_size is None
    qwen2 = model(QWEN2)
    assert (qwen2.add_bias_linear, qwen2.add_qkv_bias, qwen2.window_size) == (False, True, None)
    assert not qwen2.untie_embeddings_and_output_weights
    qwen3 = model(QWEN3)
    assert (qwen3.qk_layernorm, qwen3.qkv_bias, qwen3.kv_channels, qwen3.head_dim) == (True, False, 128, 128)


@pytest.mark.parametrize(
    ("config", "billions", "active_billions"),
    [
        (MIXTRAL, 46.7, 12.9),
        (QWEN3_MOE, 30.5, 3.3),
        (PUBLISHED["qwen2_moe"], 14.3, 2.7),
        (PUBLISHED["olmoe"], 6.92, 1.28),
        (PUBLISHED["granitemoe"], 1.33, 0.43),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else "",
)
def test_published_mixtures_have_the_published_sizes(
    config: dict[str, Any], billions: float, active_billions: float
) -> None:
    ours = model(config)
    assert num_parameters(ours) / 1e9 == pytest.approx(billions, abs=0.06)
    assert num_parameters(ours, active=True) / 1e9 == pytest.approx(active_billions, abs=0.06)
    assert ours.moe_router_pre_softmax == (config["model_type"] in ("olmoe", "qwen2_moe"))
    written = build_config_json(ours)
    assert written["model_type"] == config["model_type"]
    assert model(written) == ours
    theirs = AutoConfig.for_model(**written).to_dict()
    assert model(theirs) == ours, "as transformers would write it"
    width = "moe_intermediate_size" if "moe_intermediate_size" in config else "intermediate_size"
    assert build_config_json(replace(ours, moe_ffn_hidden_size=99))[width] == 99


def test_experts_of_qwen_are_read_in_both_spellings() -> None:
    renamed = {("num_local_experts" if key == "num_experts" else key): value for key, value in QWEN3_MOE.items()}
    assert model(renamed) == model(QWEN3_MOE)
    assert model(QWEN3_MOE | {"norm_topk_prob": False}).moe_router_pre_softmax
    with pytest.raises(UserError, match="num_experts 128 and num_local_experts 64 contradict each other"):
        model(QWEN3_MOE | {"num_local_experts": 64})


DEQUANTISED = {
    name: {key: value for key, value in PUBLISHED[name].items() if key != "quantization_config"}
    for name in ("glm4_moe", "deepseek_v2", "deepseek_v3", "kimi_k2")
}


@pytest.mark.parametrize(
    ("name", "billions", "further"),
    [("glm4_moe", 106.85, 2.4), ("deepseek_v2", 15.71, 0), ("deepseek_v3", 671.03, 11.6), ("kimi_k2", 1026.41, 0)],
)
def test_published_relatives_of_deepseek_have_the_published_sizes(name: str, billions: float, further: float) -> None:
    config = DEQUANTISED[name]
    ours = model(config)
    check_model_config(name, ours)
    main = num_parameters(replace(ours, mtp_num_layers=None)) / 1e9
    assert (round(main, 2), round(num_parameters(ours) / 1e9 - main, 1)) == (billions, further)
    written = build_config_json(ours, kind=name)
    assert (written["model_type"], written["architectures"]) == (name, config["architectures"])
    assert model(written) == ours
    known = {"model_type": MODEL_FAMILIES[name].known_as or name}
    assert model(AutoConfig.for_model(**written | known).to_dict() | {"model_type": name}) == ours
    assert model(PUBLISHED[name]) == ours, "also quantised"


_WIDE = {"num_attention_heads": 12, "num_key_value_heads": 4, "vocab_size": 100352, "tie_word_embeddings": True}
HYBRIDS: dict[str, tuple[dict[str, Any], float]] = {
    "Nemotron-Nano-9B-v2": (
        {"model_type": "nemotron_h", "hidden_size": 4480, "intermediate_size": 15680, "num_attention_heads": 40}
        | {"hybrid_override_pattern": "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-"}
        | {"mamba_head_dim": 80, "time_step_limit": [0.0, math.inf]},
        8.89,
    ),
    "Granite-4.0-H-350M": (
        {"model_type": "granitemoehybrid", "hidden_size": 768, "num_hidden_layers": 32, **_WIDE}
        | {"mamba_n_heads": 48, "mamba_d_head": 32, "mamba_d_state": 128, "shared_intermediate_size": 2048}
        | {"num_local_experts": 0, "intermediate_size": 2048, "position_embedding_type": "nope"}
        | {"layer_types": ["attention" if i in (10, 13, 17, 27) else "mamba" for i in range(32)]},
        0.34,
    ),
    "Bamba-9B": (
        {"model_type": "bamba", "attn_layer_indices": [9, 18, 27], "mamba_d_state": 128, "vocab_size": 128256},
        9.78,
    ),
    "Mamba-2-2.7B": (
        {"model_type": "mamba2", "hidden_size": 2560, "vocab_size": 50288, "num_heads": 80, "n_groups": 1}
        | {"tie_word_embeddings": True},
        2.70,
    ),
    "Qwen3-Next-80B-A3B": ({"model_type": "qwen3_next", "full_attention_interval": 4, "rope_theta": 1e7}, 79.67),
}
"""Sizes in the config.json of models of the hub, and billions of their parameters."""


@pytest.mark.parametrize("name", HYBRIDS)
def test_published_hybrid_models_have_the_published_sizes(name: str) -> None:
    config, billions = HYBRIDS[name]
    ours = model(config)
    check_model_config(name, ours)
    assert num_parameters(ours) / 1e9 == pytest.approx(billions, abs=0.006)
    written = build_config_json(ours, kind=config["model_type"])
    assert model(written) == ours
    assert model(AutoConfig.for_model(**written).to_dict()) == ours, "as transformers would write it"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "nemotron_h", "hybrid_override_pattern": "M-X"}, "has other symbols than M * - E"),
        ({"model_type": "nemotron_h", "layers_block_type": ["mamba", "conv"]}, "layers_block_type with 'conv'"),
        (
            {"model_type": "nemotron_h", "layers_block_type": ["mamba"], "hybrid_override_pattern": "M-"},
            "contradict each other",
        ),
        ({"model_type": "nemotron_h", "tie_word_embeddings": True}, "tie_word_embeddings true is not supported"),
        ({"model_type": "mamba2", "time_step_limit": [0.1]}, "time_step_limit [0.1] is not two numbers"),
        ({"model_type": "mamba2", "num_heads": 99}, "num_heads 99 times head_dim 64 is not expand 2 times the hidden"),
        ({"model_type": "bamba", "attn_layer_indices": 3}, "attn_layer_indices are 3, not a list of layers"),
        ({"model_type": "granitemoehybrid", "layer_types": ["mamba"]}, "are not 32 kinds of layers"),
        ({"model_type": "granitemoehybrid", "position_embedding_type": "alibi"}, "only rope and nope"),
        ({"model_type": "qwen3_next", "full_attention_interval": 0}, "full_attention_interval is 0, not above 0"),
        ({"model_type": "qwen3_5_text", "attn_output_gate": False}, "attn_output_gate false is not supported"),
        ({"model_type": "qwen3_5"}, "its text model alone is a qwen3_5_text"),
    ],
)
def test_hybrid_models_that_are_not_supported_are_refused_by_name(config: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        model(config)
    assert message in str(caught.value)


def test_symbols_of_a_hybrid_model_are_those_of_its_spelling() -> None:
    """A pattern, or mixers that repeat; a pattern of a GPT is a GPT."""
    ours = model(HYBRIDS["Qwen3-Next-80B-A3B"][0])
    mixers = {"hybrid_layer_pattern": None, "token_mixers": ("gated-delta-net",) * 3 + ("attention",)}
    assert build_config_json(replace(ours, **mixers)) == build_config_json(ours)
    plain = preset("tiny-llama")
    assert build_config_json(replace(plain, hybrid_layer_pattern="*-" * 4)) == build_config_json(plain)
    with pytest.raises(UserError, match=r"E852 .*bamba has no hybrid_layer_pattern M-M"):
        build_config_json(replace(model(HYBRIDS["Bamba-9B"][0]), hybrid_layer_pattern="M-M"), kind="bamba")
    with pytest.raises(UserError, match=r"E852 .* has no .*mamba_norm_before_gate True"):
        build_config_json(replace(model(HYBRIDS["Bamba-9B"][0]), mamba_norm_before_gate=True), kind="bamba")


def test_groups_of_deepseek_are_scored_by_their_best_experts() -> None:
    """By one of V2, by two of V3, and in Megatron-LM by K / groups per token."""
    limited = DEQUANTISED["deepseek_v2"] | {"topk_method": "group_limited_greedy", "n_group": 8, "topk_group": 3}
    for config, given, best, kind in (
        (limited, 1, 1, "deepseek_v2"),
        (limited | {"num_experts_per_tok": 3}, None, 1, "deepseek_v2"),
        (V3, None, 2, "deepseek_v3"),
        (V3 | {"topk_group": 2}, 2, 2, "deepseek_v3"),
    ):
        ours = model(config)
        assert (ours.moe_router_group_score_topk, ours.group_score_topk) == (given, best)
        written = build_config_json(ours)
        assert [written[key] for key in ("model_type", "n_group", "topk_group")] == [kind, 8, config["topk_group"]]
        assert model(written) == ours
        assert ("moe_router_group_score_topk" in unwritable_options(ours)) == (given is not None)
        with pytest.raises(UserError, match="has no moe_router_num_groups 8"):
            build_config_json(replace(ours, moe_router_group_score_topk=3), kind=kind)


def test_latent_attention_of_deepseek() -> None:
    ours = model(DEQUANTISED["deepseek_v3"])
    assert (ours.multi_latent_attention, ours.rope_type, ours.qk_layernorm) == (True, "yarn", True)
    assert (ours.rotary_scaling_factor, ours.mscale, ours.mscale_all_dim) == (40.0, 1.0, 1.0)
    assert (ours.moe_layer_freq, ours.mtp_num_layers) == ("[0]*3+[1]*58", 1)
    assert (ours.moe_router_num_groups, ours.moe_router_group_topk, ours.moe_router_topk_scaling_factor) == (8, 4, 2.5)
    plain = model(DEQUANTISED["deepseek_v3"] | {"rope_scaling": None})
    assert (plain.rope_type, build_config_json(plain)["rope_scaling"]) == ("rope", None)


ERNIE = {"model_type": "ernie4_5_moe", "num_hidden_layers": 9}


@pytest.mark.parametrize(
    ("keys", "layers"),
    [
        ({}, "[0]*1+[1]*8"),
        ({"moe_layer_start_index": 3, "moe_layer_end_index": 5}, "[0]*3+[1]*3+[0]*3"),
        ({"moe_layer_interval": 3, "moe_layer_end_index": 6}, "[0]*2+[1]*1+[0]*2+[1]*1+[0]*3"),
        ({"moe_layer_start_index": 8}, "[0]*8+[1]*1"),
        ({"moe_layer_start_index": 0}, None),
    ],
)
def test_layers_with_experts_of_ernie(keys: dict[str, int], layers: str | None) -> None:
    ours = model(ERNIE | keys)
    assert ours.moe_layer_freq == layers
    assert model(build_config_json(ours)) == ours
    assert model(AutoConfig.for_model(**ERNIE | keys).to_dict()) == ours
    with pytest.raises(UserError, match=r"E852 .* has no moe_layer_freq"):
        build_config_json(replace(ours, moe_layer_freq="[1]*2+[0]*1+[1]*6"), kind="ernie4_5_moe")


@pytest.mark.parametrize(
    ("keys", "layers"),
    [
        ({}, None),
        ({"mlp_only_layers": [0, 1, 2]}, "[0]*3+[1]*5"),
        ({"decoder_sparse_step": 2}, "[0]*1+[1]*1+[0]*1+[1]*1+[0]*1+[1]*1+[0]*1+[1]*1"),
        ({"decoder_sparse_step": 4, "mlp_only_layers": [3]}, "[0]*7+[1]*1"),
        ({"mlp_only_layers": [1, 3, 5, 7]}, "2"),
    ],
)
def test_layers_with_experts_of_qwen(keys: dict[str, Any], layers: str | None) -> None:
    config = QWEN3_MOE | {"num_hidden_layers": 8} | keys
    ours = model(config)
    assert ours.moe_layer_freq == layers
    blocks = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config | TINY_MIXTURE)).model.layers
    assert [ours.has_experts(i) for i in range(8)] == [hasattr(block.mlp, "experts") for block in blocks]
    assert model(build_config_json(ours)) == ours
    with pytest.raises(UserError, match="E852 Hugging Face's mixtral has no moe_layer_freq 2"):
        build_config_json(replace(model(MIXTRAL), moe_layer_freq="2"), kind="mixtral")


TINY_MIXTURE = {"hidden_size": 8, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 8, "vocab_size": 9}
TINY_MIXTURE |= {"num_experts": 2, "num_experts_per_tok": 1, "intermediate_size": 8, "moe_intermediate_size": 8}


def test_rope_is_read_in_both_spellings() -> None:
    old, scaling = LLAMA31, dict(LLAMA31["rope_scaling"])
    new = {key: value for key, value in old.items() if key not in ("rope_scaling", "rope_theta")}
    assert model(new | {"rope_parameters": scaling | {"rope_theta": 500000.0}}) == model(old)
    older = {("type" if key == "rope_type" else key): value for key, value in scaling.items()}
    assert model(old | {"rope_scaling": older}) == model(old)


def test_window_of_qwen() -> None:
    windowed = QWEN2 | {"use_sliding_window": True, "sliding_window": 64}
    assert model(windowed | {"max_window_layers": 24}).window_size is None, "all layers come before the windowed ones"
    assert model(windowed | {"max_window_layers": 0}).window_size == 64
    assert model(windowed | {"layer_types": ["sliding_attention"] * 24}).window_size == 64
    assert model(windowed | {"layer_types": None, "max_window_layers": 0}).window_size == 64
    half = model(windowed | {"max_window_layers": 12})
    assert (half.window_size, half.attention_pattern) == (None, "global*12,local:64*12")
    assert model(QWEN2 | {"layer_types": ["full_attention"] * 24}).attention_pattern is None


LAYER_TYPES = (["sliding_attention"] * 5 + ["full_attention"]) * 4  # of 24 layers


def test_layers_of_two_kinds_are_patterns() -> None:
    for config, window in (
        (QWEN2 | {"use_sliding_window": True, "sliding_window": 64}, 64),
        (QWEN3 | {"use_sliding_window": True, "sliding_window": 4096}, 4096),
        (MINISTRAL | {"num_hidden_layers": 24, "sliding_window": 9}, 9),
    ):
        ours = model(config | {"layer_types": LAYER_TYPES})
        assert (ours.window_size, ours.attention_pattern) == (None, f"local:{window}*5,global")
        written = build_config_json(ours)
        assert written["model_type"] == config["model_type"]
        assert (written["layer_types"], written["sliding_window"]) == (LAYER_TYPES, window)
        theirs = AutoConfig.for_model(**written)
        assert (theirs.layer_types, theirs.sliding_window) == (LAYER_TYPES, window)
        by_freq = replace(ours, attention_pattern=None, window_size=window, window_attn_skip_freq="6")
        assert build_config_json(by_freq) == written
        assert model(theirs.to_dict()) == model(written) == ours


def test_a_model_type_may_be_chosen() -> None:
    ours = model(PHI3)
    assert model_type_for(ours) == "mistral"
    chosen = build_config_json(ours, kind="phi3")
    assert (chosen["model_type"], chosen["sliding_window"], model(chosen)) == ("phi3", 2047, ours)
    with pytest.raises(UserError, match="Hugging Face's llama has no window_size 2047"):
        build_config_json(ours, kind="llama")
    with pytest.raises(UserError, match="there is no model type phi4, only gpt2, llama"):
        build_config_json(ours, kind="phi4")


def test_equal_patterns_are_a_window() -> None:
    base = preset("tiny-llama")
    for text, family, window in (("local:7*3,local:7", "mistral", 7), ("global", "llama", None)):
        patterns = replace(base, attention_pattern=text)
        assert model_type_for(patterns) == family
        assert build_config_json(patterns) == build_config_json(replace(base, window_size=window))


@pytest.mark.parametrize(
    "pattern", ["local:5,local:6", "chunked:8", "global,dilated:3:2", "prefix:9", "local:5+first:1", "local:5,prefix:3"]
)
def test_other_patterns_are_refused(pattern: str) -> None:
    with pytest.raises(UserError, match="E852") as caught:
        build_config_json(replace(preset("tiny-llama"), qk_layernorm=True, attention_pattern=pattern))
    assert f"has no attention_pattern {pattern}" in str(caught.value)


V3, FP8 = DEQUANTISED["deepseek_v3"], PUBLISHED["deepseek_v3"]["quantization_config"]
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}
MSCALES = {"mscale": 0.7, "mscale_all_dim": 1.0}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (GPT2 | {"scale_attn_weights": False}, "scale_attn_weights false is not supported, only true"),
        (GPT2 | {"embd_pdrop": 0.2}, "embd_pdrop 0.2"),
        (GPT2 | {"n_embd": "768"}, "n_embd is '768'"),
        (LLAMA3 | {"hidden_act": "gelu"}, 'hidden_act "gelu" is not supported, only "silu" or "swish"'),
        (LLAMA3 | {"attention_bias": True}, "attention_bias True with mlp_bias False"),
        (LLAMA3 | {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type 'dynamic'"),
        (LLAMA3 | {"rope_scaling": YARN | {"attention_factor": 1.5}}, "attention_factor 1.5"),
        (LLAMA3 | {"rope_scaling": YARN | MSCALES | {"attention_factor": 0.1 * math.log(4.0) + 1.0}}, "beside mscale"),
        (LLAMA3 | {"rope_scaling": YARN | {"factor": None}}, "factor is None, not a number of at least 1"),
        (LLAMA3 | {"rope_parameters": {"rope_type": "default"}, "rope_scaling": YARN}, "contradict"),
        (LLAMA3 | {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "lacks low_freq_factor, high_freq_factor"),
        (LLAMA3 | {"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        (LLAMA3 | {"rope_scaling": YARN | {"truncate": 0}}, "truncate is 0, not true or false"),
        (LLAMA3 | {"rope_scaling": {"rope_type": "default", "low": 1}}, "low"),
        (LLAMA3 | {"rope_scaling": [1]}, "not an object"),
        (GPT2 | {"activation_function": "silu"}, "activation_function 'silu'"),
        (LLAMA3 | {"attention_bias": "yes"}, "attention_bias is 'yes', not true or false"),
        (MISTRAL | {"sliding_window": "wide"}, "sliding_window is 'wide', not a whole number"),
        (LLAMA3 | {"residual_multiplier": 0.22}, "residual_multiplier 0.22 is an unknown key"),
        (LLAMA3 | {"model_type": "gemma"}, "model_type 'gemma' is not supported, only gpt2, llama, mistral"),
        (LLAMA3 | {"model_type": "dbrx"}, "is not supported: it needs clipped queries, keys and values"),
        (PYTHIA | {"rotary_pct": 1.5}, "partial_rotary_factor is 1.5, not a number above 0 and at most 1"),
        (GEMMA3 | {"rope_parameters": {"chunked_attention": {}}}, "rope_parameters with chunked_attention"),
        (GEMMA3 | {"rope_parameters": {"sliding_attention": {"rope_type": "yarn"}}}, "sliding_attention"),
        (GEMMA2 | {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar is 0, not above 0"),
        (GEMMA2 | {"use_bidirectional_attention": True}, "use_bidirectional_attention true is not supported"),
        (SMOLLM3 | {"no_rope_layers": [1, 2]}, "no_rope_layers [1, 2] are not 36 times 0 or 1"),
        (PHI3 | {"rope_scaling": {"type": "longrope"}}, "rope_type 'longrope' is not supported"),
        (PHI3 | {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "are not scaled"),
        ({"model_type": "olmo3", "rope_theta": 1e6}, "rope_theta 1000000.0 without rope_parameters"),
        (GRANITE | {"head_dim": "x"}, "head_dim"),
        (GEMMA2 | {"query_pre_attn_scalar": 10**400}, "larger than any number of 64 bits"),
        (OLMO2 | {"attention_bias": True}, "attention_bias true is not supported"),
        (LLAMA3 | {"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        (MIXTRAL | {"router_jitter_noise": 0.1}, "router_jitter_noise 0.1"),
        (QWEN3_MOE | {"decoder_sparse_step": 0}, "decoder_sparse_step is 0, not a whole number above 0"),
        (QWEN3_MOE | {"mlp_only_layers": 3}, "mlp_only_layers are 3, not a list of layers"),
        (PUBLISHED["olmoe"] | {"clip_qkv": 8.0}, "clip_qkv 8.0 is not supported, only null"),
        (V3 | {"rms_norm_eps": 1e-5}, "rms_norm_eps 1e-05 is not supported: in the norms of latents it is 1e-06"),
        (V3 | {"topk_method": "greedy"}, 'topk_method "greedy" is not supported, only "noaux_tc"'),
        (V3 | {"scoring_func": "softmax"}, 'scoring_func "softmax" is not supported'),
        (V3 | {"norm_topk_prob": False}, "norm_topk_prob False with num_experts_per_tok 8 is not supported"),
        (
            V3 | {"quantization_config": {"quant_method": "awq"}},
            "weights quantised with awq are not supported, only fp8",
        ),
        (
            V3 | {"quantization_config": FP8 | {"weight_block_size": None}},
            "weights quantised with fp8 are not supported",
        ),
        (V3 | {"quantization_config": FP8 | {"fmt": "e5m2"}}, "weights quantised with fp8 are not"),
        (V3 | {"n_shared_experts": 0}, "n_shared_experts is 0, not at least 1"),
        (V3 | {"rope_interleave": False}, "rope_interleave false is not supported"),
        (V3 | {"num_mtp_layers": 2}, "num_nextn_predict_layers 1 and num_mtp_layers 2 contradict each other"),
        (V3 | {"rope_scaling": YARN | {"mscale_all_dim": 1.0}}, "mscale_all_dim 1.0 without mscale is not supported"),
        (V3 | {"n_routed_experts": None}, "n_routed_experts is None, not a whole number"),
        (
            PUBLISHED["deepseek_v2"] | {"topk_method": "noaux_tc"},
            "topk_method 'noaux_tc' is not supported, only greedy",
        ),
        (ERNIE | {"use_bias": True}, "use_bias true is not supported"),
        (ERNIE | {"moe_layer_interval": 0}, "moe_layer_interval is 0, not above 0"),
        ({"model_type": "dots1"}, "n_routed_experts is not given"),
        (QWEN3 | {"layer_types": [{}, 1]}, "layer_types [{}, 1] are not 24 times full_attention or sliding_attention"),
        (QWEN3 | {"layer_types": "full_attention"}, "layer_types full_attention are not"),
        (QWEN3 | {"layer_types": ["full_attention"] * 27}, "are not 24 times"),
        (QWEN3 | {"layer_types": ["sliding_attention"] * 24}, "need a sliding_window that is in use"),
        (QWEN2 | {"use_sliding_window": True, "sliding_window": 0, "max_window_layers": 9}, "sliding_window is 0"),
        (LLAMA3 | {"rope_scaling": {"rope_type": []}}, "rope_type [] is not supported"),
    ],
)
def test_unsupported_features_are_refused_by_name(config: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        model(config)
    assert message in str(caught.value)
    assert str(caught.value).startswith("E851 config.json: ")


def test_all_errors_are_reported_at_once() -> None:
    with pytest.raises(UserError) as caught:
        model(LLAMA3 | {"quantization_config": {}, "logit_scale": 2.0, "rope_scaling": {"rope_type": "su"}})
    assert len(caught.value.problems) == 3


SIGMOID = {"num_experts": 8, "moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
SIGMOID |= {"moe_shared_expert_intermediate_size": 64, "moe_ffn_hidden_size": 32, "moe_router_topk": 6}
SIGMOID |= {"moe_router_num_groups": 2, "moe_router_group_topk": 1}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rotary_interleaved": True}, "rotary_interleaved True"),
        ({"rotary_percent": 0.5, "qk_layernorm": True}, "rotary_percent 0.5"),
        ({"activation": "relu2"}, "activation relu2"),
        ({"normalization": "LayerNorm"}, "normalization LayerNorm"),
        ({"qk_layernorm": True, "add_bias_linear": True}, "llama has no qk_layernorm True"),
        ({"position_embedding_type": "none", "qk_layernorm": True}, "position_embedding_type none"),
        ({"window_size": 64, "add_qkv_bias": True, "add_bias_linear": True, "kv_channels": 20}, "window_size 64"),
        ({"vocab_size": None}, "vocab_size is not set"),
        ({"num_experts": 4, "moe_router_pre_softmax": True}, "mixtral has no moe_router_pre_softmax True"),
        ({"num_experts": 4, "qk_layernorm": True, "moe_shared_expert_intermediate_size": 64}, "moe_shared_expert"),
        (SIGMOID, "moe_router_num_groups 2"),
        (SIGMOID | {"moe_router_num_groups": None, "moe_shared_expert_intermediate_size": 65}, "intermediate_size 65"),
        (SIGMOID | {"moe_router_num_groups": None, "mtp_num_layers": 1, "window_size": 8}, "window_size 8"),
        (SIGMOID | {"moe_router_num_groups": None, "moe_latent_size": 8}, "moe_latent_size 8"),
        ({"multi_latent_attention": True}, "llama has no multi_latent_attention True"),
    ],
)
def test_model_that_no_family_has_is_refused_by_option(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match="E852") as caught:
        build_config_json(replace(preset("tiny-llama"), **changes))
    assert message in str(caught.value)


MINIMAL = {
    "dots1": {"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2, "norm_topk_prob": True},
    "deepseek_v2": {"num_experts_per_tok": 6, "topk_method": "group_limited_greedy"},
}
"""Keys without which a model type cannot be built."""


@dataclass(frozen=True)
class NewModel(ModelConfig):
    """A model with an option that no table knows."""

    sparse_attention: bool = option(False, role="function", needs="position_embedding_type=rope")


@pytest.mark.parametrize("kind", MODEL_FAMILIES)
def test_options_that_a_family_does_not_name_are_refused(kind: str) -> None:
    """If they have an effect; and what changes the model, it reads only if it names it."""
    read = model_config_values(MINIMAL.get(kind, {}) | {"model_type": kind}, "config.json")
    changed = {name for name, value in read.items() if value != getattr(ModelConfig, name)}
    assert changed - {"hidden_dropout", "attention_dropout", "init_method_std"} <= MODEL_FAMILIES[kind].options
    unused = NewModel(**read | {"position_embedding_type": "none"}, sparse_attention=True)
    assert "sparse_attention" not in {*MODEL_FAMILIES[kind].lacks(unused), *unwritable_options(unused)}
    used = replace(unused, position_embedding_type="rope")
    assert "sparse_attention" in unwritable_options(used)
    with pytest.raises(UserError, match=rf"E852 Hugging Face's {kind} has no .*sparse_attention True"):
        model_type_for(used, kind)


def test_family_is_the_first_that_can() -> None:
    base = preset("tiny-llama")
    assert model_type_for(base) == "llama"
    assert model_type_for(replace(base, add_bias_linear=True)) == "llama"
    assert model_type_for(replace(base, hidden_size=36, kv_channels=16)) == "mistral"
    assert model_type_for(replace(base, window_size=8)) == "mistral"
    assert model_type_for(replace(base, add_qkv_bias=True)) == "qwen2"
    assert model_type_for(replace(base, qk_layernorm=True, window_size=8)) == "qwen3"
    mixed = replace(base, attention_pattern="local:8,global")
    assert model_type_for(mixed) == "ministral"
    assert model_type_for(replace(mixed, add_qkv_bias=True)) == "qwen2"
    assert model_type_for(replace(mixed, qk_layernorm=True)) == "qwen3"
    assert model_type_for(preset("tiny-gpt2")) == "gpt2"
    assert model_type_for(replace(base, num_experts=4)) == "mixtral"
    assert model_type_for(replace(base, num_experts=4, qk_layernorm=True)) == "qwen3_moe"


@pytest.mark.parametrize(
    "config",
    [GPT2, LLAMA2, LLAMA31, MISTRAL, QWEN2, QWEN3, MIXTRAL, QWEN3_MOE, MINISTRAL]
    + [MINIMAL.get(kind, {}) | {"model_type": kind} for kind in MODEL_FAMILIES],
    ids=lambda c: c["model_type"],
)
def test_defaults_match_transformers(config: dict[str, Any]) -> None:
    kind = config["model_type"]
    known = {"model_type": MODEL_FAMILIES[kind].known_as or kind}
    for kept in (MINIMAL.get(kind, {}) | {"model_type": kind}, config):
        theirs = AutoConfig.for_model(**kept | known).to_dict()
        assert model(theirs | {"model_type": kind}) == model(kept)


NOT_CARRIED = {
    "of the export, not of the model": "_name_or_path architectures dtype transformers_version",
    "of a program, its outputs or its start": """return_dict output_hidden_states output_attentions use_cache is_decoder
        chunk_size_feed_forward pretraining_tp output_router_logits problem_type""",
    "ids, which come from the tokenizer": "bos_token_id eos_token_id pad_token_id",
    "means nothing beside layer_types, or while no layer has a window": """max_window_layers use_sliding_window
        sliding_window""",
    "means nothing beside rope_parameters": "partial_rotary_factor",
    "follows from other keys": "num_key_value_heads head_dim qk_head_dim moe_layer_end_index",
    "has another spelling: mlp_only_layers": "decoder_sparse_step",
    "is used with output_router_logits alone": "router_aux_loss_coef",
    "of kernels and of text": """num_logits_to_keep use_mamba_kernels mamba_ssm_cache_dtype moe_shared_expert_overlap
        residual_in_fp32""",
    "of initial values and of the loss": "time_step_max time_step_floor rescale_prenorm_residual z_loss_coefficient",
    "is not used": "time_step_rank hidden_dropout",
    "is of layers that transformers does not have": "num_nextn_predict_layers",
}
"""Keys of families with experts or recurrent layers that are read, and may have another value in an export."""
_NOT_OF = {"mamba2": {"time_step_min"}, "nemotron_h": {"expand"}}
"""The same of some families: the initial time steps, and what no width follows from."""
_GROUPS = {"n_group": 4, "topk_group": 2, "num_experts_per_tok": 4}
OTHERS = dict.fromkeys(("n_group", "topk_group"), _GROUPS)
_WIDE_HEADS = {"num_heads": 64, "head_dim": 128}
_WIDE_MAMBA = {"mamba_n_heads": 64, "mamba_d_head": 128}
OTHERS |= {name: heads for heads in (_WIDE_HEADS, _WIDE_MAMBA) for name in heads}
OTHERS |= {"mamba_expand": {"mamba_expand": 4, "mamba_n_heads": 256}, "expand": {"expand": 4, "num_heads": 256}}
"""Changes of keys that have an effect beside others only."""


def change(value: Any) -> Any:
    """Another value of a key; None if there is no other."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return 4 * value if value > 2 else value + 1
    return value + 0.25 if isinstance(value, float) else 1 if value is None else None


@pytest.mark.parametrize(
    "kind",
    [k for k, family in MODEL_FAMILIES.items() if {"num_experts", "hybrid_layer_pattern"} & family.options],
)
def test_every_key_of_a_family_is_carried_or_refused(kind: str) -> None:
    """Of all keys that transformers knows, each with another value than its default."""
    known = {"model_type": MODEL_FAMILIES[kind].known_as or kind}
    base = AutoConfig.for_model(**MINIMAL.get(kind, {}) | known).to_dict() | {"model_type": kind}
    ignored = {name for names in NOT_CARRIED.values() for name in names.split()} | _NOT_OF.get(kind, set())
    carried = 0
    for name, value in base.items():
        others = OTHERS.get(name, {})
        changes = others if others.keys() <= base.keys() and others else {name: change(value)}
        if changes[name] is None or name in ignored:
            continue
        try:
            ours = model(base | changes)
        except UserError:
            continue
        written = build_config_json(ours, kind=kind)
        if written.get(name) != changes[name]:  # under another name
            written = AutoConfig.for_model(**written | known).to_dict()
        assert written[name] == changes[name], name
        carried += 1
    assert carried >= 10


@pytest.mark.parametrize("config", [MIXTRAL, GPT_OSS, *(PUBLISHED[name] for name in ("olmoe", "qwen2_moe"))])
def test_the_coefficient_of_the_balancing_loss(config: dict[str, Any]) -> None:
    """Is read where transformers uses it, and written without use, as in published models."""
    coefficient = "router_aux_loss_coef"
    assert model(config).moe_aux_loss_coeff == (0.0,), "not in use"
    ours = model(config | {"output_router_logits": True, coefficient: 0.02})
    assert ours == replace(model(config), moe_aux_loss_coeff=(0.02,))
    written = build_config_json(ours)
    assert (written[coefficient], written.get("output_router_logits", False)) == (0.02, False)
    losses = {"moe_router_load_balancing_type": ("aux_loss", "global_aux_loss"), "moe_aux_loss_coeff": (0.25, 0.5)}
    assert build_config_json(replace(ours, **losses))[coefficient] == 0.75
    unbalanced = replace(ours, moe_router_load_balancing_type=("none",))
    assert coefficient not in build_config_json(unbalanced)


def test_yarn_factor_of_the_paper_is_accepted() -> None:
    plain = model(LLAMA3 | {"rope_scaling": YARN})
    assert model(LLAMA3 | {"rope_scaling": YARN | {"attention_factor": 0.1 * math.log(4.0) + 1.0}}) == plain
    assert plain.position_embedding_type == "yarn"


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"E850 .* holds no config\.json"):
        read_config(tmp_path)
    for content, message in (("{", "cannot be read as JSON"), ("[]", "holds list")):
        (tmp_path / "config.json").write_text(content)
        with pytest.raises(UserError, match=rf"E850 .* {message}"):
            read_config(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 0}, "E600 {0}: --hidden-size 0: must be at least 1"),
        ({"num_key_value_heads": 3}, "E102 {0}: 4 query heads cannot share 3 key/value heads"),
        ({"head_dim": 7}, "E106 {0}: 7 of 7 channels per head"),
    ],
)
def test_numbers_that_do_not_fit_together(changes: dict[str, int], message: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(build_config_json(llama())))
    assert build_config_json(read_model_config(tmp_path)) == build_config_json(llama())
    path.write_text(json.dumps(build_config_json(llama()) | changes))
    with pytest.raises(UserError, match=re.escape(message.format(path))):
        read_model_config(tmp_path)


# --- families of plugins ---

WINDOWED = llama(window_size=5, num_query_groups=2)


def cousin() -> ModelFamily:
    """Mistral under other names, tied unless config.json has another value."""
    base = MODEL_FAMILIES["mistral"]
    weights = {
        ours: (axes, {name.replace("self_attn", "attention"): at for name, at in theirs.items()})
        for ours, (axes, theirs) in base.weights.items()
    }
    keys = (ConfigKey("num_layers", "depth", 32), *(key for key in base.keys if "num_hidden_layers" not in key.names))
    return replace(base, architecture="CousinForCausalLM", keys=keys, weights=weights, tied_by_default=True)


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(plugins._registered, "model_family", {})
    plugins.register("model_family", "cousin")(cousin())


@pytest.mark.usefixtures("registered")
def test_a_registered_family_is_read_and_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(model_families()) == [*MODEL_FAMILIES, "cousin"]
    able = ("mistral", "ministral", "phi3", "smollm3")
    others = {kind: family for kind, family in MODEL_FAMILIES.items() if kind not in able}
    monkeypatch.setattr(families, "MODEL_FAMILIES", others)
    weights = random_weights(WINDOWED, torch.bfloat16)
    assert "model.layers.0.attention.q_proj.weight" in weights
    folder = write_folder(tmp_path / "hf", WINDOWED, weights)
    config = json.loads((folder / "config.json").read_text())
    assert (config["model_type"], config["architectures"], config["depth"]) == ("cousin", ["CousinForCausalLM"], 2)
    done = convert_from_huggingface(opened(folder), tmp_path / "save", ignore, checked=False)
    assert done.model.window_size == 5
    manifest, _ = open_checkpoint(tmp_path / "save")
    convert_to_huggingface(SavedModel(manifest), tmp_path / "back", ignore, shard_bytes=10**9, checked=False)
    written = load_file(tmp_path / "back" / "model.safetensors")
    assert written.keys() == weights.keys()
    assert all(torch.equal(written[name], weights[name]) for name in weights)
    assert json.loads((tmp_path / "back" / "config.json").read_text())["depth"] == 2


@pytest.mark.usefixtures("registered")
def test_built_in_families_come_first_and_the_default_of_tying_is_the_familys() -> None:
    assert model_type_for(WINDOWED) == "mistral"
    config = build_config_json(WINDOWED)
    del config["tie_word_embeddings"]
    assert model_config_values(config, "here")["untie_embeddings_and_output_weights"]
    config |= {"model_type": "cousin", "architectures": ["CousinForCausalLM"]}
    config["depth"] = config.pop("num_hidden_layers")
    assert not model_config_values(config, "here")["untie_embeddings_and_output_weights"]


def test_a_name_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, list[str]]] = []

    def download(name: str, allow_patterns: list[str]) -> str:
        asked.append((name, allow_patterns))
        if name == "org/none":
            raise OSError("no route")
        return str(tmp_path / "cached")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    (tmp_path / "cached").mkdir()
    (tmp_path / "cached" / CONFIG_FILE).write_text("{}")
    (tmp_path / "org" / "here").mkdir(parents=True)
    assert read_config(Path("org/there")) == {}
    assert asked == [("org/there", [CONFIG_FILE])]  # not the weights: --check-config reads only this file
    assert model_folder("org/there") == tmp_path / "cached"
    assert model_folder("org/here") == Path("org/here")
    with pytest.raises(UserError, match=r"E850 .*\n.*hf download org/none --include .*, then hf:DIR in place of"):
        read_config(Path("org/none"))
    with pytest.raises(UserError, match="fix: hf download ORG/gpt2 --local-dir gpt2"):
        read_config(Path("gpt2"))
