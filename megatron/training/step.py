"""One training step, and one evaluation: what happens between reading tokens and having new weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence

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
    """The pipeline's work on every micro-batch, then the update. No wait for the device in here.

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
    loss = mean_loss(t, tokens)
    t.optimizer.finish(t.timers)
    with t.timers("optimizer"):
        outcome = update(rates, scale, loss) if update else t.optimizer.update(rates, scale, loss, t.timers)
    t.scaler.update(outcome.nonfinite)  # a spike is no overflow
    return StepMetrics(loss, outcome.grad_norm, outcome.skipped, scale, outcome.nonfinite)


@torch.no_grad()
def evaluate(trainer: Trainer, split: str = "valid") -> Tensor:
    """Mean loss per token over the first ``eval_iters`` global batches of a split; NaN where no label of it counts."""
    t, tokens = trainer, torch.zeros((), device=trainer.device, dtype=torch.float64)
    for index in range(t.config.training.eval_iters):
        batches = t.evaluation_batches(split, index)
        tokens += count_tokens(batches, t.mesh.replicas)
        t.compute(batches, None)
    return mean_loss(t, tokens).where(tokens > 0, torch.nan)


def count_tokens(batches: Sequence[MicroBatch], replicas: Group) -> Tensor:
    """Unmasked tokens of the global batch, an fp64 scalar."""
    local = torch.stack([b.loss_mask.sum(dtype=torch.float64) for b in batches]).sum()
    return comm.all_reduce(local, replicas)


def mean_loss(trainer: Trainer, tokens: Tensor) -> Tensor:
    """The loss sums that the last stages collected, over all replicas, per token; 0 where no token counts.

    Every stage but the last adds zeros, so all ranks have the same bits, whatever the order of summing. Those that are
    done with the pipeline wait for the rest of it here.
    """
    sums = [chunk.sums.take().get("lm loss") for chunk in trainer.chunks.values()]
    local = sum((x.double() for x in sums if x is not None), torch.zeros_like(tokens))
    of_stage = comm.all_reduce(local, trainer.mesh.replicas)
    return comm.all_reduce(of_stage, trainer.mesh.pipeline) / tokens.clamp(min=1.0)
