"""Encode text files into token files, in several processes or threads.

`BlockEncoder` turns a block of text into ids and statistics. `EncoderPool` runs one in each of several processes;
two workers that use gigatoken are threads.
`write_dataset` chooses the engine, encodes all blocks, and gives the token files their final names only when all are
complete.
"""

from __future__ import annotations

import json
import os
import shlex
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from megatron.checkpoint.durable_files import checksum, publish_file
from megatron.config.files import parse_json, read_small
from megatron.config.text import counted
from megatron.data.document_origins import make_runs
from megatron.data.errors import DataError
from megatron.data.indexed_writer import RESUME, IndexedDatasetWriter, id_dtype, publish_all, remove_unfinished_files
from megatron.data.manifest import MAX_BYTES, InputRecords
from megatron.data.preprocess.corpus import (
    BLOCK_BYTES,
    BadDocument,
    BadDocumentReport,
    Block,
    DroppedDocument,
    FileBlock,
    LineBlock,
    TextDocument,
    check_single_key,
    load_block,
    parse_valid_lines,
    read_block,
    split_into_blocks,
)
from megatron.data.preprocess.drop_list import DROP_LIST, DropList, mark_dropped
from megatron.data.preprocess.files import MAX_LINE_BYTES, is_table
from megatron.data.preprocess.remote import InputFile, RemoteStat, current_stat
from megatron.data.preprocess.sentences import SentenceSplitter
from megatron.data.preprocess.shards import Shard
from megatron.data.preprocess.transforms import FILTER, MAP, QUALITY, DocumentTransforms, Step
from megatron.data.preprocess.workers import WorkerPool, in_order
from megatron.data.progress import PreprocessProgress, PreprocessTotals
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

BLOCK_FORMAT = 3  # increased when the same files are cut into other blocks, or the saved state changes
SAVE_SECONDS = 10.0  # between savings of the state of a run
MAX_DESCRIBED = 20  # bad documents of a block described; the others are only counted
SPOT_CHECK_BYTES = 300  # bytes of a block that the tokenizer's own library encodes too


@dataclass(frozen=True)
class PreprocessOptions:
    """Settings of a preprocessing run."""

    files: Sequence[InputFile]  # read in this order
    keys: tuple[str, ...]  # JSON keys of the texts; each gets its own token files
    prefix: str  # path and beginning of the names of the token files
    tokenizer_options: TokenizerOptions
    append_eod: bool = False  # append the end-of-document id to every text that is not empty
    engine: str = "auto"  # one of `engine.ENGINES`
    workers: int = 1  # processes or threads that encode; 1 means this thread
    skip_bad: bool = False  # skip invalid documents instead of failing
    block_bytes: int = BLOCK_BYTES  # bytes of text that a worker encodes at once
    max_line_bytes: int = MAX_LINE_BYTES  # of a line or a plain file; a longer one is an invalid document
    overwrite: bool = False  # start over if an interrupted run had other settings, instead of failing
    shard: Shard | None = None  # that the files are of
    corpus: str = ""  # checksum of the names and sizes of the files of all shards
    start: int = 0  # byte of the first file at which the shard begins
    stop: int | None = None  # byte of the last file at which it ends; None for the end of the file
    steps: Sequence[Step] = ()  # that change or drop documents, in this order
    drop: Path | None = None  # folder of a `DropList`, whose documents are left out
    sentences: SentenceSplitter | None = None  # makes a sequence of each sentence, not of each document
    names: Mapping[str, str] = field(default_factory=dict)  # what the origins call the copies of pipes, by their path


class EncodedBlock(NamedTuple):
    """Ids of a block, and statistics."""

    columns: tuple[EncodedBatch, ...]  # for each key, the ids of its texts in the dtype of the token files
    sequences: tuple[NDArray[np.int64], ...] | None  # for each key, those of each document; None for one each
    lines: int  # line ends, including those of blank and bad lines
    documents: int  # encoded
    empty: int  # texts of all columns without ids
    text_bytes: int  # UTF-8 bytes of all texts
    bad: int  # documents not encoded
    dropped: Mapping[str, int]  # documents that steps have dropped, by reason
    described: tuple[BadDocument, ...]  # the first `MAX_DESCRIBED` of them
    origins: NDArray[Any]  # runs of the documents, with lines and files counted within the block
    checksums: tuple[bytes, ...]  # of the lines, or of each plain file
    differs: BadDocument | None  # set if engine and tokenizer disagree

    @property
    def found(self) -> int:
        """Documents that were read."""
        return self.documents + self.bad + sum(self.dropped.values())


