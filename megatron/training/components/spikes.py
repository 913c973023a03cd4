"""Find spikes of the loss or the gradient norm (``--skip-spikes``) on the device, and act on them (``--on-spike``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from megatron.config.reliability import parse_spike_policy
from megatron.distributed.micro_batch import MicroBatch
from megatron.training.component import Component
from megatron.training.components.nonfinite import StepCheck
from megatron.training.components.step_incidents import act_on_step
from megatron.training.trainer import Trainer


class SpikeGuard(Component):
    """Compares loss and gradient norm with mean and standard deviation over a window of recent steps.

    Every step with a finite loss and norm enters the window, whether its update was skipped or not, so a lasting change
    of level stops being a spike. Nothing is a spike before half of the window is filled. This is the method of
    OLMo-core's step skipping (OLMo 2, arXiv 2501.00656).
    """

    name = "spikes"
    state_types: ClassVar[Mapping[str, Any]] = {"losses": [float], "grad_norms": [float]}

    def __init__(self, deviations: float, window: int, device: torch.device | str, skips: bool = True) -> None:
        """Start with an empty window.

        Args:
            deviations: a step is a spike this many standard deviations above the mean.
            window: number of steps, at least 2.
            device: of losses and norms.
            skips: skip the update of a spike.
        """
        self.deviations, self.window, self._skips = deviations, window, skips
        # Of the last step: whether it is a spike, loss and norm, their means and deviations over the steps before.
        self.seen = torch.zeros(7, dtype=torch.float64, device=device)
        self._values = torch.zeros(2, window, dtype=torch.float64, device=device)  # losses, norms; the newest last
        self._count = torch.zeros((), dtype=torch.int64, device=device)
        self._age = torch.arange(window, 0, -1, device=device)

    @classmethod
    def create(cls, trainer: Trainer) -> Self | None:
        """See :class:`Feature`."""
        options, act = trainer.config.optimizer, parse_spike_policy(trainer.config.reliability.on_spike).act
        if options.skip_spikes is None:
            return None
        return cls(options.skip_spikes, options.spike_window, trainer.device, skips=act != "log")

    def before_update(self, loss: Tensor | None, grad_norm: Tensor) -> Tensor | None:
        """See :class:`UpdateHook`.

        Raises:
            ValueError: without a loss.
        """
        if loss is None:
            raise ValueError("skip_spikes needs the loss of the step: pass it to update")
        is_spike = self.is_spike(loss, grad_norm)
        return is_spike if self._skips else None

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
        is_spike = (new > mean + self.deviations * deviation).any() & finite & ready
        self.seen.copy_(torch.cat([is_spike.double().unsqueeze(0), new, mean, deviation]))
        return is_spike

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


class SpikeCheck(StepCheck):
    """Reports spikes, and goes back if that is the policy."""

    def __init__(self, trainer: Trainer, guard: SpikeGuard, late: bool | None = None) -> None:
        """Read what ``guard`` finds; ``late`` as in :class:`StepCheck`."""
        super().__init__(trainer, late)
        self._guard = guard
        self._policy = parse_spike_policy(trainer.config.reliability.on_spike)

    @classmethod
    def create(cls, trainer: Trainer) -> Self | None:
        """See :class:`Feature`; the guard is among the components."""
        guards = [component for component in trainer.components if isinstance(component, SpikeGuard)]
        return cls(trainer, guards[0]) if guards else None

    def left(self) -> Tensor:
        """See :class:`StepCheck`."""
        return self._guard.seen

    def act_on(self, values: Any, batches: Sequence[MicroBatch]) -> None:
        """See :class:`StepCheck`.

        Raises:
            RewindNeededError: if the run is to go back.
        """
        is_spike, loss, norm, *window = values
        if is_spike:
            (mean_loss, mean_norm), (loss_deviation, norm_deviation) = window[:2], window[2:]
            facts = {
                "loss": loss,
                "grad-norm": norm,
                "mean": {"loss": mean_loss, "grad-norm": mean_norm},
                "deviation": {"loss": loss_deviation, "grad-norm": norm_deviation},
            }
            sentence = (
                f"step {batches[0].step + 1} is a spike: loss {loss:.4g} (mean {mean_loss:.4g}, deviation "
                f"{loss_deviation:.2g}), gradient norm {norm:.4g} (mean {mean_norm:.4g}, "
                f"deviation {norm_deviation:.2g})"
            )
            intact = self._policy.act != "log" and not self.late
            act_on_step(self, self._trainer, "spike", batches, self._policy, sentence, facts, intact=intact)
