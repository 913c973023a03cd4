"""The training loop. Evaluate, log, skip and stop are all visible here; people are meant to edit it."""

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
    """Train to the end, or until told to stop; with ``skip_train`` evaluate alone.

    Returns:
        The exit status: 0 at the end, at ``exit_interval`` and after ``stop_file``, what ``stop`` says after a signal
        or in time.

    Raises:
        NonFiniteError: with ``on_nonfinite`` stop.
        StorageError: when the last checkpoint, or the proof that training has ended, cannot be written.

    """
    if trainer.config.training.skip_train:
        stop.restore()  # there is nothing that would have to be saved before a signal may end it
        return evaluate_alone(trainer, log)
    if trainer.iteration < trainer.total_steps:
        finished.retract(trainer)
    with Saver(trainer, log) as saver:
        status = _train(trainer, take_step, log, stop, profiler, saver)
    trainer.optimizer.weights.wait()  # nobody leaves while others still get weights from here
    if trainer.iteration >= trainer.total_steps:
        finished.declare(trainer)
    return status


def _train(
    trainer: Trainer, take_step: StepRunner, log: RunLog, stop: StopRequest, profiler: Profiler, saver: Saver
) -> int:
    """The steps; :func:`train` says what is returned and raised."""
    t, config, options, logging = trainer, trainer.config.training, trainer.config.checkpoint, trainer.config.logging
    if told := begin(t, log, stop, profiler, saver):
        return exit_status(told)
    window = window_of(t)
    t.startup.enter("first step")
    while t.iteration < t.total_steps:
        rates = t.schedule.rates(t.consumed_samples)
        with profiler.step(t.iteration + 1):
            with t.timers("batch-generator"):
                samples, batches = t.next_batch_size, t.next_batches()
            vitals = watch(t) if _every(logging.log_health_interval, t.iteration + 1) else None
            metrics = take_step(batches, rates, eager=vitals is not None)
        if t.device.type == "cuda":  # which is at the step now, while the host has nothing to do
            t.read_ahead()
        if config.on_nonfinite == "stop" and metrics.nonfinite.item() and not t.scaler.can_shrink(metrics.loss_scale):
            raise NonFiniteError(explain_nonfinite(t, batches))
        t.iteration += 1
        t.consumed_samples += samples

        window.add(metrics, samples)
        read = partial(window.read, iteration=t.iteration, consumed_samples=t.consumed_samples, rates=rates)
        log.stepped(t.iteration, t.consumed_samples, partial(read, alone=True))  # told even if the run fails before
        examine(t, vitals, metrics, window, log)
        saver.look()

        tell_start_up(t, log)
        told = stop.agreed()
        profiler.ask(t.iteration, stop.wish)
        last = t.iteration == t.total_steps
        leave = told or last or _every(config.exit_interval, t.iteration)
        if leave or _every(logging.log_interval, t.iteration):
            log.train(read(samples_digest=t.samples_digest()))
        for split in evaluations_due(t) if last or not told else ():  # nobody who sent a signal waits for it
            with window.paused():
                evaluate_on(t, split, log)
        if options.save is not None and (leave or _every(options.save_interval, t.iteration)):
            with window.paused():
                saver.save(needed=bool(leave))
        save_on_nodes(t, log, window)  # not earlier: a run that finds its last step there has nothing more to save
        if leave and not last:
            why = reason(told, config.stop_file) if told else f"--exit-interval {config.exit_interval}"
            log.stopped(f"stopped by {why} after step {t.iteration} of {t.total_steps}")
            return exit_status(told)
    return 0


