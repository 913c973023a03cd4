"""Skip updates at spikes of the loss or the gradient norm (``--skip-spikes``), on the device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from megatron.training.component import Component
from megatron.training.trainer import Trainer


class SpikeGuard(Component):
    """Compares loss and gradient norm with mean and standard deviation over a window of recent steps.

    Every step with a finite loss and norm enters the window, whether its update was skipped or not, so a lasting change
    of level stops being a spike. Nothing is a spike before half of the window is filled. This is the method of
    OLMo-core's step skipping (OLMo 2, arXiv 2501.00656).
    """

    name = "spikes"
    state_types: ClassVar[Mapping[str, Any]] = {"losses": [float], "grad_norms": [float]}

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
    def create(cls, trainer: Trainer) -> Self | None:
        """See :class:`Feature`."""
        options = trainer.config.optimizer
        return None if options.skip_spikes is None else cls(options.skip_spikes, options.spike_window, trainer.device)

    def before_update(self, loss: Tensor | None, grad_norm: Tensor) -> Tensor | None:
        """See :class:`UpdateHook`.

        Raises:
            ValueError: without a loss.
        """
        if loss is None:
            raise ValueError("skip_spikes needs the loss of the step: pass it to update")
        return self.is_spike(loss, grad_norm)

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
