"""The token files of each split, which of their sequences it reads, and what to do when they are too few."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from megatron.config.data_paths import DEFAULT_SPLIT, SPLITS, Source
from megatron.config.run import DataConfig
from megatron.data.build import Part
from megatron.data.errors import DataError
from megatron.data.files.indexed import IndexedDataset
from megatron.data.gpt_dataset import split_ranges
from megatron.data.splits import kind_of, spoken

MOST_TO_NAME = 8  # files in a suggested command


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

    def parts(self, split: str, source: Source) -> list[Part]:
        """Return the files of a split's sources with the sequences that are its own, possibly none.

        Raises:
            DataError: when files are damaged.
        """
        files = [self.open(prefix) for prefix in source.blend.prefixes]
        if source.split is None:
            return [(indexed, range(len(indexed))) for indexed in files]
        number = SPLITS.index(kind_of(split))
        return [(indexed, split_ranges(source.split, len(indexed))[number]) for indexed in files]


def tokens_of(part: Part) -> int:
    """Return the tokens in the sequences of a part."""
    indexed, sequences = part
    return int(indexed.lengths[sequences.start : sequences.stop].sum(dtype=np.int64))


def too_short(parts: Iterable[Part], source: Source, seq_length: int) -> Iterator[Part]:
    """Yield the parts too short for one sample: empty ones, or below a sample where exactly one epoch is read."""
    needed = seq_length + 1 if _in_proportion(source) else 1
    return (part for part in parts if tokens_of(part) < needed)


def _in_proportion(source: Source) -> bool:
    return source.blend.weights is None and len(source.blend.prefixes) > 1


@dataclass(frozen=True)
class Shortage:
    """Files that are too short for one sample of a split."""

    split: str  # its name
    source: Source  # its data source
    short: Sequence[Part]  # the files that are too short, at least one
    seq_length: int  # tokens per sample
    default: bool  # whether the split is the default one
    better: Sequence[str]  # a ``--split`` that leaves enough of every file, if one exists

    def error(self, needed: int) -> DataError:
        """Return the error for a split of which ``needed`` samples are needed."""
        indexed, sequences = self.short[0]
        kind = spoken(self.split)
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
        return f"{tokens_of(self.short[0]):,} tokens, no sample of {self.seq_length} + 1"

    def _separate_file_fixes(self) -> Iterator[str]:
        """Yield fixes that leave the files to training alone."""
        kind, prefixes = kind_of(self.split), self.source.blend.prefixes
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
        if _in_proportion(self.source) and len(prefixes) <= MOST_TO_NAME:
            command = f"python tools/merge_datasets.py --input {' '.join(prefixes)} --output-prefix merged"
            yield f"{command} and read merged instead"


def better_splits(
    sources: Mapping[str, Source], needed: Iterable[str], files: TokenFiles, seq_length: int
) -> list[str]:
    """Return the ``--split`` that leaves every needed split a sample of each of its files, if one exists."""
    cut = {split: sources[split] for split in needed if sources[split].split is not None}
    sizes = [len(files.open(prefix)) for source in cut.values() for prefix in source.blend.prefixes]

    def leaves_some(split: str, source: Source) -> bool:
        return next(too_short(files.parts(split, source), source, seq_length), None) is None

    for weights in _candidates(min(sizes, default=0), {kind_of(split) for split in cut}):
        text = ",".join(map(str, weights))
        read = [split for split in cut if weights[SPLITS.index(kind_of(split))]]
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


def is_default(data: DataConfig, source: Source) -> bool:
    """Return True if the source is cut by the default ``--split``."""
    return data.split is None and source.split == DEFAULT_SPLIT
