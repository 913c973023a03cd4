"""Learning rate and weight decay as pure functions of the samples consumed so far."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from megatron.config.lengths import Lengths
from megatron.config.problems import Problem, UserError
from megatron.config.run import OptimizerConfig

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Rates:
    """What an update is made with.

    Attributes:
        lr: learning rate; a 0-d tensor where the GPU is to read it from its own memory.
        weight_decay: of the parameters that decay.
        decoupled_lr: learning rate of the embeddings and the output layer; None where it is ``lr``.
    """

    lr: float | Tensor
    weight_decay: float
    decoupled_lr: float | Tensor | None = None


@dataclass(frozen=True)
class Schedule:
    """Megatron-LM's schedules, every length in samples.

    A step uses the value at the samples consumed *before* it, so the first step of a warm-up runs at
    ``warmup_init``. Nothing is stored between steps: resuming, or growing the batch, needs no state.

    Attributes:
        peak: learning rate after the warm-up.
        floor: learning rate from the end of the decay on.
        style: ``constant``, ``linear``, ``cosine``, ``inverse-square-root`` or ``WSD`` (stay at the peak, then fall).
        warmup: length of the warm-up, a straight line from ``warmup_init`` to ``peak``.
        warmup_init: learning rate of the first step of a warm-up.
        decay: where the decay ends, counted from the start of the run.
        wsd_style: shape of WSD's fall: ``exponential``, ``linear``, ``cosine`` or ``minus_sqrt``.
        wsd_decay: length of WSD's fall, the last part of ``decay``.
        weight_decay_start: weight decay at 0 samples.
        weight_decay_end: weight decay at ``total`` samples.
        weight_decay_style: ``constant`` (the end value throughout), ``linear`` or ``cosine``.
        total: samples of the run.
        decoupled: peak and floor of the embeddings and the output layer where they have their own.
    """

    peak: float
    floor: float
    style: str
    warmup: float
    warmup_init: float
    decay: float
    wsd_style: str
    wsd_decay: float
    weight_decay_start: float
    weight_decay_end: float
    weight_decay_style: str
    total: int
    decoupled: tuple[float, float] | None = None

    @classmethod
    def from_config(cls, config: OptimizerConfig, lengths: Lengths) -> Schedule:
        """The schedule of a run of these ``lengths``.

        Raises:
            UserError: when the lengths contradict each other.
        """
        start, end = config.start_weight_decay, config.end_weight_decay
        return cls(
            peak=config.lr,
            floor=config.min_lr,
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
            decoupled=_decoupled(config),
        )

    def __post_init__(self) -> None:
        if self.style != "constant" and not self.warmup < self.decay:
            sentence = (
                f"the warm-up takes {self.warmup:g} samples, but the learning rate reaches its minimum after "
                f"{self.decay:g}; the warm-up must be shorter"
            )
            raise UserError([Problem("E403", sentence)])
        if self.style == "WSD" and not 0 < self.wsd_decay <= self.decay - self.warmup:
            sentence = (
                f"WSD's final decay of {self.wsd_decay:g} samples must fit between the end of the warm-up "
                f"({self.warmup:g}) and that of the decay ({self.decay:g}); set --lr-wsd-decay-iters or -samples"
            )
            raise UserError([Problem("E404", sentence)])

    def rates(self, samples: int) -> Rates:
        """What the step that starts after ``samples`` samples is made with."""
        return Rates(self.learning_rate(samples), self.weight_decay(samples), self.decoupled_learning_rate(samples))

    def learning_rate(self, samples: int) -> float:
        """Learning rate of the step that starts after ``samples`` samples."""
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
        """Learning rate of the embeddings and the output layer in that step; None where it is everybody's."""
        if self.decoupled is None:
            return None
        peak, floor = self.decoupled
        return replace(self, peak=peak, floor=floor).learning_rate(samples)

    def _remaining(self, samples: int) -> float:
        """The share of (peak - floor) that is left: 1 after the warm-up, 0 at the end of the decay."""
        if self.style != "WSD":
            return _falling(self.style, (samples - self.warmup) / (self.decay - self.warmup))
        start = self.decay - self.wsd_decay
        return 1.0 if samples <= start else _falling(self.wsd_style, (samples - start) / self.wsd_decay)

    def weight_decay(self, samples: int) -> float:
        """Weight decay of the step that starts after ``samples`` samples."""
        start, end = self.weight_decay_start, self.weight_decay_end
        if self.weight_decay_style == "constant" or samples > self.total:
            return end
        return start + (end - start) * (1.0 - _falling(self.weight_decay_style, samples / self.total))


def _decoupled(config: OptimizerConfig) -> tuple[float, float] | None:
    if config.decoupled_lr is None:
        return None
    floor = config.decoupled_min_lr
    return config.decoupled_lr, config.min_lr if floor is None else floor


def _falling(style: str, t: float) -> float:
    """A curve from 1 at ``t`` = 0 to 0 at ``t`` = 1."""
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
