"""The training loop: steps, logging, evaluation, saving and stopping, in order. Meant to be edited.

``StopRequest`` stops all ranks after the same step, on a signal to any of them, a time limit, or a file. Requests for
a profile travel in the same collective, so they cost nothing extra.

``finished.json`` in the run's folder marks the end of training, for scripts that requeue a job. A launcher's exit
status is not enough: it is lost with the node of the batch script, and a scheduler may report 0 itself. The file
exists exactly if the last step has been taken and saved: it is written after the checkpoint, and a start with steps
left, for example of a run that was extended, removes it before its first step.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import FrameType

import torch

from megatron.checkpoint.durable_files import publish_file
from megatron.checkpoint.errors import DamagedCheckpointError, StorageError, describe_os_error
from megatron.checkpoint.folder import CheckpointFolder
from megatron.checkpoint.format import Manifest
from megatron.checkpoint.object_store import Location, parse_location
from megatron.data.dataset import split_kind
from megatron.distributed import comm
from megatron.distributed.comm import Group
from megatron.optimizer.lr_scheduler import Rates
from megatron.training.callbacks.base import Callback, CallbackList
from megatron.training.callbacks.health import HealthReport, ReplicaCheck, explain_nonfinite
from megatron.training.callbacks.profiler import NO_REQUEST, ProfileRequest, ProfileRequestListener, StepProfiler
from megatron.training.checkpointer import Checkpointer, run_on_rank0
from megatron.training.cuda_graphs import StepRunner
from megatron.training.failure_report import NonFiniteError
from megatron.training.local_checkpoints import LocalSave
from megatron.training.loggers.run_logger import RunLogger
from megatron.training.metrics import MetricsWindow, StepMetrics, evaluation_metrics
from megatron.training.step import evaluate, train_step
from megatron.training.trainer import Trainer

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)

TIME_LIMIT = 124
"""Exit status after ``exit_duration_in_mins``, the same as that of timeout(1)."""

STOP_FILE_FOUND = 1
"""Stop code if only the stop file stops the run; :func:`exit_status` maps it to 0."""

ECHO_SECONDS = 2.0
"""A second signal within this time is the same Ctrl-C: it reaches every process, and torchrun forwards it again."""


def train(
    trainer: Trainer, graphs: StepRunner | None, log: RunLogger, stop: StopRequest, builtin: Sequence[Callback]
) -> int:
    """Train until the last step or a request to stop; with ``skip_train`` only evaluate.

    Args:
        trainer: at the position to start from.
        graphs: takes the steps on GPUs; None takes them without CUDA graphs.
        log: reports metrics and events.
        stop: requests to stop.
        builtin: callbacks that are called before those of plugins.

    Returns:
        The exit status: 0 at the end, at ``exit_interval`` and after ``stop_file``; 128 + n after signal n; 124 after
        ``exit_duration_in_mins``.

    Raises:
        NonFiniteError: with ``on_nonfinite`` stop.
        StorageError: if the last checkpoint, or ``finished.json``, cannot be written.
    """
    callbacks = CallbackList(trainer, log, builtin)
    try:
        callbacks.on_train_start()
        if trainer.config.training.skip_train:
            stop.restore()  # nothing has to be saved, so a signal may end the process at once
            evaluate_only(trainer, log, callbacks)
            status = 0
        else:
            if trainer.iteration < trainer.total_steps:
                remove_finished_file(trainer)
            with Checkpointer(trainer, log, callbacks.on_save) as saver:
                status = take_steps(trainer, graphs, log, stop, callbacks, saver)
        trainer.optimizer.weights.wait()  # other ranks may still be gathering weights from this one
    except BaseException as error:
        callbacks.on_stop(error)
        raise
    callbacks.on_stop(None)
    if not trainer.config.training.skip_train and trainer.iteration >= trainer.total_steps:
        write_finished_file(trainer)
    return status


def take_steps(
    trainer: Trainer,
    graphs: StepRunner | None,
    log: RunLogger,
    stop: StopRequest,
    callbacks: CallbackList,
    saver: Checkpointer,
) -> int:
    """Take the steps, and log, evaluate and save as they come due; return the exit status."""
    if stop_code := finish_previous_start(trainer, log, stop, callbacks, saver):
        return exit_status(stop_code)
    training, logging, checkpoint = trainer.config.training, trainer.config.logging, trainer.config.checkpoint
    window = start_window(trainer)
    trainer.startup.enter("first step")
    while trainer.iteration < trainer.total_steps:
        callbacks.on_step_start(window)
        samples, rates = trainer.next_batch_size, trainer.schedule.rates(trainer.consumed_samples)
        metrics = take_step(trainer, graphs, samples, rates, eager=callbacks.observes_modules)
        iteration = trainer.iteration

        window.add(metrics, samples)
        read = partial(window.read, iteration=iteration, consumed_samples=trainer.consumed_samples, rates=rates)
        log.stepped(iteration, trainer.consumed_samples, partial(read, alone=True))  # read if the run fails early
        callbacks.on_step_end(window, metrics)
        if trainer.startup.running:
            log_startup(trainer, log)
        if saver.pending is not None:  # an asynchronous save
            saver.poll()

        stop_code = stop.poll()
        last = iteration == trainer.total_steps
        leave = stop_code or last or is_due(training.exit_interval, iteration)
        if leave or is_due(logging.log_interval, iteration):
            record = read(samples_digest=trainer.samples_digest())
            log.train(record)
            callbacks.on_log(window, record)
        if last or not stop_code:  # a run that has to stop does not evaluate first
            for split in evaluations_due(trainer):
                with window.paused():
                    evaluate_and_log(trainer, split, log, callbacks)
        if checkpoint.save is not None and (leave or is_due(checkpoint.save_interval, iteration)):
            with window.paused():
                saver.save(needed=bool(leave))
        callbacks.on_iteration_end(window)
        if leave and not last:
            interval = f"--exit-interval {training.exit_interval}"
            cause = stop_reason(stop_code, training.stop_file) if stop_code else interval
            log.stopped(f"stopped by {cause} after step {iteration} of {trainer.total_steps}")
            return exit_status(stop_code)
    return 0


def take_step(trainer: Trainer, graphs: StepRunner | None, samples: int, rates: Rates, eager: bool) -> StepMetrics:
    """Take the next step, of ``samples`` samples, and count it; ``eager`` without CUDA graphs.

    Raises:
        NonFiniteError: with ``on_nonfinite`` stop, unless a smaller loss scale can cure it.
    """
    with trainer.timers("batch-generator"):
        batches = trainer.next_batches()
    if graphs is None:
        metrics = train_step(trainer, batches, rates)
    else:
        metrics = graphs(batches, rates, eager)
    if trainer.device.type == "cuda":  # the GPU is busy with the step, and the host is idle
        trainer.prefetch()
    nonfinite = trainer.config.training.on_nonfinite == "stop" and metrics.nonfinite.item()
    if nonfinite and not trainer.scaler.can_shrink(metrics.loss_scale):
        raise NonFiniteError(explain_nonfinite(trainer, batches))
    trainer.iteration += 1
    trainer.consumed_samples += samples
    return metrics


def is_due(interval: int | None, iteration: int) -> bool:
    """Return True in every ``interval``-th iteration; never for None."""
    return interval is not None and iteration % interval == 0


def finish_previous_start(
    trainer: Trainer, log: RunLogger, stop: StopRequest, callbacks: CallbackList, saver: Checkpointer
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
        cause = stop_reason(stop_code, trainer.config.training.stop_file)
        log.stopped(
            f"stopped by {cause} before the first step of this start: "
            f"{taken} of {total} are taken, and there is nothing new to save"
        )
        return stop_code
    for split in evaluations_due(trainer):  # missed because a signal stopped the run after this step
        evaluate_and_log(trainer, split, log, callbacks)
    if taken >= total:
        log.note(f"nothing to do: this run ends with step {total}, and {taken} are taken")
        save = trainer.config.checkpoint.save
        if save is not None and not is_last_step_saved(trainer):  # loaded from another run, or from a node's disk
            saver.save(needed=True)
    return 0


def start_window(trainer: Trainer) -> MetricsWindow:
    """Return the window that collects step metrics; its clock starts on all ranks together."""
    return MetricsWindow(
        trainer.device,
        trainer.config.training.seq_length,
        world=trainer.mesh.world,
        timers=trainer.timers,
        goodput=trainer.goodput,
        timing_option=trainer.config.logging.timing_log_option,
        recorded=trainer.config.compute.cuda_graph,
    )


def evaluate_only(trainer: Trainer, log: RunLogger, callbacks: CallbackList) -> None:
    """Evaluate the loaded weights on all validation and test data without training."""
    for split in trainer.data.used:
        if split_kind(split) != "train":
            evaluate_and_log(trainer, split, log, callbacks)
    log.note(f"evaluated step {trainer.iteration}; no step is taken with --skip-train")


def evaluations_due(trainer: Trainer) -> list[str]:
    """Return the splits to evaluate after the current step and not evaluated yet; test splits only after the last."""
    iteration = trainer.iteration
    last = iteration == trainer.total_steps
    due = {"valid": last or is_due(trainer.config.training.eval_interval, iteration), "test": last, "train": False}
    evaluated = trainer.evaluated
    return [split for split in trainer.data.used if due[split_kind(split)] and evaluated.get(split, 0) < iteration]


def evaluate_and_log(trainer: Trainer, split: str, log: RunLogger, callbacks: CallbackList) -> None:
    """Evaluate a split and log the loss. Call before saving, so that a run killed in between repeats both."""
    loss = evaluate(trainer, split).item()
    average_loss = None
    if trainer.optimizer.ema:
        with trainer.optimizer.averaged():
            average_loss = evaluate(trainer, split).item()
    trainer.evaluated[split] = trainer.iteration
    evaluated = evaluation_metrics(split, loss, average_loss)
    log.log(evaluated)
    callbacks.on_evaluate(evaluated)


def build_callbacks(trainer: Trainer, log: RunLogger, stop: StopRequest) -> list[Callback]:
    """Create the callbacks that the configuration asks for, in the order in which they are called."""
    config, logging = trainer.config, trainer.config.logging
    callbacks: list[Callback] = []
    if logging.run_dir is not None:  # a profile may be requested at any time
        callbacks.append(StepProfiler(trainer, log, lambda: stop.profile_request))
    if logging.log_health_interval is not None:
        callbacks.append(HealthReport(trainer, logging.log_health_interval))
    if (interval := logging.check_weight_hash_across_dp_replicas_interval) is not None:
        callbacks.append(ReplicaCheck(trainer, interval))
    if trainer.local is not None and config.checkpoint.local_save_interval is not None:
        callbacks.append(LocalSave(trainer, trainer.local, config.checkpoint.local_save_interval))
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


FINISHED_FILE = "finished.json"

FinishedFacts = dict[str, str | int | float | None]


def remove_finished_file(trainer: Trainer) -> None:
    """Remove the file because there are steps left; collective.

    Raises:
        OSError: on every rank, if it cannot be removed.
        SupersededError: on every rank, if a later start owns the ``save`` folder: the file may be its own.
    """
    _change_finished_file(trainer, lambda folder: (folder / FINISHED_FILE).unlink(missing_ok=True))


def write_finished_file(trainer: Trainer) -> None:
    """Write the file after the last step has been saved; collective.

    Raises:
        StorageError: on every rank, if it cannot be written. The next start, which has nothing else to do, retries.
        SupersededError: on every rank, if a later start owns the ``save`` folder.
    """

    def write(folder: Path) -> None:
        checkpoint = _last_checkpoint(trainer)
        facts: FinishedFacts = {
            "iteration": trainer.iteration,
            "consumed-samples": trainer.consumed_samples,
            "run-id": trainer.run_id,
            "checkpoint": None if checkpoint is None else str(checkpoint),
            "time": time.time(),
        }
        write_facts(folder, facts)

    _change_finished_file(trainer, write)


def _change_finished_file(trainer: Trainer, change: Callable[[Path], None]) -> None:
    """Call ``change`` with the run's folder on rank 0, unless a later start owns the ``save`` folder."""
    run_dir = trainer.config.logging.run_dir
    if run_dir is None:
        return

    def check_and_change() -> None:
        if trainer.leases.save is not None:
            trainer.leases.save.check()
        change(Path(run_dir))

    run_on_rank0(check_and_change, trainer.mesh.world)


