"""Blocks encoded by several processes and handed on in their order; few are on the way at any time.

Every worker has a pipe of its own to this process, so that the end of a worker, even in the middle of an answer, is the
end of its pipe and never a wait for what does not come.
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

AHEAD = 2  # blocks on the way for each worker: one is encoded, one waits
HELD_BYTES = 64 << 20  # of text on the way for each worker; a single block may be larger


class Workers:
    """Processes that encode blocks. They end with the ``with`` block, and with this process, however it ends."""

    def __init__(self, job: Job, count: int) -> None:
        """Start ``count`` processes, which make themselves ready while this one goes on."""
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
        """Each block, in their order, with what became of it.

        A block is taken from ``blocks`` only when there is room for it, so memory does not depend on how many there
        are. If this is left before its end, the processes are at an end too.

        Args:
            blocks: to encode.
            engine: the name of what encodes.
            check: called a few times a second while there is nothing to do but wait; what it raises ends this.

        Raises:
            DataError: when a worker raised one, or died.
            OSError: when a worker could not read a file.
        """
        on_the_way: deque[tuple[Block, Future[EncodedBlock]]] = deque()
        held = 0
        with ThreadPoolExecutor(self._count) as threads:
            try:
                for block in blocks:
                    while on_the_way and self._is_full(len(on_the_way), held + weight(block)):
                        held -= weight(on_the_way[0][0])
                        given, answer = on_the_way.popleft()
                        yield given, _answer(answer, check)
                    on_the_way.append((block, threads.submit(self._ask, engine, block)))
                    held += weight(block)
                while on_the_way:
                    given, answer = on_the_way.popleft()
                    yield given, _answer(answer, check)
            except BaseException:
                threads.shutdown(wait=False, cancel_futures=True)
                self._kill()  # what they are at is no longer wanted, and may take long
                raise

    def _is_full(self, blocks: int, held: int) -> bool:
        return blocks >= AHEAD * self._count or held > HELD_BYTES * self._count

    def _ask(self, engine: str, block: Block) -> EncodedBlock:
        """Have a block encoded by a worker that is free; there are as many threads as workers, so one is."""
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
    """A process that encodes, seen from the one that started it."""

    def __init__(self, job: Job) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._connection, theirs = spawn.Pipe()
        self.process: SpawnProcess = spawn.Process(target=_work, args=(theirs, job), daemon=True)
        with interrupts_blocked():
            self.process.start()
        theirs.close()  # now only the worker has that end: when it dies, ours is told

    def encode(self, engine: str, block: Block) -> EncodedBlock:
        """What the worker makes of a block."""
        try:
            self._connection.send((engine, block))
            answer = _receive(self._connection)
        except (EOFError, OSError) as error:
            raise death(self.process, "--workers 1") from error
        if isinstance(answer, Exception):
            raise answer
        return answer

    def end(self) -> None:
        """End a process that waits for a block."""
        self._connection.close()
        self.process.join(PATIENCE)
        self.process.kill()


def _answer(answer: Future[EncodedBlock], check: Callable[[], None]) -> EncodedBlock:
    while not wait([answer], TICK).done:
        check()
    return answer.result()


def _work(connection: Connection, job: Job) -> None:
    """A worker: one thread, since there are as many workers as there should be threads."""
    end_with_parent()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    tokenizer = cache(partial(_tokenizer, job))
    with suppress(DataError, OSError):  # it comes again with the first block, and is told
        tokenizer()
    encoder: BlockEncoder | None = None
    while True:
        try:
            engine, block = connection.recv()
        except (EOFError, OSError):  # the other end was closed
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
        raise DataError("the files of the tokenizer were changed meanwhile", "start again when nobody writes them")
    return tokenizer


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
