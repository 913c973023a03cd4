"""The training loop: steps, logging, evaluation, saving and stopping, in order. Meant to be edited.

On GPUs the host reads what a step has computed one step later, so that it never waits while the GPU has nothing to do:
what components look for, such as gradients that are not finite, and whether to stop. It reads at once before a log
line, an evaluation, a save or the end.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial
from itertools import groupby
from typing import Concatenate, ParamSpec

from torch import Tensor

from megatron.checkpoint.location import Location
from megatron.data.dataset import split_kind
from megatron.optimizer.lr_scheduler import Rates
from megatron.training.checkpointer import Checkpointer
from megatron.training.component import Component, LoopEndError, name_in_errors, stop_components
from megatron.training.cuda_graphs import StepRunner
from megatron.training.loggers.run_logger import RunLogger
from megatron.training.metrics import Goodput, MetricsWindow, StepMetrics, evaluation_metrics
from megatron.training.step import evaluate, train_step
from megatron.training.stop import TIME_LIMIT, StopRequest, exit_status
from megatron.training.trainer import Trainer

BETWEEN_STEPS, EVALUATION, CHECKPOINT = "between steps", "evaluation", "checkpoint"
"""Phases of a rank's place outside of steps."""


def train(
    trainer: Trainer,
    graphs: StepRunner | None,
    log: RunLogger,
    stop: StopRequest,
    checkpointer: Checkpointer,
    goodput: Goodput,
) -> int:
    """Train until the last step or a request to stop; with ``skip_train`` only evaluate.

    Args:
        trainer: at the position to start from, with all its components.
        graphs: takes steps by replaying CUDA graphs; None to take them eagerly.
        log: reports metrics and events.
        stop: requests to stop.
        checkpointer: saves the run.
        goodput: accounts the time of steps.

    Returns:
        The exit status: 0 at the end, at ``exit_interval`` and after ``stop_file``; 128 + n after signal n; 124 after
        ``exit_duration_in_mins``.

    Raises:
        LoopEndError: if a component ends the loop.
        NonFiniteError: with ``on_nonfinite`` stop.
        StorageError: if the last checkpoint, or ``finished.json``, cannot be written.
    """

    def on_save(path: Location) -> None:
        callbacks.call(Component.on_save, path)

    callbacks = CallbackList(trainer, log)
    skip_train = trainer.config.training.skip_train
    status = 0
    try:
        callbacks.call(Component.on_train_start)
        if skip_train:
            stop.restore()  # nothing has to be saved, so a signal may end the process at once
            for split in trainer.data.used:
                if split_kind(split) != "train":
                    evaluate_and_log(trainer, split, log, callbacks)
            log.note(f"evaluated step {trainer.iteration}; no step is taken with --skip-train")
        else:
            if trainer.iteration < trainer.total_steps:
                checkpointer.mark_finished(False)
            with checkpointer.saving(log, on_save):
                status = take_steps(trainer, graphs, log, stop, callbacks, checkpointer, goodput)
        trainer.optimizer.weights.wait()  # other ranks may still be gathering weights from this one
    except BaseException as error:
        stop_components(trainer.components, None if isinstance(error, LoopEndError) else error)
        raise
    stop_components(trainer.components, None)
    if not skip_train and trainer.iteration >= trainer.total_steps and not trainer.progress.later[0]:
        checkpointer.mark_finished(True)
    return status


