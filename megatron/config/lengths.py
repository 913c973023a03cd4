"""How long warm-up and decay of the learning rate are, in samples, however they were said."""

from __future__ import annotations

from typing import NamedTuple

from megatron.config.batch import global_batch, in_full_batches, total_samples
from megatron.config.run import RunConfig


class Lengths(NamedTuple):
    """In samples from the start of the run.

    Attributes:
        warmup: where the warm-up ends.
        decay: where the decay ends.
        final: how long WSD's final decay takes; None where nothing says it.
        total: where the run ends.
    """

    warmup: float
    decay: float
    final: float | None
    total: int


def lengths(config: RunConfig, data_parallel_size: int, iteration: int = 0, consumed_samples: int = 0) -> Lengths:
    """The lengths of a run; those in steps count samples of full global batches.

    Args:
        config: of the run.
        data_parallel_size: copies of the model.
        iteration: steps taken before the run had its present batches. Of these, each counts as many samples as they
            used on average, so that what was over stays over.
        consumed_samples: samples they used.

    """
    o, unit = config.optimizer, global_batch(config.training, data_parallel_size)
    used = in_full_batches(config.training, data_parallel_size, consumed_samples)

    def end(samples: int | None, steps: int | None) -> int | None:
        if samples is not None or steps is None:
            return samples
        return used + (steps - iteration) * unit if steps >= iteration else used * steps // iteration

    total = total_samples(config.training, data_parallel_size, iteration, consumed_samples)
    until = end(o.lr_decay_samples, o.lr_decay_iters)
    decay = total if until is None else until
    warmup = end(o.lr_warmup_samples or None, o.lr_warmup_iters) or 0
    final = None if o.lr_wsd_decay_iters is None else o.lr_wsd_decay_iters * unit
    return Lengths(
        warmup if o.lr_warmup_fraction is None else o.lr_warmup_fraction * decay,
        decay,
        final if o.lr_wsd_decay_samples is None else o.lr_wsd_decay_samples,
        total,
    )
