"""Blocks encoded by several processes and handed on in their order; few are on the way at any time."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from functools import cache
from multiprocessing.connection import Connection

from megatron.data.block_encoder import BlockEncoder, EncodedBlock, Job
from megatron.data.blocks import Block, weight
from megatron.data.errors import DataError

AHEAD = 2  # blocks on the way for each worker: one is encoded, one waits
HELD_BYTES = 64 << 20  # of text on the way for each worker; a single block may be larger
_job: Job | None = None  # of a worker process


def encoded_in_order(blocks: Iterable[Block], job: Job, workers: int) -> Iterator[tuple[Block, EncodedBlock]]:
    """Each block with what became of it, encoded by ``workers`` processes of their own.

    A block is taken from ``blocks`` only when there is room for it, so memory does not depend on how many there are.
    The processes end with the iterator, and with this process, however it ends.

    Raises:
        DataError: when a worker raised one, or died.
    """
    on_the_way: deque[tuple[Block, Future[EncodedBlock]]] = deque()
    held = 0
    with _pool(job, workers) as pool:
        for block in blocks:
            while on_the_way and (len(on_the_way) >= AHEAD * workers or held + weight(block) > HELD_BYTES * workers):
                held -= weight(on_the_way[0][0])
                yield _result(*on_the_way.popleft(), workers)
            with _interrupts_blocked():
                on_the_way.append((block, pool.submit(_encode, block)))
            held += weight(block)
        while on_the_way:
            yield _result(*on_the_way.popleft(), workers)


def _result(block: Block, future: Future[EncodedBlock], workers: int) -> tuple[Block, EncodedBlock]:
    try:
        return block, future.result()
    except BrokenProcessPool as error:
        seen = f"one of {workers} worker processes died: it was killed, perhaps because memory ran out"
        raise DataError(seen, f"--workers {max(1, workers // 2)}") from error


@contextmanager
def _pool(job: Job, workers: int) -> Iterator[ProcessPoolExecutor]:
    """Worker processes that end when this process does, or leaves the block by an exception."""
    spawn = multiprocessing.get_context("spawn")
    reader, writer = spawn.Pipe(duplex=False)
    pool = ProcessPoolExecutor(workers, spawn, _begin, (reader, job))
    try:
        yield pool
    except BaseException:
        writer.close()  # whoever is still at work ends now
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
        writer.close()
        reader.close()


@contextmanager
def _interrupts_blocked() -> Iterator[None]:
    """Processes that begin here never see Ctrl-C: it is for this one, which tells them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _begin(lifeline: Connection, job: Job) -> None:
    """Start a worker: with one thread, since there are as many workers as there should be threads."""
    global _job
    threading.Thread(target=_end_with, args=(lifeline,), daemon=True).start()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _job = job


def _end_with(lifeline: Connection) -> None:
    """Wait until the other end of the pipe is gone, and leave."""
    lifeline.poll(None)
    os._exit(1)


def _encode(block: Block) -> EncodedBlock:
    return _encoder()(block)


@cache
def _encoder() -> BlockEncoder:
    """That of this worker; made with its first block, so that the error of one that cannot be made is told."""
    if _job is None:
        raise RuntimeError("a worker that was not started by _begin")
    return BlockEncoder.of(_job)
