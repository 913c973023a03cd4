from __future__ import annotations

import os

import pytest

from megatron.arguments.cli import parse
from megatron.arguments.presets import PRESETS
from megatron.arguments.sources import build_config
from megatron.config.model import ModelConfig
from megatron.config.settings import SETTINGS

os.environ.setdefault("HF_HUB_OFFLINE", "1")

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
}


def model(preset: str) -> ModelConfig:
    vocabulary = {"vocab_size": 257} if preset.startswith("tiny") else {}
    return build_config(dict(PRESETS[preset]) | vocabulary).model


@pytest.mark.parametrize(("preset", "parameters"), PUBLISHED.items())
def test_parameters_are_the_published_number(preset: str, parameters: int) -> None:
    assert model(preset).num_parameters() == parameters


def test_gpt3_has_175_billion() -> None:
    assert round(model("gpt3-175b").num_parameters() / 1e9) == 175


@pytest.mark.parametrize("preset", PRESETS)
def test_parameters_are_those_transformers_builds(preset: str) -> None:
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
    assert m.num_parameters() == sum(p.numel() for p in built.parameters())


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_are_accepted_and_have_no_dropout(preset: str) -> None:
    argv = ["--preset", preset, "--mock-data", "--train-iters", "10000", "--tokenizer-type", "ByteTokenizer"]
    config = parse(argv, {}).config
    assert config.model.hidden_dropout == config.model.attention_dropout == 0
    assert config.training.seq_length == config.model.max_position_embeddings


def test_presets_speak_of_the_same_optimizer_settings() -> None:
    def said(preset: str) -> set[str]:
        return {name for name in PRESETS[preset] if SETTINGS[name].group == "optimizer"}

    assert len({frozenset(said(preset)) for preset in PRESETS}) == 1
