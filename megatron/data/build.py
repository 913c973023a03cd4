"""Build the samples of every split from the token files, segment by segment.

One segment is one dataset, or a blend of several, by Megatron-LM's rules. With weights, each source contributes its
share of the samples, rounded up, and is built for 0.5 % more. Without weights, each source is built for one epoch and
contributes in proportion to its length. With many sources the rounded shares can sum to much more than was requested,
and a small source can be too short for its part. Megatron-LM stops there; here such a blend ends before the first
sample that a source lacks. It still has the requested samples: among these, no source is asked for more than its
share.

The number of samples requested decides their order. A run that continues beyond its plan therefore appends a segment
with its own seed, and no earlier sample changes its place. Files too short for one sample of a split are reported
with a ``--split`` that would work (`DataShortage`).
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil

import numpy as np

from megatron.config.data_paths import DEFAULT_SPLIT, SPLITS, SplitSource, data_sources
from megatron.config.run import DataConfig, TrainingConfig
from megatron.data.blended_dataset import (
    BlendedDataset,
    BlendIndex,
    ConcatDataset,
    build_blend_index,
    build_exhaustive_index,
    count_datasets,
    normalize_weights,
    segments_of,
    truncate_blend,
)
from megatron.data.dataset import Dataset, MockDataset, split_kind, split_label
from megatron.data.errors import DataError
from megatron.data.gpt_dataset import GPTDataset, SampleOrder, build_sample_order, split_ranges
from megatron.data.index_cache import IndexCache, Tables
from megatron.data.indexed_dataset import IndexedDataset

OVERSAMPLING = 0.005
SEED_MODULUS = 2**32

SourceSlice = tuple[IndexedDataset, range]
"""Token files, and the sequences of them that are read."""


def build_segment(
    parts: Sequence[SourceSlice],
    weights: Sequence[float] | None,
    num_samples: int | None,
    seq_length: int,
    seed: int,
    cache: IndexCache | None,
) -> Dataset:
    """Build samples of ``parts`` in Megatron-LM's order.

    Args:
        parts: the sources. A single one without weight is read alone, else they are blended.
        weights: one per source, or None.
        num_samples: samples needed; None for one epoch of everything, which excludes weights.
        seq_length: tokens per sample.
        seed: seed of every source's order, taken modulo 2**32.
        cache: stores the index tables; None builds them in memory.

    Raises:
        DataError: when a source holds no sample, a weight is not above 0, or numba is needed and missing.
        ValueError: when there are weights, but no number of samples.
    """
    builder = _Builder(seq_length, seed % SEED_MODULUS, cache)
    if len(parts) == 1 and weights is None:
        return builder.one_source(parts[0], num_samples)
    if weights is None:
        return builder.proportional_blend(parts, num_samples)
    if num_samples is None:
        raise ValueError("a blend with weights needs a number of samples")
    return builder.weighted_blend(parts, weights, num_samples)


def extend_blend(
    blend: BlendedDataset,
    parts: Sequence[SourceSlice],
    num_samples: int,
    seq_length: int,
    seed: int,
    cache: IndexCache | None,
) -> BlendedDataset:
    """Build the ``num_samples`` samples that follow a blend of ``parts``, in the same proportions.

    Each source first contributes what is left of its order, so that no sample is repeated before all others were read,
    and then a new order of another seed.

    Args:
        blend: the previous segment, which is read to its end.
        parts: its sources.
        num_samples: samples needed.
        seq_length: tokens per sample.
        seed: seed of new orders, different from those before; taken modulo 2**32.
        cache: stores the index tables; None builds them in memory.

    Raises:
        DataError: when numba is needed and missing.
    """
    return _Builder(seq_length, seed % SEED_MODULUS, cache).extend(blend, parts, num_samples)


@dataclass(frozen=True)
class _Builder:
    """Builds the datasets of one segment."""

    seq_length: int
    seed: int
    cache: IndexCache | None

    def one_source(self, part: SourceSlice, num_samples: int | None) -> GPTDataset:
        """Build the samples of one source."""
        indexed, sequences = part
        facts = {
            "files": indexed.fingerprint,
            "sequences": [sequences.start, sequences.stop],
            "samples": num_samples,
            "seq_length": self.seq_length,
            "seed": self.seed,
        }

        def build() -> Tables:
            return build_sample_order(indexed.lengths, sequences, num_samples, self.seq_length, self.seed).tables

        try:
            tables = self._tables("order", facts, build, indexed.prefix)
        except DataError as error:
            raise DataError(f"{indexed.prefix}: {error}") from error
        return GPTDataset(indexed, SampleOrder.of(tables, indexed.lengths, sequences, self.seq_length))

    def proportional_blend(self, parts: Sequence[SourceSlice], num_samples: int | None) -> BlendedDataset:
        """Blend one epoch of every source in proportion to length; keep the first ``num_samples`` samples."""
        datasets = [self.one_source(part, None) for part in parts]
        sizes = [len(dataset) for dataset in datasets]
        if num_samples is None:
            index = self._index("exhaustive", {"sizes": sizes}, lambda: build_exhaustive_index(sizes))
            return BlendedDataset(datasets, *index)
        return BlendedDataset(datasets, *truncate_blend(self._blend_index(sizes, min(num_samples, sum(sizes))), sizes))

    def weighted_blend(
        self, parts: Sequence[SourceSlice], weights: Sequence[float], num_samples: int
    ) -> BlendedDataset:
        """Blend every source in proportion to its weight, at least ``num_samples`` samples in all."""
        shares = normalize_weights(weights).tolist()
        targets = [ceil(num_samples * share) for share in shares]
        datasets = [self.one_source(part, ceil(target * (1 + OVERSAMPLING))) for part, target in zip(parts, targets)]
        # blend_index normalises the shares a second time, as Megatron-LM does: the last bit decides ties
        index = self._blend_index(shares, sum(targets))
        return BlendedDataset(datasets, *truncate_blend(index, list(map(len, datasets))), shares)

    def extend(self, blend: BlendedDataset, parts: Sequence[SourceSlice], num_samples: int) -> BlendedDataset:
        """Continue ``blend`` in the proportions of its weights, or of the sources' samples in one epoch."""
        shares = blend.weights or [len(segments_of(dataset)[0]) for dataset in blend.datasets]
        index = self._blend_index(shares, num_samples)
        needed = [taken + more for taken, more in zip(blend.taken, count_datasets(index[0], len(parts)))]
        datasets = [self._lengthen(n, dataset, part) for n, dataset, part in zip(needed, blend.datasets, parts)]
        return BlendedDataset(datasets, *index, blend.weights, blend.taken)

    def _lengthen(self, samples: int, dataset: Dataset, part: SourceSlice) -> Dataset:
        """Return the dataset; if it has fewer than ``samples``, with another order of its source appended."""
        missing = samples - len(dataset)
        return dataset if missing <= 0 else ConcatDataset([*segments_of(dataset), self.one_source(part, missing)])

    def _blend_index(self, weights: Sequence[float], size: int) -> BlendIndex:
        facts = {"weights": list(weights), "size": size}
        return self._index("blend", facts, lambda: build_blend_index(weights, size))

    def _index(self, kind: str, facts: Mapping[str, object], build: Callable[[], BlendIndex]) -> BlendIndex:
        tables = self._tables(kind, facts, lambda: dict(zip(("datasets", "samples"), build())))
        return tables["datasets"], tables["samples"]

    def _tables(self, kind: str, facts: Mapping[str, object], build: Callable[[], Tables], source: str = "") -> Tables:
        return build() if self.cache is None else self.cache.tables(kind, facts, build, source)


