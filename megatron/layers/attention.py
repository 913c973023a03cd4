"""Self-attention with any number of key/value heads (MHA, GQA, MQA).

Also the largest attention logit, a sign of instability that fused kernels do not expose.

Shapes: S sequence, T cached tokens plus the sequence, B batch, H hidden, G this rank's key/value heads, N this rank's
query heads, X query heads per key/value head plus its key and value, D channels of a head, V of a value.
"""

from __future__ import annotations

from dataclasses import replace
from math import isqrt
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megatron.config.model import ModelConfig, RotaryTable
from megatron.distributed import mappings
from megatron.distributed.random import stable_hash
from megatron.kernels.attention_mask import FULL, PLAIN_SCORES, AttentionMask, AttentionScores
from megatron.kernels.block_attention import AttentionDropout, block_attention
from megatron.kernels.linear import LinearKernel, with_bias_gradient
from megatron.kernels.qkv import HeadNorms
from megatron.layers.context import BuildContext, ForwardContext, MixerOutput
from megatron.layers.linear import ColumnParallelLinear, RowParallelLinear
from megatron.layers.norm import Norm, widened
from megatron.layers.recompute import recompute
from megatron.layers.recompute_plan import RecomputePlan


class CoreAttention(nn.Module):
    """``softmax(scores(q kᵀ)) v`` of this rank's heads; scores are scaled and capped.

    Maps ``[S, B, N, D], [T, B, G, D], [T, B, G, V] -> [S, B, N V]``. Its only parameter is that of learnable sinks.
    Query heads ``i N/G`` to ``(i+1) N/G`` attend to key/value head ``i``. Context-parallel ranks hold parts of the
    sequence, and exchange what their queries see.

    Args:
        config: of the model.
        context: of the enclosing module.
        layer: global index of the block, whose pattern decides which tokens attend to which.
        plan: what is recomputed.
        groups: key/value heads of this rank.
        queries: query heads per key/value head.
        softmax_scale: factor on the products of queries and keys; None for 1 / sqrt(D).
    """

    def __init__(
        self,
        config: ModelConfig,
        context: BuildContext,
        layer: int,
        plan: RecomputePlan,
        groups: int,
        queries: int,
        softmax_scale: float | None,
    ) -> None:
        super().__init__()
        self.kernels, self.cp, self.pattern = context.kernels, context.cp, config.pattern(layer)
        self.recomputed = "core_attn" in plan.modules
        self.site, self.dropout = context.name("attention_dropout"), config.attention_dropout
        self.first_head = context.tp.rank * groups * queries
        self.scores = AttentionScores(softmax_scale, config.attn_logit_softcapping)
        self.softmax_type, self.softmax_offset = config.softmax_type, None
        if config.softmax_type == "learnable":
            self.softmax_offset = context.submodule("core_attention").parameter("softmax_offset", autograd=True)

    def forward(self, q_SBND: Tensor, k_SBGD: Tensor, v_SBGD: Tensor, ctx: ForwardContext) -> Tensor:
        """Attend within each sample, where the mask permits."""
        if self.recomputed:
            return recompute(self._attend, q_SBND, k_SBGD, v_SBGD, ctx)
        return self._attend(q_SBND, k_SBGD, v_SBGD, ctx)

    def _attend(self, q_SBND: Tensor, k_SBGD: Tensor, v_SBGD: Tensor, ctx: ForwardContext) -> Tensor:
        mask, kernel, dropout, scores = ctx.masks[self.pattern], self.kernels.attention, None, self.scores
        if self.softmax_type != "vanilla":
            offset = self.softmax_offset
            sink = q_SBND.new_zeros(q_SBND.shape[2]) if offset is None else widened(offset)
            scores = replace(scores, sink=sink)
        if ctx.training and self.dropout > 0.0:
            key = stable_hash(ctx.seed, ctx.batch.step, self.site)
            dropout = AttentionDropout(self.dropout, key, ctx.batch.sample_ids, self.first_head, ctx.batch.length)
        if self.cp is not None and ctx.batch.seq_length is not None:
            y_SBND = self.cp.attention(q_SBND, k_SBGD, v_SBGD, mask, dropout, kernel, scores)
        elif dropout is not None:
            y_SBND = block_attention(q_SBND, k_SBGD, v_SBGD, mask, dropout, scores=scores)
        else:
            y_SBND = kernel(q_SBND, k_SBGD, v_SBGD, mask, scores)
        return y_SBND.flatten(2)


