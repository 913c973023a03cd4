"""The samples of each split of a run, stretch by stretch.

How many samples were asked for decides their order, so a run that goes on for longer than it was planned for does not
ask anew: it appends a stretch, and what that needs of new order is made with a seed of its own.
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
"""From the samples asked for and the stretches before it to a stretch."""


def lay_out(split: str, make: Maker, stretches: Sequence[int], used: int) -> tuple[ChainedDataset, tuple[int, ...]]:
    """The ``stretches`` end to end, and more of them as long as they hold fewer than ``used`` samples.

    All samples of a stretch count, also those beyond the number it was made for, so that what was begun of an epoch is
    read to its end. Returns the stretches with those that were added.

    Raises:
        DataError: when a stretch holds no sample.
    """
    counts, held = list(stretches), 0
    made: list[Dataset] = []
    while len(made) < len(counts) or held < used:
        if len(made) == len(counts):
            counts.append(used - held)
        dataset = make(counts[len(made)], made)
        if not len(dataset):
            raise DataError(f"the {spoken(split)} data hold no sample", "use more data")
        made.append(dataset)
        held += len(dataset)
    return ChainedDataset(made), tuple(counts)


def generators(training: TrainingConfig, vocab_size: int) -> dict[str, Maker]:
    """Makers of generated samples."""

    def generator(stream: int) -> Maker:
        def make(samples: int, before: Sequence[Dataset]) -> Dataset:
            first = sum(map(len, before))
            return MockDataset(vocab_size, training.seq_length, samples, training.seed, stream, first)

        return make

    return {split: generator(stream) for stream, split in enumerate(SPLITS)}


def readers(
    data: DataConfig, read: Mapping[str, int], training: TrainingConfig, cache: Cache | None
) -> tuple[dict[str, Maker], list[str]]:
    """Makers of the samples in token files for each split of ``read``, which says how many of them are needed.

    Test data are left out, with a note, where nobody asked for them (the split is the default) and there are none.

    Raises:
        DataError: when files are damaged, or no sample of a needed split can be cut from one of its sources.
    """
    files, sources = TokenFiles(), sources_of(data, read)
    makers: dict[str, Maker] = {}
    notes = []
    for split, needed in read.items():
        source = sources[split]
        parts = files.parts(split, source)
        short = list(too_short(parts, source, training.seq_length))
        if not short:
            makers[split] = _reader(parts, source.blend.weights, training, cache)
            continue
        default = is_default(data, source)
        wanted = [other for other in read if kind_of(other) != "test" or split == "test" or not default]
        better = better_splits(sources, wanted, files, training.seq_length)
        shortage = Shortage(split, source, short, training.seq_length, default, better)
        if split != "test" or not default:
            raise shortage.error(needed)
        notes.append(shortage.note())
    return makers, notes


def sources_of(data: DataConfig, needed: Iterable[str]) -> dict[str, Source]:
    """Where the samples of each split come from; those of needed splits without a weight from the same files.

    Raises:
        DataError: when there are no files for a split that is needed.
    """
    sources = data_sources(data)
    cut = next((source for source in sources.values() if source.split is not None), None)
    for split in needed:
        if split not in sources and cut is None:
            raise DataError(f"there are no {spoken(split)} data", f"--{kind_of(split)}-data-path PREFIX")
        if split not in sources and cut is not None:
            sources[split] = cut
    return sources


def _reader(
    parts: Sequence[Part], weights: Sequence[float] | None, training: TrainingConfig, cache: Cache | None
) -> Maker:
    def make(samples: int, before: Sequence[Dataset]) -> Dataset:
        seed = training.seed + len(before)
        if before and isinstance(before[-1], BlendedDataset):
            return extend_blend(before[-1], parts, samples, training.seq_length, seed, cache)
        return build_stretch(parts, weights, samples, training.seq_length, seed, cache)

    return make
