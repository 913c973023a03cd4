"""Pre-norm transformer block: attention and MLP (or experts), each with a residual connection."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megatron.config.model import ModelConfig
from megatron.distributed.random import stable_hash
from megatron.layers.attention import SelfAttention
from megatron.layers.context import BuildContext, ForwardContext
from megatron.layers.mlp import MLP
from megatron.layers.moe import MixtureOfExperts
from megatron.layers.norm import Norm
from megatron.layers.recompute import recompute, recompute_producer


class Block(nn.Module):
    """``x + drop(attention(norm(x)))``, then ``x + drop(mlp(norm(x)))``, on ``[S(/tp), B, H]``.

    Also returns the router's losses, ``[2]``, or None in a block without experts.
    """

    def __init__(self, config: ModelConfig, context: BuildContext, recomputed: frozenset[str]) -> None:
        """Build the block; ``recomputed`` are the modules that are recomputed in backward (``recompute_modules``)."""
        super().__init__()
        self.recomputed, self.dropout = recomputed, config.hidden_dropout
        self.attention_site, self.mlp_site = context.name("attention_dropout"), context.name("mlp_dropout")
        self.input_layernorm = Norm(config, context.submodule("input_layernorm"))
        self.self_attention = SelfAttention(config, context.submodule("self_attention"), "core_attn" in recomputed)
        self.pre_mlp_layernorm = Norm(config, context.submodule("pre_mlp_layernorm"))
        drop_activation = "activation" in recomputed and "mlp" not in recomputed  # a recomputed MLP keeps no activation
        feed_forward = MLP if config.num_experts is None else MixtureOfExperts
        self.mlp = feed_forward(config, context.submodule("mlp"), drop_activation)

    def forward(self, x_SBH: Tensor, ctx: ForwardContext) -> tuple[Tensor, Tensor | None]:
        """Apply the block."""
        drop_norm = "layernorm" in self.recomputed
        y = recompute_producer(self.input_layernorm, x_SBH, lambda n: self.self_attention(n, ctx), drop_norm)
        y = hidden_dropout(y, self.dropout, ctx, self.attention_site)
        if "mlp" in self.recomputed:
            x_SBH = x_SBH + y
            y, losses = recompute(lambda x: self._feed_forward(self.pre_mlp_layernorm(x), ctx), x_SBH)
        elif drop_norm:
            x_SBH = x_SBH + y
            y, losses = recompute_producer(
                self.pre_mlp_layernorm, x_SBH, lambda n: self._feed_forward(n, ctx), drop=True
            )
        else:
            x_SBH, n_SBH = self.pre_mlp_layernorm.forward_sum(x_SBH, y)
            y, losses = self._feed_forward(n_SBH, ctx)
        return x_SBH + hidden_dropout(y, self.dropout, ctx, self.mlp_site), losses

    def _feed_forward(self, n_SBH: Tensor, ctx: ForwardContext) -> tuple[Tensor, Tensor | None]:
        if isinstance(self.mlp, MixtureOfExperts):
            y, losses = self.mlp(n_SBH, ctx.batch)
            return y, losses
        return self.mlp(n_SBH), None


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
