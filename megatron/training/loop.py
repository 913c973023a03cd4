"""The training loop: steps, logging, evaluation, saving and stopping, in order. Meant to be edited."""

from __future__ import annotations

from functools import partial

import torch

from megatron.data.splits import kind_of
from megatron.parallel import comm
from megatron.training import finished
from megatron.training.graphs import StepRunner
from megatron.training.health import Vitals, watch
from megatron.training.local_tier import save_on_nodes
from megatron.training.logging import RunLog
from megatron.training.metrics import StepMetrics, StepWindow
from megatron.training.nonfinite import NonFiniteError, explain_nonfinite
from megatron.training.profiling import Profiler
from megatron.training.records import EvaluationRecord
from megatron.training.replicas_check import check_replicas
from megatron.training.saving import Saver
from megatron.training.setup import Trainer
from megatron.training.step import evaluate
from megatron.training.stop import TIME_IS_UP, StopRequest, exit_status, reason


def train(trainer: Trainer, take_step: StepRunner, log: RunLog, stop: StopRequest, profiler: Profiler) -> int:
    """Train until the last step or a request to stop; with ``skip_train`` only evaluate.

    Returns:
        The exit status: 0 at the end, at ``exit_interval`` and after ``stop_file``; 128 + n after signal n; 124 after
        ``exit_duration_in_mins``.

    Raises:
        NonFiniteError: with ``on_nonfinite`` stop.
        StorageError: if the last checkpoint, or ``finished.json``, cannot be written.

    """
    if trainer.config.training.skip_train:
        stop.restore()  # nothing has to be saved, so a signal may end the process at once
        return evaluate_alone(trainer, log)
    if trainer.iteration < trainer.total_steps:
        finished.retract(trainer)
    with Saver(trainer, log) as saver:
        status = _train(trainer, take_step, log, stop, profiler, saver)
    trainer.optimizer.weights.wait()  # other ranks may still be gathering weights from this one
    if trainer.iteration >= trainer.total_steps:
        finished.declare(trainer)
    return status


def _train(
    trainer: Trainer, take_step: StepRunner, log: RunLog, stop: StopRequest, profiler: Profiler, saver: Saver
) -> int:
    """Take the steps; see :func:`train`."""
    config = trainer.config.training
    logging = trainer.config.logging
    if stop_code := begin(trainer, log, stop, profiler, saver):
        return exit_status(stop_code)
    window = window_of(trainer)
    trainer.startup.enter("first step")
    while trainer.iteration < trainer.total_steps:
        rates = trainer.schedule.rates(trainer.consumed_samples)
        with profiler.step(trainer.iteration + 1):
            with trainer.timers("batch-generator"):
                samples = trainer.next_batch_size
                batches = trainer.next_batches()
            vitals = watch(trainer) if _every(logging.log_health_interval, trainer.iteration + 1) else None
            metrics = take_step(batches, rates, eager=vitals is not None)
        if trainer.device.type == "cuda":  # the GPU is busy with the step, and the host is idle
            trainer.prefetch()
        nonfinite = config.on_nonfinite == "stop" and metrics.nonfinite.item()
        if nonfinite and not trainer.scaler.can_shrink(metrics.loss_scale):
            raise NonFiniteError(explain_nonfinite(trainer, batches))
        trainer.iteration += 1
        trainer.consumed_samples += samples
        iteration = trainer.iteration

        window.add(metrics, samples)
        read = partial(window.read, iteration=iteration, consumed_samples=trainer.consumed_samples, rates=rates)
        log.stepped(iteration, trainer.consumed_samples, partial(read, alone=True))  # read if the run fails early
        examine(trainer, vitals, metrics, window, log)
        saver.poll()

        tell_start_up(trainer, log)
        stop_code = stop.poll()
        profiler.ask(iteration, stop.profile_request)
        last = iteration == trainer.total_steps
        leave = stop_code or last or _every(config.exit_interval, iteration)
        if leave or _every(logging.log_interval, iteration):
            log.train(read(samples_digest=trainer.samples_digest()))
        if last or not stop_code:  # a run that has to stop does not evaluate first
            for split in evaluations_due(trainer):
                with window.paused():
                    evaluate_on(trainer, split, log)
        checkpoint = trainer.config.checkpoint
        if checkpoint.save is not None and (leave or _every(checkpoint.save_interval, iteration)):
            with window.paused():
                saver.save(needed=bool(leave))
        save_on_nodes(trainer, log, window)  # last: a start that finds the final step here has nothing left to save
        if leave and not last:
            cause = reason(stop_code, config.stop_file) if stop_code else f"--exit-interval {config.exit_interval}"
            log.stopped(f"stopped by {cause} after step {iteration} of {trainer.total_steps}")
            return exit_status(stop_code)
    return 0


