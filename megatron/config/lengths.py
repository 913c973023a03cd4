"""Length of warm-up and decay of the learning rate, in samples."""

from __future__ import annotations

from typing import NamedTuple

from megatron.config.batch import global_batch, in_full_batches, total_samples
from megatron.config.run import RunConfig


class Lengths(NamedTuple):
    """Lengths of the learning-rate schedule, in samples from the start of the run."""

    warmup: float  # end of the warm-up
    decay: float  # end of the decay
    final: float | None  # length of WSD's final decay; None if not set
    total: int  # end of the run


def lengths(config: RunConfig, data_parallel_size: int, iteration: int = 0, consumed_samples: int = 0) -> Lengths:
    """Return the schedule lengths of a run. Lengths in steps are converted at the full global batch size.

    Args:
        config: the run's options.
        data_parallel_size: replicas of the model.
        iteration: steps taken before the run had its present batch size. Each counts as many samples as these steps
            consumed on average, so that a warm-up or decay that has ended stays ended.
        consumed_samples: samples consumed by those steps.
    """
    optimizer = config.optimizer
    samples_per_step = global_batch(config.training, data_parallel_size)
    consumed = in_full_batches(config.training, data_parallel_size, consumed_samples)

    def end(samples: int | None, steps: int | None) -> int | None:
        if samples is not None or steps is None:
            return samples
        if steps >= iteration:
            return consumed + (steps - iteration) * samples_per_step
        return consumed * steps // iteration

    total = total_samples(config.training, data_parallel_size, iteration, consumed_samples)
    decay = end(optimizer.lr_decay_samples, optimizer.lr_decay_iters)
    if decay is None:
        decay = total
    warmup = end(optimizer.lr_warmup_samples or None, optimizer.lr_warmup_iters) or 0
    final = optimizer.lr_wsd_decay_samples
    if final is None and optimizer.lr_wsd_decay_iters is not None:
        final = optimizer.lr_wsd_decay_iters * samples_per_step
    return Lengths(
        warmup if optimizer.lr_warmup_fraction is None else optimizer.lr_warmup_fraction * decay, decay, final, total
    )
