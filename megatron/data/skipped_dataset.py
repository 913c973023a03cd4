"""Leave out samples of the training stream, by place or by the documents that they hold.

`SkippedDataset` closes the stream up: what follows a skipped sample moves forward. It wraps any dataset, in which
samples keep their places, so nothing else of the order changes. What a run has consumed never changes either: a
checkpoint records the places skipped so far, and new options only apply to places ahead of the position.

A document is left out by skipping the samples that hold one of its tokens. To remove it before ordering would move
all samples, also those that a run in progress has read. To mask its labels would leave it in the context of what
follows, and in the balance of experts. The price is what else these samples hold, less than two samples for each
place at which the document occurs; the documents of a large list are better dropped in preprocessing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Self

import numpy as np
from numpy.typing import NDArray

from megatron.config.data import DataConfig
from megatron.config.data_paths import SplitSource, data_sources
from megatron.config.errors import Problem, UserError
from megatron.config.text import counted, did_you_mean, listed, shell_word
from megatron.data.dataset import Dataset, Sample, SourceUsage, Span
from megatron.data.errors import DataError
from megatron.data.gpt_dataset import split_ranges
from megatron.data.indexed_dataset import IndexedDataset

SKIPPED = "skipped"
"""Entry of `DataSource.segments` with the places skipped so far: begin and end of each range."""

MOST_EMPTY_SEGMENTS = 3
"""Segments in a row without a sample to keep after which the search ends."""

FEW_SKIPPED, MANY_SKIPPED = 10, 0.05
"""Number and share of samples skipped because of documents from which on a note recommends preprocessing."""


NOTHING_LEFT = "--skip-documents leaves no sample of the training data", "name fewer documents"


class PlaceRanges:
    """A set of places, as ascending ranges that do not touch."""

    def __init__(self, ranges: Iterable[tuple[int, int]] = ()) -> None:
        """Store ranges from begin to end - 1, which may overlap, in any order."""
        pairs = sorted((begin, end) for begin, end in ranges if begin < end)
        table = np.array(pairs, dtype=np.int64).reshape(-1, 2)
        ends = np.maximum.accumulate(table[:, 1]) if len(table) else table[:, 1]
        separate = np.flatnonzero(table[1:, 0] > ends[:-1])
        self.begins: NDArray[np.int64] = table[np.append(0, separate + 1), 0] if len(table) else table[:, 0]
        self.ends: NDArray[np.int64] = ends[np.append(separate, len(table) - 1)] if len(table) else ends
        self._skipped = np.append(0, np.cumsum(self.ends - self.begins))  # places in the ranges before each
        self._kept = self.begins - self._skipped[:-1]  # places before each, not in a range

    @classmethod
    def of_places(cls, places: NDArray[np.int64]) -> Self:
        """Return the set of ascending ``places [n]``."""
        cuts = np.flatnonzero(np.diff(places) != 1)
        begins, ends = places[np.append(0, cuts + 1)[: len(places)]], places[np.append(cuts, -1)[: len(places)]] + 1
        return cls(zip(begins.tolist(), ends.tolist()))

    @classmethod
    def from_list(cls, numbers: Sequence[int]) -> Self:
        """Read what :meth:`to_list` returns."""
        return cls(zip(numbers[::2], numbers[1::2]))

    def to_list(self) -> list[int]:
        """Return begin and end of each range."""
        numbers: list[int] = np.column_stack([self.begins, self.ends]).flatten().tolist()
        return numbers

    def __bool__(self) -> bool:
        return len(self.begins) > 0

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return zip(self.begins.tolist(), self.ends.tolist())

    def __or__(self, other: PlaceRanges) -> PlaceRanges:
        return PlaceRanges([*self, *other])

    def clip(self, begin: int, end: int) -> PlaceRanges:
        """Return the places from ``begin`` to ``end - 1``."""
        return PlaceRanges((max(a, begin), min(b, end)) for a, b in self)

    def minus(self, other: PlaceRanges) -> PlaceRanges:
        """Return the places that are not in ``other``."""
        gaps = pairwise([-1, *other.to_list(), 2**63 - 1])
        outside = [gap for number, gap in enumerate(gaps) if number % 2 == 0]
        return PlaceRanges(pair for begin, end in outside for pair in self.clip(begin, end))

    def count(self, begin: int, end: int) -> int:
        """Return how many places from ``begin`` to ``end - 1`` are in the set."""
        inside = np.clip(self.ends, begin, end) - np.clip(self.begins, begin, end)
        return int(inside.sum())

    def places(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the places ``[n]`` of what is left, by number ``[n]``."""
        return numbers + self._skipped[np.searchsorted(self._kept, numbers, side="right")]

    def numbers(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the numbers of what is left of ascending ``places``: the inverse of :meth:`places`."""
        before = np.searchsorted(self.ends, places, side="right")  # ranges that have ended
        left = places < np.append(self.begins, np.iinfo(np.int64).max)[before]
        return places[left] - self._skipped[before[left]]

    def end(self, samples: int) -> int:
        """Return the place after the first ``samples`` places that are left."""
        return int(self.places(np.array([samples - 1]))[0]) + 1 if samples else 0


class SkippedDataset(Dataset):
    """The samples of a dataset that are left, renumbered."""

    def __init__(self, dataset: Dataset, skipped: PlaceRanges) -> None:
        self.dataset, self.skipped = dataset, skipped
        self.seq_length = dataset.seq_length
        self._kept = len(dataset) - skipped.count(0, len(dataset))

    def __len__(self) -> int:
        return self._kept

    def place(self, i: int) -> int:
        """Return the place of sample ``i`` in the dataset."""
        if not 0 <= i < len(self):
            raise IndexError(f"sample {i} of {len(self)} that are not skipped")
        return self.skipped.end(i + 1) - 1

    def __getitem__(self, i: int) -> Sample:
        return self.dataset[self.place(i)]

    def spans(self, i: int) -> tuple[Span, ...]:
        """See `Dataset.spans`."""
        return self.dataset.spans(self.place(i))

    def places_of(self, sequences: Mapping[str, NDArray[np.int64]]) -> NDArray[np.int64]:
        """See `Dataset.places_of`."""
        return self.skipped.numbers(self.dataset.places_of(sequences))

    def source_of(self, i: int) -> str | None:
        """See `Dataset.source_of`."""
        return self.dataset.source_of(self.place(i))

    def source_usage(self, samples: int) -> tuple[SourceUsage, ...]:
        """Return how far the first ``samples`` samples advance in each source, which skipped samples do, too."""
        return self.dataset.source_usage(self.skipped.end(samples))

    @property
    def fingerprint(self) -> str:
        """That of the dataset: what is skipped shows in the samples' hashes."""
        return self.dataset.fingerprint

    def sample_hashes(self, places: NDArray[np.int64]) -> NDArray[np.uint64]:
        """See `Dataset.sample_hashes`."""
        return self.dataset.sample_hashes(self.skipped.places(places))

    def describe(self, tokens: int) -> str:
        """Describe the data, skipped samples included."""
        return self.dataset.describe(self.skipped.end(tokens // self.seq_length) * self.seq_length)


class SampleSkips:
    """The places of the training stream that a start skips, found segment by segment."""

    def __init__(
        self,
        data: DataConfig,
        seq_length: int,
        skipped: Sequence[int] = (),
        consumed: int = 0,
        phase: str | None = None,
    ) -> None:
        """Read the options of a run.

        Args:
            data: with the options.
            seq_length: tokens per sample.
            skipped: `PlaceRanges.to_list` of the places skipped so far.
            consumed: samples consumed so far.
            phase: name of the phase, for which entries of others do not hold.

        Raises:
            UserError: if a list cannot be read, or names samples that were consumed, or documents that do not exist.
            DataError: if all documents are named.
        """
        past = PlaceRanges.from_list(skipped)
        self.position = past.end(consumed)  # places before it were read or skipped
        wanted = self._wanted = PlaceRanges(data.sample_ranges(seq_length, phase))
        if read := wanted.clip(0, self.position).minus(past):
            raise UserError([consumed_problem(read, wanted, self.position, phase)])
        self.ranges = past | wanted.clip(self.position, 2**63 - 1)  # those found so far
        documents = {} if data.generated or data.chat_data_path else data.document_ranges()
        train = data_sources(data)["train"] if documents else None
        sources = () if train is None else train.blend.prefixes
        self._sequences = {prefix: _sequences(prefix, parts, sources) for prefix, parts in documents.items()}
        if train is not None and not self._sequences.keys() ^ {*sources} and _skips_all(train, self._sequences):
            raise DataError(*NOTHING_LEFT)
        self._of_documents = PlaceRanges()  # those found because of documents
        self._searched = self._empty = 0  # places searched, and segments in a row without a sample to keep

    def __bool__(self) -> bool:
        return bool(self.ranges) or bool(self._sequences)

    def kept(self, segment: Dataset) -> int:
        """Search the next segment for samples to skip; return the number of the others.

        Raises:
            DataError: if nothing is left.
        """
        begin, self._searched = self._searched, self._searched + len(segment)
        if self._sequences and self._searched > self.position:
            found = segment.places_of(self._sequences) + begin
            ahead = PlaceRanges.of_places(found[found >= self.position]).minus(self.ranges)
            self._of_documents, self.ranges = self._of_documents | ahead, self.ranges | ahead
        kept = len(segment) - self.ranges.count(begin, self._searched)
        self._empty = 0 if kept else self._empty + 1
        if self._empty > MOST_EMPTY_SEGMENTS and self._sequences:
            raise DataError(*NOTHING_LEFT)
        return kept

    def missing(self, samples: int) -> int:
        """Return how many further places must be searched at least for ``samples`` samples to be left."""
        return self.ranges.end(samples) - self._searched

    def notes(self, samples: int) -> list[str]:
        """Return notes on what the first ``samples`` samples of the run skip."""
        end = self.ranges.end(samples)
        total = self.ranges.count(0, end)
        notes = []
        if total:
            ahead = self.ranges.count(self.position, end)
            notes.append(f"skips {total:,} of the first {counted(end, 'training sample')}, {ahead:,} of them ahead")
        if total > samples:
            notes.append(f"more samples are skipped than read, {samples:,}: the epochs of the data count both")
        if beyond := self._wanted.clip(end, 2**63 - 1):
            first = next(iter(beyond))[0]
            notes.append(f"what is skipped from sample {first:,} on has no effect: this run ends before it")
        if (held := self._of_documents.count(0, end)) > max(FEW_SKIPPED, MANY_SKIPPED * samples):
            notes.append(
                f"--skip-documents skips {held:,} samples, with what else they hold: for a long list, "
                "preprocess the data again without these documents"
            )
        return notes


def consumed_problem(read: PlaceRanges, wanted: PlaceRanges, position: int, phase: str | None) -> Problem:
    """Return the problem of ranges that name samples which were ``read``, before the place ``position``."""
    of = "" if phase is None else f"{phase}/"
    named = listed([f"{begin}:{end}" for begin, end in read])
    ahead = " ".join(f"{of}{begin}:{end}" for begin, end in wanted.clip(position, 2**63 - 1))
    sentence = f"the samples {named} to skip have been consumed: this start continues at {position}"
    earlier = "--load RUN --ckpt-step EARLIER --save ANOTHER"
    return Problem("E542", sentence, (*((f"--skip-samples {ahead}",) if ahead else ()), earlier))


def _sequences(prefix: str, documents: Sequence[range], sources: Sequence[str]) -> NDArray[np.int64]:
    """Return the numbers of the sequences of documents, ascending; ``sources`` are the prefixes of the data."""
    if prefix not in sources:
        meant = did_you_mean(prefix, sources)
        fix = () if meant is None else (f"--skip-documents {shell_word(meant)}:ID",)
        sentence = f"--skip-documents: {prefix} is not a source of the training data: {listed(sources)}"
        raise UserError([Problem("E543", sentence, fix)])
    try:
        data = IndexedDataset(prefix, verify=False)
    except DataError as error:
        raise UserError([Problem("E543", f"--skip-documents: {error}")]) from error
    last = max(part.stop - 1 for part in documents)
    if last >= data.num_documents:
        sentence = f"--skip-documents: {prefix} has documents 0 to {data.num_documents - 1}, no {last}"
        raise UserError([Problem("E543", sentence)])
    bounds = data.documents
    return np.unique(np.concatenate([np.arange(bounds[part.start], bounds[part.stop]) for part in documents]))


def _skips_all(train: SplitSource, sequences: Mapping[str, NDArray[np.int64]]) -> bool:
    """Return True if all sequences of the training data, by prefix, are among ``sequences``."""
    for prefix, numbers in sequences.items():
        total = len(IndexedDataset(prefix, verify=False))
        part = range(total) if train.split is None else split_ranges(train.split, total)[0]
        if np.count_nonzero((numbers >= part.start) & (numbers < part.stop)) < len(part):
            return False
    return True