class BlockEncoder:
    """Encode blocks one after the other."""

    def __init__(self, plan: PreprocessOptions, tokenizer: Tokenizer, engine: EncodeEngine) -> None:
        self._plan = plan
        self._tokenizer = tokenizer
        self._engine = engine
        self._dtype = id_dtype(tokenizer.vocab_size)
        self._transforms = DocumentTransforms(plan.steps, plan.keys)
        self._dropped: Counter[str] = Counter()  # of the current block

    def __call__(self, block: Block) -> EncodedBlock:
        """Return the ids of a block's documents."""
        block, lines = load_block(block)
        columns, places, bad = self._read(block)
        checksums = _checksums(block, places, columns[0])
        try:
            encoded = [self._encode(texts) for texts in columns]
        except ValueError:
            good = [i for i in range(len(places)) if self._is_encodable(places[i], [c[i] for c in columns], bad)]
            bad.sort(key=lambda document: document.line)
            columns, places = [[texts[i] for i in good] for texts in columns], [places[i] for i in good]
            encoded = [self._encode(texts) for texts in columns]
        last = [last_sequences(batch.lengths, counts) for batch, counts in encoded]
        return EncodedBlock(
            columns=tuple(self._to_file_dtype(batch, at) for (batch, _), at in zip(encoded, last)),
            sequences=None if self._plan.sentences is None else tuple(counts for _, counts in encoded),
            lines=lines,
            documents=len(places),
            empty=sum(len(places) - len(at) for at in last),
            text_bytes=sum(sum(map(len, texts)) for texts in columns),
            bad=len(bad),
            dropped=dict(self._dropped),
            described=tuple(bad[:MAX_DESCRIBED]),
            origins=_origins(block, places),
            checksums=checksums,
            differs=self._spot_check(columns, places),
        )

    def _read(self, block: Block) -> tuple[list[list[bytes]], list[tuple[InputFile, int]], list[BadDocument]]:
        """Return for each key the texts in UTF-8, the file and line of each valid document, and the bad documents."""
        keys = self._plan.keys
        self._dropped.clear()
        are_texts = not self._transforms and isinstance(block, LineBlock) and not (block.damage or block.dropped)
        if are_texts and isinstance(block, LineBlock) and not is_table(block.file):
            columns = parse_valid_lines(block.read(), keys)
            if columns is not None:
                return columns, [(block.file, number) for number in range(1, len(columns[0]) + 1)], []
        columns, places, bad = [[] for _ in keys], [], []
        any_bytes = isinstance(self._tokenizer, ByteTokenizer) and self._plan.sentences is None
        for document in read_block(block, keys, any_bytes, self._transforms):
            if isinstance(document, BadDocument):
                bad.append(document)
                continue
            if isinstance(document, DroppedDocument):
                self._dropped[document.reason] += 1
                continue
            places.append(document.place)
            for column, text in zip(columns, document.texts):
                column.append(text.encode() if isinstance(text, str) else text)
        return columns, places, bad

    def _is_encodable(self, place: tuple[InputFile, int], texts: Sequence[bytes], bad: list[BadDocument]) -> bool:
        """Return True if the tokenizer accepts a document; add it to the ``bad`` ones otherwise."""
        try:
            for text in texts:
                self._tokenizer.encode(text)
        except ValueError as error:
            seen, fixes = (error.seen, error.fixes) if isinstance(error, DataError) else (str(error), ())
            bad.append(BadDocument(*place, f": {seen}", fixes))
            return False
        return True

    def _encode(self, texts: Sequence[bytes]) -> tuple[EncodedBatch, NDArray[np.int64]]:
        """Return the ids of the sequences of texts, and the number of sequences of each."""
        if self._plan.sentences is None:
            return self._engine.encode_batch(texts), np.ones(len(texts), dtype=np.int64)
        sentences = [self._plan.sentences.split(text.decode()) for text in texts]
        counts = np.fromiter(map(len, sentences), dtype=np.int64, count=len(texts))
        return self._engine.encode_batch([each.encode() for part in sentences for each in part]), counts

    def _to_file_dtype(self, column: EncodedBatch, last: NDArray[np.int64]) -> EncodedBatch:
        """Check the ids, convert them to the dtype of the files and append their ends to the ``last`` sequences."""
        ids, lengths = column
        if ids.size and not 0 <= ids.min() <= ids.max() < self._tokenizer.vocab_size:
            seen = f"the tokenizer gave ids {ids.min()}..{ids.max()}"
            raise DataError(f"{seen}, but its vocab_size is {self._tokenizer.vocab_size}", "another --tokenizer-model")
        ids = ids.astype(self._dtype)
        if not self._plan.append_eod:
            return EncodedBatch(ids, lengths)
        ends = np.cumsum(lengths)[last]
        return EncodedBatch(
            np.insert(ids, ends, self._tokenizer.eod), lengths + np.bincount(last, minlength=len(lengths))
        )

    def _spot_check(self, columns: list[list[bytes]], places: list[tuple[InputFile, int]]) -> BadDocument | None:
        """Compare a few ids of gigatoken with those of the tokenizer's own library."""
        if not self._engine.name.startswith(GIGATOKEN) or not places:
            return None
        generator = Random(columns[0][0][-SPOT_CHECK_BYTES:])  # varies by block, equal in every run
        index = generator.randrange(len(places))
        text = max((texts[index] for texts in columns), key=len)
        start = generator.randrange(max(1, len(text) - SPOT_CHECK_BYTES))
        excerpt = text[start : start + SPOT_CHECK_BYTES].decode(errors="ignore")
        if np.array_equal(self._engine.encode_batch([excerpt]).ids, self._tokenizer.encode(excerpt)):
            return None
        seen = f": {self._engine.name} and {self._tokenizer.library} give different ids for part of it"
        return BadDocument(*places[index], seen, (f"--engine {OWN_LIBRARY}",))


