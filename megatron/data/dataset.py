"""What every source of samples looks like to the loader."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray


class Sample(NamedTuple):
    """One training sequence of ``s`` tokens.

    Attributes:
        tokens: int64 ``[s]`` ids the model reads.
        labels: int64 ``[s]`` ids it should predict: the tokens one place further on.
    """

    tokens: NDArray[np.int64]
    labels: NDArray[np.int64]

    @classmethod
    def of(cls, text: NDArray[np.int64]) -> Sample:
        """The sample in ``s + 1`` consecutive ids."""
        return cls(text[:-1], text[1:])


class Reading(NamedTuple):
    """How much of one source is read.

    Attributes:
        source: its name.
        tokens: read of it.
        once: tokens of one pass.
    """

    source: str
    tokens: int
    once: int

    @property
    def epochs(self) -> float:
        """Passes over the source."""
        return self.tokens / self.once

    def __str__(self) -> str:
        """A line for people."""
        return f"{self.tokens:,} tokens = {self.epochs:.2f} epochs of {self.once:,} in {self.source}"


class Dataset(Protocol):
    """Samples by number; sample ``i`` is the same whoever asks, whenever.

    Attributes:
        seq_length: tokens of a sample.
    """

    seq_length: int

    def __len__(self) -> int: ...

    def __getitem__(self, i: int) -> Sample: ...

    def readings(self, samples: int) -> tuple[Reading, ...]:
        """What the first ``samples`` samples read, source by source; nothing where they are generated."""

    @property
    def fingerprint(self) -> str:
        """16 hexadecimal digits of what the samples are made from, wherever it lies and however many are drawn."""

    def identities(self, places: NDArray[np.int64]) -> NDArray[np.uint64]:
        """A number for each of the samples ``places [n]`` that changes where their order does."""

    def describe(self, tokens: int) -> str:
        """Where the first ``tokens`` tokens come from, for people: a line per source."""
        return "\n".join(map(str, self.readings(tokens // self.seq_length)))

    def epochs(self, samples: int) -> float:
        """How often the most-read source is read by the first ``samples`` samples; 0.0 where they are generated."""
        return max((reading.epochs for reading in self.readings(samples)), default=0.0)