def begin(trainer: Trainer, log: RunLog, stop: StopRequest, profiler: Profiler, saver: Saver) -> int:
    """Run evaluations and saves that the previous start missed; collective.

    Returns:
        The stop code if this start must stop before its first step, else 0.

    Raises:
        StorageError: if the last step has been taken and cannot be saved.

    """
    taken, total = trainer.iteration, trainer.total_steps
    stop_code = 0 if taken >= total else told_meanwhile(trainer, stop, profiler)
    if stop_code:
        cause = reason(stop_code, trainer.config.training.stop_file)
        log.stopped(
            f"stopped by {cause} before the first step of this start: "
            f"{taken} of {total} are taken, and there is nothing new to save"
        )
        return stop_code
    for split in evaluations_due(trainer):  # missed because a signal stopped the run after this step
        evaluate_on(trainer, split, log)
    if taken >= total:
        log.note(f"nothing to do: this run ends with step {total}, and {taken} are taken")
        save = trainer.config.checkpoint.save
        if save is not None and not finished.is_saved(trainer):  # loaded from another run, or from a node's disk
            saver.save(needed=True)
    return 0


def told_meanwhile(trainer: Trainer, stop: StopRequest, profiler: Profiler) -> int:
    """Return the stop code of a request that came during the start, or 0; collective.

    An expired time limit does not count: a job that is requeued again and again would never take a step.
    """
    stop_code = stop.poll()
    profiler.ask(trainer.iteration, stop.profile_request)
    return 0 if stop_code == TIME_IS_UP else stop_code


def window_of(trainer: Trainer) -> StepWindow:
    """Return the window that collects step metrics; its clock starts on all ranks together."""
    return StepWindow(
        trainer.device,
        trainer.config.training.seq_length,
        world=trainer.mesh.world,
        timers=trainer.timers,
        goodput=trainer.goodput,
        timing_option=trainer.config.logging.timing_log_option,
        recorded=trainer.config.compute.cuda_graph,
    )


def tell_start_up(trainer: Trainer, log: RunLog) -> None:
    """Log, after the first step, the time of each phase of the start on this and the slowest rank; collective."""
    if not trainer.startup.running:
        return
    if trainer.device.type == "cuda":
        torch.cuda.synchronize(trainer.device)  # the first step counts until the GPU has finished it
    trainer.startup.stop()
    mine = trainer.startup.seconds
    with trainer.mesh.world.meter.paused():
        seconds = torch.tensor([*mine.values()], dtype=torch.float64, device=trainer.device)
        longest = comm.all_reduce(seconds, trainer.mesh.world, op="max").tolist()
    log.start_up(mine, dict(zip(mine, longest)))


def examine(trainer: Trainer, vitals: Vitals | None, metrics: StepMetrics, window: StepWindow, log: RunLog) -> None:
    """Log the health report if this step recorded one, and compare weight replicas if due; collective.

    Raises:
        UserError: if replicas of a weight differ.

    """
    compare = _every(trainer.config.logging.check_weight_hash_across_dp_replicas_interval, trainer.iteration)
    if vitals is None and not compare:
        return
    with window.paused():
        if vitals is not None:
            log.health(vitals.report(metrics))
        if compare:
            check_replicas(trainer)


def evaluate_alone(trainer: Trainer, log: RunLog) -> int:
    """Evaluate the loaded weights on all validation and test data without training; return the exit status."""
    for split in trainer.data.used:
        if kind_of(split) != "train":
            evaluate_on(trainer, split, log)
    trainer.optimizer.weights.wait()
    log.note(f"evaluated step {trainer.iteration}; no step is taken with --skip-train")
    return 0


def evaluations_due(trainer: Trainer) -> list[str]:
    """Return the splits to evaluate after the current step and not evaluated yet; test splits only after the last."""
    iteration = trainer.iteration
    last = iteration == trainer.total_steps
    due = {"valid": last or _every(trainer.config.training.eval_interval, iteration), "test": last, "train": False}
    evaluated = trainer.evaluated
    return [split for split in trainer.data.used if due[kind_of(split)] and evaluated.get(split, 0) < iteration]


def evaluate_on(trainer: Trainer, split: str, log: RunLog) -> None:
    """Evaluate a split and log the loss. Call before saving, so that a run killed in between repeats both."""
    loss = evaluate(trainer, split).item()
    average_loss = None
    if trainer.optimizer.average:
        with trainer.optimizer.averaged():
            average_loss = evaluate(trainer, split).item()
    trainer.evaluated[split] = trainer.iteration
    samples = trainer.consumed_samples
    tokens = samples * trainer.config.training.seq_length
    log.evaluation(EvaluationRecord(trainer.iteration, samples, tokens, loss, split, average_loss))


def _every(interval: int | None, iteration: int) -> bool:
    return interval is not None and iteration % interval == 0
