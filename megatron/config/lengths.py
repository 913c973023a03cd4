"""How long warm-up and decay of the learning rate are, in samples, however they were said."""

from __future__ import annotations

from typing import NamedTuple

from megatron.config.batch import global_batch, total_samples
from megatron.config.run import OptimizerConfig, RunConfig


class Lengths(NamedTuple):
    """In samples from the start of the run.

    Attributes:
        warmup: where the warm-up ends.
        decay: where the decay ends.
        final: how long WSD's final decay takes; None where nothing says it.
    """

    warmup: float
    decay: float
    final: float | None


def lengths(config: RunConfig, data_parallel_size: int, iteration: int = 0, consumed_samples: int = 0) -> Lengths:
    """The lengths of a run; those in steps count samples of full global batches. For the rest see `total_samples`."""
    o, unit = config.optimizer, global_batch(config.training, data_parallel_size)
    decay = _samples(o.lr_decay_samples, o.lr_decay_iters, unit)
    decay = decay or total_samples(config.training, data_parallel_size, iteration, consumed_samples)
    return Lengths(_warmup(o, unit, decay), decay, _samples(o.lr_wsd_decay_samples, o.lr_wsd_decay_iters, unit))


def _warmup(o: OptimizerConfig, unit: int, decay: float) -> float:
    if o.lr_warmup_fraction is not None:
        return o.lr_warmup_fraction * decay
    return o.lr_warmup_samples or o.lr_warmup_iters * unit


def _samples(samples: int | None, iters: int | None, unit: int) -> int | None:
    if samples is not None:
        return samples
    return None if iters is None else iters * unit
