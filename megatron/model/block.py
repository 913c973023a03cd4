"""Transformer block: attention and MLP (or experts), each with norms and a residual connection."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor, nn

from megatron.config.model import ModelConfig
from megatron.distributed.random import stable_hash
from megatron.kernels.bias import with_bias_gradient
from megatron.kernels.dropout import uniform_noise
from megatron.layers.attention import SelfAttention
from megatron.layers.context import BuildContext, ForwardContext
from megatron.layers.mlp import MLP
from megatron.layers.moe import MixtureOfExperts
from megatron.layers.norm import Norm, Residual
from megatron.layers.recompute import recompute, recompute_producer

T = TypeVar("T")


class Block(nn.Module):
    """``x + drop(attention(norm(x)))``, then ``x + drop(mlp(norm(x)))``, on ``[S(/tp), B, H]``.

    A norm is before attention and MLP, after them, or both. In a parallel block both take the same ``x``.

    Takes and returns the hidden state as a :class:`Residual`, whose sum the next norm takes. Also returns the router's
    losses, ``[2]``, or None in a block without experts.
    """

    def __init__(
        self,
        config: ModelConfig,
        context: BuildContext,
        layer: int,
        recomputed: frozenset[str],
        mlp_chunk_size: int | None,
    ) -> None:
        """Build the block.

        Args:
            config: of the model.
            context: of the block.
            layer: its global index.
            recomputed: the modules that are recomputed in backward (``recompute_modules``).
            mlp_chunk_size: rows of the MLP that are computed at a time; None for all at once.

        """
        super().__init__()
        self.recomputed, self.dropout = recomputed, config.hidden_dropout
        self.parallel, self.multiplier = config.parallel_attention, config.residual_multiplier
        in_chunks = mlp_chunk_size is not None and config.num_experts is None  # then the MLP recomputes itself
        self.recompute_mlp = "mlp" in recomputed and not in_chunks
        self.attention_site, self.mlp_site = context.name("attention_dropout"), context.name("mlp_dropout")
        before, after = config.layernorm_placement != "post", config.layernorm_placement != "pre"
        self.input_layernorm = Norm(config, context.submodule("input_layernorm")) if before else None
        self.self_attention = SelfAttention(
            config, context.submodule("self_attention"), layer, "core_attn" in recomputed
        )
        post = context.submodule("post_self_attn_layernorm")
        self.post_self_attn_layernorm = Norm(config, post) if after else None
        self.pre_mlp_layernorm = Norm(config, context.submodule("pre_mlp_layernorm")) if before else None
        drop_activation = "activation" in recomputed and "mlp" not in recomputed  # a recomputed MLP keeps no activation
        feed_forward = MLP if config.num_experts is None else MixtureOfExperts
        self.mlp = feed_forward(config, context.submodule("mlp"), drop_activation, mlp_chunk_size)
        self.post_mlp_layernorm = Norm(config, context.submodule("post_mlp_layernorm")) if after else None

    def forward(self, residual: Residual, ctx: ForwardContext) -> tuple[Residual, Tensor | None]:
        """Apply the block."""
        x_SBH, y = self._apply_to_norm(self.input_layernorm, residual, lambda n: self.self_attention(n, ctx))
        bias, norm = self.self_attention.linear_proj.bias, self.post_self_attn_layernorm
        attended = self._residual(x_SBH, y, bias, norm, ctx, self.attention_site)
        residual = Residual(x_SBH) if self.parallel else attended
        if self.recompute_mlp:
            x_SBH = residual.sum()
            y, losses = recompute(lambda x: self._feed_forward(_normed(self.pre_mlp_layernorm, x), ctx), x_SBH)
        else:
            x_SBH, (y, losses) = self._apply_to_norm(
                self.pre_mlp_layernorm, residual, lambda n: self._feed_forward(n, ctx), "mlp"
            )
        bias = self.mlp.linear_fc2.bias if isinstance(self.mlp, MLP) else None
        x_SBH = attended.sum() if self.parallel else x_SBH
        return self._residual(x_SBH, y, bias, self.post_mlp_layernorm, ctx, self.mlp_site), losses

    def _apply_to_norm(
        self, norm: Norm | None, residual: Residual, function: Callable[[Tensor], T], *modules: str
    ) -> tuple[Tensor, T]:
        """Return ``x`` and ``function(norm(x))``, x the sum of the residual; ``modules`` recompute the norm, too."""
        if norm is None:
            x_SBH = residual.sum()
            return x_SBH, function(x_SBH)
        if self.recomputed & {"layernorm", *modules}:
            x_SBH = residual.sum()
            return x_SBH, recompute_producer(lambda x: _normed(norm, x), x_SBH, function, drop=True)
        x_SBH, n_SBH = norm(residual)
        return x_SBH, function(n_SBH)

    def _residual(
        self, x_SBH: Tensor, y_SBH: Tensor, bias: Tensor | None, norm: Norm | None, ctx: ForwardContext, site: str
    ) -> Residual:
        """Return ``x + drop(multiplier * norm(y))``; ``y`` contains ``bias``."""
        drops = self.dropout > 0.0 and ctx.training
        if norm is not None or drops or self.multiplier != 1.0:
            y_SBH, bias = with_bias_gradient(y_SBH, bias), None
        y_SBH = _normed(norm, y_SBH)
        y_SBH = y_SBH if self.multiplier == 1.0 else y_SBH * self.multiplier
        return Residual(x_SBH, hidden_dropout(y_SBH, self.dropout, ctx, site), bias)

    def _feed_forward(self, n_SBH: Tensor, ctx: ForwardContext) -> tuple[Tensor, Tensor | None]:
        if isinstance(self.mlp, MixtureOfExperts):
            y, losses = self.mlp(n_SBH, ctx.batch)
            return y, losses
        return self.mlp(n_SBH), None


def _normed(norm: Norm | None, x_SBH: Tensor) -> Tensor:
    return x_SBH if norm is None else norm(Residual(x_SBH))[1]


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
