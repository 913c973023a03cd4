"""Sequences of 2,048 tokens through layers with windows, against `transformers`: logits and gradients."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megatron.config.model import ModelConfig
from megatron.convert.huggingface.config import model_config_values
from tests.kit.solo import Solo, random_batch
from tests.parity.families import copy_into, from_llama
from tests.parity.test_hf import precision, relative

transformers = pytest.importorskip("transformers")

LENGTH, WINDOW = 2048, 96
ALTERNATING = ["sliding_attention", "full_attention"] * 2
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "qwen3": (
        "Qwen3",
        {"use_sliding_window": True, "layer_types": ALTERNATING},
        {"attention_pattern": f"local:{WINDOW},global"},
    ),
    "mistral": ("Mistral", {}, {"window_size": WINDOW}),
}
"""Class of transformers, what makes its layers windowed, and what that is here."""


def build(name: str, dtype: torch.dtype) -> tuple[nn.Module, Solo]:
    """The same weights in transformers' model and in ours, which is built from its config.json."""
    family, layers, expected = MODELS[name]
    config = getattr(transformers, f"{family}Config")(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=101,
        max_position_embeddings=4096,
        sliding_window=WINDOW,
        tie_word_embeddings=False,
        attn_implementation="sdpa",
        **layers,
    )
    torch.manual_seed(1)
    with precision(dtype):
        theirs = getattr(transformers, f"{family}ForCausalLM")(config).to(dtype).train()
    for parameter in theirs.parameters():  # wide enough for attention to be far from uniform
        nn.init.normal_(parameter, mean=float(parameter.dim() == 1), std=0.2)
    ours = replace(ModelConfig(**model_config_values(config.to_dict(), name)), make_vocab_size_divisible_by=1)
    assert {field: getattr(ours, field) for field in expected} == expected
    solo = Solo.build(ours, dtype)
    copy_into(solo.params, from_llama({n: p.detach() for n, p in theirs.named_parameters()}, ours))
    return theirs, solo


def logits(solo: Solo, tokens_BS: Tensor) -> Tensor:
    solo.chunk.eval()
    found = solo.chunk.logits(tokens_BS).transpose(0, 1)
    solo.chunk.train()
    return found


@pytest.mark.parametrize(
    ("dtype", "of_logits", "of_gradients"),
    [(torch.float64, 1e-11, 1e-10), (torch.float32, 1e-5, 1e-4)],
    ids=["fp64", "fp32"],
)
@pytest.mark.parametrize("name", MODELS)
def test_logits_and_every_gradient(name: str, dtype: torch.dtype, of_logits: float, of_gradients: float) -> None:
    theirs, ours = build(name, dtype)
    batch = random_batch(ours.chunk.config, samples=1, length=LENGTH)
    labels = batch.labels.where(batch.loss_mask > 0, -100)
    with precision(dtype):
        outputs = theirs(input_ids=batch.tokens, labels=labels, shift_labels=labels, use_cache=False)
        outputs.loss.backward()
    found = logits(ours, batch.tokens)
    assert relative(found, outputs.logits) <= of_logits
    assert ours.backward([batch]).item() == pytest.approx(outputs.loss.item(), rel=of_logits)
    expected = from_llama({n: p.grad for n, p in theirs.named_parameters() if p.grad is not None}, ours.chunk.config)
    assert expected.keys() == ours.buckets.grads.keys()
    errors = {parameter: relative(ours.buckets.grads[parameter], grad) for parameter, grad in expected.items()}
    assert max(errors.values()) <= of_gradients, errors

    full = Solo.build(replace(ours.chunk.config, attention_pattern=None, window_size=None), dtype)
    copy_into(full.params, {n: p.detach() for n, p in ours.params.items()})
    assert relative(logits(full, batch.tokens), found) > 0.1, "the windows hide nothing that matters"
