"""Documents cut into samples of equal length, in Megatron-LM's exact order.

The documents of a split are concatenated ``epochs`` times, each epoch shuffled. The resulting token stream is cut
every ``seq_length`` tokens (consecutive samples share one token: the last label of one is the first input of the
next), and the samples are shuffled. Three tables hold this order (`SampleOrder`). `build_sample_order` builds them;
`GPTDataset` reads samples through them from the memory-mapped files.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import DTypeLike, NDArray

from megatron.config.data_paths import split_shares
from megatron.data.dataset import Piece, Sample, SourceDataset, SourceUsage, Span, fingerprint, splitmix64
from megatron.data.errors import DataError
from megatron.data.indexed_dataset import IndexedDataset

# share of an epoch below which a partial last epoch is shuffled separately, as Megatron-LM does
SEPARATE_LAST_EPOCH_BELOW = 0.80
PLACES_IN_32_BITS = 2**31
SEQUENCES_AT_ONCE = 1 << 16  # so that intermediate arrays stay in the CPU cache


class SampleOrder(NamedTuple):
    """The three index tables of a dataset: where every sample lies."""

    document_index: NDArray[np.int32]  # int32 [epochs * sequences], sequence numbers in reading order
    # int [n + 1, 2]: place in `document_index` and token offset where sample j starts; it ends where row j + 1 starts
    sample_index: NDArray[Any]
    shuffle_index: NDArray[Any]  # uint32 [n], the sample at each place of the stream
    part: range  # the sequences of the split
    seq_length: int  # tokens per sample

    @property
    def epochs(self) -> int:
        """Passes over the split."""
        return len(self.document_index) // len(self.part)


class GPTDataset(SourceDataset):
    """Samples of ``seq_length`` tokens (``seq_length + 1`` ids) in the order of `build_sample_order`."""

    def __init__(self, indexed: IndexedDataset, order: SampleOrder) -> None:
        self.order, self.part, self.seq_length = order, order.part, order.seq_length
        self.epochs, self.largest_table = order.epochs, order.document_index
        self.source, self.spare = indexed.prefix, None
        self.tokens = indexed.count_tokens(order.part)  # in one epoch
        self._indexed = indexed

    def __len__(self) -> int:
        return len(self.order.shuffle_index)

    def source_usage(self, samples: int) -> tuple[SourceUsage, ...]:
        """Return the tokens that the first ``samples`` samples read."""
        return (SourceUsage(self.source, samples * self.seq_length, self.tokens),)

    @cached_property
    def fingerprint(self) -> str:
        """See `files_fingerprint`."""
        return files_fingerprint(self._indexed, self.part, self.seq_length)

    def sample_hashes(self, places: NDArray[np.int64]) -> NDArray[np.uint64]:
        """Hash the first sequence and offset, and the last sequence, of each of the samples ``places [n]``."""
        rows = self.order.shuffle_index[places].astype(np.int64)
        begin = self.order.sample_index.take(rows, axis=0)  # five times as fast as indexing with rows
        end = self.order.sample_index.take(rows + 1, axis=0)
        first = self.order.document_index.take(begin[:, 0]).astype(np.uint64)
        last = self.order.document_index.take(end[:, 0]).astype(np.uint64)
        return splitmix64(first << np.uint64(32) | begin[:, 1].astype(np.uint64)) ^ last

    def pieces(self, i: int) -> list[Piece]:
        """See `SourceDataset.pieces`."""
        if not 0 <= i < len(self):
            raise IndexError(f"sample {i} of a dataset of {len(self)}")
        return [
            Piece(sequence, offset, self._indexed.get(sequence, offset, n)) for sequence, offset, n in self._pieces(i)
        ]

    def assemble(self, pieces: Sequence[Piece], pad: int | None = None) -> Sample:
        """See `SourceDataset.assemble`."""
        text = np.concatenate([piece.ids for piece in pieces], dtype=np.int64)[: self.seq_length + 1]
        if pad is None:
            return Sample.of(text)
        missing = self.seq_length + 1 - len(text)
        counts = np.arange(1, self.seq_length + 1) < len(text)  # labels that are no padding
        return Sample.of(np.pad(text, (0, missing), constant_values=pad))._replace(loss_mask=counts.astype(np.float32))

    def epoch_of(self, i: int) -> int:
        """See `SourceDataset.epoch_of`."""
        return int(self.order.shuffle_index[i]) * self.seq_length // self.tokens

    def spans(self, i: int) -> tuple[Span, ...]:
        """See `Dataset.spans`."""
        lengths = self._indexed.lengths
        return tuple(
            Span(self.source, sequence, offset, int(lengths[sequence]) - offset if length is None else length)
            for sequence, offset, length in self._pieces(i)
        )

    def places_of(self, sequences: Mapping[str, NDArray[np.int64]]) -> NDArray[np.int64]:
        """See `Dataset.places_of`; in place of all samples, searches the order of the documents."""
        numbers = sequences.get(self.source, np.empty(0, np.int64))
        numbers = numbers[self._indexed.lengths[numbers] > 0]
        at = np.flatnonzero(np.isin(self.order.document_index, numbers))
        firsts = self.order.sample_index[:, 0]  # sample j reads the places firsts[j] to firsts[j + 1]
        begins = np.searchsorted(firsts[1:], at, side="left")
        ends = np.minimum(np.searchsorted(firsts, at, side="right"), len(self))
        changes = np.bincount(begins, minlength=len(self) + 1) - np.bincount(ends, minlength=len(self) + 1)
        return np.flatnonzero(np.cumsum(changes)[self.order.shuffle_index] > 0)

    def _pieces(self, i: int) -> Iterator[tuple[int, int, int | None]]:
        """Yield sequence, offset and number of tokens of the parts of sample ``i``; None for the rest of a sequence."""
        j = int(self.order.shuffle_index[i])
        (first, start), (last, end) = self.order.sample_index[j : j + 2].tolist()
        for place in range(first, last + 1):
            offset = start if place == first else 0
            yield int(self.order.document_index[place]), offset, end + 1 - offset if place == last else None


def files_fingerprint(indexed: IndexedDataset, part: range, seq_length: int) -> str:
    """Return 16 hexadecimal digits of the files' content, the sequences of the split and the sample length."""
    return fingerprint("files", indexed.fingerprint, part, seq_length)


