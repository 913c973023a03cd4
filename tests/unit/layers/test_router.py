"""The router against loops over tokens: choices, weights, both losses and their gradients."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.config.model import ModelConfig
from megatron.distributed.grad_accumulator import GradAccumulator
from megatron.layers.context import BuildContext
from megatron.layers.moe import Router, Routing
from tests.solo import one_rank_mesh, random_batch, tiny

LENGTH, SAMPLES, EXPERTS = 6, 3, 5
WIDE = {"num_experts": EXPERTS, "add_bias_linear": False}


def router(**changes: Any) -> tuple[Router, dict[str, Tensor]]:
    """A router in fp64, and where its gradient goes."""
    context = BuildContext(one_rank_mesh(), GradAccumulator(), torch.float64)
    made = Router(tiny(**WIDE | changes), context.submodule("router"))
    gradients = {"router.weight": torch.zeros_like(made.weight)}
    context.grad_accumulator.bind(gradients.__getitem__, lambda name: None)
    return made, gradients


def hidden(seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(LENGTH, SAMPLES, 32, generator=generator, dtype=torch.float64)


def run(made: Router, x_SBH: Tensor) -> Routing:
    routing: Routing = made(x_SBH, random_batch(made.config, SAMPLES, LENGTH))
    return routing


def softmax(numbers: list[Tensor]) -> list[Tensor]:
    total = sum(n.exp() for n in numbers)
    return [n.exp() / total for n in numbers]


def logits_of(weight: Tensor, x_SBH: Tensor, s: int, b: int) -> list[Tensor]:
    return [(weight[e] * x_SBH[s, b]).sum() for e in range(EXPERTS)]


def best(logits: list[Tensor], topk: int) -> list[int]:
    return sorted(range(EXPERTS), key=lambda e: -logits[e].item())[:topk]


@pytest.mark.parametrize("topk", [1, 2, EXPERTS])
@pytest.mark.parametrize("pre_softmax", [False, True])
def test_the_best_are_chosen_and_weighed(topk: int, pre_softmax: bool) -> None:
    made, _ = router(moe_router_topk=topk, moe_router_pre_softmax=pre_softmax)
    x_SBH = hidden()
    experts, weights, losses = run(made, x_SBH)
    for s in range(LENGTH):
        for b in range(SAMPLES):
            logits = logits_of(made.weight, x_SBH, s, b)
            chosen, row = best(logits, topk), s * SAMPLES + b
            assert experts[row].tolist() == chosen
            shares = softmax(logits) if pre_softmax else dict(zip(chosen, softmax([logits[e] for e in chosen])))
            expected = torch.stack([shares[e] for e in chosen])
            torch.testing.assert_close(weights[row], expected, rtol=1e-13, atol=0)
    assert losses.tolist() == [0, 0], "none was asked for"


def losses_by_hand(config: ModelConfig, weight: Tensor, x_SBH: Tensor, mask_BS: Tensor) -> tuple[Tensor, Tensor]:
    """Both losses, times their coefficients, summed over tokens that count, by loops."""
    topk, balance, z = config.moe_router_topk, torch.zeros(()), torch.zeros(())
    together = config.moe_router_load_balancing_type == "aux_loss"
    for part in [range(SAMPLES)] if together else [range(b, b + 1) for b in range(SAMPLES)]:
        places = [(s, b) for b in part for s in range(LENGTH)]
        logits = {place: logits_of(weight, x_SBH, *place) for place in places}
        choices = [e for place in places for e in best(logits[place], topk)]
        of_sequence = torch.zeros((), dtype=torch.float64)
        for e in range(EXPERTS):
            probability = sum(softmax(logits[place])[e] for place in places) / len(places)
            of_sequence = of_sequence + EXPERTS * choices.count(e) / len(choices) * probability
        balance = balance + of_sequence * mask_BS[list(part)].sum()
        for s, b in places:
            z = z + sum(n.exp() for n in logits[s, b]).log() ** 2 * mask_BS[b, s]  # type: ignore[union-attr]
    return config.moe_aux_loss_coeff * balance, (config.moe_z_loss_coeff or 0.0) * z


@pytest.mark.parametrize("kind", ["seq_aux_loss", "aux_loss"])
@pytest.mark.parametrize("topk", [1, 2])
def test_losses_and_gradients_are_those_of_loops(kind: str, topk: int) -> None:
    changes = {"moe_router_load_balancing_type": kind, "moe_router_topk": topk}
    made, gradients = router(moe_aux_loss_coeff=0.3, moe_z_loss_coeff=0.07, **changes)
    x_SBH = hidden().requires_grad_()
    losses = run(made, x_SBH).losses
    weight, x = made.weight.detach().clone().requires_grad_(), hidden().requires_grad_()
    mask_BS = random_batch(made.config, SAMPLES, LENGTH).loss_mask
    expected = torch.stack(losses_by_hand(made.config, weight, x, mask_BS))
    torch.testing.assert_close(losses, expected, rtol=1e-12, atol=0)
    (losses * torch.tensor([1.0, 0.5])).sum().backward()
    (expected * torch.tensor([1.0, 0.5])).sum().backward()
    assert x_SBH.grad is not None
    torch.testing.assert_close(x_SBH.grad, x.grad, rtol=1e-10, atol=1e-13)
    torch.testing.assert_close(gradients["router.weight"], weight.grad, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("kind", ["seq_aux_loss", "aux_loss"])
def test_a_sample_without_labels_has_no_part_in_the_losses(kind: str) -> None:
    """Whatever it holds: it fills up a batch."""
    made, _ = router(moe_aux_loss_coeff=0.3, moe_z_loss_coeff=0.07, moe_router_load_balancing_type=kind)
    batch, found = random_batch(made.config, SAMPLES, LENGTH), []
    for samples in (SAMPLES - 1, SAMPLES):
        mask = batch.loss_mask.clone()
        mask[SAMPLES - 1 :] = 0.0
        cut = replace(batch, tokens=batch.tokens[:samples], loss_mask=mask[:samples])
        losses = made(hidden()[:, :samples], cut).losses
        (gradient,) = torch.autograd.grad(losses.sum(), made.weight)
        found.append((losses, gradient))
    torch.testing.assert_close(found[0], found[1], rtol=1e-12, atol=1e-14)


def test_an_even_choice_costs_the_least() -> None:
    """The mean of the balancing loss is 1 when all experts are as likely and as often chosen, E when one has all."""
    made, _ = router(moe_aux_loss_coeff=1.0, moe_router_topk=1)
    batch = random_batch(made.config, SAMPLES, EXPERTS)
    tokens = batch.loss_mask.sum().item()
    alone = torch.zeros(EXPERTS, SAMPLES, EXPERTS, dtype=torch.float64)
    alone[..., 2] = 100.0
    even = torch.eye(EXPERTS, dtype=torch.float64).mul(1e-9).unsqueeze(1).expand(-1, SAMPLES, -1)
    for logits_SBE, expected in ((alone, EXPERTS), (even, 1.0)):
        chosen = logits_SBE.flatten(0, 1).argmax(1, keepdim=True)
        loss = made._balancing_loss(logits_SBE.softmax(-1), chosen, batch)
        assert loss.item() / tokens == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(
    ("changes", "there"),
    [
        ({"moe_router_load_balancing_type": "none"}, [False, True]),
        ({"moe_z_loss_coeff": None}, [True, False]),
        ({"moe_aux_loss_coeff": 0.0, "moe_z_loss_coeff": 0.0}, [False, False]),
    ],
)
def test_losses_that_are_off_are_zero(changes: dict[str, Any], there: list[bool]) -> None:
    made, _ = router(**{"moe_aux_loss_coeff": 0.3, "moe_z_loss_coeff": 0.07} | changes)
    assert [loss > 0 for loss in run(made, hidden()).losses.tolist()] == there


def test_in_an_evaluation_there_are_no_losses() -> None:
    made, _ = router(moe_aux_loss_coeff=0.3, moe_z_loss_coeff=0.07)
    assert run(made.eval(), hidden()).losses.tolist() == [0, 0]


def test_equal_experts_are_chosen_alike_every_time() -> None:
    made, _ = router(moe_router_topk=3)
    torch.nn.init.zeros_(made.weight)
    first = run(made, hidden())
    assert all(len(set(row)) == 3 for row in first.experts.tolist()), "three different experts each"
    assert (first.experts == first.experts[0]).all()
    torch.testing.assert_close(first.weights, torch.full_like(first.weights, 1 / 3))
    assert torch.equal(run(made, hidden(seed=1)).experts, first.experts)


def test_bf16_tokens_are_judged_in_fp32() -> None:
    context = BuildContext(one_rank_mesh(), GradAccumulator(), torch.bfloat16)
    made = Router(tiny(**WIDE), context.submodule("router"))
    x_SBH = hidden().bfloat16()
    routing = run(made, x_SBH)
    assert routing.weights.dtype == torch.float32
    exact = x_SBH.float() @ made.weight.float().t()
    assert torch.equal(routing.experts, exact.flatten(0, 1).topk(2).indices)


@pytest.mark.parametrize("fault", ["unmasked", "by token", "not scaled"])
def test_a_wrong_balancing_loss_is_noticed(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    original = Router._balancing_loss

    def balance(self: Router, probs_SBE: Tensor, experts_TK: Tensor, batch: Any) -> Tensor:
        if fault == "unmasked":
            batch = replace(batch, loss_mask=torch.ones_like(batch.loss_mask))
        if fault == "by token":
            experts_TK = experts_TK.view(LENGTH, SAMPLES, -1).transpose(0, 1).reshape(experts_TK.shape)
        loss = original(self, probs_SBE, experts_TK, batch)
        return loss / EXPERTS if fault == "not scaled" else loss

    monkeypatch.setattr(Router, "_balancing_loss", balance)
    with pytest.raises(AssertionError):
        test_losses_and_gradients_are_those_of_loops("seq_aux_loss", 2)
