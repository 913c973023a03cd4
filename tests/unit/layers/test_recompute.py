"""Recomputation changes no bit of the result and keeps fewer bytes, by as much as it should."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.config.model import ModelConfig
from megatron.config.settings import SETTINGS
from megatron.config.training import TrainingConfig
from megatron.layers.recompute import recompute_producer
from tests.kit.solo import Allocations, Solo, random_batch, tiny

MODULES = SETTINGS["recompute_modules"].option.choices
LAYERS, SAMPLES, LENGTH, HIDDEN, FFN, HEADS = 2, 2, 32, 32, 96, 4
ROW = SAMPLES * LENGTH * 8  # bytes of one fp64 channel of the residual stream

LLAMA = tiny(
    num_layers=LAYERS,
    normalization="RMSNorm",
    activation="swiglu",
    ffn_hidden_size=FFN,
    position_embedding_type="rope",
    num_query_groups=2,
    hidden_dropout=0.1,
    attention_dropout=0.1,
    max_position_embeddings=LENGTH,
)
MODELS = {
    "llama": LLAMA,
    "gpt": replace(LLAMA, normalization="LayerNorm", activation="gelu", num_query_groups=None),
    "latent": replace(
        LLAMA,
        multi_latent_attention=True,
        qk_layernorm=True,
        num_query_groups=None,
        q_lora_rank=12,
        kv_lora_rank=10,
        qk_head_dim=4,
        qk_pos_emb_head_dim=4,
        v_head_dim=6,
    ),
    "switches": replace(
        LLAMA,
        layernorm_placement="sandwich",
        apply_layernorm_1p=True,
        parallel_attention=True,
        qk_layernorm=True,
        qk_layernorm_scope="all",
        activation="geglu",
        residual_multiplier=0.5,
        hidden_dropout=0.1,
    ),
}


def dropped(model: str, plan: str) -> int:
    """Bytes per layer that a choice drops at least."""
    activated = 2 if MODELS[model].gated else 1  # tensors of width FFN that the activation makes (and takes)
    match plan:
        case "layernorm":  # the outputs of both
            return 2 * HIDDEN * ROW
        case "activation":
            return activated * FFN * ROW
        case "core_attn":  # logarithms of sums of exponentials, which are all that attention in tiles keeps
            return HEADS * ROW - 256
        case "mla_up_proj":  # q, k, v, and what the norms of latents keep and give
            return HEADS * (8 + 8 + 6) * ROW + 2 * (12 + 10) * ROW if model == "latent" else 0
        case "mlp":  # all inside: the norm's output, what the activation takes and makes
            return (HIDDEN + 2 * activated * FFN) * ROW
    return 1


def selective(*modules: str) -> TrainingConfig:
    return TrainingConfig(recompute_granularity="selective", recompute_modules=modules)


def full(method: str | None, layers: int | None) -> TrainingConfig:
    return TrainingConfig(recompute_granularity="full", recompute_method=method, recompute_num_layers=layers)


PLANS = {module: selective(module) for module in MODULES}
PLANS |= {"all modules": selective(*MODULES), "full": full(None, None)}
PLANS |= {"uniform 2": full("uniform", 2), "block 1": full("block", 1), "block 9": full("block", 9)}


def run(config: ModelConfig, training: TrainingConfig, **batch: Any) -> tuple[Tensor, dict[str, Tensor], int]:
    """Loss, gradients, and the bytes alive between forward and backward."""
    solo = Solo.build(config, training=training)
    solo.buckets.start_step(1)
    micro_batch = random_batch(config, SAMPLES, LENGTH, **batch)
    with Allocations() as made:
        loss, _ = solo.chunk(None, micro_batch)
        alive = made.alive
    loss.backward()
    solo.buckets.finish()
    return loss.detach(), solo.buckets.grads, alive


@cache
def without_recomputation(model: str) -> tuple[Tensor, dict[str, Tensor], int]:
    return run(MODELS[model], TrainingConfig())


@pytest.mark.parametrize(
    ("model", "plan"),
    [*(("gpt", plan) for plan in PLANS), ("llama", "all modules"), ("llama", "block 1")]
    + [("latent", plan) for plan in ("mla_up_proj", "core_attn", "all modules")]
    + [("switches", plan) for plan in PLANS],
)
def test_changes_no_bit_and_keeps_less(model: str, plan: str) -> None:
    loss, grads, alive = without_recomputation(model)
    again, grads_again, alive_again = run(MODELS[model], PLANS[plan])
    assert torch.equal(loss, again)
    assert all(torch.equal(grads[name], grads_again[name]) for name in grads)
    assert alive - alive_again >= LAYERS * dropped(model, plan)


@pytest.mark.slow
def test_more_recomputation_keeps_less() -> None:
    names = ["layernorm", "all modules", "block 1", "uniform 2", "full"]
    alive = {name: run(LLAMA, PLANS[name])[2] for name in names}
    assert alive["all modules"] < alive["layernorm"]
    assert alive["full"] < alive["block 1"]
    assert alive["full"] < alive["all modules"]
    assert alive["uniform 2"] < alive["full"], "a group of blocks keeps one input instead of one per block"


def test_full_recomputation_keeps_one_input_per_block() -> None:
    deep = replace(LLAMA, num_layers=2 * LAYERS)
    more = run(deep, PLANS["full"])[2] - run(LLAMA, PLANS["full"])[2]
    assert more == pytest.approx(LAYERS * HIDDEN * ROW, rel=0.05)


@pytest.mark.parametrize("plan", ["all modules"])
def test_with_documents_and_window(plan: str) -> None:
    config = replace(LLAMA, window_size=5)
    documents = torch.tensor([[0] * 7 + [1] * 25, [0] * 3 + [2] * 29])
    loss, grads, _ = run(config, TrainingConfig(), documents=documents)
    again, grads_again, _ = run(config, PLANS[plan], documents=documents)
    assert torch.equal(loss, again)
    assert all(torch.equal(grads[name], grads_again[name]) for name in grads)


class Between:
    """A producer that needs something in between for its gradient."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x.sin().square()


