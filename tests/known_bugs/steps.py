"""Bugs of a training step: gradients, clipping, the loss scale, and the update."""

from __future__ import annotations

import tempfile
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from megatron.config.optimizer import OptimizerConfig
from megatron.config.training import TrainingConfig
from megatron.distributed.sharding import ShardSpec
from megatron.layers.context import ForwardContext
from megatron.layers.recompute import is_recomputing
from megatron.model import block
from megatron.optimizer.distributed_optimizer import DistributedOptimizer, GradNorm, UpdateResult
from megatron.optimizer.grad_buffer import GradBuffer
from megatron.optimizer.lr_scheduler import Rates
from tests.kit.runs import column, start, tiny_run
from tests.kit.solo import Solo, random_batch, tiny
from tests.known_bugs.alone import alone, distance
from tests.known_bugs.bug import KnownBug

SCALE, CLIP, DECAY, LR = 2.0**12, 0.01, 0.3, 1e-2
TRAINED = tiny(num_layers=1)


def updated(rank: int, world_size: int, scale: float) -> float:
    """What two steps change in every parameter, from torch's AdamW, by gradients multiplied by a loss scale."""
    settings = OptimizerConfig(clip_grad=CLIP)
    solo = Solo.build(TRAINED, optimizer=settings)
    begin = {name: parameter.detach().clone() for name, parameter in solo.params.items()}
    theirs = {name: nn.Parameter(value.clone()) for name, value in begin.items()}
    groups = [
        {"params": [p for p in theirs.values() if p.dim() == dimensions], "weight_decay": decay}
        for dimensions, decay in ((2, DECAY), (1, 0.0))
    ]
    adam = torch.optim.AdamW(groups, LR, (settings.adam_beta1, settings.adam_beta2), settings.adam_eps)
    for step in range(2):
        solo.backward([random_batch(TRAINED, seed=step)])
        for name, grad in solo.buckets.grads.items():
            theirs[name].grad = grad.clone()
            grad.mul_(scale)
        nn.utils.clip_grad_norm_(theirs.values(), CLIP)
        adam.step()
        solo.optimizer.reduce_gradients()
        solo.optimizer.update(Rates(LR, DECAY), torch.tensor(scale))
    found, expected = (
        {name: value.detach() - begin[name] for name, value in each.items()} for each in (solo.params, theirs)
    )
    return distance(found, expected)


def decay_of_all() -> AbstractContextManager[Any]:
    """Norms and biases decay too."""
    return patch.object(ShardSpec, "decays", property(lambda spec: True))


def scaled_gradients_clipped() -> AbstractContextManager[Any]:
    """Clipping sees the norm of gradients that are still multiplied by the loss scale."""
    original = GradNorm.compute
    return patch.object(GradNorm, "compute", lambda norm: original(norm) * SCALE)


def accumulated(rank: int, world_size: int) -> float:
    """Gradients of many micro-batches in bf16, from the sum of the gradients of each in fp64."""
    solo = Solo.build(TRAINED, torch.bfloat16)
    ones = torch.ones(1, 16)
    batches = [random_batch(TRAINED, 1, seed=seed, loss_mask=ones) for seed in range(32)]
    total: dict[str, Tensor] = {}
    for batch in batches:
        solo.backward([batch])
        total = {name: total.get(name, 0.0) + grad.double() / len(batches) for name, grad in solo.snapshot().items()}
    solo.backward(batches)
    return distance({name: grad.double() for name, grad in solo.snapshot().items()}, total)


def accumulated_in_bf16() -> AbstractContextManager[Any]:
    """Every sum of gradients is rounded to the type of the weights."""
    original = GradBuffer.contributed

    def contributed(self: GradBuffer, name: str) -> None:
        self.grads[name].copy_(self.grads[name].bfloat16())
        original(self, name)

    return patch.object(GradBuffer, "contributed", contributed)


