"""Tokens that travel between ranks, against a loop over all tokens in one process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.config.parallel import ParallelConfig
from megatron.distributed.comm import Group
from megatron.distributed.layout import Layout
from megatron.distributed.mesh import Mesh
from megatron.layers.dispatch import BoundedDispatcher, Dispatcher, ExactDispatcher, ExpertRows
from tests.kit.pool import Pool

HIDDEN = 3


@dataclass(frozen=True)
class Travel:
    """Tokens of every rank, and how they travel."""

    choices: str = "random"
    experts: int = 8
    topk: int = 3
    tokens: tuple[int, ...] = (6, 6, 6, 6)
    # None for the exact exchange
    bound: float | None = None
    # EP, expert-TP
    sizes: tuple[int, int] = (4, 1)

    def inputs(self, rank: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return a rank's tokens, their choices and the weights of these."""
        generator, tokens = torch.Generator().manual_seed(rank), self.tokens[rank]
        chosen = torch.stack(
            [torch.randperm(self.experts, generator=generator)[: self.topk] for _ in range(tokens)]
            or [torch.zeros(0, self.topk, dtype=torch.int64)]
        ).view(tokens, self.topk)
        if self.choices == "one":  # the other choices are on the last rank
            chosen = torch.tensor([2, *range(self.experts - self.topk + 1, self.experts)]).expand(tokens, -1)
        elif self.choices == "dropped":
            chosen = chosen.masked_fill(torch.rand(chosen.shape, generator=generator) < 0.4, self.experts)
            chosen[:1] = self.experts
        elif self.choices == "few":  # expert 3 and the last rank have no tokens
            chosen = torch.tensor([0, 2, 1, 4, 5])[: self.topk].expand(tokens, -1)
        x, weights = (torch.randn(tokens, n, generator=generator, dtype=torch.float64) for n in (HIDDEN, self.topk))
        return x.requires_grad_(), chosen, weights.requires_grad_()


def product(expert: int, etp: int, etp_size: int) -> Tensor:
    """Return the part of an expert's matrix that an expert-TP rank has."""
    generator = torch.Generator().manual_seed(1000 + expert)
    whole = torch.randn(HIDDEN, HIDDEN, generator=generator, dtype=torch.float64)
    part = torch.randn(HIDDEN, HIDDEN, generator=generator, dtype=torch.float64)
    return (part if etp else whole - part) if etp_size == 2 else whole


def travel(rank: int, world_size: int, case: Travel) -> tuple[Tensor, Tensor, Tensor, bool, int]:
    """Return the output of this rank's tokens, both gradients, whether buffers overflowed, and rows of experts."""
    ep, etp = case.sizes
    tp = {"tensor_model_parallel_size": etp, "sequence_parallel": True} if etp > 1 else {}
    parallel = ParallelConfig(expert_model_parallel_size=ep, expert_tensor_parallel_size=etp, **tp)  # type: ignore[arg-type]
    mesh = Mesh(Layout.from_config(parallel, world_size), rank)
    arguments = mesh.group("ep", "etp"), etp, case.experts, case.topk
    exchange: Dispatcher = ExactDispatcher(*arguments)
    if case.bound is not None:
        exchange = BoundedDispatcher(*arguments, bound=case.bound)
    x_TH, experts_TK, weights_TK = case.inputs(rank)
    sent = exchange.dispatch(x_TH, experts_TK, weights_TK, case.choices == "dropped")
    tokens = sent.wait()
    rows = ExpertRows.of(tokens, exchange.local)
    x_RH = rows.rows.copy(tokens.x)
    first, here = mesh.coordinate["ep"] * exchange.local, mesh.coordinate["etp"]
    ends = [0, *rows.offsets.tolist()]
    parts = [x_RH[s:e] @ product(first + i, here, etp) for i, (s, e) in enumerate(zip(ends, ends[1:]))]
    padding = torch.full_like(x_RH[ends[-1] :], torch.nan)
    y_RH = torch.cat([*parts, padding]) * rows.weights(tokens.weights).unsqueeze(1)
    y_TH = sent.combine(rows.rows.add(y_RH))()
    y_TH.backward(torch.full_like(y_TH, 1.0 + rank))
    assert x_TH.grad is not None
    assert weights_TK.grad is not None
    overflowed = tokens.overflowed is not None and bool(tokens.overflowed)
    return y_TH.detach(), x_TH.grad, weights_TK.grad, overflowed, len(x_RH)


