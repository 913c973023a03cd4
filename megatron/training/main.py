"""Run training on one rank: join torch.distributed, load the start state, train, and report a failure once."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from megatron.checkpoint.claims import Claims
from megatron.config.launch import Launch
from megatron.config.problems import UserError
from megatron.config.run import RunConfig
from megatron.config.summary import summary
from megatron.data.errors import DataError
from megatron.kernels.determinism import make_deterministic
from megatron.parallel.mesh import everyone, first_to_fail, leave_distributed
from megatron.training.failure import StartRefusedError, explain, leave_sentence
from megatron.training.first_cause import note_failure, whose
from megatron.training.goodput import Goodput
from megatron.training.graphs import StepRunner
from megatron.training.local_tier import claimed_on_nodes
from megatron.training.logging import RunLog, say, warn
from megatron.training.loop import train
from megatron.training.origin import only_read
from megatron.training.pipeline_profile import PipelineProfiler
from megatron.training.profile_request import ProfileRequests
from megatron.training.profiling import Profiler
from megatron.training.resume import begin, choose
from megatron.training.run_folder import METRICS, data_facts
from megatron.training.run_identity import new_run_id, run_id_of_job
from megatron.training.saving import refuse_full_disk
from megatron.training.setup import build, choose_device, join
from megatron.training.start_facts import in_words, start_facts
from megatron.training.startup import StartUp
from megatron.training.stop import StopRequest
from megatron.training.together import claimed
from megatron.training.vigil import vigil
from megatron.training.wandb_sink import notes_on_the_journal
from megatron.training.whereabouts import spared, where_all_are, whereabouts


def run(config: RunConfig, notes: Sequence[str] = (), startup: StartUp | None = None) -> int:
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
        status = join_and_train(config, notes, startup or StartUp())
    except Exception as error:
        report(error, config.logging.run_dir)
        return 2 if isinstance(error, StartRefusedError) else 1
    leave_distributed()
    return status


def join_and_train(config: RunConfig, notes: Sequence[str], startup: StartUp) -> int:
    """Join the other ranks, acquire the checkpoint folders, and train; return the exit status."""
    if config.training.skip_train:
        config = replace(config, checkpoint=only_read(config.checkpoint))
    with before_the_first_step(), startup("joining"):
        device = choose_device(config.training.device)
        notes = [*notes, *make_deterministic(config.compute.deterministic, device)]
        rank, world_size = join(config)
    world = everyone(rank, world_size)
    startup.enter("checkpoint")
    stop = StopRequest(
        world,
        device,
        config.training.exit_duration_in_mins,
        startup.began,
        ProfileRequests(config.logging.run_dir, rank, warn),
        Path(config.training.stop_file) if config.training.stop_file and rank == 0 else None,
    )
    try:
        with claimed(config.checkpoint.save, world) as save, claimed_on_nodes(config.checkpoint, world) as node:
            return train_from_origin(config, notes, stop, startup, Claims(save, node))
    finally:
        stop.restore()


def train_from_origin(
    config: RunConfig, notes: Sequence[str], stop: StopRequest, startup: StartUp, claims: Claims
) -> int:
    """Build the trainer, load the checkpoint that the run resumes from, if any, and train; return the exit status."""
    world = stop.world
    with before_the_first_step(), vigil(world):
        source = choose(config.checkpoint, world)
        startup.enter("other")
        trainer = build(config, world.rank, world.size, fresh=source.fresh, clock=startup)
        trainer.goodput = Goodput(startup.began)
        trainer.startup = startup
        trainer.claims = claims
        stop.world = trainer.mesh.world
        take_step = StepRunner(trainer)
        with startup("checkpoint"):
            notes = [*notes, *claims.notes, *trainer.notes, *begin(trainer, source)]
        refuse_full_disk(trainer)
        facts = start_facts(os.environ, None if claims.save is None else claims.save.epoch)
        if source.fresh and config.logging.run_dir is not None:
            trainer.run_id = run_id_of_job(Path(config.logging.run_dir) / METRICS, facts)
        notes += notes_on_the_journal(config.logging, trainer.run_id)
        trainer.run_id = new_run_id(world, trainer.run_id)
        if "slurm-job" in facts or "torchrun-restart" in facts:
            notes = [in_words(facts), *notes]
        position = {"iteration": trainer.iteration, "consumed_samples": trainer.consumed_samples}
        log = RunLog(
            config,
            world_size=world.size,
            device=trainer.device,
            enabled=world.rank == 0,
            run_id=trainer.run_id,
            data=data_facts(trainer.data),
            facts=facts,
            check=claims.look,
            **position,
        )
    with log, whereabouts(trainer.mesh, trainer.pipeline):
        for text in (*notes, "\n".join([summary(config, world.size, **position), *trainer.data.summary()])):
            log.note(text)
        note = log.note if log.enabled else say  # each rank that records a profile reports it itself
        options = config.profiling
        run_dir = config.logging.run_dir
        pipeline = PipelineProfiler(options, run_dir, trainer, note, warn)
        models = [*trainer.chunks.values()]
        profiler = Profiler(options, run_dir, world.rank, trainer.device, models, note, warn, pipeline)
        try:
            with vigil(world):
                return train(trainer, take_step, log, stop, profiler)
        finally:
            profiler.close(trainer.iteration)


@contextmanager
def before_the_first_step() -> Iterator[None]:
    """Turn errors in flags and data into ``StartRefusedError``, which exits with status 2 instead of 1."""
    try:
        yield
    except (UserError, DataError) as error:
        raise StartRefusedError(str(error)) from error


def report(error: Exception, run_dir: str | None = None) -> None:
    """Print an error, unless another rank failed first: later errors are mostly consequences of the first.

    With ``run_dir``, also append a line to its ``failures.jsonl``.
    """
    if not first_to_fail():
        return
    launch = Launch.read(os.environ)
    rank = whose(launch, os.environ)
    prefix = f"error on {rank}" if launch.world_size > 1 else "error"
    with spared():
        leave_sentence(error, rank)
        print(f"{prefix}: {explain(error)}", file=sys.stderr, flush=True)
        if positions := where_all_are(launch.rank, launch.world_size):
            print(positions, file=sys.stderr, flush=True)
        note_failure(run_dir, error, os.environ)
