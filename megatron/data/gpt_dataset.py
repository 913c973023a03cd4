"""Sequences of documents cut into samples of equal length, in Megatron-LM's exact order.

The documents of a split are laid end to end, ``epochs`` times, each epoch shuffled; the line is cut every
``seq_length`` tokens (neighbouring samples share one token: the last label of one is the first token of the next),
and the samples are shuffled. Three tables say all this (`SampleOrder`); building them is separate from reading.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike, NDArray

from megatron.config.data_paths import split_shares
from megatron.data.dataset import Dataset, Reading, Sample
from megatron.data.digest import fingerprint, mix
from megatron.data.errors import DataError
from megatron.data.files.indexed import IndexedDataset

SEPARATE_BELOW = 0.80  # share of an epoch's samples below which a cut-off last epoch is shuffled apart
PLACES_IN_32_BITS = 2**31
SEQUENCES_AT_ONCE = 1 << 16  # few enough that what is computed from them stays in the processor's cache


class SampleOrder(NamedTuple):
    """Where every sample of a dataset lies.

    Attributes:
        documents: int32 ``[epochs * sequences]``, sequence numbers in the order they are read.
        samples: int ``[n + 1, 2]``, sample ``j`` starts in the sequence at place ``samples[j, 0]`` of ``documents``,
            at token ``samples[j, 1]``, and ends where row ``j + 1`` says.
        shuffle: uint32 ``[n]``, the sample at each place of the stream.
        epochs: passes over the split that were laid end to end.
        tokens: tokens of one pass.
        part: the sequences of the split.
        seq_length: tokens of a sample.
    """

    documents: NDArray[np.int32]
    samples: NDArray[Any]
    shuffle: NDArray[Any]
    epochs: int
    tokens: int
    part: range
    seq_length: int

    @property
    def tables(self) -> dict[str, NDArray[Any]]:
        """The three tables, all that takes time to build."""
        return {"documents": self.documents, "samples": self.samples, "shuffle": self.shuffle}

    @classmethod
    def of(
        cls, tables: Mapping[str, NDArray[Any]], lengths: NDArray[np.int32], part: range, seq_length: int
    ) -> SampleOrder:
        """The order with the given ``tables`` of sequences ``part`` of files whose sequences have ``lengths``."""
        tokens = int(lengths[part.start : part.stop].sum(dtype=np.int64))
        return cls(
            **tables, epochs=len(tables["documents"]) // len(part), tokens=tokens, part=part, seq_length=seq_length
        )


class GPTDataset(Dataset):
    """Samples of ``seq_length`` tokens (``seq_length + 1`` ids) in the order of `build_order`."""

    def __init__(self, indexed: IndexedDataset, order: SampleOrder) -> None:
        self.order = order
        self.seq_length = order.seq_length
        self.source = indexed.prefix
        self._indexed = indexed

    def __len__(self) -> int:
        return len(self.order.shuffle)

    def readings(self, samples: int) -> tuple[Reading, ...]:
        """How much of the files ``samples`` samples read."""
        return (Reading(self.source, samples * self.seq_length, self.order.tokens),)

    @cached_property
    def fingerprint(self) -> str:
        """Of the files' content, the sequences of the split and the length of a sample."""
        return fingerprint("files", self._indexed.fingerprint, self.order.part, self.order.seq_length)

    def identities(self, places: NDArray[np.int64]) -> NDArray[np.uint64]:
        """Where the samples ``places [n]`` begin in which sequence, and in which sequence they end."""
        rows = self.order.shuffle[places].astype(np.int64)
        # take is five times as fast as indexing with rows
        begin, end = (self.order.samples.take(at, axis=0) for at in (rows, rows + 1))
        first, last = (self.order.documents.take(row[:, 0]).astype(np.uint64) for row in (begin, end))
        return mix(first << np.uint64(32) | begin[:, 1].astype(np.uint64)) ^ last

    def __getitem__(self, i: int) -> Sample:
        if not 0 <= i < len(self):
            raise IndexError(f"sample {i} of a dataset of {len(self)}")
        j = int(self.order.shuffle[i])
        (first, start), (last, end) = self.order.samples[j : j + 2].tolist()
        parts = []
        for place in range(first, last + 1):
            offset = start if place == first else 0
            length = end + 1 - offset if place == last else None
            parts.append(self._indexed.get(int(self.order.documents[place]), offset, length))
        return Sample.of(np.concatenate(parts, dtype=np.int64))


def split_ranges(split: str, sequences: int) -> list[range]:
    """Sequences of the train, validation and test parts; a weight left out is 0.

    Raises:
        DataError: when ``split`` is not one to three weights.
    """
    try:
        shares = split_shares(split)
    except ValueError as error:
        raise DataError(f"split {error}", "--split 969,30,1") from error
    ends = [round(end * float(sequences)) for end in accumulate(shares, initial=0.0)]
    return [range(begin, end) for begin, end in zip(ends, ends[1:])]


