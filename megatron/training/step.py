"""One training step, from micro-batches to updated weights, and one evaluation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from megatron.distributed import comm
from megatron.distributed.micro_batch import MicroBatch
from megatron.optimizer.distributed_optimizer import UpdateResult
from megatron.optimizer.lr_scheduler import Rates
from megatron.training.component import Component
from megatron.training.metrics import StepMetrics
from megatron.training.trainer import Trainer

UpdateFunction = Callable[[Rates, Tensor, Tensor], UpdateResult]
"""``DistributedOptimizer.update``, or a recording of it: a function of rates, loss scale and loss."""


def train_step(
    trainer: Trainer, batches: Sequence[MicroBatch], rates: Rates, update: UpdateFunction | None = None
) -> StepMetrics:
    """Run the pipeline on every micro-batch, then update the weights.

    The loss is the sum over the *global* batch divided by the sum of its weights (for next-token prediction the number
    of unmasked tokens), so it does not depend on how samples are split into micro-batches and over ranks. The host
    never waits for the device, except in a mixer that reads numbers of rows (``--moe-exchange exact``).

    Args:
        trainer: changed in place, except for its counters.
        batches: this rank's micro-batches of the step.
        rates: learning rate and weight decay.
        update: function to call instead of ``DistributedOptimizer.update``.

    Returns:
        Device scalars, equal on all ranks.
    """
    if trainer.device.type == "cuda":
        rates = rates_on(trainer.device, rates)
    scale = trainer.scaler.scale.clone()  # the scaler updates its own in place
    tokens, loss_grad = weigh_batch(trainer, batches, scale)
    for component in trainer.acting(Component.before_compute):
        component.before_compute(batches, loss_grad, tokens)
    losses = compute_gradients(trainer, batches, loss_grad, tokens)
    for component in trainer.acting(Component.on_gradients):
        component.on_gradients(losses, tokens)
    loss = losses.pop("lm loss")
    with trainer.timers("optimizer"):
        if update is None:
            outcome = trainer.optimizer.update(rates, scale, loss, trainer.timers, trainer.components)
        else:
            outcome = update(rates, scale, loss)
    for component in trainer.acting(Component.after_step):
        component.after_step(outcome)
    return StepMetrics(loss, outcome.grad_norm, outcome.skipped, scale, outcome.nonfinite, losses)


def weigh_batch(trainer: Trainer, batches: Sequence[MicroBatch], scale: Tensor) -> tuple[Tensor, Tensor]:
    """Return the weight of the global batch, and the gradient of the summed losses, 0-d; collective."""
    tokens = count_tokens(trainer, batches)
    loss_grad = scale / tokens.clamp(min=1.0)
    for component in trainer.acting(Component.on_loss_grad):
        loss_grad = component.on_loss_grad(loss_grad)
    return tokens, loss_grad


def compute_gradients(
    trainer: Trainer, batches: Sequence[MicroBatch], loss_grad: Tensor, tokens: Tensor
) -> dict[str, Tensor]:
    """Run the pipeline forward and backward, and reduce the gradients; repeated calls give the same bits. Collective.

    Args:
        trainer: of which nothing but the gradients changes.
        batches: this rank's micro-batches of the step.
        loss_grad: gradient of the summed losses with which backward starts, 0-d.
        tokens: weight of the global batch, 0-d.

    Returns:
        The losses of the step by name, 0-d, equal on all ranks.
    """
    trainer.buckets.start_step(len(batches), trainer.iteration)
    with trainer.timers("forward-backward"):
        trainer.compute(batches, loss_grad)
    sums = collect_sums(trainer)
    losses = {"lm loss": mean_loss(trainer, sums, tokens), **auxiliary_losses(trainer, sums, tokens)}
    losses |= {name: mean_loss(trainer, sums, tokens, name) for name in trainer.loss_names}
    trainer.optimizer.reduce_gradients(trainer.timers)
    return losses


def rates_on(device: torch.device, rates: Rates) -> Rates:
    """Return the learning rates as fp32 scalars on a device, filled in by a kernel and so without synchronisation."""

    def scalar(rate: float | Tensor) -> Tensor:
        return rate if isinstance(rate, Tensor) else torch.full((), rate, dtype=torch.float32, device=device)

    decoupled_lr = None if rates.decoupled_lr is None else scalar(rates.decoupled_lr)
    return replace(rates, lr=scalar(rates.lr), decoupled_lr=decoupled_lr)


@torch.no_grad()
def evaluate(trainer: Trainer, split: str = "valid", metrics: dict[str, Tensor] | None = None) -> Tensor:
    """Return the mean loss over the first ``eval_iters`` global batches of a split; NaN without labels.

    The means of the objective's further metrics are added to ``metrics``.
    """
    tokens = torch.zeros((), device=trainer.device, dtype=torch.float64)
    for index in range(trainer.config.training.eval_iters):
        batches = trainer.complete(trainer.reader.evaluation_batches(split, index))
        tokens += count_tokens(trainer, batches)
        trainer.compute(batches, None)
    sums = collect_sums(trainer)
    if metrics is not None:
        metrics |= {name: mean_loss(trainer, sums, tokens, name) for name in trainer.objective.metric_names}
    return mean_loss(trainer, sums, tokens).where(tokens > 0, torch.nan)


def count_tokens(trainer: Trainer, batches: Sequence[MicroBatch]) -> Tensor:
    """Return the weight of the global batch in the loss, an fp64 scalar; collective.

    For next-token prediction it is the number of unmasked tokens.
    """
    local = torch.stack([trainer.objective.weight(batch).double() for batch in batches]).sum()
    return comm.all_reduce(local, trainer.mesh.dp_cp)


def collect_sums(trainer: Trainer) -> dict[str, Tensor]:
    """Return and reset the sums that this rank's chunks have accumulated, in fp64."""
    sums: dict[str, Tensor] = {}
    for chunk in trainer.chunks.values():
        for name, value in chunk.sums.pop().items():
            sums[name] = sums[name] + value.double() if name in sums else value.double()
    return sums


def mean_loss(trainer: Trainer, sums: Mapping[str, Tensor], tokens: Tensor, name: str = "lm loss") -> Tensor:
    """Return a loss summed over all replicas and divided by ``tokens``; 0 without unmasked tokens. Collective.

    Only the last stage has a sum, the others add zeros; so all ranks get the same bits, in any order of summation.
    Stages that finish the pipeline early wait here for the others.
    """
    stage_sum = comm.all_reduce(sums.get(name, torch.zeros_like(tokens)), trainer.mesh.dp_cp)
    return comm.all_reduce(stage_sum, trainer.mesh.pipeline) / tokens.clamp(min=1.0)


def auxiliary_losses(trainer: Trainer, sums: Mapping[str, Tensor], tokens: Tensor) -> dict[str, Tensor]:
    """Return the auxiliary losses that the mixers declare, each a mean over tokens and layers with it; collective.

    As in Megatron-LM they are divided by their coefficients again. Each rank holds a part of every loss, also for a
    sequence that several ranks share.
    """
    coefficients = trainer.auxiliary_losses
    if not coefficients:
        return {}
    local = torch.stack([sums.get(name, torch.zeros_like(tokens)) for name in coefficients])
    means = comm.all_reduce(local, trainer.mesh.world) / tokens.clamp(min=1.0)
    return {name: mean / coefficient for (name, coefficient), mean in zip(coefficients.items(), means)}
