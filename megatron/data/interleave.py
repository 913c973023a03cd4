"""Which source each sample of a stage comes from, in exact proportions at every prefix.

Of ``counts[k]`` samples of source k among ``N``, sample j (from 0) comes at one of the places from
``floor(j N / counts[k])`` to ``ceil((j + 1) N / counts[k]) - 1``. So after every prefix, the samples of each source
differ from its share by less than one. Such an order exists (R. Tijdeman, "The chairman assignment problem",
doi:10.1016/0012-365X(80)90269-1). Taking the sample with the earliest deadline among those whose time has come finds
it, as for all tasks of unit length on one machine (Pfair: Baruah, Cohen, Plaxton and Varvel, doi:10.1007/BF01940883).

The order follows from the samples taken of each source. So any block of it is computed from a state before it, and
nothing as long as the run is kept.
"""

from __future__ import annotations

from collections.abc import MutableSequence, Sequence
from functools import cache, lru_cache
from heapq import heappop, heappush
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron.data.errors import DataError

BLOCK = 1 << 16
"""Samples of a stage whose sources are computed together."""

STATES_KEPT = 16  # blocks between two states that are kept
COMPILE_ABOVE = 1 << 19  # samples above which compiled code is faster, its compilation included
MAX_SAMPLES = 6 * 10**9  # of a stage: products of two numbers up to half of it fit into 64 bits


class Interleave:
    """The source of every sample of a stage with ``counts[k]`` samples of source k."""

    def __init__(self, counts: Sequence[int]) -> None:
        self.counts = np.asarray(counts, dtype=np.int64)
        self.size = int(self.counts.sum())
        if self.size > MAX_SAMPLES:
            raise DataError(f"a stage of {self.size:,} samples is too long", "several stages, or a longer --seq-length")
        self._states = {0: np.zeros_like(self.counts)}  # by block: samples taken before it, of each source
        self._block = lru_cache(maxsize=4)(self._read_block)

    def sources(self, places: NDArray[np.int64]) -> tuple[NDArray[np.int16], NDArray[np.int64]]:
        """Return the source of each of the samples at ``places [n]``, and the number of the sample in the source."""
        source, number = np.empty(len(places), dtype=np.int16), np.empty(len(places), dtype=np.int64)
        blocks = places // BLOCK
        for block in np.unique(blocks).tolist():
            at = blocks == block
            _, sources, numbers = self._block(block)
            inside = places[at] - block * BLOCK
            source[at], number[at] = sources[inside], numbers[inside]
        return source, number

    def taken(self, samples: int) -> NDArray[np.int64]:
        """Return how many of the first ``samples`` samples come from each source."""
        if samples >= self.size:
            return self.counts
        block, inside = divmod(samples, BLOCK)
        before, sources, _ = self._block(block)
        return before + np.bincount(sources[:inside], minlength=len(self.counts))

    def _read_block(self, block: int) -> tuple[NDArray[np.int64], NDArray[np.int16], NDArray[np.int64]]:
        """Return the samples taken before a block, and the source and number of each of its samples."""
        known = max(number for number in self._states if number <= block)
        compiled = (block - known) * BLOCK > COMPILE_ABOVE
        for number in range(known, block + 1):
            before = self._states[number]
            begin = number * BLOCK
            sources, self._states[number + 1] = self._assign(before, begin, min(BLOCK, self.size - begin), compiled)
            if number % STATES_KEPT:
                del self._states[number]
        order = np.argsort(sources, kind="stable")
        sizes = np.bincount(sources, minlength=len(self.counts))
        numbers = np.empty(len(sources), dtype=np.int64)
        numbers[order] = np.arange(len(sources)) - np.repeat(np.cumsum(sizes) - sizes - before, sizes)
        return before, sources, numbers

    def _assign(
        self, before: NDArray[np.int64], begin: int, size: int, compiled: bool
    ) -> tuple[NDArray[np.int16], NDArray[np.int64]]:
        """Return the sources of ``size`` samples from ``begin`` on, and the samples taken after them."""
        if compiled:
            sources, taken = np.empty(size, dtype=np.int64), before.copy()
            _compiled()(self.counts, taken, sources, begin, self.size)
            return sources.astype(np.int16), taken
        listed, counts = [0] * size, before.tolist()
        assign(self.counts.tolist(), counts, listed, begin, self.size)
        return np.array(listed, dtype=np.int16), np.array(counts, dtype=np.int64)


def assign(
    counts: Sequence[int], taken: MutableSequence[int], sources: MutableSequence[int], begin: int, total: int
) -> None:
    """Fill ``sources`` from place ``begin`` of ``total`` on, and count them in ``taken``.

    Entries of both queues are ``place * len(counts) + source``.
    """
    size = len(counts)
    ready, waiting = [0], [0]  # samples by deadline, whose time has come; others by release
    ready.pop()
    waiting.pop()
    releases, rests = [0] * size, [0] * size  # quotient and rest of taken[k] * total / counts[k]
    for k in range(size):
        if taken[k] < counts[k]:
            product = taken[k] * (total % counts[k])
            releases[k] = taken[k] * (total // counts[k]) + product // counts[k]
            rests[k] = product % counts[k]
            heappush(waiting, releases[k] * size + k)
    for place in range(len(sources)):
        while len(waiting) > 0 and waiting[0] // size <= begin + place:
            k = heappop(waiting) % size
            releases[k] += total // counts[k]
            rests[k] += total % counts[k]
            if rests[k] >= counts[k]:
                rests[k] -= counts[k]
                releases[k] += 1  # of the next sample
            deadline = releases[k] - 1 if rests[k] == 0 else releases[k]
            heappush(ready, deadline * size + k)
        k = heappop(ready) % size
        sources[place] = k
        taken[k] += 1
        if taken[k] < counts[k]:
            heappush(waiting, releases[k] * size + k)


@cache
def _compiled() -> Any:
    """Compile `assign`."""
    import numba  # takes a while

    return numba.njit("void(int64[::1], int64[::1], int64[::1], int64, int64)")(assign)
