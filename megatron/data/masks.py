"""What the special ids in a sample do: where documents end, which labels count.

Shapes: b samples of s tokens. The order of what is done is Megatron-LM's: documents and positions are read off the
tokens as they are stored, padding is blanked last.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

BLANK = 0
"""The id that stands for padding in what the model reads; no label of it counts."""


class Columns(NamedTuple):
    """A micro-batch as arrays.

    Attributes:
        tokens: int64 ``[b, s]`` ids the model reads.
        labels: int64 ``[b, s]`` ids it should predict.
        loss_mask: float32 ``[b, s]``, 1 where a label counts, 0 where not.
        positions: int64 ``[b, s]``, or None for 0..s-1 in every sample.
        documents: int64 ``[b, s]``, or None where attention may reach back to the start of the sample.
    """

    tokens: NDArray[np.int64]
    labels: NDArray[np.int64]
    loss_mask: NDArray[np.float32]
    positions: NDArray[np.int64] | None
    documents: NDArray[np.int64] | None


@dataclass(frozen=True)
class Masks:
    """What a run makes of the special ids in its samples.

    Attributes:
        eod: the id that ends a document; None where no mask needs to know it.
        pad: the id that fills what is left of a sample; None where there is none, or where it means something else too.
        reset_positions: count positions anew in every document.
        reset_attention: let attention not reach back beyond the start of the document.
        drop_eod: let labels of which the input is ``eod`` not count: what begins a document cannot be known.
    """

    eod: int | None = None
    pad: int | None = None
    reset_positions: bool = False
    reset_attention: bool = False
    drop_eod: bool = False

    def __post_init__(self) -> None:
        """Raises ValueError when documents are to be told apart, but not what ends them."""
        if self.eod is None and (self.reset_positions or self.reset_attention or self.drop_eod):
            raise ValueError("masks of documents need the id of the end of a document")

    def describe(self) -> str | None:
        """What is made of documents, for people; None where nothing is."""
        done = [
            words
            for flag, words in (
                (self.reset_attention, "attention stays within one"),
                (self.reset_positions, "positions start anew in each"),
                (self.drop_eod, "what follows an end does not count"),
            )
            if flag
        ]
        return f"end with id {self.eod}: {', '.join(done)}" if done else None

    def columns(self, tokens: NDArray[np.int64], labels: NDArray[np.int64]) -> Columns:
        """The micro-batch of ``tokens`` and ``labels`` ``[b, s]``, which are not changed."""
        counts = np.ones(tokens.shape, dtype=np.float32)
        positions = documents = None
        if self.eod is not None:
            positions = document_positions(tokens, self.eod) if self.reset_positions else None
            documents = document_ids(tokens, self.eod) if self.reset_attention else None
            counts[(tokens == self.eod) & self.drop_eod] = 0.0
        if self.pad is not None:
            counts[labels == self.pad] = 0.0
            tokens, labels = (np.where(ids == self.pad, BLANK, ids) for ids in (tokens, labels))
        return Columns(tokens, labels, counts, positions, documents)


def document_ids(tokens: NDArray[np.int64], eod: int) -> NDArray[np.int64]:
    """How many documents have ended before each of ``tokens [b, s]``; ``eod`` itself belongs to the one it ends."""
    ended = np.zeros(tokens.shape, dtype=np.int64)
    np.cumsum(tokens[:, :-1] == eod, axis=1, out=ended[:, 1:])
    return ended


def document_boundaries(documents: NDArray[np.int64]) -> NDArray[np.int32]:
    """Where runs of equal ids begin in the rows of ``documents [b, s]`` laid end to end, and where the last ends."""
    begins = np.ones(documents.shape, dtype=np.bool_)
    np.not_equal(documents[:, 1:], documents[:, :-1], out=begins[:, 1:])
    return np.append(np.flatnonzero(begins), documents.size).astype(np.int32)


def document_positions(tokens: NDArray[np.int64], eod: int) -> NDArray[np.int64]:
    """The place of each of ``tokens [b, s]`` in its document, or in the part of it that is in the sample."""
    places = np.broadcast_to(np.arange(tokens.shape[1], dtype=np.int64), tokens.shape)
    starts = np.zeros(tokens.shape, dtype=np.int64)
    starts[:, 1:] = np.where(tokens[:, :-1] == eod, places[:, 1:], 0)
    return places - np.maximum.accumulate(starts, axis=1)
