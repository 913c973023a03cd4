"""Run training on one rank: join torch.distributed, load the start state, train, and report a failure once.

The peer watchdog ends a rank on SIGTERM even while it is blocked in a collective with a dead peer. When a rank dies,
its launcher sends SIGTERM to the other ranks of the machine, and torchrun restarts none of them before all have
exited. A rank blocked in a collective may stay blocked: gloo notices a dead peer within milliseconds, NCCL only after
``--distributed-timeout-minutes``, and Python runs signal handlers only once the collective returns. A thread
therefore receives the signal and checks whether all peers are alive; if so, the run finishes its step and saves, as
usual.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from megatron.arguments.summary import summary
from megatron.checkpoint.lease import Leases
from megatron.config.errors import UserError
from megatron.config.launch import Launch
from megatron.config.run import RunConfig
from megatron.data.errors import DataError
from megatron.distributed.comm import Group
from megatron.distributed.launch import destroy_distributed, has_any_rank_failed, register_failure, world_group
from megatron.kernels.compile import make_deterministic
from megatron.training.build import build_trainer, choose_device, join_distributed
from megatron.training.callbacks.profiler import ProfileRequestListener
from megatron.training.checkpointer import check_disk_space, choose_resume_source, hold_save_folder, load_start_state
from megatron.training.cuda_graphs import StepRunner
from megatron.training.failure_report import (
    LOST_CONTACT,
    StartRefusedError,
    explain_error,
    ignore_sigterm,
    publish_error,
    publish_position_on_failure,
    rank_label,
    rank_positions,
    record_failure,
)
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

PEER_POLL_SECONDS = 0.25
"""Seconds between two checks for a dead peer."""

PEER_GRACE_SECONDS = 2.0
"""Seconds that a rank gets to report the lost peer itself before it is ended."""

PROC = Path("/proc")
PROC_SELF = PROC / "self"

EXIT_SIGTERM = 128 + signal.SIGTERM


@contextmanager
def peer_watchdog(world: Group, gone: Callable[[], bool] | None = None) -> Iterator[None]:
    """End this process within seconds of SIGTERM if a peer is dead. Use in the main thread.

    Args:
        world: all ranks; with a single rank nothing is watched.
        gone: returns True if a peer is dead; None checks the processes of this machine and the failure messages of
            the other ranks.
    """
    if world.size == 1:
        yield
        return
    receiver, sender = socket.socketpair()
    sender.setblocking(False)
    previous = signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)
    stopped = threading.Event()
    arguments = (receiver, stopped, world.rank, gone or Peers().gone)
    threading.Thread(target=_watch, args=arguments, name="peer watchdog", daemon=True).start()
    try:
        yield
    finally:
        stopped.set()
        signal.set_wakeup_fd(previous)
        sender.close()


def _watch(signals: socket.socket, stopped: threading.Event, rank: int, gone: Callable[[], bool]) -> None:
    """Wait for SIGTERM, then for a dead peer, then end the process; return early once ``stopped`` is set."""
    with signals:
        while signal.SIGTERM not in (received := signals.recv(1)):
            if not received:
                return
    while not gone():
        if stopped.wait(PEER_POLL_SECONDS):
            return
    if stopped.wait(PEER_GRACE_SECONDS):
        return
    if register_failure():
        print(f"error on rank {rank}: {LOST_CONTACT}", file=sys.stderr, flush=True)
    os._exit(EXIT_SIGTERM)


class Peers:
    """The other ranks: those of this machine by their processes, all of them by the failures they publish."""

    def __init__(self) -> None:
        """Record the peers on this machine; all of them must be running."""
        self._local = _local_peers()

    def gone(self) -> bool:
        """Return True if a local peer has exited, a rank has published a failure, or the store does not answer."""
        return not self._local <= _local_peers() or has_any_rank_failed()


def _local_peers() -> set[int]:
    """Return the ids of running processes with this one's parent and command line; empty without ``/proc``."""
    found = set()
    for path in PROC.glob("[0-9]*"):
        with suppress(OSError):  # the process has just ended
            parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == os.getppid() and _command_line(path) == _command_line(PROC_SELF):
                found.add(int(path.name))
    return found


def _command_line(process: Path) -> bytes:
    """Return the command line; empty for a zombie."""
    return (process / "cmdline").read_bytes()


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
    with refuse_start_on_error(), peer_watchdog(world):
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
    with log, publish_position_on_failure(trainer.mesh, trainer.pipeline):
        for text in (*notes, "\n".join([summary(config, world.size, **position), *trainer.data.summary()])):
            log.note(text)
        with peer_watchdog(world):
            return train(trainer, graphs, log, stop, build_callbacks(trainer, log, stop))


@contextmanager
def refuse_start_on_error() -> Iterator[None]:
    """Turn errors in flags and data into ``StartRefusedError``, which exits with status 2 instead of 1."""
    try:
        yield
    except (UserError, DataError) as error:
        raise StartRefusedError(str(error)) from error


def report_failure(error: Exception, run_dir: str | None = None) -> None:
    """Print an error, unless another rank failed first: later errors are mostly consequences of the first.

    With ``run_dir``, also append a line to its ``failures.jsonl``.
    """
    if not register_failure():
        return
    launch = Launch.read(os.environ)
    rank = rank_label(launch, os.environ)
    prefix = f"error on {rank}" if launch.world_size > 1 else "error"
    with ignore_sigterm():
        publish_error(error, rank)
        print(f"{prefix}: {explain_error(error)}", file=sys.stderr, flush=True)
        if positions := rank_positions(launch.rank, launch.world_size):
            print(positions, file=sys.stderr, flush=True)
        record_failure(run_dir, error, os.environ)
