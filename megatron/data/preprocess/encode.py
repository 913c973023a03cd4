"""Encode blocks of text in several processes, and return the results in order.

`BlockEncoder` turns a block into ids and statistics. `EncoderPool` runs one in each of several processes and yields
the results in the order of the blocks, with a bounded number of blocks in memory. Every worker has its own pipe to
this process. If a worker dies, even while sending a result, its pipe ends, so that this process never waits for it.
`run_in_subprocess` runs any function in a process that can be killed at any moment.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache, partial
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from queue import SimpleQueue
from random import Random
from types import TracebackType
from typing import NamedTuple, Protocol, Self, TypeVar

import numpy as np

from megatron.data.errors import DataError
from megatron.data.indexed_writer import id_dtype
from megatron.data.preprocess.corpus import (
    BadDocumentError,
    Block,
    FileBlock,
    LineBlock,
    block_bytes_of,
    check_utf8,
    parse_line,
    parse_valid_lines,
    read_plain_text,
    split_lines,
)
from megatron.data.tokenizers.base import EncodedBatch, Tokenizer
from megatron.data.tokenizers.engine import GIGATOKEN, OWN_LIBRARY, EncodeEngine, build_engine
from megatron.data.tokenizers.huggingface import ByteTokenizer
from megatron.data.tokenizers.tokenizer import TokenizerOptions, build_tokenizer

MAX_DESCRIBED = 20  # bad documents of a block described; the others are only counted
SPOT_CHECK_BYTES = 300  # bytes of a block that the tokenizer's own library encodes too


@dataclass(frozen=True)
class EncodeOptions:
    """Settings of a worker."""

    keys: tuple[str, ...]  # JSON keys of the texts
    choice: TokenizerOptions
    fingerprint: str  # of the tokenizer, compared in every worker
    append_eod: bool  # append the end-of-document id to every text that is not empty


class BadDocument(NamedTuple):
    """Invalid document of a block."""

    file: Path
    line: int  # from 1 on, within the block; 0 for a plain file
    seen: str  # a sentence without its subject
    fixes: tuple[str, ...]

    def of(self, lines_before: int, *more_fixes: str) -> DataError:
        """Return the error, with the line number in the file after ``lines_before`` lines in earlier blocks."""
        source = f"{self.file}:{lines_before + self.line}" if self.line else str(self.file)
        return DataError(source + self.seen, *self.fixes, *more_fixes)


class EncodedBlock(NamedTuple):
    """Ids of a block, and statistics."""

    columns: tuple[EncodedBatch, ...]  # for each key, the ids of its texts in the dtype of the token files
    lines: int  # including blank and bad ones
    documents: int  # encoded
    empty: int  # texts of all columns without ids
    text_bytes: int  # UTF-8 bytes of all texts
    bad: int  # documents not encoded
    described: tuple[BadDocument, ...]  # the first `MAX_DESCRIBED` of them
    differs: BadDocument | None  # set if engine and tokenizer disagree


class _Documents(NamedTuple):
    """Valid documents of a block."""

    columns: list[list[bytes]]  # for each key, the texts in UTF-8
    places: list[tuple[Path, int]]  # file and line of each document


class BlockEncoder:
    """Encode blocks one after the other."""

    def __init__(self, job: EncodeOptions, tokenizer: Tokenizer, engine: EncodeEngine) -> None:
        self._job = job
        self._tokenizer = tokenizer
        self._engine = engine
        self._dtype = id_dtype(tokenizer.vocab_size)
        self._takes_bytes = isinstance(tokenizer, ByteTokenizer)
        self._bad: list[BadDocument] = []

    def __call__(self, block: Block) -> EncodedBlock:
        """Return the ids of a block's documents.

        Raises:
            DataError: if the block cannot be read any more, or the tokenizer returns an id outside its vocabulary.
        """
        self._bad = []
        documents, lines = self._read_lines(block) if isinstance(block, LineBlock) else self._read_plain(block)
        try:
            columns = self._encode(documents)
        except ValueError:
            documents = self._drop_unencodable(documents)
            columns = self._encode(documents)
        return EncodedBlock(
            columns=tuple(self._to_file_dtype(column) for column in columns),
            lines=lines,
            documents=len(documents.places),
            empty=sum(int(np.count_nonzero(column.lengths == 0)) for column in columns),
            text_bytes=sum(sum(map(len, texts)) for texts in documents.columns),
            bad=len(self._bad),
            described=tuple(self._bad[:MAX_DESCRIBED]),
            differs=self._spot_check(documents),
        )

    def _read_lines(self, block: LineBlock) -> tuple[_Documents, int]:
        content = block.read()
        columns = parse_valid_lines(content, self._job.keys)
        if columns is not None:
            places = [(block.file, number) for number in range(1, len(columns[0]) + 1)]
            return _Documents(columns, places), len(places)
        found: list[tuple[bytes, ...]] = []
        places = []
        lines = split_lines(content)
        for number, line in enumerate(lines, 1):
            if not line or line.isspace():
                continue
            try:
                found.append(tuple(text.encode() for text in parse_line(line, self._job.keys, block.file)))
                places.append((block.file, number))
            except BadDocumentError as bad:
                self._bad.append(BadDocument(block.file, number, bad.seen, bad.fixes))
        return _Documents(self._columns(found), places), len(lines)

    def _read_plain(self, block: FileBlock) -> tuple[_Documents, int]:
        found: list[tuple[bytes, ...]] = []
        places = []
        for file in block.files:
            try:
                content = read_plain_text(file)
                if not self._takes_bytes:
                    check_utf8(content, file)
                found.append((content,))
                places.append((file, 0))
            except BadDocumentError as bad:
                self._bad.append(BadDocument(file, 0, bad.seen, bad.fixes))
        return _Documents(self._columns(found), places), 0

    def _columns(self, rows: Sequence[tuple[bytes, ...]]) -> list[list[bytes]]:
        return [[row[column] for row in rows] for column in range(len(self._job.keys))]

    def _encode(self, documents: _Documents) -> list[EncodedBatch]:
        return [self._engine.encode_batch(texts) for texts in documents.columns]

    def _drop_unencodable(self, documents: _Documents) -> _Documents:
        """Move documents that the tokenizer rejects to the bad ones."""
        good: list[tuple[bytes, ...]] = []
        places = []
        for row, (file, line) in zip(zip(*documents.columns), documents.places):
            try:
                for text in row:
                    self._tokenizer.encode(text)
                good.append(row)
                places.append((file, line))
            except DataError as error:
                self._bad.append(BadDocument(file, line, f": {error.seen}", error.fixes))
            except ValueError as error:
                self._bad.append(BadDocument(file, line, f": {error}", ()))
        self._bad.sort(key=lambda bad: bad.line)
        return _Documents(self._columns(good), places)

    def _to_file_dtype(self, column: EncodedBatch) -> EncodedBatch:
        """Check the ids, convert them to the dtype of the files and append the end-of-document ids."""
        ids, lengths = column
        if ids.size and not 0 <= ids.min() <= ids.max() < self._tokenizer.vocab_size:
            seen = (
                f"the tokenizer gave ids {ids.min()}..{ids.max()}, but its vocab_size is {self._tokenizer.vocab_size}"
            )
            raise DataError(seen, "another --tokenizer-model")
        ids = ids.astype(self._dtype)
        if not self._job.append_eod:
            return EncodedBatch(ids, lengths)
        ends = np.cumsum(lengths)[lengths > 0]
        return EncodedBatch(np.insert(ids, ends, self._tokenizer.eod), lengths + (lengths > 0))

    def _spot_check(self, documents: _Documents) -> BadDocument | None:
        """Compare a few ids of gigatoken with those of the tokenizer's own library."""
        if not self._engine.name.startswith(GIGATOKEN) or not documents.places:
            return None
        generator = Random(documents.columns[0][0][-SPOT_CHECK_BYTES:])  # varies by block, equal in every run
        index = generator.randrange(len(documents.places))
        text = max((texts[index] for texts in documents.columns), key=len)
        start = generator.randrange(max(1, len(text) - SPOT_CHECK_BYTES))
        excerpt = text[start : start + SPOT_CHECK_BYTES].decode(errors="ignore")
        if np.array_equal(self._engine.encode_batch([excerpt]).ids, self._tokenizer.encode(excerpt)):
            return None
        seen = f": {self._engine.name} and {self._tokenizer.library} give different ids for part of it"
        return BadDocument(*documents.places[index], seen, (f"--engine {OWN_LIBRARY}",))


