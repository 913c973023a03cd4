"""The loss scale of fp16 training, kept and updated on the device."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from megatron.config.run import PrecisionConfig

GROWTH, BACKOFF = 2.0, 0.5


class LossScaler:
    """What the loss is multiplied by before backward, so that small fp16 gradients do not become zero.

    Dynamic: every overflow spends one of ``hysteresis`` lives, and once none is left it also halves the scale
    (never below ``minimum``); ``window`` good steps in a row double the scale and give all lives back.
    Otherwise the scale stays what it is. Every rank must pass the same ``found_inf``; then the scales agree.

    Attributes:
        scale: the scale in force, a 0-d fp32 tensor on the device; updated in place.
    """

    def __init__(
        self,
        scale: float,
        device: torch.device | str,
        *,
        dynamic: bool = False,
        minimum: float = 1.0,
        window: int = 1000,
        hysteresis: int = 2,
    ) -> None:
        self.scale = torch.tensor(scale, dtype=torch.float32, device=device)
        self.dynamic, self.minimum, self.window, self.hysteresis = dynamic, minimum, window, hysteresis
        self._good_steps = torch.tensor(0, device=device)
        self._lives = torch.tensor(hysteresis, device=device)

    @classmethod
    def from_config(cls, config: PrecisionConfig, device: torch.device | str) -> LossScaler:
        """Dynamic or constant for fp16, as configured; 1 for every other dtype."""
        if config.params_dtype != "fp16":
            return cls(1.0, device)
        if config.loss_scale is not None:
            return cls(config.loss_scale, device)
        return cls(
            config.initial_loss_scale,
            device,
            dynamic=True,
            minimum=config.min_loss_scale,
            window=config.loss_scale_window,
            hysteresis=config.hysteresis,
        )

    @torch.no_grad()
    def update(self, found_inf: Tensor) -> None:
        """Take notice of a step; ``found_inf`` is 0-d, nonzero if any gradient of any rank was not finite.

        Runs on the device without waiting for it, in place: a recorded step (CUDA graph) repeats it.
        """
        if not self.dynamic:
            return
        overflow = found_inf.to(torch.bool)
        lives = self._lives - overflow.to(self._lives.dtype)
        good_steps = torch.where(overflow, 0, self._good_steps + 1)
        grow = good_steps >= self.window
        smaller = (self.scale * BACKOFF).clamp_min(self.minimum)
        scale = torch.where(overflow & (lives <= 0), smaller, self.scale)
        self.scale.copy_(torch.where(grow, scale * GROWTH, scale))
        self._good_steps.copy_(torch.where(grow, 0, good_steps))
        self._lives.copy_(torch.where(grow, self.hysteresis, lives))

    def can_shrink(self, scale: Tensor) -> bool:
        """Whether a step that overflowed at ``scale`` may succeed with a smaller one; waits for the device."""
        return self.dynamic and scale.item() > self.minimum

    def state_dict(self) -> dict[str, float | int]:
        """Plain numbers to save; waits for the device. Empty unless dynamic: the config says the rest."""
        if not self.dynamic:
            return {}
        return {
            "scale": self.scale.item(),
            "good_steps": int(self._good_steps.item()),
            "lives": int(self._lives.item()),
        }

    def load_state_dict(self, state: Mapping[str, float | int]) -> None:
        """Continue from what ``state_dict`` returned; ignored by a scaler that is not dynamic.

        Raises:
            ValueError: when a dynamic scaler is given the state of one that was not.
        """
        if not self.dynamic:
            return
        if missing := {"scale", "good_steps", "lives"} - set(state):
            raise ValueError(
                f"the saved loss scaler lacks {', '.join(sorted(missing))}: the run that saved it had no dynamic loss "
                "scale; continue with its --loss-scale, or start the scale anew"
            )
        self.scale.fill_(state["scale"])
        self._good_steps.fill_(state["good_steps"])
        self._lives.fill_(state["lives"])
