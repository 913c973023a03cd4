"""Learning-rate and weight-decay schedules, as pure functions of the samples consumed so far."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from megatron.config.batch import ScheduleLengths
from megatron.config.optimizer import OptimizerConfig

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


@dataclass(frozen=True)
class LearningRateSchedule:
    """Megatron-LM's schedules, with all lengths in samples.

    A step uses the value at the samples consumed *before* it, so the first step of a warm-up runs at ``warmup_init``.
    There is no state: resuming, or a growing batch size, needs none.
    """

    # Learning rate after the warm-up.
    peak: float
    # Learning rate after the decay.
    floor: float
    # ``constant``, ``linear``, ``cosine``, ``inverse-square-root`` or ``WSD`` (warm-up, stable, decay).
    style: str
    # Length of the linear warm-up from ``warmup_init`` to ``peak``.
    warmup: float
    warmup_init: float
    # End of the decay, from the start of the run.
    decay: float
    # Shape of WSD's final decay: ``exponential``, ``linear``, ``cosine`` or ``minus_sqrt``.
    wsd_style: str
    # Length of WSD's final decay, which ends at ``decay``.
    wsd_decay: float
    # Weight decay at 0 and at ``total`` samples.
    weight_decay_start: float
    weight_decay_end: float
    # ``constant`` (``weight_decay_end`` throughout), ``linear`` or ``cosine``.
    weight_decay_style: str
    # Samples of the run.
    total: int
    # Peak and floor of embeddings and output layer, if they differ.
    decoupled: tuple[float, float] | None = None

    @classmethod
    def from_config(cls, config: OptimizerConfig, lengths: ScheduleLengths, scale: float = 1.0) -> LearningRateSchedule:
        """Return the schedule of a run; ``scale`` is :func:`megatron.config.batch.lr_scale`.

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
            style=config.lr_decay_style,
            warmup=lengths.warmup,
            warmup_init=config.lr_warmup_init,
            decay=lengths.decay,
            wsd_style=config.lr_wsd_decay_style,
            wsd_decay=lengths.final or 0,
            weight_decay_start=config.weight_decay if start is None else start,
            weight_decay_end=config.weight_decay if end is None else end,
            weight_decay_style=config.weight_decay_incr_style,
            total=lengths.total,
            decoupled=decoupled,
        )

    def rates(self, samples: int) -> Rates:
        """Return the rates of the step that starts after ``samples`` samples."""
        return Rates(self.learning_rate(samples), self.weight_decay(samples), self.decoupled_learning_rate(samples))

    def learning_rate(self, samples: int) -> float:
        """Return the learning rate of the step that starts after ``samples`` samples."""
        if self.warmup > 0 and samples <= self.warmup:
            return self.warmup_init + (self.peak - self.warmup_init) * samples / self.warmup
        if self.style == "constant":
            return self.peak
        if samples > self.decay:
            return self.floor
        if self.style == "inverse-square-root":
            return max(self.floor, self.peak * math.sqrt(max(self.warmup, 1) / max(samples, 1)))
        return self.floor + (self.peak - self.floor) * self._remaining(samples)

    def decoupled_learning_rate(self, samples: int) -> float | None:
        """Return the learning rate of the embeddings and the output layer; None if it is the common one."""
        if self.decoupled is None:
            return None
        peak, floor = self.decoupled
        return replace(self, peak=peak, floor=floor).learning_rate(samples)

    def _remaining(self, samples: int) -> float:
        """Return the remaining fraction of (peak - floor): 1 after the warm-up, 0 at the end of the decay."""
        if self.style != "WSD":
            return _decay_curve(self.style, (samples - self.warmup) / (self.decay - self.warmup))
        start = self.decay - self.wsd_decay
        return 1.0 if samples <= start else _decay_curve(self.wsd_style, (samples - start) / self.wsd_decay)

    def weight_decay(self, samples: int) -> float:
        """Return the weight decay of the step that starts after ``samples`` samples."""
        start, end = self.weight_decay_start, self.weight_decay_end
        if self.weight_decay_style == "constant" or samples > self.total:
            return end
        return start + (end - start) * (1.0 - _decay_curve(self.weight_decay_style, samples / self.total))


def _decay_curve(style: str, t: float) -> float:
    """Return the value at ``t`` of a curve that falls from 1 at 0 to 0 at 1."""
    match style:
        case "linear":
            return 1.0 - t
        case "cosine":
            return 0.5 * (1.0 + math.cos(math.pi * t))
        case "exponential":  # MiniCPM's halving, shifted so that it ends at 0
            return 2.0 * 0.5**t - 1.0
        case "minus_sqrt":
            return 1.0 - math.sqrt(t)
    raise ValueError(f"unknown decay style {style!r}: linear, cosine, exponential or minus_sqrt")
