"""Attention in tiles: time and memory follow the parts of the mask that are not empty.

Softmax is computed tile by tile; each result has the logarithm of its sum of exponentials (``lse``), with which results
for other keys of the same queries are merged (FlashAttention, arXiv 2205.14135; ring attention, arXiv 2310.01889). In
backward every tile is computed again from the final ``lse``. So keys and values may arrive one part after the other,
from wherever they are.

Shapes: S queries, T keys, B batch, N query heads, G key/value heads (N a multiple of G), X query heads per key/value
head, D channels of a head.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.kernels.attention_mask import FULL, TRIANGLE, AttentionMask, Tile
from megatron.kernels.dropout import keep_mask
from megatron.kernels.operation import HALF_DTYPES

BLOCK = 256
"""Side of a partial tile, in tokens."""

UNFUSED_BLOCK = 1024
"""Side of all tiles where the scores of a tile are stored, as with dropout."""


@dataclass(frozen=True)
class AttentionDropout:
    """Dropout of attention weights, a pure function of sample, head, query and key: equal in every layout."""

    probability: float
    # 63 bits, a hash of the step and the place in the model.
    key: int
    # int64 [B]
    sample_ids: Tensor
    # Global index of head 0.
    first_head: int
    # Tokens of the whole sequence.
    length: int

    def scale(self, mask: AttentionMask, tile: Tile, heads: int, dtype: torch.dtype) -> Tensor:
        """Return the factors on the weights of a tile, ``[B, N, S, T]`` in at least fp32: 0, or ``1 / (1 - p)``."""
        device = self.sample_ids.device
        head_N11 = torch.arange(self.first_head, self.first_head + heads, device=device).view(-1, 1, 1)
        keep = keep_mask(
            self.probability,
            self.key,
            self.sample_ids[tile.samples].view(-1, 1, 1, 1),
            mask.query_positions[tile.queries].view(-1, 1),
            head_N11 * self.length + mask.key_positions[tile.keys],
        )
        return keep.to(torch.promote_types(dtype, torch.float32)) * (1.0 / (1.0 - self.probability))


Use = Callable[[Tensor, Tensor, AttentionMask], Any]
"""``use(k_TBGD, v_TBGD, mask)``: attend to these keys; in backward return ``(dk, dv)``."""


class KeyValues(Protocol):
    """Where the keys and values that the queries of this rank see come from."""

    def forward(self, k_SBGD: Tensor, v_SBGD: Tensor, mask: AttentionMask, use: Use) -> None:
        """Call ``use`` with this rank's keys and values, and all others that its queries see."""

    def backward(self, k_SBGD: Tensor, v_SBGD: Tensor, mask: AttentionMask, use: Use) -> tuple[Tensor, Tensor]:
        """Do the same, and return the sum of the gradients of this rank's keys and values."""


class LocalKeyValues:
    """Keys and values that are all on this rank."""

    def forward(self, k_SBGD: Tensor, v_SBGD: Tensor, mask: AttentionMask, use: Use) -> None:
        """Attend to them."""
        use(k_SBGD, v_SBGD, mask)

    def backward(self, k_SBGD: Tensor, v_SBGD: Tensor, mask: AttentionMask, use: Use) -> tuple[Tensor, Tensor]:
        """Return their gradients."""
        dk, dv = use(k_SBGD, v_SBGD, mask)
        return dk, dv


LOCAL = LocalKeyValues()


def block_attention(
    q_SBND: Tensor,
    k_SBGD: Tensor,
    v_SBGD: Tensor,
    mask: AttentionMask,
    dropout: AttentionDropout | None = None,
    key_values: KeyValues = LOCAL,
) -> Tensor:
    """Compute attention tile by tile; return ``y_SBND``.

    Every query has to see a key, as it does where it sees itself.

    Args:
        q_SBND: queries.
        k_SBGD: keys of this rank, those of the mask.
        v_SBGD: values.
        mask: of these queries and keys.
        dropout: of attention weights.
        key_values: brings further keys and values.

    """
    y: Tensor = _BlockAttention.apply(q_SBND, k_SBGD, v_SBGD, mask, dropout, key_values)
    return y


