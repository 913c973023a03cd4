"""Combine datasets: interleaved in proportion to weights (`BlendedDataset`), or one after the other (`ConcatDataset`).

A blend follows Megatron-LM's exact order: at every place of the stream, the dataset that lags most behind its share
contributes its next sample. A blend index records which dataset that is, and the number of its sample.

The number of samples requested decides the order of a dataset. A run that continues beyond its plan therefore appends
a segment with its own seed, instead of building a longer order, and no earlier sample changes its place.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from functools import cache, cached_property
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from megatron.config.data_paths import MAX_BLEND_DATASETS
from megatron.data.dataset import Dataset, Sample, SourceUsage, Span, fingerprint, splitmix64
from megatron.data.errors import DataError
from megatron.data.skipped_dataset import SkippedDataset

COMPILE_ABOVE = 1_000_000  # comparisons above which the index is built by compiled code
COUNT_BLOCK = 1 << 20  # bincount copies its input to 8 bytes per place, so count in blocks

BlendIndex = tuple[NDArray[np.int16], NDArray[np.int64]]
"""For every place of a blend, ``[n]`` each: the dataset, and the number of the sample in it."""


def normalize_weights(weights: ArrayLike) -> NDArray[np.float64]:
    """Divide weights ``[k]`` by their sum."""
    values = np.asarray(weights, dtype=np.float64)
    if not 1 <= len(values) <= MAX_BLEND_DATASETS:
        raise DataError(f"a blend has 1 to {MAX_BLEND_DATASETS:,} sources, not {len(values):,}", "merge some of them")
    wrong = np.flatnonzero(~(np.isfinite(values) & (values > 0)))
    if wrong.size:
        k = int(wrong[0])
        raise DataError(f"weight {k + 1} of a blend is {values[k]}, not a number above 0", "leave out that source")
    return values / values.sum()


def build_blend_index(weights: ArrayLike, size: int) -> BlendIndex:
    """Build the first ``size`` places of a blend of unlimited datasets.

    Place ``i`` goes to the first dataset ``k`` with the largest ``weights[k] * max(i, 1) - taken[k]``, in float64,
    where the weights are normalised and ``taken`` counts the places already given to a dataset.
    """
    shares = normalize_weights(weights)
    interleave = _interleave if size * len(shares) < COMPILE_ABOVE else _compiled()
    return interleave(shares, size)


def truncate_blend(index: BlendIndex, sizes: Sequence[int]) -> BlendIndex:
    """Cut a blend before the first place that needs more than the ``sizes[k]`` samples of a dataset."""
    datasets, samples = index
    if all(needed <= size for needed, size in zip(count_datasets(datasets, len(sizes)), sizes)):
        return index
    end = int(np.argmax(samples >= np.asarray(sizes)[datasets]))
    return datasets[:end], samples[:end]


def count_datasets(datasets: NDArray[np.int16], k: int) -> list[int]:
    """Return how often each of ``k`` datasets occurs."""
    total = np.zeros(k, dtype=np.int64)
    for at in range(0, len(datasets), COUNT_BLOCK):
        total += np.bincount(datasets[at : at + COUNT_BLOCK], minlength=k)
    return total.tolist()


def _interleave(weights: NDArray[np.float64], total: int) -> BlendIndex:
    """Fill ``total`` places from datasets with normalised ``weights``."""
    datasets = np.empty(total, dtype=np.int16)
    samples = np.empty(total, dtype=np.int64)
    taken = np.zeros(len(weights), dtype=np.int64)
    for i in range(total):
        place = max(float(i), 1.0)
        chosen, largest_lag = 0, -np.inf
        for k in range(len(weights)):
            lag = weights[k] * place - taken[k]
            if lag > largest_lag:
                chosen, largest_lag = k, lag
        datasets[i] = chosen
        samples[i] = taken[chosen]
        taken[chosen] += 1
    return datasets, samples


@cache
def _compiled() -> Any:
    """Compile `_interleave`, without fast math, so that sums are rounded as in Python."""
    import numba  # takes a while

    return numba.njit("Tuple((int16[::1], int64[::1]))(float64[::1], int64)")(_interleave)


class BlendedDataset(Dataset):
    """Samples of several datasets in the order of a `BlendIndex`."""

    def __init__(
        self,
        datasets: Sequence[Dataset],
        dataset_index: NDArray[np.int16],
        dataset_sample_index: NDArray[np.int64],
        weights: Sequence[float] | None = None,
        begun: Sequence[int] | None = None,
    ) -> None:
        """Blend ``datasets``, each starting at its sample ``begun[k]``; earlier segments read those before.

        Raises:
            ValueError: when the index needs more samples than a dataset has.
        """
        self.datasets = tuple(datasets)  # the sources
        self.seq_length = self.datasets[0].seq_length
        self.dataset_index = dataset_index  # int16 [n], the dataset at each place
        self._dataset_sample_index = dataset_sample_index
        # normalised; None if sources contribute in proportion to their lengths
        self.weights = None if weights is None else tuple(weights)
        self._begun = np.zeros(len(datasets), np.int64) if begun is None else np.asarray(begun, np.int64)
        # samples of each source read by the end of this blend, those of earlier segments included
        self.taken: list[int] = (self._begun + count_datasets(dataset_index, len(datasets))).tolist()
        for dataset, needed in zip(self.datasets, self.taken):
            if needed > len(dataset):
                source = dataset.source_usage(0)[0].source
                raise ValueError(f"{needed:,} samples of {source}, which holds {len(dataset):,}")

    def __len__(self) -> int:
        return len(self.dataset_index)

    def __getitem__(self, i: int) -> Sample:
        dataset, number = self._place(i)
        return dataset[number]

    def spans(self, i: int) -> tuple[Span, ...]:
        """See `Dataset.spans`."""
        dataset, number = self._place(i)
        return dataset.spans(number)

    def places_of(self, sequences: Mapping[str, NDArray[np.int64]]) -> NDArray[np.int64]:
        """See `Dataset.places_of`."""
        held = np.zeros(len(self), dtype=np.bool_)
        for k, dataset in enumerate(self.datasets):
            found = np.zeros(len(dataset), dtype=np.bool_)
            found[dataset.places_of(sequences)] = True
            if found.any():
                at = np.flatnonzero(self.dataset_index == k)
                held[at] = found[self._begun[k] + self._dataset_sample_index[at]]
        return np.flatnonzero(held)

    def _place(self, i: int) -> tuple[Dataset, int]:
        """Return the dataset of sample ``i``, and the sample's number in it."""
        if not 0 <= i < len(self):
            raise IndexError(f"sample {i} of a blend of {len(self)}")
        k = int(self.dataset_index[i])
        return self.datasets[k], int(self._begun[k] + self._dataset_sample_index[i])

    def source_usage(self, samples: int) -> tuple[SourceUsage, ...]:
        """Return the tokens that the first ``samples`` samples read from each dataset."""
        read = count_datasets(self.dataset_index[:samples], len(self.datasets))
        return tuple(usage for dataset, n in zip(self.datasets, read) for usage in dataset.source_usage(n))

    @cached_property
    def fingerprint(self) -> str:
        """See `blend_fingerprint`."""
        return blend_fingerprint([dataset.fingerprint for dataset in self.datasets], self.weights)

    def sample_hashes(self, places: NDArray[np.int64]) -> NDArray[np.uint64]:
        """Hash the dataset of each of the samples ``places [n]`` with the sample's hash in it."""
        hashes = np.empty(len(places), dtype=np.uint64)
        numbers = self.dataset_index[places]
        samples = self._begun[numbers] + self._dataset_sample_index[places]
        by_dataset = np.argsort(numbers, kind="stable")
        used, begins = np.unique(numbers[by_dataset], return_index=True)
        for k, at in zip(used.tolist(), np.split(by_dataset, begins[1:])):
            hashes[at] = splitmix64(self.datasets[k].sample_hashes(samples[at]) + np.uint64(k + 1))
        return hashes


