"""Statistics of a pair of token files: counts, document lengths, sample documents, and a check of every id."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.prefixes import local_prefix
from megatron.data.tokenizers.base import Tokenizer

DOCUMENT_BLOCK, TOKEN_BLOCK = 1 << 20, 1 << 22  # per block
SAMPLE_TOKENS = 256  # shown of a document


class ValueCounts:
    """Histogram of whole numbers; memory grows with the number of distinct values."""

    def __init__(self) -> None:
        self.values = np.zeros(0, dtype=np.int64)  # int64 [n], the numbers, ascending
        self.counts = np.zeros(0, dtype=np.int64)  # int64 [n], occurrences

    def add(self, numbers: NDArray[np.integer[Any]]) -> None:
        """Count ``numbers [n]``."""
        if not numbers.size:
            return
        low, high = int(numbers.min()), int(numbers.max())
        if high - low < 2 * TOKEN_BLOCK:  # a small table is much faster than sorting
            table = np.bincount(numbers.astype(np.int64) - low)
            values, counts = np.flatnonzero(table) + low, table[table > 0]
        else:
            values, counts = np.unique(numbers.astype(np.int64), return_counts=True)
        self.values, place = np.unique(np.concatenate((self.values, values)), return_inverse=True)
        self.counts = np.bincount(place, np.concatenate((self.counts, counts))).astype(np.int64)

    @property
    def total(self) -> int:
        """Numbers counted."""
        return int(self.counts.sum())

    @property
    def mean(self) -> float:
        """Their mean; 0 without any."""
        return float(self.values @ self.counts) / max(self.total, 1)

    def quantile(self, share: float) -> int:
        """Return the smallest number that at least ``share`` of all numbers do not exceed; 0 without any."""
        if not self.total:
            return 0
        return int(self.values[np.searchsorted(np.cumsum(self.counts), share * self.total)])

    def most(self, k: int) -> list[tuple[int, int]]:
        """Return the ``k`` most frequent numbers with their counts; of equally frequent ones the smaller first."""
        first = np.argsort(-self.counts, kind="stable")[:k]
        return list(zip(self.values[first].tolist(), self.counts[first].tolist()))


@dataclass(frozen=True)
class DatasetSummary:
    """The counts of a pair."""

    documents: int
    empty_documents: int
    sequences: int
    empty_sequences: int
    tokens: int
    dtype: str
    bin_bytes: int
    idx_bytes: int
    lengths: ValueCounts  # tokens of each document that is not empty


def summarize(data: IndexedDataset) -> DatasetSummary:
    """Count what the index holds, block by block."""
    lengths = ValueCounts()
    for bounds in document_bounds(data):
        tokens = np.diff(bounds)
        lengths.add(tokens[tokens > 0])
    blocks = (data.lengths[first : first + DOCUMENT_BLOCK] for first in range(0, len(data), DOCUMENT_BLOCK))
    documents = len(data.documents) - 1
    return DatasetSummary(
        documents=documents,
        empty_documents=documents - lengths.total,
        sequences=len(data),
        empty_sequences=sum(int((block == 0).sum()) for block in blocks),
        tokens=data.num_tokens,
        dtype=data.dtype.name,
        bin_bytes=data.tokens.nbytes,
        idx_bytes=os.path.getsize(f"{local_prefix(data.prefix)}.idx"),
        lengths=lengths,
    )


def document_bounds(data: IndexedDataset) -> Iterator[NDArray[np.int64]]:
    """Yield the tokens before each document of a block and after its last, int64 ``[n + 1]``, for each block."""
    before = 0
    for first in range(0, len(data.documents) - 1, DOCUMENT_BLOCK):
        sequences = data.documents[first : first + DOCUMENT_BLOCK + 1]
        lengths = data.lengths[sequences[0] : sequences[-1]]
        tokens = np.concatenate(([before], before + np.cumsum(lengths, dtype=np.int64)))
        yield tokens[sequences - sequences[0]]
        before = int(tokens[-1])


@dataclass(frozen=True)
class IdCheck:
    """Result of checking every id of a pair."""

    ids: ValueCounts  # occurrences of each id
    wrong: int  # ids below 0 or not below the vocabulary size
    first_wrong: str | None  # the first of these, with its position
    ended: int | None  # documents whose last token is `eod`; None if that is unknown


def check_ids(
    data: IndexedDataset, vocab_size: int | None, eod: int | None, report: Callable[[int], None] = lambda _: None
) -> IdCheck:
    """Check every id, block by block, and ``report`` their bytes; ``vocab_size`` and ``eod`` are None if unknown."""
    ids, wrong, first = ValueCounts(), 0, None
    for start in range(0, data.num_tokens, TOKEN_BLOCK):
        block = data.tokens[start : start + TOKEN_BLOCK]
        ids.add(block)
        if block.min() < 0 or (vocab_size is not None and block.max() >= vocab_size):
            places = np.flatnonzero((block < 0) | (block >= (np.inf if vocab_size is None else vocab_size)))
            wrong += len(places)
            first = first or f"{block[places[0]]} is {describe_position(data, start + int(places[0]))}"
        report(block.nbytes)
    if eod is None:
        return IdCheck(ids, wrong, first, None)
    return IdCheck(ids, wrong, first, sum(_count_last(data, bounds, eod) for bounds in document_bounds(data)))


def _count_last(data: IndexedDataset, bounds: NDArray[np.int64], eod: int) -> int:
    """Return how many documents between ``bounds [n + 1]`` end with ``eod``; reads blocks, in order."""
    last, count = bounds[1:][np.diff(bounds) > 0] - 1, 0
    while last.size:
        block = data.tokens[int(last[0]) : int(last[0]) + TOKEN_BLOCK]
        here = np.searchsorted(last, last[0] + len(block))
        count += int((block[last[:here] - last[0]] == eod).sum())
        last = last[here:]
    return count


def describe_position(data: IndexedDataset, token: int) -> str:
    """Describe where token number ``token`` is in the data."""
    sequence = int(np.searchsorted(data.pointers, token * data.dtype.itemsize, side="right")) - 1
    document = int(np.searchsorted(data.documents, sequence, side="right")) - 1
    first = int(data.pointers[data.documents[document]]) // data.dtype.itemsize
    return f"token {token - first} of document {document}"


@dataclass(frozen=True)
class DocumentSample:
    """One document of a pair, to look at."""

    document: int  # its number
    tokens: int  # its length
    ids: list[int | float]  # the first ones, at most `SAMPLE_TOKENS`
    text: str | None  # of these ids; None without a tokenizer, or if it lacks one of them


def sample_documents(data: IndexedDataset, n: int, tokenizer: Tokenizer | None) -> list[DocumentSample]:
    """Return ``n`` evenly spaced documents from the first to the last; all if there are no more."""
    documents = len(data.documents) - 1
    samples = []
    for document in sorted({*np.linspace(0, documents - 1, min(n, documents)).astype(np.int64).tolist()}):
        first, last = data.documents[document : document + 2].tolist()
        tokens = int(data.lengths[first:last].sum(dtype=np.int64))
        start = int(data.pointers[first]) // data.dtype.itemsize if tokens else 0
        ids = data.tokens[start : start + min(tokens, SAMPLE_TOKENS)].tolist()
        known = tokenizer is not None and all(isinstance(i, int) and 0 <= i < tokenizer.vocab_size for i in ids)
        samples.append(DocumentSample(document, tokens, ids, tokenizer.decode(ids) if tokenizer and known else None))
    return samples
