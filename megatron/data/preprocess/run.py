"""Encode text files into token files.

`write_dataset` chooses the engine, encodes all blocks, and gives the token files their final names only when all are
complete.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from megatron.data.errors import DataError
from megatron.data.indexed_writer import IndexedDatasetWriter, id_dtype, publish_all, remove_unfinished_files
from megatron.data.preprocess.corpus import (
    BLOCK_BYTES,
    BadDocumentError,
    Block,
    LineBlock,
    check_single_key,
    is_json_lines,
    no_document_error,
    parse_line,
    read_plain_text,
    split_into_blocks,
    split_lines,
)
from megatron.data.preprocess.encode import BadDocument, BlockEncoder, EncodedBlock, EncodeOptions, EncoderPool
from megatron.data.progress import PreprocessTotals
from megatron.data.tokenizers.base import Tokenizer
from megatron.data.tokenizers.engine import OWN_LIBRARY, EncodeEngine, choose_engine
from megatron.data.tokenizers.tokenizer import FILES_SUFFIX, RECORD_SUFFIX, TokenizerOptions, TokenizerRecord

SAMPLE_BYTES = 1 << 20  # of texts, on which gigatoken is compared with the tokenizer's own library
SAMPLE_SEARCH_BYTES = 8 << 20  # of the input, read to find that many
MAX_REPORTED = 20  # bad documents reported one by one; the others are only counted


@dataclass(frozen=True)
class PreprocessOptions:
    """Settings of a preprocessing run."""

    files: Sequence[Path]  # read in this order
    keys: tuple[str, ...]  # JSON keys of the texts; each gets its own token files
    prefix: str  # path and beginning of the names of the token files
    choice: TokenizerOptions
    append_eod: bool = False  # append the end-of-document id to every text that is not empty
    engine: str = "auto"  # one of `engine.ENGINES`
    workers: int = 1  # processes that encode; 1 means this process
    skip_bad: bool = False  # skip invalid documents instead of failing
    block_bytes: int = BLOCK_BYTES  # bytes of text that a worker encodes at once


class PreprocessListener(Protocol):
    """Receiver of progress."""

    def update(self, totals: PreprocessTotals) -> None:
        """Show the totals; called after each block."""

    def message(self, text: str) -> None:
        """Report a message for the user."""


def output_prefix(prefix: str, key: str) -> str:
    """Return the prefix of the token files of a JSON key, as in Megatron-LM."""
    return f"{prefix}_{key}_document"


def write_dataset(
    plan: PreprocessOptions,
    tokenizer: Tokenizer,
    listener: PreprocessListener,
    check: Callable[[], None] = lambda: None,
) -> tuple[PreprocessTotals, EncodeEngine]:
    """Write ``<prefix>_<key>_document.{bin,idx,tokens.json}`` for every key, independent of the number of workers.

    The files of the tokenizer are copied to ``<prefix>_<key>_document.tokenizer/``. An empty text is a document without
    sequences and without end-of-document id. A bad document is skipped under all keys.

    Args:
        plan: settings.
        tokenizer: that of the plan.
        listener: receives the choice of engine, skipped documents and progress.
        check: called between blocks until the files are renamed to their final names; its exceptions end the work.

    Raises:
        DataError: if a document is invalid, or there is none. No file is left under its final name.
        OSError: if a file cannot be read or written.
    """
    _check_keys(plan)
    before = [file.stat() for file in plan.files]
    job = EncodeOptions(plan.keys, plan.choice.local(), tokenizer.fingerprint, plan.append_eod)
    statistics = _Statistics(plan.skip_bad, listener)
    Path(plan.prefix).parent.mkdir(parents=True, exist_ok=True)
    for key in plan.keys:
        for path in remove_unfinished_files(output_prefix(plan.prefix, key)):
            listener.message(f"removed {path}, left by a run that was killed")
    with ExitStack() as stack:
        workers = stack.enter_context(EncoderPool(job, plan.workers)) if plan.workers > 1 else None
        sample = read_sample(plan.files, plan.keys) if tokenizer.files and plan.engine != OWN_LIBRARY else []
        engine = choose_engine(tokenizer, sample, plan.engine)
        check()
        listener.message(f"engine: {engine.name} ({engine.reason})")
        writers = [stack.enter_context(_open_writer(output_prefix(plan.prefix, key), tokenizer)) for key in plan.keys]
        blocks = split_into_blocks(plan.files, plan.block_bytes)
        encode = BlockEncoder(job, tokenizer, engine)
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
            listener.update(statistics.totals)
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
        if not is_json_lines(file):
            check_single_key(file, plan.keys)


def _open_writer(prefix: str, tokenizer: Tokenizer) -> IndexedDatasetWriter:
    """Open a writer that also adds the tokenizer's record and files."""
    writer = IndexedDatasetWriter(prefix, id_dtype(tokenizer.vocab_size))
    writer.add_file(RECORD_SUFFIX, TokenizerRecord.of(tokenizer).to_bytes())
    for name, content in tokenizer.files.items():
        writer.add_file(f"{FILES_SUFFIX}/{name}", content)
    return writer


