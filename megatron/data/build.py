"""Build the samples of every split from its sources, segment by segment.

`file_segment_builders` opens the token files, cuts them into splits and returns a builder for each split;
`build_split` builds as many segments as the run needs. The number of samples requested decides their order. A run
that continues beyond its plan therefore appends a segment with its own seed, and no earlier sample changes its place.

One segment is one dataset, or a blend of several, by Megatron-LM's rules (`FileSegmentBuilder`). Files too short for
one sample of a split are reported with a ``--split`` that would work.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from megatron.config.batch import WHOLE_RUN, Origin, full_global_batch_size
from megatron.config.data import DataConfig
from megatron.config.data_paths import DEFAULT_SPLIT, SPLITS, SplitSource, chat_splits, data_sources
from megatron.config.plugins import registered
from megatron.config.run import RunConfig
from megatron.config.training import TrainingConfig
from megatron.data.best_fit_dataset import (
    BestFitDataset,
    Bins,
    PackedOrder,
    pack_files,
    packed_fingerprint,
)
from megatron.data.blended_dataset import (
    BlendedDataset,
    BlendIndex,
    ConcatDataset,
    blend_fingerprint,
    build_blend_index,
    count_datasets,
    normalize_weights,
    segments_of,
    truncate_blend,
)
from megatron.data.chat import load_conversations
from megatron.data.dataset import Dataset, MockDataset, SampleRequest, SourceDataset, split_kind, split_label
from megatron.data.dataset_info import find_tokenizer
from megatron.data.errors import DataError
from megatron.data.fim_dataset import SPARE_IDS, FillInMiddle, FimDataset, fim_fingerprint
from megatron.data.gpt_dataset import (
    GPTDataset,
    SampleOrder,
    build_sample_order,
    files_fingerprint,
    place_dtype,
    shuffle_dtype,
    split_ranges,
)
from megatron.data.index_cache import IndexCache, Tables
from megatron.data.indexed_dataset import IndexedDataset
from megatron.data.known_files import KnownFiles
from megatron.data.mixture import MixtureSegmentBuilder, check_token_sums, document_streams
from megatron.data.packed_dataset import PackedDataset
from megatron.data.prefixes import use_data_store
from megatron.data.skipped_dataset import SampleSkips, SkippedDataset

OVERSAMPLING = 0.005
SEED_MODULUS = 2**32

SegmentBuilder = Callable[[int, Sequence[Dataset]], Dataset]
"""From the number of samples and the segments before to the next segment."""

ORDER_TABLES = ("documents", "samples", "shuffle")
"""Names of the tables of `SampleOrder` in the cache."""

PACKING_TABLES = ("first", "by_length", "runs", "kinds", "rows")
"""Names of the tables of `PackedOrder` in the cache."""

SourceSlice = tuple[IndexedDataset, range]
"""Token files, and the sequences of them that are read."""

OpenFiles = Callable[[str], IndexedDataset]
"""From a prefix to its token files."""


def generated_segment_builders(
    data: DataConfig, training: TrainingConfig, vocab_size: int
) -> dict[str, SegmentBuilder]:
    """Return the segment builders of mock data or of a plugin's dataset, by split."""
    create = MockDataset.create if data.plugin_dataset is None else registered("dataset")[data.plugin_dataset]

    def build(split: str, samples: int, before: Sequence[Dataset]) -> Dataset:
        first = sum(map(len, before))
        request = SampleRequest(split, first, samples, training.seq_length, vocab_size, training.seed, data)
        dataset: Dataset = create(request)
        return dataset

    return {split: functools.partial(build, split) for split in SPLITS}


def chat_segment_builders(data: DataConfig, training: TrainingConfig, batch: int) -> dict[str, SegmentBuilder]:
    """Return the segment builders of conversations, by split; an epoch is a multiple of ``batch`` samples."""

    def build(split: str, samples: int, before: Sequence[Dataset]) -> Dataset:
        conversations = load_conversations(data, split, training.seq_length, training.objective == "dpo")
        first = sum(map(len, before))
        return PackedDataset(conversations, training.seq_length, batch, training.seed, samples, first)

    return {split: functools.partial(build, split) for split in chat_splits(data)}