def is_last_step_saved(trainer: Trainer) -> bool:
    """Return True if the ``save`` folder has a complete checkpoint of the last step taken; collective."""
    return run_on_rank0(lambda: _last_checkpoint(trainer) is not None, trainer.mesh.world)


def write_facts(folder: Path, facts: FinishedFacts) -> None:
    """Write the file atomically and durably.

    Raises:
        StorageError: if it cannot be written.
    """
    path = folder / FINISHED_FILE
    try:
        publish_file(path, (json.dumps(facts, indent=2) + "\n").encode())
    except OSError as error:
        sentence = f"{path}, which marks the end of training, cannot be written: {describe_os_error(error)}"
        raise StorageError(sentence, "free some space and start the run again: it only writes this file") from error


def _last_checkpoint(trainer: Trainer) -> Location | None:
    """Return the checkpoint of the last step taken, or None if it is missing or damaged."""
    save = trainer.config.checkpoint.save
    if save is None:
        return None
    path = CheckpointFolder(parse_location(save)).path(trainer.iteration)
    try:
        Manifest.open(path)
    except DamagedCheckpointError:
        return None
    return path


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

    def poll(self) -> int:
        """Return the stop code, or 0 to continue; the same on every rank. Collective.

        128 + the highest signal number received by any rank, else ``TIME_LIMIT`` if it is over on any rank, else
        ``STOP_FILE_FOUND`` if any rank sees the file.
        """
        request = NO_REQUEST
        if self.profiles is not None and time.monotonic() >= self.profiles.next_check:
            request = self.profiles.take()
        if self.world.size == 1:  # no tensor, so no synchronisation with the GPU
            self.profile_request = request
            return self._local_code()
        mine = torch.tensor((self._local_code(), *request), device=self.device)
        code, *requests = comm.all_reduce(mine, self.world, op="max").tolist()
        self.profile_request = ProfileRequest(*requests)
        return int(code)

    def _local_code(self) -> int:
        if self._signal:
            return 128 + self._signal
        if self._deadline is not None and time.monotonic() >= self._deadline:
            return TIME_LIMIT
        return STOP_FILE_FOUND if self._file is not None and os.path.exists(self._file) else 0

    def restore(self) -> None:
        """Restore the previous signal handlers."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        if self.profiles is not None:
            self.profiles.restore()


def exit_status(stop_code: int) -> int:
    """Return the exit status for a stop code: 0 for the stop file, because launchers restart on any other status."""
    return 0 if stop_code == STOP_FILE_FOUND else stop_code


def stop_reason(stop_code: int, file: str | None = None) -> str:
    """Return the human-readable reason for a stop code; ``file`` is the stop file."""
    if stop_code == STOP_FILE_FOUND:
        return f"--stop-file {file}"
    if stop_code == TIME_LIMIT:
        return "--exit-duration-in-mins"
    return f"signal {stop_code - 128} ({signal.Signals(stop_code - 128).name})"
