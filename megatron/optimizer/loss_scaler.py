"""Loss scaling for fp16, and detection of loss and gradient-norm spikes; both on the device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from megatron.config.optimizer import OptimizerConfig
from megatron.config.precision import PrecisionConfig

GROWTH, BACKOFF = 2.0, 0.5


class LossScaler:
    """Constant or dynamic factor on the loss, which keeps small fp16 gradients from underflowing to zero.

    Dynamic: the first ``hysteresis - 1`` overflows are tolerated, each further one halves the scale, down to
    ``minimum``. ``window`` steps in a row without overflow double the scale and restore the hysteresis. All ranks must
    pass the same ``found_inf``, so that their scales stay equal.
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
        # The current scale, a 0-d tensor that is updated in place.
        self.scale = torch.tensor(scale, dtype=torch.float32, device=device)
        self.dynamic, self.minimum, self.window, self.hysteresis = dynamic, minimum, window, hysteresis
        self._good_steps = torch.tensor(0, device=device)
        self._lives = torch.tensor(hysteresis, device=device)

    @classmethod
    def from_config(cls, config: PrecisionConfig, device: torch.device | str) -> LossScaler:
        """Return the configured scaler for fp16; a constant 1 for other dtypes."""
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
        """Update the scale after a step; ``found_inf`` is 0-d, nonzero if any gradient of any rank was not finite.

        Works in place and without synchronisation, so that a CUDA graph can replay it.
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

    def incurable(self, found_inf: Tensor, scale: Tensor) -> Tensor:
        """Return ``found_inf`` of a step at ``scale``, or 0 if the step may succeed at a smaller scale."""
        return found_inf * (scale <= self.minimum) if self.dynamic else found_inf

    def state_dict(self) -> dict[str, float | int]:
        """Return the state as plain numbers; empty unless dynamic. Synchronises host and device."""
        if not self.dynamic:
            return {}
        return {
            "scale": self.scale.item(),
            "good_steps": int(self._good_steps.item()),
            "lives": int(self._lives.item()),
        }

    def load_state_dict(self, state: Mapping[str, float | int]) -> None:
        """Restore the state; ignored unless dynamic.

        Raises:
            ValueError: when the state is not that of a dynamic scaler.
        """
        if not self.dynamic:
            return
        if missing := {"scale", "good_steps", "lives"} - set(state):
            raise ValueError(
                f"the saved loss scaler lacks {', '.join(sorted(missing))}: the run that saved it had no dynamic loss "
                "scale; continue with its --loss-scale, or with --resume-mode weights-only"
            )
        self.scale.fill_(state["scale"])
        self._good_steps.fill_(state["good_steps"])
        self._lives.fill_(state["lives"])


class SpikeGuard:
    """Compares loss and gradient norm with mean and standard deviation over a window of recent steps.

    Every step with a finite loss and norm enters the window, whether its update was skipped or not, so a lasting change
    of level stops being a spike. Nothing is a spike before half of the window is filled. This is the method of
    OLMo-core's step skipping (OLMo 2, arXiv 2501.00656).
    """

    def __init__(self, deviations: float, window: int, device: torch.device | str) -> None:
        """Start with an empty window.

        Args:
            deviations: a step is a spike this many standard deviations above the mean.
            window: number of steps, at least 2.
            device: of losses and norms.
        """
        self.deviations, self.window = deviations, window
        self._values = torch.zeros(2, window, dtype=torch.float64, device=device)  # losses, norms; the newest last
        self._count = torch.zeros((), dtype=torch.int64, device=device)
        self._age = torch.arange(window, 0, -1, device=device)

    @classmethod
    def from_config(cls, config: OptimizerConfig, device: torch.device | str) -> SpikeGuard | None:
        """Return the configured guard, or None without ``skip_spikes``."""
        return None if config.skip_spikes is None else cls(config.skip_spikes, config.spike_window, device)

    @torch.no_grad()
    def is_spike(self, loss: Tensor, grad_norm: Tensor) -> Tensor:
        """Return whether a step is a spike, as a 0-d bool on the device, and add the step to the window.

        Args:
            loss: of the step, 0-d, equal on all ranks.
            grad_norm: before clipping, 0-d, equal on all ranks.
        """
        new = torch.stack([loss.double(), grad_norm.double()])
        known = self._age <= self._count
        mean = self._values.where(known, 0.0).sum(1) / self._count.clamp(min=1)
        squares = (self._values - mean.unsqueeze(1)).square().where(known, 0.0).sum(1)
        deviation = (squares / (self._count - 1).clamp(min=1)).sqrt()
        finite, ready = new.isfinite().all(), self._count >= max(2, self.window // 2)
        entered = torch.cat([self._values[:, 1:], new.unsqueeze(1)], dim=1)
        self._values.copy_(torch.where(finite, entered, self._values))
        self._count.add_(finite).clamp_(max=self.window)
        return (new > mean + self.deviations * deviation).any() & finite & ready

    def state_dict(self) -> dict[str, list[float]]:
        """Return the window as plain numbers, oldest first. Synchronises host and device."""
        losses, norms = self._values[:, self.window - int(self._count.item()) :].tolist()
        return {"losses": losses, "grad_norms": norms}

    def load_state_dict(self, state: Mapping[str, Sequence[float]]) -> None:
        """Restore the window; a smaller one keeps the newest steps."""
        seen = torch.tensor([state["losses"], state["grad_norms"]], dtype=torch.float64)[:, -self.window :]
        count = seen.shape[1]
        self._values.zero_()[:, self.window - count :] = seen
        self._count.fill_(count)
