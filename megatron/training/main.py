"""Run training on one rank: join torch.distributed, load the start state, train, and report a failure once."""

from __future__ import annotations

import gc
import os
import secrets
import string
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from megatron.arguments.hardware import known_cluster
from megatron.arguments.phases import describe_plan
from megatron.arguments.summary import summary
from megatron.checkpoint.lease import Lease
from megatron.checkpoint.location import Location
from megatron.checkpoint.rewinds import notes_on
from megatron.config.errors import UserError
from megatron.config.launch import Launch, end_refused_start
from megatron.config.phases import Phase
from megatron.config.run import RunConfig
from megatron.convert.sources import SourceOptions, open_source
from megatron.data.errors import DataError
from megatron.distributed.comm import Group
from megatron.distributed.launch import (
    connect_places,
    destroy_distributed,
    enable_flight_recorder,
    gather_results,
    run_on_rank0,
    world_group,
)
from megatron.distributed.places import PLACE
from megatron.kernels.compile import make_deterministic
from megatron.training.build import build_trainer
from megatron.training.build_model import check_same_plan, choose_device, join_distributed
from megatron.training.checkpointer import (
    Checkpointer,
    NoCheckpointLeftError,
    choose_resume_source,
    hold_save_folder,
)
from megatron.training.component import stopped_after_errors
from megatron.training.components.step_incidents import RewindNeededError
from megatron.training.components.times import GoodputState, StartupReport
from megatron.training.cuda_graphs import StepRunner
from megatron.training.failure_report import (
    PeerWatchdog,
    StartRefusedError,
    explain_error,
    host_name,
    report_failure,
)
from megatron.training.features import build_callbacks, plugin_callbacks
from megatron.training.loggers.alerts import alerts_of
from megatron.training.loggers.run_folder import METRICS_FILE, data_summary, read_json_lines
from megatron.training.loggers.run_logger import RunLogger
from megatron.training.loop import is_due, train
from megatron.training.machine import set_variables
from megatron.training.metrics import Goodput
from megatron.training.out_of_memory import explain_out_of_memory
from megatron.training.phases import PhaseChoice, PhaseFacts, choose_phase, plan_notes, read_phase
from megatron.training.rank_log import give_nccl_a_file, rank_log
from megatron.training.resume_source import ResumeSource, later_start_options, read_only_options, refuse_suspects
from megatron.training.rewinds import Rewinds, go_back
from megatron.training.startup import JOB_FACTS, StartFacts, StartupTimer, start_facts, start_phrase
from megatron.training.stop import StopRequest
from megatron.training.trainer import Trainer

if TYPE_CHECKING:
    from megatron.training.local_checkpoints import NodeCheckpoints

REFUSAL_SECONDS = 1.0
"""Seconds that a rank whose start is refused waits for the others of its machine."""


def run(
    config: RunConfig,
    notes: Sequence[str] = (),
    startup: StartupTimer | None = None,
    plan: Sequence[Phase] | None = None,
) -> int:
    """Train as configured.

    Args:
        config: validated and resolved configuration.
        notes: notes on the flags; rank 0 prints them, and a summary, before the first step.
        startup: timer of the start, running since the process began; None starts one now.
        plan: phases of the run; None for one of ``config`` and ``notes``.

    Returns:
        The exit status: that of :func:`megatron.training.loop.train`, 2 if flags or files are refused before the
        first step, 1 after any other error. After an error the process should exit at once, because
        torch.distributed stays open.
    """
    # Signals are handled until the error is reported: launchers send SIGTERM as soon as a rank has exited.
    with ExitStack() as signals:
        signals.enter_context(alerts_of(config.reliability, config.logging.run_dir))
        signals.callback(PLACE.reset)
        try:
            phases = plan or [Phase(config, tuple(notes))]
            status = join_and_train(phases, startup or StartupTimer(), signals)
        except Exception as error:
            reported = report_failure(error, config.logging.run_dir, partial(explain_out_of_memory, config=config))
            if not isinstance(error, StartRefusedError):
                return 1
            return end_refused_start(REFUSAL_SECONDS, explain_error(error) if reported else None)
    destroy_distributed()
    return status


