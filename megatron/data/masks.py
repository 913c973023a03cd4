"""Loss mask, position ids and document ids of a micro-batch, from the special ids in its tokens.

Shapes: b samples of s tokens. The order is Megatron-LM's: documents and positions are computed from the tokens as
stored, padding ids are replaced last.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

PAD_REPLACEMENT = 0  # replaces the padding id in tokens and labels


class BatchArrays(NamedTuple):
    """A micro-batch as arrays."""

    tokens: NDArray[np.int64]  # int64 [b, s], the model's inputs
    labels: NDArray[np.int64]  # int64 [b, s], the next token at each position
    loss_mask: NDArray[np.float32]  # float32 [b, s], 1 where a label counts, else 0
    positions: NDArray[np.int64] | None  # int64 [b, s]; None: 0..s-1 in every sample
    documents: NDArray[np.int64] | None  # int64 [b, s]; None: attention sees the whole sample


@dataclass(frozen=True)
class MaskBuilder:
    """Which masks a run derives from the special ids in its samples."""

    eod: int | None = None  # the id that ends a document; None if no mask needs it
    pad: int | None = None  # the padding id; None if there is none, or if it has another meaning too
    reset_positions: bool = False  # restart positions in every document
    reset_attention: bool = False  # no attention across documents
    mask_eod_loss: bool = False  # no loss where the input is ``eod``: the start of a document cannot be predicted

    def __post_init__(self) -> None:
        if self.eod is None and (self.reset_positions or self.reset_attention or self.mask_eod_loss):
            raise ValueError("document masks need the end-of-document id")

    def describe(self) -> str | None:
        """Describe the document options for the run's summary; None if none is on."""
        effects = (
            (self.reset_attention, "no attention across documents"),
            (self.reset_positions, "positions restart in each"),
            (self.mask_eod_loss, "no loss on the first token of each"),
        )
        active = [text for flag, text in effects if flag]
        return f"end with id {self.eod}: {', '.join(active)}" if active else None

    def build(self, tokens: NDArray[np.int64], labels: NDArray[np.int64]) -> BatchArrays:
        """Build the arrays of a micro-batch of ``tokens`` and ``labels`` ``[b, s]``, which are not modified."""
        loss_mask = np.ones(tokens.shape, dtype=np.float32)
        positions = documents = None
        if self.eod is not None:
            positions = document_positions(tokens, self.eod) if self.reset_positions else None
            documents = document_ids(tokens, self.eod) if self.reset_attention else None
            loss_mask[(tokens == self.eod) & self.mask_eod_loss] = 0.0
        if self.pad is not None:
            loss_mask[labels == self.pad] = 0.0
            tokens, labels = (np.where(ids == self.pad, PAD_REPLACEMENT, ids) for ids in (tokens, labels))
        return BatchArrays(tokens, labels, loss_mask, positions, documents)


def document_ids(tokens: NDArray[np.int64], eod: int) -> NDArray[np.int64]:
    """Return how many documents end before each of ``tokens [b, s]``; ``eod`` is part of the document it ends."""
    ended = np.zeros(tokens.shape, dtype=np.int64)
    np.cumsum(tokens[:, :-1] == eod, axis=1, out=ended[:, 1:])
    return ended


def document_boundaries(documents: NDArray[np.int64]) -> NDArray[np.int32]:
    """Return where each run of equal ids starts in the flattened ``documents [b, s]``, then the total size.

    These are the cumulative sequence lengths that variable-length attention kernels take.
    """
    begins = np.ones(documents.shape, dtype=np.bool_)
    np.not_equal(documents[:, 1:], documents[:, :-1], out=begins[:, 1:])
    return np.append(np.flatnonzero(begins), documents.size).astype(np.int32)


def document_positions(tokens: NDArray[np.int64], eod: int) -> NDArray[np.int64]:
    """Return the position of each of ``tokens [b, s]`` in its document, or in the part of it inside the sample."""
    places = np.broadcast_to(np.arange(tokens.shape[1], dtype=np.int64), tokens.shape)
    starts = np.zeros(tokens.shape, dtype=np.int64)
    starts[:, 1:] = np.where(tokens[:, :-1] == eod, places[:, 1:], 0)
    return places - np.maximum.accumulate(starts, axis=1)
