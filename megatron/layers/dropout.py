"""Counter-based dropout: the mask is a function of global coordinates, so it is the same in every layout."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.distributed.micro_batch import MicroBatch
from megatron.distributed.random import stable_hash
from megatron.kernels.dropout import DropoutKernel, dropout, keep_mask


def dropout_rows(
    x_SBH: Tensor,
    probability: float,
    batch: MicroBatch,
    seed: int,
    site: str,
    first_row: int,
    kernel: DropoutKernel = dropout,
) -> Tensor:
    """Apply dropout to the residual stream.

    Args:
        x_SBH: this rank's rows of the sequence.
        probability: of dropping an element; the others are scaled by ``1 / (1 - probability)``.
        batch: supplies the sample ids and the step that key the mask.
        seed: of the run.
        site: global name of the place in the model, which keys the mask too.
        first_row: position in the sequence of row 0 (not 0 with sequence parallelism).
        kernel: the implementation.

    """
    if probability == 0.0:
        return x_SBH
    key = torch.full((), stable_hash(seed, batch.step, site), device=x_SBH.device)
    return kernel(x_SBH, probability, key, batch.sample_ids, first_row)


def dropout_attention(
    weights_BNQK: Tensor, probability: float, batch: MicroBatch, seed: int, site: str, first_head: int
) -> Tensor:
    """Apply dropout to attention weights ``[batch, heads, queries, keys]``; ``first_head`` is head 0's global index."""
    if probability == 0.0:
        return weights_BNQK
    _, n, q, k = weights_BNQK.shape
    device = weights_BNQK.device
    heads = torch.arange(first_head, first_head + n, device=device).view(-1, 1, 1)
    keep = keep_mask(
        probability,
        stable_hash(seed, batch.step, site),
        batch.sample_ids.view(-1, 1, 1, 1),
        torch.arange(q, device=device).view(-1, 1),
        heads * k + torch.arange(k, device=device),
    )
    return weights_BNQK * keep * (1.0 / (1.0 - probability))
