"""A mixture of experts against a loop over tokens and their experts, in fp64: outputs and all gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.config.model import ModelConfig
from megatron.config.run import TrainingConfig
from megatron.distributed.grad_accumulator import GradAccumulator
from megatron.layers import moe
from megatron.layers.context import BuildContext
from megatron.layers.moe import MixtureOfExperts
from tests.solo import Solo, one_rank_mesh, random_batch, tiny

LENGTH, SAMPLES = 5, 2
LOSSES = {"moe_aux_loss_coeff": 0.2, "moe_z_loss_coeff": 0.05}
MODELS: dict[str, dict[str, Any]] = {
    "two of four": {"num_experts": 4},
    "one of three": {"num_experts": 3, "moe_router_topk": 1, "moe_router_pre_softmax": True},
    "all of three": {"num_experts": 3, "moe_router_topk": 3, "moe_ffn_hidden_size": 7},
    "gated": {"num_experts": 4, "activation": "swiglu", "moe_ffn_hidden_size": 9},
    "gated, shared": {"num_experts": 4, "activation": "swiglu", "moe_shared_expert_intermediate_size": 11},
    "many": {"num_experts": 40, "moe_ffn_hidden_size": 3, "activation": "relu2"},  # most have no token
    "losses": {"num_experts": 4, **LOSSES},
}


class Made:
    """A mixture alone, and where its gradients go."""

    def __init__(self, config: ModelConfig, drop_activation: bool = False) -> None:
        self.context = BuildContext(one_rank_mesh(), GradAccumulator(), torch.float64)
        self.module = MixtureOfExperts(config, self.context, 0.2, drop_activation)
        self.gradients = {name: torch.zeros_like(p) for name, p in self.context.params.items()}
        self.contributions: list[str] = []
        self.context.grad_accumulator.bind(self.gradients.__getitem__, self.contributions.append)

    def run(self, x_SBH: Tensor) -> tuple[Tensor, Tensor]:
        y, losses = self.module(x_SBH, random_batch(self.module.config, SAMPLES, LENGTH))
        return y, losses


def config_of(name: str) -> ModelConfig:
    return tiny(add_bias_linear=False, **MODELS[name])


def hidden(seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(LENGTH, SAMPLES, 32, generator=generator, dtype=torch.float64)


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
        y = torch.zeros_like(x)
        for e in chosen:
            y = y + shares[e] * (downs[e] @ activated(config, ups[e] @ x))
        if config.moe_shared_expert_intermediate_size:
            up, down = (w[f"shared_experts.linear_fc{i}.weight"] for i in (1, 2))
            y = y + down @ activated(config, up @ x)
        out.append(y)
    return torch.stack(out).view_as(x_SBH)


@pytest.mark.parametrize("drop_activation", [False, True], ids=["kept", "activation dropped"])
@pytest.mark.parametrize("name", MODELS)
def test_output_and_gradients_are_those_of_a_loop(name: str, drop_activation: bool) -> None:
    made = Made(config_of(name), drop_activation)
    weights = {n: p.detach().clone().requires_grad_() for n, p in made.context.params.items()}
    ours, theirs = hidden().requires_grad_(), hidden().requires_grad_()
    y, _ = made.run(ours)  # the gradients of losses are tested with the router
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


def test_experts_without_tokens_have_zero_gradients() -> None:
    made = Made(config_of("many"))
    routing = made.module.router(hidden(), random_batch(made.module.config, SAMPLES, LENGTH))
    chosen = set(routing.experts.flatten().tolist())
    made.run(hidden())[0].sum().backward()
    idle = [e for e, g in enumerate(made.gradients["experts.linear_fc2.weight"].chunk(40)) if not g.any()]
    assert set(idle) >= set(range(40)) - chosen
    assert 10 < len(idle) < 40


def test_all_tokens_at_two_experts() -> None:
    """The router cannot tell experts apart: equal ones are chosen the same for all, and the others stay empty."""
    made = Made(config_of("two of four"))
    torch.nn.init.zeros_(made.module.router.weight)
    x = hidden().requires_grad_()
    routing = made.module.router(x, random_batch(made.module.config, SAMPLES, LENGTH))
    first, second = routing.experts[0].tolist()
    assert (routing.experts == routing.experts[0]).all()
    ups, downs = (made.context.params[f"experts.linear_fc{i}.weight"].chunk(4) for i in (1, 2))
    each = [F.gelu(hidden() @ ups[e].t(), approximate="tanh") @ downs[e].t() for e in (first, second)]
    torch.testing.assert_close(made.run(x)[0], (each[0] + each[1]) / 2, rtol=1e-12, atol=1e-13)


def test_weight_gradients_wait_for_w() -> None:
    now, later = Made(config_of("gated, shared")), Made(config_of("gated, shared"))
    now.run(hidden())[0].backward(hidden(seed=1))
    with later.context.grad_accumulator.deferring_wgrad(0, 0):
        later.run(hidden())[0].backward(hidden(seed=1))
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
    return loss, solo.chunk.sums.pop()["router losses"], solo.snapshot()


@pytest.mark.parametrize("plan", PLANS)
def test_recomputation_changes_no_bit_and_counts_no_loss_twice(plan: str) -> None:
    loss, routers, grads = a_step(TrainingConfig())
    again, routers_again, grads_again = a_step(TrainingConfig(**PLANS[plan]))
    assert torch.equal(loss, again)
    assert torch.equal(routers, routers_again)
    assert routers.min() > 0
    assert [n for n, g in grads.items() if not torch.equal(g, grads_again[n])] == []


def test_equal_runs_are_equal_to_the_bit() -> None:
    (loss, _, grads), (again, _, grads_again) = a_step(TrainingConfig()), a_step(TrainingConfig())
    assert torch.equal(loss, again)
    assert all(torch.equal(g, grads_again[n]) for n, g in grads.items())


def test_losses_of_routers_move_routers() -> None:
    without, with_losses = (
        tiny(add_bias_linear=False, num_experts=4, **changes) for changes in ({}, {"moe_aux_loss_coeff": 5.0})
    )
    batches = [random_batch(without)]
    plain, balanced = Solo.build(without), Solo.build(with_losses)
    assert torch.equal(plain.backward(batches), balanced.backward(batches)), "the reported loss is that of tokens"
    name = "layers.1.mlp.router.weight"
    assert not torch.allclose(plain.buckets.grads[name], balanced.buckets.grads[name], rtol=0.1)


@pytest.mark.parametrize("fault", ["unweighted", "experts swapped", "gradients of others' rows"])
def test_a_fault_is_noticed(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if fault == "unweighted":
        monkeypatch.setattr(torch, "einsum", lambda equation, weights, parts: parts.sum(1))
    if fault == "experts swapped":
        product = moe.GroupedLinear.forward
        monkeypatch.setattr(moe.GroupedLinear, "forward", lambda self, x, rows: product(self, x, rows[::-1]))
    if fault == "gradients of others' rows":
        original = GradAccumulator.accumulate_wgrad
        monkeypatch.setattr(
            GradAccumulator,
            "accumulate_wgrad",
            lambda self, name, x, dy, rows=None: original(self, name, x, dy, _last_as_first(rows)),
        )
    with pytest.raises(AssertionError):
        test_output_and_gradients_are_those_of_a_loop("two of four", False)


def _last_as_first(rows: Any) -> Any:
    """Rows of the last expert counted as the first one's."""
    return None if rows is None else [rows[0] + rows[-1], *rows[1:-1], 0]