def join_and_train(plan: Sequence[Phase], startup: StartupTimer, signals: ExitStack) -> int:
    """Join the other ranks, acquire the checkpoint folders, and train; return the exit status.

    Signals stop the run until ``signals`` is closed.
    """
    config = plan[0].config  # what is read here is the same in all phases
    training, notes = config.training, list[str]()
    logs = config.logging.run_dir if config.reliability.rank_logs else None
    if training.skip_train:
        only_read = [replace(each.config, checkpoint=read_only_options(each.config.checkpoint)) for each in plan]
        plan = [replace(each, config=other) for each, other in zip(plan, only_read)]
        config = plan[0].config
    with refuse_start_on_error(), startup("joining"):
        environment = set_variables(config, training.device != "cpu" and torch.version.cuda is not None)
        device = choose_device(training.device)
        if device.type == "cuda":
            notes.append(environment)
        notes += make_deterministic(config.compute.deterministic, device)
        enable_flight_recorder(config.logging.run_dir)
        give_nccl_a_file(logs, os.environ)
        rank, world_size = join_distributed(config)
    world = world_group(rank, world_size)
    with refuse_start_on_error():
        check_same_plan(config, world)
    signals.enter_context(rank_log(logs, rank, world_size, os.environ))
    timeout, launch = 60.0 * config.parallel.distributed_timeout_minutes, Launch.read(os.environ)
    world = connect_places(world, timeout, host_name(os.environ), launch.local_rank)
    startup.enter("checkpoint")
    stop = StopRequest(
        world, device, training.exit_duration_in_mins, startup.began, training.stop_file, config.logging.run_dir
    )
    signals.callback(stop.restore)
    others: AbstractContextManager[NodeCheckpoints | None] = nullcontext()
    if config.checkpoint.local_save is not None:
        from megatron.training.local_checkpoints import NodeCheckpoints  # optional

        others = NodeCheckpoints.hold(config.checkpoint, world)
    save = config.checkpoint.save if config.elastic.elastic_replicas is None else None  # or its writer holds it
    with hold_save_folder(save, world) as lease, others as nodes:
        return take_phases(plan, notes, stop, startup, lease, nodes)


def take_phases(
    plan: Sequence[Phase],
    notes: Sequence[str],
    stop: StopRequest,
    startup: StartupTimer,
    lease: Lease | None,
    others: NodeCheckpoints | None,
) -> int:
    """Train from the phase of the newest checkpoint to the end of the plan; return the exit status.

    A phase ends with a checkpoint. The next one begins from it like a start of its own, in the same processes.
    """
    world, configs, goodput = stop.world, [phase.config for phase in plan], Goodput(startup.began)
    if len(plan) > 1:
        notes = [*notes, *describe_plan(plan, world.size)]
    options = configs[0].resume_options
    taken = None  # the last phase that this start has completed
    earlier = ResumeSource()  # checkpoints of phases before, if those of a later one turned out to be damaged
    while True:
        with refuse_start_on_error(), PeerWatchdog(world):
            source = earlier if earlier.paths else choose_resume_source(options, world, others)
            run_on_rank0(partial(refuse_suspects, configs[0], source), world)
            choice = PhaseChoice(0, source)
            if configs[0].training.phases is not None:
                choice = choose_phase(configs, source, world.size, partial(read_phase_together, world=world))
        place = choice.place
        if place == taken:
            raise RuntimeError(f"the phase {plan[place].name} has taken its steps, and its checkpoint does not show it")
        phase = replace(
            plan[place],
            config=choice.source.without_samples(plan[place].config),
            notes=(*notes, *plan_notes(plan, place), *plan[place].notes, *notes_on(choice.source.rewinds)),
        )
        try:
            status, trainer, goes_back = build_and_train(
                phase, plan[place + 1 :], choice.source, stop, startup, lease, others, goodput
            )
        except StartRefusedError as error:
            if not (choice.earlier and isinstance(error.__cause__, NoCheckpointLeftError)):
                raise
            earlier = replace(source, paths=choice.earlier, notes=error.__cause__.passed_over)
            continue
        finally:
            stop.world = world
        training, ends = plan[place].config.training, trainer.iteration >= trainer.total_steps
        exits = training.skip_train or is_due(training.exit_interval, trainer.iteration)
        if not goes_back and (status or exits or not ends or place + 1 == len(plan)):
            return status
        trainer.mesh.close()
        del trainer  # before the next one takes its memory
        free_memory(stop.device)
        earlier, notes, startup = ResumeSource(), (), StartupTimer()
        options = later_start_options(options)
        goodput.continues, goodput.goes_back = True, goes_back
        if goes_back:
            goodput.productive_seconds = 0.0  # until a checkpoint is loaded: what follows it was undone
        else:
            taken = place


def read_phase_together(path: Location, world: Group) -> PhaseFacts | None:
    """Return the phase of a checkpoint that any rank can read, the same on every rank; collective."""

    def read() -> list[Any] | None:
        facts = read_phase(path)
        return None if facts is None else [*facts]

    return next((PhaseFacts(*facts) for facts in gather_results(read, world) if facts is not None), None)