def read_sample(files: Iterable[Path], keys: Sequence[str]) -> list[str]:
    """Return the first texts of the input, at most `SAMPLE_BYTES` of them, without invalid documents.

    They are searched for in the first `SAMPLE_SEARCH_BYTES`, so that an input without valid texts fails soon.
    """
    found: list[str] = []
    size = searched = 0
    for read, texts in _documents(files, keys):
        for text in texts:
            found.append(text[: SAMPLE_BYTES - size])
            size += len(found[-1])
        searched += read
        if size >= SAMPLE_BYTES or searched >= SAMPLE_SEARCH_BYTES:
            break
    return found


def _documents(files: Iterable[Path], keys: Sequence[str]) -> Iterator[tuple[int, Sequence[str]]]:
    """Yield the size and the texts of each document; no texts for a bad one."""
    for block in split_into_blocks(list(files), SAMPLE_BYTES):
        if isinstance(block, LineBlock):
            for line in split_lines(block.read()):
                try:
                    yield len(line), parse_line(line, keys, block.file)
                except BadDocumentError:
                    yield len(line), ()
            continue
        for file in block.files:
            try:
                content = read_plain_text(file)
                yield len(content), (content.decode(),)
            except (BadDocumentError, UnicodeDecodeError):
                yield file.stat().st_size, ()


class _Statistics:
    """Totals over blocks. Tracks line numbers within files and reports bad documents."""

    def __init__(self, skip_bad: bool, listener: PreprocessListener) -> None:
        self.totals = PreprocessTotals()
        self._skip_bad = skip_bad
        self._listener = listener
        self._lines = 0  # lines of the file before the block
        self._in_file = 0  # documents of the file so far, including bad ones

    def add(self, block: Block, result: EncodedBlock) -> None:
        """Add a block.

        Raises:
            DataError: if engine and tokenizer disagree, or a document is bad and ``skip_bad`` is off.
        """
        if isinstance(block, LineBlock) and block.first:
            self._lines = self._in_file = 0
        if result.differs is not None:
            raise result.differs.of(self._lines)
        for bad in result.described:
            self._report_bad(bad)
        self.totals.bad += result.bad - len(result.described)
        self.totals.stored_bytes += block.stored
        self.totals.documents += result.documents
        self.totals.empty += result.empty
        self.totals.text_bytes += result.text_bytes
        if isinstance(block, LineBlock):
            self._end_block(block, result)

    def _end_block(self, block: LineBlock, result: EncodedBlock) -> None:
        self._in_file += result.documents + result.bad
        if block.trouble:
            self._report_bad(BadDocument(block.file, result.lines + 1, f" {block.trouble}", ("copy the file again",)))
        elif block.last and not self._in_file:
            empty = no_document_error(block.file)
            self._report_bad(BadDocument(block.file, 0, empty.seen, empty.fixes))
        self._lines += result.lines

    def _report_bad(self, bad: BadDocument) -> None:
        error = bad.of(self._lines, "--on-bad-line skip")
        if not self._skip_bad:
            raise error
        self.totals.bad += 1
        if self.totals.bad <= MAX_REPORTED:
            self._listener.message(f"passed over: {str(error).splitlines()[0]}")
        if self.totals.bad == MAX_REPORTED:
            self._listener.message("passed over: further ones are only counted")
