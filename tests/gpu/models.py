"""Small models on the device, and their twins in fp64 on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from megatron.arguments.cli import parse
from megatron.config.run import RunConfig
from megatron.data.loader import document_boundaries
from megatron.distributed.micro_batch import MicroBatch
from megatron.optimizer.lr_scheduler import Rates
from megatron.training.build import build_trainer
from megatron.training.metrics import StepMetrics
from megatron.training.step import collect_sums, count_tokens, mean_loss
from megatron.training.trainer import Trainer

SHAPES = {
    "gpt": "--position-embedding-type learned_absolute --normalization LayerNorm --activation gelu_tanh",
    "llama": "--position-embedding-type rope --normalization RMSNorm --activation swiglu --no-add-bias-linear "
    "--num-query-groups 2 --untie-embeddings-and-output-weights",
}
"""The two families of models."""

SIZES = {
    "cuda": "--num-layers 4 --hidden-size 256 --num-attention-heads 4 --vocab-size 1000 --seq-length 256 "
    "--max-position-embeddings 256 --cross-entropy-chunk-size 200",
    "cpu": "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --vocab-size 100 --seq-length 16 "
    "--max-position-embeddings 16 --cross-entropy-chunk-size 12",
}
"""Large enough for the fast kernels; small enough for a rehearsal. Chunks do not divide the samples."""

COMMON = (
    "--mock-data --hidden-dropout 0 --attention-dropout 0 --init-method-std 0.05 --lr 1e-3 --clip-grad 1 "
    "--micro-batch-size 2 --global-batch-size 4 --train-iters 200 --eval-iters 0 --kernels torch"
)

RATES = Rates(2.0**-10, 0.1)
"""A learning rate that fp32 has."""


def config_of(device: torch.device, flags: str = "", shape: str = "llama") -> RunConfig:
    """The configuration of a small model."""
    words = f"{COMMON} {SIZES[device.type]} {SHAPES[shape]} --device {device.type} {flags}"
    return parse(words.split(), {}).config


def trainer_of(device: torch.device, flags: str = "", shape: str = "llama") -> Trainer:
    """A trainer of it, at its start."""
    return build_trainer(config_of(device, flags, shape), 0, 1)


def twin_of(trainer: Trainer) -> Trainer:
    """The same model in fp64 on the CPU, with the same weights to the bit."""
    config = trainer.config
    plain = replace(
        config,
        training=replace(config.training, device="cpu", recompute_granularity=None),
        precision=replace(config.precision, params_dtype="fp64"),
        compute=replace(config.compute, kernels=("torch",), cuda_graph="none"),
    )
    twin = build_trainer(plain, 0, 1)
    with torch.no_grad():
        for name, parameter in trainer.params.items():
            twin.params[name].copy_(parameter)
    return twin


def batches_of(trainer: Trainer, count: int = 2, seed: int = 0, documents: bool = False) -> list[MicroBatch]:
    """Random micro-batches, the same on every device; some labels do not count."""
    model, training = trainer.config.model, trainer.config.training
    shape = training.micro_batch_size, training.seq_length
    generator = torch.Generator().manual_seed(seed)

    def batch(first: int) -> MicroBatch:
        ids = torch.randint(0, model.vocab, (shape[0], shape[1] + 1), generator=generator)
        counts = (torch.rand(shape, generator=generator) > 0.2).float()
        ends = (torch.rand(shape, generator=generator) > 0.9).long().cumsum(1) if documents else None
        made = MicroBatch(ids[:, :-1].contiguous(), ids[:, 1:].contiguous(), counts, first + torch.arange(shape[0]))
        boundaries = None if ends is None else torch.from_numpy(document_boundaries(ends.numpy()))
        return on(replace(made, documents=ends, boundaries=boundaries), trainer.device)

    return [batch(at * shape[0]) for at in range(count)]


def on(batch: MicroBatch, device: torch.device) -> MicroBatch:
    """A micro-batch on another device."""
    moved = {n: t.to(device) for n, t in vars(batch).items() if isinstance(t, Tensor)}
    return replace(batch, **moved)


def gradients(trainer: Trainer, batches: Sequence[MicroBatch]) -> tuple[float, dict[str, Tensor]]:
    """Mean loss and its gradients, in fp64 on the CPU."""
    t, here = trainer, [on(batch, trainer.device) for batch in batches]
    tokens = count_tokens(t, here)
    t.buckets.start_step(len(here))
    t.compute(here, 1.0 / tokens)
    t.optimizer.reduce_gradients()
    loss = mean_loss(t, collect_sums(t), tokens).item()
    return loss, {name: grad.double().cpu() for name, grad in t.buckets.grads.items()}


def distance(found: dict[str, Tensor], right: dict[str, Tensor]) -> dict[str, float]:
    """Return the relative error of each tensor, and of all together under ``all``."""
    each = {name: ((t - right[name]).norm() / right[name].norm()).item() for name, t in found.items()}
    both = [torch.cat([t.flatten() for t in some.values()]) for some in (found, right)]
    return each | {"all": ((both[0] - both[1]).norm() / both[1].norm()).item()}


def train(trainer: Trainer, steps: int, step: Callable[..., StepMetrics]) -> list[tuple[float, float]]:
    """Loss and gradient norm of some steps, each on batches of its own; read at the end."""
    printed = [step(batches_of(trainer, seed=at), RATES) for at in range(steps)]
    return [(m.loss.item(), m.grad_norm.item()) for m in printed]


def weights(trainer: Trainer) -> dict[str, Tensor]:
    """Copies of the masters."""
    return {name: master.detach().clone() for name, master in trainer.optimizer.main_params.items()}