def losses_in_fp16(rank: int, world_size: int) -> float:
    """Losses of a run whose loss scale doubles at every step, from those at a constant scale."""
    flags = "--fp16 --optimizer sgd --clip-grad 0 --lr 0.5"
    scales = ("--initial-loss-scale 64 --loss-scale-window 1", "--loss-scale 64")
    with tempfile.TemporaryDirectory() as temporary:
        folders = [Path(temporary) / str(number) for number in range(len(scales))]
        for folder, scale in zip(folders, scales):
            start(tiny_run(folder, f"{flags} {scale}"))
        found, expected = (column(folder, "lm loss") for folder in folders)
    return max(abs(a / b - 1.0) for a, b in zip(found, expected, strict=True))


def scale_of_the_next_step() -> AbstractContextManager[Any]:
    """Gradients are divided by a scale that has grown since they were computed."""
    original = DistributedOptimizer.update

    def update(self: DistributedOptimizer, rates: Rates, scale: Tensor, *rest: Any, **named: Any) -> UpdateResult:
        return original(self, rates, scale * 2.0 if scale > 64.0 else scale, *rest, **named)

    return patch.object(DistributedOptimizer, "update", update)


DROPPING = tiny(hidden_dropout=0.3)


def recomputed(rank: int, world_size: int) -> float:
    """Gradients with dropout and full recomputation, from those that keep all activations."""
    found = []
    for training in (TrainingConfig(recompute_granularity="full"), TrainingConfig()):
        solo = Solo.build(DROPPING, training=training)
        solo.backward([random_batch(DROPPING)])
        found.append(solo.snapshot())
    return distance(*found)


def other_masks_in_recomputation() -> AbstractContextManager[Any]:
    """Recomputed layers drop other elements than those that the loss was computed with."""
    original = block._key

    def key(ctx: ForwardContext, site: str, like: Tensor) -> Tensor:
        return original(ctx, site, like) + int(is_recomputing())

    return patch.object(block, "_key", key)


AS_TORCH = "two steps of AdamW against torch.optim.AdamW, with torch's clipping: the change of every parameter"

BUGS = {
    "norms-decay": KnownBug(
        reports=("ServiceNow/Fast-LLM#542", "huggingface/transformers#35927"),
        kind="Update",
        bug="weight decay also shrank norms and biases",
        check=AS_TORCH,
        detector=alone(updated, 1.0),
        plant=decay_of_all,
    ),
    "scaled-gradients-clipped": KnownBug(
        reports=("Lightning-AI/pytorch-lightning#9599", "allenai/allennlp#5426"),
        kind="16 bits",
        bug="gradients were clipped while they were still multiplied by the loss scale",
        check=f"{AS_TORCH}, at a loss scale of {SCALE:.0f}",
        detector=alone(updated, SCALE),
        plant=scaled_gradients_clipped,
    ),
    "scale-changed-too-early": KnownBug(
        reports=("deepspeedai/DeepSpeed#8588",),
        kind="16 bits",
        bug="in steps where the loss scale grew, gradients were divided by the new one",
        check="losses of six steps in fp16 whose scale grows at each, against those at a constant scale",
        detector=alone(losses_in_fp16, within=1e-6),
        plant=scale_of_the_next_step,
    ),
    "sums-in-bf16": KnownBug(
        reports=("deepspeedai/DeepSpeed#2768", "linkedin/Liger-Kernel#830"),
        kind="16 bits",
        bug="gradients of micro-batches were added up in bf16",
        check="gradients of 32 micro-batches in bf16 against the sum in fp64 of those of each",
        detector=alone(accumulated, within=1e-5),
        plant=accumulated_in_bf16,
    ),
    "other-dropout-in-recomputation": KnownBug(
        reports=("allenai/OLMo-core#828", "openai/guided-diffusion#167", "pytorch/pytorch#190758"),
        kind="Recomputation",
        bug="activation checkpointing drew new dropout masks, so gradients were not those of the loss",
        check="every gradient with full recomputation against those that keep all activations, to the bit",
        detector=alone(recomputed, within=0.0),
        plant=other_masks_in_recomputation,
    ),
}
