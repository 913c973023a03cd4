"""A persistent pool of processes: an N-rank test costs a tenth of a second instead of torchrun's ten.

    def total(rank: int, world_size: int, value: int) -> int: ...   # at the top level of a module

    pool.run(4, total, 7)  ->  [result of rank 0, of rank 1, ...]

Results come back pickled. Whatever goes wrong on a rank (an exception, a crash, a hang) becomes one ``RankError`` that
names the first cause, and the workers that took part are replaced: the next job starts on clean ones.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, TypeVar

from tests.kit.processes import fork_server
from tests.kit.shared_memory_group import BACKEND
from tests.kit.worker import DUMP_STACKS, SOURCE, Job, Raised, Reply, work

T = TypeVar("T")

PATIENCE = 300.0
"""Seconds a job may take: many times what the longest needs, so that a slow or busy machine changes no verdict."""

GRACE = 3.0
"""Seconds the other ranks get to finish or fail once one has failed; most fail by themselves when a peer is gone."""

TAIL_LINES = 40
"""Characters of a rank's output that an error shows."""

OWN_FRAMES = (f'File "{SOURCE}"', f'File "{Path(multiprocessing.__file__).parent}', 'File "<string>"')
"""The lower end of every worker's stack."""


class RankError(RuntimeError):
    """A job failed on at least one rank; the message carries the first cause and a line for each other rank."""


@dataclass(frozen=True)
class Failure:
    """Failure of a rank: ``summary`` in one line, ``details`` (traceback or last output), ``order`` of blame."""

    rank: int
    summary: str
    details: str
    order: tuple[int, float]


@dataclass
class Worker:
    """A process, our end of its pipe, and the log it writes; ``log_start`` is where the current job's output begins."""

    process: ForkServerProcess
    pipe: Connection
    log: Path
    log_start: int = 0

    @classmethod
    def start(cls, log: Path) -> Worker:
        """Fork a worker from the server (0.05 s; 3 s for the first, which starts the server)."""
        context = fork_server()
        pipe, theirs = context.Pipe()
        process = context.Process(target=work, args=(theirs, str(log)), daemon=True)
        process.start()
        theirs.close()
        return cls(process, pipe, log)

    def send(self, job: Job) -> None:
        """Hand over a job; that a worker has just died is noticed when its reply is awaited."""
        self.log_start = self._log_size()
        with suppress(BrokenPipeError):
            self.pipe.send_bytes(pickle.dumps(job))

    def output(self) -> str:
        """The last lines written during the current job, without the stack frames that every worker has."""
        if not self.log.exists():
            return ""
        lines = self.log.read_bytes()[self.log_start :].decode(errors="replace").splitlines()
        return "\n".join([line for line in lines if not any(frame in line for frame in OWN_FRAMES)][-TAIL_LINES:])

    def stacks(self) -> str:
        """Make a process that does not answer write down where it is, and return its output."""
        if self.process.pid is not None and self.process.is_alive():
            before = self._log_size()
            os.kill(self.process.pid, DUMP_STACKS)
            _wait_until(lambda: self._log_size() > before)
            time.sleep(0.05)  # the rest of the dump follows its first line
        return self.output()

    def stop(self) -> None:
        """End the process now and wait for it."""
        self.process.kill()
        self.process.join()
        self.process.close()
        self.pipe.close()

    def _log_size(self) -> int:
        return self.log.stat().st_size if self.log.exists() else 0


