"""A process of the pool: waits for a job, is one rank of it, reports.

Forked from a server that has imported torch already, so a job costs its process group and nothing else.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import pickle
import signal
import socket
import sys
import textwrap
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.kit import shared_memory_group

SOURCE = __file__

DUMP_STACKS = signal.SIGUSR1
"""Makes a worker write the stacks of its threads into its log, even from inside a collective."""


@dataclass(frozen=True)
class Job:
    """One rank's part: ``function(rank, world_size, *args)``.

    Attributes:
        rendezvous: a path that no other job uses, where the ranks of this one find each other.
        timeout: seconds the job may take; a collective that misses a rank raises after half of it.
        backend: of the default process group.
    """

    rank: int
    world_size: int
    function: Callable[..., Any]
    args: tuple[Any, ...]
    rendezvous: str
    timeout: float
    backend: str


@dataclass(frozen=True)
class Reply:
    """A rank's result."""

    result: Any


@dataclass(frozen=True)
class Raised:
    """A rank's error, in one line and with its traceback; ``at`` is on the clock all processes share (seconds)."""

    summary: str
    details: str
    at: float


def work(connection: Connection, log_path: str) -> None:
    """Serve jobs from ``connection`` until its other end is closed; output goes to the file ``log_path``."""
    _redirect_output(log_path)
    faulthandler.enable()
    faulthandler.register(DUMP_STACKS)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, whose end closes ours
    gc.freeze()  # all that the server has imported
    torch.set_num_threads(1)
    names = {name for _, name in socket.if_nameindex()}
    os.environ["GLOO_SOCKET_IFNAME"] = next(name for name in ("lo", "lo0") if name in names)
    while _serve(connection):
        pass


def _redirect_output(log_path: str) -> None:
    log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)


def _serve(connection: Connection) -> bool:
    """Do one job. False when there are no more, or when this process should not do another.

    A rank that raised ends: its sockets close, so peers that wait for it in a collective fail at once too.
    """
    try:
        message = connection.recv_bytes()
    except EOFError:
        return False
    try:
        answer = pickle.dumps(Reply(_run(pickle.loads(message))))
    except BaseException as error:
        raised = _raised(error)
        shared_memory_group.close_board()
        connection.send_bytes(pickle.dumps(raised))
        return False
    connection.send_bytes(answer)
    return True


def _raised(error: BaseException) -> Raised:
    summary = "".join(traceback.format_exception_only(error)).splitlines()[0]
    frames = error.__traceback__
    while frames and frames.tb_frame.f_code.co_filename == SOURCE:  # frames of this file are no part of the job
        frames = frames.tb_next
    details = "".join(traceback.format_exception(error.with_traceback(frames)))
    return Raised(textwrap.shorten(summary, 200), details, time.monotonic())


def _run(job: Job) -> Any:
    torch.set_default_dtype(torch.float32)
    torch.manual_seed(job.rank)  # repeatable, but different on every rank: nothing may lean on torch's global generator
    # Only now, when every rank of the last job has answered: one that left at once could break connections which a peer
    # was still making.
    if dist.is_initialized():
        dist.destroy_process_group()
    gc.collect()  # groups that cycles of references keep: each has a thread that polls every 10 ms
    shared_memory_group.close_board()
    if job.world_size > 1:
        _join_process_group(job)
    return job.function(job.rank, job.world_size, *job.args)


def _join_process_group(job: Job) -> None:
    if job.backend == shared_memory_group.SHARED_MEMORY:
        shared_memory_group.register()
        shared_memory_group.open_board(Path(f"{job.rendezvous}-logs"), job.rank, job.world_size, job.timeout / 2)
    dist.init_process_group(
        job.backend,
        init_method=f"file://{job.rendezvous}",
        rank=job.rank,
        world_size=job.world_size,
        timeout=timedelta(seconds=job.timeout / 2),
    )
