"""Text files to token files."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from megatron.data.errors import DataError
from megatron.data.files.indexed import IndexedDatasetWriter, id_dtype, remove_leftovers
from megatron.data.files.indexed_writer import publish_together
from megatron.data.text.block_encoder import Bad, BlockEncoder, EncodedBlock, Job
from megatron.data.text.blocks import BLOCK_BYTES, Block, Lines, cut, holds_lines
from megatron.data.text.corpus import check_plain
from megatron.data.text.progress import Totals
from megatron.data.text.records import BadDocumentError, no_document, plain_text, texts_of_line, whole_lines
from megatron.data.text.workers import Workers
from megatron.data.tokenizers.encoded import Tokenizer
from megatron.data.tokenizers.engine import OWN, Engine, choose_engine
from megatron.data.tokenizers.tokenizer import FOLDER, RECORD, TokenizerChoice, TokenizerRecord

SAMPLE_BYTES = 1 << 20  # of texts, on which a fast engine proves itself
SEARCHED_BYTES = 8 << 20  # of the input, in which they are looked for
TOLD = 20  # bad documents that are told one by one


@dataclass(frozen=True)
class Plan:
    """What is to be done.

    Attributes:
        files: to read, in this order.
        keys: where an object's texts are; each gets token files of its own.
        prefix: path and beginning of the names of the token files.
        choice: the tokenizer.
        append_eod: end every text that is not empty with the id that ends a document.
        engine: one of `engine.WISHES`.
        workers: processes that encode; 1 is this one.
        skip_bad: pass over documents that are not what they should be.
        block_bytes: of text that a worker takes at once.
    """

    files: Sequence[Path]
    keys: tuple[str, ...]
    prefix: str
    choice: TokenizerChoice
    append_eod: bool = False
    engine: str = "auto"
    workers: int = 1
    skip_bad: bool = False
    block_bytes: int = BLOCK_BYTES


class Listener(Protocol):
    """Who is told how it goes."""

    def update(self, totals: Totals) -> None:
        """A block was written."""

    def say(self, sentence: str) -> None:
        """Something a person should know."""


def output_prefix(prefix: str, key: str) -> str:
    """Where Megatron-LM's preprocessing puts the documents of a JSON key."""
    return f"{prefix}_{key}_document"


def write_dataset(
    plan: Plan, tokenizer: Tokenizer, listener: Listener, check: Callable[[], None] = lambda: None
) -> tuple[Totals, Engine]:
    """Write ``<prefix>_<key>_document.{bin,idx,tokens.json}`` for every key, byte for byte the same for any workers.

    The files of the tokenizer are copied to ``<prefix>_<key>_document.tokenizer/``. An empty text is a document of no
    sequence, and gets no end-of-document id. A document that is passed over is so under all keys.

    Args:
        plan: what to do.
        tokenizer: that of the plan.
        listener: is told the engine, what is passed over, and how far it is.
        check: called between steps, and not any more once files get their names; what it raises ends the work.

    Raises:
        DataError: when a document is not what it should be, or there is none; no file is left under its name.
        OSError: when a file cannot be read or written.
    """
    _check_keys(plan)
    states = [_state(file) for file in plan.files]
    job = Job(plan.keys, plan.choice.local(), tokenizer.fingerprint, plan.append_eod)
    account = _Account(plan.skip_bad, listener)
    Path(plan.prefix).parent.mkdir(parents=True, exist_ok=True)
    for key in plan.keys:
        for path in remove_leftovers(output_prefix(plan.prefix, key)):
            listener.say(f"removed {path}, which a run that was killed had left")
    with ExitStack() as stack:
        workers = stack.enter_context(Workers(job, plan.workers)) if plan.workers > 1 else None
        sample = sample_texts(plan.files, plan.keys) if tokenizer.files and plan.engine != OWN else []
        engine = choose_engine(tokenizer, sample, plan.engine)
        check()
        listener.say(f"engine: {engine.name} ({engine.reason})")
        writers = [stack.enter_context(_open(output_prefix(plan.prefix, key), tokenizer)) for key in plan.keys]
        blocks = cut(plan.files, plan.block_bytes)
        here = BlockEncoder(job, tokenizer, engine)
        results = (
            ((block, here(block)) for block in blocks)
            if workers is None
            else workers.encoded(blocks, engine.name, check)
        )
        encoded = stack.enter_context(closing(results))
        for block, result in encoded:
            check()
            account.settle(block, result)
            for writer, column in zip(writers, result.columns):
                writer.add_documents(*column)
            account.totals.tokens = sum(writer.num_tokens for writer in writers)
            listener.update(account.totals)
        _check_unchanged(plan.files, states)
        if not account.totals.tokens:
            seen = f"the documents of the input are all empty ({account.totals.documents:,})"
            raise DataError(seen, "another --input")
        publish_together(writers)
    return account.totals, engine