@dataclass
class Pool:
    """Up to ``max_workers`` processes, started when a job first needs them and kept until ``close``."""

    max_workers: int = 8
    _workers: list[Worker] = field(default_factory=list)
    _started: int = 0
    _jobs: int = 0

    def __post_init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="pool-")

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all workers and remove their logs."""
        self._discard(list(self._workers))
        self._folder.cleanup()

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers; rank ``r`` of the next job runs in the ``r``-th."""
        return [worker.process.pid for worker in self._workers if worker.process.pid is not None]

    def run(
        self,
        world_size: int,
        function: Callable[..., T],
        *args: Any,
        timeout: float = PATIENCE,
        backend: str = BACKEND,
    ) -> list[T]:
        """Call ``function(rank, world_size, *args)`` on ``world_size`` ranks and return their results in rank order.

        The ranks share a default process group of this job alone; one rank alone has none. Workers see the environment
        of the time the first pool started, not later changes.

        Args:
            world_size: ranks, at most ``max_workers``.
            function: importable by its module and name; so must the classes of ``args`` and of the results be.
            args: the same for every rank.
            timeout: seconds for the whole job; a collective that waits for half of it raises on its rank.
            backend: of the process group; ``gloo`` for what depends on how sockets fail or take time.

        Raises:
            RankError: a rank raised, died or did not answer in time.
            ValueError: ``world_size`` is not in 1..max_workers.
        """
        if not 1 <= world_size <= self.max_workers:
            raise ValueError(f"world_size {world_size} is not in 1..{self.max_workers}, the workers of this pool")
        workers = self._first(world_size)
        rendezvous = Path(self._folder.name) / f"job-{self._jobs}"
        self._jobs += 1
        try:
            for rank, worker in enumerate(workers):
                worker.send(Job(rank, world_size, function, args, str(rendezvous), timeout, backend))
            replies, failures = _await(workers, timeout)
        except BaseException:
            self._discard(workers)
            raise
        finally:
            rendezvous.unlink(missing_ok=True)
            shutil.rmtree(f"{rendezvous}-logs", ignore_errors=True)
        if failures:
            self._discard(workers)
            raise RankError(_explain(function, world_size, failures))
        return [replies[rank].result for rank in range(world_size)]

    def _first(self, count: int) -> list[Worker]:
        """The first ``count`` workers, replacing any that died while idle and growing when there are too few."""
        self._discard([worker for worker in self._workers if not worker.process.is_alive()])
        while len(self._workers) < count:
            self._workers.append(Worker.start(Path(self._folder.name) / f"worker-{self._started}.log"))
            self._started += 1
        return self._workers[:count]

    def _discard(self, workers: list[Worker]) -> None:
        for worker in workers:
            self._workers.remove(worker)
            worker.stop()


def _await(workers: Sequence[Worker], timeout: float) -> tuple[dict[int, Reply], list[Failure]]:
    """Collect one reply per rank, or why there is none."""
    deadline = time.monotonic() + timeout
    replies: dict[int, Reply] = {}
    failures: list[Failure] = []
    waiting = set(range(len(workers)))
    while waiting:
        ready = wait([workers[rank].pipe for rank in waiting], max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for rank in [rank for rank in waiting if workers[rank].pipe in ready]:
            waiting.remove(rank)
            outcome = _receive(rank, workers[rank])
            if isinstance(outcome, Reply):
                replies[rank] = outcome
            else:
                failures.append(outcome)
                deadline = min(deadline, time.monotonic() + GRACE)
    failures += [_silent(rank, workers[rank], timeout, bool(failures)) for rank in sorted(waiting)]
    return replies, failures


def _receive(rank: int, worker: Worker) -> Reply | Failure:
    """The reply waiting in the pipe. A pipe that closed means that the process died."""
    try:
        reply: Reply | Raised = pickle.loads(worker.pipe.recv_bytes())
    except (EOFError, ConnectionResetError):
        worker.process.join()
        how = _how_it_ended(worker.process.exitcode or 0)
        return Failure(
            rank, f"process died: {how}", worker.output(), (0, time.monotonic())
        )  # its peers' errors follow from it
    if isinstance(reply, Raised):
        return Failure(rank, reply.summary, reply.details, (1, reply.at))
    return reply


def _silent(rank: int, worker: Worker, timeout: float, others_failed: bool) -> Failure:
    """A rank that had not answered when waiting ended. Blamed first only when no other rank failed."""
    stacks = worker.stacks()
    summary = "still running" if others_failed else f"no answer in {timeout:g} s"
    return Failure(rank, summary, f"killed; it was here:\n{stacks}", (2, rank))


def _wait_until(condition: Callable[[], bool], seconds: float = 0.5) -> None:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)


def _how_it_ended(exitcode: int) -> str:
    return f"killed by {signal.Signals(-exitcode).name}" if exitcode < 0 else f"exit code {exitcode}"


def _explain(function: Callable[..., Any], world_size: int, failures: Sequence[Failure]) -> str:
    first, *rest = sorted(failures, key=lambda failure: failure.order)
    name = f"{function.__module__}.{function.__qualname__}"
    lines = [f"rank {first.rank} of {world_size} failed in {name}: {first.summary}", first.details.rstrip()]
    if rest:
        lines.append(f"and {len(rest)} more of the {world_size} ranks:")
    for failure in rest:
        lines.append(f"  rank {failure.rank}: {failure.summary}")
        if failure.summary == "still running":
            lines.append(failure.details.rstrip())
    return "\n".join(lines)
