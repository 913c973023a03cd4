"""The residual stream between layers: what a mixer adds to it, dropout, and noise on embeddings.

Both random changes are functions of (seed, step, place in the model, sample, position, channel), and so the same in
every layout.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from megatron.distributed.random import stable_hash
from megatron.kernels.bias import with_bias_gradient
from megatron.kernels.dropout import uniform_noise
from megatron.layers.context import ForwardContext


class MixerOutput(NamedTuple):
    """Output of a mixer."""

    # ``[S(/tp), B, H]``, added to the residual stream.
    y: Tensor
    # The bias that y contains, if its gradient is still to be taken (see :mod:`megatron.kernels.bias`).
    bias: Tensor | None = None
    # Losses of a router ``[2]``, summed over the layers; None without.
    losses: Tensor | None = None

    def sum(self) -> Tensor:
        """Return ``y`` with the gradient of its bias."""
        return with_bias_gradient(self.y, self.bias)


class Residual(NamedTuple):
    """The hidden state as a sum ``x + y`` that is still to be taken: the next norm takes it in its own kernel."""

    x: Tensor
    # Output of a mixer; None if there is nothing to add.
    y: Tensor | None = None
    # The bias that y contains, if its gradient is still to be taken.
    y_bias: Tensor | None = None

    def sum(self) -> Tensor:
        """Return ``x + y``."""
        return self.x if self.y is None else self.x + with_bias_gradient(self.y, self.y_bias)


def add_losses(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    """Return the sum of the losses of layers, of which some have none."""
    return b if a is None else a if b is None else a + b


def hidden_dropout(x_SBH: Tensor, probability: float, ctx: ForwardContext, site: str) -> Tensor:
    """Apply dropout to this rank's rows of the residual stream, in training.

    Args:
        x_SBH: rows of the sequence, at ``ctx.rows``.
        probability: of dropping an element; the others are scaled by ``1 / (1 - probability)``.
        ctx: sample ids, step and seed, which key the mask.
        site: global name of the place in the model, which keys the mask too.

    """
    if probability == 0.0 or not ctx.training:
        return x_SBH
    return ctx.kernels.dropout(x_SBH, probability, _key(ctx, site, x_SBH), ctx.batch.sample_ids, ctx.row_positions)


def embedding_noise(x_SBH: Tensor, alpha: float, ctx: ForwardContext) -> Tensor:
    """Add NEFTune's noise to embeddings, in training: uniform in +-alpha / sqrt(tokens of the document x H).

    Source: Jain et al., "NEFTune: Noisy Embeddings Improve Instruction Finetuning", arXiv 2310.05914.
    """
    if alpha == 0.0 or not ctx.training:
        return x_SBH
    batch, channels = ctx.batch, torch.arange(x_SBH.shape[2], device=x_SBH.device)
    positions = ctx.row_positions
    noise = uniform_noise(
        _key(ctx, "neftune", x_SBH), batch.sample_ids.view(1, -1, 1), positions.view(-1, 1, 1), channels
    )
    lengths_BS = batch.document_lengths()[:, positions]
    scale_SB1 = alpha * (lengths_BS * x_SBH.shape[2]).double().rsqrt().t().unsqueeze(-1)
    return x_SBH + (noise * scale_SB1).to(x_SBH)


def _key(ctx: ForwardContext, site: str, like: Tensor) -> Tensor:
    """Return the key of the random numbers of a place in the model, on the device of ``like``."""
    return torch.full((), stable_hash(ctx.seed, ctx.batch.step, site), device=like.device)