def by_hand(case: Travel, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """Token by token, choice by choice."""
    x_TH, experts_TK, weights_TK = case.inputs(rank)
    y = x_TH * 0.0
    for t, chosen in enumerate(experts_TK.tolist()):
        for k, expert in enumerate(chosen):
            if expert < case.experts:
                one_hot = torch.eye(len(x_TH), dtype=torch.float64)[:, t : t + 1]
                y = y + one_hot * weights_TK[t, k] * (x_TH[t] @ product(expert, 0, 1))
    grads = torch.autograd.grad(y, [x_TH, weights_TK], torch.full_like(y, 1.0 + rank), allow_unused=True)
    dx, dw = (torch.zeros_like(t) if g is None else g for t, g in zip((x_TH, weights_TK), grads))
    return y.detach(), dx, dw


UNEVEN = (6, 0, 1, 9)
CASES = {
    **{f"exact, {choices}": Travel(choices) for choices in ("random", "one", "dropped", "few")},
    "exact, uneven": Travel(tokens=UNEVEN),
    "exact, uneven, dropped": Travel("dropped", tokens=UNEVEN),
    "exact, more choices than experts of a rank": Travel(topk=5),
    "exact, all experts": Travel(experts=4, topk=4),
    "exact, expert-TP 2": Travel(sizes=(2, 2)),
    "exact, expert-TP 2, dropped": Travel("dropped", sizes=(2, 2), tokens=UNEVEN),
    "exact, expert-TP 2 alone": Travel(sizes=(1, 2)),
    **{f"whole, {choices}": Travel(choices, bound=4.0) for choices in ("random", "one", "dropped", "few")},
    "bounded, more choices than experts of a rank": Travel(topk=5, bound=2.5),
    "bounded, expert-TP 2": Travel(sizes=(2, 2), bound=1.9),
    "bounded, expert-TP 2, dropped": Travel("dropped", sizes=(2, 2), bound=1.9),
    "bounded, expert-TP 2 alone": Travel(sizes=(1, 2), bound=1.0),
}
NO_ROOM = {
    "no room in a block": Travel("one", topk=1, bound=2.0),
    "no room for rows": Travel("few", topk=2, experts=8, bound=1.5),
}


def all_travels(rank: int, world_size: int, cases: dict[str, Travel]) -> dict[str, Any]:
    return {name: travel(rank, world_size, case) for name, case in cases.items()}


def test_tokens_reach_their_experts_and_results_return(pool: Pool) -> None:
    ranks = pool.run(4, all_travels, CASES)
    for name, case in CASES.items():
        for rank, found in enumerate(ranks):
            y, dx, dw, overflowed, _ = found[name]
            assert not overflowed, name
            torch.testing.assert_close((y, dx, dw), by_hand(case, rank), rtol=1e-12, atol=1e-12, msg=name)


def test_an_overflow_makes_results_nan(pool: Pool) -> None:
    """On some rank of each group: so the loss, a sum over all, is not a number."""
    ranks = pool.run(4, all_travels, NO_ROOM)
    for name in NO_ROOM:
        assert any(found[name][3] for found in ranks), name
        assert any(found[name][0].isnan().any() for found in ranks), name


def test_a_bound_that_is_just_enough_is_enough(pool: Pool) -> None:
    """All tokens choose both experts of the first of four ranks."""
    tokens = 8
    just, less = (Travel("few", topk=1, tokens=(tokens,) * 4, bound=b) for b in (4.0, 3.8))
    ranks = pool.run(4, all_travels, {"just": just, "less": less})
    for rank, found in enumerate(ranks):
        assert not found["just"][3]
        torch.testing.assert_close(found["just"][:3], by_hand(just, rank), rtol=1e-12, atol=1e-12)
    assert any(found["less"][3] for found in ranks)
    assert ranks[0]["just"][4] == 4 * tokens


@pytest.mark.parametrize(("experts", "topk", "ep"), [(8, 3, 4), (16, 8, 2), (8, 1, 8)])
def test_blocks_hold_what_a_popular_rank_gets(experts: int, topk: int, ep: int) -> None:
    """With bound 1 the mean number of rows of independent choices; with bound EP all tokens."""
    group = Group(tuple(range(ep)))
    generator = torch.Generator().manual_seed(0)
    chosen = torch.randint(ep, (20_000, topk), generator=generator)
    one, all_of_them = (BoundedDispatcher(group, 1, experts, topk, bound=b) for b in (1.0, float(ep)))
    assert one.buffers(20_000).block == pytest.approx((chosen == 0).any(1).sum().item(), rel=0.03)
    assert one.buffers(600).expert_rows == 600 * topk
    assert all_of_them.buffers(600).block == 600
    assert all_of_them.buffers(600).expert_rows == ep * 600 * min(topk, experts // ep)