def split_ranges(split: str, sequences: int) -> list[range]:
    """Return the sequences of the train, validation and test splits; an omitted weight is 0."""
    ends = [round(end * float(sequences)) for end in accumulate(split_shares(split), initial=0.0)]
    return [range(begin, end) for begin, end in pairwise(ends)]


def build_sample_order(
    lengths: NDArray[np.int32], part: range, num_samples: int | None, seq_length: int, seed: int
) -> SampleOrder:
    """Build the tables of at least ``num_samples`` samples, or of one epoch.

    Args:
        lengths: int32 ``[S]`` tokens of every sequence in the files.
        part: the sequences of this split.
        num_samples: samples needed; None for one epoch.
        seq_length: tokens per sample.
        seed: of both shuffles.
    """
    tokens = int(lengths[part.start : part.stop].sum(dtype=np.int64))
    if tokens == 0 or (num_samples is None and tokens <= seq_length):
        seen = f"a part of the data with {tokens} tokens holds no sample of {seq_length} + 1"
        raise DataError(seen, "more documents, or a smaller --seq-length")
    tokens_needed = 1 if num_samples is None else num_samples * seq_length + 1  # one more than the inputs: a label
    epochs = -(-tokens_needed // tokens)
    samples_per_epoch = (tokens - 1) // seq_length
    samples_before_last = ((epochs - 1) * tokens - 1) // seq_length
    separate = False  # whether the last epoch is shuffled separately
    if num_samples is not None and epochs > 1:
        # if only a small part of the last epoch is used, shuffling it in would displace samples of earlier epochs
        separate = num_samples - samples_before_last < int(SEPARATE_LAST_EPOCH_BELOW * samples_per_epoch)

    random = np.random.RandomState(seed)  # Megatron-LM's generator: the order depends on it
    sequences = np.arange(part.start, part.stop)
    repeats = (epochs - 1, 1) if separate else (epochs,)
    documents = _shuffled([np.tile(sequences, n) for n in repeats], np.int32, random)
    samples = _sample_index(lengths, documents, (epochs * tokens - 1) // seq_length, seq_length)
    count = len(samples) - 1
    cuts = (0, samples_before_last, count) if separate else (0, count)
    places = [np.arange(begin, end) for begin, end in pairwise(cuts)]
    shuffle = _shuffled(places, shuffle_dtype(count), random)
    return SampleOrder(documents, samples, shuffle, part, seq_length)


def shuffle_dtype(samples: int) -> DTypeLike:
    """Return the type of a table of numbers of samples, as in Megatron-LM."""
    return np.uint32 if samples < 2**32 - 2 else np.int64


def place_dtype(documents: int) -> DTypeLike:
    """Return the type of a table of places in a document index of this length."""
    return np.int32 if documents < PLACES_IN_32_BITS else np.int64


def _sample_index(
    lengths: NDArray[np.int32], documents: NDArray[np.int32], samples: int, seq_length: int
) -> NDArray[Any]:
    """Build the place in ``documents`` and the offset where each sample starts and the last ends: ``[samples + 1, 2]``.

    Sample ``j`` starts at token ``j * seq_length`` of the stream. So ``ceil(end / seq_length)`` samples start before a
    sequence's end; those that did not start before its begin start in it.
    """
    rows = np.empty((samples + 1, 2), place_dtype(len(documents)))
    begin = started = 0
    for place in range(0, len(documents), SEQUENCES_AT_ONCE):
        block = lengths[documents[place : place + SEQUENCES_AT_ONCE]]
        ends = begin + np.cumsum(block, dtype=np.int64)
        starts_before_end = -(-ends // seq_length)
        counts = np.diff(starts_before_end, prepend=started)
        here = slice(started, int(starts_before_end[-1]))
        rows[here, 0] = np.repeat(np.arange(place, place + len(block)), counts)
        rows[here, 1] = np.arange(here.start, here.stop) * seq_length - np.repeat(ends - block, counts)
        begin, started = int(ends[-1]), here.stop
    rows[0, 0] = 0  # if the first sequence is empty, the first sample starts in it, as in Megatron-LM
    return rows


def _shuffled(runs: Sequence[NDArray[np.int64]], dtype: DTypeLike, random: np.random.RandomState) -> NDArray[Any]:
    for run in runs:
        random.shuffle(run)  # 64-bit runs are fastest, and the type does not change the order
    return np.concatenate(runs, dtype=dtype, casting="unsafe")