def take_steps(
    trainer: Trainer,
    graphs: StepRunner | None,
    log: RunLogger,
    stop: StopRequest,
    callbacks: CallbackList,
    checkpointer: Checkpointer,
    goodput: Goodput,
) -> int:
    """Take the steps, and log, evaluate and save as they come due; return the exit status."""
    stop_code = finish_previous_start(trainer, log, stop, callbacks, checkpointer)
    if stop_code or trainer.iteration >= trainer.total_steps:
        return exit_status(stop_code)
    training = trainer.config.training
    checkpoint = trainer.config.checkpoint
    window = MetricsWindow(
        trainer.device,
        training.seq_length,
        world=trainer.mesh.world,
        timers=trainer.timers,
        goodput=goodput,
        timing_option=trainer.config.logging.timing_log_option,
        origin=trainer.progress.origin,
    )
    leave = False
    while not leave:
        trainer.timers.enter(BETWEEN_STEPS, trainer.iteration + 1)
        callbacks.start_step(window, trainer.iteration + 1)
        samples, rates = trainer.reader.next_batch_size, trainer.schedule.rates(trainer.consumed_samples)
        metrics = take_step(trainer, graphs, callbacks, samples, rates)
        trainer.timers.enter(BETWEEN_STEPS)
        window.add(metrics, samples, computed=not callbacks.passing_over)
        iteration, consumed_samples = trainer.iteration, trainer.consumed_samples
        captured = "none" if graphs is None else graphs.mode
        read = partial(
            window.read, iteration=iteration, consumed_samples=consumed_samples, rates=rates, captured=captured
        )
        failed_read = partial(read, alone=True) if window.computed else None  # if the run fails early
        log.stepped(iteration, consumed_samples, failed_read)
        last = iteration == trainer.total_steps
        exits, logs = is_due(training.exit_interval, iteration), is_due(log.interval, iteration)
        saves = checkpoint.save is not None and is_due(checkpoint.save_interval, iteration)
        splits = evaluations_due(trainer)
        # what follows waits for the device anyway, and uses the step's results
        settled = last or exits or logs or saves or bool(splits) or callbacks.pausing
        if settled:
            callbacks.call(Component.settle)
        callbacks.call_paused(Component.on_step_end, window, metrics)

        stop_code = stop.poll(settled)
        leave = bool(stop_code) or last or exits
        if leave:
            callbacks.call(Component.settle)
        if (leave or logs) and window.computed:  # otherwise the next line has the steps
            record = read(samples_digest=f"{trainer.reader.samples_digest():016x}")
            for component in trainer.acting(Component.metrics):
                record |= component.metrics()
            log.train(record)
            trainer.progress.losses["train"] = record["lm loss"]
            callbacks.call_paused(Component.on_log, window, record)
        if last or not stop_code:  # a run that has to stop does not evaluate first
            for split in splits:
                with window.paused():
                    evaluate_and_log(trainer, split, log, callbacks)
        save_if_due(checkpointer, window, saves or (leave and checkpoint.save is not None), leave)
        callbacks.call_paused(Component.on_iteration_end, window)
    if last:
        return 0
    cause = stop.reason(stop_code) if stop_code else f"--exit-interval {training.exit_interval}"
    log.stopped(f"stopped by {cause} after step {iteration} of {trainer.total_steps + trainer.progress.later[0]}")
    return exit_status(stop_code)


def take_step(
    trainer: Trainer, graphs: StepRunner | None, callbacks: CallbackList, samples: int, rates: Rates
) -> StepMetrics:
    """Take the next step, of ``samples`` samples, and count it; eagerly if a callback uses hooks of modules.

    Nothing is computed if a component passes over it.

    Raises:
        NonFiniteError: with ``on_nonfinite`` stop.
    """
    if callbacks.passing_over:
        trainer.reader.pass_over()
        trainer.progress.iteration += 1
        trainer.progress.consumed_samples += samples
        return StepMetrics.of_nothing(trainer.scaler.scale, (*trainer.auxiliary_losses, *trainer.loss_names))
    with trainer.timers("batch-generator"):
        batches = trainer.next_batches()
    if graphs is None or callbacks.observes_modules:
        metrics = train_step(trainer, batches, rates)
    else:
        metrics = graphs(batches, rates)
    if trainer.device.type == "cuda":  # the GPU is busy with the step, and the host is idle
        trainer.reader.prefetch()
    callbacks.call(Component.on_step_taken, batches)
    trainer.progress.iteration += 1
    trainer.progress.consumed_samples += samples
    return metrics


def is_due(interval: int | None, iteration: int) -> bool:
    """Return True in every ``interval``-th iteration; never for None."""
    return interval is not None and iteration % interval == 0


def save_if_due(checkpointer: Checkpointer, window: MetricsWindow, due: bool, last: bool) -> None:
    """Report a background save that has finished, and save if it is due; collective.

    Raises:
        StorageError: if the checkpoint after the ``last`` step of this start cannot be written.
    """
    if checkpointer.pending is not None:
        checkpointer.poll()
    if due:
        checkpointer.trainer.timers.enter(CHECKPOINT)
        with window.paused():
            checkpointer.save(needed=last)


def finish_previous_start(
    trainer: Trainer, log: RunLogger, stop: StopRequest, callbacks: CallbackList, checkpointer: Checkpointer
) -> int:
    """Run evaluations and saves that the previous start missed; collective.

    Returns:
        The stop code if this start must stop before its first step, else 0.

    Raises:
        StorageError: if the last step has been taken and cannot be saved.
    """
    taken, total = trainer.iteration, trainer.total_steps
    stop_code = 0 if taken >= total else stop.poll()
    if stop_code and stop_code != TIME_LIMIT:  # a job that is requeued again and again would never take a step
        log.stopped(
            f"stopped by {stop.reason(stop_code)} before the first step of this start: "
            f"{taken} of {total} are taken, and there is nothing new to save"
        )
        return stop_code
    for split in evaluations_due(trainer):  # missed because a signal stopped the run after this step
        evaluate_and_log(trainer, split, log, callbacks)
    if taken >= total:
        log.note(f"nothing to do: this run ends with step {total}, and {taken} are taken")
        # the checkpoint may have been loaded from another run, or from a node's disk
        if trainer.config.checkpoint.save is not None and not checkpointer.is_last_step_saved():
            checkpointer.save(needed=True)
    return 0


