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


class Dataset(Protocol):
    """Samples by number; sample ``i`` is the same whoever asks, whenever."""

    def __len__(self) -> int: ...

    def __getitem__(self, i: int) -> Sample: ...

    def describe(self, tokens: int) -> str:
        """Where ``tokens`` tokens of it come from, for people."""

    @property
    def fingerprint(self) -> str:
        """16 hexadecimal digits of what the samples are made from, wherever it lies and however many are drawn."""

    def identities(self, places: NDArray[np.int64]) -> NDArray[np.uint64]:
        """A number for each of the samples ``places [n]`` that changes where their order does."""
