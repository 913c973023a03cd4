"""Concatenated datasets: the segments that a run has read, and those that a longer run appends.

The number of samples requested decides the order of a dataset. A run that continues beyond its plan appends a segment
with its own seed, and no earlier sample changes its place.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from megatron.data.dataset import Dataset, Reading, Sample


def stretches_of(dataset: Dataset) -> tuple[Dataset, ...]:
    """Return the segments of a dataset; the dataset itself if it is not concatenated."""
    return dataset.stretches if isinstance(dataset, ChainedDataset) else (dataset,)


class ChainedDataset(Dataset):
    """Segments of samples of the same sources, one after another; at least one."""

    def __init__(self, stretches: Sequence[Dataset]) -> None:
        self.stretches = tuple(stretches)
        self.seq_length = self.stretches[0].seq_length
        self._starts = [0, *accumulate(map(len, self.stretches))]

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, i: int) -> Sample:
        if not 0 <= i < len(self):
            raise IndexError(f"sample {i} of a dataset of {len(self)}")
        k = bisect_right(self._starts, i) - 1
        return self.stretches[k][i - self._starts[k]]

    def describe(self, tokens: int) -> str:
        """Describe the sources of the first ``tokens`` tokens, one line per source."""
        return super().describe(tokens) or self.stretches[0].describe(tokens)

    def readings(self, samples: int) -> tuple[Reading, ...]:
        """Return the tokens that the first ``samples`` samples read from each source, over all segments."""
        counts = [min(max(samples - start, 0), len(segment)) for start, segment in zip(self._starts, self.stretches)]
        by_source = zip(*(segment.readings(n) for segment, n in zip(self.stretches, counts)))
        return tuple(parts[0]._replace(tokens=sum(part.tokens for part in parts)) for parts in by_source)

    @property
    def fingerprint(self) -> str:
        """The fingerprint of every segment: they are made from the same sources."""
        return self.stretches[0].fingerprint

    def identities(self, places: NDArray[np.int64]) -> NDArray[np.uint64]:
        """Return the hashes of the samples ``places [n]`` in their segments."""
        hashes = np.empty(len(places), dtype=np.uint64)
        numbers = np.searchsorted(self._starts, places, side="right") - 1
        for k in np.unique(numbers).tolist():
            at = numbers == k
            hashes[at] = self.stretches[k].identities(places[at] - self._starts[k])
        return hashes