class SelfAttention(nn.Module):
    """QKV projection, core attention and output projection: ``[S(/tp), B, H] -> [S(/tp), B, H]``."""

    def __init__(
        self, config: ModelConfig, context: BuildContext, layer: int, plan: RecomputePlan, rotary: RotaryTable | None
    ) -> None:
        super().__init__()
        self.kernels, self.tp, self.rotary = context.kernels, context.tp, rotary
        self.name = context.name("core_attention")
        self.linear_qkv = ColumnParallelLinear(context.submodule("linear_qkv"))
        self.linear_proj = RowParallelLinear(context.submodule("linear_proj"))
        self.q_layernorm: Norm | None = None
        self.k_layernorm: Norm | None = None
        if config.qk_layernorm:
            self.q_layernorm = Norm(config, context.submodule("q_layernorm"))
            self.k_layernorm = Norm(config, context.submodule("k_layernorm"))
        self.gated = config.attention_output_gate
        groups, rows = context.spec("linear_qkv.weight").local_view[:2]
        queries = (rows - 2) // (1 + self.gated)
        self.heads, self.norm_all = (groups, config.head_dim), config.qk_layernorm_scope == "all"
        self.core_attention = CoreAttention(config, context, layer, plan, groups, queries, config.softmax_scale)

    def forward(self, x_SBH: Tensor, ctx: ForwardContext) -> MixerOutput:
        """Attend within each sample."""
        norms, q, k, gate_SBO = None, self.q_layernorm, self.k_layernorm, None
        qkv_SBO, bias = self.linear_qkv(x_SBH), self.linear_qkv.bias
        if self.gated:
            qkv_SBO, gate_SBO = self._split_gate(with_bias_gradient(qkv_SBO, bias))
            bias = None
        if q is not None and k is not None and self.norm_all:
            qkv_SBO, bias = self._normalize_all_heads(with_bias_gradient(qkv_SBO, bias), q, k), None
        elif q is not None and k is not None:
            norms = HeadNorms(*q.affine(), *k.affine(), q.eps)
        rotary = None if self.rotary is None else ctx.rotary[self.rotary]
        q_SBND, k_SBGD, v_SBGD = self.kernels.split_qkv(qkv_SBO, bias, self.heads, norms, rotary)
        if ctx.cache is not None:
            k_SBGD, v_SBGD = ctx.cache.extend(self.name, k_SBGD, v_SBGD)
        y_SBO = self.core_attention(q_SBND, k_SBGD, v_SBGD, ctx)
        if gate_SBO is not None:
            y_SBO = _Gated.apply(y_SBO, gate_SBO, self.kernels.linear)
        return MixerOutput(self.linear_proj(y_SBO), self.linear_proj.bias)

    def _split_gate(self, qkv_SBO: Tensor) -> tuple[Tensor, Tensor]:
        """Return the projection without the gates, and the gates; copies, so that each can be freed."""
        qkv_SBGXD = qkv_SBO.unflatten(2, (self.heads[0], -1, self.heads[1]))
        queries = (qkv_SBGXD.shape[3] - 2) // 2
        q, gate, kv = qkv_SBGXD.split((queries, queries, 2), dim=3)
        return torch.cat((q, kv), dim=3).flatten(2), gate.flatten(2).contiguous()

    def _normalize_all_heads(self, qkv_SBO: Tensor, q_norm: Norm, k_norm: Norm) -> Tensor:
        """Divide the queries of a token by their RMS over all heads of all TP ranks, and its keys likewise.

        Ranks that share key/value heads all count them, in the sum and in the number of its terms.
        """
        groups, d = self.heads
        dtype = torch.promote_types(qkv_SBO.dtype, torch.float32)
        qkv_SBGXD = qkv_SBO.unflatten(2, (groups, -1, d)).to(dtype)
        q, k, v = qkv_SBGXD.split((qkv_SBGXD.shape[3] - 2, 1, 1), dim=3)
        sums_2SB = torch.stack([x.square().sum((2, 3, 4)) for x in (q, k)])
        # Each rank uses the sums for its own heads, so their gradient is partial, too.
        sums_2SB = mappings.copy_to_region(mappings.reduce_from_region(sums_2SB, self.tp), self.tp)
        normed = []
        for x, norm, sum_SB in zip((q, k), (q_norm, k_norm), sums_2SB):
            mean_SB = sum_SB / (self.tp.size * x[0, 0].numel())
            scale, _ = norm.affine(wide=True)
            normed.append(x * (mean_SB + norm.eps).rsqrt()[..., None, None, None] * scale.view(groups, -1, d))
        return torch.cat((*normed, v), dim=3).to(qkv_SBO.dtype).flatten(2)


