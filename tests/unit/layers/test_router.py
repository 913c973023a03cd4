"""Routers of every kind against loops over tokens: choices, weights, losses, gradients, loads."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.config.model import ModelConfig
from megatron.distributed.grad_accumulator import GradAccumulator
from megatron.distributed.micro_batch import MicroBatch
from megatron.layers.context import BuildContext, ForwardContext
from megatron.layers.mixers.registry import MIXERS
from megatron.layers.router import Router, Routing
from tests.kit.solo import Gradients, one_rank_mesh, random_batch, tiny

LENGTH, SAMPLES, EXPERTS, HIDDEN = 5, 3, 8, 32
SIGMOID: dict[str, Any] = {"moe_router_score_function": "sigmoid"}
BIASED: dict[str, Any] = SIGMOID | {"moe_router_enable_expert_bias": True}
IN_GROUPS: dict[str, Any] = {"moe_router_num_groups": 4, "moe_router_group_topk": 2}


def router(dtype: torch.dtype = torch.float64, **changes: Any) -> tuple[Router, Tensor]:
    """A router with biases that change choices, and where the gradient of its weight goes."""
    context = BuildContext(one_rank_mesh(), GradAccumulator(), dtype)
    config = tiny(num_experts=EXPERTS, add_bias_linear=False, **changes)
    context.declare(MIXERS["experts"].parameters(config, context.sharding))
    made = Router(config, context.submodule("router"))
    if made.expert_bias is not None:
        made.expert_bias.data.uniform_(-0.3, 0.3, generator=torch.Generator().manual_seed(5))
    gradients = {"router.weight": torch.zeros_like(made.weight)}
    context.grad_accumulator.bind(Gradients(gradients))
    return made, gradients["router.weight"]


def hidden(seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(LENGTH, SAMPLES, HIDDEN, generator=generator, dtype=torch.float64).to(dtype)


def batch_of(config: ModelConfig, padded: bool = False) -> MicroBatch:
    """Samples, the last of which has no label if it pads the batch."""
    batch = random_batch(config, SAMPLES, LENGTH)
    if padded:
        batch.loss_mask[-1] = 0.0
    return batch


def run(made: Router, x_SBH: Tensor, batch: MicroBatch) -> Routing:
    routing: Routing = made(x_SBH, ForwardContext(batch, {}, rows=(range(x_SBH.shape[0]),)))
    return routing


# ---- by hand


def scores_by_hand(function: str, logits: Sequence[Tensor]) -> list[Tensor]:
    if function == "softmax":
        total = sum(logit.exp() for logit in logits)
        return [logit.exp() / total for logit in logits]
    if function == "sigmoid":
        return [1 / (1 + (-logit).exp()) for logit in logits]
    return [(1 + logit.exp()).log().sqrt() for logit in logits]


def best(keys: Sequence[float], topk: int) -> list[int]:
    return sorted(range(len(keys)), key=lambda e: -keys[e])[:topk]


def choice_by_hand(config: ModelConfig, logits: Sequence[Tensor], bias: Sequence[float]) -> list[int]:
    function, topk = config.moe_router_score_function, config.moe_router_topk
    scores = [score.item() for score in scores_by_hand(function, logits)]
    keys = [score + b for score, b in zip(scores, bias)]
    if function == "softmax" and not config.moe_router_pre_softmax:
        keys = [logit.item() for logit in logits]
    groups, chosen = config.moe_router_num_groups or 1, config.moe_router_group_topk or 1
    size = EXPERTS // groups
    several = config.moe_router_group_score_topk or topk // chosen
    sums = [sum(sorted(keys[g * size : (g + 1) * size])[-several:]) for g in range(groups)]
    allowed = [e for g in best(sums, chosen) for e in range(g * size, (g + 1) * size)]
    return [e for e in best(keys, EXPERTS) if e in allowed][:topk]


def weights_by_hand(config: ModelConfig, logits: Sequence[Tensor], chosen: Sequence[int]) -> list[Tensor]:
    function = config.moe_router_score_function
    scores = scores_by_hand(function, logits)
    if function == "softmax" and not config.moe_router_pre_softmax:
        scores = dict(zip(chosen, scores_by_hand("softmax", [logits[e] for e in chosen])))  # type: ignore[assignment]
    weights = [scores[e] for e in chosen]
    if function != "softmax" and len(chosen) > 1:
        weights = [weight / sum(weights) for weight in weights]
    return [weight * (config.moe_router_topk_scaling_factor or 1.0) for weight in weights]


def logits_of(weight: Tensor, x_SBH: Tensor, s: int, b: int) -> list[Tensor]:
    return [(weight[e] * x_SBH[s, b]).sum() for e in range(EXPERTS)]


SCORES: dict[str, dict[str, Any]] = {
    "softmax": {},
    "pre-softmax": {"moe_router_pre_softmax": True},
    "sigmoid": SIGMOID,
    "biased sigmoid": BIASED,
    "biased sqrtsoftplus": BIASED | {"moe_router_score_function": "sqrtsoftplus"},
}
ONE_GROUP = {"moe_router_num_groups": 2, "moe_router_group_topk": 1}
GROUPS = {
    "no groups": {},
    "2 of 4 groups": IN_GROUPS,
    "1 of 2 groups": ONE_GROUP,
    "2 of 4 groups by their best": IN_GROUPS | {"moe_router_group_score_topk": 1},
}
CHOICES = {
    f"{scores}, {topk} of {EXPERTS}, {groups}": changes | of_groups | {"moe_router_topk": topk}
    for (scores, changes), topk, (groups, of_groups) in product(SCORES.items(), (1, 2, 4), GROUPS.items())
    if topk >= of_groups.get("moe_router_group_topk", 1)
}


@pytest.mark.parametrize("name", CHOICES)
def test_choices_weights_and_gradients_equal_loops_over_tokens(name: str) -> None:
    factor = None if CHOICES[name]["moe_router_topk"] == 2 else 2.5
    made, gradient = router(moe_router_topk_scaling_factor=factor, **CHOICES[name])
    config, x_SBH = made.config, hidden().requires_grad_()
    routing = run(made, x_SBH, batch_of(config))
    weight, x = made.weight.detach().clone().requires_grad_(), hidden().requires_grad_()
    bias = [0.0] * EXPERTS if made.expert_bias is None else made.expert_bias.tolist()
    factors, total = torch.arange(1.0, config.moe_router_topk + 1, dtype=torch.float64), torch.zeros(())
    for s, b in product(range(LENGTH), range(SAMPLES)):
        logits, row = logits_of(weight, x, s, b), s * SAMPLES + b
        chosen = choice_by_hand(config, logits, bias)
        assert routing.experts[row].tolist() == chosen
        expected = torch.stack(weights_by_hand(config, logits, chosen))
        torch.testing.assert_close(routing.weights[row], expected, rtol=1e-12, atol=0)
        total = total + (expected * factors).sum() * (row + 1)
    rows = torch.arange(1.0, LENGTH * SAMPLES + 1, dtype=torch.float64)
    ((routing.weights * factors).sum(1) * rows).sum().backward()
    total.backward()
    torch.testing.assert_close(x_SBH.grad, x.grad, rtol=1e-10, atol=1e-13)
    torch.testing.assert_close(gradient, weight.grad, rtol=1e-10, atol=1e-13)
    assert made.expert_bias is None or not made.expert_bias.requires_grad


def test_a_bias_changes_choices() -> None:
    made, _ = router(**BIASED)
    batch = batch_of(made.config)
    biased = run(made, hidden(), batch)
    assert made.expert_bias is not None
    made.expert_bias.data.zero_()
    assert not torch.equal(biased.experts, run(made, hidden(), batch).experts)


# ---- losses

KINDS = ("seq_aux_loss", "aux_loss", "global_aux_loss")
BEFORE = torch.tensor([3, 0, 1, 4, 4, 7, 0, 5])


def losses_by_hand(config: ModelConfig, weight: Tensor, x_SBH: Tensor, mask_BS: Tensor) -> dict[str, Tensor]:
    """Each balancing loss summed over tokens that count, without its coefficient."""
    topk, function = config.moe_router_topk, config.moe_router_score_function
    samples = [b for b in range(SAMPLES) if mask_BS[b].sum() > 0]
    probs, choices = {}, {}
    for s, b in product(range(LENGTH), samples):
        scores = scores_by_hand(function, logits_of(weight, x_SBH, s, b))
        probs[s, b] = [score / sum(scores) for score in scores]
        choices[s, b] = best([score.item() for score in scores], topk)
    totals = dict.fromkeys(KINDS, torch.zeros((), dtype=torch.float64))
    for kind, parts in (("seq_aux_loss", [[b] for b in samples]), ("aux_loss", [samples]), ("global_aux_loss", None)):
        for part in parts or [[b] for b in samples]:
            places = [(s, b) for s in range(LENGTH) for b in part]
            chosen = [e for place in places for e in choices[place]]
            for e in range(EXPERTS):
                share = chosen.count(e) / len(chosen) if parts else BEFORE[e].item() / BEFORE.sum().item()
                mean = sum(probs[place][e] for place in places) / len(places)
                totals[kind] = totals[kind] + EXPERTS * share * mean * mask_BS[part].sum()
    return totals


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("changes", [{}, SIGMOID, BIASED | IN_GROUPS, {"moe_router_score_function": "sqrtsoftplus"}])
def test_several_losses_and_their_gradients_equal_loops(changes: dict[str, Any], padded: bool) -> None:
    coefficients = (0.3, 0.02, 0.7)
    made, gradient = router(moe_router_load_balancing_type=KINDS, moe_aux_loss_coeff=coefficients, **changes)
    made.loads.before.copy_(BEFORE)
    batch = batch_of(made.config, padded)
    losses = run(made, x_SBH := hidden().requires_grad_(), batch).losses
    weight, x = made.weight.detach().clone().requires_grad_(), hidden().requires_grad_()
    expected = losses_by_hand(made.config, weight, x, batch.loss_mask)
    named = {"seq_load_balancing_loss": 0, "load_balancing_loss": 1, "global_load_balancing_loss": 2}
    assert [*losses] == [*named]
    total = torch.zeros(())
    for name, kind in zip(named, KINDS):
        loss = coefficients[named[name]] * expected[kind]
        torch.testing.assert_close(losses[name], loss, rtol=1e-12, atol=0)
        total = total + loss * (1 + named[name])
    sum(loss * (1 + n) for n, loss in enumerate(losses.values())).backward()  # type: ignore[union-attr]
    total.backward()
    torch.testing.assert_close(x_SBH.grad, x.grad, rtol=1e-10, atol=1e-13)
    torch.testing.assert_close(gradient, weight.grad, rtol=1e-10, atol=1e-13)


def test_the_global_loss_begins_without_loads() -> None:
    made, gradient = router(moe_router_load_balancing_type=("global_aux_loss",), moe_aux_loss_coeff=(1.0,))
    batch = batch_of(made.config)
    (loss,) = run(made, hidden(), batch).losses.values()
    assert loss.item() == pytest.approx(batch.loss_mask.sum().item(), rel=1e-12), "as if all loads were equal"
    loss.backward()
    assert gradient.abs().max() < 1e-12


# ---- Sinkhorn


def sinkhorn_by_hand(logits_TE: Tensor) -> Tensor:
    """The normalisation as a loop until it has converged, over the tokens of one sequence."""
    cost, experts = logits_TE.exp(), torch.ones(EXPERTS, dtype=torch.float64)
    change = 1.0
    while change > 1e-13:
        tokens = 1 / len(cost) / (cost * experts).sum(1)
        new = 1 / EXPERTS / (cost * tokens.unsqueeze(1)).sum(0)
        change, experts = ((new - experts).abs() / new).max().item(), new
    return cost * experts


@pytest.mark.parametrize("topk", [1, 2])
def test_sinkhorn_balances_each_sequence(topk: int) -> None:
    kind = {"moe_router_load_balancing_type": ("sinkhorn",), "moe_router_topk_scaling_factor": 2.5}  # has no effect
    made, gradient = router(**kind, moe_router_topk=topk)
    made.weight.data[0] += 0.3  # so that some experts are far from balance
    routing = run(made, x_SBH := hidden().requires_grad_(), batch_of(made.config))
    weight, x = made.weight.detach().clone().requires_grad_(), hidden().requires_grad_()
    logits_SBE = x @ weight.t()
    shares_SBE = logits_SBE.sigmoid() if topk == 1 else logits_SBE.exp() / logits_SBE.exp().sum(-1, keepdim=True)
    total, moved = torch.zeros(()), 0
    for b in range(SAMPLES):
        balanced_SE = sinkhorn_by_hand(logits_SBE[:, b].detach())
        for s in range(LENGTH):
            row, chosen = s * SAMPLES + b, best(balanced_SE[s].tolist(), topk)
            assert routing.experts[row].tolist() == chosen
            torch.testing.assert_close(routing.weights[row], shares_SBE[s, b, chosen], rtol=1e-12, atol=0)
            moved += chosen != best(logits_SBE[s, b].tolist(), topk)
            total = total + shares_SBE[s, b, chosen].sum() * (row + 1)
    assert moved, "the case is balanced anyway"
    (routing.weights.sum(1) * torch.arange(1.0, LENGTH * SAMPLES + 1, dtype=torch.float64)).sum().backward()
    total.backward()
    torch.testing.assert_close(x_SBH.grad, x.grad, rtol=1e-10, atol=1e-13)
    torch.testing.assert_close(gradient, weight.grad, rtol=1e-10, atol=1e-13)


def test_sinkhorn_is_for_training_only() -> None:
    made, _ = router(moe_router_load_balancing_type=("sinkhorn",))
    made.weight.data[0] += 0.3
    made.eval()
    chosen = run(made, hidden(), batch_of(made.config)).experts
    assert torch.equal(chosen, (hidden() @ made.weight.t()).flatten(0, 1).topk(2).indices)


# ---- capacity


@pytest.mark.parametrize("changes", [{}, BIASED | IN_GROUPS, {"moe_router_topk": 1}])
@pytest.mark.parametrize("policy", ["probs", "position"])
@pytest.mark.parametrize("factor", [0.5, 1.0, 1.3])
def test_choices_beyond_the_capacity_are_dropped(policy: str, factor: float, changes: dict[str, Any]) -> None:
    capacity = {"moe_expert_capacity_factor": factor, "moe_token_drop_policy": policy}
    made, _ = router(**changes, **capacity)
    whole, _ = router(**changes)
    batch = batch_of(made.config)
    routing, free = run(made, hidden(), batch), run(whole, hidden(), batch)
    assert routing.kept is not None
    assert free.kept is None
    assert torch.equal(routing.experts, free.experts), "the choice does not know the capacity"
    tokens, topk = free.experts.shape
    room = math.ceil(tokens * topk * factor / EXPERTS)
    dropped = 0
    for e in range(EXPERTS):
        choices = [(t, k) for t in range(tokens) for k in range(topk) if free.experts[t, k] == e]
        if policy == "probs":  # Python's sort is stable: of equal weights the first stay
            choices.sort(key=lambda place: -free.weights[place].item())
        for n, place in enumerate(choices):
            assert routing.kept[place].item() == (n < room)
            assert routing.weights[place] == (free.weights[place] if n < room else 0.0)
            dropped += n >= room
    assert dropped == made.loads.dropped.item() > 0
    assert torch.equal(made.loads.chosen, whole.loads.chosen), "loads are those of the choices"


# ---- forced balance, dtype, loads


def test_forced_balance_is_a_function_of_sample_and_position() -> None:
    made, gradient = router(moe_router_force_load_balancing=True)
    batch = batch_of(made.config)
    whole = run(made, hidden(), batch)
    other = run(made, hidden(1), batch)
    assert torch.equal(whole.experts, other.experts), "the tokens decide"
    assert torch.equal(whole.weights, other.weights)
    assert not torch.equal(whole.experts, run(made, hidden(), replace(batch, step=1)).experts)
    for rows, samples in ((range(2, LENGTH), [2, 0]), (range(1), [1])):
        part = replace(batch, sample_ids=batch.sample_ids[samples], tokens=batch.tokens[samples])
        part = replace(part, loss_mask=batch.loss_mask[samples])
        ctx = ForwardContext(part, {}, rows=(rows,))
        routing = made(hidden()[rows.start : rows.stop, samples], ctx)
        expected = whole.experts.view(LENGTH, SAMPLES, -1)[rows.start : rows.stop, samples].flatten(0, 1)
        assert torch.equal(routing.experts, expected)
    (whole.weights * torch.tensor([1.0, -1.0])).sum().backward()
    assert gradient.abs().sum() > 0, "benchmarks have a whole backward pass"


def test_forced_balance_is_balanced() -> None:
    made, _ = router(moe_router_force_load_balancing=True)
    batch = random_batch(tiny(), 16, 64)
    chosen = run(made, torch.zeros(64, 16, HIDDEN, dtype=torch.float64), batch).experts
    shares = chosen.flatten().bincount(minlength=EXPERTS) / chosen.numel() * EXPERTS
    assert 0.8 < shares.min() < shares.max() < 1.2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_router_in_fp64_leaves_no_choice_to_rounding(dtype: torch.dtype) -> None:
    made, _ = router(dtype, moe_router_dtype="fp64", **BIASED)
    x_SBH = hidden(dtype=dtype)
    routing = run(made, x_SBH, batch_of(made.config))
    assert made.expert_bias is not None
    assert made.expert_bias.dtype == torch.float32
    scores = (x_SBH.double() @ made.weight.double().t()).sigmoid() + made.expert_bias.double()
    assert torch.equal(routing.experts, scores.flatten(0, 1).topk(2).indices)
    assert routing.weights.dtype == torch.float32


def test_loads_are_the_choices_of_real_samples() -> None:
    made, _ = router(moe_router_load_balancing_type=("global_aux_loss",), moe_aux_loss_coeff=(1.0,), **BIASED)
    batch = batch_of(made.config, padded=True)
    chosen = run(made, hidden(), batch).experts.view(LENGTH, SAMPLES, -1)[:, :-1]
    assert made.loads.chosen.tolist() == chosen.flatten().bincount(minlength=EXPERTS).tolist()
    alone = (hidden()[:, :-1] @ made.weight.t()).topk(2).indices
    assert made.loads.best is not None
    assert made.loads.best.tolist() == alone.flatten().bincount(minlength=EXPERTS).tolist()
    made.eval()
    run(made, hidden(), batch)
    assert made.loads.chosen.sum() == chosen.numel(), "an evaluation does not count"
