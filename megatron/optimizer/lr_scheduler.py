"""Learning-rate and weight-decay schedules, as pure functions of the samples consumed so far.

`STYLES` has the shapes after the warm-up by the choices of ``--lr-decay-style``; a plugin adds one with
``register("lr_schedule", name)``. `CURVES` has the curves that decays of both are made of.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from megatron.config.batch import ScheduleLengths
from megatron.config.optimizer import OptimizerConfig
from megatron.config.option import WithPluginOptions
from megatron.config.plugins import registered

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Rates:
    """Learning rates and weight decay of an update."""

    # A 0-d device tensor if a CUDA graph must read it from memory.
    lr: float | Tensor
    # Before the factors of parameter groups.
    weight_decay: float
    # Learning rate of the embeddings and the output layer; None to use ``lr``.
    decoupled_lr: float | Tensor | None = None


Curve = Callable[[float], float]
"""A curve that falls from 1 at 0 to 0 at 1."""

CURVES: dict[str, Curve] = {
    "linear": lambda t: 1.0 - t,
    "cosine": lambda t: 0.5 * (1.0 + math.cos(math.pi * t)),
    "exponential": lambda t: 2.0 * 0.5**t - 1.0,  # MiniCPM's halving, shifted so that it ends at 0
    "minus_sqrt": lambda t: 1.0 - math.sqrt(t),
}


@dataclass(frozen=True)
class LearningRateSchedule(WithPluginOptions):
    """Megatron-LM's schedules, with all lengths in samples.

    A step uses the value at the samples consumed *before* it, so the first step of a warm-up runs at ``warmup_init``.
    There is no state: resuming, or a growing batch size, needs none.
    """

    # Learning rate at the end of the warm-up.
    peak: float
    # Learning rate after the decay.
    floor: float
    # Learning rate after the warm-up.
    shape: LearningRateStyle
    # Length of the linear warm-up from ``warmup_init`` to ``peak``.
    warmup: float
    warmup_init: float
    # End of the decay, from the start of the run.
    decay: float
    # Curve of WSD's final decay.
    wsd_style: str
    # Length of WSD's final decay, which ends at ``decay``.
    wsd_decay: float
    # Weight decay at 0 and at ``total`` samples.
    weight_decay_start: float
    weight_decay_end: float
    # ``constant`` (``weight_decay_end`` throughout), ``linear`` or ``cosine``.
    weight_decay_style: str
    # End of the ramp of weight decay.
    total: float
    # Peak and floor of embeddings and output layer, if they differ.
    decoupled: tuple[float, float] | None = None
    # Samples that are consumed when the schedule begins.
    begin: float = 0

    @classmethod
    def from_config(
        cls, config: OptimizerConfig, lengths: ScheduleLengths, scale: float = 1.0, begin: float = 0
    ) -> LearningRateSchedule:
        """Return the schedule of a run; ``scale`` and ``begin`` are those of :mod:`megatron.config.batch`.

        The warm-up begins at the unscaled ``lr_warmup_init``, as in Goyal et al. 2017 (arXiv 1706.02677).
        """
        start, end = config.start_weight_decay, config.end_weight_decay
        decoupled = None
        if config.decoupled_lr is not None:
            floor = config.decoupled_min_lr
            decoupled = config.decoupled_lr * scale, (config.min_lr if floor is None else floor) * scale
        return cls(
            peak=config.lr * scale,
            floor=config.min_lr * scale,
            shape={**registered("lr_schedule"), **STYLES}[config.lr_decay_style],
            warmup=lengths.warmup,
            warmup_init=config.lr_warmup_init,
            decay=lengths.decay,
            wsd_style=config.lr_wsd_decay_style,
            wsd_decay=lengths.final or 0,
            weight_decay_start=config.weight_decay if start is None else start,
            weight_decay_end=config.weight_decay if end is None else end,
            weight_decay_style=config.weight_decay_incr_style,
            total=lengths.total,
            begin=begin,
            decoupled=decoupled,
            plugin_options=config.plugin_options,
        )

    def rates(self, consumed_samples: int) -> Rates:
        """Return the rates of the step that starts after ``consumed_samples`` of the run."""
        samples = consumed_samples - self.begin
        return Rates(self.learning_rate(samples), self.weight_decay(samples), self.decoupled_learning_rate(samples))

    def learning_rate(self, samples: float) -> float:
        """Return the learning rate of the step that starts after ``samples`` samples of the schedule."""
        if self.warmup > 0 and samples <= self.warmup:
            return self.warmup_init + (self.peak - self.warmup_init) * samples / self.warmup
        return self.shape(self, samples)

    def progress(self, samples: float) -> float:
        """Return the part of the decay that is over: 0 after the warm-up, 1 at the end of the decay and after it."""
        return (samples - self.warmup) / (self.decay - self.warmup) if samples <= self.decay else 1.0

    def above_floor(self, share: float) -> float:
        """Return the learning rate that is ``share`` of the way from the floor to the peak."""
        return self.floor + (self.peak - self.floor) * share

    def decoupled_learning_rate(self, samples: float) -> float | None:
        """Return the learning rate of the embeddings and the output layer; None if it is the common one."""
        if self.decoupled is None:
            return None
        peak, floor = self.decoupled
        return replace(self, peak=peak, floor=floor).learning_rate(samples)

    def weight_decay(self, samples: float) -> float:
        """Return the weight decay of the step that starts after ``samples`` samples of the schedule."""
        start, end = self.weight_decay_start, self.weight_decay_end
        if self.weight_decay_style == "constant" or samples > self.total:
            return end
        return start + (end - start) * (1.0 - CURVES[self.weight_decay_style](samples / self.total))


LearningRateStyle = Callable[[LearningRateSchedule, float], float]
"""From a schedule, and the samples of it before a step after the warm-up, to the step's learning rate."""


def _constant(schedule: LearningRateSchedule, samples: float) -> float:
    return schedule.peak


def _along(curve: Curve, schedule: LearningRateSchedule, samples: float) -> float:
    return schedule.above_floor(curve(schedule.progress(samples)))


def _inverse_square_root(schedule: LearningRateSchedule, samples: float) -> float:
    rate = schedule.peak * math.sqrt(max(schedule.warmup, 1) / max(samples, 1))
    return max(schedule.floor, rate) if samples <= schedule.decay else schedule.floor


def _warmup_stable_decay(schedule: LearningRateSchedule, samples: float) -> float:
    into_decay = samples - (schedule.decay - schedule.wsd_decay)
    part = min(1.0, into_decay / schedule.wsd_decay) if into_decay > 0 else 0.0
    return schedule.above_floor(CURVES[schedule.wsd_style](part))


STYLES: dict[str, LearningRateStyle] = {
    "constant": _constant,
    "linear": partial(_along, CURVES["linear"]),
    "cosine": partial(_along, CURVES["cosine"]),
    "inverse-square-root": _inverse_square_root,
    "WSD": _warmup_stable_decay,
}
"""Built-in shapes by the choices of ``--lr-decay-style``."""