def _check_keys(plan: Plan) -> None:
    if len(set(plan.keys)) < len(plan.keys):
        raise DataError(f"a key is named twice: {', '.join(plan.keys)}", "--json-keys text")
    for key in plan.keys:
        if "/" in key:
            seen = f"--json-keys {key}: the name of the files would hold it, and a name cannot hold '/'"
            raise DataError(seen, "rename the key in the input")
    for file in plan.files:
        if not holds_lines(file):
            check_plain(file, plan.keys)


def _state(file: Path) -> tuple[int, int]:
    """What differs when a file was written to: its size, and when that was."""
    state = file.stat()
    return state.st_size, state.st_mtime_ns


def _check_unchanged(files: Sequence[Path], states: Sequence[tuple[int, int]]) -> None:
    for file, state in zip(files, states):
        if _state(file) != state:
            raise DataError(f"{file} was changed while it was read", "start again when nobody writes it")


def _open(prefix: str, tokenizer: Tokenizer) -> IndexedDatasetWriter:
    """A writer that will also leave what is needed to know the tokenizer."""
    writer = IndexedDatasetWriter(prefix, id_dtype(tokenizer.vocab_size))
    writer.leave_no(FOLDER)
    writer.add_file(RECORD, TokenizerRecord.of(tokenizer).to_bytes())
    for name, content in tokenizer.files.items():
        writer.add_file(f"{FOLDER}/{name}", content)
    return writer


def sample_texts(files: Iterable[Path], keys: Sequence[str]) -> list[str]:
    """The first texts of the input, `SAMPLE_BYTES` of them at most; what cannot be read is left out.

    They are looked for in the first `SEARCHED_BYTES`, so that an input without texts is told of soon.
    """
    found: list[str] = []
    size = searched = 0
    for read, texts in _readable(files, keys):
        for text in texts:
            found.append(text[: SAMPLE_BYTES - size])
            size += len(found[-1])
        searched += read
        if size >= SAMPLE_BYTES or searched >= SEARCHED_BYTES:
            break
    return found


def _readable(files: Iterable[Path], keys: Sequence[str]) -> Iterator[tuple[int, Sequence[str]]]:
    """Documents, bad ones without texts, and how many bytes they are."""
    for block in cut(list(files), SAMPLE_BYTES):
        if isinstance(block, Lines):
            for line in whole_lines(block.read()):
                try:
                    yield len(line), texts_of_line(line, keys, block.file)
                except BadDocumentError:
                    yield len(line), ()
            continue
        for file in block.files:
            try:
                content = plain_text(file)
                yield len(content), (content.decode(),)
            except (BadDocumentError, UnicodeDecodeError):
                yield file.stat().st_size, ()


class _Account:
    """Adds the blocks up, knows which line of its file each begins with, and tells what is wrong with documents."""

    def __init__(self, skip_bad: bool, listener: Listener) -> None:
        self.totals = Totals()
        self._skip_bad = skip_bad
        self._listener = listener
        self._lines = 0  # of the file, before the block
        self._in_file = 0  # documents of the file, good and bad

    def settle(self, block: Block, result: EncodedBlock) -> None:
        """Count a block.

        Raises:
            DataError: when the engine is wrong, or a document is bad and bad ones are not passed over.
        """
        if isinstance(block, Lines) and block.first:
            self._lines = self._in_file = 0
        if result.differs is not None:
            raise result.differs.of(self._lines)
        for bad in result.told:
            self._tell(bad)
        self.totals.bad += result.bad - len(result.told)
        self.totals.stored_bytes += block.stored
        self.totals.documents += result.documents
        self.totals.empty += result.empty
        self.totals.text_bytes += result.text_bytes
        if isinstance(block, Lines):
            self._end_block(block, result)

    def _end_block(self, block: Lines, result: EncodedBlock) -> None:
        self._in_file += result.documents + result.bad
        if block.trouble:
            self._tell(Bad(block.file, result.lines + 1, f" {block.trouble}", ("copy the file again",)))
        elif block.last and not self._in_file:
            empty = no_document(block.file)
            self._tell(Bad(block.file, 0, empty.seen, empty.fixes))
        self._lines += result.lines

    def _tell(self, bad: Bad) -> None:
        error = bad.of(self._lines, "--on-bad-line skip")
        if not self._skip_bad:
            raise error
        self.totals.bad += 1
        if self.totals.bad <= TOLD:
            self._listener.say(f"passed over: {str(error).splitlines()[0]}")
        if self.totals.bad == TOLD:
            self._listener.say("passed over: others are counted, not told")
