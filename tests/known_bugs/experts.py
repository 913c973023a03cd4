"""Bugs of routers: their precision, their counts, and the losses that balance experts."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from megatron.config.training import TrainingConfig
from megatron.layers.router import Router, Routing
from tests.distributed import detect, faults_of_shares
from tests.kit.cases import MODEL, Case
from tests.kit.solo import Solo, random_batch, tiny
from tests.known_bugs.alone import alone, distance
from tests.known_bugs.bug import KnownBug

EXPERTS, TOPK = 8, 2
MIXTURE: dict[str, Any] = {"num_experts": EXPERTS, "moe_router_topk": TOPK, "add_bias_linear": False}
ROUTED = tiny(num_layers=1, **MIXTURE)
BIASED = tiny(moe_router_enable_expert_bias=True, moe_router_score_function="sigmoid", **MIXTURE)
BALANCED = Case(
    model=replace(MODEL, moe_aux_loss_coeff=(0.5,), moe_router_load_balancing_type=("seq_aux_loss",), **MIXTURE),
    training=TrainingConfig(micro_batch_size=1),
    steps=1,
)


def router_of(solo: Solo) -> Router:
    """The first router of a model."""
    return next(module for module in solo.chunk.modules() if isinstance(module, Router))


def routed(rank: int, world_size: int) -> float:
    """Weights of the experts of every token in a model in bf16, from its inputs by the formula in fp64."""
    solo, seen = Solo.build(ROUTED, torch.bfloat16), list[tuple[Tensor, Routing]]()
    router = router_of(solo)

    def note(module: nn.Module, inputs: tuple[Any, ...], output: Routing) -> None:
        seen.append((inputs[0].detach().flatten(0, 1), output))

    router.register_forward_hook(note)
    solo.chunk(None, random_batch(ROUTED, samples=8))
    ((x_TH, routing),) = seen
    logits_TE = x_TH.double() @ router.weight.detach().double().t()
    best_TK = logits_TE.topk(TOPK)
    expected = torch.zeros_like(logits_TE).scatter(1, best_TK.indices, best_TK.values.softmax(-1))
    found = torch.zeros_like(logits_TE).scatter(1, routing.experts, routing.weights.detach().double())
    return distance({"": found}, {"": expected})


def logits_in_bf16() -> AbstractContextManager[Any]:
    """The router's logits are those of the model's 16 bits."""
    original = Router._logits
    return patch.object(Router, "_logits", lambda *arguments: original(*arguments).bfloat16().float())


def counted(rank: int, world_size: int) -> float:
    """Choices of each expert in a step with full recomputation, from those that the first forward pass has made."""
    solo = Solo.build(BIASED, training=TrainingConfig(recompute_granularity="full"))
    router, first = router_of(solo), list[Tensor]()
    router.register_forward_hook(lambda module, inputs, output: first.append(output.experts))
    solo.backward([random_batch(BIASED)])
    expected = torch.bincount(first[0].flatten(), minlength=EXPERTS).double()
    return distance({"": router.loads.chosen.double()}, {"": expected})


def balancing_loss_of_every_micro_batch() -> AbstractContextManager[Any]:
    """The losses of micro-batches are added up, each as large as that of the whole batch."""
    original = Router._balancing_loss

    def loss(self: Router, name: str, scores: Tensor, chosen: Tensor, counted_B: Tensor, length: int) -> Tensor:
        return original(self, name, scores, chosen, counted_B, length) * (BALANCED.samples / len(counted_B))

    return patch.object(Router, "_balancing_loss", loss)


BUGS = {
    "router-in-bf16": KnownBug(
        reports=("vllm-project/vllm#14027", "ViperEkura/AstrAI#57", "marin-community/marin#4234"),
        kind="Experts",
        bug="the router's logits or probabilities were rounded to bf16, which ties experts and changes the choice",
        check="the weights of all experts of 128 tokens in a bf16 model against the formula in fp64",
        detector=alone(routed, within=1e-5),
        plant=logits_in_bf16,
    ),
    "loads-counted-twice": KnownBug(
        reports=("pytorch/torchtitan#1593",),
        kind="Experts",
        bug="recomputed layers counted their tokens twice for the bias that balances experts",
        check="the counts of each expert after backward with recomputation against the choices of the forward pass",
        detector=alone(counted),
        plant=faults_of_shares.loads_counted_in_recomputation,
    ),
    "balancing-loss-per-micro-batch": KnownBug(
        reports=("NVIDIA-NeMo/Automodel#3359",),
        kind="Experts",
        bug="the balancing loss of each micro-batch entered backward unscaled, four times too strong for four of them",
        check="four micro-batches against one of all samples: losses, norm, every gradient and weight",
        detector=detect.training(BALANCED),
        plant=balancing_loss_of_every_micro_batch,
    ),
}
