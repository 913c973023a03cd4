"""Launches of experts on the null GPU: they do not grow with the number of experts, and the host never waits."""

from __future__ import annotations

import os
from unittest.mock import patch

import pytest
import torch

from megatron.config.model import ModelConfig
from megatron.distributed.grad_accumulator import GradAccumulator
from megatron.kernels.fp8 import Float8Layers, Float8Recipe
from megatron.kernels.registry import select_kernels
from megatron.layers.context import BuildContext
from megatron.layers.experts import Experts
from megatron.layers.mixers.registry import MIXERS
from megatron.layers.providers import GROUPED_PROVIDERS
from tests.kit.solo import Gradients, one_rank_mesh
from tests.nullgpu.trace import record

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif("nullcuda" not in os.environ.get("LD_PRELOAD", ""), reason="needs the null GPU"),
]

EXPERTS, ROWS, HIDDEN = 64, 32768, 2048
MODEL = ModelConfig(
    num_layers=1,
    hidden_size=HIDDEN,
    num_attention_heads=16,
    num_experts=EXPERTS,
    moe_ffn_hidden_size=768,
    activation="swiglu",
    add_bias_linear=False,
    vocab_size=128,
    max_position_embeddings=128,
)

CASES = {
    # PyTorch's product takes two launches, Triton's one.
    "bf16": (None, "auto", 5, 7),
    "bf16, triton": (None, "grouped_linear=triton", 3, 5),
    # A launch more for the rows of each product.
    "rowwise": (Float8Recipe("e4m3", "rowwise"), "auto", 7, 9),
    "hybrid": (Float8Recipe("hybrid", "rowwise"), "auto", 7, 7),
    "blockwise": (Float8Recipe("e4m3", "blockwise"), "auto", 5, 7),
}


@pytest.mark.parametrize("name", CASES)
def test_launches_of_forward_and_backward(name: str) -> None:
    recipe, word, *expected = CASES[name]
    device = torch.device("cuda")
    with patch("megatron.kernels.registry.check_kernel", lambda *arguments: None):
        words = ("auto", "attention=torch", word)
        kernels, _ = select_kernels(words, device, torch.bfloat16, fp8=recipe)
    context = BuildContext(
        one_rank_mesh(),
        GradAccumulator(),
        torch.bfloat16,
        device,
        draw_initial_values=False,
        kernels=kernels,
        fp8=Float8Layers(frozenset({0})),
        grouped_providers=GROUPED_PROVIDERS,
    ).block(0)
    context.declare(MIXERS["experts"].parameters(MODEL, context.sharding))
    module = Experts(MODEL, context.submodule("experts"), False)
    context.grad_accumulator.bind(
        Gradients({n: torch.zeros(p.shape, device=device) for n, p in context.params.items()})
    )
    x, dy = torch.zeros(2, ROWS, HIDDEN, dtype=torch.bfloat16, device=device)
    weights, offsets = torch.zeros(ROWS, device=device), torch.zeros(EXPERTS, dtype=torch.int32, device=device)
    with context.fp8.casts.kept():
        for _ in range(2):  # the first time kernels are compiled, and weights quantised
            rows, factors = x.detach().requires_grad_(), weights.detach().requires_grad_()
            with record() as forward:
                y = module(rows, offsets, factors)
            with record() as backward:
                y.backward(dy)
    assert [len(trace.launches()) for trace in (forward, backward)] == expected
    assert not forward.syncs()
    assert not backward.syncs()
