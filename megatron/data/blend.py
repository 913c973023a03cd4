"""Several datasets read in turns, in proportion to weights, in Megatron-LM's exact order.

At every place of the stream the dataset that lags most behind its share gives its next sample. `blend_index` says
which one that is, and the how-manieth of its samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from megatron.config.data_paths import MOST_SOURCES
from megatron.data.dataset import Dataset, Reading, Sample
from megatron.data.digest import fingerprint, mix
from megatron.data.errors import DataError

WORTH_COMPILING = 1_000_000  # comparisons
PLACES_PER_BLOCK = 1 << 20  # counted at once: numpy counts in a copy of eight bytes per place

BlendIndex = tuple[NDArray[np.int16], NDArray[np.int64]]
"""For every place of a blend, ``[n]`` each: the number of its dataset, and the number of the sample there."""


def normalised(weights: ArrayLike) -> NDArray[np.float64]:
    """Weights ``[k]`` over their sum.

    Raises:
        DataError: when there are too many or too few, or one is not above 0 and finite.
    """
    given = np.asarray(weights, dtype=np.float64)
    if not 1 <= len(given) <= MOST_SOURCES:
        raise DataError(f"a blend has 1 to {MOST_SOURCES:,} sources, not {len(given):,}", "merge some of them")
    wrong = np.flatnonzero(~(np.isfinite(given) & (given > 0)))
    if wrong.size:
        k = int(wrong[0])
        raise DataError(f"weight {k + 1} of a blend is {given[k]}, not a number above 0", "leave out that source")
    return given / given.sum()


def blend_index(weights: ArrayLike, size: int) -> BlendIndex:
    """The first ``size`` places of a blend of datasets without end.

    Place ``i`` is given to the first dataset ``k`` with the largest ``weights[k] * max(i, 1) - taken[k]``, in doubles,
    where the weights are divided by their sum and ``taken`` counts the places given to a dataset before.

    Raises:
        DataError: as `normalised`, or when numba is needed and not installed.
    """
    return _interleave(normalised(weights), np.full(np.size(weights), size, dtype=np.int64), size)


def exhaustive_index(sizes: Sequence[int]) -> BlendIndex:
    """All samples of datasets of ``sizes`` samples, in proportion: as `blend_index`, over those not yet used up.

    Raises:
        DataError: as `normalised`, or when numba is needed and not installed.
    """
    weights = normalised(sizes)
    held = np.asarray(sizes, dtype=np.int64)
    return _interleave(weights, held, int(held.sum()))


def within(index: BlendIndex, sizes: Sequence[int]) -> BlendIndex:
    """The places of a blend before the first that asks a dataset for more than its ``sizes[k]`` samples."""
    datasets, samples = index
    if all(asked <= size for asked, size in zip(counts(datasets, len(sizes)), sizes)):
        return index
    end = int(np.argmax(samples >= np.asarray(sizes)[datasets]))
    return datasets[:end], samples[:end]


def counts(datasets: NDArray[np.int16], k: int) -> list[int]:
    """How often each of ``k`` datasets occurs."""
    found = np.zeros(k, dtype=np.int64)
    for at in range(0, len(datasets), PLACES_PER_BLOCK):
        found += np.bincount(datasets[at : at + PLACES_PER_BLOCK], minlength=k)
    return found.tolist()


def _interleave(weights: NDArray[np.float64], sizes: NDArray[np.int64], total: int) -> BlendIndex:
    """`_take_turns`, compiled where that does not take longer than the turns."""
    take_turns = _take_turns if total * len(weights) < WORTH_COMPILING else _compiled()
    return take_turns(weights, sizes, total)


def _take_turns(weights: NDArray[np.float64], sizes: NDArray[np.int64], total: int) -> BlendIndex:
    """``total`` places for datasets of ``sizes`` samples, which are at least ``total`` together."""
    datasets = np.empty(total, dtype=np.int16)
    samples = np.empty(total, dtype=np.int64)
    taken = np.zeros(len(weights), dtype=np.int64)
    for i in range(total):
        place = max(float(i), 1.0)
        chosen, most = 0, -np.inf
        for k in range(len(weights)):
            lag = weights[k] * place - taken[k]
            if lag > most and taken[k] < sizes[k]:
                chosen, most = k, lag
        datasets[i] = chosen
        samples[i] = taken[chosen]
        taken[chosen] += 1
    return datasets, samples


@cache
def _compiled() -> Any:
    """`_take_turns` as machine code; without fast mathematics, so that every sum is rounded as in Python."""
    try:
        import numba
    except ImportError as error:
        raise DataError("numba is needed for blends of so many samples", "pip install numba") from error
    return numba.njit("Tuple((int16[::1], int64[::1]))(float64[::1], int64[::1], int64)")(_take_turns)


class BlendedDataset(Dataset):
    """Samples of several datasets in the order of a `BlendIndex`.

    Attributes:
        datasets: the sources.
        index: int16 ``[n]``, the number of the source at each place.
        weights: those asked for over their sum; None where the sources give in proportion to their lengths.
        taken: of each source, how many of its samples are read by the end of the blend, ``begun`` among them.
    """

    def __init__(
        self,
        datasets: Sequence[Dataset],
        dataset_index: NDArray[np.int16],
        dataset_sample_index: NDArray[np.int64],
        weights: Sequence[float] | None = None,
        begun: Sequence[int] | None = None,
    ) -> None:
        """Blend ``datasets``, each from its sample ``begun[k]`` on: those before were read earlier.

        Raises:
            ValueError: when a dataset is asked for more samples than it has.
        """
        self.datasets = tuple(datasets)
        self.seq_length = self.datasets[0].seq_length
        self.index = dataset_index
        self._sample_index = dataset_sample_index
        self.weights = None if weights is None else tuple(weights)
        self._begun = np.zeros(len(datasets), np.int64) if begun is None else np.asarray(begun, np.int64)
        self.taken: list[int] = (self._begun + counts(dataset_index, len(datasets))).tolist()
        for dataset, asked in zip(self.datasets, self.taken):
            if asked > len(dataset):
                source = dataset.readings(0)[0].source
                raise ValueError(f"{asked:,} samples of {source}, which holds {len(dataset):,}")

    def __len__(self) -> int:
        return len(self.index)

    def __getitem__(self, i: int) -> Sample:
        if not 0 <= i < len(self):
            raise IndexError(f"sample {i} of a blend of {len(self)}")
        k = int(self.index[i])
        return self.datasets[k][int(self._begun[k] + self._sample_index[i])]

    def readings(self, samples: int) -> tuple[Reading, ...]:
        """What the first ``samples`` samples read of each dataset."""
        read = counts(self.index[:samples], len(self.datasets))
        return tuple(reading for dataset, n in zip(self.datasets, read) for reading in dataset.readings(n))

    @cached_property
    def fingerprint(self) -> str:
        """Of the datasets, in their order, and of the weights, whichever multiple of them was given."""
        weights = None if self.weights is None else [f"{weight:.12g}" for weight in self.weights]
        return fingerprint("blend", weights, *(dataset.fingerprint for dataset in self.datasets))

    def identities(self, places: NDArray[np.int64]) -> NDArray[np.uint64]:
        """Which dataset each of the samples ``places [n]`` is from, mixed with its identity there."""
        found = np.empty(len(places), dtype=np.uint64)
        numbers = self.index[places]
        samples = self._begun[numbers] + self._sample_index[places]
        by_dataset = np.argsort(numbers, kind="stable")
        used, begins = np.unique(numbers[by_dataset], return_index=True)
        for k, at in zip(used.tolist(), np.split(by_dataset, begins[1:])):
            found[at] = mix(self.datasets[k].identities(samples[at]) + np.uint64(k + 1))
        return found