MAX_FILES_IN_FIX = 8  # files in a suggested command


@dataclass
class TokenFiles:
    """The token files of a run, each opened once however many splits read it."""

    opened: dict[str, IndexedDataset] = field(default_factory=dict)

    def open(self, prefix: str) -> IndexedDataset:
        """Return the files of a prefix.

        Raises:
            DataError: when they are damaged.
        """
        if prefix not in self.opened:
            self.opened[prefix] = IndexedDataset(prefix)
        return self.opened[prefix]

    def parts(self, split: str, source: SplitSource) -> list[SourceSlice]:
        """Return the files of a split's sources with the sequences that are its own, possibly none.

        Raises:
            DataError: when files are damaged.
        """
        files = [self.open(prefix) for prefix in source.blend.prefixes]
        if source.split is None:
            return [(indexed, range(len(indexed))) for indexed in files]
        number = SPLITS.index(split_kind(split))
        return [(indexed, split_ranges(source.split, len(indexed))[number]) for indexed in files]


def slice_tokens(part: SourceSlice) -> int:
    """Return the tokens in the sequences of a part."""
    indexed, sequences = part
    return int(indexed.lengths[sequences.start : sequences.stop].sum(dtype=np.int64))


def find_short_slices(parts: Iterable[SourceSlice], source: SplitSource, seq_length: int) -> Iterator[SourceSlice]:
    """Yield the parts too short for one sample: empty ones, or below a sample where exactly one epoch is read."""
    needed = seq_length + 1 if _in_proportion(source) else 1
    return (part for part in parts if slice_tokens(part) < needed)