def resolve_epochs(config: RunConfig, world_size: int) -> RunConfig:
    """Return the configuration with the lengths that follow from the number of conversations.

    These are the samples of ``num_epochs``, the steps between evaluations, and the batches of an evaluation.

    Raises:
        DataError: if conversations cannot be used.
    """
    training, streams = config.training, config.diloco.streams
    batch = streams * full_global_batch_size(training, config.parallel.data_parallel_size(world_size))

    def epoch_samples(split: str) -> int:
        conversations = load_conversations(config.data, split, training.seq_length, training.objective == "dpo")
        return PackedDataset(conversations, training.seq_length, batch, training.seed, 0).epoch_samples

    if training.num_epochs is not None:
        samples = epoch_samples("train")
        training = replace(
            training,
            num_epochs=None,
            train_samples=training.num_epochs * samples // streams,
            eval_interval=training.eval_interval or samples // batch,
        )
    if config.data.valid_chat_data_path and not training.eval_iters:
        training = replace(training, eval_iters=epoch_samples("valid") * streams // batch)
    return replace(config, training=training)


def file_segment_builders(
    data: DataConfig,
    read: Mapping[str, int],
    training: TrainingConfig,
    vocab_size: int,
    cache: IndexCache | None,
    origin: Origin = WHOLE_RUN,
    batch: int = 1,
) -> tuple[dict[str, FileSegmentBuilder | MixtureSegmentBuilder], list[str]]:
    """Return the segment builders of the token files for each split in ``read`` (samples by split name), and notes.

    Test data are left out, with a note, where only the default split asks for them and there are none. A mixture
    continues at the ``origin`` of the phase, and its stages may miss the end of the run by a ``batch`` of samples.
    ``vocab_size`` is that of the model.
    """
    known = None if cache is None else KnownFiles(cache.folder)
    # each is opened once however many splits read it
    open_files = functools.cache(functools.partial(IndexedDataset, known_files=known))
    seq_length = training.seq_length
    sources = resolve_sources(data, read)
    fim = FillInMiddle.of(data, find_tokenizer(data, vocab_size)) if data.fim_data else None
    use_data_store(data, (prefix for source in sources.values() for prefix in source.blend.prefixes))
    builders: dict[str, FileSegmentBuilder | MixtureSegmentBuilder] = {}
    notes = []
    for split, needed in read.items():
        if split == "train" and data.data_mixture is not None:
            mixture = data.mixture
            streams = document_streams(mixture, open_files, training.seed, cache)
            builders[split] = MixtureSegmentBuilder(mixture, streams, seq_length, origin, batch)
            continue
        source = sources[split]
        parts = split_parts(split, source, open_files)
        short = _short_part(parts, source, seq_length)
        if short is None:
            weights, packing = source.blend.weights, data.packing
            builders[split] = FileSegmentBuilder(parts, weights, seq_length, training.seed, cache, packing, fim)
            continue
        default = data.split is None and source.split == DEFAULT_SPLIT
        indexed, sequences = short
        cut = "" if source.split is None else f" with {'the default ' if default else ''}--split '{source.split}'"
        seen = (
            f"the {split_label(split)} data of {indexed.prefix} have {indexed.count_tokens(sequences):,} tokens "
            f"({len(sequences):,} of its {len(indexed):,} sequences{cut}), "
            f"too few for one sample of {seq_length + 1} tokens"
        )
        wanted = [other for other in read if split_kind(other) != "test" or split == "test" or not default]
        better = _suggest_split(sources, wanted, open_files, seq_length)
        if split == "test" and default:
            notes.append(seen if better is None else f"{seen}; a new run has enough with {better}")
        else:
            better = better or _suggest_split(sources, set(wanted) - {"test"}, open_files, seq_length)
            if better is not None:
                fix = better
            elif cut and split_kind(split) != "train":
                fix = "--eval-iters 0"
            elif len(set(source.blend.prefixes)) > 1:
                fix = f"leave out {indexed.prefix}"
            else:
                fix = f"a dataset of more documents than {len(indexed)}"
            raise DataError(f"{seen}, but {needed:,} samples are needed", fix)
    return builders, notes


def resolve_sources(data: DataConfig, needed: Iterable[str]) -> dict[str, SplitSource]:
    """Return the data source of each split; needed splits without files of their own use the files that are cut."""
    sources = data_sources(data)
    cut = next((source for source in sources.values() if source.split is not None), None)
    for split in needed:
        if split in sources:
            continue
        if cut is None:
            raise DataError(f"there are no {split_label(split)} data", f"--{split_kind(split)}-data-path PREFIX")
        sources[split] = cut
    return sources


def split_parts(split: str, source: SplitSource, open_files: OpenFiles) -> list[SourceSlice]:
    """Return the files of a split's sources with the sequences that are its own, possibly none."""
    files = [open_files(prefix) for prefix in source.blend.prefixes]
    if source.split is None:
        return [(indexed, range(len(indexed))) for indexed in files]
    number = SPLITS.index(split_kind(split))
    return [(indexed, split_ranges(source.split, len(indexed))[number]) for indexed in files]


def build_split(
    split: str, build: SegmentBuilder, sizes: Sequence[int], used: int, skips: SampleSkips | None = None
) -> tuple[Dataset, tuple[int, ...]]:
    """Build segments of ``sizes`` samples, and add segments while they hold fewer than ``used`` that ``skips`` leaves.

    All samples of a segment count, also those beyond the number it was built for, so that a started epoch is read to
    its end. Returns the samples, and the sizes that all segments were built for.
    """
    counts, held = list(sizes), 0
    segments: list[Dataset] = []
    while len(segments) < len(counts) or held < used:
        if len(segments) == len(counts):
            counts.append(used - held if skips is None else skips.missing(used))
        dataset = build(counts[len(segments)], segments)
        if not len(dataset):
            raise DataError(f"the {split_label(split)} data hold no sample", "use more data")
        segments.append(dataset)
        held += len(dataset) if skips is None else skips.kept(dataset)
    whole = segments[0] if len(segments) == 1 else ConcatDataset(segments)
    return whole if skips is None else SkippedDataset(whole, skips.ranges), tuple(counts)


@dataclass(frozen=True)
class FileSegmentBuilder:
    """Builds the segments of one split from its token files, in Megatron-LM's order."""

    parts: Sequence[SourceSlice]  # the sources
    weights: Sequence[float] | None  # one per source; None to read them in proportion to their lengths
    seq_length: int  # tokens per sample
    seed: int  # of the first segment; each segment counts on, modulo 2**32
    cache: IndexCache | None  # stores the index tables; None builds them in memory
    packing: str = "concat"  # see ``--packing``
    fim: FillInMiddle | None = None  # changes the documents

    @property
    def fingerprint(self) -> str:
        """`Dataset.fingerprint` of the segments, whose order is not built for it."""
        of_parts = [self._fingerprint_of(*part) for part in self.parts]
        if self.weights is None and len(of_parts) == 1:
            return of_parts[0]
        return blend_fingerprint(of_parts, None if self.weights is None else normalize_weights(self.weights).tolist())

    def _fingerprint_of(self, indexed: IndexedDataset, sequences: range) -> str:
        """Return `Dataset.fingerprint` of a source."""
        if self.packing == "concat":
            found = files_fingerprint(indexed, sequences, self.seq_length)
        else:
            found = packed_fingerprint(indexed, sequences, self.seq_length, self._spare)
        return found if self.fim is None else fim_fingerprint(found, self.fim)

    @property
    def _spare(self) -> int:
        """Ids by which packed documents may grow."""
        return 0 if self.fim is None else SPARE_IDS

    def __call__(self, num_samples: int, before: Sequence[Dataset] = ()) -> Dataset:
        """Build the segment of ``num_samples`` samples that follows the segments ``before``."""
        seed = (self.seed + len(before)) % SEED_MODULUS
        if before and isinstance(before[-1], BlendedDataset):
            return self._extend(before[-1], num_samples, seed)
        if self.weights is None and len(self.parts) == 1:
            return self._one_source(self.parts[0], num_samples, seed)
        return self._blend(num_samples, seed)

    def _one_source(self, part: SourceSlice, num_samples: int | None, seed: int) -> SourceDataset:
        """Build the samples of one source; of one epoch if ``num_samples`` is None."""
        build = self._concatenated if self.packing == "concat" else self._packed
        try:
            dataset = build(*part, num_samples, seed)
        except DataError as error:
            raise DataError(f"{part[0].prefix}: {error}") from error
        return dataset if self.fim is None else FimDataset(dataset, self.fim, seed)

    def _concatenated(
        self, indexed: IndexedDataset, sequences: range, num_samples: int | None, seed: int
    ) -> SourceDataset:
        facts = {
            "files": indexed.fingerprint,
            "sequences": [sequences.start, sequences.stop],
            "samples": num_samples,
            "seq_length": self.seq_length,
            "seed": seed,
        }

        def build() -> Tables:
            order = build_sample_order(indexed.lengths, sequences, num_samples, self.seq_length, seed)
            return dict(zip(ORDER_TABLES, (order.document_index, order.sample_index, order.shuffle_index)))

        tables = self._tables("order", facts, build, indexed.prefix)
        documents, samples, shuffle = (tables[name] for name in ORDER_TABLES)
        return GPTDataset(indexed, SampleOrder(documents, samples, shuffle, sequences, self.seq_length))

    def _packed(self, indexed: IndexedDataset, sequences: range, num_samples: int | None, seed: int) -> SourceDataset:
        sizes = {"seq_length": self.seq_length, "spare": self._spare}
        facts = {"files": indexed.fingerprint, "sequences": [sequences.start, sequences.stop], **sizes}

        def build() -> Tables:
            first, by_length, runs, bins = pack_files(indexed, sequences, self.seq_length, self._spare)
            return dict(zip(PACKING_TABLES, (first, by_length, runs, *bins)))

        tables = self._tables("packing", facts, build, indexed.prefix)
        first, by_length, runs, kinds, rows = (tables[name] for name in PACKING_TABLES)
        packing = PackedOrder(first, by_length, runs, Bins(kinds, rows))
        return BestFitDataset(indexed, sequences, packing, num_samples, self.seq_length, seed, self._spare)

    def _blend(self, num_samples: int, seed: int) -> BlendedDataset:
        """Blend the sources in proportion to their weights, at least ``num_samples`` samples in all.

        Each source contributes its share of the samples, rounded up, and is built for 0.5 % more. With many sources
        the rounded shares can sum to much more than was requested, and a small source can be too short for its part.
        Megatron-LM stops there; here such a blend ends before the first sample that a source lacks. It still has the
        requested samples: among these, no source is asked for more than its share.

        Without weights, sources contribute one epoch in proportion to its length; the first ``num_samples`` are kept.
        """
        if self.weights is None:
            datasets = [self._one_source(part, None, seed) for part in self.parts]
            shares: Sequence[float] = list(map(len, datasets))
            size = min(num_samples, sum(map(len, datasets)))
        else:
            shares = normalize_weights(self.weights).tolist()
            targets = [ceil(num_samples * share) for share in shares]
            requested = [ceil(target * (1 + OVERSAMPLING)) for target in targets]
            datasets = [self._one_source(part, samples, seed) for part, samples in zip(self.parts, requested)]
            size = sum(targets)
        # the blend index normalises the shares a second time, as Megatron-LM does: the last bit decides ties
        index = truncate_blend(self._blend_index(shares, size), list(map(len, datasets)))
        return BlendedDataset(datasets, *index, None if self.weights is None else shares)

    def _extend(self, blend: BlendedDataset, num_samples: int, seed: int) -> BlendedDataset:
        """Continue a blend in the proportions of its weights, or of the sources' samples in one epoch.

        Each source first contributes what is left of its order, so that no sample is repeated before all others were
        read, and then a new order of another seed.
        """
        shares = blend.weights or [len(segments_of(dataset)[0]) for dataset in blend.datasets]
        index = self._blend_index(shares, num_samples)
        more = count_datasets(index[0], len(self.parts))
        datasets: list[Dataset] = []
        for dataset, part, taken, added in zip(blend.datasets, self.parts, blend.taken, more):
            missing = taken + added - len(dataset)
            if missing > 0:
                dataset = ConcatDataset([*segments_of(dataset), self._one_source(part, missing, seed)])
            datasets.append(dataset)
        return BlendedDataset(datasets, *index, blend.weights, blend.taken)

    def _blend_index(self, weights: Sequence[float], size: int) -> BlendIndex:
        def build() -> Tables:
            datasets, samples = build_blend_index(weights, size)
            return {"datasets": datasets, "samples": samples}

        tables = self._tables("blend", {"weights": list(weights), "size": size}, build)
        return tables["datasets"], tables["samples"]

    def _tables(self, kind: str, facts: Mapping[str, object], build: Callable[[], Tables], source: str = "") -> Tables:
        return build() if self.cache is None else self.cache.tables(kind, facts, build, source)


def _check_order(facts: Mapping[str, Any], tables: Tables) -> None:
    """Raise ValueError unless the tables have the types, shapes and ranges of `build_sample_order`."""
    documents, samples, shuffle = (tables[name] for name in ORDER_TABLES)
    start, stop = facts["sequences"]
    epochs = len(documents) // (stop - start)
    _check_table("documents", documents, np.int32, (epochs * (stop - start),))
    _check_range("documents", documents, start, stop)
    _check_table("shuffle", shuffle, shuffle_dtype(len(shuffle)), (len(shuffle),))
    _check_range("shuffle", shuffle, 0, len(shuffle))
    _check_table("samples", samples, place_dtype(len(documents)), (len(shuffle) + 1, 2))
    _check_range("samples", samples[:, 0], 0, len(documents))  # `IndexedDataset.get` checks the offsets beside them


def _check_packing(facts: Mapping[str, Any], tables: Tables) -> None:
    """Raise ValueError unless the tables have the types, shapes and ranges of `pack_files`."""
    first, by_length, runs, kinds, rows = (tables[name] for name in PACKING_TABLES)
    pieces = len(by_length)
    _check_table("first", first, np.int64, (len(first),))
    _check_rising("first", first, pieces)
    _check_table("by_length", by_length, shuffle_dtype(pieces), (pieces,))
    _check_range("by_length", by_length, 0, pieces)
    _check_table("runs", runs, np.int64, (len(runs),))
    _check_rising("runs", runs, pieces)
    _check_table("kinds", kinds, np.int64, (len(kinds), 3))
    _check_rising("kinds", kinds[:, 0], int(kinds[-1, 0]))
    _check_rising("kinds", kinds[:, 1], len(rows))
    _check_range("kinds", kinds[:, 2].copy(), 0, facts["seq_length"] + 1)
    _check_table("rows", rows, np.int64, (len(rows), 2))
    _check_range("rows", rows, 0, pieces + 1)


def _check_rising(name: str, numbers: NDArray[Any], end: int) -> None:
    if numbers[0] != 0 or numbers[-1] != end or (np.diff(numbers) < 0).any():
        raise ValueError(f"{name} has numbers that do not rise from 0 to {end}")


def _check_blend(facts: Mapping[str, Any], tables: Tables) -> None:
    """Raise ValueError unless the tables have the types, shapes and ranges of `build_blend_index`."""
    size = facts["size"]
    _check_table("datasets", tables["datasets"], np.int16, (size,))
    _check_range("datasets", tables["datasets"], 0, len(facts["weights"]))
    _check_table("samples", tables["samples"], np.int64, (size,))
    _check_range("samples", tables["samples"], 0, size)


def _check_table(name: str, table: NDArray[Any], dtype: DTypeLike, shape: tuple[int, ...]) -> None:
    if table.dtype != dtype or table.shape != shape:
        raise ValueError(f"{name} has type {table.dtype} and shape {list(table.shape)}, not {dtype} and {list(shape)}")


def _check_range(name: str, numbers: NDArray[Any], start: int, stop: int) -> None:
    unsigned = numbers.view(f"u{numbers.itemsize}")  # negative numbers are the largest
    if numbers.size and (int(unsigned.max()) >= stop or (start and int(numbers.min()) < start)):
        raise ValueError(f"{name} has numbers that are not from {start} to {stop - 1}")


TABLE_CHECKS = {"order": _check_order, "packing": _check_packing, "blend": _check_blend, "epoch": check_token_sums}
"""Checks of the tables in the cache, by kind."""


def _short_part(parts: Iterable[SourceSlice], source: SplitSource, seq_length: int) -> SourceSlice | None:
    """Return the first part that is empty, or shorter than a sample where exactly one epoch is read."""
    one_epoch = source.blend.weights is None and len(source.blend.prefixes) > 1
    needed = seq_length + 1 if one_epoch else 1
    return next((part for part in parts if part[0].count_tokens(part[1]) < needed), None)


def _suggest_split(
    sources: Mapping[str, SplitSource], needed: Iterable[str], open_files: OpenFiles, seq_length: int
) -> str | None:
    """Return the ``--split`` that leaves every needed split a sample of each of its files, if one is found.

    Candidates give 1, 2, 4, ... sequences of the smallest file to each evaluation split.
    """
    cut = {split: sources[split] for split in needed if sources[split].split is not None}
    kinds = {split_kind(split) for split in cut}
    smallest = min((len(open_files(prefix)) for source in cut.values() for prefix in source.blend.prefixes), default=0)
    for power in range(smallest.bit_length()):
        valid, test = (2**power * int(kind in kinds) for kind in SPLITS[1:])
        text = f"{smallest - valid - test},{valid},{test}"
        tried = {split: replace(source, split=text) for split, source in cut.items()}
        if smallest > valid + test and all(
            _short_part(split_parts(split, source, open_files), source, seq_length) is None
            for split, source in tried.items()
        ):
            return f"--split {text}"
    return None
