"""Rows of experts, and sums over the rows of a token, against loops."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron.config.dispatch import ExchangeBuffers
from megatron.distributed.comm import Group
from megatron.kernels.rows import Ranks, place_choices, send_rows, sum_rows
from megatron.layers.dispatch import ExpertRows, LocalDispatcher, RowCopies, Tokens

QUICK = settings(max_examples=60, derandomize=True, deadline=None)


def rows(count: int, width: int = 3, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, width, generator=generator, dtype=torch.float64)


@st.composite
def choices(draw: st.DrawFn, drops: bool = False) -> tuple[Tensor, int]:
    """Experts of some tokens, each token's all different; and how many experts there are."""
    experts, tokens = draw(st.integers(1, 6)), draw(st.integers(0 if drops else 1, 9))
    topk = draw(st.integers(1, experts))
    busy = draw(st.lists(st.permutations(range(experts)), min_size=tokens, max_size=tokens))
    chosen = torch.tensor([list(order[:topk]) for order in busy], dtype=torch.int64).view(tokens, topk)
    if drops:
        dropped = draw(st.lists(st.booleans(), min_size=chosen.numel(), max_size=chosen.numel()))
        chosen = chosen.masked_fill(torch.tensor(dropped, dtype=torch.bool).view_as(chosen), experts)
    return chosen, experts


def expanded(experts_TK: Tensor, experts: int, x_TH: Tensor, weights_TK: Tensor) -> tuple[Tokens, ExpertRows]:
    """The rows of a rank that has all experts."""
    dispatcher = LocalDispatcher(Group(), 1, experts, experts_TK.shape[1])
    dropped = bool((experts_TK == experts).any())
    tokens = dispatcher.dispatch(x_TH, experts_TK, weights_TK, dropped).wait()
    return tokens, ExpertRows.of(tokens, experts)


@QUICK
@given(choices(drops=True))
def test_every_token_is_at_each_of_its_experts_once(chosen: tuple[Tensor, int]) -> None:
    experts_TK, experts = chosen
    x_TH, weights_TK = rows(len(experts_TK)), rows(*experts_TK.shape, seed=1)
    tokens, made = expanded(experts_TK, experts, x_TH, weights_TK)
    places = [(e, t, k) for e in range(experts) for t, row in enumerate(experts_TK.tolist()) for k in range(len(row))]
    expected = [(e, t, k) for e, t, k in places if experts_TK[t, k] == e]
    assert made.offsets.tolist() == [sum(e <= last for e, _, _ in expected) for last in range(experts)]
    found, weights = made.rows.copy(tokens.x), made.weights
    assert len(found) == experts_TK.numel(), "of fixed size"
    assert torch.equal(found[: len(expected)], x_TH[[t for _, t, _ in expected]])
    assert weights[: len(expected)].tolist() == [weights_TK[t, k].item() for _, t, k in expected]


@QUICK
@given(choices(drops=True))
def test_results_of_a_token_are_added(chosen: tuple[Tensor, int]) -> None:
    """Also their gradients; what is in the rows of dropped choices does not matter."""
    experts_TK, experts = chosen
    factors = torch.cat([torch.arange(1.0, experts + 1, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)])
    x_TH, weights_TK = rows(len(experts_TK)).requires_grad_(), rows(*experts_TK.shape, seed=1).requires_grad_()
    tokens, made = expanded(experts_TK, experts, x_TH, weights_TK)
    end = int(made.offsets[-1])
    of_rows = factors[:-1].repeat_interleave(made.offsets.diff(prepend=made.offsets.new_zeros(1)))
    y_RH = made.rows.copy(tokens.x)
    y_RH = torch.cat([y_RH[:end] * (of_rows * made.weights[:end]).unsqueeze(1), y_RH[end:] * torch.nan])
    y_TH = made.rows.add(y_RH)
    expected = x_TH * (factors[experts_TK] * weights_TK).sum(1, keepdim=True)
    torch.testing.assert_close(y_TH, expected, rtol=1e-13, atol=1e-13)
    dy = rows(len(experts_TK), seed=2)
    found = torch.autograd.grad(y_TH, [x_TH, weights_TK], dy)
    wanted = torch.autograd.grad(expected, [x_TH, weights_TK], dy)
    torch.testing.assert_close(found, wanted, rtol=1e-13, atol=1e-13)


