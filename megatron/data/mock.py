"""Generated samples that a model can learn, for trying out a run without data."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from megatron.data.dataset import Dataset, Reading, Sample
from megatron.data.digest import fingerprint

ALPHABET = 256
JUMP_PROBABILITY = 1 / 8


class MockDataset(Dataset):
    """A Markov chain over at most 256 ids drawn from the whole vocabulary.

    Each id has one successor, followed with probability 7/8; else the chain jumps to any id of the alphabet. A model
    starts at log(vocab_size), soon knows the alphabet, log(256) = 5.5 nats, then learns the successors:
    the entropy of the chain is about 1.1 nats per token.

    Sample ``i`` of a stream depends on ``(seed, stream, i)`` only; the alphabet and its successors on ``seed``, so that
    streams (training, validation, ...) are different text in the same language. ``alphabet`` lists the ids, each
    followed by its successor, the last by the first.
    """

    def __init__(
        self, vocab_size: int, seq_length: int, num_samples: int, seed: int, stream: int = 0, first: int = 0
    ) -> None:
        """Samples ``first .. first + num_samples - 1`` of a stream, as samples 0, 1, ... of this dataset."""
        self.alphabet = _random(seed).permutation(vocab_size)[:ALPHABET].astype(np.int64)
        self.seq_length = seq_length
        self._vocab_size = vocab_size
        self._num_samples = num_samples
        self._first = first
        self._key = (seed, stream)

    def __len__(self) -> int:
        return self._num_samples

    def describe(self, tokens: int) -> str:
        """That they are generated."""
        return f"{tokens:,} generated tokens over {len(self.alphabet)} ids"

    def readings(self, samples: int) -> tuple[Reading, ...]:
        """Nothing is read."""
        return ()

    @property
    def fingerprint(self) -> str:
        """Of everything but which samples of the stream these are, which changes none of them."""
        return fingerprint("mock", self._vocab_size, self.seq_length, *self._key)

    def identities(self, places: NDArray[np.int64]) -> NDArray[np.uint64]:
        """Their places in the stream."""
        return (places + self._first).astype(np.uint64)

    def __getitem__(self, i: int) -> Sample:
        if not 0 <= i < self._num_samples:
            raise IndexError(f"sample {i} of a mock dataset of {self._num_samples}")
        random = _random(*self._key, self._first + i)
        length, letters = self.seq_length + 1, len(self.alphabet)
        jumps = random.random_sample(length) < JUMP_PROBABILITY
        steps = np.where(jumps, random.randint(letters, size=length), 1)
        steps[0] = random.randint(letters)
        return Sample.of(self.alphabet[np.cumsum(steps) % letters])


def _random(*key: int) -> np.random.RandomState:
    """The generator whose stream numpy keeps the same in every version."""
    return np.random.RandomState(np.array(key, dtype=np.uint32))
