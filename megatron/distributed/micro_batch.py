"""Micro-batch: the interface between data and model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True)
class MicroBatch:
    """``b`` samples of ``s`` tokens, equal on all tensor- and pipeline-parallel ranks.

    Context-parallel ranks have different tokens of the same samples.
    """

    # int64 [b, s] input ids.
    tokens: Tensor
    # int64 [b, s] target ids.
    labels: Tensor
    # float [b, s], 1 where a label counts, 0 where not.
    loss_mask: Tensor
    # int64 [b], index of each sample in the run's sample stream; keys dropout.
    sample_ids: Tensor
    # Training step; keys dropout.
    step: int = 0
    # int64 [b, s]; None for 0..s-1 in every sample.
    positions: Tensor | None = None
    # int64 [b, S], ids of the documents within which attention stays, in runs, of the whole samples; None for one
    # document per sample.
    documents: Tensor | None = None
    # The same on the CPU; None to copy them where they are needed, which synchronises host and device.
    host_documents: Tensor | None = None
    # int32 [number of documents + 1], starts of the documents in the concatenated samples, then b s. None to compute
    # them from ``documents``, which synchronises host and device.
    boundaries: Tensor | None = None
    # Attention patterns count positions from the start of each document, not of the sample.
    pattern_restarts: bool = False
    # Tokens S of the whole samples, if context parallelism has distributed them; None if this rank has all.
    seq_length: int | None = None
    # Gradient of the global objective with respect to the micro-batch's loss, 0-d, during a pipeline run that ends with
    # backward: with it, the layer that computes the loss can accumulate its weight gradient during forward.
    loss_grad: Tensor | None = None
    # Further tensors by name, for objectives; the same names in every micro-batch.
    extra: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def length(self) -> int:
        """Tokens of the whole samples."""
        return self.seq_length or self.tokens.shape[1]

    def document_lengths(self) -> Tensor:
        """Return the number of tokens ``[b, S]`` of the document of each token of the whole samples, int64."""
        documents = self.documents
        if documents is None:
            return torch.full((self.tokens.shape[0], self.length), self.length, device=self.tokens.device)
        same = documents[:, 1:] == documents[:, :-1]
        runs = torch.nn.functional.pad(~same, (1, 0)).cumsum(1)  # the number of the run that a token is in
        counts = torch.zeros_like(documents).scatter_add_(1, runs, torch.ones_like(runs))
        return counts.gather(1, runs)

    @classmethod
    def of_tokens(cls, tokens: Tensor, positions: Tensor | None = None) -> MicroBatch:
        """Return a micro-batch of tokens ``[b, s]`` for inference: no label counts."""
        mask = torch.zeros_like(tokens, dtype=torch.float32)
        samples = torch.arange(tokens.shape[0], device=tokens.device)
        return cls(tokens, tokens, mask, samples, positions=positions)