class _BlockAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_SBND: Tensor,
        k_SBGD: Tensor,
        v_SBGD: Tensor,
        mask: AttentionMask,
        dropout: AttentionDropout | None,
        key_values: KeyValues,
    ) -> Tensor:
        s, b, n, d = q_SBND.shape
        dtype = torch.promote_types(q_SBND.dtype, torch.float32)
        y_SBND = q_SBND.new_zeros((s, b, n, d), dtype=dtype)  # so that merging the heads later copies nothing
        y_BNSD = y_SBND.permute(1, 2, 0, 3)
        lse_BNS = q_SBND.new_full((b, n, s), -torch.inf, dtype=dtype)

        def attend(k_TBGD: Tensor, v_TBGD: Tensor, part: AttentionMask) -> None:
            for tile in _tiles(q_SBND, part, dropout):
                inputs = _TileInputs.of(q_SBND, k_TBGD, v_TBGD, part, tile, dropout)
                _merge(y_BNSD[tile.samples, :, tile.queries], lse_BNS[tile.samples, :, tile.queries], *_forward(inputs))

        key_values.forward(k_SBGD, v_SBGD, mask, attend)
        y_SBND = y_SBND.to(q_SBND.dtype)
        ctx.save_for_backward(q_SBND, k_SBGD, v_SBGD, y_SBND, lse_BNS)
        ctx.mask, ctx.dropout, ctx.key_values = mask, dropout, key_values
        return y_SBND

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_SBND: Tensor) -> tuple[Tensor | None, ...]:
        q_SBND, k_SBGD, v_SBGD, y_SBND, lse_BNS = ctx.saved_tensors
        dq_SBND = lse_BNS.new_zeros(q_SBND.shape)
        dq_BNSD = dq_SBND.permute(1, 2, 0, 3)

        def differentiate(k_TBGD: Tensor, v_TBGD: Tensor, part: AttentionMask) -> tuple[Tensor, Tensor]:
            dk_TBGD, dv_TBGD = lse_BNS.new_zeros((2, *k_TBGD.shape)).unbind()
            dk_BGTD, dv_BGTD = (grad.permute(1, 2, 0, 3) for grad in (dk_TBGD, dv_TBGD))
            for tile in _tiles(q_SBND, part, ctx.dropout):
                inputs = _TileInputs.of(q_SBND, k_TBGD, v_TBGD, part, tile, ctx.dropout)
                dy, y = (_rows(t, tile.samples, tile.queries) for t in (dy_SBND, y_SBND))
                dq, dk, dv = _backward(inputs, dy, y, lse_BNS[tile.samples, :, tile.queries])
                dq_BNSD[tile.samples, :, tile.queries] += dq
                dk_BGTD[tile.samples, :, tile.keys] += dk
                dv_BGTD[tile.samples, :, tile.keys] += dv
            return dk_TBGD.to(k_TBGD.dtype), dv_TBGD.to(v_TBGD.dtype)

        dk_SBGD, dv_SBGD = ctx.key_values.backward(k_SBGD, v_SBGD, ctx.mask, differentiate)
        return dq_SBND.to(q_SBND.dtype), dk_SBGD, dv_SBGD, None, None, None


def _tiles(q_SBND: Tensor, mask: AttentionMask, dropout: AttentionDropout | None) -> list[Tile]:
    if dropout is None and _is_fused(q_SBND, None, None):
        return mask.tiles(BLOCK)
    return mask.tiles(UNFUSED_BLOCK, whole=False)


def _rows(t_SBND: Tensor, samples: slice, rows: slice) -> Tensor:
    return t_SBND[rows, samples].permute(1, 2, 0, 3)


def _merge(y_BNSD: Tensor, lse_BNS: Tensor, new_y_BNSD: Tensor, new_lse_BNS: Tensor) -> None:
    """Merge the results for more keys into ``y`` and ``lse``: softmax over both is their mean weighted by exp(lse)."""
    total_BNS = torch.logaddexp(lse_BNS, new_lse_BNS)
    finite_BNS = total_BNS.masked_fill(total_BNS == -torch.inf, 0.0)  # a query that has seen no key yet
    y_BNSD.mul_((lse_BNS - finite_BNS).exp().unsqueeze(-1))
    y_BNSD.addcmul_(new_y_BNSD.to(y_BNSD.dtype), (new_lse_BNS - finite_BNS).exp().unsqueeze(-1))
    lse_BNS.copy_(total_BNS)


@dataclass(frozen=True)
class _TileInputs:
    """Inputs of a tile: ``q [B, N, S, D]``, ``k`` and ``v [B, G, T, D]``."""

    q: Tensor
    k: Tensor
    v: Tensor
    # All keys up to the query are visible; queries and keys are the same tokens.
    causal: bool
    # bool [B or 1, 1, S, T]; None where all, or all up to the query, are visible.
    visible: Tensor | None
    # Factors on the attention weights.
    dropout_scale: Tensor | None

    @classmethod
    def of(
        cls,
        q_SBND: Tensor,
        k_TBGD: Tensor,
        v_TBGD: Tensor,
        mask: AttentionMask,
        tile: Tile,
        dropout: AttentionDropout | None,
    ) -> _TileInputs:
        q = _rows(q_SBND, tile.samples, tile.queries)
        k, v = (_rows(t, tile.samples, tile.keys) for t in (k_TBGD, v_TBGD))
        scale = None if dropout is None else dropout.scale(mask, tile, q.shape[1], q.dtype)
        partial = tile.kind not in (TRIANGLE, FULL) or (tile.kind == TRIANGLE and not _is_fused(q, scale, None))
        visible = mask.dense(tile.samples, tile.queries, tile.keys) if partial else None
        return cls(q, k, v, tile.kind == TRIANGLE and not partial, visible, scale)

    @property
    def fused(self) -> bool:
        """True if a fused kernel computes the tile."""
        return _is_fused(self.q, self.dropout_scale, self.visible)

    @property
    def bias(self) -> Tensor | None:
        """0 where a key is visible, -infinity elsewhere, for the kernel of CPUs."""
        if self.visible is None:
            return None
        zeros = torch.zeros(self.visible.shape, dtype=self.q.dtype, device=self.visible.device)
        return zeros.masked_fill_(~self.visible, -torch.inf)

    def scores(self) -> Tensor:
        """Return the scaled scores ``[B, N, S, T]`` in at least fp32, -infinity where a key is not visible."""
        scores = _by_group(self.q, self.k).matmul(self.k.transpose(2, 3)).view(*self.q.shape[:3], self.k.shape[2])
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32)) * self.q.shape[3] ** -0.5
        return scores if self.visible is None else scores.masked_fill_(~self.visible, -torch.inf)


