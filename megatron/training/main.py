"""A run from end to end on one rank: join the others, build, train, and say once what went wrong."""

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
        config: validated and resolved.
        notes: on the flags; rank 0 prints them, and a summary, before the first step.
        startup: times the start since the process began; None for one that begins now.

    Returns:
        The exit status: that of :func:`megatron.training.loop.train`, 2 where flags or files turn out not to do
        before the first step, or 1 after any other error. After an error the process should end at once:
        torch.distributed is left open, and so are the peers' connections to it.

    """
    try:
        status = join_and_train(config, notes, startup or StartUp())
    except Exception as error:
        report(error, config.logging.run_dir)
        return 2 if isinstance(error, StartRefusedError) else 1
    leave_distributed()
    return status


def join_and_train(config: RunConfig, notes: Sequence[str], startup: StartUp) -> int:
    """The run itself; returns its exit status."""
    if config.training.skip_train:
        config = replace(config, checkpoint=only_read(config.checkpoint))
    with before_the_first_step(), startup("joining"):
        device = choose_device(config.training.device)
        notes = [*notes, *make_deterministic(config.compute.deterministic, device)]
        rank, world_size = join(config)
    world, minutes = everyone(rank, world_size), config.training.exit_duration_in_mins
    file = Path(config.training.stop_file) if config.training.stop_file and rank == 0 else None
    profiles = ProfileRequests(config.logging.run_dir, rank, warn)
    startup.enter("checkpoint")
    stop = StopRequest(world, device, minutes, startup.began, profiles, file)
    try:
        with claimed(config.checkpoint.save, world) as save, claimed_on_nodes(config.checkpoint, world) as node:
            return train_from_origin(config, notes, stop, startup, Claims(save, node))
    finally:
        stop.restore()


def train_from_origin(
    config: RunConfig, notes: Sequence[str], stop: StopRequest, startup: StartUp, claims: Claims
) -> int:
    """Begin where there is something to begin with, and train."""
    world = stop.world
    with before_the_first_step(), vigil(world):
        origin = choose(config.checkpoint, world)
        startup.enter("other")
        trainer = build(config, world.rank, world.size, fresh=origin.fresh, clock=startup)
        trainer.goodput, trainer.startup = Goodput(startup.began), startup
        trainer.claims, stop.world = claims, trainer.mesh.world
        take_step = StepRunner(trainer)
        with startup("checkpoint"):
            notes = [*notes, *claims.notes, *trainer.notes, *begin(trainer, origin)]
        refuse_full_disk(trainer)
        facts = start_facts(os.environ, None if claims.save is None else claims.save.epoch)
        if origin.fresh and config.logging.run_dir is not None:
            trainer.run_id = run_id_of_job(Path(config.logging.run_dir) / METRICS, facts)
        notes += notes_on_the_journal(config.logging, trainer.run_id)
        trainer.run_id = new_run_id(world, trainer.run_id)
        if "slurm-job" in facts or "torchrun-restart" in facts:
            notes = [in_words(facts), *notes]
        place = {"iteration": trainer.iteration, "consumed_samples": trainer.consumed_samples}
        log = RunLog(
            config,
            world_size=world.size,
            device=trainer.device,
            enabled=world.rank == 0,
            run_id=trainer.run_id,
            data=data_facts(trainer.data),
            facts=facts,
            check=claims.look,
            **place,
        )
    with log, whereabouts(trainer.mesh, trainer.pipeline):
        for text in (*notes, "\n".join([summary(config, world.size, **place), *trainer.data.summary()])):
            log.note(text)
        tell = log.note if log.enabled else say  # each recording rank tells of its own profile
        options, run_dir, models = config.profiling, config.logging.run_dir, [*trainer.chunks.values()]
        pipeline = PipelineProfiler(options, run_dir, trainer, tell, warn)
        profiler = Profiler(options, run_dir, world.rank, trainer.device, models, tell, warn, pipeline)
        try:
            with vigil(world):
                return train(trainer, take_step, log, stop, profiler)
        finally:
            profiler.close(trainer.iteration)


@contextmanager
def before_the_first_step() -> Iterator[None]:
    """What cannot begin with these flags and files is refused, which is no failure of a run.

    Raises:
        StartRefusedError: for errors in flags and data.
    """
    try:
        yield
    except (UserError, DataError) as error:
        raise StartRefusedError(str(error)) from error


def report(error: Exception, run_dir: str | None = None) -> None:
    """Print an error, unless another rank has printed its own: what follows a first failure is mostly its echo.

    ``run_dir`` is where scripts find in a line which machine it was, and of what sort.
    """
    if not first_to_fail():
        return
    launch = Launch.read(os.environ)
    who = whose(launch, os.environ)
    where = f"error on {who}" if launch.world_size > 1 else "error"
    with spared():
        leave_sentence(error, who)
        print(f"{where}: {explain(error)}", file=sys.stderr, flush=True)
        if places := where_all_are(launch.rank, launch.world_size):
            print(places, file=sys.stderr, flush=True)
        note_failure(run_dir, error, os.environ)
