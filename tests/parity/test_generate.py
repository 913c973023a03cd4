"""Greedy generation equals `transformers.generate` with the same weights: prompts alone, in a batch, with an end.

In fp64 and fp32. In bf16 the two round at other places (a norm once here and twice there, a bias the other way round),
and of nearly equal logits another may be the largest.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from megatron.inference.generate import SamplingParams, generate
from tests.parity.families import copy_into
from tests.parity.test_hf import BY_NAME, Pair, precision

GREEDY = SamplingParams(0.0)
LENGTHS = (3, 7, 1, 5)
NEW = 9


def pair_of(name: str, dtype: torch.dtype) -> Pair:
    """With smaller biases, which would make the same token likeliest everywhere."""
    pair = Pair.build(BY_NAME[name], dtype)
    with torch.no_grad():
        for parameter, values in pair.theirs.named_parameters():
            values.mul_(0.05 if parameter.endswith("bias") else 1.0)
    copy_into(pair.ours.params, pair.their_weights())
    return pair


def prompts_of(pair: Pair) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(0, pair.config.vocab, (n,), generator=generator).tolist() for n in LENGTHS]


def by_transformers(pair: Pair, prompts: Sequence[Sequence[int]], end: int | None = None) -> list[list[int]]:
    """New ids of each prompt, computed in one batch padded on the left; after the first ``end`` nothing counts."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    with precision(pair.dtype):
        out = pair.theirs.eval().generate(
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=NEW,
            do_sample=False,
            eos_token_id=end,
            pad_token_id=0,
        )
    new: list[list[int]] = out[:, longest:].tolist()
    return [row[: row.index(end) + 1] if end in row else row for row in new]


@pytest.mark.parametrize("name", BY_NAME)
def test_greedy(name: str) -> None:
    pair = pair_of(name, torch.float64)
    prompts = prompts_of(pair)
    expected = by_transformers(pair, prompts)
    assert len({token for ids in expected for token in ids}) > 4, "a model that repeats itself shows little"
    assert generate(pair.ours.chunk, prompts, NEW, GREEDY) == expected
    assert [by_transformers(pair, [prompt])[0] for prompt in prompts] == expected


@pytest.mark.parametrize("name", ["gpt2", "llama-gqa"])
def test_greedy_in_fp32_with_an_end(name: str) -> None:
    pair = pair_of(name, torch.float32)
    prompts = prompts_of(pair)
    end = by_transformers(pair, prompts)[1][3]
    expected = by_transformers(pair, prompts, end)
    assert min(map(len, expected)) < NEW
    assert generate(pair.ours.chunk, prompts, NEW, GREEDY, stop_ids=[end]) == expected