class _Gated(torch.autograd.Function):
    """``y sigmoid(gate)`` in at least fp32 (Qwen3-Next; arXiv 2505.06708); keeps its inputs only."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, gate: Tensor, kernel: LinearKernel) -> Tensor:
        ctx.save_for_backward(y, gate)
        return (y * kernel.elementwise(_sigmoid, gate)).to(y.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dz: Tensor) -> tuple[Tensor, Tensor, None]:
        y, gate = ctx.saved_tensors
        factor = _sigmoid(gate)
        dfactor = dz.to(factor.dtype) * y
        return (dz * factor).to(y.dtype), (dfactor * factor * (1.0 - factor)).to(gate.dtype), None


def _sigmoid(gate: Tensor) -> Tensor:
    return gate.to(torch.promote_types(gate.dtype, torch.float32)).sigmoid()


LOGITS_PER_TILE = 1 << 25
"""Logits computed at a time: 128 MiB of fp32."""


@torch.no_grad()
def largest_logit(
    q_SBND: Tensor, k_TBGD: Tensor, mask: AttentionMask, scores: AttentionScores = PLAIN_SCORES
) -> Tensor:
    """Return the largest score over all pairs that the mask permits, 0-d, in at least fp32.

    Works tile by tile, so the S x T matrix is never stored.

    Args:
        q_SBND: queries.
        k_TBGD: keys; query heads ``i N/G`` to ``(i+1) N/G`` attend to key head ``i``.
        mask: of these queries and keys.
        scores: how products of queries and keys become scores.
    """
    _, b, n, d = q_SBND.shape
    dtype = torch.promote_types(q_SBND.dtype, torch.float32)
    q_BGXSD = q_SBND.unflatten(2, (k_TBGD.shape[2], -1)).permute(1, 2, 3, 0, 4)
    k_BGDT = k_TBGD.permute(1, 2, 3, 0)
    largest = torch.full((), -torch.inf, dtype=dtype, device=q_SBND.device)
    for tile in mask.tiles(max(1, isqrt(LOGITS_PER_TILE // (b * n))), whole=False):
        q = q_BGXSD[tile.samples, :, :, tile.queries].to(dtype)
        k = k_BGDT[tile.samples, ..., tile.keys].to(dtype)
        logits_BGXST = q.flatten(2, 3).matmul(k).unflatten(2, q.shape[2:4])
        if tile.kind != FULL:
            hidden_B11ST = ~mask.dense(tile.samples, tile.queries, tile.keys).unsqueeze(1)
            logits_BGXST.masked_fill_(hidden_B11ST, -torch.inf)
        largest = torch.maximum(largest, logits_BGXST.amax())
    largest *= scores.factor(d)
    return largest if scores.softcap is None else scores.softcap * (largest / scores.softcap).tanh()
