"""Encode blocks in several processes and return the results in order.

Every worker has its own pipe to this process. If a worker dies, even while sending a result, its pipe ends, so that
this process never waits for it.
"""

from __future__ import annotations

import multiprocessing
import os
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from functools import cache, partial
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from queue import SimpleQueue
from types import TracebackType
from typing import Self

import numpy as np

from megatron.data.errors import DataError
from megatron.data.text.block_encoder import BlockEncoder, EncodedBlock, Job
from megatron.data.text.blocks import Block, weight
from megatron.data.text.child import PATIENCE, TICK, death, end_with_parent, interrupts_blocked
from megatron.data.tokenizers.encoded import Encoded, Tokenizer
from megatron.data.tokenizers.engine import build_engine
from megatron.data.tokenizers.tokenizer import build_tokenizer

AHEAD = 2  # blocks submitted per worker: one being encoded, one queued
HELD_BYTES = 64 << 20  # limit of the text submitted per worker; a single block may be larger


class Workers:
    """Pool of processes that encode blocks. They end with the ``with`` block, and with this process."""

    def __init__(self, job: Job, count: int) -> None:
        """Start ``count`` processes and return while they initialize."""
        self._count = count
        self._workers: list[_Worker] = []
        self._idle: SimpleQueue[_Worker] = SimpleQueue()
        try:
            for _ in range(count):
                self._workers.append(_Worker(job))
        except BaseException:
            self._kill()
            raise
        for worker in self._workers:
            self._idle.put(worker)

    def encoded(
        self, blocks: Iterable[Block], engine: str, check: Callable[[], None] = lambda: None
    ) -> Generator[tuple[Block, EncodedBlock]]:
        """Yield each block with its encoding, in the order of the blocks.

        A block is taken from ``blocks`` only when there is room for it, so that memory use is bounded. The processes
        end if the generator is closed early.

        Args:
            blocks: to encode.
            engine: name of the engine.
            check: called a few times per second while waiting; its exceptions end the work.

        Raises:
            DataError: if a worker raised one, or died.
            OSError: if a worker could not read a file.
        """
        pending: deque[tuple[Block, Future[EncodedBlock]]] = deque()
        pending_bytes = 0
        max_blocks = AHEAD * self._count
        max_bytes = HELD_BYTES * self._count
        with ThreadPoolExecutor(self._count) as threads:
            try:
                for block in blocks:
                    size = weight(block)
                    while pending and (len(pending) >= max_blocks or pending_bytes + size > max_bytes):
                        finished, future = pending.popleft()
                        pending_bytes -= weight(finished)
                        yield finished, _result(future, check)
                    pending.append((block, threads.submit(self._encode, engine, block)))
                    pending_bytes += size
                while pending:
                    finished, future = pending.popleft()
                    yield finished, _result(future, check)
            except BaseException:
                threads.shutdown(wait=False, cancel_futures=True)
                self._kill()  # the blocks being encoded may take long
                raise

    def _encode(self, engine: str, block: Block) -> EncodedBlock:
        """Encode a block in an idle worker. There is one, because there are as many threads as workers."""
        worker = self._idle.get()
        try:
            return worker.encode(engine, block)
        finally:
            self._idle.put(worker)

    def _kill(self) -> None:
        for worker in self._workers:
            worker.process.kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self._kill()
        for worker in self._workers:
            worker.end()


class _Worker:
    """Worker process, as seen by its parent."""

    def __init__(self, job: Job) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._connection, remote = spawn.Pipe()
        self.process: SpawnProcess = spawn.Process(target=_run_worker, args=(remote, job), daemon=True)
        with interrupts_blocked():
            self.process.start()
        remote.close()  # only the worker holds that end now, so its death ends the pipe

    def encode(self, engine: str, block: Block) -> EncodedBlock:
        """Return the encoding of a block."""
        try:
            self._connection.send((engine, block))
            answer = _receive(self._connection)
        except (EOFError, OSError) as error:
            raise death(self.process, "--workers 1") from error
        if isinstance(answer, Exception):
            raise answer
        return answer

    def end(self) -> None:
        """End an idle worker."""
        self._connection.close()
        self.process.join(PATIENCE)
        self.process.kill()


def _result(future: Future[EncodedBlock], check: Callable[[], None]) -> EncodedBlock:
    while not wait([future], TICK).done:
        check()
    return future.result()


def _run_worker(connection: Connection, job: Job) -> None:
    """Run a worker, on one thread, since there are as many workers as there should be threads."""
    end_with_parent()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    tokenizer = cache(partial(_tokenizer, job))
    with suppress(DataError, OSError):  # raised again, and reported, with the first block
        tokenizer()
    encoder: BlockEncoder | None = None
    while True:
        try:
            engine, block = connection.recv()
        except (EOFError, OSError):  # the parent closed its end
            return
        answer: EncodedBlock | Exception
        try:
            encoder = encoder or BlockEncoder(job, tokenizer(), build_engine(tokenizer(), engine))
            answer = encoder(block)
        except (DataError, OSError) as error:
            answer = error
        _send(connection, answer)


def _tokenizer(job: Job) -> Tokenizer:
    tokenizer = build_tokenizer(job.choice)
    if tokenizer.fingerprint != job.fingerprint:
        raise DataError("the files of the tokenizer have changed", "rerun when no process is writing them")
    return tokenizer


def _send(connection: Connection, answer: EncodedBlock | Exception) -> None:
    """Send a result. Ids are written as raw memory, because pickling them costs several copies on both sides."""
    if isinstance(answer, Exception):
        connection.send(answer)
        return
    connection.send(answer._replace(columns=tuple(Encoded(ids[:0], lengths) for ids, lengths in answer.columns)))
    for ids, _ in answer.columns:
        remaining = ids.view(np.uint8).data
        while len(remaining):
            remaining = remaining[os.write(connection.fileno(), remaining) :]


def _receive(connection: Connection) -> EncodedBlock | Exception:
    """Receive a result of `_send`.

    Raises:
        EOFError: if the pipe ends before all of it has arrived.
    """
    answer: EncodedBlock | Exception = connection.recv()
    if isinstance(answer, Exception):
        return answer
    columns = []
    for empty, lengths in answer.columns:
        ids = np.empty(int(lengths.sum()), empty.dtype)
        remaining = ids.view(np.uint8).data
        while len(remaining):
            count = os.readv(connection.fileno(), [remaining])
            if not count:
                raise EOFError
            remaining = remaining[count:]
        columns.append(Encoded(ids, lengths))
    return answer._replace(columns=tuple(columns))