def last_sequences(lengths: NDArray[np.int64], counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the last sequence with ids of each document that has one; documents have ``counts [n]`` sequences."""
    documents = np.repeat(np.arange(len(counts)), counts)
    last = np.full(len(counts), -1)
    with_ids = np.flatnonzero(lengths > 0)
    last[documents[with_ids]] = with_ids  # the last assignment counts
    return last[last >= 0]


def _checksums(block: Block, places: Sequence[tuple[InputFile, int]], texts: Sequence[bytes]) -> tuple[bytes, ...]:
    """Return the checksum of the lines or rows of a block, or that of the text of each plain file."""
    if isinstance(block, LineBlock):
        return (xxhash.xxh3_64_digest(block.read()),)
    of_file = {file: text for (file, _), text in zip(places, texts)}
    return tuple(xxhash.xxh3_64_digest(of_file.get(file, b"")) for file in block.files)


def _origins(block: Block, places: Sequence[tuple[InputFile, int]]) -> NDArray[Any]:
    """Return the runs of origins of documents at these places of a block."""
    lines = np.fromiter((line for _, line in places), np.int64, len(places))
    if isinstance(block, LineBlock):
        return make_runs(lines)
    numbers = {file: number for number, file in enumerate(block.files)}
    return make_runs(lines, np.array([numbers[file] for file, _ in places], np.int32))


class EncoderPool(WorkerPool[tuple[str, Block], EncodedBlock]):
    """Pool of processes that encode blocks."""

    def __init__(self, plan: PreprocessOptions, fingerprint: str) -> None:
        """Start the processes and return while they initialize a tokenizer, which must have this fingerprint."""
        plan = replace(plan, files=(), tokenizer_options=plan.tokenizer_options.local())
        super().__init__(plan.workers, _start_encoder, plan, fingerprint)

    def encoded(
        self, blocks: Iterable[Block], engine: str, check: Callable[[], None] = lambda: None
    ) -> Generator[tuple[Block, EncodedBlock]]:
        """Yield each block with its encoding by ``engine``, as `results` does."""
        with closing(self.results(((engine, block) for block in blocks), check)) as results:
            for (_, block), encoded in results:
                yield block, encoded


def _start_encoder(plan: PreprocessOptions, fingerprint: str) -> Callable[[tuple[str, Block]], EncodedBlock]:
    """Return the function of a worker, on one thread: there are as many workers as there should be threads."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    tokenizer = build_tokenizer(plan.tokenizer_options)
    if tokenizer.fingerprint != fingerprint:
        raise DataError("the files of the tokenizer have changed", "rerun when no process is writing them")
    encoder = cache(lambda engine: BlockEncoder(plan, tokenizer, build_engine(tokenizer, engine)))
    return lambda request: encoder(request[0])(request[1])


MAX_THREADS = 2  # that encode with gigatoken; more would wait for each other: Python's lock is held half of the time


def _can_use_threads(plan: PreprocessOptions, tokenizer: Tokenizer) -> bool:
    """Return True if the workers can be threads, which start at once, where gigatoken is the engine."""
    is_ours = bool(plan.steps) or plan.sentences is not None or not tokenizer.files  # Python's lock is held longer
    return not is_ours and plan.engine != OWN_LIBRARY and plan.workers <= MAX_THREADS


def _encode_all(
    plan: PreprocessOptions,
    tokenizer: Tokenizer,
    engine: EncodeEngine,
    pool: EncoderPool | None,
    blocks: Iterable[Block],
    check: Callable[[], None],
) -> Generator[tuple[Block, EncodedBlock]]:
    """Yield each block with its encoding, from the processes of ``pool``, or from threads or processes started now."""
    if pool is not None:
        yield from pool.encoded(blocks, engine.name, check)
    elif plan.workers == 1:
        encode = BlockEncoder(plan, tokenizer, engine)
        yield from ((block, encode(block)) for block in blocks)
    elif engine.name.startswith(GIGATOKEN):
        yield from in_order(_encoder_of_threads(plan, tokenizer, engine), blocks, plan.workers, check)
    else:
        with closing(EncoderPool(plan, tokenizer.fingerprint)) as late:
            yield from late.encoded(blocks, engine.name, check)


def _encoder_of_threads(
    plan: PreprocessOptions, tokenizer: Tokenizer, engine: EncodeEngine
) -> Callable[[Block], EncodedBlock]:
    """Return a function for threads: each builds an engine of its own, because gigatoken refuses to be shared."""
    own = threading.local()
    ready = [engine]

    def encode(block: Block) -> EncodedBlock:
        if not hasattr(own, "encoder"):
            try:
                mine = ready.pop()
            except IndexError:
                mine = build_engine(tokenizer, engine.name)
            own.encoder = BlockEncoder(plan, tokenizer, mine)
        encoded: EncodedBlock = own.encoder(block)
        return encoded

    return encode


SAMPLE_BYTES = 1 << 20  # of texts, on which gigatoken is compared with the tokenizer's own library
SAMPLE_SEARCH_BYTES = 8 << 20  # of the input, read to find that many


def output_prefix(prefix: str, key: str, sentences: bool = False) -> str:
    """Return the prefix of the token files of a JSON key, as in Megatron-LM."""
    return f"{prefix}_{key}_{'sentence' if sentences else 'document'}"


@dataclass
class RunState:
    """Position of a run, saved beside its temporary files, from which the same command continues after any end."""

    settings: dict[str, str]  # everything the output depends on
    written: list[tuple[int, int, int, int]]  # for each key, what `IndexedDatasetWriter` continues from
    totals: PreprocessTotals
    bad: tuple[int, int, int] = (0, 0, 0)  # counts of `BadDocumentReport`
    files: int = 0  # read completely
    blocks: int = 0  # read of the next file
    inputs: list[list[Any]] = field(default_factory=list)  # `InputRecords.records`
    complete: bool = False  # the token files are complete and get their final names

    @staticmethod
    def path(prefix: str, keys: Sequence[str], sentences: bool = False) -> Path:
        """Return the path of the saved state of a run."""
        return Path(f"{output_prefix(prefix, keys[0], sentences)}.state.{RESUME}.part")

    @classmethod
    def load(cls, path: Path) -> RunState | None:
        """Return the saved state, or None if there is none; raise DataError if it is damaged."""
        try:
            fields = parse_json(read_small(path, MAX_BYTES))
            return cls(**fields | {"totals": PreprocessTotals(**fields["totals"])})
        except FileNotFoundError:
            return None
        except (ValueError, TypeError, KeyError) as error:
            raise DataError(f"{path} is damaged", f"start over: rm {shlex.quote(str(path))}") from error

    def add(self, block: Block) -> None:
        """Move the position behind a block."""
        ended = len(block.files) if isinstance(block, FileBlock) else int(block.last)
        self.files, self.blocks = self.files + ended, 0 if ended else self.blocks + 1


def _settings(
    plan: PreprocessOptions,
    tokenizer: Tokenizer,
    engine: EncodeEngine,
    transforms: DocumentTransforms,
    stats: Sequence[os.stat_result | RemoteStat],
    drop: DropList | None,
) -> dict[str, str]:
    """Return everything the output and its blocks depend on, by the flag that sets it."""
    files = [(str(file), stat.st_size, stat.st_mtime_ns) for file, stat in zip(plan.files, stats)]
    libraries = ", ".join(f"{name} {version(name)}" for name in ("zstandard", "pyarrow") if find_spec(name))
    return {
        "--input": checksum(repr(files if plan.shard is None else (files, plan.corpus)).encode()),
        "--json-keys": json.dumps(plan.keys),
        "--tokenizer-type or --tokenizer-model": checksum(TokenizerRecord.of(tokenizer).to_bytes()),
        "--append-eod": str(plan.append_eod),
        **({} if plan.sentences is None else {"--split-sentences": str(plan.sentences)}),
        "--engine": engine.name,
        "--shard": str(plan.shard),
        ", ".join((MAP, FILTER, QUALITY)): json.dumps(transforms.describe()),
        "--max-line-bytes": str(plan.max_line_bytes),
        "--drop": "" if drop is None else drop.digest,
        "versions of libraries": f"{libraries}, blocks {BLOCK_FORMAT} of {plan.block_bytes}",
    }


def _describe(
    plan: PreprocessOptions,
    tokenizer: Tokenizer,
    engine: EncodeEngine,
    transforms: DocumentTransforms,
    drop: DropList | None,
) -> dict[str, Any]:
    """Return the fields of the manifest that are known before the input is read."""
    options = {"append_eod": plan.append_eod, "json_keys": plan.keys, "max_line_bytes": plan.max_line_bytes}
    return {
        "tokenizer": {"type": TokenizerRecord.of(tokenizer).tokenizer_type, "fingerprint": tokenizer.fingerprint},
        "options": options | ({} if drop is None else {"drop": drop.digest}),
        "engine": engine.name,
        "steps": transforms.describe(),
        **({} if plan.sentences is None else {"sentences": str(plan.sentences)}),
        **({} if plan.shard is None else {"shard": plan.shard, "corpus": plan.corpus}),
    }


def _resume(plan: PreprocessOptions, settings: dict[str, str], message: Callable[[str], object]) -> RunState:
    """Return the state of an interrupted run with these settings, or that of a new one.

    Raises:
        DataError: if the interrupted run had other settings, unless the plan overwrites it.
    """
    path = RunState.path(plan.prefix, plan.keys, plan.sentences is not None)
    state = RunState.load(path)
    keys = {*plan.keys}
    if state is not None:
        other = [name for name in settings if settings[name] != state.settings.get(name)]
        if state.bad[0] and not plan.skip_bad:
            other.append("--on-bad-line")
        if not other:
            position = f"{state.files:,} of {counted(len(plan.files), 'file')}"
            message(f"continuing an interrupted run after {state.totals.documents:,} documents, {position}")
            return state
        differs = f"an interrupted run had other {', '.join(other)}"
        if not plan.overwrite:
            raise DataError(f"{path}: {differs}", "the same command as before", "--overwrite to start over")
        message(f"starting over, because {differs}")
        keys.update(json.loads(state.settings["--json-keys"]))
    for key in sorted(keys):
        for left in remove_unfinished_files(output_prefix(plan.prefix, key, plan.sentences is not None)):
            message(f"removed {left}, left by a run that was killed")
    return RunState(settings, [(0, 0, 0, 0)] * len(plan.keys), PreprocessTotals())


def write_dataset(
    plan: PreprocessOptions,
    tokenizer: Tokenizer,
    progress: PreprocessProgress,
    check: Callable[[], None] = lambda: None,
) -> tuple[PreprocessTotals, EncodeEngine]:
    """Write ``<prefix>_<key>_document.{bin,idx,tokens.json}`` for every key, independent of the number of workers.

    With sentences, the names end in ``_sentence``. The files of the tokenizer are copied to a folder beside them, with
    the suffix ``.tokenizer``. An empty text is a document without sequences and without end-of-document id. A bad
    document is skipped under all keys. An exception leaves no file under its final name. The state is saved every
    `SAVE_SECONDS`, and the same plan continues from there. ``check`` is called between blocks until the files are
    renamed to their final names; its exceptions end the work.

    Raises:
        DataError: if a document is invalid, or there is none. No file is left under its final name.
        OSError: if a file cannot be read or written.
    """
    _check_keys(plan)
    drop = None if plan.drop is None else DropList.open(plan.drop)
    before = [file.stat() for file in plan.files]
    transforms = DocumentTransforms(plan.steps, plan.keys)
    Path(plan.prefix).parent.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        needs_pool = plan.workers > 1 and not _can_use_threads(plan, tokenizer)
        pool = stack.enter_context(closing(EncoderPool(plan, tokenizer.fingerprint))) if needs_pool else None
        is_compared = tokenizer.files and plan.engine != OWN_LIBRARY
        sample = read_sample(plan.files, plan.keys, plan.max_line_bytes, transforms, check) if is_compared else []
        engine = choose_engine(tokenizer, sample, plan.engine)
        check()
        progress.message(f"engine: {engine.name} ({engine.reason})")
        extra_files = {f"{FILES_SUFFIX}/{name}": content for name, content in tokenizer.files.items()}
        extra_files[RECORD_SUFFIX] = TokenizerRecord.of(tokenizer).to_bytes()
        dtype = id_dtype(tokenizer.vocab_size)
        state = _resume(plan, _settings(plan, tokenizer, engine, transforms, before, drop), progress.message)
        totals = replace(state.totals, before=state.totals)
        report = BadDocumentReport(plan.skip_bad, progress.message, state.bad)
        names = [plan.names.get(str(file), str(file)) for file in plan.files]
        inputs, manifest = InputRecords(state.inputs), _describe(plan, tokenizer, engine, transforms, drop)
        prefixes = [output_prefix(plan.prefix, key, plan.sentences is not None) for key in plan.keys]
        writers = [
            stack.enter_context(IndexedDatasetWriter(prefix, dtype, extra_files, written, names, manifest))
            for prefix, written in zip(prefixes, state.written)
        ]

        def save() -> None:
            state.written = [writer.save() for writer in writers]
            state.totals, state.bad = replace(totals, before=None), report.counts
            state.inputs = inputs.records
            publish_file(state_path, json.dumps(asdict(state)).encode())

        state_path = RunState.path(plan.prefix, plan.keys, plan.sentences is not None)
        next_save = time.monotonic() + SAVE_SECONDS
        files, start = plan.files[state.files :], 0 if state.files else plan.start
        unread = split_into_blocks(
            files, plan.keys, plan.block_bytes, plan.max_line_bytes, transforms, start, plan.stop
        )
        blocks = islice(unread if drop is None else mark_dropped(unread, drop), state.blocks, None)
        results = _encode_all(plan, tokenizer, engine, pool, blocks, check)
        for block, result in stack.enter_context(closing(results)):
            check()
            if result.differs is not None:
                raise result.differs.of(report.lines_before(block))
            for number, digest in enumerate(result.checksums, state.files):
                inputs.add(number, block.stored if isinstance(block, LineBlock) else before[number].st_size, digest)
            origins = result.origins
            origins["file"] += state.files
            if isinstance(block, LineBlock):
                origins["row"] += report.lines_before(block)
            report.add(block, result.lines, result.found + len(block.dropped), result.described, result.bad)
            for writer, column, counts in zip(writers, result.columns, result.sequences or [None] * len(writers)):
                writer.add_origins(origins)
                writer.add_documents(*column, counts)
            _count(totals, block, result)
            totals.bad, totals.tokens = report.count, sum(writer.num_tokens for writer in writers)
            state.add(block)
            progress.update(totals)
            if time.monotonic() >= next_save:
                save()
                next_save = time.monotonic() + SAVE_SECONDS
        _check_unchanged(plan.files, before)
        if plan.shard is None:
            _check_text(totals)
        state.complete = True
        save()
        manifest["inputs"] = [*inputs.describe(names)]
        manifest |= _describe_totals(totals)
        publish_all(writers)
        state_path.unlink()
    return totals, engine


def _count(totals: PreprocessTotals, block: Block, result: EncodedBlock) -> None:
    """Add a block to the totals."""
    totals.stored_bytes += block.stored
    totals.documents += result.documents
    totals.empty += result.empty
    totals.text_bytes += result.text_bytes
    dropped = Counter(result.dropped) + Counter({DROP_LIST: len(block.dropped)})
    totals.dropped = dict(sorted((Counter(totals.dropped) + dropped).items()))


def _describe_totals(totals: PreprocessTotals) -> dict[str, Any]:
    """Return the fields of the manifest that follow from the counts."""
    invalid = {"invalid": totals.bad} if totals.bad else {}
    return {"dropped": dict(sorted((totals.dropped | invalid).items())), "counts": {"text_bytes": totals.text_bytes}}


def _check_unchanged(files: Sequence[InputFile], before: Sequence[os.stat_result | RemoteStat]) -> None:
    for file, old in zip(files, before):
        new = current_stat(file)
        if (new.st_size, new.st_mtime_ns) != (old.st_size, old.st_mtime_ns):
            raise DataError(f"{file} was changed while it was read", "rerun when no process is writing it")


def _check_text(totals: PreprocessTotals) -> None:
    if not totals.tokens:
        lost = f"{totals.documents:,} are empty, {sum(totals.dropped.values()):,} were dropped"
        raise DataError(f"no document of the input has text: {lost}", "another --input")


def _check_keys(plan: PreprocessOptions) -> None:
    if len(set(plan.keys)) < len(plan.keys):
        raise DataError(f"--json-keys: a key is given twice: {', '.join(plan.keys)}", "--json-keys text")
    for key in plan.keys:
        if "/" in key:
            seen = f"--json-keys {key}: it becomes part of file names, which cannot contain '/'"
            raise DataError(seen, "rename the key in the input")
    for file in plan.files:
        check_single_key(file, plan.keys)


def read_sample(
    files: Sequence[InputFile],
    keys: Sequence[str],
    max_line_bytes: int = MAX_LINE_BYTES,
    transforms: DocumentTransforms | None = None,
    check: Callable[[], None] = lambda: None,
) -> list[str]:
    """Return the first texts of the input, at most `SAMPLE_BYTES` of them, without invalid or dropped documents.

    They are searched for in the first `SAMPLE_SEARCH_BYTES`, so that an input without valid texts fails soon.
    ``check`` is called between documents.
    """
    found: list[str] = []
    size = searched = 0
    for block in split_into_blocks(files, keys, SAMPLE_BYTES, max_line_bytes, transforms):
        for document in read_block(block, keys, transforms=transforms):
            check()
            searched += document.num_bytes
            for text in document.texts if isinstance(document, TextDocument) else ():
                characters = text.decode() if isinstance(text, bytes) else text
                found.append(characters[: SAMPLE_BYTES - size])
                size += len(found[-1])
            if size >= SAMPLE_BYTES or searched >= SAMPLE_SEARCH_BYTES:
                return found
    return found