def begin(trainer: Trainer, log: RunLog, stop: StopRequest, profiler: Profiler, saver: Saver) -> int:
    """Make up for what an earlier start did not come to; what stops this one before its first step, or 0; collective.

    Raises:
        StorageError: when the last step was taken, is not saved, and cannot be.

    """
    t, over = trainer, trainer.iteration >= trainer.total_steps
    if not over and (told := told_meanwhile(t, stop, profiler)):
        why = f"stopped by {reason(told, t.config.training.stop_file)} before the first step of this start"
        log.stopped(f"{why}: {t.iteration} of {t.total_steps} are taken, and there is nothing new to save")
        return told
    for split in evaluations_due(t):  # the step was stopped by a signal
        evaluate_on(t, split, log)
    if over:
        log.note(f"nothing to do: this run ends with step {t.total_steps}, and {t.iteration} are taken")
        if t.config.checkpoint.save is not None and not finished.is_saved(t):  # the step is another run's, or a node's
            saver.save(needed=True)
    return 0


def told_meanwhile(trainer: Trainer, stop: StopRequest, profiler: Profiler) -> int:
    """What the run was told while it started: what stops it before a step, or 0; collective.

    Time that is up already does not: a job that is queued again and again would never come further.
    """
    told = stop.agreed()
    profiler.ask(trainer.iteration, stop.wish)
    return 0 if told == TIME_IS_UP else told


def window_of(trainer: Trainer) -> StepWindow:
    """The steps of this start; its clock starts at once, on all ranks together."""
    t, logging = trainer, trainer.config.logging
    return StepWindow(
        t.device,
        t.config.training.seq_length,
        world=t.mesh.world,
        timers=t.timers,
        goodput=t.goodput,
        timing_option=logging.timing_log_option,
        recorded=t.config.compute.cuda_graph,
    )


def tell_start_up(trainer: Trainer, log: RunLog) -> None:
    """After the first step, tell where the time until then went on this rank, and on the slowest; collective."""
    t, mine = trainer, trainer.startup.seconds
    if not t.startup.running:
        return
    if t.device.type == "cuda":
        torch.cuda.synchronize(t.device)  # it may be at the step still
    t.startup.stop()
    with t.mesh.world.meter.paused():
        seconds = torch.tensor([*mine.values()], dtype=torch.float64, device=t.device)
        longest = comm.all_reduce(seconds, t.mesh.world, op="max").tolist()
    log.start_up(mine, dict(zip(mine, longest)))


def examine(trainer: Trainer, vitals: Vitals | None, metrics: StepMetrics, window: StepWindow, log: RunLog) -> None:
    """Report on every layer if it was watched, and compare the copies of the weights when that is due; collective.

    Raises:
        UserError: when copies of a weight differ.

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
    """Evaluate what was loaded on all validation and test data, and take no step; returns the exit status."""
    for split in trainer.data.used:
        if kind_of(split) != "train":
            evaluate_on(trainer, split, log)
    trainer.optimizer.weights.wait()
    log.note(f"evaluated step {trainer.iteration}; no step is taken with --skip-train")
    return 0


def evaluations_due(trainer: Trainer) -> list[str]:
    """Splits to evaluate on after the step that was taken last, where that has not been done: test data at the end."""
    t, last = trainer, trainer.iteration == trainer.total_steps
    due = {"valid": last or _every(t.config.training.eval_interval, t.iteration), "test": last, "train": False}
    return [split for split in t.data.used if due[kind_of(split)] and t.evaluated.get(split, 0) < t.iteration]


def evaluate_on(trainer: Trainer, split: str, log: RunLog) -> None:
    """Evaluate. Before the step is saved, so that a run killed meanwhile takes up the step, and this, again."""
    t = trainer
    loss, average = evaluate(t, split).item(), None
    if t.optimizer.average:
        with t.optimizer.averaged():
            average = evaluate(t, split).item()
    t.evaluated[split] = t.iteration
    tokens = t.consumed_samples * t.config.training.seq_length
    log.evaluation(EvaluationRecord(t.iteration, t.consumed_samples, tokens, loss, split, average))


def _every(interval: int | None, iteration: int) -> bool:
    return interval is not None and iteration % interval == 0
