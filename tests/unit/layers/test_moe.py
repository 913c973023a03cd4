"""Router, dispatch and experts against loops."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.config.model import ModelConfig
from megatron.config.training import TrainingConfig
from megatron.distributed.grad_accumulator import GradAccumulator, WgradOperand
from megatron.distributed.micro_batch import MicroBatch
from megatron.layers.context import BuildContext, ForwardContext
from megatron.layers.dispatch import ExpertRows
from megatron.layers.experts import GroupedLinear
from megatron.layers.mixers.registry import MIXERS
from megatron.layers.moe import MixtureOfExperts
from megatron.layers.recompute_plan import RecomputePlan
from megatron.layers.router import Router, Routing
from tests.kit.solo import Gradients, Solo, one_rank_mesh, random_batch, tiny

LENGTH, SAMPLES, EXPERTS = 6, 3, 5
WIDE = {"num_experts": EXPERTS, "add_bias_linear": False}


def router(dtype: torch.dtype = torch.float64, **changes: Any) -> tuple[Router, dict[str, Tensor]]:
    """A router, and where its gradient goes."""
    context = BuildContext(one_rank_mesh(), GradAccumulator(), dtype)
    config = tiny(**WIDE | changes)
    context.declare(MIXERS["experts"].parameters(config, context.sharding))
    made = Router(config, context.submodule("router"))
    gradients = {"router.weight": torch.zeros_like(made.weight)}
    context.grad_accumulator.bind(Gradients(gradients))
    return made, gradients


def hidden(seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(LENGTH, SAMPLES, 32, generator=generator, dtype=torch.float64)


def context_of(batch: MicroBatch) -> ForwardContext:
    return ForwardContext(batch, {}, rows=(range(batch.tokens.shape[1]),))


def run(made: Router, x_SBH: Tensor) -> Routing:
    routing: Routing = made(x_SBH, context_of(random_batch(made.config, SAMPLES, LENGTH)))
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
    experts, weights, losses, _ = run(made, x_SBH)
    for s in range(LENGTH):
        for b in range(SAMPLES):
            logits = logits_of(made.weight, x_SBH, s, b)
            chosen, row = best(logits, topk), s * SAMPLES + b
            assert experts[row].tolist() == chosen
            shares = softmax(logits) if pre_softmax else dict(zip(chosen, softmax([logits[e] for e in chosen])))
            expected = torch.stack([shares[e] for e in chosen])
            torch.testing.assert_close(weights[row], expected, rtol=1e-13, atol=0)
    assert losses == {}, "none was asked for"


def losses_by_hand(config: ModelConfig, weight: Tensor, x_SBH: Tensor, mask_BS: Tensor) -> tuple[Tensor, Tensor]:
    """Both losses, times their coefficients, summed over tokens that count, by loops."""
    topk, balance, z = config.moe_router_topk, torch.zeros(()), torch.zeros(())
    together = config.moe_router_load_balancing_type == ("aux_loss",)
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
    return config.moe_aux_loss_coeff[0] * balance, (config.moe_z_loss_coeff or 0.0) * z


@pytest.mark.parametrize("kind", ["seq_aux_loss", "aux_loss"])
@pytest.mark.parametrize("topk", [1, 2])
def test_losses_and_gradients_match_loops(kind: str, topk: int) -> None:
    changes = {"moe_router_load_balancing_type": (kind,), "moe_router_topk": topk}
    made, gradients = router(moe_aux_loss_coeff=(0.3,), moe_z_loss_coeff=0.07, **changes)
    x_SBH = hidden().requires_grad_()
    losses = torch.stack([*run(made, x_SBH).losses.values()])
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
    made, _ = router(moe_aux_loss_coeff=(0.3,), moe_z_loss_coeff=0.07, moe_router_load_balancing_type=(kind,))
    batch, found = random_batch(made.config, SAMPLES, LENGTH), []
    for samples in (SAMPLES - 1, SAMPLES):
        mask = batch.loss_mask.clone()
        mask[SAMPLES - 1 :] = 0.0
        cut = replace(batch, tokens=batch.tokens[:samples], loss_mask=mask[:samples])
        losses = torch.stack([*made(hidden()[:, :samples], context_of(cut)).losses.values()])
        (gradient,) = torch.autograd.grad(losses.sum(), made.weight)
        found.append((losses, gradient))
    torch.testing.assert_close(found[0], found[1], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    ("changes", "there"),
    [
        ({"moe_router_load_balancing_type": ("none",)}, ["z_loss"]),
        ({"moe_z_loss_coeff": None}, ["seq_load_balancing_loss"]),
        ({"moe_aux_loss_coeff": (0.0,), "moe_z_loss_coeff": 0.0}, []),
    ],
)
def test_losses_that_are_off_are_not_computed(changes: dict[str, Any], there: list[str]) -> None:
    made, _ = router(**{"moe_aux_loss_coeff": (0.3,), "moe_z_loss_coeff": 0.07} | changes)
    assert [name for name, loss in run(made, hidden()).losses.items() if loss > 0] == there


def test_bf16_tokens_are_judged_in_fp32() -> None:
    made, _ = router(torch.bfloat16)
    x_SBH = hidden().bfloat16()
    routing = run(made, x_SBH)
    assert routing.weights.dtype == torch.float32
    exact = x_SBH.float() @ made.weight.float().t()
    assert torch.equal(routing.experts, exact.flatten(0, 1).topk(2).indices)


LOSSES = {"moe_aux_loss_coeff": (0.2,), "moe_z_loss_coeff": 0.05}
MODELS: dict[str, dict[str, Any]] = {
    "two of four": {"num_experts": 4},
    "one of three": {"num_experts": 3, "moe_router_topk": 1, "moe_router_pre_softmax": True},
    "all of three": {"num_experts": 3, "moe_router_topk": 3, "moe_ffn_hidden_size": 7},
    "gated": {"num_experts": 4, "activation": "swiglu", "moe_ffn_hidden_size": 9},
    "gated, shared": {"num_experts": 4, "activation": "swiglu", "moe_shared_expert_intermediate_size": 11},
    "shared, gate": {"num_experts": 3, "moe_shared_expert_intermediate_size": 5, "moe_shared_expert_gate": True},
    "latent": {"num_experts": 4, "moe_latent_size": 6, "moe_ffn_hidden_size": 9},
    "latent, gated, shared": {
        "num_experts": 4,
        "activation": "swiglu",
        "moe_latent_size": 20,
        "moe_shared_expert_intermediate_size": 11,
        "moe_shared_expert_gate": True,
    },
    "many": {"num_experts": 40, "moe_ffn_hidden_size": 3, "activation": "relu2"},  # most have no token
    "losses": {"num_experts": 4, **LOSSES},
}


class Made:
    """A mixture alone, and where its gradients go."""

    def __init__(self, config: ModelConfig, *recomputed: str) -> None:
        self.context = BuildContext(one_rank_mesh(), GradAccumulator(), torch.float64)
        self.context.declare(MIXERS["experts"].parameters(config, self.context.sharding))
        self.module = MixtureOfExperts(config, self.context, 0, RecomputePlan(frozenset(recomputed)))
        self.gradients = {name: torch.zeros_like(p) for name, p in self.context.params.items()}
        target = Gradients(self.gradients)
        self.contributions = target.contributions
        self.context.grad_accumulator.bind(target)

    def run(self, x_SBH: Tensor) -> Tensor:
        batch = random_batch(self.module.config, SAMPLES, LENGTH)
        y: Tensor = self.module(x_SBH, ForwardContext(batch, {})).y
        return y


def config_of(name: str) -> ModelConfig:
    return tiny(add_bias_linear=False, **MODELS[name])


def activated(config: ModelConfig, up: Tensor) -> Tensor:
    if config.gated:
        gate, up = up.chunk(2)
        return F.silu(gate) * up
    return F.relu(up) ** 2 if config.activation == "relu2" else F.gelu(up, approximate="tanh")


def by_hand(config: ModelConfig, w: dict[str, Tensor], x_SBH: Tensor) -> Tensor:
    """Token by token, expert by expert."""
    count = config.num_experts or 0
    ups, downs = w["experts.linear_fc1.weight"].chunk(count), w["experts.linear_fc2.weight"].chunk(count)
    out = []
    for x in x_SBH.flatten(0, 1):
        logits = w["router.weight"] @ x
        chosen = sorted(range(count), key=lambda e: -logits[e].item())[: config.moe_router_topk]
        shares = logits.exp() / (logits.exp().sum() if config.moe_router_pre_softmax else logits[chosen].exp().sum())
        sent = w["fc1_latent_proj.weight"] @ x if config.moe_latent_size else x
        y = torch.zeros_like(sent)
        for e in chosen:
            y = y + shares[e] * (downs[e] @ activated(config, ups[e] @ sent))
        y = w["fc2_latent_proj.weight"] @ y if config.moe_latent_size else y
        if config.moe_shared_expert_intermediate_size:
            up, down = (w[f"shared_experts.linear_fc{i}.weight"] for i in (1, 2))
            gate = 1 / (1 + (-w["shared_experts.gate_weight"][0] @ x).exp()) if config.moe_shared_expert_gate else 1.0
            y = y + gate * (down @ activated(config, up @ x))
        out.append(y)
    return torch.stack(out).view_as(x_SBH)


@pytest.mark.parametrize("drop_activation", [False, True], ids=["kept", "activation dropped"])
@pytest.mark.parametrize("name", MODELS)
def test_output_and_gradients_match_a_loop(name: str, drop_activation: bool) -> None:
    made = Made(config_of(name), *(["activation"] if drop_activation else []))
    weights = {n: p.detach().clone().requires_grad_() for n, p in made.context.params.items()}
    ours, theirs = hidden().requires_grad_(), hidden().requires_grad_()
    y = made.run(ours)  # the gradients of losses are tested with the router
    expected = by_hand(made.module.config, weights, theirs)
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-13)
    dy = hidden(seed=1)
    y.backward(dy)
    expected.backward(dy)
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-11, atol=1e-12)
    assert set(made.contributions) == set(weights), "each contributes, also without tokens"
    for n, weight in weights.items():
        assert weight.grad is not None
        torch.testing.assert_close(made.gradients[n], weight.grad, rtol=1e-11, atol=1e-12, msg=n)


def test_weight_gradients_wait_for_w() -> None:
    now, later = Made(config_of("gated, shared")), Made(config_of("gated, shared"))
    now.run(hidden()).backward(hidden(seed=1))
    with later.context.grad_accumulator.deferring_wgrad(0, 0):
        later.run(hidden()).backward(hidden(seed=1))
    assert set(later.contributions) == {"router.weight"}
    later.context.grad_accumulator.run_deferred(0, 0)
    assert all(torch.equal(later.gradients[n], g) for n, g in now.gradients.items())


# ---- in a model

PLANS: dict[str, dict[str, Any]] = {
    **{
        m: {"recompute_granularity": "selective", "recompute_modules": (m,)} for m in ("layernorm", "activation", "mlp")
    },
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 2},
}


def a_step(training: TrainingConfig) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Loss, losses of routers, gradients."""
    model = tiny(add_bias_linear=False, activation="swiglu", ffn_hidden_size=24, **MODELS["losses"])
    solo = Solo.build(model, training=training)
    loss = solo.backward([random_batch(model, seed=seed) for seed in (1, 2)])
    sums = solo.chunk.sums.pop()
    return loss, torch.stack([sums[name] for name in model.router_losses]), solo.snapshot()


