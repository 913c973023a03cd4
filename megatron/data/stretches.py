"""The samples of each split of a run, segment by segment.

The number of samples requested decides their order. A run that continues beyond its plan therefore appends a segment
with its own seed, instead of building a longer order, and no earlier sample changes its place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from megatron.config.data_paths import SPLITS, Source, data_sources
from megatron.config.run import DataConfig, TrainingConfig
from megatron.data.blend import BlendedDataset
from megatron.data.build import Part, build_stretch, extend_blend
from megatron.data.cache import Cache
from megatron.data.chain import ChainedDataset
from megatron.data.dataset import Dataset
from megatron.data.errors import DataError
from megatron.data.mock import MockDataset
from megatron.data.parts import Shortage, TokenFiles, better_splits, is_default, too_short
from megatron.data.splits import kind_of, spoken

Maker = Callable[[int, Sequence[Dataset]], Dataset]
"""From the number of samples and the segments before to the next segment."""


def lay_out(split: str, make: Maker, stretches: Sequence[int], used: int) -> tuple[ChainedDataset, tuple[int, ...]]:
    """Build the segments of a split, and add segments while they hold fewer than ``used`` samples.

    All samples of a segment count, also those beyond the number it was built for, so that a started epoch is read to
    its end. Returns the samples and the sample counts of all segments.

    Raises:
        DataError: when a segment holds no sample.
    """
    counts, held = list(stretches), 0
    segments: list[Dataset] = []
    while len(segments) < len(counts) or held < used:
        if len(segments) == len(counts):
            counts.append(used - held)
        dataset = make(counts[len(segments)], segments)
        if not len(dataset):
            raise DataError(f"the {spoken(split)} data hold no sample", "use more data")
        segments.append(dataset)
        held += len(dataset)
    return ChainedDataset(segments), tuple(counts)


def generators(training: TrainingConfig, vocab_size: int) -> dict[str, Maker]:
    """Return the segment builders of mock data, by split."""

    def generator(stream: int) -> Maker:
        def make(samples: int, before: Sequence[Dataset]) -> Dataset:
            first = sum(map(len, before))
            return MockDataset(vocab_size, training.seq_length, samples, training.seed, stream, first)

        return make

    return {split: generator(stream) for stream, split in enumerate(SPLITS)}


def readers(
    data: DataConfig, read: Mapping[str, int], training: TrainingConfig, cache: Cache | None
) -> tuple[dict[str, Maker], list[str]]:
    """Return the segment builders of the token files for each split in ``read`` (samples by split name), and notes.

    Test data are left out, with a note, where only the default split asks for them and there are none.

    Raises:
        DataError: when files are damaged, or a source of a needed split is too short for one sample.
    """
    files, sources = TokenFiles(), sources_of(data, read)
    builders: dict[str, Maker] = {}
    notes = []
    for split, needed in read.items():
        source = sources[split]
        parts = files.parts(split, source)
        short = list(too_short(parts, source, training.seq_length))
        if not short:
            builders[split] = _file_builder(parts, source.blend.weights, training, cache)
            continue
        default = is_default(data, source)
        wanted = [other for other in read if kind_of(other) != "test" or split == "test" or not default]
        better = better_splits(sources, wanted, files, training.seq_length)
        shortage = Shortage(split, source, short, training.seq_length, default, better)
        if split != "test" or not default:
            raise shortage.error(needed)
        notes.append(shortage.note())
    return builders, notes


def sources_of(data: DataConfig, needed: Iterable[str]) -> dict[str, Source]:
    """Return the data source of each split; needed splits without files of their own use the files that are cut.

    Raises:
        DataError: when there are no files for a needed split.
    """
    sources = data_sources(data)
    cut = next((source for source in sources.values() if source.split is not None), None)
    for split in needed:
        if split not in sources and cut is None:
            raise DataError(f"there are no {spoken(split)} data", f"--{kind_of(split)}-data-path PREFIX")
        if split not in sources and cut is not None:
            sources[split] = cut
    return sources


def _file_builder(
    parts: Sequence[Part], weights: Sequence[float] | None, training: TrainingConfig, cache: Cache | None
) -> Maker:
    def make(samples: int, before: Sequence[Dataset]) -> Dataset:
        seed = training.seed + len(before)
        if before and isinstance(before[-1], BlendedDataset):
            return extend_blend(before[-1], parts, samples, training.seq_length, seed, cache)
        return build_stretch(parts, weights, samples, training.seq_length, seed, cache)

    return make
