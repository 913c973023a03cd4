"""Encode a block of text: the work of each preprocessing worker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import NamedTuple

import numpy as np

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

TOLD = 20  # bad documents of a block described; the others are only counted
CHECKED = 300  # bytes of a block that the tokenizer's own library encodes too


@dataclass(frozen=True)
class Job:
    """Settings of a worker."""

    keys: tuple[str, ...]  # JSON keys of the texts
    choice: TokenizerChoice
    fingerprint: str  # of the tokenizer, compared in every worker
    append_eod: bool  # append the end-of-document id to every text that is not empty


class Bad(NamedTuple):
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

    columns: tuple[Encoded, ...]  # for each key, the ids of its texts in the dtype of the token files
    lines: int  # including blank and bad ones
    documents: int  # encoded
    empty: int  # texts of all columns without ids
    text_bytes: int  # UTF-8 bytes of all texts
    bad: int  # documents not encoded
    described: tuple[Bad, ...]  # the first `MAX_DESCRIBED` of them
    differs: Bad | None  # set if engine and tokenizer disagree


class _Documents(NamedTuple):
    """Valid documents of a block."""

    columns: list[list[bytes]]  # for each key, the texts in UTF-8
    places: list[tuple[Path, int]]  # file and line of each document


class BlockEncoder:
    """Encode blocks one after the other."""

    def __init__(self, job: Job, tokenizer: Tokenizer, engine: Engine) -> None:
        self._job = job
        self._tokenizer = tokenizer
        self._engine = engine
        self._dtype = id_dtype(tokenizer.vocab_size)
        self._takes_bytes = isinstance(tokenizer, ByteTokenizer)
        self._bad: list[Bad] = []

    def __call__(self, block: Block) -> EncodedBlock:
        """Return the ids of a block's documents.

        Raises:
            DataError: if the block cannot be read any more, or the tokenizer returns an id outside its vocabulary.
        """
        self._bad = []
        documents, lines = self._read_lines(block) if isinstance(block, Lines) else self._read_plain(block)
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
            described=tuple(self._bad[:TOLD]),
            differs=self._spot_check(documents),
        )

    def _read_lines(self, block: Lines) -> tuple[_Documents, int]:
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

    def _read_plain(self, block: Texts) -> tuple[_Documents, int]:
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
                self._bad.append(Bad(file, line, f": {error.seen}", error.fixes))
            except ValueError as error:
                self._bad.append(Bad(file, line, f": {error}", ()))
        self._bad.sort(key=lambda bad: bad.line)
        return _Documents(self._columns(good), places)

    def _to_file_dtype(self, column: Encoded) -> Encoded:
        """Check the ids, convert them to the dtype of the files and append the end-of-document ids."""
        ids, lengths = column
        if ids.size and not 0 <= ids.min() <= ids.max() < self._tokenizer.vocab_size:
            seen = (
                f"the tokenizer gave ids {ids.min()}..{ids.max()}, but its vocab_size is {self._tokenizer.vocab_size}"
            )
            raise DataError(seen, "another --tokenizer-model")
        ids = ids.astype(self._dtype)
        if not self._job.append_eod:
            return Encoded(ids, lengths)
        ends = np.cumsum(lengths)[lengths > 0]
        return Encoded(np.insert(ids, ends, self._tokenizer.eod), lengths + (lengths > 0))

    def _spot_check(self, documents: _Documents) -> Bad | None:
        """Compare a few ids of gigatoken with those of the tokenizer's own library."""
        if not self._engine.name.startswith(FAST) or not documents.places:
            return None
        generator = Random(documents.columns[0][0][-CHECKED:])  # varies by block, equal in every run
        index = generator.randrange(len(documents.places))
        text = max((texts[index] for texts in documents.columns), key=len)
        start = generator.randrange(max(1, len(text) - CHECKED))
        excerpt = text[start : start + CHECKED].decode(errors="ignore")
        if np.array_equal(self._engine.encode_batch([excerpt]).ids, self._tokenizer.encode(excerpt)):
            return None
        seen = f": {self._engine.name} and {self._tokenizer.library} give different ids for part of it"
        return Bad(*documents.places[index], seen, (f"--engine {OWN}",))