def blend_fingerprint(of_datasets: Sequence[str], weights: Sequence[float] | None) -> str:
    """Return 16 hexadecimal digits of the datasets, in their order, and of the normalised weights."""
    return fingerprint("blend", None if weights is None else [f"{weight:.12g}" for weight in weights], *of_datasets)


def segments_of(dataset: Dataset) -> tuple[Dataset, ...]:
    """Return the segments of a dataset, skipped samples included; the dataset itself if it is not concatenated."""
    if isinstance(dataset, SkippedDataset):
        return segments_of(dataset.dataset)
    if isinstance(dataset, ConcatDataset):
        return tuple(part for segment in dataset.segments for part in segments_of(segment))
    return (dataset,)


class ConcatDataset(Dataset):
    """Segments of samples of the same sources, one after another; at least one."""

    def __init__(self, segments: Sequence[Dataset]) -> None:
        self.segments = tuple(segments)
        self.seq_length = self.segments[0].seq_length
        self._starts = [0, *accumulate(map(len, self.segments))]

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, i: int) -> Sample:
        segment, number = self._place(i)
        return segment[number]

    def spans(self, i: int) -> tuple[Span, ...]:
        """See `Dataset.spans`."""
        segment, number = self._place(i)
        return segment.spans(number)

    def places_of(self, sequences: Mapping[str, NDArray[np.int64]]) -> NDArray[np.int64]:
        """See `Dataset.places_of`."""
        segments = zip(self._starts, self.segments)
        return np.concatenate([start + segment.places_of(sequences) for start, segment in segments])

    def source_of(self, i: int) -> str | None:
        """See `Dataset.source_of`."""
        segment, number = self._place(i)
        return segment.source_of(number)

    def _place(self, i: int) -> tuple[Dataset, int]:
        """Return the segment of sample ``i``, and the sample's number in it."""
        if not 0 <= i < len(self):
            raise IndexError(f"sample {i} of a dataset of {len(self)}")
        k = bisect_right(self._starts, i) - 1
        return self.segments[k], i - self._starts[k]

    def describe(self, tokens: int) -> str:
        """Describe the sources of the first ``tokens`` tokens, one line per source."""
        return super().describe(tokens) or self.segments[0].describe(tokens)

    def source_usage(self, samples: int) -> tuple[SourceUsage, ...]:
        """Return the tokens that the first ``samples`` samples read from each source, over all segments."""
        counts = [min(max(samples - start, 0), len(segment)) for start, segment in zip(self._starts, self.segments)]
        by_source = zip(*(segment.source_usage(n) for segment, n in zip(self.segments, counts)))
        return tuple(parts[0]._replace(tokens=sum(part.tokens for part in parts)) for parts in by_source)

    @property
    def fingerprint(self) -> str:
        """The fingerprint of every segment: they are made from the same sources."""
        return self.segments[0].fingerprint

    def sample_hashes(self, places: NDArray[np.int64]) -> NDArray[np.uint64]:
        """Return the hashes of the samples ``places [n]`` in their segments."""
        hashes = np.empty(len(places), dtype=np.uint64)
        numbers = np.searchsorted(self._starts, places, side="right") - 1
        for k in np.unique(numbers).tolist():
            at = numbers == k
            hashes[at] = self.segments[k].sample_hashes(places[at] - self._starts[k])
        return hashes
