"""Documents packed into samples without truncation, by best-fit decreasing: ``--packing best-fit``.

A document longer than a sample is cut into full samples and a rest; no other document is cut. The pieces are packed by
best-fit decreasing (Ding et al., "Fewer Truncations Improve Language Modeling", arXiv 2404.10830): from the longest to
the shortest, each goes to the fullest sample with room for it. The rest of a sample is padding, without loss.

Only lengths decide the packing, so it is computed from their histogram (`pack`), and samples with equal lengths are one
row of a table. In every epoch, pieces of equal length are shuffled among their places, and then the samples are. These
permutations are computed, so no table depends on the seed or grows with the length of a run.

A sample has ``seq_length + 1`` ids, the last of which is only a label. Consecutive pieces of a document share an id:
the last label of one is the first input of the next. So each token that follows another one in its document is a label
once an epoch. The first token of a piece is none: what precedes it in the sample has nothing to do with it.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron.config.router import PADDING
from megatron.data.dataset import Piece, Sample, SourceDataset, SourceUsage, Span, fingerprint, splitmix64
from megatron.data.errors import DataError
from megatron.data.gpt_dataset import files_fingerprint, shuffle_dtype
from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.mixture import document_lengths
from megatron.data.permutation import permute


class Bins(NamedTuple):
    """Bins that hold items, given by ranks: the items are numbered from the longest to the shortest."""

    # int64 [kinds + 1, 3]: the first bin of each kind, its first row in `rows`, and the room left in each of its bins
    kinds: NDArray[np.int64]
    # int64 [rows, 2]: bin b of a kind, counted in it, holds the n items from rank first + n b on, for its (first, n)
    rows: NDArray[np.int64]

    def __len__(self) -> int:
        return int(self.kinds[-1, 0])

    def padding(self, seq_length: int, spare: int = 0) -> float:
        """Return the share of ids that is empty while each item leaves ``spare`` of its own empty."""
        empty = self.kinds[:-1, 2] + spare * np.add.reduceat(self.rows[:, 1], self.kinds[:-1, 1])
        return int(np.diff(self.kinds[:, 0]) @ empty) / (len(self) * (seq_length + 1))

    def items(self, i: int) -> NDArray[np.int64]:
        """Return the ranks of the items in a bin, from the longest to the shortest."""
        kind = int(np.searchsorted(self.kinds[:, 0], i, side="right")) - 1
        (first_bin, first_row, _), (_, end, _) = self.kinds[kind : kind + 2].tolist()
        rows = self.rows[first_row:end].tolist()
        return np.concatenate([np.arange(n) + first + n * (i - first_bin) for first, n in rows])

    def holding(self, items: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the bin of each of the ``items [n]``, given by ranks."""
        order = np.argsort(self.rows[:, 0])
        row = order[np.searchsorted(self.rows[order, 0], items, side="right") - 1]
        kind = np.searchsorted(self.kinds[:, 1], row, side="right") - 1
        return self.kinds[kind, 0] + (items - self.rows[row, 0]) // self.rows[row, 1]

    def ends(self, bins: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the ranks of the first and of the last item in each of the ``bins [n]``."""
        kinds = np.searchsorted(self.kinds[:, 0], bins, side="right") - 1
        inside = bins - self.kinds[kinds, 0]
        first, last = self.rows[self.kinds[kinds, 1]], self.rows[self.kinds[kinds + 1, 1] - 1]
        return first[:, 0] + first[:, 1] * inside, last[:, 0] + last[:, 1] * (inside + 1) - 1


class _OpenBins:
    """Bins of equal content in groups: (entry of what they last received or -1, the first bin of it, number)."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._by_room: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
        self._rooms: list[int] = []  # those above 0 that bins have left, in increasing order
        # What a number of bins have received: the entry before and the first bin of it, the first item, items per bin.
        self._received: list[tuple[int, int, int, int]] = []

    def take(self, length: int, number: int) -> tuple[int, tuple[int, int, int]]:
        """Return the room and a group of the fullest bins with room for ``length``, else ``number`` new bins."""
        place = bisect_left(self._rooms, length)
        if place == len(self._rooms):
            return self._capacity, (-1, 0, number)
        room = self._rooms[place]
        group = self._by_room[room].pop()
        if not self._by_room[room]:
            del self._rooms[place]
        return room, group

    def add(self, room: int, entry: int, first: int, number: int) -> None:
        """Add a group, unless its bins are none, or new."""
        if number and entry >= 0:
            if room and not self._by_room[room]:
                insort(self._rooms, room)
            self._by_room[room].append((entry, first, number))

    def fill(self, length: int, items: range) -> None:
        """Add ``items`` of a length, one after another, to the fullest bin with room for it."""
        while items:
            room, (entry, first, number) = self.take(length, len(items))
            # a bin that has received an item is the fullest with room for the next one, until it has no room
            each = min(room // length, len(items))
            bins = min(number, len(items) // each)
            self.add(room - each * length, len(self._received), 0, bins)
            self._received.append((entry, first, items.start, each))
            items = items[each * bins :]
            self.add(room, entry, first + bins, number - bins)

    def bins(self) -> Bins:
        """Return the bins, those with the least room first."""
        kinds: list[tuple[int, int, int]] = []
        rows: list[tuple[int, int]] = []
        bins = 0
        for room in sorted(self._by_room):
            for entry, first, number in self._by_room[room]:
                kinds.append((bins, len(rows), room))
                path = []
                while entry >= 0:
                    before, begin, item, each = self._received[entry]
                    path.append((item + each * first, each))
                    entry, first = before, begin + first
                rows += path[::-1]
                bins += number
        kinds.append((bins, len(rows), 0))
        return Bins(np.array(kinds, dtype=np.int64), np.array(rows, dtype=np.int64))


def pack(counts: NDArray[np.int64]) -> Bins:
    """Pack items into bins by best-fit decreasing, all bins of equal content at a time.

    Args:
        counts: ``[capacity + 1]``, the number of items of each length from 0, which must not occur, to ``capacity``.
    """
    bins, item = _OpenBins(len(counts) - 1), 0
    for length in np.flatnonzero(counts)[::-1].tolist():
        bins.fill(length, range(item, item := item + int(counts[length])))
    return bins.bins()


class PackedOrder(NamedTuple):
    """The tables of a packed source, which serve every seed and epoch."""

    first: NDArray[np.int64]  # int64 [documents + 1], the pieces before each document of the split
    by_length: NDArray[Any]  # uint32 [pieces], from the longest to the shortest
    runs: NDArray[np.int64]  # int64 [lengths + 1], the ranks at which pieces of another length begin, and the end
    bins: Bins  # the samples of an epoch, not shuffled

    def permuted(self, ranks: NDArray[np.int64], keys: NDArray[np.uint64]) -> NDArray[np.int64]:
        """Return the pieces at ``ranks [n]`` after pieces of equal length were shuffled by ``keys [n]``."""
        run = np.searchsorted(self.runs, ranks, side="right") - 1
        begin, end = self.runs[run], self.runs[run + 1]
        inside = permute(ranks - begin, end - begin, splitmix64(keys + run.astype(np.uint64)))
        return self.by_length[begin + inside].astype(np.int64)


def documents_of(indexed: IndexedDataset, part: range) -> range:
    """Return the documents whose first sequence is in ``part``, so that each is whole and in one split."""
    begin, end = np.searchsorted(indexed.documents[:-1], (part.start, part.stop)).tolist()
    return range(begin, end)


def piece_lengths(lengths: NDArray[np.int64], seq_length: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Cut documents of ``lengths [n]`` into pieces.

    Returns:
        The pieces before each document and before the end ``[n + 1]``, and the ids in each piece. A document of fewer
        than two tokens has no piece: it has nothing to predict.
    """
    labels = np.maximum(lengths - 1, 0)
    first = np.append(0, np.cumsum(-(-labels // seq_length)))
    pieces = np.full(first[-1], seq_length + 1)
    last = first[1:][labels > 0] - 1
    pieces[last] = (labels[labels > 0] - 1) % seq_length + 2
    return first, pieces


def build_packing(lengths: NDArray[np.int64], seq_length: int, spare: int = 0) -> PackedOrder:
    """Pack documents of ``lengths [n]``, all of whose pieces have room for ``spare`` more ids.

    Raises:
        DataError: if no document has two tokens.
    """
    first, pieces = piece_lengths(lengths, seq_length - spare)
    if not len(pieces):
        seen = f"{len(lengths):,} documents, none of which has two tokens, leave nothing to predict"
        raise DataError(seen, "documents of more tokens")
    counts = np.bincount(pieces + spare, minlength=seq_length + 2)
    from_longest = (seq_length + 1 - pieces).astype(np.uint16 if seq_length < 2**16 else np.int64)  # 16 bits sort fast
    by_length = np.argsort(from_longest, kind="stable").astype(shuffle_dtype(len(pieces)))
    runs = np.append(0, np.cumsum(counts[np.flatnonzero(counts)[::-1]]))
    return PackedOrder(first, by_length, runs, pack(counts))


def pack_files(indexed: IndexedDataset, part: range, seq_length: int, spare: int = 0) -> PackedOrder:
    """Pack the documents that begin in the sequences ``part``."""
    documents = documents_of(indexed, part)
    return build_packing(document_lengths(indexed, np.arange(documents.start, documents.stop)), seq_length, spare)


class BestFitDataset(SourceDataset):
    """Samples of ``seq_length`` tokens that hold one or more pieces of documents, and padding at the end."""

    def __init__(
        self,
        indexed: IndexedDataset,
        part: range,
        packing: PackedOrder,
        num_samples: int | None,
        seq_length: int,
        seed: int,
        spare: int = 0,
    ) -> None:
        """Order at least ``num_samples`` samples, or those of one epoch.

        Args:
            indexed: the files.
            part: the sequences of the split.
            packing: of `build_packing`, for the same ``seq_length`` and ``spare``.
            num_samples: samples needed; None for one epoch.
            seq_length: tokens per sample.
            seed: of all shuffles.
            spare: ids by which each piece may grow.
        """
        self.seq_length, self.part, self.packing, self.spare = seq_length, part, packing, spare
        self._stride, self._seed = seq_length - spare, seed
        self.epochs = -(-(num_samples or 1) // len(packing.bins))
        self.source, self.largest_table = indexed.prefix, packing.by_length
        self._indexed = indexed
        self._documents = documents_of(indexed, part)
        bounds = indexed.documents[[self._documents.start, self._documents.stop]].tolist()
        self.tokens = indexed.count_tokens(range(*bounds))  # in one epoch
        self.padding = packing.bins.padding(seq_length, spare)  # share of the samples, if no piece grows

    def __len__(self) -> int:
        return self.epochs * len(self.packing.bins)

    def _bins(self, numbers: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.uint64]]:
        """Return the bins of the samples ``numbers [n]``, and the keys of their epochs."""
        epochs, places = np.divmod(numbers, len(self.packing.bins))
        keys = splitmix64(splitmix64(np.array([self._seed], dtype=np.uint64)) + epochs.astype(np.uint64))
        return permute(places, len(self.packing.bins), ~keys), keys

    def pieces(self, i: int) -> list[Piece]:
        """See `SourceDataset.pieces`."""
        pieces = []
        for spans in self._spans(i):
            ids = [self._indexed.get(sequence, offset, tokens) for _, sequence, offset, tokens in spans]
            pieces.append(Piece(spans[0].sequence, spans[0].offset, np.concatenate(ids)))
        return pieces

    def assemble(self, pieces: Sequence[Piece], pad: int | None = None) -> Sample:
        """See `SourceDataset.assemble`; the default of ``pad`` is 0."""
        ids = [piece.ids for piece in pieces]
        text = np.full(self.seq_length + 1, pad or 0, dtype=np.int64)
        documents = np.full(self.seq_length + 1, len(ids), dtype=np.int64)  # padding is the last one
        held = sum(map(len, ids))
        text[:held], documents[:held] = np.concatenate(ids), np.repeat(np.arange(len(ids)), [*map(len, ids)])
        counts = (documents[1:] == documents[:-1]) & (documents[1:] < len(ids))
        padding = documents[:-1] == len(ids)
        return Sample(text[:-1], text[1:], counts.astype(np.float32), documents[:-1], {PADDING: padding})

    def spans(self, i: int) -> tuple[Span, ...]:
        """See `Dataset.spans`."""
        return tuple(span for piece in self._spans(i) for span in piece)

    def _spans(self, i: int) -> list[list[Span]]:
        """Return where the pieces of sample ``i`` lie; a document of several sequences has several spans."""
        if not 0 <= i < len(self):
            raise IndexError(f"sample {i} of a dataset of {len(self)}")
        bins, keys = self._bins(np.array([i]))
        pieces = self.packing.permuted(self.packing.bins.items(int(bins[0])), keys)
        documents = np.searchsorted(self.packing.first, pieces, side="right") - 1
        offsets = (pieces - self.packing.first[documents]) * self._stride
        return [self._spans_of(*each) for each in zip((documents + self._documents.start).tolist(), offsets.tolist())]

    def _spans_of(self, document: int, offset: int) -> list[Span]:
        """Return the spans of the piece of a document that begins at token ``offset``."""
        spans, wanted = [], self._stride + 1
        for sequence in range(*self._indexed.documents[document : document + 2].tolist()):
            length = int(self._indexed.lengths[sequence])
            if tokens := max(min(length - offset, wanted), 0):
                spans.append(Span(self.source, sequence, offset, tokens))
            offset, wanted = max(offset - length, 0), wanted - tokens
        return spans

    def places_of(self, sequences: Mapping[str, NDArray[np.int64]]) -> NDArray[np.int64]:
        """See `Dataset.places_of`; reads those samples only that hold pieces of the sequences' documents."""
        numbers = sequences.get(self.source, np.empty(0, np.int64))
        documents = np.unique(np.searchsorted(self._indexed.documents, numbers, side="right") - 1)
        inside = documents[(documents >= self._documents.start) & (documents < self._documents.stop)]
        bounds = self.packing.first[inside[:, None] - self._documents.start + np.arange(2)]
        pieces = np.concatenate([np.arange(*each) for each in bounds.tolist()] or [np.empty(0, np.int64)])
        ranks, one_epoch, wanted = np.arange(len(self.packing.by_length)), len(self.packing.bins), {*numbers.tolist()}
        found: list[int] = []
        for epoch in range(self.epochs if len(pieces) else 0):
            places = np.arange(one_epoch) + epoch * one_epoch
            bins, keys = self._bins(places)
            at = np.flatnonzero(np.isin(self.packing.permuted(ranks, keys[:1]), pieces))
            candidates = places[np.isin(bins, self.packing.bins.holding(at))].tolist()
            found += [i for i in candidates if not wanted.isdisjoint(span.sequence for span in self.spans(i))]
        return np.array(found, dtype=np.int64)

    def epoch_of(self, i: int) -> int:
        """See `SourceDataset.epoch_of`."""
        return i // len(self.packing.bins)

    def source_usage(self, samples: int) -> tuple[SourceUsage, ...]:
        """Return the tokens that the first ``samples`` samples read, on average over the samples of an epoch."""
        read = self.tokens * samples // len(self.packing.bins)
        return (SourceUsage(self.source, read, self.tokens, self.padding),)

    @cached_property
    def fingerprint(self) -> str:
        """See `packed_fingerprint`."""
        return packed_fingerprint(self._indexed, self.part, self.seq_length, self.seq_length - self._stride)

    def sample_hashes(self, places: NDArray[np.int64]) -> NDArray[np.uint64]:
        """Hash the first and the last piece of each of the samples ``places [n]``."""
        bins, keys = self._bins(places)
        first, last = (self.packing.permuted(ranks, keys) for ranks in self.packing.bins.ends(bins))
        return splitmix64(first.astype(np.uint64)) ^ last.astype(np.uint64)


def packed_fingerprint(indexed: IndexedDataset, part: range, seq_length: int, spare: int = 0) -> str:
    """Return 16 hexadecimal digits of the files' content, the sequences of the split and the sizes."""
    return fingerprint("best-fit", files_fingerprint(indexed, part, seq_length), spare)
