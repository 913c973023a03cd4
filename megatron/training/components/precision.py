"""Components of low precision: the loss scale of fp16, on the device, and the quantised weights of FP8."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from megatron.config.precision import PrecisionConfig
from megatron.optimizer.distributed_optimizer import UpdateResult
from megatron.training.component import Component

GROWTH, BACKOFF = 2.0, 0.5


class LossScaler(Component):
    """Constant factor on the loss, which keeps small fp16 gradients from underflowing to zero."""

    minimum: float | None = None
    """Scale above which a step that overflows may succeed later, at a smaller one; None for a constant scale."""

    def __init__(self, scale: float, device: torch.device | str) -> None:
        # The current scale, a 0-d tensor that is updated in place.
        self.scale = torch.tensor(scale, dtype=torch.float32, device=device)

    @classmethod
    def from_config(cls, config: PrecisionConfig, device: torch.device | str) -> LossScaler:
        """Return the configured scaler for fp16; a constant 1 for other dtypes."""
        if config.params_dtype != "fp16":
            return cls(1.0, device)
        if config.loss_scale is not None:
            return cls(config.loss_scale, device)
        return DynamicLossScaler(
            config.initial_loss_scale,
            device,
            minimum=config.min_loss_scale,
            window=config.loss_scale_window,
            hysteresis=config.hysteresis,
        )


class DynamicLossScaler(LossScaler):
    """Factor that follows overflows.

    The first ``hysteresis - 1`` overflows are tolerated, each further one halves the scale, down to ``minimum``.
    ``window`` steps in a row without overflow double the scale and restore the hysteresis. All ranks must pass the same
    ``found_inf``, so that their scales stay equal.
    """

    name = "loss_scaler"
    state_types: ClassVar[Mapping[str, Any]] = {"scale": float, "good_steps": int, "lives": float}
    minimum: float

    def __init__(
        self, scale: float, device: torch.device | str, *, minimum: float = 1.0, window: int = 1000, hysteresis: int = 2
    ) -> None:
        super().__init__(scale, device)
        self.minimum, self.window, self.hysteresis = minimum, window, hysteresis
        self._good_steps = torch.tensor(0, device=device)
        self._lives = torch.tensor(hysteresis, device=device)

    def after_step(self, outcome: UpdateResult) -> None:
        """See :class:`Component`."""
        self.update(outcome.nonfinite)  # a skipped spike is not an overflow

    @torch.no_grad()
    def update(self, found_inf: Tensor) -> None:
        """Update the scale after a step; ``found_inf`` is 0-d, nonzero if any gradient of any rank was not finite.

        Works in place and without synchronisation, so that a CUDA graph can replay it.
        """
        overflow = found_inf.to(torch.bool)
        lives = self._lives - overflow.to(self._lives.dtype)
        good_steps = torch.where(overflow, 0, self._good_steps + 1)
        grow = good_steps >= self.window
        smaller = (self.scale * BACKOFF).clamp_min(self.minimum)
        scale = torch.where(overflow & (lives <= 0), smaller, self.scale)
        self.scale.copy_(torch.where(grow, scale * GROWTH, scale))
        self._good_steps.copy_(torch.where(grow, 0, good_steps))
        self._lives.copy_(torch.where(grow, self.hysteresis, lives))

    def state_dict(self) -> dict[str, float | int]:
        """Return the state as plain numbers. Synchronises host and device."""
        return {
            "scale": self.scale.item(),
            "good_steps": int(self._good_steps.item()),
            "lives": int(self._lives.item()),
        }

    def load_state_dict(self, state: Mapping[str, float | int]) -> None:
        """Restore the state.

        Raises:
            ValueError: when the state is not that of a dynamic scaler.
        """
        if missing := {"scale", "good_steps", "lives"} - set(state):
            raise ValueError(
                f"the saved loss scaler lacks {', '.join(sorted(missing))}: the run that saved it had no dynamic loss "
                "scale; continue with its --loss-scale, or with --resume-mode weights-only"
            )
        self.scale.fill_(state["scale"])
        self._good_steps.fill_(state["good_steps"])
        self._lives.fill_(state["lives"])