def _is_fused(q_BNSD: Tensor, dropout_scale: Tensor | None, visible: Tensor | None) -> bool:
    """Return True for all tiles on CPUs, and on GPUs for 16-bit tiles without a mask, unless weights are dropped."""
    on_gpu = q_BNSD.is_cuda and q_BNSD.dtype in HALF_DTYPES and visible is None and q_BNSD.shape[3] % 8 == 0
    return dropout_scale is None and (on_gpu or q_BNSD.device.type == "cpu")


def _by_group(t_BNSE: Tensor, k_BGTD: Tensor) -> Tensor:
    """Put the rows of the query heads that share a key/value head below each other: ``[B, G, X S, E]``."""
    return t_BNSE.unflatten(1, (k_BGTD.shape[1], -1)).flatten(2, 3)


def _forward(tile: _TileInputs) -> tuple[Tensor, Tensor]:
    """Return ``y [B, N, S, D]`` of a tile, and ``lse [B, N, S]`` in at least fp32."""
    q, k, v = tile.q, tile.k, tile.v
    if tile.fused and q.is_cuda:
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        sizes = q.shape[1], k.shape[1]
        y, lse, *_ = torch.ops.aten._flash_attention_forward(q, k, v, None, None, *sizes, 0.0, tile.causal, False)
        return y.transpose(1, 2), lse
    if tile.fused:
        y, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, tile.causal, attn_mask=tile.bias
        )
        if tile.visible is not None:  # the kernel returns 0 for rows that see nothing
            lse = lse.masked_fill(~tile.visible.any(-1), -torch.inf)
        return y, lse
    scores = tile.scores()
    lse = scores.logsumexp(-1, keepdim=True)
    weights = (scores - lse.masked_fill(lse == -torch.inf, 0.0)).exp_()
    if tile.dropout_scale is not None:
        weights *= tile.dropout_scale
    y = _by_group(weights.to(q.dtype), k).matmul(v).view_as(q)
    return y, lse.squeeze(-1)


def _backward(tile: _TileInputs, dy: Tensor, y: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``dq, dk, dv`` of a tile, from the final ``y`` and ``lse`` of its queries.

    ``dS = P (dP - sum(dy y))`` with ``P = exp(S - lse)`` and ``dP = dy vᵀ`` (FlashAttention, algorithm 4).
    """
    q, k, v = tile.q, tile.k, tile.v
    if tile.fused and q.is_cuda:
        dy, q, k, v, y = (t.transpose(1, 2) for t in (dy, q, k, v, y))
        sizes, unused = (q.shape[1], k.shape[1]), torch.empty(0, device=q.device)
        grads = torch.ops.aten._flash_attention_backward(
            dy, q, k, v, y, lse.contiguous(), None, None, *sizes, 0.0, tile.causal, unused, unused
        )
        dq, dk, dv = (grad.transpose(1, 2) for grad in grads)
        return dq, dk, dv
    if tile.fused:
        dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            dy, q, k, v, y, lse, 0.0, tile.causal, attn_mask=tile.bias
        )
        return dq, dk, dv
    weights = (tile.scores() - lse.unsqueeze(-1)).exp_()
    dy_group, scale = _by_group(dy, k), q.shape[3] ** -0.5
    dweights = dy_group.matmul(v.transpose(2, 3)).view_as(weights).to(weights.dtype)
    dropped = weights
    if tile.dropout_scale is not None:
        dropped = weights * tile.dropout_scale
        dweights *= tile.dropout_scale
    dv = _by_group(dropped.to(q.dtype), k).transpose(2, 3).matmul(dy_group)
    dscores = weights * (dweights - (dy * y).sum(-1, keepdim=True, dtype=weights.dtype)) * scale
    dscores_group = _by_group(dscores.to(q.dtype), k)
    return dscores_group.matmul(k).view_as(q), dscores_group.transpose(2, 3).matmul(_by_group(q, k)), dv
