"""Documents, texts and origins of the spans of token files that samples are read from. No torch."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from megatron.data.dataset import Span
from megatron.data.document_origins import DocumentOrigins
from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.tokenizers.tokenizer import load_recorded_tokenizer


@dataclass(frozen=True)
class DocumentPart:
    """The tokens of a sample that come from one sequence of a document."""

    source: str  # prefix of the token files
    document: int
    first: int  # tokens of the document before the first one
    tokens: int  # number of tokens
    of: int  # tokens of the document
    file: str | None  # input file of the document, if it is recorded
    row: int | None  # line or row in it, from 1; None for a file that is one document
    text: str | None  # of the first tokens; None without a tokenizer
    ids: list[int]  # the first ones


class DocumentFinder:
    """Finds documents, texts and origins of spans; opens each file once."""

    def __init__(self, shown: int) -> None:
        """Show the first ``shown`` tokens of each part."""
        self._shown = shown
        self._data = cache(lambda prefix: IndexedDataset(prefix, verify=False))
        self._origins = cache(DocumentOrigins.open)
        self._tokenizer = cache(load_recorded_tokenizer)

    def document(self, span: Span) -> int:
        """Return the document that a span is of."""
        return int(np.searchsorted(self._data(span.source).documents, span.sequence, side="right")) - 1

    def sequences(self, documents: Collection[tuple[str, int]]) -> dict[str, NDArray[np.int64]]:
        """Return the sequences of documents, ascending, by source."""
        found: dict[str, list[int]] = {}
        for source, document in sorted(documents):
            first, last = self._data(source).documents[document : document + 2].tolist()
            found.setdefault(source, []).extend(range(first, last))
        return {source: np.array(numbers, dtype=np.int64) for source, numbers in found.items()}

    def origin(self, source: str, document: int) -> tuple[str | None, int | None]:
        """Return the input file of a document and its line or row, each None if it is not recorded."""
        origins = self._origins(source, self._data(source).num_documents)
        file, row = (None if origins is None else origins.locate(document)) or (None, None)
        return file, row or None

    def part(self, span: Span) -> DocumentPart:
        """Return the part of a document that a span holds."""
        data, document = self._data(span.source), self.document(span)
        first, last = data.documents[document : document + 2].tolist()
        before = int(data.lengths[first : span.sequence].sum(dtype=np.int64)) + span.offset
        whole = int(data.lengths[first:last].sum(dtype=np.int64))
        ids = data.get(span.sequence, span.offset, min(span.tokens, self._shown)).tolist()
        file, row = self.origin(span.source, document)
        text = self.text(span.source, ids)
        return DocumentPart(span.source, document, before, span.tokens, whole, file, row, text, ids)

    def text(self, source: str, ids: Sequence[int]) -> str | None:
        """Return the text of ids of a source; None without a tokenizer, or if it lacks one of them."""
        tokenizer = self._tokenizer(source)
        known = tokenizer is not None and all(0 <= i < tokenizer.vocab_size for i in ids)
        return tokenizer.decode(list(ids)) if tokenizer is not None and known else None