Argument = TypeVar("Argument")
Result = TypeVar("Result")

POLL_SECONDS = 0.2  # seconds between polls
JOIN_SECONDS = 10.0  # seconds to wait for a process to end


class ProgressReceiver(Protocol):
    """Receiver of the progress of another process."""

    def set_stage(self, stage: str) -> None:
        """Report the current stage."""

    def message(self, text: str) -> None:
        """Report a message for the user."""

    def tick(self) -> None:
        """Update the display; called a few times per second."""


class ProgressSender:
    """Sender of progress from the other process to its watcher."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def set_stage(self, stage: str) -> None:
        """Report the current stage."""
        self._connection.send(("stage", stage))

    def message(self, text: str) -> None:
        """Report a message for the user."""
        self._connection.send(("message", text))


def run_in_subprocess(
    function: Callable[[Argument, ProgressSender], Result], plan: Argument, watcher: ProgressReceiver
) -> Result:
    """Return ``function(plan, sender)``, called in another process.

    That process ends with this call, however the call ends, and ignores Ctrl-C.

    Args:
        function: to call; the function, its argument and its result must be picklable.
        plan: its argument.
        watcher: receives the reports of the function, and ticks.

    Raises:
        DataError: if the function raises one, or the process dies.
        OSError: if the function raises one.
    """
    spawn = multiprocessing.get_context("spawn")
    connection, remote = spawn.Pipe()
    process = spawn.Process(target=_run_function, args=(remote, function, plan), daemon=True)
    try:
        with block_interrupts():
            process.start()
        remote.close()  # only the child holds that end now, so its death ends the pipe
        while True:
            while not connection.poll(POLL_SECONDS):
                watcher.tick()
            try:
                kind, content = connection.recv()
            except (EOFError, OSError) as error:
                raise worker_death_error(process) from error
            if kind == "returned":
                return content
            if kind == "raised":
                raise content
            (watcher.set_stage if kind == "stage" else watcher.message)(content)
    finally:
        if process.pid is not None:
            process.kill()
            process.join()
        connection.close()


def worker_death_error(process: SpawnProcess, *fixes: str) -> DataError:
    """Return the error for a worker process that has died."""
    process.join(JOIN_SECONDS)
    status = process.exitcode
    if status is None or status >= 0:
        return DataError(f"a worker process ended with status {status}; its output is above")
    name = signal.Signals(-status).name
    cause = "; it may have run out of memory" if -status == signal.SIGKILL else ""
    return DataError(f"a worker process was killed by {name}{cause}", *fixes, "more memory")


@contextmanager
def block_interrupts() -> Iterator[None]:
    """Block SIGINT in processes started inside, so that only this process handles Ctrl-C."""
    resource_tracker.ensure_running()  # now, because starting it later would unblock the signal
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def exit_with_parent() -> None:
    """Exit when the parent process ends."""

    def wait() -> None:
        parent = multiprocessing.parent_process()
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def _run_function(
    connection: Connection, function: Callable[[Argument, ProgressSender], Result], plan: Argument
) -> None:
    exit_with_parent()
    try:
        answer = "returned", function(plan, ProgressSender(connection))
    except (DataError, OSError) as error:
        connection.send(("raised", error))
        return
    connection.send(answer)


BLOCKS_PER_WORKER = 2  # blocks submitted per worker: one being encoded, one queued
MAX_BYTES_PER_WORKER = 64 << 20  # limit of the text submitted per worker; a single block may be larger


class EncoderPool:
    """Pool of processes that encode blocks. They end with the ``with`` block, and with this process."""

    def __init__(self, job: EncodeOptions, count: int) -> None:
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
        max_blocks = BLOCKS_PER_WORKER * self._count
        max_bytes = MAX_BYTES_PER_WORKER * self._count
        with ThreadPoolExecutor(self._count) as threads:
            try:
                for block in blocks:
                    size = block_bytes_of(block)
                    while pending and (len(pending) >= max_blocks or pending_bytes + size > max_bytes):
                        finished, future = pending.popleft()
                        pending_bytes -= block_bytes_of(finished)
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

    def __init__(self, job: EncodeOptions) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._connection, remote = spawn.Pipe()
        self.process: SpawnProcess = spawn.Process(target=_run_worker, args=(remote, job), daemon=True)
        with block_interrupts():
            self.process.start()
        remote.close()  # only the worker holds that end now, so its death ends the pipe

    def encode(self, engine: str, block: Block) -> EncodedBlock:
        """Return the encoding of a block."""
        try:
            self._connection.send((engine, block))
            answer = _receive(self._connection)
        except (EOFError, OSError) as error:
            raise worker_death_error(self.process, "--workers 1") from error
        if isinstance(answer, Exception):
            raise answer
        return answer

    def end(self) -> None:
        """End an idle worker."""
        self._connection.close()
        self.process.join(JOIN_SECONDS)
        self.process.kill()


def _result(future: Future[EncodedBlock], check: Callable[[], None]) -> EncodedBlock:
    while not wait([future], POLL_SECONDS).done:
        check()
    return future.result()


def _run_worker(connection: Connection, job: EncodeOptions) -> None:
    """Run a worker, on one thread, since there are as many workers as there should be threads."""
    exit_with_parent()
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


def _tokenizer(job: EncodeOptions) -> Tokenizer:
    tokenizer = build_tokenizer(job.choice)
    if tokenizer.fingerprint != job.fingerprint:
        raise DataError("the files of the tokenizer have changed", "rerun when no process is writing them")
    return tokenizer


def _send(connection: Connection, answer: EncodedBlock | Exception) -> None:
    """Send a result. Ids are written as raw memory, because pickling them costs several copies on both sides."""
    if isinstance(answer, Exception):
        connection.send(answer)
        return
    connection.send(answer._replace(columns=tuple(EncodedBatch(ids[:0], lengths) for ids, lengths in answer.columns)))
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
        columns.append(EncodedBatch(ids, lengths))
    return answer._replace(columns=tuple(columns))
