"""Encode text files into token files, in several processes.

`BlockEncoder` turns a block of text into ids and statistics. `EncoderPool` runs one in each of several processes and
yields the results in the order of the blocks, with a bounded number of blocks in memory. Every worker has its own pipe
to this process. If a worker dies, even while sending a result, its pipe ends, so that this process never waits for it.
`write_dataset` chooses the engine, encodes all blocks, and gives the token files their final names only when all are
complete. `run_in_subprocess` runs any function in a process that can be killed at any moment.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from functools import cache
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from queue import SimpleQueue
from random import Random
from types import TracebackType
from typing import NamedTuple, Self, TypeVar

import numpy as np

from megatron.data.errors import DataError
from megatron.data.indexed_writer import IndexedDatasetWriter, id_dtype, publish_all, remove_unfinished_files
from megatron.data.preprocess.corpus import (
    BLOCK_BYTES,
    SKIP_BAD_FLAG,
    BadDocument,
    BadDocumentReport,
    Block,
    FilePosition,
    LineBlock,
    TextDocument,
    block_bytes_of,
    check_single_key,
    load_block,
    parse_valid_lines,
    read_block,
    split_into_blocks,
)
from megatron.data.progress import PreprocessProgress, PreprocessTotals, StageProgress
from megatron.data.tokenizers.base import EncodedBatch, Tokenizer
from megatron.data.tokenizers.engine import GIGATOKEN, OWN_LIBRARY, EncodeEngine, build_engine, choose_engine
from megatron.data.tokenizers.huggingface import ByteTokenizer
from megatron.data.tokenizers.tokenizer import (
    FILES_SUFFIX,
    RECORD_SUFFIX,
    TokenizerOptions,
    TokenizerRecord,
    build_tokenizer,
)

MAX_DESCRIBED = 20  # bad documents of a block described; the others are only counted
SPOT_CHECK_BYTES = 300  # bytes of a block that the tokenizer's own library encodes too


@dataclass(frozen=True)
class EncodeOptions:
    """Settings of a worker."""

    keys: tuple[str, ...]  # JSON keys of the texts
    tokenizer_options: TokenizerOptions
    fingerprint: str  # of the tokenizer, compared in every worker
    append_eod: bool  # append the end-of-document id to every text that is not empty


class EncodedBlock(NamedTuple):
    """Ids of a block, and statistics."""

    columns: tuple[EncodedBatch, ...]  # for each key, the ids of its texts in the dtype of the token files
    lines: int  # line ends, including those of blank and bad lines
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

    def __init__(self, options: EncodeOptions, tokenizer: Tokenizer, engine: EncodeEngine) -> None:
        self._options = options
        self._tokenizer = tokenizer
        self._engine = engine
        self._dtype = id_dtype(tokenizer.vocab_size)
        self._bad: list[BadDocument] = []

    def __call__(self, block: Block) -> EncodedBlock:
        """Return the ids of a block's documents."""
        self._bad = []
        block, lines = load_block(block)
        documents = self._read(block)
        try:
            columns = [self._engine.encode_batch(texts) for texts in documents.columns]
        except ValueError:
            documents = self._drop_unencodable(documents)
            columns = [self._engine.encode_batch(texts) for texts in documents.columns]
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

    def _read(self, block: Block) -> _Documents:
        """Return the valid documents; add the others to the bad ones."""
        keys = self._options.keys
        if isinstance(block, LineBlock) and not block.damage:
            columns = parse_valid_lines(block.read(), keys)
            if columns is not None:
                return _Documents(columns, [(block.file, number) for number in range(1, len(columns[0]) + 1)])
        columns = [[] for _ in keys]
        places = []
        for document in read_block(block, keys, any_bytes=isinstance(self._tokenizer, ByteTokenizer)):
            if isinstance(document, BadDocument):
                self._bad.append(document)
                continue
            places.append(document.place)
            for column, text in zip(columns, document.texts):
                column.append(text.encode() if isinstance(text, str) else text)
        return _Documents(columns, places)

    def _drop_unencodable(self, documents: _Documents) -> _Documents:
        """Move documents that the tokenizer rejects to the bad ones."""
        good = []
        for number, place in enumerate(documents.places):
            try:
                for texts in documents.columns:
                    self._tokenizer.encode(texts[number])
                good.append(number)
            except DataError as error:
                self._bad.append(BadDocument(*place, f": {error.seen}", error.fixes))
            except ValueError as error:
                self._bad.append(BadDocument(*place, f": {error}", ()))
        self._bad.sort(key=lambda bad: bad.line)
        columns = [[texts[number] for number in good] for texts in documents.columns]
        return _Documents(columns, [documents.places[number] for number in good])

    def _to_file_dtype(self, column: EncodedBatch) -> EncodedBatch:
        """Check the ids, convert them to the dtype of the files and append the end-of-document ids."""
        ids, lengths = column
        if ids.size and not 0 <= ids.min() <= ids.max() < self._tokenizer.vocab_size:
            seen = f"the tokenizer gave ids {ids.min()}..{ids.max()}"
            raise DataError(f"{seen}, but its vocab_size is {self._tokenizer.vocab_size}", "another --tokenizer-model")
        ids = ids.astype(self._dtype)
        if not self._options.append_eod:
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