def evaluations_due(trainer: Trainer) -> list[str]:
    """Return the splits to evaluate after the current step and not evaluated yet; test splits only at the end."""
    iteration = trainer.iteration
    last = iteration == trainer.total_steps
    ends = last and not trainer.progress.later[0]
    due = {"valid": last or is_due(trainer.config.training.eval_interval, iteration), "test": ends, "train": False}
    evaluated = trainer.progress.evaluated
    return [split for split in trainer.data.used if due[split_kind(split)] and evaluated.get(split, 0) < iteration]


def evaluate_and_log(trainer: Trainer, split: str, log: RunLogger, callbacks: CallbackList) -> None:
    """Evaluate a split and log the loss. Call before saving, so that a run killed in between repeats both."""
    trainer.timers.enter(EVALUATION)
    began, metrics = time.perf_counter(), dict[str, Tensor]()
    loss = evaluate(trainer, split, metrics).item()
    others: dict[str, float] = {}
    for component in trainer.components:
        for suffix, in_model in component.other_weights().items():
            with in_model():
                others[suffix] = evaluate(trainer, split).item()
    trainer.progress.evaluated[split] = trainer.iteration
    trainer.progress.losses[split] = loss
    further = {name: value.item() for name, value in metrics.items()}
    seconds = time.perf_counter() - began
    evaluated = evaluation_metrics(split, loss, others, further, trainer.objective.is_cross_entropy, seconds)
    log.log(evaluated)
    callbacks.call(Component.on_evaluate, evaluated)


P = ParamSpec("P")

Hook = Callable[Concatenate[Component, P], object]
"""A hook, such as ``Component.on_log``; the methods that override it are called."""

STEP_HOOKS = "on_step_start", "on_step_end", "on_iteration_end"
"""Hooks that are called in the steps of :attr:`Component.interval` only."""


class CallbackList:
    """Calls the hooks of components in order, and names a user's callback in the errors that it raises."""

    def __init__(self, trainer: Trainer, log: RunLogger) -> None:
        """Give the components of a run its log. They may leave the run in a hook."""
        self._trainer = trainer
        self._step = 0  # the current one
        self.passing_over = False  # a component passes over the current step
        for component in trainer.components:
            component.log = log

    @property
    def observes_modules(self) -> bool:
        """True if a callback of this step uses hooks of modules."""
        return any(c.observes_modules and self._acts(c) for c in self._trainer.components)

    @property
    def pausing(self) -> bool:
        """True if a callback pauses the clock at the end of this step, which waits for the device."""
        acting = self._trainer.acting(Component.on_step_end) + self._trainer.acting(Component.on_iteration_end)
        return any(c.pauses and self._acts(c) for c in acting)

    def _acts(self, component: Component) -> bool:
        """Return True if the step hooks of a component are called in this step."""
        return self._step % component.interval == 0 and not (self.passing_over and component.observes_modules)

    def start_step(self, window: MetricsWindow, step: int) -> None:
        """Call ``on_step_start`` of the components that act in step number ``step``; collective."""
        self._step = step
        self.passing_over = any(c.passes_over(step) for c in self._trainer.acting(Component.passes_over))
        self.call_paused(Component.on_step_start, window)

    def call(self, hook: Hook[P], *arguments: P.args, **options: P.kwargs) -> None:
        """Call a hook of the components that override it."""
        self._call(hook.__name__, self._trainer.acting(hook), *arguments)

    def call_paused(self, hook: Hook[P], window: MetricsWindow, *arguments: P.args, **options: P.kwargs) -> None:
        """Call a hook with the weights complete and the clock of steps paused; collective.

        Step hooks are called in the steps of their interval, and without a pause of components that exclude it.
        """
        name = hook.__name__
        found = [c for c in self._trainer.acting(hook) if name not in STEP_HOOKS or self._acts(c)]
        for pauses, group in groupby(found, key=lambda component: component.pauses):
            if not pauses:
                self._call(name, group, *arguments)
                continue
            with window.paused():
                self._trainer.optimizer.weights.wait()
                self._call(name, group, *arguments)

    @staticmethod
    def _call(hook: str, components: Iterable[Component], *arguments: object) -> None:
        for component in components:
            with nullcontext() if component.plugin is None else name_in_errors(component.plugin, hook):
                getattr(component, hook)(*arguments)
