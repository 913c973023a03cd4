"""Callbacks: code that runs at fixed points of the training loop without being part of it.

A user's callback is a subclass of :class:`Callback` in a module given by ``--plugin``::

    @register("callback", "weight-norm")
    class WeightNorm(Callback):
        interval = 100

        def on_step_end(self, metrics: StepMetrics) -> None:
            norm = sum(w.float().square().sum() for w in self.trainer.optimizer.weights.shards.values()).sqrt()
            self.log.note(f"norm of the weights that rank 0 updates: {norm:.3f}")

Every hook is called on all ranks, in the same order, so a callback may communicate; exceptions are documented.
"""

from __future__ import annotations

from megatron.training.component import Component
from megatron.training.trainer import Trainer


class Callback(Component):
    """Base class of users' callbacks: a :class:`~megatron.training.component.Component` that is given the run.

    Override the hooks that are needed; the others cost nothing. While a hook runs, the weights are complete and the
    step clock is paused, unless its description or ``pauses`` excludes it. With ZeRO-3, parameters read as NaN outside
    of ``trainer.optimizer.weights.gathered(chunk.parts)``; ``trainer.optimizer.weights.shards`` are always there.
    ``on_step_start`` is called before step ``trainer.iteration + 1``, and ``on_step_end`` after step
    ``trainer.iteration``, with clipped gradients. Do not change the position of the run.

    ``state_dict`` and ``tensors`` are saved under the name of the callback, and restored before ``on_train_start``.
    """

    def __init__(self, trainer: Trainer) -> None:
        """Keep the parts of the run. Its weights, data and position are those of the start from ``on_start`` on."""
        self.trainer = trainer
