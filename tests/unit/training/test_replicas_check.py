"""Digests of weights against plain integers, and the words for what differs where."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron.parallel.shard import Box
from megatron.training import replicas_check
from megatron.training.replicas_check import Copy, differing, digest

BITS = {torch.bfloat16: torch.int16, torch.float32: torch.int32, torch.float64: torch.int64}


def by_python(x: Tensor) -> int:
    """The same sum with integers of any length, cut to 64 bits at the end."""
    stride, total = replicas_check._STRIDE, 0
    for at, word in enumerate(x.contiguous().flatten().view(BITS[x.dtype]).tolist(), start=1):
        place = _signed(at * stride)
        total += word * (_signed((place ^ (place >> 29)) * stride) | 1)
    return _signed(total)


def _signed(number: int) -> int:
    return (number + 2**63) % 2**64 - 2**63


@pytest.mark.parametrize("dtype", BITS)
def test_a_digest_is_that_of_the_formula(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(7, 5, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert digest(x).item() == by_python(x)
    assert digest(x.t()).item() == by_python(x.t())
    monkeypatch.setattr(replicas_check, "BLOCK", 4)
    assert digest(x).item() == by_python(x)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.sampled_from(list(BITS)), st.integers(0, 99), st.integers(0, 63))
def test_one_bit_changes_it(dtype: torch.dtype, at: int, bit: int) -> None:
    x = torch.randn(100, generator=torch.Generator().manual_seed(1)).to(dtype)
    before = digest(x).item()
    words = x.view(BITS[dtype])
    words[at] ^= _signed(1 << bit % (8 * x.element_size()) << (64 - 8 * x.element_size())) >> (
        64 - 8 * x.element_size()
    )
    assert digest(x).item() != before


def test_places_count() -> None:
    x = torch.arange(6.0)
    assert len({digest(x[torch.tensor(order)]).item() for order in ([0, 1, 2], [1, 0, 2], [0, 2, 1], [2, 1, 0])}) == 4


def test_nothing_has_a_digest() -> None:
    assert digest(torch.empty(0, 4)).item() == 0


HERE, THERE = Box((0,), (4,)), Box((4,), (4,))
WORDS: dict[str, tuple[list[list[Copy]], str]] = {
    "two": ([[Copy("w", HERE, 1)], [Copy("w", HERE, 2)]], "is not the same on ranks 0, 1"),
    "most": (
        [[Copy("w", HERE, 1)], [Copy("w", HERE, 2)], [], [Copy("w", HERE, 1)]],
        "on rank 1 differs from ranks 0, 3",
    ),
    "another parameter": (
        [[Copy("v", HERE, 3), Copy("w", HERE, 1)], [Copy("v", HERE, 4)], [Copy("w", HERE, 2)]],
        "is not the same on ranks 0, 2",
    ),
    "two places": (
        [[Copy("w", HERE, 1), Copy("w", THERE, 5)], [Copy("w", HERE, 1), Copy("w", THERE, 6)], [Copy("w", HERE, 2)]],
        "is not the same on ranks 0, 1, 2",
    ),
    "three of three": ([[Copy("w", HERE, 1)], [Copy("w", HERE, 2)], [Copy("w", HERE, 3)]], "on ranks 0, 1, 2"),
}


@pytest.mark.parametrize("name", WORDS)
def test_the_ranks_are_named(name: str) -> None:
    copies, told = WORDS[name]
    assert differing("w", copies).endswith(told)
