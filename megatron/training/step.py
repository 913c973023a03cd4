"""One training step, and one evaluation: what happens between reading tokens and having new weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from megatron.optim.optimizer import Outcome
from megatron.optim.schedule import Rates
from megatron.parallel import comm
from megatron.parallel.comm import Group
from megatron.parallel.microbatch import MicroBatch
from megatron.training.metrics import StepMetrics
from megatron.training.setup import Trainer

Update = Callable[[Rates, Tensor, Tensor], Outcome]
"""``Optimizer.update``, or what repeats it: of rates, the loss scale and the loss."""


def train_step(
    trainer: Trainer, batches: Sequence[MicroBatch], rates: Rates, update: Update | None = None
) -> StepMetrics:
    """The pipeline's work on every micro-batch, then the update. Nothing waits for the device, but routers for counts.

    The loss is the sum over the *global* batch's unmasked tokens divided by their number, so it does not depend on
    how samples are dealt out to micro-batches and ranks.

    Args:
        trainer: changed in place, its counters excepted.
        batches: this rank's micro-batches of the step.
        rates: learning rate and weight decay.
        update: in place of the optimizer's own.

    Returns:
        Device scalars, equal on all ranks.

    """
    t, scale = trainer, trainer.scaler.scale.clone()  # the scaler changes its own in place
    tokens = count_tokens(batches, t.mesh.replicas)
    t.buckets.start_step(len(batches))
    with t.timers("forward-backward"):
        t.compute(batches, scale / tokens.clamp(min=1.0))
    sums = take_sums(t)
    loss, router = mean_loss(t, sums, tokens), router_losses(t, sums, tokens)
    t.optimizer.finish(t.timers)
    with t.timers("optimizer"):
        outcome = update(rates, scale, loss) if update else t.optimizer.update(rates, scale, loss, t.timers)
    t.scaler.update(outcome.nonfinite)  # a spike is no overflow
    return StepMetrics(loss, outcome.grad_norm, outcome.skipped, scale, outcome.nonfinite, router)


@torch.no_grad()
def evaluate(trainer: Trainer, split: str = "valid") -> Tensor:
    """Mean loss per token over the first ``eval_iters`` global batches of a split; NaN where no label of it counts."""
    t, tokens = trainer, torch.zeros((), device=trainer.device, dtype=torch.float64)
    for index in range(t.config.training.eval_iters):
        batches = t.evaluation_batches(split, index)
        tokens += count_tokens(batches, t.mesh.replicas)
        t.compute(batches, None)
    return mean_loss(t, take_sums(t), tokens).where(tokens > 0, torch.nan)


def count_tokens(batches: Sequence[MicroBatch], replicas: Group) -> Tensor:
    """Unmasked tokens of the global batch, an fp64 scalar."""
    local = torch.stack([b.loss_mask.sum(dtype=torch.float64) for b in batches]).sum()
    return comm.all_reduce(local, replicas)


def take_sums(trainer: Trainer) -> dict[str, Tensor]:
    """What this rank's chunks have added up since they were asked last, in fp64."""
    sums: dict[str, Tensor] = {}
    for chunk in trainer.chunks.values():
        for name, value in chunk.sums.take().items():
            sums[name] = sums[name] + value.double() if name in sums else value.double()
    return sums


def mean_loss(trainer: Trainer, sums: Mapping[str, Tensor], tokens: Tensor) -> Tensor:
    """The loss sums that the last stages collected, over all replicas, per token; 0 where no token counts.

    Every stage but the last adds zeros, so all ranks have the same bits, whatever the order of summing. Those that are
    done with the pipeline wait for the rest of it here.
    """
    of_stage = comm.all_reduce(sums.get("lm loss", torch.zeros_like(tokens)), trainer.mesh.replicas)
    return comm.all_reduce(of_stage, trainer.mesh.pipeline) / tokens.clamp(min=1.0)


def router_losses(trainer: Trainer, sums: Mapping[str, Tensor], tokens: Tensor) -> dict[str, Tensor]:
    """The losses of routers that are in use, each a mean over tokens and layers, under Megatron-LM's names.

    As there, coefficients are taken out again: a perfect balance is 1. Each rank has a part of every loss, also of a
    sequence that several ranks share.
    """
    m = trainer.config.model
    names = {"aux_loss": "load_balancing_loss", "seq_aux_loss": "seq_load_balancing_loss"}
    balance = names.get(m.moe_router_load_balancing_type, "")
    used = {balance: m.moe_aux_loss_coeff if balance else 0.0, "z_loss": m.moe_z_loss_coeff or 0.0}
    if m.num_experts is None or not any(used.values()):
        return {}
    local = sums.get("router losses", tokens.new_zeros(2))
    means = comm.all_reduce(local, trainer.mesh.world) / (tokens.clamp(min=1.0) * m.num_layers)
    return {name: mean / coefficient for mean, (name, coefficient) in zip(means, used.items()) if coefficient}
