"""Sampling against closed forms and `transformers`' logits processors."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import GenerationConfig, GPT2Config, GPT2LMHeadModel

from megatron.inference.generate import SamplingParams, filter_logits, sample_tokens, uniform_draw
from megatron.inference.text import InferenceError

DRAWS = 20_000


def logits(seed: int, prompts: int = 3, entries: int = 40) -> Tensor:
    """From flat to peaked."""
    scales = torch.linspace(0.5, 4.0, prompts).unsqueeze(1)
    return torch.randn(prompts, entries, generator=torch.Generator().manual_seed(seed)) * scales


@cache
def any_model() -> Any:
    """It makes the processors, and nothing of it is used."""
    return GPT2LMHeadModel(GPT2Config(n_embd=4, n_layer=1, n_head=1, vocab_size=5))


def by_transformers(logits_BV: Tensor, sampling: SamplingParams) -> Tensor:
    """Return the distribution that `transformers.generate` samples from, its processors in its order."""
    config = GenerationConfig(
        do_sample=True, temperature=sampling.temperature, top_k=sampling.top_k or 0, top_p=sampling.top_p or 1.0
    )
    processors = any_model()._get_logits_processor(config, input_ids_seq_length=1)
    scores: Tensor = processors(torch.zeros(len(logits_BV), 1, dtype=torch.long), logits_BV)
    return scores


@settings(max_examples=50, derandomize=True, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    temperature=st.floats(0.2, 3.0),
    top_k=st.none() | st.integers(1, 60),
    top_p=st.none() | st.floats(0.01, 0.999) | st.just(1.0),
)
def test_filters_match_transformers(seed: int, temperature: float, top_k: int | None, top_p: float | None) -> None:
    ours = filter_logits(logits(seed), SamplingParams(temperature, top_k, top_p))
    theirs = by_transformers(logits(seed), SamplingParams(temperature, top_k, top_p))
    assert torch.equal(ours.isinf(), theirs.isinf())
    torch.testing.assert_close(ours.softmax(-1), theirs.double().softmax(-1), rtol=1e-5, atol=0)


def test_ties_under_top_k_and_top_p() -> None:
    kept = filter_logits(torch.tensor([[1.0, 3.0, 2.0, 2.0, 0.0]]), SamplingParams(top_k=2)).isfinite()
    assert kept.tolist() == [[False, True, True, True, False]]
    kept = filter_logits(torch.zeros(1, 4), SamplingParams(top_p=0.5)).isfinite()
    assert kept.sum() == by_transformers(torch.zeros(1, 4), SamplingParams(top_p=0.5)).isfinite().sum() == 2


@pytest.mark.parametrize("sampling", [SamplingParams(0.7, 10, 0.9), SamplingParams(1.5, top_p=0.5)], ids=str)
def test_frequencies_are_the_probabilities(sampling: SamplingParams) -> None:
    """Pearson's chi-square over all tokens that can appear; its mean is k - 1, its variance 2 (k - 1)."""
    one = logits(3)[:1]
    expected = filter_logits(one, sampling).double().softmax(-1)[0]
    draws = torch.tensor([uniform_draw(7, 0, position) for position in range(DRAWS)], dtype=torch.float64)
    counts = torch.bincount(sample_tokens(one.expand(DRAWS, -1), sampling, draws), minlength=one.shape[1])
    assert not counts[expected == 0].any()
    possible = expected > 0
    statistic = ((counts - DRAWS * expected).square() / (DRAWS * expected))[possible].sum().item()
    degrees = int(possible.sum()) - 1
    assert degrees >= 5
    assert abs(statistic - degrees) < 4 * (2 * degrees) ** 0.5


@settings(max_examples=50, derandomize=True, deadline=None)
@given(
    weights=st.lists(st.integers(0, 5), min_size=1, max_size=8).filter(any), number=st.floats(0, 1, exclude_max=True)
)
def test_the_token_is_where_the_cumulative_probability_passes_the_draw(weights: list[int], number: float) -> None:
    logits_BV = torch.tensor([weights], dtype=torch.float64).log().clamp(min=-1e9)
    token = int(sample_tokens(logits_BV, SamplingParams(), torch.tensor([number], dtype=torch.float64)))
    total, below = sum(weights), sum(weights[:token])
    assert weights[token] > 0
    assert below / total <= number + 1e-12
    assert number <= (below + weights[token]) / total + 1e-12


def test_ends_of_the_interval_and_low_temperatures() -> None:
    rows = logits(5, prompts=200)
    for number in (0.0, 1.0 - 2.0**-53):
        chosen = sample_tokens(rows, SamplingParams(top_k=3), torch.full((200,), number, dtype=torch.float64))
        assert filter_logits(rows, SamplingParams(top_k=3)).gather(1, chosen.unsqueeze(1)).isfinite().all()
    for temperature in (0.0, 1e-3, 1e-38, 1e-40, 5e-324):
        for left in ({}, {"top_k": 5}, {"top_p": 0.9}):
            params = SamplingParams(temperature, **left)  # type: ignore[arg-type]
            chosen = sample_tokens(1000 * rows, params, torch.full((200,), 0.999, dtype=torch.float64))
            assert chosen.tolist() == rows.argmax(-1).tolist()


def test_draws_are_even_and_their_own() -> None:
    numbers = torch.tensor([uniform_draw(s, p, n) for s in range(5) for p in range(20) for n in range(100)])
    assert len(numbers.unique()) == len(numbers)
    assert numbers.min() >= 0
    assert numbers.max() < 1
    counts = torch.histc(numbers, 50, 0, 1)
    assert ((counts - 200).square() / 200).sum() < 49 + 4 * 98**0.5


def test_parameters_and_logits_that_cannot_be_used() -> None:
    for bad in ({"temperature": -1.0}, {"temperature": float("nan")}, {"top_k": 0}, {"top_p": 0.0}):
        with pytest.raises(InferenceError, match=r"must be .*\n  fix: --t"):
            SamplingParams(**bad)  # type: ignore[arg-type]
    with pytest.raises(InferenceError, match="NaN or infinite"):
        sample_tokens(torch.tensor([[0.0, float("nan")]]), SamplingParams(), torch.zeros(1, dtype=torch.float64))