def _in_proportion(source: SplitSource) -> bool:
    return source.blend.weights is None and len(source.blend.prefixes) > 1


@dataclass(frozen=True)
class DataShortage:
    """Files that are too short for one sample of a split."""

    split: str  # its name
    source: SplitSource  # its data source
    short: Sequence[SourceSlice]  # the files that are too short, at least one
    seq_length: int  # tokens per sample
    default: bool  # whether the split is the default one
    better: Sequence[str]  # a ``--split`` that leaves enough of every file, if one exists

    def error(self, needed: int) -> DataError:
        """Return the error for a split of which ``needed`` samples are needed."""
        indexed, sequences = self.short[0]
        kind = split_label(self.split)
        if self.source.split is None:
            held = f"{self._tokens()} ({len(sequences):,} sequences)" if sequences else "no sequence"
            seen = f"{indexed.prefix} holds {held}, but {needed:,} {kind} samples are needed"
            return DataError(seen, *(list(self._several_file_fixes()) or ["use more data"]))
        left = self._left(f"no {kind} data", f"{kind} data of ")
        seen = f"{self._cut()} leaves {left}, but {needed:,} samples are needed"
        more = f"a dataset of more documents than {len(indexed)}"
        return DataError(seen, *(self.better or self._separate_file_fixes()), *self._several_file_fixes(), more)

    def note(self) -> str:
        """Return the note for test data that only the default split asks for."""
        better = f"; {self.better[0]} leaves some" if self.better else ""
        return f"no test data: {self._cut()} leaves {self._left('none', '')}{better}"

    def _cut(self) -> str:
        return f"the default --split '{self.source.split}'" if self.default else f"--split '{self.source.split}'"

    def _left(self, none: str, some: str) -> str:
        """Describe what the split leaves of the first short file."""
        indexed, sequences = self.short[0]
        all_of_it = f"of the {len(indexed):,} sequences in {indexed.prefix}"
        return f"{some}{self._tokens()} ({len(sequences):,} {all_of_it})" if sequences else f"{none} {all_of_it}"

    def _tokens(self) -> str:
        return f"{slice_tokens(self.short[0]):,} tokens, no sample of {self.seq_length} + 1"

    def _separate_file_fixes(self) -> Iterator[str]:
        """Yield fixes that leave the files to training alone."""
        kind, prefixes = split_kind(self.split), self.source.blend.prefixes
        if kind == "train":
            return
        yield "--eval-iters 0"
        if len(prefixes) == 1:
            yield f"--train-data-path {shlex.quote(prefixes[0])} --{kind}-data-path ANOTHER_PREFIX instead"

    def _several_file_fixes(self) -> Iterator[str]:
        """Yield fixes for several files."""
        prefixes = self.source.blend.prefixes
        short = {indexed.prefix for indexed, _ in self.short}
        if short < set(prefixes):
            yield f"leave out {' '.join(sorted(short))}"
        if _in_proportion(self.source) and len(prefixes) <= MAX_FILES_IN_FIX:
            command = f"python tools/merge_datasets.py --input {' '.join(prefixes)} --output-prefix merged"
            yield f"{command} and read merged instead"


def suggest_splits(
    sources: Mapping[str, SplitSource], needed: Iterable[str], files: TokenFiles, seq_length: int
) -> list[str]:
    """Return the ``--split`` that leaves every needed split a sample of each of its files, if one exists."""
    cut = {split: sources[split] for split in needed if sources[split].split is not None}
    sizes = [len(files.open(prefix)) for source in cut.values() for prefix in source.blend.prefixes]

    def leaves_some(split: str, source: SplitSource) -> bool:
        return next(find_short_slices(files.parts(split, source), source, seq_length), None) is None

    for weights in _candidates(min(sizes, default=0), {split_kind(split) for split in cut}):
        text = ",".join(map(str, weights))
        read = [split for split in cut if weights[SPLITS.index(split_kind(split))]]
        if all(leaves_some(split, replace(cut[split], split=text)) for split in read):
            return [f"--split {text}"]
    return []


