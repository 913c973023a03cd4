"""Datasets end to end: what a run read so far, and what a longer run appends to it.

How many samples were asked for decides the order of a dataset, so a run that goes on for longer than it was planned
for does not ask anew: it appends a stretch of its own seed, and no earlier sample changes its place.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from megatron.data.dataset import Dataset, Reading, Sample


def stretches_of(dataset: Dataset) -> tuple[Dataset, ...]:
    """What a dataset is a chain of: itself where it is none."""
    return dataset.stretches if isinstance(dataset, ChainedDataset) else (dataset,)


class ChainedDataset(Dataset):
    """Stretches of samples of the same sources, one after another; at least one."""

    def __init__(self, stretches: Sequence[Dataset]) -> None:
        self.stretches = tuple(stretches)
        self.seq_length = self.stretches[0].seq_length
        self._starts = [0, *accumulate(map(len, self.stretches))]

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, i: int) -> Sample:
        if not 0 <= i < len(self):
            raise IndexError(f"sample {i} of a dataset of {len(self)}")
        stretch = bisect_right(self._starts, i) - 1
        return self.stretches[stretch][i - self._starts[stretch]]

    def describe(self, tokens: int) -> str:
        """Where the first ``tokens`` tokens come from, for people: a line per source."""
        return super().describe(tokens) or self.stretches[0].describe(tokens)

    def readings(self, samples: int) -> tuple[Reading, ...]:
        """What the first ``samples`` samples read, source by source, over all stretches."""
        counts = [min(max(samples - start, 0), len(s)) for start, s in zip(self._starts, self.stretches)]
        by_source = zip(*(stretch.readings(n) for stretch, n in zip(self.stretches, counts)))
        return tuple(same[0]._replace(tokens=sum(reading.tokens for reading in same)) for same in by_source)

    @property
    def fingerprint(self) -> str:
        """That of every stretch: they are made from the same sources."""
        return self.stretches[0].fingerprint

    def identities(self, places: NDArray[np.int64]) -> NDArray[np.uint64]:
        """The identities of the samples ``places [n]`` in their stretches."""
        found = np.empty(len(places), dtype=np.uint64)
        numbers = np.searchsorted(self._starts, places, side="right") - 1
        for k in np.unique(numbers).tolist():
            at = numbers == k
            found[at] = self.stretches[k].identities(places[at] - self._starts[k])
        return found