class ProgressSender:
    """Sender of progress from a subprocess to the `StageProgress` of its parent."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def set_stage(self, stage: str) -> None:
        """Report the current stage."""
        self._connection.send(("stage", stage))

    def message(self, text: str) -> None:
        """Report a message for the user."""
        self._connection.send(("message", text))


def run_in_subprocess(
    function: Callable[[Argument, ProgressSender], Result], plan: Argument, progress: StageProgress
) -> Result:
    """Return ``function(plan, sender)``, called in another process.

    That process ends with this call, however the call ends, and ignores Ctrl-C.

    Args:
        function: to call; the function, its argument and its result must be picklable.
        plan: its argument.
        progress: receives the reports of the function, and ticks.
    """
    process, connection = _spawn(_run_function, function, plan)
    try:
        while True:
            while not connection.poll(POLL_SECONDS):
                progress.tick()
            try:
                kind, content = connection.recv()
            except (EOFError, OSError) as error:
                raise _worker_death_error(process) from error
            if kind == "returned":
                return content
            if kind == "raised":
                raise content
            (progress.set_stage if kind == "stage" else progress.message)(content)
    finally:
        process.kill()
        process.join()
        connection.close()


def _run_function(
    connection: Connection, function: Callable[[Argument, ProgressSender], Result], plan: Argument
) -> None:
    try:
        answer = "returned", function(plan, ProgressSender(connection))
    except (DataError, OSError) as error:
        connection.send(("raised", error))
        return
    connection.send(answer)


def _spawn(target: Callable[..., None], *args: object) -> tuple[SpawnProcess, Connection]:
    """Start ``target(connection, *args)`` in a process that ends with this one and ignores Ctrl-C.

    Returns:
        The process, and this end of its connection.
    """
    spawn = multiprocessing.get_context("spawn")
    connection, remote = spawn.Pipe()
    process = spawn.Process(target=_run_child, args=(target, remote, *args), daemon=True)
    resource_tracker.ensure_running()  # now, because starting it later would unblock the signal
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    remote.close()  # only the child holds that end now, so its death ends the pipe
    return process, connection


def _run_child(target: Callable[..., None], connection: Connection, *args: object) -> None:
    parent = multiprocessing.parent_process()

    def exit_with_parent() -> None:
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=exit_with_parent, daemon=True).start()
    target(connection, *args)


def _worker_death_error(process: SpawnProcess, *fixes: str) -> DataError:
    process.join(JOIN_SECONDS)
    status = process.exitcode
    if status is None or status >= 0:
        return DataError(f"a worker process ended with status {status}; its output is above")
    name = signal.Signals(-status).name
    cause = "; it may have run out of memory" if -status == signal.SIGKILL else ""
    return DataError(f"a worker process was killed by {name}{cause}", *fixes, "more memory")


BLOCKS_PER_WORKER = 2  # blocks submitted per worker: one being encoded, one queued
MAX_BYTES_PER_WORKER = 64 << 20  # limit of the text submitted per worker; a single block may be larger


class EncoderPool:
    """Pool of processes that encode blocks. They end with the ``with`` block, and with this process."""

    def __init__(self, options: EncodeOptions, count: int) -> None:
        """Start ``count`` processes and return while they initialize."""
        self._workers: list[tuple[SpawnProcess, Connection]] = []
        self._idle: SimpleQueue[tuple[SpawnProcess, Connection]] = SimpleQueue()
        try:
            for _ in range(count):
                self._workers.append(_spawn(_run_worker, options))
                self._idle.put(self._workers[-1])
        except BaseException:
            self._kill()
            raise

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
        """
        pending: deque[tuple[Block, Future[EncodedBlock]]] = deque()
        pending_bytes = 0
        max_blocks = BLOCKS_PER_WORKER * len(self._workers)
        max_bytes = MAX_BYTES_PER_WORKER * len(self._workers)

        def oldest() -> tuple[Block, EncodedBlock]:
            block, future = pending.popleft()
            while not wait([future], POLL_SECONDS).done:
                check()
            return block, future.result()

        with ThreadPoolExecutor(len(self._workers)) as threads:
            try:
                for block in blocks:
                    size = block_bytes_of(block)
                    while pending and (len(pending) >= max_blocks or pending_bytes + size > max_bytes):
                        pending_bytes -= block_bytes_of(pending[0][0])
                        yield oldest()
                    pending.append((block, threads.submit(self._encode, engine, block)))
                    pending_bytes += size
                while pending:
                    yield oldest()
            except BaseException:
                threads.shutdown(wait=False, cancel_futures=True)
                self._kill()  # the blocks being encoded may take long
                raise

    def _encode(self, engine: str, block: Block) -> EncodedBlock:
        """Encode a block in an idle worker. There is one, because there are as many threads as workers."""
        worker = self._idle.get()
        process, connection = worker
        try:
            connection.send((engine, block))
            answer = _receive(connection)
        except (EOFError, OSError) as error:
            raise _worker_death_error(process, "--workers 1") from error
        finally:
            self._idle.put(worker)
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _kill(self) -> None:
        for process, _ in self._workers:
            process.kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self._kill()
        for process, connection in self._workers:
            connection.close()
            process.join(JOIN_SECONDS)
            process.kill()


