"""Megatron-LM's sample order as literal loops: slow, obvious, and independent of `megatron.data`."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

EXTRA = 1  # a sample has one id more than tokens: the label of its last token


class Tables(NamedTuple):
    """document_index, sample_index and shuffle_index of a GPTDataset."""

    documents: NDArray[np.int32]
    samples: list[tuple[int, int]]
    shuffle: list[int]
    epochs: int


def tables(lengths: list[int], indices: list[int], size: int | None, seq_length: int, seed: int) -> Tables:
    """Return the tables of the sequences ``indices``, of ``lengths`` tokens, for ``size`` samples or one epoch."""
    tokens = sum(lengths[i] for i in indices)
    epochs = 1
    if size is not None:
        while epochs * tokens < size * seq_length + EXTRA:
            epochs += 1
    apart = False
    without_last = 0
    if epochs > 1 and size is not None:
        without_last = ((epochs - 1) * tokens - EXTRA) // seq_length
        from_last = size - without_last
        per_epoch = (tokens - EXTRA) // seq_length
        if not 0 <= from_last <= per_epoch + 1:
            raise ValueError(f"{from_last} samples of the last epoch, which has {per_epoch}")
        apart = from_last < int(0.80 * per_epoch)

    random = np.random.RandomState(seed)
    if apart:
        most, last = (np.tile(np.array(indices, dtype=np.int32), n) for n in (epochs - 1, 1))
        random.shuffle(most)
        random.shuffle(last)
        documents = np.concatenate([most, last])
    else:
        documents = np.tile(np.array(indices, dtype=np.int32), epochs)
        random.shuffle(documents)

    count = (epochs * tokens - EXTRA) // seq_length
    samples = walk([lengths[i] for i in documents], count, seq_length)

    if apart:
        first, rest = np.arange(0, without_last), np.arange(without_last, count)
        random.shuffle(first)
        if without_last != count:
            random.shuffle(rest)
        shuffle = [*first.tolist(), *rest.tolist()]
    else:
        all_of_them = np.arange(count)
        random.shuffle(all_of_them)
        shuffle = all_of_them.tolist()
    return Tables(documents, samples, shuffle, epochs)


def walk(lengths: list[int], count: int, seq_length: int) -> list[tuple[int, int]]:
    """Return the start of each sample and the end of the last, sequence by sequence."""
    rows, place, offset = [(0, 0)], 0, 0
    for _ in range(count):
        remaining = seq_length + EXTRA
        while remaining != 0:
            length = lengths[place] - offset
            remaining -= length
            if remaining <= 0:
                offset += remaining + length - EXTRA
                remaining = 0
            elif place == len(lengths) - 1:
                offset = lengths[place] - EXTRA
                break
            else:
                place += 1
                offset = 0
        rows.append((place, offset))
    return rows


def item(texts: list[list[int]], made: Tables, i: int) -> list[int]:
    """Return the ids of sample ``i``: its tokens, and the label of the last."""
    j = made.shuffle[i]
    (first, start), (last, end) = made.samples[j], made.samples[j + 1]
    read = [texts[document] for document in made.documents.tolist()]
    if first == last:
        return read[first][start : end + EXTRA]
    whole = [token for text in read[first + 1 : last] for token in text]
    return read[first][start:] + whole + read[last][: end + EXTRA]


def normalised(weights: list[float]) -> list[float]:
    """Over their sum, in float64."""
    array = np.array(weights, dtype=np.float64)
    return (array / np.sum(array)).tolist()


def interleaved(weights: list[float], size: int) -> list[tuple[int, int]]:
    """Dataset and sample at every place of a blend; ``weights`` add up to 1."""
    taken = [0] * len(weights)
    places = []
    for i in range(size):
        errors = [weight * max(float(i), 1.0) - count for weight, count in zip(weights, taken)]
        k = errors.index(max(errors))
        places.append((k, taken[k]))
        taken[k] += 1
    return places


class Blend(NamedTuple):
    """Sizes asked of each dataset (None: one epoch), and the interleaving as a function of what they then hold."""

    asked: list[int | None]
    targets: list[int] | None
    shares: list[float]

    @classmethod
    def of(cls, weights: list[float] | None, sources: int, size: int) -> Blend:
        """Return the sizes to ask of each dataset for a blend of ``size`` samples."""
        if weights is None:
            return cls([None] * sources, None, [])
        shares = normalised(weights)
        targets = [math.ceil(size * share) for share in shares]
        return cls([math.ceil(math.ceil(size * share) * (1 + 0.005)) for share in shares], targets, shares)

    def places(self, size: int, held: list[int]) -> list[tuple[int, int]]:
        """Dataset and sample at every place, where the datasets hold ``held`` samples.

        With weights it is cut before the first sample that a dataset does not hold: the original stops with an error.
        """
        if self.targets is not None:
            places = interleaved(normalised(self.shares), sum(self.targets))
            return places[: next((i for i, (k, j) in enumerate(places) if j >= held[k]), len(places))]
        return interleaved(normalised([float(n) for n in held]), min(size, sum(held)))
