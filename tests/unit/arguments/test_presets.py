"""The shapes of presets against published numbers and the models that transformers builds."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from megatron.arguments.presets import PAPER_TOKENS_PER_STEP, PRESETS
from megatron.arguments.sources import build_config
from megatron.config.model import ModelConfig
from megatron.config.option import Role
from megatron.config.settings import SETTINGS
from megatron.convert.huggingface.config import build_config_json, model_config_values
from megatron.convert.huggingface.keys import resolved
from megatron.layers.parameters import num_parameters
from tests.unit.arguments.command import run

CONFIGS = Path(__file__).parents[2] / "golden" / "hf_configs.json"

# Parameters of the published weights: the sum over the tensors of each checkpoint on the Hugging Face hub.
PUBLISHED = {
    "gpt2-124m": 124_439_808,
    "gpt2-355m": 354_823_168,
    "gpt2-774m": 774_030_080,
    "gpt2-1.5b": 1_557_611_200,
    "llama2-7b": 6_738_415_616,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800,
    "mixtral-8x7b": 46_702_792_704,
    "qwen3-30b-a3b": 30_532_122_624,
    "gpt-oss-20b": 20_914_757_184,
    "nemotron-h-8b": 8_100_852_736,
}
ACTIVE = {"mixtral-8x7b": 12.9, "qwen3-30b-a3b": 3.3, "gpt-oss-20b": 3.6, "deepseek-v3": 37.0}
ACTIVE |= {"nemotron-3-nano-30b-a3b": 3.6}
"""Published billions of parameters that a token uses; without the embeddings for GPT-OSS, as its model card counts."""


def model(preset: str) -> ModelConfig:
    vocabulary = {"vocab_size": 257} if preset.startswith("tiny") else {}
    return build_config(dict(PRESETS[preset]) | vocabulary).model


def test_parameters_are_the_published_number() -> None:
    assert {preset: num_parameters(model(preset)) for preset in PUBLISHED} == PUBLISHED
    assert round(num_parameters(model("gpt3-175b")) / 1e9) == 175
    deepseek = model("deepseek-v3")
    assert round(num_parameters(replace(deepseek, mtp_num_layers=None)) / 1e9) == 671
    assert round(num_parameters(model("nemotron-3-nano-30b-a3b")) / 1e9, 1) == 31.6
    assert [round(num_parameters(model(name)) / 1e9) for name in ("granite-4.0-h-tiny", "qwen3-next-80b-a3b")] == [
        7,
        80,
    ]


def test_active_parameters_are_the_published_number() -> None:
    for preset, billions in ACTIVE.items():
        m = replace(model(preset), mtp_num_layers=None)
        embeddings = m.vocab * m.hidden_size if preset == "gpt-oss-20b" else 0
        assert (num_parameters(m, active=True) - embeddings) / 1e9 == pytest.approx(billions, rel=0.02), preset


@pytest.mark.parametrize("preset", ["mixtral-8x7b", "qwen3-30b-a3b", "gpt-oss-20b", "deepseek-v3"])
def test_models_with_experts_are_those_of_their_config_json(preset: str) -> None:
    """In all that a model computes from its weights."""
    kind = {"qwen3-30b-a3b": "qwen3_moe", "gpt-oss-20b": "gpt_oss", "deepseek-v3": "deepseek_v3"}.get(preset)
    published = MIXTRAL if kind is None else json.loads(CONFIGS.read_text())[kind]
    published.pop("quantization_config", None)
    theirs, ours = ModelConfig(**model_config_values(published, "config.json")), model(preset)
    for name, setting in SETTINGS.items():
        if setting.group == "model" and setting.option.role in (Role.SHAPE, Role.FUNCTION):
            assert resolved(ours, name) == resolved(theirs, name), name


MIXTRAL = {
    "architectures": ["MixtralForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mixtral",
    "num_attention_heads": 32,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "vocab_size": 32000,
}
"""config.json of Mixtral-8x7B-v0.1, without what does not concern the model."""


@pytest.mark.parametrize("preset", ["tiny-moe", "tiny-deepseek"])
def test_tiny_models_with_experts_match_transformers(preset: str) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    m = replace(model(preset), mtp_num_layers=None)  # which its models do not have
    config = AutoConfig.for_model(**build_config_json(m))
    assert config.model_type == {"tiny-moe": "mixtral", "tiny-deepseek": "deepseek_v3"}[preset]
    with torch.device("meta"):
        built = AutoModelForCausalLM.from_config(config)
    biases = m.num_experts * (m.num_layers - m.dense_layers) if m.moe_router_enable_expert_bias else 0
    assert num_parameters(m) - biases == sum(p.numel() for p in built.parameters())


@pytest.mark.parametrize("preset", ["tiny-gpt2", "tiny-llama"])
def test_parameters_match_transformers(preset: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

    m = model(preset)
    config = GPT2Config(
        vocab_size=m.vocab,
        n_positions=m.max_position_embeddings or 0,
        n_embd=m.hidden_size,
        n_layer=m.num_layers,
        n_head=m.num_attention_heads,
    ) if m.position_embedding_type == "learned_absolute" else LlamaConfig(
        vocab_size=m.vocab,
        hidden_size=m.hidden_size,
        intermediate_size=m.ffn,
        num_hidden_layers=m.num_layers,
        num_attention_heads=m.num_attention_heads,
        num_key_value_heads=m.kv_groups,
        tie_word_embeddings=False,
    )  # fmt: skip
    with torch.device("meta"):
        built = AutoModelForCausalLM.from_config(config)
    assert num_parameters(m) == sum(p.numel() for p in built.parameters())


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_are_accepted_set_the_same_options_and_have_no_dropout(preset: str) -> None:
    base = "--mock-data --train-iters 10000 --tokenizer-type ByteTokenizer"
    config = run(f"--preset {preset}", base=base).config
    assert config.model.hidden_dropout == config.model.attention_dropout == 0
    longer = {"qwen3-30b-a3b", "gpt-oss-20b", "deepseek-v3"}  # extended after most of the training
    longer |= {"nemotron-3-nano-30b-a3b", "granite-4.0-h-tiny", "qwen3-next-80b-a3b"}
    assert (config.training.seq_length < (config.model.max_position_embeddings or 0)) == (preset in longer)
    assert config.training.seq_length <= (config.model.max_position_embeddings or 0)
    optimizer = {name for name in PRESETS[preset] if SETTINGS[name].group == "optimizer"}
    assert optimizer == {name for name in PRESETS["tiny-llama"] if SETTINGS[name].group == "optimizer"}


def test_every_preset_of_a_paper_has_its_batch() -> None:
    assert {*PAPER_TOKENS_PER_STEP} == {name for name in PRESETS if not name.startswith("tiny")}
