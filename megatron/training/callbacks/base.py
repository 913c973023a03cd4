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

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import groupby

from megatron.checkpoint.location import Location
from megatron.config.plugins import registered
from megatron.training.loggers.base import Metrics
from megatron.training.loggers.console import print_warning
from megatron.training.loggers.run_logger import RunLogger
from megatron.training.metrics import MetricsWindow, StepMetrics
from megatron.training.trainer import Trainer


class Callback:
    """Base class. Override the hooks that are needed; the others cost nothing.

    While a hook runs, the weights are complete and the step clock is paused, unless its description or ``pauses``
    excludes it. With ZeRO-3, parameters read as NaN outside of ``trainer.optimizer.weights.gathered(chunk.parts)``;
    ``trainer.optimizer.weights.shards`` are always there. Do not change ``trainer.iteration`` or the data position.
    """

    interval: int = 1
    """The step hooks are called in every ``interval``-th step only. Must be the same on all ranks."""

    pauses: bool = True
    """False for step hooks that belong to the step: their time counts, no barrier is added, and weights may still be
    on their way from other ranks."""

    observes_modules: bool = False
    """True if the step hooks use hooks of modules: a CUDA graph would not run them, so these steps run eagerly."""

    log: RunLogger
    """Log of the run, set before ``on_train_start``."""

    def __init__(self, trainer: Trainer) -> None:
        """Keep the parts of the run. Called after a checkpoint is loaded and before training starts."""
        self.trainer = trainer

    def on_train_start(self) -> None:
        """Act once before the first step of this start, or before the evaluation with ``--skip-train``."""

    def on_step_start(self) -> None:
        """Act before the micro-batches of step ``trainer.iteration + 1`` are read. A step hook."""

    def on_step_end(self, metrics: StepMetrics) -> None:
        """Act after step ``trainer.iteration``, before it is logged, evaluated or saved. A step hook.

        Args:
            metrics: 0-d tensors on the device; reading one waits for the device.
        """

    def on_log(self, metrics: Metrics) -> None:
        """Act after the log line of ``metrics``, which covers the steps since the last one."""

    def on_evaluate(self, metrics: Metrics) -> None:
        """Act after the evaluation of one split."""

    def on_save(self, path: Location) -> None:
        """Act after a checkpoint in ``--save`` has been written.

        Do not communicate: with ``--async-save`` ranks learn of it after different steps, in which the clock runs and
        weights may be incomplete.
        """

    def on_iteration_end(self) -> None:
        """Act last in an iteration: step ``trainer.iteration`` is logged, evaluated and saved if due. A step hook."""

    def on_stop(self, error: BaseException | None) -> None:
        """Act once when training ends on this rank: after its last step, a request to stop, or an error.

        After an error do not communicate, because other ranks may still be in a step.
        """


STEP_END_HOOKS = "on_step_end", "on_iteration_end"
"""Hooks that are called after a step."""


class CallbackList:
    """Calls the hooks of callbacks in order, and names a user's callback in the errors that it raises."""

    def __init__(self, trainer: Trainer, log: RunLogger, callbacks: Iterable[Callback]) -> None:
        """Combine ``callbacks`` and, after them, those of plugins, in order of registration.

        Raises:
            TypeError: if a plugin registers something else.
        """
        self._trainer = trainer
        self._callbacks = [*callbacks]
        self._plugins: dict[int, str] = {}  # name by id of a plugin's callback
        self._due: list[Callback] = []  # in the current step
        for name, create in registered("callback").items():
            with name_in_errors(name, "its creation"):
                callback = create(trainer)
                if not isinstance(callback, Callback):
                    raise TypeError(f"a {type(callback).__name__} does not derive from Callback")
            self._plugins[id(callback)] = name
            self._callbacks.append(callback)
        for callback in self._callbacks:
            callback.log = log

    @property
    def observes_modules(self) -> bool:
        """True if a callback of this step uses hooks of modules."""
        return any(callback.observes_modules for callback in self._due)

    @property
    def pausing(self) -> bool:
        """True if a callback pauses the clock at the end of this step, which waits for the device."""
        return any(self._overrides(c, hook) and c.pauses for c in self._due for hook in STEP_END_HOOKS)

    def on_train_start(self) -> None:
        """See :class:`Callback`."""
        self._call("on_train_start", self._callbacks)

    def on_step_start(self, window: MetricsWindow) -> None:
        """See :class:`Callback`; collective, like the other methods with a ``window``, whose clock they pause."""
        step = self._trainer.iteration + 1
        self._due = [callback for callback in self._callbacks if step % callback.interval == 0]
        self._call_paused("on_step_start", self._due, window)

    def on_step_end(self, window: MetricsWindow, metrics: StepMetrics) -> None:
        """See :class:`Callback`."""
        self._call_paused("on_step_end", self._due, window, metrics)

    def on_log(self, window: MetricsWindow, metrics: Metrics) -> None:
        """See :class:`Callback`."""
        self._call_paused("on_log", self._callbacks, window, metrics)

    def on_evaluate(self, metrics: Metrics) -> None:
        """See :class:`Callback`; the clock is paused during evaluations."""
        self._call("on_evaluate", self._callbacks, metrics)

    def on_save(self, path: Location) -> None:
        """See :class:`Callback`."""
        self._call("on_save", self._callbacks, path)

    def on_iteration_end(self, window: MetricsWindow) -> None:
        """See :class:`Callback`."""
        self._call_paused("on_iteration_end", self._due, window)

    def on_stop(self, error: BaseException | None) -> None:
        """See :class:`Callback`. Every callback is called; after an error, further errors are warnings."""
        for callback in self._callbacks:
            try:
                self._call("on_stop", [callback], error)
            except Exception as other:
                if error is None:
                    raise
                print_warning(f"{type(callback).__name__}.on_stop failed after the error, too: {other}")

    def _call_paused(self, hook: str, callbacks: Iterable[Callback], window: MetricsWindow, *arguments: object) -> None:
        """Call a hook on those callbacks that override it, with the weights complete and the clock of steps paused."""
        overriding = [c for c in callbacks if self._overrides(c, hook)]
        for pauses, group in groupby(overriding, key=lambda callback: callback.pauses):
            if not pauses:
                self._call(hook, group, *arguments)
                continue
            with window.paused():
                self._trainer.optimizer.weights.wait()
                self._call(hook, group, *arguments)

    @staticmethod
    def _overrides(callback: Callback, hook: str) -> bool:
        return getattr(type(callback), hook) is not getattr(Callback, hook)

    def _call(self, hook: str, callbacks: Iterable[Callback], *arguments: object) -> None:
        for callback in callbacks:
            with name_in_errors(self._plugins.get(id(callback)), hook):
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
