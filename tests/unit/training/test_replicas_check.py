"""Digests of weights against plain integers, and the description of differences."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron.training.callbacks import health
from megatron.training.callbacks.health import WeightCopy, bit_hash, describe_difference

BITS = {torch.bfloat16: torch.int16, torch.float32: torch.int32, torch.float64: torch.int64}


def by_python(x: Tensor) -> int:
    """The same sum with integers of any length, cut to 64 bits at the end."""
    stride, total = health._STRIDE, 0
    for at, word in enumerate(x.contiguous().flatten().view(BITS[x.dtype]).tolist(), start=1):
        place = _signed(at * stride)
        total += word * (_signed((place ^ (place >> 29)) * stride) | 1)
    return _signed(total)


def _signed(number: int) -> int:
    return (number + 2**63) % 2**64 - 2**63


@pytest.mark.parametrize("dtype", BITS)
def test_a_digest_matches_the_formula(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(7, 5, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert bit_hash(x).item() == by_python(x)
    assert bit_hash(x.t()).item() == by_python(x.t())
    monkeypatch.setattr(health, "HASH_BLOCK", 4)
    assert bit_hash(x).item() == by_python(x)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.sampled_from(list(BITS)), st.integers(0, 99), st.integers(0, 63))
def test_one_bit_changes_it(dtype: torch.dtype, at: int, bit: int) -> None:
    x = torch.randn(100, generator=torch.Generator().manual_seed(1)).to(dtype)
    before = bit_hash(x).item()
    words = x.view(BITS[dtype])
    words[at] ^= _signed(1 << bit % (8 * x.element_size()) << (64 - 8 * x.element_size())) >> (
        64 - 8 * x.element_size()
    )
    assert bit_hash(x).item() != before


def test_places_count() -> None:
    x = torch.arange(6.0)
    assert len({bit_hash(x[torch.tensor(order)]).item() for order in ([0, 1, 2], [1, 0, 2], [0, 2, 1], [2, 1, 0])}) == 4


def test_nothing_has_a_digest() -> None:
    assert bit_hash(torch.empty(0, 4)).item() == 0


HERE, THERE = "here", "there"
WORDS: dict[str, tuple[list[list[WeightCopy]], str]] = {
    "two": ([[WeightCopy("w", HERE, 1)], [WeightCopy("w", HERE, 2)]], "is not the same on ranks 0, 1"),
    "most": (
        [[WeightCopy("w", HERE, 1)], [WeightCopy("w", HERE, 2)], [], [WeightCopy("w", HERE, 1)]],
        "on rank 1 differs from ranks 0, 3",
    ),
    "another parameter": (
        [[WeightCopy("v", HERE, 3), WeightCopy("w", HERE, 1)], [WeightCopy("v", HERE, 4)], [WeightCopy("w", HERE, 2)]],
        "is not the same on ranks 0, 2",
    ),
    "two places": (
        [
            [WeightCopy("w", HERE, 1), WeightCopy("w", THERE, 5)],
            [WeightCopy("w", HERE, 1), WeightCopy("w", THERE, 6)],
            [WeightCopy("w", HERE, 2)],
        ],
        "is not the same on ranks 0, 1, 2",
    ),
    "three of three": (
        [[WeightCopy("w", HERE, 1)], [WeightCopy("w", HERE, 2)], [WeightCopy("w", HERE, 3)]],
        "on ranks 0, 1, 2",
    ),
}


@pytest.mark.parametrize("name", WORDS)
def test_the_ranks_are_named(name: str) -> None:
    copies, printed = WORDS[name]
    assert describe_difference("w", copies).endswith(printed)