@pytest.mark.parametrize("plan", PLANS)
def test_recomputation_changes_no_bit_and_counts_no_loss_twice(plan: str) -> None:
    loss, routers, grads = a_step(TrainingConfig())
    again, routers_again, grads_again = a_step(TrainingConfig(**PLANS[plan]))
    assert torch.equal(loss, again)
    assert torch.equal(routers, routers_again)
    assert routers.min() > 0
    assert [n for n, g in grads.items() if not torch.equal(g, grads_again[n])] == []


@pytest.mark.parametrize("fault", ["unweighted", "experts swapped", "gradients of others' rows"])
def test_a_fault_is_noticed(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if fault == "unweighted":
        of = ExpertRows.of
        monkeypatch.setattr(
            ExpertRows, "of", lambda *given: replace(made := of(*given), weights=torch.ones_like(made.weights))
        )
    if fault == "experts swapped":
        by_expert = GroupedLinear.by_expert
        monkeypatch.setattr(GroupedLinear, "by_expert", lambda self, weight: by_expert(self, weight).flip(0))
    if fault == "gradients of others' rows":
        original = GradAccumulator.accumulate_wgrad
        monkeypatch.setattr(
            GradAccumulator,
            "accumulate_wgrad",
            lambda self, name, x, dy, *rest: original(self, name, WgradOperand(x.wait().roll(1, 0)), dy, *rest),
        )
    with pytest.raises(AssertionError):
        test_output_and_gradients_match_a_loop("two of four", False)
