"""Dropout that is the same in every layout: counter-based, keyed by what is dropped."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.kernels.dropout import Dropout, dropout, keep_mask
from megatron.parallel.microbatch import MicroBatch
from megatron.parallel.random import hash_of


def dropout_rows(
    x_SBH: Tensor,
    probability: float,
    batch: MicroBatch,
    seed: int,
    site: str,
    first_row: int,
    kernel: Dropout = dropout,
) -> Tensor:
    """Dropout of the residual stream.

    Args:
        x_SBH: this rank's rows of the sequence.
        probability: of an element being dropped; the others grow by ``1 / (1 - probability)``.
        batch: its sample ids and step.
        seed: of the run.
        site: global name of the place in the model.
        first_row: position in the sequence of row 0 (not 0 with sequence parallelism).
        kernel: what computes it.

    """
    if probability == 0.0:
        return x_SBH
    key = torch.full((), hash_of(seed, batch.step, site), device=x_SBH.device)
    return kernel(x_SBH, probability, key, batch.sample_ids, first_row)


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
