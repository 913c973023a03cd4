"""What one forward and backward computes on: the interface between data and model."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class MicroBatch:
    """``b`` samples of ``s`` tokens; every rank of a data-parallel replica holds the same ones.

    Attributes:
        tokens: int64 ``[b, s]`` ids the model reads.
        labels: int64 ``[b, s]`` ids it should predict.
        loss_mask: float ``[b, s]``, 1 where a label counts, 0 where not.
        sample_ids: int64 ``[b]``, the place of each sample in the run's sample stream; keys dropout.
        step: the training step; keys dropout.
        positions: int64 ``[b, s]``, or None for 0..s-1 in every sample.
        documents: int64 ``[b, s]``, an id that changes where attention must not reach back; None for one document.
        boundaries: int32 ``[number of documents + 1]``, where they begin in the samples laid end to end, and ``b s``;
            None to be read off ``documents``, for which the host waits.
    """

    tokens: Tensor
    labels: Tensor
    loss_mask: Tensor
    sample_ids: Tensor
    step: int = 0
    positions: Tensor | None = None
    documents: Tensor | None = None
    boundaries: Tensor | None = None

    @classmethod
    def of_tokens(cls, tokens: Tensor, positions: Tensor | None = None) -> MicroBatch:
        """Tokens ``[b, s]`` to be read, not learned from: no label counts."""
        mask = torch.zeros_like(tokens, dtype=torch.float32)
        samples = torch.arange(tokens.shape[0], device=tokens.device)
        return cls(tokens, tokens, mask, samples, positions=positions)
