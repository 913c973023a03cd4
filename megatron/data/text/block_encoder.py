"""A block of text to a block of ids: what each worker of preprocessing does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron.data.errors import DataError
from megatron.data.files.indexed import id_dtype
from megatron.data.text.blocks import Block, Lines, Texts
from megatron.data.text.records import (
    BadDocumentError,
    check_utf8,
    plain_text,
    texts_of_good_lines,
    texts_of_line,
    whole_lines,
)
from megatron.data.tokenizers.encoded import Encoded, Tokenizer
from megatron.data.tokenizers.engine import FAST, OWN, Engine
from megatron.data.tokenizers.tokenizer import ByteTokenizer, TokenizerChoice

TOLD = 20  # bad documents of a block that are described; the others are counted
CHECKED = 300  # bytes of a block that the tokenizer itself encodes too


@dataclass(frozen=True)
class Job:
    """What a worker needs to know.

    Attributes:
        keys: where the texts of a line are.
        choice: the tokenizer.
        fingerprint: of the tokenizer, which must be the same in every worker.
        append_eod: end every text that is not empty with the id that ends a document.
    """

    keys: tuple[str, ...]
    choice: TokenizerChoice
    fingerprint: str
    append_eod: bool


class Bad(NamedTuple):
    """A document of a block that is not what it should be.

    Attributes:
        file: where it is.
        line: its number in the block, from 1 on; 0 for a plain file.
        seen: the sentence without its subject.
        fixes: what can be done.
    """

    file: Path
    line: int
    seen: str
    fixes: tuple[str, ...]

    def of(self, lines_before: int, *more_fixes: str) -> DataError:
        """The error, where ``lines_before`` lines of the file are in earlier blocks."""
        source = f"{self.file}:{lines_before + self.line}" if self.line else str(self.file)
        return DataError(source + self.seen, *self.fixes, *more_fixes)


class EncodedBlock(NamedTuple):
    """What became of a block.

    Attributes:
        columns: for each key, the ids of its texts in the type of the token files.
        lines: of the block, blank and bad ones too.
        documents: that were encoded.
        empty: texts of all columns that have no ids.
        text_bytes: of all texts, in UTF-8.
        bad: documents that were not encoded.
        told: the first of them.
        differs: where the engine and the tokenizer itself disagree.
    """

    columns: tuple[Encoded, ...]
    lines: int
    documents: int
    empty: int
    text_bytes: int
    bad: int
    told: tuple[Bad, ...]
    differs: Bad | None


class _Documents(NamedTuple):
    """Good documents of a block: for each key their texts in UTF-8, and for each document its file and line."""

    columns: list[list[bytes]]
    places: list[tuple[Path, int]]


class BlockEncoder:
    """Encodes blocks, one after the other."""

    def __init__(self, job: Job, tokenizer: Tokenizer, engine: Engine) -> None:
        self._job = job
        self._tokenizer = tokenizer
        self._engine = engine
        self._dtype = id_dtype(tokenizer.vocab_size)
        self._takes_bytes = isinstance(tokenizer, ByteTokenizer)
        self._bad: list[Bad] = []

    def __call__(self, block: Block) -> EncodedBlock:
        """The ids of the documents of a block, in their order.

        Raises:
            DataError: when the block cannot be read any more, or an id is not of the tokenizer.
        """
        self._bad = []
        documents, lines = self._lines(block) if isinstance(block, Lines) else self._plain(block)
        try:
            columns = self._encode(documents)
        except ValueError:
            documents = self._those_that_can_be_encoded(documents)
            columns = self._encode(documents)
        return EncodedBlock(
            columns=tuple(self._finished(column) for column in columns),
            lines=lines,
            documents=len(documents.places),
            empty=sum(int(np.count_nonzero(column.lengths == 0)) for column in columns),
            text_bytes=sum(sum(map(len, texts)) for texts in documents.columns),
            bad=len(self._bad),
            told=tuple(self._bad[:TOLD]),
            differs=self._check(documents),
        )

    def _lines(self, block: Lines) -> tuple[_Documents, int]:
        content = block.read()
        columns = texts_of_good_lines(content, self._job.keys)
        if columns is not None:
            places = [(block.file, number) for number in range(1, len(columns[0]) + 1)]
            return _Documents(columns, places), len(places)
        found: list[tuple[bytes, ...]] = []
        places = []
        lines = whole_lines(content)
        for number, line in enumerate(lines, 1):
            if not line or line.isspace():
                continue
            try:
                found.append(tuple(text.encode() for text in texts_of_line(line, self._job.keys, block.file)))
                places.append((block.file, number))
            except BadDocumentError as bad:
                self._bad.append(Bad(block.file, number, bad.seen, bad.fixes))
        return _Documents(self._columns(found), places), len(lines)

    def _plain(self, block: Texts) -> tuple[_Documents, int]:
        found: list[tuple[bytes, ...]] = []
        places = []
        for file in block.files:
            try:
                content = plain_text(file)
                if not self._takes_bytes:
                    check_utf8(content, file)
                found.append((content,))
                places.append((file, 0))
            except BadDocumentError as bad:
                self._bad.append(Bad(file, 0, bad.seen, bad.fixes))
        return _Documents(self._columns(found), places), 0

    def _columns(self, rows: Sequence[tuple[bytes, ...]]) -> list[list[bytes]]:
        return [[row[column] for row in rows] for column in range(len(self._job.keys))]

    def _encode(self, documents: _Documents) -> list[Encoded]:
        return [self._engine.encode_batch(texts) for texts in documents.columns]

    def _those_that_can_be_encoded(self, documents: _Documents) -> _Documents:
        """Without the documents that the tokenizer refuses, which are bad ones."""
        good: list[tuple[bytes, ...]] = []
        places = []
        for row, (file, line) in zip(zip(*documents.columns), documents.places):
            try:
                for text in row:
                    self._tokenizer.encode(text)
                good.append(row)
                places.append((file, line))
            except DataError as error:
                self._bad.append(Bad(file, line, f": {error.seen}", error.fixes))
            except ValueError as error:
                self._bad.append(Bad(file, line, f": {error}", ()))
        self._bad.sort(key=lambda bad: bad.line)
        return _Documents(self._columns(good), places)

    def _finished(self, column: Encoded) -> Encoded:
        """The column in the type of the files, with the ids that end documents."""
        ids, lengths = column
        if ids.size and not 0 <= ids.min() <= ids.max() < self._tokenizer.vocab_size:
            seen = f"the tokenizer gave ids {ids.min()}..{ids.max()}, but says that it has {self._tokenizer.vocab_size}"
            raise DataError(seen, "another --tokenizer-model")
        ids = ids.astype(self._dtype)
        return _with_ends(ids, lengths, self._tokenizer.eod) if self._job.append_eod else Encoded(ids, lengths)

    def _check(self, documents: _Documents) -> Bad | None:
        """A little of the block, encoded by the tokenizer itself too."""
        if not self._engine.name.startswith(FAST) or not documents.places:
            return None
        chance = Random(documents.columns[0][0][-CHECKED:])  # another place in every block, the same in every run
        which = chance.randrange(len(documents.places))
        text = max((texts[which] for texts in documents.columns), key=len)
        start = chance.randrange(max(1, len(text) - CHECKED))
        piece = text[start : start + CHECKED].decode(errors="ignore")
        if np.array_equal(self._engine.encode_batch([piece]).ids, self._tokenizer.encode(piece)):
            return None
        seen = f": {self._engine.name} and {self._tokenizer.library} give different ids for part of it"
        return Bad(*documents.places[which], seen, (f"--engine {OWN}",))


def _with_ends(ids: NDArray[Any], lengths: NDArray[np.int64], end: int) -> Encoded:
    """``end`` after every text that is not empty."""
    ends = np.cumsum(lengths)[lengths > 0]
    return Encoded(np.insert(ids, ends, end), lengths + (lengths > 0))
