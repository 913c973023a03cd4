"""Run training on one rank: join torch.distributed, load the start state, train, and report a failure once."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from megatron.arguments.summary import summary
from megatron.checkpoint.lease import Leases
from megatron.config.errors import UserError
from megatron.config.run import RunConfig
from megatron.data.errors import DataError
from megatron.distributed.launch import destroy_distributed, world_group
from megatron.kernels.compile import make_deterministic
from megatron.training.build import build_trainer, choose_device, join_distributed
from megatron.training.callbacks.profiler import ProfileRequestListener
from megatron.training.checkpointer import check_disk_space, choose_resume_source, hold_save_folder, load_start_state
from megatron.training.cuda_graphs import StepRunner
from megatron.training.failure_report import PeerWatchdog, StartRefusedError, report_failure
from megatron.training.local_checkpoints import hold_node_folders
from megatron.training.loggers.console import print_warning
from megatron.training.loggers.run_folder import METRICS_FILE, data_summary
from megatron.training.loggers.run_logger import RunLogger
from megatron.training.loggers.wandb import missing_journal_notes
from megatron.training.loop import StopRequest, build_callbacks, train
from megatron.training.metrics import Goodput
from megatron.training.resume_source import read_only_options
from megatron.training.startup import StartupTimer, start_facts, start_phrase
from megatron.training.trainer_state import new_run_id, previous_run_id


def run(config: RunConfig, notes: Sequence[str] = (), startup: StartupTimer | None = None) -> int:
    """Train as configured.

    Args:
        config: validated and resolved configuration.
        notes: notes on the flags; rank 0 prints them, and a summary, before the first step.
        startup: timer of the start, running since the process began; None starts one now.

    Returns:
        The exit status: that of :func:`megatron.training.loop.train`, 2 if flags or files are refused before the
        first step, 1 after any other error. After an error the process should exit at once, because
        torch.distributed stays open.
    """
    try:
        status = join_and_train(config, notes, startup or StartupTimer())
    except Exception as error:
        report_failure(error, config.logging.run_dir)
        return 2 if isinstance(error, StartRefusedError) else 1
    destroy_distributed()
    return status


def join_and_train(config: RunConfig, notes: Sequence[str], startup: StartupTimer) -> int:
    """Join the other ranks, acquire the checkpoint folders, and train; return the exit status."""
    if config.training.skip_train:
        config = replace(config, checkpoint=read_only_options(config.checkpoint))
    with refuse_start_on_error(), startup("joining"):
        device = choose_device(config.training.device)
        notes = [*notes, *make_deterministic(config.compute.deterministic, device)]
        rank, world_size = join_distributed(config)
    world = world_group(rank, world_size)
    startup.enter("checkpoint")
    stop = StopRequest(
        world,
        device,
        config.training.exit_duration_in_mins,
        startup.began,
        ProfileRequestListener(config.logging.run_dir, rank, print_warning),
        Path(config.training.stop_file) if config.training.stop_file and rank == 0 else None,
    )
    try:
        with (
            hold_save_folder(config.checkpoint.save, world) as save,
            hold_node_folders(config.checkpoint, world) as node,
        ):
            return build_and_train(config, notes, stop, startup, Leases(save, node))
    finally:
        stop.restore()


def build_and_train(
    config: RunConfig, notes: Sequence[str], stop: StopRequest, startup: StartupTimer, leases: Leases
) -> int:
    """Build the trainer, load the checkpoint that the run resumes from, if any, and train; return the exit status."""
    world = stop.world
    with refuse_start_on_error(), PeerWatchdog(world):
        source = choose_resume_source(config.checkpoint, world)
        startup.enter("other")
        trainer = build_trainer(config, world.rank, world.size, fresh=source.fresh, clock=startup)
        trainer.goodput = Goodput(startup.began)
        trainer.startup = startup
        trainer.leases = leases
        stop.world = trainer.mesh.world
        on_gpu = trainer.device.type == "cuda"
        graphs = StepRunner(trainer) if on_gpu or config.compute.cuda_graph != "none" else None
        with startup("checkpoint"):
            notes = [*notes, *leases.notes, *trainer.notes, *load_start_state(trainer, source)]
        check_disk_space(trainer)
        facts = start_facts(os.environ, None if leases.save is None else leases.save.epoch)
        if source.fresh and config.logging.run_dir is not None:
            trainer.run_id = previous_run_id(Path(config.logging.run_dir) / METRICS_FILE, facts)
        notes += missing_journal_notes(config.logging, trainer.run_id)
        trainer.run_id = new_run_id(world, trainer.run_id)
        if "slurm-job" in facts or "torchrun-restart" in facts:
            notes = [start_phrase(facts), *notes]
        position = {"iteration": trainer.iteration, "consumed_samples": trainer.consumed_samples}
        log = RunLogger(
            config,
            world_size=world.size,
            device=trainer.device,
            enabled=world.rank == 0,
            run_id=trainer.run_id,
            data=data_summary(trainer.data),
            facts=facts,
            check=leases.look,
            **position,
        )
    with log, PeerWatchdog(world, trainer.pipeline if config.parallel.pipeline_model_parallel_size > 1 else None):
        for text in (*notes, "\n".join([summary(config, world.size, **position), *trainer.data.summary()])):
            log.note(text)
        return train(trainer, graphs, log, stop, build_callbacks(trainer, log, stop))


@contextmanager
def refuse_start_on_error() -> Iterator[None]:
    """Turn errors in flags and data into ``StartRefusedError``, which exits with status 2 instead of 1."""
    try:
        yield
    except (UserError, DataError) as error:
        raise StartRefusedError(str(error)) from error
