"""Samples of a mixture: stages that each read several sources in their own proportions.

Every place is computed, from small tables or none, so that the order takes no memory however long a run is:

* `DocumentStream`: the documents of a source, shuffled in every epoch by the key (seed, source, epoch), one after the
  other without end. A place is a number of tokens, so a source continues where it was left, whatever the length of
  samples was.
* `StageSamples`: a stage cuts the next tokens of each source into samples, which are shuffled among those that begin
  in the same epoch. The one that reaches into the next epoch comes last. So no token of an epoch is read again before
  all others were.
* :mod:`megatron.data.interleave`: which source each sample of a stage comes from.

A segment of `MixtureSegmentBuilder` is the stages of a run. A run that is made longer continues the last stage.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron.config.batch import Origin
from megatron.config.mixture import Mixture, StagePlan, extend_stage, plan_stages
from megatron.data.dataset import Dataset, Sample, SourceUsage, Span, fingerprint, splitmix64
from megatron.data.errors import DataError
from megatron.data.index_cache import IndexCache, Tables
from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.interleave import Interleave
from megatron.data.permutation import permute

DOCUMENTS_PER_SUM = 128
"""Documents between two entries of the table of an epoch, which has 1/16 byte for each document."""

DOCUMENTS_AT_ONCE = 1 << 16  # so that intermediate arrays stay in the CPU cache
SAMPLES_AT_ONCE = 1 << 16
MOST_LENGTHS_HELD = 1 << 24
"""Documents of a source up to which all their lengths are held while its tables are built: 128 MiB."""

CACHED_ABOVE = 1 << 16
"""Documents of a source whose tables are kept in the index cache; smaller ones are computed faster than read."""


OpenFiles = Callable[[str], IndexedDataset]
"""From a prefix to its token files."""


def hash_of(*facts: object) -> int:
    """Return 64 bits of the SHA-256 of a list of facts."""
    return int(fingerprint(*facts), 16)


class DocumentStream:
    """An infinite stream of the documents of one source, reshuffled every epoch."""

    def __init__(self, name: str, files: Sequence[IndexedDataset], seed: int, index_cache: IndexCache | None) -> None:
        """Read the documents of ``files`` in the order that ``seed`` and ``name`` decide."""
        self.name = name
        self.files = tuple(files)
        self.tokens = sum(indexed.num_tokens for indexed in files)  # of an epoch
        self.key = hash_of("mixture", seed, name)  # of all shuffles
        self._firsts = [0, *accumulate(indexed.num_documents for indexed in files)]  # numbers of first documents
        self._cache = index_cache
        self.token_sums = lru_cache(maxsize=4)(self._read_token_sums)

    @property
    def documents(self) -> int:
        """Documents of all files."""
        return self._firsts[-1]

    @cached_property
    def fingerprint(self) -> str:
        """16 hexadecimal digits of the content of the files, in their order."""
        return fingerprint("files", *(indexed.fingerprint for indexed in self.files))

    def spans(self, begin: int, tokens: int) -> Iterator[tuple[IndexedDataset, Span]]:
        """Yield what ``tokens`` tokens of the stream are read from, of which ``begin`` come before."""
        while tokens > 0:
            epoch, place = divmod(begin, self.tokens)
            here = min(tokens, self.tokens - place)
            yield from self._epoch_spans(epoch, place, here)
            begin, tokens = begin + here, tokens - here

    def intervals(self, sequences: Mapping[str, NDArray[np.int64]], epochs: range) -> NDArray[np.int64]:
        """Return where the documents of ``sequences``, given by file, lie in the stream: begin and end ``[n, 2]``."""
        held = np.zeros(self.documents, dtype=np.bool_)
        for indexed, first in zip(self.files, self._firsts):
            numbers = sequences.get(indexed.prefix, np.empty(0, np.int64))
            held[first + np.searchsorted(indexed.documents, numbers, side="right") - 1] = True
        found = [np.empty((0, 2), dtype=np.int64)]
        for epoch in epochs if held.any() else ():
            begin = epoch * self.tokens
            for place in range(0, self.documents, DOCUMENTS_AT_ONCE):
                documents = self.order(epoch, range(place, place + DOCUMENTS_AT_ONCE))
                lengths = self._lengths(documents)
                ends = begin + np.cumsum(lengths)
                here = np.flatnonzero(held[documents] & (lengths > 0))
                found.append(np.column_stack([ends[here] - lengths[here], ends[here]]))
                begin = int(ends[-1])
        return np.concatenate(found)

    def _epoch_spans(self, epoch: int, place: int, tokens: int) -> Iterator[tuple[IndexedDataset, Span]]:
        sums = self.token_sums(epoch)
        group = int(np.searchsorted(sums, place, side="right")) - 1
        skip = place - int(sums[group])
        while tokens > 0:
            documents = self.order(epoch, range(group * DOCUMENTS_PER_SUM, (group + 1) * DOCUMENTS_PER_SUM))
            for document, length in zip(documents.tolist(), self._lengths(documents).tolist()):
                if length > skip:
                    here = min(length - skip, tokens)
                    yield from self._document_spans(document, skip, here)
                    tokens -= here
                    if tokens == 0:
                        return
                skip = max(0, skip - length)
            group += 1

    def _document_spans(self, document: int, skip: int, tokens: int) -> Iterator[tuple[IndexedDataset, Span]]:
        """Yield the parts of a document, which is one sequence or several."""
        number = bisect_right(self._firsts, document) - 1
        indexed = self.files[number]
        sequence = int(indexed.documents[document - self._firsts[number]])
        while tokens > 0:
            length = int(indexed.lengths[sequence])
            here = min(length - skip, tokens)
            if here > 0:
                yield indexed, Span(indexed.prefix, sequence, skip, here)
                tokens -= here
            skip = max(0, skip - length)
            sequence += 1

    def order(self, epoch: int, places: range) -> NDArray[np.int64]:
        """Return the documents at consecutive places of an epoch."""
        numbers = np.arange(places.start, min(places.stop, self.documents))
        return permute(numbers, self.documents, hash_of(self.key, "documents", epoch))

    def _lengths(self, documents: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the tokens of documents ``[n]``."""
        if len(self.files) == 1:
            return document_lengths(self.files[0], documents)
        lengths = np.empty(len(documents), dtype=np.int64)
        numbers = np.searchsorted(self._firsts, documents, side="right") - 1
        for number in np.unique(numbers).tolist():
            at = numbers == number
            lengths[at] = document_lengths(self.files[number], documents[at] - self._firsts[number])
        return lengths

    def _read_token_sums(self, epoch: int) -> NDArray[np.int64]:
        """Return the tokens of an epoch before every `DOCUMENTS_PER_SUM` th of its documents, int64."""
        if self._cache is None or self.documents < CACHED_ABOVE:
            return self._build_token_sums(epoch)
        facts = {"files": self.fingerprint, "key": str(self.key), "epoch": epoch}

        def build() -> Tables:
            return {"sums": self._build_token_sums(epoch)}

        return self._cache.tables("epoch", facts, build, self.name)["sums"]

    def _build_token_sums(self, epoch: int) -> NDArray[np.int64]:
        counts = np.empty(-(-self.documents // DOCUMENTS_PER_SUM), dtype=np.int64)
        # lengths in the order of the files are read several times as fast as in any other
        held = self._lengths(np.arange(self.documents)) if self.documents <= MOST_LENGTHS_HELD else None
        for first in range(0, self.documents, DOCUMENTS_AT_ONCE):
            documents = self.order(epoch, range(first, first + DOCUMENTS_AT_ONCE))
            lengths = self._lengths(documents) if held is None else held[documents]
            sums = np.add.reduceat(lengths, np.arange(0, len(lengths), DOCUMENTS_PER_SUM))
            counts[first // DOCUMENTS_PER_SUM :][: len(sums)] = sums
        return np.cumsum(counts) - counts


def document_lengths(indexed: IndexedDataset, documents: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the tokens of documents ``[n]`` of a file, from where their sequences begin."""
    ends = (indexed.documents[documents + step] for step in (0, 1))
    begin, end = (token_places(indexed, sequences) for sequences in ends)
    return end - begin


def token_places(indexed: IndexedDataset, sequences: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the tokens of a file before sequences ``[n]``, of which the number of sequences is one."""
    last = len(indexed) - 1
    places = indexed.pointers[np.minimum(sequences, last)] // indexed.dtype.itemsize
    return np.where(sequences > last, indexed.num_tokens, places)


def check_token_sums(facts: Mapping[str, Any], tables: Tables) -> None:
    """Raise ValueError unless the table has the type and order of `DocumentStream`."""
    sums = tables["sums"]
    if sums.dtype != np.int64 or sums.ndim != 1 or not len(sums) or sums[0] != 0 or (np.diff(sums) < 0).any():
        raise ValueError("sums are not numbers that rise from 0")


class StageSamples:
    """The samples of one stage."""

    def __init__(self, plan: StagePlan, streams: Sequence[DocumentStream]) -> None:
        self.plan = plan
        self.interleave = Interleave(plan.counts)
        # of each source: samples, tokens before the stage, tokens of an epoch, key of the shuffles
        self._counts, self._begins = (np.asarray(numbers, dtype=np.int64) for numbers in (plan.counts, plan.begins))
        self._epochs = np.asarray([stream.tokens for stream in streams], dtype=np.int64)
        keys = [hash_of(stream.key, "samples", begin) for stream, begin in zip(streams, plan.begins)]
        self._keys = np.asarray(keys, dtype=np.uint64)

    def places(self, numbers: NDArray[np.int64]) -> tuple[NDArray[np.int16], NDArray[np.int64]]:
        """Return the source of each of the samples ``numbers [n]``, and the tokens of the source before it."""
        source, place = self.interleave.sources(numbers)
        length, begin, epoch_tokens = self.plan.seq_length, self._begins[source], self._epochs[source]
        epoch = (begin + place * length) // epoch_tokens
        first = np.maximum(-((begin - epoch * epoch_tokens) // length), 0)  # sample that begins in the epoch
        end = (epoch + 1) * epoch_tokens
        stop = np.minimum(-((begin - end) // length), self._counts[source])
        whole = stop - first - (begin + stop * length > end)  # samples that end in the epoch, too
        inside = place - first
        shuffled = np.flatnonzero(inside < whole)
        keys = splitmix64(self._keys[source[shuffled]] + epoch[shuffled].astype(np.uint64))
        inside[shuffled] = permute(inside[shuffled], whole[shuffled], keys)
        return source, begin + (first + inside) * length


class MixtureDataset(Dataset):
    """The samples of consecutive stages of one sequence length."""

    def __init__(self, streams: Sequence[DocumentStream], plans: Sequence[StagePlan], identity: str) -> None:
        """Read ``plans`` from the sources ``streams``; ``identity`` is the `Dataset.fingerprint`."""
        self.streams, self.plans = tuple(streams), tuple(plans)
        self.seq_length = plans[0].seq_length
        self._identity = identity
        self._stages = [StageSamples(plan, streams) for plan in plans]
        self._starts = [0, *accumulate(plan.samples for plan in plans)]
        self._keys = np.asarray([hash_of(stream.key, "digest") for stream in streams], dtype=np.uint64)

    @property
    def fingerprint(self) -> str:
        """See `MixtureSegmentBuilder.fingerprint`."""
        return self._identity

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, i: int) -> Sample:
        parts = [indexed.get(span.sequence, span.offset, span.tokens) for indexed, span in self._spans(i)]
        return Sample.of(np.concatenate(parts, dtype=np.int64))

    def spans(self, i: int) -> tuple[Span, ...]:
        """See `Dataset.spans`."""
        return tuple(span for _, span in self._spans(i))

    def places_of(self, sequences: Mapping[str, NDArray[np.int64]]) -> NDArray[np.int64]:
        """See `Dataset.places_of`; of documents that hold these sequences."""
        held, ends = [np.empty(0, dtype=np.int64)], np.max([plan.ends for plan in self.plans], axis=0).tolist()
        intervals = [
            stream.intervals(sequences, range(end // stream.tokens + 1)) for stream, end in zip(self.streams, ends)
        ]
        for first in range(0, len(self), SAMPLES_AT_ONCE):
            numbers = np.arange(first, min(first + SAMPLES_AT_ONCE, len(self)))
            sources, begins = self.places(numbers)
            for k in np.unique(sources).tolist():
                at = np.flatnonzero(sources == k)
                # the first interval that ends after the first token of a sample
                number = np.searchsorted(intervals[k][:, 1], begins[at], side="right")
                starts = np.append(intervals[k][:, 0], np.iinfo(np.int64).max)[number]
                held.append(numbers[at[starts <= begins[at] + self.seq_length]])
        return np.sort(np.concatenate(held))

    def _spans(self, i: int) -> Iterator[tuple[IndexedDataset, Span]]:
        source, begin = (int(column[0]) for column in self.places(np.array([i])))
        return self.streams[source].spans(begin, self.seq_length + 1)

    def source_of(self, i: int) -> str:
        """See `Dataset.source_of`."""
        return self.streams[int(self.places(np.array([i]))[0][0])].name

    def places(self, numbers: NDArray[np.int64]) -> tuple[NDArray[np.int16], NDArray[np.int64]]:
        """Return the source of each of the samples ``numbers [n]``, and the tokens of the source before it."""
        if len(numbers) and not 0 <= numbers.min() <= numbers.max() < len(self):
            raise IndexError(f"samples {numbers.min()}..{numbers.max()} of a mixture of {len(self)}")
        source, begin = np.empty(len(numbers), dtype=np.int16), np.empty(len(numbers), dtype=np.int64)
        stages = np.searchsorted(self._starts, numbers, side="right") - 1
        for k in np.unique(stages).tolist():
            at = stages == k
            source[at], begin[at] = self._stages[k].places(numbers[at] - self._starts[k])
        return source, begin

    def source_usage(self, samples: int) -> tuple[SourceUsage, ...]:
        """Return the tokens that the first ``samples`` samples read from each source."""
        counts = np.zeros(len(self.streams), dtype=np.int64)
        for stage, start in zip(self._stages, self._starts):
            counts += stage.interleave.taken(min(max(samples - start, 0), stage.plan.samples))
        read = (counts * self.seq_length).tolist()
        return tuple(SourceUsage(stream.name, tokens, stream.tokens) for stream, tokens in zip(self.streams, read))

    def planned_usage(self, samples: int) -> tuple[SourceUsage, ...]:
        """See `Dataset.planned_usage`: the shares of the samples."""
        counts = [0] * len(self.streams)
        for plan, start in zip(self.plans, self._starts):
            taken = min(max(samples - start, 0), plan.samples)
            counts = [n + round(taken * count / plan.samples) for n, count in zip(counts, plan.counts)]
        return tuple(
            SourceUsage(stream.name, count * self.seq_length, stream.tokens)
            for stream, count in zip(self.streams, counts)
        )

    def sample_hashes(self, places: NDArray[np.int64]) -> NDArray[np.uint64]:
        """Hash the source and the first token of each of the samples ``places [n]``."""
        source, begin = self.places(places)
        return splitmix64(self._keys[source] ^ splitmix64(begin.astype(np.uint64)))


@dataclass(frozen=True)
class MixtureSegmentBuilder:
    """Builds the segments of a mixture: all stages, then what is read beyond the plan in proportions of the last."""

    mixture: Mixture
    streams: Sequence[DocumentStream]  # one per source
    seq_length: int  # tokens per sample
    origin: Origin  # of the phase, which continues the sources where they were left
    batch: int  # samples by which the stages may miss the end of the run

    @property
    def fingerprint(self) -> str:
        """`Dataset.fingerprint` of the segments."""
        sources = [f"{stream.name} {stream.fingerprint}" for stream in self.streams]
        return fingerprint("mixture", self.seq_length, self.mixture.summary(), *sources)

    def __call__(self, num_samples: int, before: Sequence[Dataset] = ()) -> MixtureDataset:
        """Build the segment of ``num_samples`` samples that follows the segments ``before``."""
        once = {stream.name: stream.tokens for stream in self.streams}
        length = self.seq_length
        if before and isinstance(before[-1], MixtureDataset):
            plans = [extend_stage(self.mixture, before[-1].plans[-1], num_samples, once)]
        else:
            tokens, slack = num_samples * length, self.batch * length
            plans = plan_stages(self.mixture, tokens, length, once, self.origin.sources, slack)
        return MixtureDataset(self.streams, [plan for plan in plans if plan.samples], self.fingerprint)


def document_streams(
    mixture: Mixture, open_files: OpenFiles, seed: int, cache: IndexCache | None
) -> list[DocumentStream]:
    """Return the sources of a mixture.

    Raises:
        DataError: if files cannot be used, or a source has no tokens.
    """
    streams = []
    for name, source in mixture.sources.items():
        stream = DocumentStream(name, [open_files(prefix) for prefix in source.paths], seed, cache)
        if not stream.tokens:
            raise DataError(f"the source {name} of --data-mixture {mixture.path} has no tokens", f"leave out {name}")
        streams.append(stream)
    return streams
