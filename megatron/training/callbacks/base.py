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

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby

from megatron.checkpoint.location import Location
from megatron.distributed.micro_batch import MicroBatch
from megatron.training.component import Component
from megatron.training.loggers.base import Metrics
from megatron.training.loggers.console import print_warning
from megatron.training.loggers.run_logger import RunLogger
from megatron.training.metrics import MetricsWindow, StepMetrics
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
        """Keep the parts of the run. Called after a checkpoint is loaded and before training starts."""
        self.trainer = trainer


STEP_END_HOOKS = "on_step_end", "on_iteration_end"
"""Hooks that are called after a step."""


class CallbackList:
    """Calls the hooks of a trainer's components in order, and names a user's callback in the errors that it raises."""

    def __init__(self, trainer: Trainer, log: RunLogger) -> None:
        """Give the components of ``trainer`` the log."""
        self._trainer = trainer
        self._due: list[Component] = []  # in the current step
        for component in trainer.components:
            component.log = log

    @property
    def observes_modules(self) -> bool:
        """True if a callback of this step uses hooks of modules."""
        return any(callback.observes_modules for callback in self._due)

    @property
    def pausing(self) -> bool:
        """True if a callback pauses the clock at the end of this step, which waits for the device."""
        return any(self._overrides(c, hook) and c.pauses for c in self._due for hook in STEP_END_HOOKS)

    def on_train_start(self) -> None:
        """See :class:`Component`."""
        self._call("on_train_start", self._trainer.components)

    def on_step_start(self, window: MetricsWindow) -> None:
        """See :class:`Component`. With a ``window``, whose clock they pause, methods are collective."""
        step = self._trainer.iteration + 1
        self._due = [c for c in self._trainer.components if step % c.interval == 0]
        self._call_paused("on_step_start", self._due, window)

    def on_step_taken(self, batches: Sequence[MicroBatch]) -> None:
        """See :class:`Component`."""
        self._call("on_step_taken", self._trainer.components, batches)

    def settle(self) -> None:
        """See :class:`Component`."""
        self._call("settle", self._trainer.components)

    def on_step_end(self, window: MetricsWindow, metrics: StepMetrics) -> None:
        """See :class:`Component`."""
        self._call_paused("on_step_end", self._due, window, metrics)

    def on_log(self, window: MetricsWindow, metrics: Metrics) -> None:
        """See :class:`Component`."""
        self._call_paused("on_log", self._trainer.components, window, metrics)

    def on_evaluate(self, metrics: Metrics) -> None:
        """See :class:`Component`; the clock is paused during evaluations."""
        self._call("on_evaluate", self._trainer.components, metrics)

    def on_save(self, path: Location) -> None:
        """See :class:`Component`."""
        self._call("on_save", self._trainer.components, path)

    def on_iteration_end(self, window: MetricsWindow) -> None:
        """See :class:`Component`."""
        self._call_paused("on_iteration_end", self._due, window)

    def on_stop(self, error: BaseException | None) -> None:
        """See :class:`Component`. Every callback is called; after an error, further errors are warnings."""
        for callback in self._trainer.components:
            try:
                self._call("on_stop", [callback], error)
            except Exception as other:
                if error is None:
                    raise
                print_warning(f"{type(callback).__name__}.on_stop failed after the error, too: {other}")

    def _call_paused(self, hook: str, found: Iterable[Component], window: MetricsWindow, *arguments: object) -> None:
        """Call a hook on those callbacks that override it, with the weights complete and the clock of steps paused."""
        overriding = [c for c in found if self._overrides(c, hook)]
        for pauses, group in groupby(overriding, key=lambda callback: callback.pauses):
            if not pauses:
                self._call(hook, group, *arguments)
                continue
            with window.paused():
                self._trainer.optimizer.weights.wait()
                self._call(hook, group, *arguments)

    @staticmethod
    def _overrides(callback: Component, hook: str) -> bool:
        return getattr(type(callback), hook) is not getattr(Component, hook)

    def _call(self, hook: str, callbacks: Iterable[Component], *arguments: object) -> None:
        for callback in callbacks:
            with name_in_errors(callback.plugin, hook):
                getattr(callback, hook)(*arguments)


@contextmanager
def name_in_errors(name: str | None, where: str) -> Iterator[None]:
    """Add a note with the name of a user's callback to errors raised inside; without a name do nothing."""
    try:
        yield
    except Exception as error:
        if name is not None:
            error.add_note(f"raised by the callback {name} (--plugin), in {where}")
        raise
