"""Rows on their way to experts: nothing is lost, each is where a loop puts it, and backward brings it back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron.distributed.comm import Group
from megatron.layers import moe
from megatron.layers.moe import DispatchPlan, Permutation

QUICK = settings(max_examples=60, derandomize=True, deadline=None)


def rows(count: int, width: int = 3, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, width, generator=generator, dtype=torch.float64)


@st.composite
def choices(draw: st.DrawFn) -> tuple[Tensor, int]:
    """Experts of some tokens, each token's all different; and how many experts there are."""
    experts, tokens = draw(st.integers(1, 6)), draw(st.integers(1, 9))
    topk = draw(st.integers(1, experts))
    busy = draw(st.lists(st.permutations(range(experts)), min_size=tokens, max_size=tokens))
    return torch.tensor([list(order[:topk]) for order in busy]), experts


@QUICK
@given(st.lists(st.integers(0, 4), max_size=30))
def test_sorting_keeps_the_order_of_equal_keys(keys: list[int]) -> None:
    permutation = Permutation.sorting(torch.tensor(keys, dtype=torch.int64))
    assert permutation.order.tolist() == sorted(range(len(keys)), key=lambda i: keys[i])
    x = rows(len(keys))
    assert torch.equal(permutation.undo(permutation(x)), x)
    assert torch.equal(permutation(permutation.undo(x)), x)


@QUICK
@given(st.permutations(range(7)))
def test_each_way_is_the_adjoint_of_the_other(keys: list[int]) -> None:
    permutation = Permutation.sorting(torch.tensor(keys))
    matrix = torch.eye(7, dtype=torch.float64)[permutation.order]
    for way, linear in ((permutation, matrix), (permutation.undo, matrix.t())):
        x = rows(7).requires_grad_()
        y, dy = way(x), rows(7, seed=1)
        assert torch.equal(y, linear @ x)
        y.backward(dy)
        assert x.grad is not None
        assert torch.equal(x.grad, linear.t() @ dy)


@QUICK
@given(choices())
def test_every_token_is_at_each_of_its_experts_once(chosen: tuple[Tensor, int]) -> None:
    experts_TK, experts = chosen
    tokens, topk = experts_TK.shape
    route = DispatchPlan.plan(experts_TK, experts, 1, Group())
    x_TH = rows(tokens)
    expected = [(e, t) for e in range(experts) for t in range(tokens) if e in experts_TK[t]]
    assert route.counts == tuple(sum(e == at for at, _ in expected) for e in range(experts))
    assert sum(route.counts) == tokens * topk, "one is lost"
    assert torch.equal(route.dispatch(x_TH), x_TH[[t for _, t in expected]])


@QUICK
@given(choices())
def test_results_come_back_to_their_token_in_the_order_of_its_choices(chosen: tuple[Tensor, int]) -> None:
    experts_TK, experts = chosen
    route = DispatchPlan.plan(experts_TK, experts, 1, Group())
    factors = torch.arange(1.0, experts + 1, dtype=torch.float64)
    x_TH = rows(len(experts_TK)).requires_grad_()
    y_RH = route.dispatch(x_TH) * factors.repeat_interleave(torch.tensor(route.counts)).unsqueeze(1)
    parts_TCH = route.combine(y_RH, len(experts_TK))
    assert torch.equal(parts_TCH, x_TH.unsqueeze(1) * factors[experts_TK].unsqueeze(-1))
    dy = torch.randn(parts_TCH.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    parts_TCH.backward(dy)
    torch.testing.assert_close(x_TH.grad, (dy * factors[experts_TK].unsqueeze(-1)).sum(1), rtol=1e-14, atol=1e-14)


def test_no_tokens_are_no_rows() -> None:
    route = DispatchPlan.plan(torch.empty(0, 2, dtype=torch.int64), 3, 1, Group())
    assert route.counts == (0, 0, 0)
    assert not route.by_target.order.numel()


def test_the_host_waits_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """For all counts together; ``bincount`` would look for the largest number first."""
    waits: list[str] = []
    for holder, name in ((Tensor, "tolist"), (Tensor, "item"), (Tensor, "__bool__"), (torch, "bincount")):
        original = getattr(holder, name)

        def noted(*given: Any, name: str = name, original: Any = original, **named: Any) -> Any:
            waits.append(name)
            return original(*given, **named)

        monkeypatch.setattr(holder, name, noted)
    DispatchPlan.plan(torch.tensor([[0, 2], [1, 2]]), 3, 1, Group())
    assert waits == ["tolist"]


def test_a_backward_by_the_wrong_order_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(ctx: Any, x: Tensor, order: Tensor, place: Tensor) -> Tensor:
        ctx.save_for_backward(order)
        return x[order]

    monkeypatch.setattr(moe._Permute, "forward", staticmethod(forward))
    with pytest.raises(AssertionError):
        test_each_way_is_the_adjoint_of_the_other()
