"""Take steps of a run again, from a checkpoint before them, without writing anything; the part of each rank.

tools/replay_step.py calls :func:`replay` on the ranks of the run's layout and compares what it returns with the log
of the run and with the record of the step (:mod:`megatron.training.step_record`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.config.logging import LoggingConfig
from megatron.config.run import RunConfig
from megatron.config.text import did_you_mean, listed
from megatron.data.errors import DataError
from megatron.distributed import comm
from megatron.distributed.micro_batch import MicroBatch
from megatron.training.build import build_trainer
from megatron.training.checkpointer import Checkpointer
from megatron.training.component import Component, name_in_errors
from megatron.training.features import plugin_callbacks
from megatron.training.loggers.run_logger import RunLogger
from megatron.training.loop import CallbackList, take_step
from megatron.training.metrics import MetricsWindow
from megatron.training.module_trace import ModuleSize, ModuleTrace, SampleSize, scan_samples
from megatron.training.resume_source import ResumeSource, read_only_options
from megatron.training.step_record import record_samples, record_tensors
from megatron.training.trainer import Trainer

LEFT_OUT = Component.on_log, Component.on_evaluate, Component.before_save, Component.on_save
"""Hooks of plugins that are not called: nothing is logged, evaluated or saved."""


@dataclass(frozen=True)
class ReplayOptions:
    """Steps to take again, and what to observe."""

    step: int  # the last one
    # Threads of torch on a CPU, on which the order of sums depends; None for those of this process.
    threads: int | None = None
    # Measure all modules in the last two steps.
    modules: bool = False
    # Module before whose forward in the last step the debugger is entered.
    stop_at: str | None = None
    # Instead of the last step, compute its samples one by one and measure this module.
    samples: str | None = None
    # Folder for the tensors of this module in the last step.
    keep: tuple[str, str] | None = None


@dataclass(frozen=True)
class ReplayedStep:
    """Results of a step."""

    step: int
    consumed_samples: int  # after it
    loss: float
    grad_norm: float
    skipped: bool
    samples_digest: str


@dataclass
class Replay:
    """What was computed again; on rank 0, the others have parts."""

    steps: list[ReplayedStep] = field(default_factory=list)
    record: Mapping[str, Any] = field(default_factory=dict)  # tensors and samples of the last step
    modules: list[ModuleSize] = field(default_factory=list)  # of the last step
    modules_before: list[ModuleSize] = field(default_factory=list)  # of the step before
    samples: list[SampleSize] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    kept: str | None = None  # file of kept tensors


def read_only_config(config: RunConfig) -> RunConfig:
    """Return a configuration that computes the same and writes nothing."""
    training = replace(config.training, stop_file=None, exit_interval=None, exit_duration_in_mins=None, eval_iters=0)
    return replace(
        config,
        checkpoint=read_only_options(config.checkpoint),
        logging=LoggingConfig(log_interval=config.logging.log_interval),
        reliability=replace(config.reliability, replay_check=None),
        training=training,
    )


class StepProbe(Component):
    """Records the gradients and the weights of one step, before its update."""

    def __init__(self, trainer: Trainer, step: int) -> None:
        """Record step number ``step``."""
        self._trainer, self._step = trainer, step
        self.record: dict[str, Any] = {}

    def on_gradients(self, losses: dict[str, Tensor], tokens: Tensor) -> None:
        """See :class:`Component`."""
        if self._trainer.iteration + 1 == self._step:
            self.record |= record_tensors(self._trainer)

    def on_step_taken(self, batches: Sequence[MicroBatch]) -> None:
        """See :class:`Component`."""
        if self._trainer.iteration + 1 == self._step:
            self.record["samples"] = record_samples(self._trainer, batches)


def replay(
    config: RunConfig, source: ResumeSource, options: ReplayOptions, rank: int = 0, world_size: int = 1
) -> Replay:
    """Take steps again; collective over the ranks of the run's layout, or of another one.

    Args:
        config: of the run, see :func:`read_only_config`.
        source: what the run, or its checkpoint before the step, starts from.
        options: what to take and observe.
        rank: this rank.
        world_size: number of ranks.

    Raises:
        UserError: if the checkpoint cannot be resumed with this configuration and these data.
        DataError: if the data cannot be opened, or the model has no such module.
    """
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    trainer = build_trainer(config, rank, world_size, fresh=source.fresh)
    plugins = plugin_callbacks(trainer)
    trainer.components += plugins
    check_modules(trainer, [options.samples, options.stop_at, *(options.keep or ())[:1]])
    found = Replay(notes=Checkpointer(trainer).load(source))
    probe = StepProbe(trainer, options.step)
    trainer.components.append(probe)
    log = RunLogger(config, world_size=world_size, device=trainer.device, enabled=False)
    callbacks = CallbackList(trainer, log)
    found.notes += start_components(trainer, plugins)
    window = MetricsWindow(trainer.device, config.training.seq_length, world=trainer.mesh.world)
    last = options.step - 1 if options.samples else options.step
    while trainer.iteration < last:
        step, trace = trainer.iteration + 1, None
        if step == options.step and (options.modules or options.keep or options.stop_at):
            trace = ModuleTrace(trainer, options.stop_at, options.keep[0] if options.keep else None)
        elif step == options.step - 1 and options.modules:
            trace = ModuleTrace(trainer)
        callbacks.start_step(window, step)
        found.steps.append(take(trainer, callbacks, window, trace, last=step == options.step))
        if trace is not None:
            found.modules_before, found.modules = found.modules, trace.gather()
            if trace.kept and options.keep:
                found.kept = save_tensors(trace.kept, Path(options.keep[1]), options.keep[0], rank, world_size)
    if options.samples:
        callbacks.start_step(window, options.step)
        found.samples = scan_samples(trainer, trainer.next_batches(), options.samples)
    trainer.optimizer.weights.wait()
    found.record = probe.record
    trainer.mesh.close()
    return found


def start_components(trainer: Trainer, plugins: Sequence[Component]) -> list[str]:
    """Start what acts in a replay, and return notes; collective."""
    notes = [note for component in trainer.components for note in component.on_start(lambda: False)]
    for plugin in plugins:
        with name_in_errors(plugin.plugin, "on_train_start"):
            plugin.on_train_start()
        if left_out := [hook.__name__ for hook in LEFT_OUT if plugin in trainer.acting(hook)]:
            notes.append(f"a replay does not call {listed(left_out)} of the callback {plugin.plugin} (--plugin)")
    return notes


def check_modules(trainer: Trainer, names: Sequence[str | None]) -> None:
    """Raise DataError on every rank if the model lacks a module of ``names``; collective."""
    mine = sorted({name for chunk in trainer.chunks.values() for name, _ in chunk.named_modules() if name})
    known = {name for rank in comm.all_gather_objects(mine, trainer.mesh.world) for name in rank}
    for name in names:
        if name is not None and name not in known:
            guess = did_you_mean(name, sorted(known))
            raise DataError(f"the model has no module {name}", *([guess] if guess else []))


def take(
    trainer: Trainer, callbacks: CallbackList, window: MetricsWindow, trace: ModuleTrace | None, last: bool
) -> ReplayedStep:
    """Take the next step, perhaps observed, and return its results; call what acts after it unless it is the last."""
    samples, rates = trainer.reader.next_batch_size, trainer.schedule.rates(trainer.consumed_samples)
    with nullcontext() if trace is None else trace.observing():
        metrics = take_step(trainer, None, callbacks, samples, rates)
    callbacks.call(Component.settle)
    if not last:  # of plugins: other components that act there are refused or left out
        callbacks.call_paused(Component.on_step_end, window, metrics)
        callbacks.call_paused(Component.on_iteration_end, window)
    digest = f"{trainer.reader.samples_digest():016x}"
    numbers = float(metrics.loss), float(metrics.grad_norm), bool(metrics.skipped)
    return ReplayedStep(trainer.iteration, trainer.consumed_samples, *numbers, digest)


def save_tensors(tensors: Mapping[str, Tensor], folder: Path, module: str, rank: int, world_size: int) -> str:
    """Write the tensors of a module as safetensors, a file for each rank that has it; return the file."""
    from safetensors.torch import save_file  # optional

    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{module}{f'.rank{rank}' * (world_size > 1)}.safetensors"
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
    return str(path)
