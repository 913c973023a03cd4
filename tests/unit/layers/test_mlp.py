"""The MLP in chunks: the results of the whole, one chunk's activations at a time, one contribution per weight."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor

from megatron.config.model import GATED_ACTIVATIONS, ModelConfig
from megatron.config.training import TrainingConfig
from megatron.distributed.grad_accumulator import GradAccumulator
from megatron.kernels.activation import activation
from megatron.layers.context import BuildContext, ForwardContext
from megatron.layers.mixers.registry import MIXERS
from megatron.layers.mlp import MLP
from megatron.layers.recompute_plan import RecomputePlan
from tests.kit.solo import Allocations, Gradients, Solo, one_rank_mesh, random_batch, tiny

ROWS, SAMPLES = 48, 2
GPT = tiny(hidden_dropout=0.1, max_position_embeddings=ROWS)
MODELS = {
    "gpt": GPT,
    "llama": replace(GPT, activation="swiglu", normalization="RMSNorm", add_bias_linear=False),
    "shared expert": replace(
        GPT,
        add_bias_linear=False,
        num_experts=4,
        moe_ffn_hidden_size=24,
        moe_router_topk=2,
        moe_shared_expert_intermediate_size=40,
    ),
}


def step(model: str, training: TrainingConfig) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients of two micro-batches."""
    solo = Solo.build(MODELS[model], training=training)
    loss = solo.backward([random_batch(MODELS[model], SAMPLES, ROWS, seed=seed) for seed in (1, 2)])
    return loss, solo.snapshot()


@cache
def whole(model: str) -> tuple[Tensor, dict[str, Tensor]]:
    return step(model, TrainingConfig())


RECOMPUTED = {
    "nothing": TrainingConfig(),
    "norms": TrainingConfig(recompute_granularity="selective", recompute_modules=("layernorm",)),
    "mlp": TrainingConfig(recompute_granularity="selective", recompute_modules=("mlp", "activation")),
    "blocks": TrainingConfig(recompute_granularity="full", recompute_num_layers=2),
}


@pytest.mark.parametrize(("limit", "offset"), [(None, 0.0), (None, 1.0), (1.5, 0.0), (0.7, -0.3)])
@pytest.mark.parametrize("name", GATED_ACTIVATIONS)
def test_gates_limits_and_offsets(name: str, limit: float | None, offset: float) -> None:
    """Element by element; with a limit gradients are zero beyond it."""
    x = (2 * torch.randn(9, 16, dtype=torch.float64)).requires_grad_()
    y = activation(x, None, name, limit, offset)
    largest = math.inf if limit is None else limit
    for row in range(9):
        for i in range(8):
            g, up = min(x[row, i].item(), largest), max(-largest, min(x[row, i + 8].item(), largest))
            normal = 0.5 * (1 + math.erf(g / math.sqrt(2)))
            by_tanh = 0.5 * (1 + math.tanh(math.sqrt(2 / math.pi) * (g + 0.044715 * g**3)))
            shares = {"geglu": normal, "geglu_tanh": by_tanh}
            share = shares.get(name, 1 / (1 + math.exp(-(1.702 if name == "quick_geglu" else 1.0) * g)))
            assert y[row, i].item() == pytest.approx(g * share * (up + offset), rel=1e-12)
    (dx,) = torch.autograd.grad(y.sum(), x)
    gate, up = x.detach().chunk(2, 1)
    beyond = torch.cat((gate > largest, up.abs() > largest), 1)
    assert not dx[beyond].any()
    assert dx[~beyond].all()


@pytest.mark.parametrize("recomputed", RECOMPUTED)
@pytest.mark.parametrize(
    ("model", "size"), [("gpt", 1), ("gpt", 20), ("gpt", ROWS), ("llama", 20), ("shared expert", 9)]
)
def test_equals_the_whole(model: str, size: int, recomputed: str) -> None:
    loss, grads = step(model, replace(RECOMPUTED[recomputed], mlp_chunk_size=size))
    expected, expected_grads = whole(model)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0.0)
    for name, grad in expected_grads.items():
        assert (grads[name] - grad).norm() <= 1e-12 * grad.norm(), name


class Made:
    """An MLP alone, and where its gradients go."""

    def __init__(self, config: ModelConfig, chunk_size: int | None) -> None:
        context = BuildContext(one_rank_mesh(), GradAccumulator(), torch.float64)
        context.declare(MIXERS["mlp"].parameters(config, context.sharding))
        self.grad_accumulator = context.grad_accumulator
        self.mlp = MLP(config, context, 0, RecomputePlan(mlp_chunk_size=chunk_size))
        gradients = Gradients({name: torch.zeros_like(p) for name, p in context.params.items()})
        self.contributions = gradients.contributions
        self.grad_accumulator.bind(gradients)
        self.x = torch.randn(ROWS, SAMPLES, config.hidden_size, dtype=torch.float64, requires_grad=True)


def test_chunks_are_one_contribution_and_nothing_waits_for_w() -> None:
    made = Made(MODELS["gpt"], 5)
    y, _, _ = made.mlp(made.x, ForwardContext(random_batch(GPT), {}))
    with made.grad_accumulator.deferring_wgrad(0, 0):
        y.sum().backward()
        assert made.grad_accumulator.defers_wgrad
    assert sorted(made.contributions) == ["linear_fc1.bias", "linear_fc1.weight", "linear_fc2.weight"]


@pytest.mark.parametrize("model", ["gpt", "llama"])
@pytest.mark.parametrize("size", [4, 16])
def test_only_one_chunk_exists_at_a_time(model: str, size: int) -> None:
    config = MODELS[model]
    made = Made(config, size)
    row = SAMPLES * made.x.element_size()
    with Allocations() as forward:
        y, _, _ = made.mlp(made.x, ForwardContext(random_batch(GPT), {}))
        kept = forward.alive
    assert kept == ROWS * row * config.hidden_size, "the output"
    y.backward(torch.ones_like(y))
    # The largest tensor is the output, or what fc1 gives for one chunk.
    widest = max(ROWS * config.hidden_size, (1 + config.gated) * size * config.ffn)
    assert forward.largest == widest * row