def build_order(
    lengths: NDArray[np.int32], part: range, num_samples: int | None, seq_length: int, seed: int
) -> SampleOrder:
    """The tables of a dataset of at least ``num_samples`` samples, or of one epoch when it is None.

    ``lengths`` are the tokens of every sequence of the files, ``part`` the sequences of this split.

    Raises:
        DataError: when the split has no tokens, or one epoch was asked for and is shorter than a sample.
    """
    tokens = int(lengths[part.start : part.stop].sum(dtype=np.int64))
    epochs = _epochs(tokens, num_samples, seq_length)
    apart = _samples_before_last_epoch(tokens, epochs, num_samples, seq_length)
    random = np.random.RandomState(seed)  # this generator is part of the order
    documents = _document_index(part, epochs, apart is not None, random)
    samples = _sample_index(lengths, documents, (epochs * tokens - 1) // seq_length, seq_length)
    shuffle = _shuffle_index(len(samples) - 1, apart, random)
    return SampleOrder(documents, samples, shuffle, epochs, tokens, part, seq_length)


def _epochs(tokens: int, num_samples: int | None, seq_length: int) -> int:
    """Passes over the split that hold the samples asked for, and the one token after them."""
    if tokens == 0 or (num_samples is None and tokens <= seq_length):
        sentence = f"a part of the data with {tokens} tokens holds no sample of {seq_length} + 1"
        raise DataError(sentence, "more documents, or a smaller --seq-length")
    return 1 if num_samples is None else max(1, -(-(num_samples * seq_length + 1) // tokens))


def _samples_before_last_epoch(tokens: int, epochs: int, num_samples: int | None, seq_length: int) -> int | None:
    """Samples of all epochs but the last when that is shuffled apart, else None.

    It is when only a smaller part of it is used: shuffled in, it would crowd out samples of the epochs before.
    """
    if num_samples is None or epochs == 1:
        return None
    before = ((epochs - 1) * tokens - 1) // seq_length
    per_epoch = (tokens - 1) // seq_length
    return before if num_samples - before < int(SEPARATE_BELOW * per_epoch) else None


def _document_index(part: range, epochs: int, apart: bool, random: np.random.RandomState) -> NDArray[np.int32]:
    once = np.arange(part.start, part.stop)
    runs = [np.tile(once, n) for n in ((epochs - 1, 1) if apart else (epochs,))]
    return _shuffled(runs, np.int32, random)


def _sample_index(
    lengths: NDArray[np.int32], documents: NDArray[np.int32], samples: int, seq_length: int
) -> NDArray[Any]:
    """Place and offset where each of ``samples`` samples starts, and where the last ends: int ``[samples + 1, 2]``.

    ``lengths`` are those of all sequences, ``documents`` the sequences in reading order. Sample ``j`` starts at token
    ``j * seq_length`` of the line. So ``ceil(end / seq_length)`` samples start before a sequence's end; those that did
    not start before its begin start in it.
    """
    rows = np.empty((samples + 1, 2), np.int32 if len(documents) < PLACES_IN_32_BITS else np.int64)
    begin = started = 0
    for place in range(0, len(documents), SEQUENCES_AT_ONCE):
        block = lengths[documents[place : place + SEQUENCES_AT_ONCE]]
        ends = begin + np.cumsum(block, dtype=np.int64)
        upto = -(-ends // seq_length)
        counts = np.diff(upto, prepend=started)
        here = slice(started, int(upto[-1]))
        rows[here, 0] = np.repeat(np.arange(place, place + len(block)), counts)
        rows[here, 1] = np.arange(here.start, here.stop) * seq_length - np.repeat(ends - block, counts)
        begin, started = int(ends[-1]), here.stop
    rows[0, 0] = 0  # where an empty sequence comes first, the first sample starts in it
    return rows


def _shuffle_index(samples: int, apart: int | None, random: np.random.RandomState) -> NDArray[Any]:
    cuts = (0, samples) if apart is None else (0, apart, samples)
    runs = [np.arange(begin, end) for begin, end in zip(cuts, cuts[1:])]
    return _shuffled(runs, np.uint32 if samples < 2**32 - 2 else np.int64, random)


def _shuffled(runs: Sequence[NDArray[np.int64]], dtype: DTypeLike, random: np.random.RandomState) -> NDArray[Any]:
    """Each run shuffled, end to end. The order is the same for every type, and numpy is fastest at 64 bits."""
    for run in runs:
        random.shuffle(run)
    return np.concatenate(runs, dtype=dtype, casting="unsafe")