def _candidates(smallest: int, kinds: set[str]) -> Iterator[tuple[int, int, int]]:
    """Yield weights that give 1, 2, 4, ... sequences of the smallest file to each evaluation split, test last."""
    for wanted in (kinds, kinds - {"test"}):
        share = 1
        while share < smallest:
            valid, test = (share * int(kind in wanted) for kind in SPLITS[1:])
            if smallest - valid - test > 0:
                yield smallest - valid - test, valid, test
            share *= 2


def uses_default_split(data: DataConfig, source: SplitSource) -> bool:
    """Return True if the source is cut by the default ``--split``."""
    return data.split is None and source.split == DEFAULT_SPLIT


BuildSegment = Callable[[int, Sequence[Dataset]], Dataset]
"""From the number of samples and the segments before to the next segment."""


def build_split(
    split: str, make: BuildSegment, sizes: Sequence[int], used: int
) -> tuple[ConcatDataset, tuple[int, ...]]:
    """Build segments of ``sizes`` samples, and add segments while they hold fewer than ``used`` samples.

    All samples of a segment count, also those beyond the number it was built for, so that a started epoch is read to
    its end. Returns the samples, and the sizes that all segments were built for.

    Raises:
        DataError: when a segment holds no sample.
    """
    counts, held = list(sizes), 0
    segments: list[Dataset] = []
    while len(segments) < len(counts) or held < used:
        if len(segments) == len(counts):
            counts.append(used - held)
        dataset = make(counts[len(segments)], segments)
        if not len(dataset):
            raise DataError(f"the {split_label(split)} data hold no sample", "use more data")
        segments.append(dataset)
        held += len(dataset)
    return ConcatDataset(segments), tuple(counts)


def mock_segment_builders(training: TrainingConfig, vocab_size: int) -> dict[str, BuildSegment]:
    """Return the segment builders of mock data, by split."""

    def generator(stream: int) -> BuildSegment:
        def make(samples: int, before: Sequence[Dataset]) -> Dataset:
            first = sum(map(len, before))
            return MockDataset(vocab_size, training.seq_length, samples, training.seed, stream, first)

        return make

    return {split: generator(stream) for stream, split in enumerate(SPLITS)}


def file_segment_builders(
    data: DataConfig, read: Mapping[str, int], training: TrainingConfig, cache: IndexCache | None
) -> tuple[dict[str, BuildSegment], list[str]]:
    """Return the segment builders of the token files for each split in ``read`` (samples by split name), and notes.

    Test data are left out, with a note, where only the default split asks for them and there are none.

    Raises:
        DataError: when files are damaged, or a source of a needed split is too short for one sample.
    """
    files, sources = TokenFiles(), resolve_sources(data, read)
    builders: dict[str, BuildSegment] = {}
    notes = []
    for split, needed in read.items():
        source = sources[split]
        parts = files.parts(split, source)
        short = list(find_short_slices(parts, source, training.seq_length))
        if not short:
            builders[split] = _file_builder(parts, source.blend.weights, training, cache)
            continue
        default = uses_default_split(data, source)
        wanted = [other for other in read if split_kind(other) != "test" or split == "test" or not default]
        better = suggest_splits(sources, wanted, files, training.seq_length)
        shortage = DataShortage(split, source, short, training.seq_length, default, better)
        if split != "test" or not default:
            raise shortage.error(needed)
        notes.append(shortage.note())
    return builders, notes


def resolve_sources(data: DataConfig, needed: Iterable[str]) -> dict[str, SplitSource]:
    """Return the data source of each split; needed splits without files of their own use the files that are cut.

    Raises:
        DataError: when there are no files for a needed split.
    """
    sources = data_sources(data)
    cut = next((source for source in sources.values() if source.split is not None), None)
    for split in needed:
        if split not in sources and cut is None:
            raise DataError(f"there are no {split_label(split)} data", f"--{split_kind(split)}-data-path PREFIX")
        if split not in sources and cut is not None:
            sources[split] = cut
    return sources


def _file_builder(
    parts: Sequence[SourceSlice], weights: Sequence[float] | None, training: TrainingConfig, cache: IndexCache | None
) -> BuildSegment:
    def make(samples: int, before: Sequence[Dataset]) -> Dataset:
        seed = training.seed + len(before)
        if before and isinstance(before[-1], BlendedDataset):
            return extend_blend(before[-1], parts, samples, training.seq_length, seed, cache)
        return build_segment(parts, weights, samples, training.seq_length, seed, cache)

    return make
