"""Act on steps whose loss or gradient is not finite (``--on-nonfinite``), which the device finds."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from megatron.config.reliability import Policy, parse_nonfinite_policy
from megatron.config.text import listed_ranks
from megatron.distributed import comm
from megatron.distributed.micro_batch import MicroBatch
from megatron.optimizer.distributed_optimizer import UpdateResult
from megatron.training.callbacks.health import explain_nonfinite
from megatron.training.component import Component
from megatron.training.components.step_incidents import act_on_step
from megatron.training.failure_report import NonFiniteError
from megatron.training.stop import HostCopy
from megatron.training.trainer import Trainer

FIX_OF_WEIGHTS = (
    "fix: --ckpt-step N, the step of the last checkpoint whose weights are finite; "
    "or --on-nonfinite rewind:N, which goes back by itself"
)


class StepCheck(Component):
    """Reads on the host what a step has left on the device: at once on CPUs, after the next step on GPUs."""

    def __init__(self, trainer: Trainer, late: bool | None = None) -> None:
        """Start with no step; ``late`` reads one step late, by default on GPUs."""
        self._trainer = trainer
        self.late = trainer.device.type == "cuda" if late is None else late
        self._unread: tuple[HostCopy, Sequence[MicroBatch]] | None = None

    def left(self) -> Tensor:
        """Return what a step leaves, on the device."""
        raise NotImplementedError

    def act_on(self, values: Any, batches: Sequence[MicroBatch]) -> None:
        """Act on what a step of ``batches`` has left, read as Python numbers; the same on every rank."""
        raise NotImplementedError

    def on_step_taken(self, batches: Sequence[MicroBatch]) -> None:
        """Check this step, or the one before it if they are read late; see :class:`Component`."""
        previous, self._unread = self._unread, (HostCopy(self.left()), batches)
        self._check(previous) if self.late else self.settle()

    def settle(self) -> None:
        """Check the last step; see :class:`Component`."""
        unread, self._unread = self._unread, None
        self._check(unread)

    def _check(self, step: tuple[HostCopy, Sequence[MicroBatch]] | None) -> None:
        if step is not None:
            self.act_on(step[0].read(), step[1])


class NonFiniteCheck(StepCheck):
    """Acts after a step whose loss or gradient is not finite, unless a smaller loss scale can cure it.

    On GPUs the flag is read after the next step. Unless the run goes on, that step changes nothing, so the failed one
    is explained with the weights that it has used.
    """

    def __init__(self, trainer: Trainer, late: bool | None = None) -> None:
        """Start with no step; ``late`` as in :class:`StepCheck`."""
        super().__init__(trainer, late)
        self._policy = parse_nonfinite_policy(trainer.config.training.on_nonfinite)
        # Steps of this start that were not finite.
        self._found = 0
        # 0-d, nonzero after a step that is not finite.
        self.halted = torch.zeros((), device=trainer.device)

    def on_loss_grad(self, loss_grad: Tensor) -> Tensor:
        """See :class:`Component`; gradients that are not finite let every rank skip the update."""
        return loss_grad if self._policy.act == "skip" else loss_grad.where(self.halted == 0, torch.nan)

    def after_step(self, outcome: UpdateResult) -> None:
        """See :class:`Component`."""
        minimum = self._trainer.scaler.minimum
        self.halted.copy_(outcome.nonfinite if minimum is None else outcome.nonfinite * (outcome.loss_scale <= minimum))

    def left(self) -> Tensor:
        """See :class:`StepCheck`."""
        return self.halted

    def act_on(self, values: Any, batches: Sequence[MicroBatch]) -> None:
        """See :class:`StepCheck`. Skipped steps beyond ``max_incidents`` are reported as their number doubles.

        Raises:
            NonFiniteError: with the first module whose output, or parameter whose gradient, is not finite; instead of
                a skipped step with the first weight that is not finite itself.
            RewindNeededError: if the run is to go back.
        """
        if values:
            self._found += 1
            further = self._found - self._trainer.config.reliability.max_incidents
            sentence = f"the loss or gradient of step {batches[0].step + 1} is not finite"
            policy = self._policy
            weight = find_nonfinite_weight(self._trainer) if policy.act == "skip" else ""
            if weight:  # all further steps would be skipped
                policy = Policy("stop")
                sentence += f", and neither is the weight {weight}, which --on-nonfinite skip leaves as it is"
            elif policy.act == "skip" and further > 0:
                if further & (further - 1):
                    return
                sentence += f", like {self._found - 1} before it in this start"
            explain = None if weight else partial(explain_nonfinite, self._trainer, batches)
            sentence, folder = act_on_step(
                self, self._trainer, "nonfinite", batches, policy, sentence, explain=explain, intact=not self.late
            )
            if policy.act == "stop":
                error = NonFiniteError(sentence)
                if weight:
                    error.add_note(FIX_OF_WEIGHTS)
                if folder is not None:
                    error.add_note(f"take the step again: python tools/replay_step.py {shlex.quote(folder)}")
                raise error


def find_nonfinite_weight(trainer: Trainer) -> str:
    """Return the first weight that is not finite itself, with its ranks; empty if there is none. Collective."""
    optimizer = trainer.optimizer
    optimizer.weights.wait()
    held = chain(optimizer.main_params.items(), optimizer.weights.frozen.items())
    mine = next((name for name, weight in held if not weight.isfinite().all()), "")
    by_rank = comm.all_gather_objects(mine, trainer.mesh.world)
    first = next(filter(None, by_rank), "")
    return first and f"{first} ({listed_ranks([rank for rank, name in enumerate(by_rank) if name == first])})"
