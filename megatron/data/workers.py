"""Blocks encoded by several processes and handed on in their order; few are on the way at any time.

Every worker has a pipe of its own to this process, so that the end of a worker, even in the middle of an answer, is the
end of its pipe and never a wait for what does not come.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from queue import SimpleQueue

import numpy as np

from megatron.data.block_encoder import BlockEncoder, EncodedBlock, Job
from megatron.data.blocks import Block, weight
from megatron.data.encoded import Encoded
from megatron.data.errors import DataError

AHEAD = 2  # blocks on the way for each worker: one is encoded, one waits
HELD_BYTES = 64 << 20  # of text on the way for each worker; a single block may be larger
PATIENCE = 10.0  # seconds for a process to end


def encoded_in_order(blocks: Iterable[Block], job: Job, workers: int) -> Generator[tuple[Block, EncodedBlock]]:
    """Each block with what became of it, encoded by ``workers`` processes of their own.

    A block is taken from ``blocks`` only when there is room for it, so memory does not depend on how many there are.
    The processes end with the iterator, and with this process, however it ends.

    Raises:
        DataError: when a worker raised one, or died.
        OSError: when a worker could not read a file.
    """
    on_the_way: deque[tuple[Block, Future[EncodedBlock]]] = deque()
    held = 0
    with ThreadPoolExecutor(workers) as threads, _started(job, workers) as idle:
        try:
            for block in blocks:
                while on_the_way and (
                    len(on_the_way) >= AHEAD * workers or held + weight(block) > HELD_BYTES * workers
                ):
                    held -= weight(on_the_way[0][0])
                    given, answer = on_the_way.popleft()
                    yield given, answer.result()
                on_the_way.append((block, threads.submit(_ask, idle, block)))
                held += weight(block)
            while on_the_way:
                given, answer = on_the_way.popleft()
                yield given, answer.result()
        finally:
            threads.shutdown(wait=False, cancel_futures=True)


class _Worker:
    """A process that encodes, seen from the one that started it."""

    def __init__(self, job: Job) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._connection, theirs = spawn.Pipe()
        self.process: SpawnProcess = spawn.Process(target=_work, args=(theirs, job), daemon=True)
        with _interrupts_blocked():
            self.process.start()
        theirs.close()  # now only the worker has that end: when it dies, ours is told

    def encode(self, block: Block) -> EncodedBlock:
        """What the worker makes of a block."""
        try:
            self._connection.send(block)
            answer = _receive(self._connection)
        except (EOFError, OSError) as error:
            raise self._death() from error
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _death(self) -> DataError:
        self.process.join(PATIENCE)
        status = self.process.exitcode
        if status is None or status >= 0:
            return DataError(f"a worker process ended with status {status}; what it said is above")
        name = signal.Signals(-status).name
        perhaps = "; perhaps memory ran out" if -status == signal.SIGKILL else ""
        return DataError(f"a worker process was ended by {name}{perhaps}", "--workers 1", "more memory")

    def end(self) -> None:
        """End a process that waits for a block."""
        self._connection.close()
        self.process.join(PATIENCE)
        self.process.kill()


@contextmanager
def _started(job: Job, workers: int) -> Iterator[SimpleQueue[_Worker]]:
    """Workers that wait for a block; all have ended when the block is left."""
    started: list[_Worker] = []
    idle: SimpleQueue[_Worker] = SimpleQueue()
    try:
        for _ in range(workers):
            started.append(_Worker(job))
            idle.put(started[-1])
        yield idle
    except BaseException:
        for worker in started:
            worker.process.kill()  # what it is at is no longer wanted, and may take long
        raise
    finally:
        for worker in started:
            worker.end()


def _ask(idle: SimpleQueue[_Worker], block: Block) -> EncodedBlock:
    """Have a block encoded by a worker that is free; there are as many threads as workers, so one is."""
    worker = idle.get()
    try:
        return worker.encode(block)
    finally:
        idle.put(worker)


@contextmanager
def _interrupts_blocked() -> Iterator[None]:
    """Processes that begin here never see Ctrl-C: it is for this one, which tells them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _work(connection: Connection, job: Job) -> None:
    """A worker: one thread, since there are as many workers as there should be threads."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    encoder: BlockEncoder | None = None
    while True:
        try:
            block = connection.recv()
        except (EOFError, OSError):  # the other end was closed
            return
        answer: EncodedBlock | Exception
        try:
            encoder = encoder or BlockEncoder.of(job)
            answer = encoder(block)
        except (DataError, OSError) as error:
            answer = error
        _send(connection, answer)


def _send(connection: Connection, answer: EncodedBlock | Exception) -> None:
    """Answer; ids go as they lie in memory, since to pickle them costs this process and the other several copies."""
    if isinstance(answer, Exception):
        connection.send(answer)
        return
    connection.send(answer._replace(columns=tuple(Encoded(ids[:0], lengths) for ids, lengths in answer.columns)))
    for ids, _ in answer.columns:
        left = ids.view(np.uint8).data
        while len(left):
            left = left[os.write(connection.fileno(), left) :]


def _receive(connection: Connection) -> EncodedBlock | Exception:
    """What `_send` sent.

    Raises:
        EOFError: when the other end is closed before all of it is there.
    """
    answer: EncodedBlock | Exception = connection.recv()
    if isinstance(answer, Exception):
        return answer
    columns = []
    for none, lengths in answer.columns:
        ids = np.empty(int(lengths.sum()), none.dtype)
        left = ids.view(np.uint8).data
        while len(left):
            count = os.readv(connection.fileno(), [left])
            if not count:
                raise EOFError
            left = left[count:]
        columns.append(Encoded(ids, lengths))
    return answer._replace(columns=tuple(columns))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
