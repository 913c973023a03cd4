"""The largest attention logit against all logits written out."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron.layers import attention
from megatron.layers.attention import largest_logit

S, B, G, X, D = 11, 2, 2, 3, 4


def by_loops(q: Tensor, k: Tensor, window: int | None, documents: Tensor | None) -> float:
    found = []
    for b in range(B):
        for i in range(S):
            for j in range(max(0, i + 1 - window) if window else 0, i + 1):
                if documents is None or documents[b, i] == documents[b, j]:
                    found += [(q[i, b, n] @ k[j, b, n // X]).item() / D**0.5 for n in range(G * X)]
    return max(found)


def operands(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    q, k = (torch.randn(S, B, heads, D, generator=generator, dtype=torch.float64) for heads in (G * X, G))
    return q - 1, k + 1  # most logits are negative: a mask that hides too little, or a zero, would win


@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("window", [None, 1, 3])
@settings(max_examples=8, deadline=None, derandomize=True)
@given(seed=st.integers(0, 1000), block=st.sampled_from([1, 200, 1 << 20]))
def test_it_is_that_of_the_visible_pairs(window: int | None, documents: bool, seed: int, block: int) -> None:
    q, k = operands(seed)
    ids = torch.tensor([[0] * 4 + [1] * 7, [0, 1, 1, 2, 2, 2, 3, 4, 4, 4, 4]]) if documents else None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "LOGITS_PER_BLOCK", block)
        got = largest_logit(q, k, window, ids)
    assert got.item() == pytest.approx(by_loops(q, k, window, ids), rel=1e-12)


def test_half_precision_is_multiplied_in_fp32() -> None:
    q, k = (x.to(torch.bfloat16) for x in operands(0))
    assert largest_logit(q, k, None, None).dtype == torch.float32
    assert largest_logit(q, k, None, None).item() == pytest.approx(
        by_loops(q.double(), k.double(), None, None), rel=1e-6
    )


def test_a_nan_is_reported() -> None:
    q, k = operands(0)
    q[3, 1, 2, 0] = torch.nan
    assert largest_logit(q, k, None, None).isnan()
