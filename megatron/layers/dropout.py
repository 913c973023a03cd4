"""Dropout that is the same in every layout: counter-based, keyed by what is dropped."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.parallel.microbatch import MicroBatch
from megatron.parallel.random import hash_of, keep_mask


def dropout_rows(x_SBH: Tensor, probability: float, batch: MicroBatch, seed: int, site: str, first_row: int) -> Tensor:
    """Dropout of the residual stream.

    Args:
        x_SBH: this rank's rows of the sequence.
        probability: of an element being dropped; the others grow by ``1 / (1 - probability)``.
        batch: its sample ids and step.
        seed: of the run.
        site: global name of the place in the model.
        first_row: position in the sequence of row 0 (not 0 with sequence parallelism).

    """
    if probability == 0.0:
        return x_SBH
    s, _, h = x_SBH.shape
    device = x_SBH.device
    keep = keep_mask(
        probability,
        hash_of(seed, batch.step, site),
        batch.sample_ids.view(1, -1, 1),
        torch.arange(first_row, first_row + s, device=device).view(-1, 1, 1),
        torch.arange(h, device=device),
    )
    return x_SBH * keep * (1.0 / (1.0 - probability))


def dropout_attention(
    weights_BNQK: Tensor, probability: float, batch: MicroBatch, seed: int, site: str, first_head: int
) -> Tensor:
    """Dropout of attention weights ``[batch, heads, queries, keys]``; ``first_head`` is the global index of head 0."""
    if probability == 0.0:
        return weights_BNQK
    _, n, q, k = weights_BNQK.shape
    device = weights_BNQK.device
    heads = torch.arange(first_head, first_head + n, device=device).view(-1, 1, 1)
    keep = keep_mask(
        probability,
        hash_of(seed, batch.step, site),
        batch.sample_ids.view(-1, 1, 1, 1),
        torch.arange(q, device=device).view(-1, 1),
        heads * k + torch.arange(k, device=device),
    )
    return weights_BNQK * keep * (1.0 / (1.0 - probability))
