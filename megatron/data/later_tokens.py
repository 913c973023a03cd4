"""The tokens that follow each position further than the next one, for multi-token prediction.

They are taken from whole samples, before context parallelism cuts these: what follows the last token of a rank's part
may be on another rank.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from megatron.config.multi_token import LATER_MASK, LATER_TOKENS

if TYPE_CHECKING:
    from megatron.data.loader import BatchArrays


def columns_of_samples(depths: int, arrays: BatchArrays, eod: int | None) -> dict[str, NDArray[Any]]:
    """Return the columns that predicting ``depths`` further tokens reads; see :data:`SampleColumns`."""
    foreign = None if arrays.documents is None or eod is None else arrays.tokens == eod
    return later_tokens(arrays.labels, arrays.loss_mask, arrays.documents, depths, foreign)


def later_tokens(
    labels: NDArray[np.int64],
    loss_mask: NDArray[np.float32],
    documents: NDArray[np.int64] | None,
    depths: int,
    foreign: NDArray[np.bool_] | None = None,
) -> dict[str, NDArray[Any]]:
    """Return the later tokens ``[b, s, depths + 1]`` of each position, and masks ``[b, s, depths]`` of predictions.

    Token j of position i is the label of position i + j. The prediction of depth k, counted from 0, is that of token
    k + 1. It counts where the label of position i + k + 1 counts, and is in the sample and the document of position i,
    as are all tokens before it. Tokens that are not are 0; no prediction that counts sees these.

    Args:
        labels: ``[b, s]``, the next token at each position.
        loss_mask: ``[b, s]``, 1 where a label counts.
        documents: ``[b, s]``, ids of the documents within which attention stays, in runs; None for one per sample.
        depths: number of further predictions.
        foreign: ``[b, s]``, True where the label is the first token of the next document; None for nowhere.
    """
    b, s = labels.shape
    tokens = np.zeros((b, s, depths + 1), dtype=np.int64)
    mask = np.zeros((b, s, depths), dtype=np.float32)
    reached = np.ones((b, s), dtype=np.bool_)  # the position ``ahead`` further is in the same document
    for ahead in range(min(depths + 1, s)):
        here, there = slice(0, s - ahead), slice(ahead, s)
        if documents is not None and ahead > 0:
            reached = reached[:, here] & (documents[:, there] == documents[:, ahead - 1 : s - 1])
        seen = reached[:, here] if foreign is None else reached[:, here] & ~foreign[:, there]
        tokens[:, here, ahead] = np.where(seen, labels[:, there], 0)
        if ahead > 0:
            mask[:, here, ahead - 1] = loss_mask[:, there] * seen
    return {LATER_TOKENS: tokens, LATER_MASK: mask}
