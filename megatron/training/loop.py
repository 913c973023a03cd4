"""The training loop: steps, logging, evaluation, saving and stopping, in order. Meant to be edited.

``StopRequest`` stops all ranks after the same step, on a signal to any of them, a time limit, or a file. Requests for
a profile travel in the same collective, so they cost nothing extra.

On GPUs the host reads what a step has computed one step later, so that it never waits while the GPU has nothing to do:
whether a gradient was not finite (``NonFiniteCheck``), and whether to stop. It reads at once before a log line, an
evaluation, a save or the end.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from megatron.data.dataset import split_kind
from megatron.distributed import comm
from megatron.distributed.comm import Group
from megatron.distributed.micro_batch import MicroBatch
from megatron.optimizer.lr_scheduler import Rates
from megatron.training.callbacks.base import Callback, CallbackList
from megatron.training.callbacks.export import HuggingFaceExport
from megatron.training.callbacks.health import HealthReport, ReplicaCheck, explain_nonfinite
from megatron.training.callbacks.profiler import NO_REQUEST, ProfileRequest, ProfileRequestListener, StepProfiler
from megatron.training.checkpointer import Checkpointer, OtherCheckpoints
from megatron.training.cuda_graphs import StepRunner
from megatron.training.failure_report import NonFiniteError
from megatron.training.loggers.run_logger import RunLogger
from megatron.training.metrics import MetricsWindow, StepMetrics, evaluation_metrics
from megatron.training.step import evaluate
from megatron.training.trainer import Trainer


def train(
    trainer: Trainer,
    run_step: StepRunner,
    log: RunLogger,
    stop: StopRequest,
    builtin: Sequence[Callback],
    checkpointer: Checkpointer,
) -> int:
    """Train until the last step or a request to stop; with ``skip_train`` only evaluate.

    Args:
        trainer: at the position to start from.
        run_step: takes a step, eagerly or by replaying a CUDA graph.
        log: reports metrics and events.
        stop: requests to stop.
        builtin: callbacks that are called before those of plugins.
        checkpointer: saves the run.

    Returns:
        The exit status: 0 at the end, at ``exit_interval`` and after ``stop_file``; 128 + n after signal n; 124 after
        ``exit_duration_in_mins``.

    Raises:
        NonFiniteError: with ``on_nonfinite`` stop.
        StorageError: if the last checkpoint, or ``finished.json``, cannot be written.
    """
    callbacks = CallbackList(trainer, log, builtin)
    skip_train = trainer.config.training.skip_train
    status = 0
    try:
        callbacks.on_train_start()
        if skip_train:
            stop.restore()  # nothing has to be saved, so a signal may end the process at once
            for split in trainer.data.used:
                if split_kind(split) != "train":
                    evaluate_and_log(trainer, split, log, callbacks)
            log.note(f"evaluated step {trainer.iteration}; no step is taken with --skip-train")
        else:
            if trainer.iteration < trainer.total_steps:
                checkpointer.mark_finished(False)
            with checkpointer.saving(log, callbacks.on_save):
                status = take_steps(trainer, run_step, log, stop, callbacks, checkpointer)
        trainer.optimizer.weights.wait()  # other ranks may still be gathering weights from this one
    except BaseException as error:
        callbacks.on_stop(error)
        raise
    callbacks.on_stop(None)
    if not skip_train and trainer.iteration >= trainer.total_steps:
        checkpointer.mark_finished(True)
    return status


def take_steps(
    trainer: Trainer,
    run_step: StepRunner,
    log: RunLogger,
    stop: StopRequest,
    callbacks: CallbackList,
    checkpointer: Checkpointer,
) -> int:
    """Take the steps, and log, evaluate and save as they come due; return the exit status."""
    stop_code = finish_previous_start(trainer, log, stop, callbacks, checkpointer)
    if stop_code or trainer.iteration >= trainer.total_steps:
        return exit_status(stop_code)
    training, log_interval = trainer.config.training, trainer.config.logging.log_interval
    window = start_window(trainer, run_step)
    check = NonFiniteCheck(trainer)
    trainer.startup.enter("first step")
    leave = False
    while not leave:
        callbacks.on_step_start(window)
        samples, rates = trainer.next_batch_size, trainer.schedule.rates(trainer.consumed_samples)
        metrics = take_step(trainer, run_step, check, samples, rates, eager=callbacks.observes_modules)
        window.add(metrics, samples)
        iteration, consumed_samples = trainer.iteration, trainer.consumed_samples
        read = partial(window.read, iteration=iteration, consumed_samples=consumed_samples, rates=rates)
        log.stepped(iteration, consumed_samples, partial(read, alone=True))  # read if the run fails early
        last = iteration == trainer.total_steps
        # what follows waits for the device anyway, and uses the step's results
        settled = (
            last
            or any(is_due(interval, iteration) for interval in (training.exit_interval, log_interval))
            or bool(evaluations_due(trainer))
            or checkpointer.is_due
            or callbacks.pausing
        )
        if settled:
            check.settle()
        callbacks.on_step_end(window, metrics)
        if trainer.startup.running:
            log_startup(trainer, log)

        stop_code = stop.poll(settled)
        leave = bool(stop_code) or last or is_due(training.exit_interval, iteration)
        if leave:
            check.settle()
        if leave or is_due(log_interval, iteration):
            record = read(samples_digest=f"{trainer.samples_digest():016x}")
            log.train(record)
            trainer.losses["train"] = record["lm loss"]
            callbacks.on_log(window, record)
        if last or not stop_code:  # a run that has to stop does not evaluate first
            for split in evaluations_due(trainer):
                with window.paused():
                    evaluate_and_log(trainer, split, log, callbacks)
        checkpointer.maybe_save(window, leave)
        callbacks.on_iteration_end(window)
    if last:
        return 0
    cause = stop.reason(stop_code) if stop_code else f"--exit-interval {training.exit_interval}"
    log.stopped(f"stopped by {cause} after step {iteration} of {trainer.total_steps}")
    return exit_status(stop_code)


def take_step(
    trainer: Trainer, run_step: StepRunner, check: NonFiniteCheck, samples: int, rates: Rates, eager: bool
) -> StepMetrics:
    """Take the next step, of ``samples`` samples, and count it; ``eager`` without CUDA graphs.

    Raises:
        NonFiniteError: see :class:`NonFiniteCheck`.
    """
    with trainer.timers("batch-generator"):
        batches = trainer.next_batches()
    metrics = run_step(batches, rates, eager)
    if trainer.device.type == "cuda":  # the GPU is busy with the step, and the host is idle
        trainer.prefetch()
    check.add(batches)
    trainer.iteration += 1
    trainer.consumed_samples += samples
    return metrics


class HostCopy:
    """A small tensor on its way to the host, copied without waiting for the device."""

    def __init__(self, tensor: Tensor) -> None:
        """Start the copy."""
        self._event = None
        if tensor.is_cuda:
            self._values = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._values.copy_(tensor, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()
        else:
            self._values = tensor.clone()

    def read(self) -> Any:
        """Return the values as Python numbers; wait for them if they have not arrived."""
        if self._event is not None and not self._event.query():
            self._event.synchronize()
        return self._values.tolist()


class NonFiniteCheck:
    """Ends the run after a step whose loss or gradient is not finite, with ``on_nonfinite`` stop.

    Not if a smaller loss scale can cure it. On GPUs the flag is read after the next step. ``Trainer.halted`` keeps that
    step from changing anything, so the failed one is explained with the weights that it has used.
    """

    def __init__(self, trainer: Trainer, late: bool | None = None) -> None:
        """Start with no step; ``late`` reads flags one step late, by default on GPUs."""
        self._trainer = trainer
        self._late = trainer.device.type == "cuda" if late is None else late
        self._unread: tuple[HostCopy, Sequence[MicroBatch]] | None = None
        if trainer.config.training.on_nonfinite == "stop":
            trainer.halted = torch.zeros((), device=trainer.device)

    def add(self, batches: Sequence[MicroBatch]) -> None:
        """Check the step before the one that has just been taken, of ``batches``, or this one unless it is ``late``.

        Raises:
            NonFiniteError: with the first module whose output, or parameter whose gradient, is not finite.
        """
        if self._trainer.halted is None:
            return
        previous, self._unread = self._unread, (HostCopy(self._trainer.halted), batches)
        self._check(previous) if self._late else self.settle()

    def settle(self) -> None:
        """Check the last step.

        Raises:
            NonFiniteError: see :meth:`add`.
        """
        unread, self._unread = self._unread, None
        self._check(unread)

    def _check(self, step: tuple[HostCopy, Sequence[MicroBatch]] | None) -> None:
        if step is not None and step[0].read():
            raise NonFiniteError(explain_nonfinite(self._trainer, step[1]))


def is_due(interval: int | None, iteration: int) -> bool:
    """Return True in every ``interval``-th iteration; never for None."""
    return interval is not None and iteration % interval == 0


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


def start_window(trainer: Trainer, run_step: StepRunner) -> MetricsWindow:
    """Return the window that collects step metrics; its clock starts on all ranks together."""
    return MetricsWindow(
        trainer.device,
        trainer.config.training.seq_length,
        world=trainer.mesh.world,
        timers=trainer.timers,
        goodput=trainer.goodput,
        timing_option=trainer.config.logging.timing_log_option,
        recorded=lambda: run_step.mode,
    )


def evaluations_due(trainer: Trainer) -> list[str]:
    """Return the splits to evaluate after the current step and not evaluated yet; test splits only after the last."""
    iteration = trainer.iteration
    last = iteration == trainer.total_steps
    due = {"valid": last or is_due(trainer.config.training.eval_interval, iteration), "test": last, "train": False}
    evaluated = trainer.evaluated
    return [split for split in trainer.data.used if due[split_kind(split)] and evaluated.get(split, 0) < iteration]


def evaluate_and_log(trainer: Trainer, split: str, log: RunLogger, callbacks: CallbackList) -> None:
    """Evaluate a split and log the loss. Call before saving, so that a run killed in between repeats both."""
    metrics: dict[str, Tensor] = {}
    loss = evaluate(trainer, split, metrics).item()
    average_loss = None
    if trainer.optimizer.ema:
        with trainer.optimizer.averaged():
            average_loss = evaluate(trainer, split).item()
    trainer.evaluated[split] = trainer.iteration
    trainer.losses[split] = loss
    further = {name: value.item() for name, value in metrics.items()}
    evaluated = evaluation_metrics(split, loss, average_loss, further, trainer.objective.is_cross_entropy)
    log.log(evaluated)
    callbacks.on_evaluate(evaluated)


def build_callbacks(
    trainer: Trainer, log: RunLogger, stop: StopRequest, others: OtherCheckpoints | None = None
) -> list[Callback]:
    """Create the callbacks that the configuration asks for, in the order in which they are called."""
    logging = trainer.config.logging
    callbacks: list[Callback] = []
    if logging.run_dir is not None:  # a profile may be requested at any time
        callbacks.append(StepProfiler(trainer, log, lambda: stop.profile_request))
    if logging.log_health_interval is not None:
        callbacks.append(HealthReport(trainer, logging.log_health_interval))
    if (interval := logging.check_weight_hash_across_dp_replicas_interval) is not None:
        callbacks.append(ReplicaCheck(trainer, interval))
    if logging.sample_prompts is not None and trainer.config.training.eval_iters:
        from megatron.training.callbacks.sample_prompts import SamplePrompts  # optional

        callbacks.append(SamplePrompts(trainer, Path(logging.sample_prompts)))
    if trainer.config.training.evaluate_tasks and not trainer.config.training.skip_train:
        from megatron.training.callbacks.evaluate_tasks import EvaluateTasks  # optional

        callbacks.append(EvaluateTasks(trainer))
    checkpoint = trainer.config.checkpoint
    if checkpoint.save is not None and checkpoint.save_hf_interval is not None:
        callbacks.append(HuggingFaceExport(trainer, Path(checkpoint.save), checkpoint.save_hf_interval))
    if others is not None:
        callbacks += others.callbacks(trainer)
    return callbacks


def log_startup(trainer: Trainer, log: RunLogger) -> None:
    """Log, after the first step, the time of each phase of the start on this and the slowest rank; collective."""
    if trainer.device.type == "cuda":
        torch.cuda.synchronize(trainer.device)  # the first step counts until the GPU has finished it
    trainer.startup.stop()
    mine = trainer.startup.seconds
    with trainer.mesh.world.meter.paused():
        seconds = torch.tensor([*mine.values()], dtype=torch.float64, device=trainer.device)
        longest = comm.all_reduce(seconds, trainer.mesh.world, op="max").tolist()
    log.start_up(mine, dict(zip(mine, longest)))


SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)

TIME_LIMIT = 124
"""Exit status after ``exit_duration_in_mins``, the same as that of timeout(1)."""

STOP_FILE_FOUND = 1
"""Stop code if only the stop file stops the run; the exit status is 0, because launchers restart on any other."""

ECHO_SECONDS = 2.0
"""A second signal within this time is the same Ctrl-C: it reaches every process, and torchrun forwards it again."""


def exit_status(stop_code: int) -> int:
    """Return the exit status for a stop code."""
    return 0 if stop_code == STOP_FILE_FOUND else stop_code


class StopRequest:
    """Record the first signal to this process, watch the time limit and the stop file; :meth:`poll` combines ranks.

    A second signal has its default effect, so that an impatient user can end the process.
    """

    def __init__(
        self,
        world: Group,
        device: torch.device,
        minutes: float | None = None,
        since: float | None = None,
        profiles: ProfileRequestListener | None = None,
        file: Path | None = None,
    ) -> None:
        """Install the signal handlers.

        Args:
            world: all ranks.
            device: this rank's device.
            minutes: time limit; None for none.
            since: start of the time limit on the clock of ``time.monotonic()``; None for now.
            profiles: profile requests to this rank; :meth:`restore` also restores their signal handler.
            file: stops the run once it exists. Give it to one rank only: cluster file systems may be slow.
        """
        self.world = world
        self.device = device
        self.profiles = profiles
        self.profile_request = NO_REQUEST  # the profile request of the last :meth:`poll`, the same on every rank
        self._file = file
        self._late = device.type == "cuda"  # requests are read one call late, so that the host need not wait
        self._unread: list[HostCopy] = []
        since = time.monotonic() if since is None else since
        self._deadline = None if minutes is None else since + 60.0 * minutes
        self._signal = 0  # the first one received
        self._received = 0.0  # when
        self._previous = {s: signal.signal(s, self._handle) for s in SIGNALS}

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self._signal:
            self._signal = number
            self._received = time.monotonic()
        elif time.monotonic() - self._received > ECHO_SECONDS:
            self.restore()
            signal.raise_signal(number)

    def poll(self, now: bool = True) -> int:
        """Return the stop code, or 0 to continue; the same on every rank. Collective.

        128 + the highest signal number received by any rank, else ``TIME_LIMIT`` if it is over on any rank, else
        ``STOP_FILE_FOUND`` if any rank sees the file. With several GPUs, and not ``now``, it is that of the previous
        call. Give ``now`` alike on all ranks.
        """
        requests = [self.local_code(), *(NO_REQUEST if self.profiles is None else self.profiles.take())]
        if self.world.size > 1:  # a single rank needs no tensor
            sent = torch.tensor(requests, pin_memory=self.device.type == "cuda").to(self.device, non_blocking=True)
            self._unread.append(HostCopy(comm.all_reduce(sent, self.world, op="max")))
            read, self._unread = (self._unread, []) if now or not self._late else (self._unread[:-1], self._unread[-1:])
            requests = [max(values) for values in zip([0, *NO_REQUEST], *(copy.read() for copy in read))]
        code, *profiles = requests
        self.profile_request = ProfileRequest(*profiles)
        return code

    def local_code(self) -> int:
        """Return the stop code of this rank."""
        if self._signal:
            return 128 + self._signal
        if self._deadline is not None and time.monotonic() >= self._deadline:
            return TIME_LIMIT
        return STOP_FILE_FOUND if self._file is not None and os.path.exists(self._file) else 0

    def reason(self, code: int) -> str:
        """Return the human-readable reason for a stop code, on the rank that has the file."""
        if code == STOP_FILE_FOUND:
            return f"--stop-file {self._file}"
        if code == TIME_LIMIT:
            return "--exit-duration-in-mins"
        return f"signal {code - 128} ({signal.Signals(code - 128).name})"

    def restore(self) -> None:
        """Restore the previous signal handlers."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        if self.profiles is not None:
            self.profiles.restore()
