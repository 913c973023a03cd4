"""The shapes of presets against published numbers and the models that transformers builds."""

from __future__ import annotations

import pytest

from megatron.arguments.presets import PAPER_TOKENS_PER_STEP, PRESETS
from megatron.arguments.sources import build_config
from megatron.config.model import ModelConfig
from megatron.config.settings import SETTINGS
from megatron.layers.parameters import num_parameters
from tests.unit.arguments.command import run

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


def test_parameters_are_the_published_number() -> None:
    assert {preset: num_parameters(model(preset)) for preset in PUBLISHED} == PUBLISHED
    assert round(num_parameters(model("gpt3-175b")) / 1e9) == 175


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
    assert config.training.seq_length == config.model.max_position_embeddings
    optimizer = {name for name in PRESETS[preset] if SETTINGS[name].group == "optimizer"}
    assert optimizer == {name for name in PRESETS["tiny-llama"] if SETTINGS[name].group == "optimizer"}


def test_every_preset_of_a_paper_has_its_batch() -> None:
    assert {*PAPER_TOKENS_PER_STEP} == {name for name in PRESETS if not name.startswith("tiny")}
