"""Counter-based dropout: the mask is a function of global coordinates, so it is the same in every layout."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.distributed.random import stable_hash
from megatron.kernels.dropout import keep_mask
from megatron.layers.build import ForwardContext


def hidden_dropout(x_SBH: Tensor, probability: float, ctx: ForwardContext, site: str) -> Tensor:
    """Apply dropout to this rank's rows of the residual stream, in training.

    Args:
        x_SBH: rows of the sequence, from ``ctx.first_row`` on.
        probability: of dropping an element; the others are scaled by ``1 / (1 - probability)``.
        ctx: sample ids, step and seed, which key the mask.
        site: global name of the place in the model, which keys the mask too.

    """
    if probability == 0.0 or not ctx.training:
        return x_SBH
    key = torch.full((), stable_hash(ctx.seed, ctx.batch.step, site), device=x_SBH.device)
    return ctx.kernels.dropout(x_SBH, probability, key, ctx.batch.sample_ids, ctx.first_row)


def attention_dropout(
    weights_BNST: Tensor, probability: float, ctx: ForwardContext, site: str, first_head: int
) -> Tensor:
    """Apply dropout to attention weights, in training; ``first_head`` is the global index of head 0."""
    if probability == 0.0 or not ctx.training:
        return weights_BNST
    _, n, _, t = weights_BNST.shape
    heads = torch.arange(first_head, first_head + n, device=weights_BNST.device).view(-1, 1, 1)
    keep = keep_mask(
        probability,
        stable_hash(ctx.seed, ctx.batch.step, site),
        ctx.batch.sample_ids.view(-1, 1, 1, 1),
        ctx.mask.query_positions.view(-1, 1),
        heads * t + ctx.mask.key_positions,
    )
    return weights_BNST * keep * (1.0 / (1.0 - probability))
