"""End the run after a step whose loss or gradient is not finite (``--on-nonfinite stop``)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron.distributed.micro_batch import MicroBatch
from megatron.optimizer.distributed_optimizer import UpdateResult
from megatron.training.callbacks.health import explain_nonfinite
from megatron.training.component import Component
from megatron.training.failure_report import NonFiniteError
from megatron.training.stop import HostCopy
from megatron.training.trainer import Trainer


class NonFiniteCheck(Component):
    """Ends the run after a step whose loss or gradient is not finite, unless a smaller loss scale can cure it.

    On GPUs the flag is read after the next step. That step changes nothing, so the failed one is explained with the
    weights that it has used.
    """

    def __init__(self, trainer: Trainer, late: bool | None = None) -> None:
        """Start with no step; ``late`` reads flags one step late, by default on GPUs."""
        self._trainer = trainer
        self._late = trainer.device.type == "cuda" if late is None else late
        # 0-d, nonzero after a step that is to end the run.
        self.halted = torch.zeros((), device=trainer.device)
        self._unread: tuple[HostCopy, Sequence[MicroBatch]] | None = None

    def on_loss_grad(self, loss_grad: Tensor) -> Tensor:
        """See :class:`Component`; gradients that are not finite let every rank skip the update."""
        return loss_grad.where(self.halted == 0, torch.nan)

    def after_step(self, outcome: UpdateResult) -> None:
        """See :class:`Component`."""
        minimum = self._trainer.scaler.minimum
        self.halted.copy_(outcome.nonfinite if minimum is None else outcome.nonfinite * (outcome.loss_scale <= minimum))

    def on_step_taken(self, batches: Sequence[MicroBatch]) -> None:
        """Check this step, or the one before it if flags are read late; see :class:`Component`.

        Raises:
            NonFiniteError: with the first module whose output, or parameter whose gradient, is not finite.
        """
        previous, self._unread = self._unread, (HostCopy(self.halted), batches)
        self._check(previous) if self._late else self.settle()

    def settle(self) -> None:
        """Check the last step; see :class:`Component`.

        Raises:
            NonFiniteError: see :meth:`on_step_taken`.
        """
        unread, self._unread = self._unread, None
        self._check(unread)

    def _check(self, step: tuple[HostCopy, Sequence[MicroBatch]] | None) -> None:
        if step is not None and step[0].read():
            raise NonFiniteError(explain_nonfinite(self._trainer, step[1]))
