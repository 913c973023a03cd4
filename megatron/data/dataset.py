"""The interface of a data set: samples by number."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray


class Sample(NamedTuple):
    """One training sequence of ``s`` tokens."""

    tokens: NDArray[np.int64]  # int64 [s], the model's inputs
    labels: NDArray[np.int64]  # int64 [s], the next token at each position

    @classmethod
    def of(cls, text: NDArray[np.int64]) -> Sample:
        """Split ``s + 1`` consecutive ids into inputs and labels."""
        return cls(text[:-1], text[1:])


class Reading(NamedTuple):
    """How much of one source a number of samples reads."""

    source: str  # name
    tokens: int  # tokens read
    once: int  # tokens in one epoch

    @property
    def epochs(self) -> float:
        """Passes over the source."""
        return self.tokens / self.once

    def __str__(self) -> str:
        return f"{self.tokens:,} tokens = {self.epochs:.2f} epochs of {self.once:,} in {self.source}"


class Dataset(Protocol):
    """Samples by number. Sample ``i`` is the same on every rank and at every call."""

    seq_length: int  # tokens per sample

    def __len__(self) -> int: ...

    def __getitem__(self, i: int) -> Sample: ...

    def readings(self, samples: int) -> tuple[Reading, ...]:
        """Return the tokens that the first ``samples`` samples read from each source; empty for generated data."""

    @property
    def fingerprint(self) -> str:
        """16 hexadecimal digits of the content of the samples, independent of paths and of the number of samples."""

    def identities(self, places: NDArray[np.int64]) -> NDArray[np.uint64]:
        """Return a hash of each of the samples ``places [n]``, from which the checkpoint's data digest is computed."""

    def describe(self, tokens: int) -> str:
        """Describe the sources of the first ``tokens`` tokens, one line per source."""
        return "\n".join(map(str, self.readings(tokens // self.seq_length)))

    def epochs(self, samples: int) -> float:
        """Return how often the first ``samples`` samples read the most-read source; 0.0 for generated data."""
        return max((reading.epochs for reading in self.readings(samples)), default=0.0)
