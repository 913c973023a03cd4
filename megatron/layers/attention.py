"""Self-attention with any number of key/value heads (MHA, GQA, MQA).

Also the largest attention logit, a sign of instability that fused kernels do not expose.

Shapes: S sequence, T cached tokens plus the sequence, B batch, H hidden, G this rank's key/value heads, N this rank's
query heads, X query heads per key/value head plus its key and value, D channels of a head.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megatron.config.model import ModelConfig
from megatron.distributed.random import stable_hash
from megatron.kernels.attention import AttentionMask
from megatron.kernels.dropout import keep_mask
from megatron.kernels.qkv import HeadNorms
from megatron.layers.context import BuildContext, ForwardContext
from megatron.layers.linear import ColumnParallelLinear, RowParallelLinear
from megatron.layers.norm import Norm
from megatron.layers.recompute import recompute


class CoreAttention(nn.Module):
    """``softmax(q kᵀ / √D) v`` of this rank's heads.

    Maps ``[S, B, N, D], [T, B, G, D], [T, B, G, D] -> [S, B, N D]``. It has no parameters.
    Query heads ``i N/G`` to ``(i+1) N/G`` attend to key/value head ``i``.
    The mask knows the positions of these queries and keys in the sequence.

    Args:
        config: of the model.
        context: of the enclosing :class:`SelfAttention`.
        groups: key/value heads of this rank.
        queries: query heads per key/value head.
    """

    def __init__(self, config: ModelConfig, context: BuildContext, groups: int, queries: int) -> None:
        super().__init__()
        self.config, self.queries, self.kernels = config, queries, context.kernels
        self.site = context.name("attention_dropout")
        self.first_head = context.tp.rank * groups * queries

    def forward(self, q_SBND: Tensor, k_SBGD: Tensor, v_SBGD: Tensor, ctx: ForwardContext) -> Tensor:
        """Attend within each sample, where the mask permits."""
        if ctx.training and self.config.attention_dropout > 0.0:
            y_SBND = self._attend_with_dropout(q_SBND, k_SBGD, v_SBGD, ctx)
        else:
            y_SBND = self.kernels.attention(q_SBND, k_SBGD, v_SBGD, ctx.mask)
        return y_SBND.flatten(2)

    def _attend_with_dropout(self, q_SBND: Tensor, k_SBGD: Tensor, v_SBGD: Tensor, ctx: ForwardContext) -> Tensor:
        """Compute unfused attention: the dropout of fused kernels depends on the layout."""
        q_BNSD, k_BGSD, v_BGSD = (t.permute(1, 2, 0, 3) for t in (q_SBND, k_SBGD, v_SBGD))
        k_BNSD, v_BNSD = (t.repeat_interleave(self.queries, dim=1) for t in (k_BGSD, v_BGSD))
        scores = q_BNSD.matmul(k_BNSD.transpose(2, 3)) * q_BNSD.shape[3] ** -0.5
        scores = scores.masked_fill(~ctx.mask.dense, float("-inf"))
        weights = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(scores.dtype)
        weights = attention_dropout(weights, self.config.attention_dropout, ctx, self.site, self.first_head)
        return weights.matmul(v_BNSD).permute(2, 0, 1, 3)


class SelfAttention(nn.Module):
    """QKV projection, core attention and output projection: ``[S(/tp), B, H] -> [S(/tp), B, H]``."""

    def __init__(self, config: ModelConfig, context: BuildContext, recompute_core: bool) -> None:
        super().__init__()
        self.kernels = context.kernels
        self.name, self.recompute_core = context.name("core_attention"), recompute_core
        self.linear_qkv = ColumnParallelLinear(context.submodule("linear_qkv"))
        self.linear_proj = RowParallelLinear(context.submodule("linear_proj"))
        self.q_layernorm: Norm | None = None
        self.k_layernorm: Norm | None = None
        if config.qk_layernorm:
            self.q_layernorm = Norm(config, context.submodule("q_layernorm"))
            self.k_layernorm = Norm(config, context.submodule("k_layernorm"))
        groups, rows = context.spec("linear_qkv.weight").local_view[:2]
        self.heads = groups, config.head_dim
        self.core_attention = CoreAttention(config, context, groups, rows - 2)

    def forward(self, x_SBH: Tensor, ctx: ForwardContext) -> Tensor:
        """Attend within each sample."""
        norms, q, k = None, self.q_layernorm, self.k_layernorm
        if q is not None and k is not None:
            norms = HeadNorms(q.weight, q.bias, k.weight, k.bias, q.eps)
        q_SBND, k_SBGD, v_SBGD = self.kernels.split_qkv(
            self.linear_qkv(x_SBH), self.linear_qkv.bias, self.heads, norms, ctx.rotary
        )
        if ctx.cache is not None:
            k_SBGD, v_SBGD = ctx.cache.extend(self.name, k_SBGD, v_SBGD)
        if self.recompute_core:
            y_SBH = recompute(self.core_attention, q_SBND, k_SBGD, v_SBGD, ctx)
        else:
            y_SBH = self.core_attention(q_SBND, k_SBGD, v_SBGD, ctx)
        return self.linear_proj(y_SBH)


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


LOGITS_PER_BLOCK = 1 << 25
"""Logits computed at a time: 128 MiB of fp32."""


@torch.no_grad()
def largest_logit(q_SBND: Tensor, k_SBGD: Tensor, window: int | None, documents_BS: Tensor | None) -> Tensor:
    """Return the largest ``q k / sqrt(D)`` over all pairs that the mask permits, 0-d, in at least fp32.

    Works on blocks of queries, so the S x S matrix is never stored.

    Args:
        q_SBND: queries.
        k_SBGD: keys; query heads ``i N/G`` to ``(i+1) N/G`` attend to key head ``i``.
        window: tokens that a query attends to, itself included; None for all before it.
        documents_BS: as in :class:`~megatron.distributed.micro_batch.MicroBatch`.
    """
    s, b, n, d = q_SBND.shape
    dtype = torch.promote_types(q_SBND.dtype, torch.float32)
    q_BGXSD = q_SBND.unflatten(2, (k_SBGD.shape[2], -1)).permute(1, 2, 3, 0, 4)
    k_BGDS = k_SBGD.permute(1, 2, 3, 0).to(dtype)
    largest = torch.full((), -torch.inf, dtype=dtype, device=q_SBND.device)
    step = max(1, LOGITS_PER_BLOCK // (b * n * s))
    for start in range(0, s, step):
        stop = min(start + step, s)
        documents = None if documents_BS is None else documents_BS[:, :stop]
        mask = AttentionMask.of_sequence(stop, q_SBND.device, window, documents, first_query=start).dense
        rows = q_BGXSD[..., start:stop, :].to(dtype).flatten(2, 3)
        logits = rows.matmul(k_BGDS[..., :stop]).view(b, n, stop - start, stop)
        largest = torch.maximum(largest, logits.masked_fill_(~mask, -torch.inf).amax())
    return largest * d**-0.5
