"""Which sequences of which token files the samples of a split are cut from."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from megatron.config.data_paths import DEFAULT_SPLIT, Source
from megatron.config.run import DataConfig
from megatron.data.build import Part
from megatron.data.errors import DataError
from megatron.data.files.indexed import IndexedDataset
from megatron.data.gpt_dataset import SPLITS, split_ranges
from megatron.data.splits import kind_of, spoken


@dataclass
class TokenFiles:
    """The token files of a run, each opened once, however many splits read it."""

    opened: dict[str, IndexedDataset] = field(default_factory=dict)

    def open(self, prefix: str) -> IndexedDataset:
        """The files of a prefix.

        Raises:
            DataError: when they are damaged.
        """
        if prefix not in self.opened:
            self.opened[prefix] = IndexedDataset(prefix)
        return self.opened[prefix]

    def parts(self, split: str, source: Source) -> list[Part]:
        """The files of a split's sources, and which of their sequences are its own; there may be none.

        Raises:
            DataError: when files are damaged.
        """
        files = [self.open(prefix) for prefix in source.blend.prefixes]
        if source.split is None:
            return [(indexed, range(len(indexed))) for indexed in files]
        number = SPLITS.index(kind_of(split))
        return [(indexed, split_ranges(source.split, len(indexed))[number]) for indexed in files]


def without_sequences(parts: Iterable[Part]) -> IndexedDataset | None:
    """The first source that a split gets no sequence of; None where it gets some of each."""
    return next((indexed for indexed, part in parts if not part), None)


def empty_part(
    split: str, source: Source, empty: IndexedDataset, needed: int, fixes: Sequence[str], default: bool
) -> DataError:
    """The error of a split that got no sequence of ``empty``, although ``needed`` samples of it are.

    Args:
        split: its name.
        source: where it comes from.
        empty: the files of which it has nothing.
        needed: samples.
        fixes: what to say instead.
        default: whether nobody said how the source is cut.
    """
    if source.split is None:
        seen = f"{empty.prefix} holds no sequence, but {needed:,} {spoken(split)} samples are needed"
        return DataError(seen, "use more data")
    cut = f"the default --split '{source.split}'" if default else f"--split '{source.split}'"
    return DataError(
        f"{cut} leaves no {spoken(split)} data of the {len(empty):,} sequences in {empty.prefix}, "
        f"but {needed:,} samples are needed",
        *fixes,
        f"a dataset of more documents than {len(empty)}",
    )


def skipped(source: Source, empty: IndexedDataset, fixes: Sequence[str]) -> str:
    """A note on test data that nobody asked for and that there are none of."""
    better = f"; {fixes[0]} leaves some" if fixes else ""
    seen = f"the default --split '{source.split}' leaves none of the {len(empty):,} sequences in {empty.prefix}"
    return f"no test data: {seen}{better}"


def better_splits(sources: Mapping[str, Source], needed: Iterable[str], files: TokenFiles) -> list[str]:
    """The ``--split`` that gives every needed split a sequence of each of its sources, if there is one."""
    cut = {split: source for split, source in sources.items() if source.split is not None}
    kinds = {kind_of(split) for split in needed if split in cut}
    sizes = {len(files.open(prefix)) for source in cut.values() for prefix in source.blend.prefixes}
    for weights in _candidates(min(sizes, default=0), kinds):
        text = ",".join(map(str, weights))
        if all(part for size in sizes for part, weight in zip(split_ranges(text, size), weights) if weight):
            return [f"--split {text}"]
    return []


def _candidates(smallest: int, kinds: set[str]) -> Iterator[tuple[int, int, int]]:
    """Weights that give one sequence of the smallest source to each evaluation; test data are the first to go."""
    for wanted in (kinds, kinds - {"test"}):
        valid, test = (int(kind in wanted) for kind in SPLITS[1:])
        train = smallest - valid - test
        if train > 0:
            yield train, valid, test


def is_default(data: DataConfig, source: Source) -> bool:
    """Whether nobody said how the source is cut."""
    return data.split is None and source.split == DEFAULT_SPLIT
