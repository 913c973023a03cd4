"""Run work in other processes of this machine, and end them with this one.

`WorkerPool` serves requests in several processes and yields the answers in the order of the requests; `in_order` serves
them in threads of this process. Every worker process has its own pipe: `ProcessPoolExecutor` shares one between all,
and waits forever for the rest of a result if a worker is killed while sending it. `run_in_subprocess` runs any function
in a process that can be killed at any moment.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager, suppress
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Generic, NamedTuple, TypeVar

from megatron.data.errors import DataError
from megatron.data.progress import StageProgress

Argument = TypeVar("Argument")
Result = TypeVar("Result")
Request = TypeVar("Request")
Answer = TypeVar("Answer")

POLL_SECONDS = 0.2  # seconds between polls
JOIN_SECONDS = 10.0  # seconds to wait for a process to end
REQUESTS_PER_WORKER = 2  # submitted per worker: one being served, one queued


def available_cores() -> int:
    """Return the number of cores available to this process, limited by its affinity and control group."""
    bound = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        return bound
    return bound if quota == "max" else max(1, min(bound, round(int(quota) / int(period))))


class Worker(NamedTuple):
    """Process, and this process's end of the pipe to it."""

    process: SpawnProcess
    connection: Connection


@contextmanager
def _worker(target: Callable[..., None], *args: object) -> Iterator[Worker]:
    """Run ``target(connection, *args)`` in a process that ends with this context, and with this process.

    It ignores SIGINT and SIGTERM, which may be sent to all processes of a command: this process ends it.
    """
    spawn = multiprocessing.get_context("spawn")
    connection, remote = spawn.Pipe()
    process = spawn.Process(target=_run_worker, args=(target, remote, *args), daemon=True)
    resource_tracker.ensure_running()  # now, because starting it later would unblock the signals
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        try:
            process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        remote.close()  # only the child holds that end now, so its death ends the pipe
        yield Worker(process, connection)
    finally:
        if process.pid is not None:
            process.kill()
            process.join()
        connection.close()


def _run_worker(target: Callable[..., None], connection: Connection, *args: object) -> None:
    parent = multiprocessing.parent_process()

    def exit_with_parent() -> None:
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=exit_with_parent, daemon=True).start()
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):  # this process is not needed any more
        try:
            target(connection, *args)
        except (DataError, OSError) as error:
            connection.send(error)


def _receive(worker: Worker, *fixes: str) -> Any:
    """Return the next answer of a worker, or raise the exception it sent; ``fixes`` help if it was killed."""
    process, connection = worker
    try:
        answer = connection.recv()
    except (EOFError, OSError) as error:
        process.join(JOIN_SECONDS)
        status = process.exitcode
        if status is None or status >= 0:
            raise DataError(f"a worker process ended with status {status}; its output is above") from error
        name = signal.Signals(-status).name
        cause = "; it may have run out of memory" if -status == signal.SIGKILL else ""
        raise DataError(f"a worker process was killed by {name}{cause}", *fixes, "more memory") from error
    if isinstance(answer, Exception):
        raise answer
    return answer


Report = Callable[[str, str], object]  # called with "stage" or "message", and the text to show


def run_in_subprocess(
    function: Callable[[Argument, Report], Result], plan: Argument, progress: StageProgress
) -> Result:
    """Return ``function(plan, report)``, called in another process, which ends with this call, however that ends."""
    show = {"stage": progress.set_stage, "message": progress.message}
    with _worker(_call_function, function, plan) as worker:
        while True:
            while not worker.connection.poll(POLL_SECONDS):
                progress.tick()
            kind, content = _receive(worker)
            if kind == "returned":
                result: Result = content
                return result
            show[kind](content)


def _call_function(connection: Connection, function: Callable[[Argument, Report], Result], plan: Argument) -> None:
    result = function(plan, lambda kind, text: connection.send((kind, text)))
    connection.send(("returned", result))


Serve = Callable[[Request], Answer]


def in_order(
    serve: Serve[Request, Answer],
    requests: Iterable[Request],
    threads: int,
    check: Callable[[], None] = lambda: None,
    stop: Callable[[], None] = lambda: None,
) -> Generator[tuple[Request, Answer]]:
    """Yield each request with its answer, in the order of the requests, which are served in ``threads``.

    Only `REQUESTS_PER_WORKER` requests per thread are taken ahead. ``check`` is called while waiting; its exceptions
    end the work. ``stop`` is called at the end, also of a generator that is closed early; it must end what is served.
    """
    pending: deque[tuple[Request, Future[Answer]]] = deque()

    def oldest() -> tuple[Request, Answer]:
        request, future = pending.popleft()
        while not wait([future], POLL_SECONDS).done:
            check()
        return request, future.result()

    with ThreadPoolExecutor(threads) as pool:
        try:
            for request in requests:
                if len(pending) == REQUESTS_PER_WORKER * threads:
                    yield oldest()
                pending.append((request, pool.submit(serve, request)))
            while pending:
                yield oldest()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            stop()


class WorkerPool(Generic[Request, Answer]):
    """Pool of processes that serve requests."""

    def __init__(self, workers: int, start: Callable[..., Serve[Request, Answer]], *args: object) -> None:
        """Start the processes and return. Each calls ``start(*args)`` for the function that serves requests."""
        with ExitStack() as stack:
            self._workers = [stack.enter_context(_worker(_serve, start, *args)) for _ in range(workers)]
            self.close = stack.pop_all().close
        self._idle: SimpleQueue[Worker] = SimpleQueue()
        for worker in self._workers:
            self._idle.put(worker)

    def results(
        self, requests: Iterable[Request], check: Callable[[], None] = lambda: None
    ) -> Generator[tuple[Request, Answer]]:
        """Yield each request with its answer, in the order of the requests. The pool cannot be used again.

        Only `REQUESTS_PER_WORKER` requests per worker are taken ahead, so that memory use is bounded. If the generator
        is closed early, the workers end at once. ``check`` is called while waiting; its exceptions end the work.
        """

        def stop() -> None:
            for worker in self._workers:
                worker.process.kill()  # a request being served may take long

        yield from in_order(self._answer, requests, len(self._workers), check, stop)

    def _answer(self, request: Request) -> Answer:
        """Have an idle worker serve a request. There is one, because there are as many threads as workers."""
        worker = self._idle.get()
        try:
            with suppress(OSError):  # of a worker that has ended; `_receive` raises the reason
                worker.connection.send(request)
            answer: Answer = _receive(worker, "--workers 1")
            return answer
        finally:
            self._idle.put(worker)


def _serve(connection: Connection, start: Callable[..., Serve[Any, Any]], *args: object) -> None:
    serve = start(*args)
    while True:
        answer = serve(connection.recv())  # kept until the next one, so that malloc keeps its memory
        connection.send_bytes(pickle.dumps(answer, protocol=5))  # copies arrays less often than `send`
