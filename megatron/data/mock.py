"""Generated samples that a model can learn, for runs without data."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from megatron.data.dataset import Dataset, Reading, Sample
from megatron.data.digest import fingerprint

ALPHABET = 256
JUMP_PROBABILITY = 1 / 8


class MockDataset(Dataset):
    """A Markov chain over at most 256 ids drawn from the whole vocabulary.

    Each id has one successor, followed with probability 7/8; otherwise the chain jumps to a random id of the alphabet.
    A model's loss starts at log(vocab_size), falls to log(256) = 5.5 nats once it knows the alphabet, and to the
    entropy of the chain, about 1.1 nats per token, once it knows the successors.

    Sample ``i`` of a stream depends on ``(seed, stream, i)`` only. The alphabet and the successors depend on ``seed``
    only, so that training and validation are different text in the same language.
    """

    def __init__(
        self, vocab_size: int, seq_length: int, num_samples: int, seed: int, stream: int = 0, first: int = 0
    ) -> None:
        """Serve samples ``first .. first + num_samples - 1`` of a stream as samples 0, 1, ... of this dataset."""
        # int64 ids, each followed by its successor, the last by the first
        self.alphabet = _random(seed).permutation(vocab_size)[:ALPHABET].astype(np.int64)
        self.seq_length = seq_length
        self._vocab_size = vocab_size
        self._num_samples = num_samples
        self._first = first
        self._key = (seed, stream)

    def __len__(self) -> int:
        return self._num_samples

    def describe(self, tokens: int) -> str:
        """Describe the data in one line."""
        return f"{tokens:,} generated tokens over {len(self.alphabet)} ids"

    def readings(self, samples: int) -> tuple[Reading, ...]:
        """Return an empty tuple: generated data have no sources."""
        return ()

    @property
    def fingerprint(self) -> str:
        """16 hexadecimal digits of vocabulary size, sequence length, seed and stream."""
        return fingerprint("mock", self._vocab_size, self.seq_length, *self._key)

    def identities(self, places: NDArray[np.int64]) -> NDArray[np.uint64]:
        """Return the samples' positions in the stream."""
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
    # RandomState, whose stream numpy keeps the same in every version
    return np.random.RandomState(np.array(key, dtype=np.uint32))