def _run_worker(connection: Connection, options: EncodeOptions) -> None:
    """Run a worker, on one thread, since there are as many workers as there should be threads."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"

    @cache
    def tokenizer() -> Tokenizer:
        built = build_tokenizer(options.tokenizer_options)
        if built.fingerprint != options.fingerprint:
            raise DataError("the files of the tokenizer have changed", "rerun when no process is writing them")
        return built

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
            encoder = encoder or BlockEncoder(options, tokenizer(), build_engine(tokenizer(), engine))
            answer = encoder(block)
        except (DataError, OSError) as error:
            answer = error
        _send(connection, answer)


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
    """Receive a result of `_send`; raise EOFError if the pipe ends before all of it has arrived."""
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


SAMPLE_BYTES = 1 << 20  # of texts, on which gigatoken is compared with the tokenizer's own library
SAMPLE_SEARCH_BYTES = 8 << 20  # of the input, read to find that many


@dataclass(frozen=True)
class PreprocessOptions:
    """Settings of a preprocessing run."""

    files: Sequence[Path]  # read in this order
    keys: tuple[str, ...]  # JSON keys of the texts; each gets its own token files
    prefix: str  # path and beginning of the names of the token files
    tokenizer_options: TokenizerOptions
    append_eod: bool = False  # append the end-of-document id to every text that is not empty
    engine: str = "auto"  # one of `engine.ENGINES`
    workers: int = 1  # processes that encode; 1 means this process
    skip_bad: bool = False  # skip invalid documents instead of failing
    block_bytes: int = BLOCK_BYTES  # bytes of text that a worker encodes at once


def output_prefix(prefix: str, key: str) -> str:
    """Return the prefix of the token files of a JSON key, as in Megatron-LM."""
    return f"{prefix}_{key}_document"


def write_dataset(
    plan: PreprocessOptions,
    tokenizer: Tokenizer,
    progress: PreprocessProgress,
    check: Callable[[], None] = lambda: None,
) -> tuple[PreprocessTotals, EncodeEngine]:
    """Write ``<prefix>_<key>_document.{bin,idx,tokens.json}`` for every key, independent of the number of workers.

    The files of the tokenizer are copied to ``<prefix>_<key>_document.tokenizer/``. An empty text is a document without
    sequences and without end-of-document id. A bad document is skipped under all keys.

    Args:
        plan: settings.
        tokenizer: that of the plan.
        progress: receives the choice of engine, skipped documents and progress.
        check: called between blocks until the files are renamed to their final names; its exceptions end the work.

    Raises:
        DataError: if a document is invalid, or there is none. No file is left under its final name.
        OSError: if a file cannot be read or written.
    """
    _check_keys(plan)
    before = [file.stat() for file in plan.files]
    options = EncodeOptions(plan.keys, plan.tokenizer_options.local(), tokenizer.fingerprint, plan.append_eod)
    statistics = _Statistics(plan.skip_bad, progress)
    Path(plan.prefix).parent.mkdir(parents=True, exist_ok=True)
    for key in plan.keys:
        for path in remove_unfinished_files(output_prefix(plan.prefix, key)):
            progress.message(f"removed {path}, left by a run that was killed")
    with ExitStack() as stack:
        workers = stack.enter_context(EncoderPool(options, plan.workers)) if plan.workers > 1 else None
        sample = read_sample(plan.files, plan.keys) if tokenizer.files and plan.engine != OWN_LIBRARY else []
        engine = choose_engine(tokenizer, sample, plan.engine)
        check()
        progress.message(f"engine: {engine.name} ({engine.reason})")
        writers = []
        for key in plan.keys:
            writer = IndexedDatasetWriter(output_prefix(plan.prefix, key), id_dtype(tokenizer.vocab_size))
            writers.append(stack.enter_context(writer))
            writer.add_file(RECORD_SUFFIX, TokenizerRecord.of(tokenizer).to_bytes())
            for name, content in tokenizer.files.items():
                writer.add_file(f"{FILES_SUFFIX}/{name}", content)
        blocks = split_into_blocks(plan.files, plan.block_bytes)
        encode = BlockEncoder(options, tokenizer, engine)
        results = (
            ((block, encode(block)) for block in blocks)
            if workers is None
            else workers.encoded(blocks, engine.name, check)
        )
        for block, result in stack.enter_context(closing(results)):
            check()
            statistics.add(block, result)
            for writer, column in zip(writers, result.columns):
                writer.add_documents(*column)
            statistics.totals.tokens = sum(writer.num_tokens for writer in writers)
            progress.update(statistics.totals)
        for file, old in zip(plan.files, before):
            new = file.stat()
            if (new.st_size, new.st_mtime_ns) != (old.st_size, old.st_mtime_ns):
                raise DataError(f"{file} was changed while it was read", "rerun when no process is writing it")
        if not statistics.totals.tokens:
            seen = f"the documents of the input are all empty ({statistics.totals.documents:,})"
            raise DataError(seen, "another --input")
        publish_all(writers)
    return statistics.totals, engine


def _check_keys(plan: PreprocessOptions) -> None:
    if len(set(plan.keys)) < len(plan.keys):
        raise DataError(f"--json-keys: a key is given twice: {', '.join(plan.keys)}", "--json-keys text")
    for key in plan.keys:
        if "/" in key:
            seen = f"--json-keys {key}: it becomes part of file names, which cannot contain '/'"
            raise DataError(seen, "rename the key in the input")
    for file in plan.files:
        check_single_key(file, plan.keys)


def read_sample(files: Sequence[Path], keys: Sequence[str]) -> list[str]:
    """Return the first texts of the input, at most `SAMPLE_BYTES` of them, without invalid documents.

    They are searched for in the first `SAMPLE_SEARCH_BYTES`, so that an input without valid texts fails soon.
    """
    found: list[str] = []
    size = searched = 0
    for block in split_into_blocks(files, SAMPLE_BYTES):
        for document in read_block(block, keys):
            searched += document.num_bytes
            for text in document.texts if isinstance(document, TextDocument) else ():
                characters = text.decode() if isinstance(text, bytes) else text
                found.append(characters[: SAMPLE_BYTES - size])
                size += len(found[-1])
            if size >= SAMPLE_BYTES or searched >= SAMPLE_SEARCH_BYTES:
                return found
    return found


class _Statistics:
    """Totals over blocks. Reports bad documents with their line numbers."""

    def __init__(self, skip_bad: bool, progress: PreprocessProgress) -> None:
        self.totals = PreprocessTotals()
        self._bad = BadDocumentReport(skip_bad, progress.message)
        self._position = FilePosition()

    def add(self, block: Block, result: EncodedBlock) -> None:
        """Add a block; raise DataError if its ids are wrong, or a document is bad and bad ones are not skipped."""
        self._position.start(block)
        if result.differs is not None:
            raise result.differs.of(self._position.lines)
        for bad in result.described:
            self._bad.add(bad.of(self._position.lines, SKIP_BAD_FLAG))
        self._bad.count += result.bad - len(result.described)
        error = self._position.finish(block, result.lines, result.documents + result.bad)
        if error is not None:
            self._bad.add(error)
        self.totals.bad = self._bad.count
        self.totals.stored_bytes += block.stored
        self.totals.documents += result.documents
        self.totals.empty += result.empty
        self.totals.text_bytes += result.text_bytes