def test_a_recomputed_producer_keeps_no_bytes_for_its_consumer() -> None:
    producer = Between()
    x = torch.randn(50, 8, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(8, 8, dtype=torch.float64, requires_grad=True)
    with Allocations() as made:
        y = recompute_producer(producer, lambda between: (between @ weight).sum(), x)
        alive = made.alive
    y.backward()
    expected = x.sin().square()
    torch.testing.assert_close(weight.grad, expected.t().sum(1, keepdim=True).expand(8, 8).detach())
    torch.testing.assert_close(x.grad, (2.0 * x.sin() * x.cos() * weight.sum(1)).detach())
    assert alive < x.nbytes, "scalars only; without recomputation the product keeps its input"
    assert producer.calls == 2


def test_recomputed_outputs_may_share_memory_and_be_saved_as_views() -> None:
    x, first, second = (torch.randn(n, 8, dtype=torch.float64, requires_grad=True) for n in (6, 4, 6))
    calls = []

    def producer(x: Tensor) -> tuple[Tensor, ...]:
        calls.append(x)
        left, right = x.sin().square().split((4, 4), 1)
        return left, right

    def consumer(left: Tensor, right: Tensor) -> Tensor:
        return (left @ first).sum() * 2 + (right.t() @ second).sin().sum()

    expected = torch.autograd.grad(consumer(*producer(x)), (x, first, second))
    calls.clear()
    found = torch.autograd.grad(recompute_producer(producer, consumer, x), (x, first, second))
    assert all(map(torch.equal, found, expected))
    assert len(calls) == 2


def test_what_backward_does_not_reach_is_freed() -> None:
    """A saved output that refers to its own node would never be: a router's scores that no loss uses, at each step."""
    x, weight = (torch.randn(n, 8, dtype=torch.float64, requires_grad=True) for n in (50, 8))

    def consumer(between: Tensor) -> Tensor:
        logits = between @ weight
        logits.softmax(-1)
        return logits.sum()

    with Allocations() as made:
        y = recompute_producer(Between(), consumer, x)
        alive = made.alive
    assert alive < x.nbytes
    y.backward()
    del y
    assert made.alive == 0