@QUICK
@given(st.lists(st.integers(0, 9), min_size=1, max_size=12), st.integers(1, 8000), st.integers(0, 3))
def test_choices_are_sorted_stably(chosen: list[int], scale: int, first: int) -> None:
    """With experts of one byte and of more, of which five are this rank's, from ``first`` on."""
    experts = torch.tensor(chosen, dtype=torch.int64).unsqueeze(1) * scale
    weights = torch.arange(1.0, 1 + len(chosen)).unsqueeze(1)
    found = place_choices(experts, weights, first * scale, 5 * scale, len(chosen), None)
    here = sorted((i for i, e in enumerate(chosen) if first <= e < first + 5), key=lambda i: chosen[i])
    assert found.source[: len(here)].tolist() == here
    assert found.weights[: len(here)].tolist() == [i + 1 for i in here]
    assert found.places[:, 0].tolist() == [here.index(i) if i in here else len(chosen) for i in range(len(chosen))]
    assert found.ends[::scale].tolist() == [sum(chosen[i] <= first + n for i in here) for n in range(5)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_sums_are_rounded_once(dtype: torch.dtype) -> None:
    x = torch.tensor([[256.0, 1.0], [1.0, 2.0], [1.0, 3.0]], dtype=dtype)
    places = torch.tensor([[0, 1, 2], [2, 2, 2]])
    assert sum_rows(x, places, True).tolist() == [[258.0, 6.0], [3.0, 9.0]]
    assert sum_rows(x, places + 1, False).tolist() == [[2.0, 5.0], [0.0, 0.0]]


def test_the_host_reads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[str] = []
    for holder, name in ((Tensor, "tolist"), (Tensor, "item"), (Tensor, "__bool__"), (Tensor, "nonzero")):
        monkeypatch.setattr(holder, name, lambda *given, name=name: waits.append(name))
    dispatcher = LocalDispatcher(Group(), 1, 3, 2)
    x_TH = rows(2)
    exchange = dispatcher.dispatch(x_TH, torch.tensor([[0, 2], [1, 3]]), rows(2, 2), True)
    made = ExpertRows.of(exchange.wait(), 3)
    exchange.combine(made.rows.add(made.rows.copy(x_TH)))()
    assert waits == []


def test_a_sum_that_takes_rows_of_others_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RowCopies, "_placed", property(lambda self: (self.places.flip(0), self.all_placed)))
    with pytest.raises(AssertionError):
        test_results_of_a_token_are_added()


@given(st.integers(1, 8), st.integers(1, 8), st.integers(1, 4), st.integers(1, 40))
def test_buffers_hold_what_the_bound_says(topk: int, local: int, ep: int, tokens: int) -> None:
    """At balance each rank gets its share of the choices, which is all tokens if each chooses all ranks."""
    topk = min(topk, local * ep)
    for bound in (1.0, 2.0):
        buffers = ExchangeBuffers.of(bound, tokens, topk, local, ep, 1)
        assert buffers.block >= min(tokens, bound * tokens * topk / ep)
        assert buffers.expert_rows >= min(tokens * topk * bound, ep * buffers.block * min(topk, local))


@pytest.mark.parametrize("block", [None, 0])
def test_no_tokens_are_no_rows(block: int | None) -> None:
    """As in the second half of one token."""
    overflowed = None if block is None else torch.zeros((), dtype=torch.bool)
    sent = send_rows(torch.zeros(0, 2, dtype=torch.int64), torch.zeros(0, 2), Ranks(3, 4, 2), block, overflowed)
    assert [tuple(each.shape) for each in sent] == [(0,), (0, 4), (0, 4), (2, 4)]
    assert not sent.counts.any()
    assert not overflowed