def build_and_train(
    phase: Phase,
    later: Sequence[Phase],
    source: ResumeSource,
    stop: StopRequest,
    startup: StartupTimer,
    lease: Lease | None,
    others: NodeCheckpoints | None,
    goodput: Goodput,
) -> tuple[int, Trainer, bool]:
    """Build the trainer, load the checkpoint that the run resumes from, if any, and train.

    Returns:
        The exit status, the trainer, and whether the run goes on from an earlier step.

    Raises:
        NoCheckpointLeftError: if all checkpoints of ``source`` are damaged.
    """
    config, notes = phase.config, [*phase.notes]
    world, run_dir = stop.world, config.logging.run_dir
    with refuse_start_on_error(), PeerWatchdog(world), ExitStack() as cleanup:
        if (weights := source.weights) is not None:  # before memory is allocated for sizes that its tensors lack
            options = SourceOptions(model=config.model, follow_links=True)  # links are checked with the flags
            run_on_rank0(lambda: bool(open_source(weights, options)), world)
        startup.enter("other")
        trainer = build_trainer(config, world.rank, world.size, fresh=source.fresh, clock=startup)
        trainer.progress.later = sum(each.steps for each in later), sum(each.tokens for each in later)
        plugins = plugin_callbacks(trainer)
        rewinds = [Rewinds(source.rewinds)] if source.rewinds else []
        trainer.components += [GoodputState(goodput), *rewinds, *plugins]
        cleanup.enter_context(stopped_after_errors(trainer.components))
        stop.world = trainer.mesh.world
        graphs = StepRunner(trainer)
        checkpointer = Checkpointer(trainer, lease, others)
        with startup("checkpoint"):
            held = () if lease is None else lease.notes
            loaded = checkpointer.load(source)
            notes += [*held, *trainer.notes, *graphs.notes, *loaded]
        for component in trainer.components:
            notes += component.on_start(lambda: bool(stop.local_code()))
        facts = start_facts(os.environ, None if lease is None else lease.epoch)
        previous = None if run_dir is None or not source.fresh else Path(run_dir) / METRICS_FILE
        known = trainer.progress.run_id
        trainer.progress.run_id = run_on_rank0(
            lambda: known or (previous and previous_run_id(previous, facts)) or new_run_id(), world
        )
        if "slurm-job" in facts or "torchrun-restart" in facts:
            notes = [start_phrase(facts), *notes]
        log = RunLogger(
            config,
            world_size=world.size,
            device=trainer.device,
            enabled=world.rank == 0,
            run_id=trainer.progress.run_id,
            data=data_summary(trainer.data),
            facts=facts,
            before=None if goodput.goes_back else "the phase before" if goodput.continues else "an earlier start",
            check=lambda: lease.check() if lease is not None and lease.staging is not None else None,
            iteration=trainer.iteration,
            consumed_samples=trainer.consumed_samples,
            origin=trainer.progress.origin,
            later=trainer.progress.later,
        )
    pipeline = trainer.pipeline if config.parallel.pipeline_model_parallel_size > 1 else None
    with log, PeerWatchdog(world, pipeline, run_dir):
        with refuse_start_on_error(), stopped_after_errors(trainer.components):
            placed = replace(config, training=replace(config.training, device=trainer.device.type))
            shown = summary(placed, world.size, *trainer.progress.in_phase, known_cluster(config, world.size))
            notes.append("\n".join([shown, *trainer.data.summary()]))
            for text in loaded if goodput.goes_back else notes:
                log.note(text)
            before = len(trainer.components) - len(plugins)  # those of plugins are called last
            trainer.components[before:before] = [
                StartupReport(trainer, startup),
                *build_callbacks(trainer, log, stop, checkpointer, others),
            ]
        began = trainer.iteration
        try:
            status = train(trainer, None if graphs.mode == "none" else graphs, log, stop, checkpointer, goodput)
        except RewindNeededError as request:
            checkpointer.wait()
            newest = choose_resume_source(later_start_options(config.resume_options), world, others)
            log.rewound(go_back(request, config, newest, began, trainer.progress.origin.iteration, world, lease))
            return 0, trainer, True
        return status, trainer, False


def free_memory(device: torch.device) -> None:
    """Free what a trainer without references has used."""
    gc.collect()  # its parts refer to each other
    if device.type == "cuda":
        torch.cuda.empty_cache()


@contextmanager
def refuse_start_on_error() -> Iterator[None]:
    """Turn errors in flags and data into ``StartRefusedError``, which exits with status 2 instead of 1."""
    try:
        yield
    except (UserError, DataError) as error:
        raise StartRefusedError(str(error)) from error


def new_run_id() -> str:
    """Return a random run ID. It does not depend on the run's seed: two runs with one seed have two IDs."""
    return "".join(secrets.choice(string.ascii_lowercase + string.digits) for _ in range(8))


def previous_run_id(metrics: Path, facts: StartFacts) -> str:
    """Return the run ID of the previous start if it belongs to the same job, else an empty string.

    ``metrics.jsonl`` is the only record of the ID before the first checkpoint.
    """
    last: Mapping[str, Any] = {}
    with suppress(OSError, IndexError):  # the first start
        last = [line for line in read_json_lines(metrics) if line is not None and line.get("event") == "start"][-1]
    same_job = any(name in facts for name in JOB_FACTS) and all(last.get(name) == facts.get(name) for name in JOB_FACTS)
    return str(last.get("run-id", "")) if same_job else ""
