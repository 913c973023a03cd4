"""Attention in tiles: time and memory follow the parts of the mask that are not empty.

On GPUs calls of FlashAttention cover the built-in patterns; elsewhere the mask is cut into blocks, some of which
need a mask tensor. Softmax is computed tile by tile; each result has the logarithm of its sum of exponentials
(``lse``), with which results for other keys of the same queries are merged (FlashAttention, arXiv 2205.14135; ring
attention, arXiv 2310.01889). In backward every tile is computed again from the final ``lse``. So keys and values may
arrive one part after the other, from wherever they are.

Shapes: S queries, T keys, B batch, N query heads, G key/value heads (N a multiple of G), X query heads per key/value
head, D channels of a head, which may differ between keys and values.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.backends.cuda import SDPAParams, can_use_cudnn_attention

from megatron.kernels.attention_mask import (
    BAND,
    FULL,
    PARTIAL,
    PLAIN_SCORES,
    TRIANGLE,
    AttentionMask,
    AttentionScores,
    Tile,
)
from megatron.kernels.dropout import keep_mask
from megatron.kernels.operation import half_on_gpu

BLOCK = 256
"""Side of a partial tile, in tokens."""

UNFUSED_BLOCK = 1024
"""Side of all tiles where the scores of a tile are stored, as with dropout."""


FLEX_BLOCK = 128
"""Side of the blocks of a mask that FlexAttention skips or not, in tokens."""


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
    """Source of keys and values: this rank, or all ranks that share a sequence."""

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


def equal_widths(
    q_SBND: Tensor, k_TBGD: Tensor, v_TBGD: Tensor, scores: AttentionScores
) -> tuple[Tensor, Tensor, Tensor, AttentionScores]:
    """Pad the narrower of keys and values with zeros, for a kernel that needs equal widths.

    The first channels of its output are the result.
    """
    missing = k_TBGD.shape[3] - v_TBGD.shape[3]
    if missing > 0:
        v_TBGD = F.pad(v_TBGD, (0, missing))
    elif missing < 0:
        scores = replace(scores, scale=scores.factor(q_SBND.shape[3]))
        q_SBND, k_TBGD = (F.pad(t, (0, -missing)) for t in (q_SBND, k_TBGD))
    return q_SBND, k_TBGD, v_TBGD, scores


def block_attention(
    q_SBND: Tensor,
    k_SBGD: Tensor,
    v_SBGD: Tensor,
    mask: AttentionMask,
    dropout: AttentionDropout | None = None,
    key_values: KeyValues = LOCAL,
    scores: AttentionScores = PLAIN_SCORES,
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
        scores: how products of queries and keys become scores, and the sink.
    """
    inputs = q_SBND, k_SBGD, v_SBGD, scores.sink
    y: Tensor = BlockAttention.apply(*inputs, mask, dropout, key_values, replace(scores, sink=None))
    return y


class BlockAttention(torch.autograd.Function):
    """Attention tile by tile, see :func:`block_attention`; the arguments are the same."""

    @staticmethod
    def forward(
        ctx: Any,
        q_SBND: Tensor,
        k_SBGD: Tensor,
        v_SBGD: Tensor,
        sink_N: Tensor | None,
        mask: AttentionMask,
        dropout: AttentionDropout | None,
        key_values: KeyValues,
        scores: AttentionScores,
    ) -> Tensor:
        """Compute the attention; see :func:`block_attention`."""
        s, b, n, _ = q_SBND.shape
        dtype = torch.promote_types(q_SBND.dtype, torch.float32)
        pad, width = _padding(dropout, scores), v_SBGD.shape[3]
        ctx.mask, ctx.dropout, ctx.key_values, ctx.scores = mask, dropout, key_values, scores
        plain = sink_N is None and dropout is None and key_values is LOCAL
        ctx.single = _single_tile(q_SBND, k_SBGD, v_SBGD, mask, scores) if plain else None
        if ctx.single is not None:
            q, k, v, padded = pad(q_SBND, k_SBGD, v_SBGD, scores)
            y_BNSD, lse_BNS = _forward(_TileInputs.of(q, k, v, mask, ctx.single, None, padded))
            y_SBND = y_BNSD[..., :width].permute(2, 0, 1, 3).contiguous()
            ctx.save_for_backward(q_SBND, k_SBGD, v_SBGD, None, y_SBND, lse_BNS)
            return y_SBND
        y_SBND = q_SBND.new_zeros((s, b, n, width), dtype=dtype)  # so that merging the heads later copies nothing
        y_BNSD = y_SBND.permute(1, 2, 0, 3)
        lse_BNS = q_SBND.new_full((b, n, s), -torch.inf, dtype=dtype)

        def attend(k_TBGD: Tensor, v_TBGD: Tensor, part: AttentionMask) -> None:
            q, k, v, padded = pad(q_SBND, k_TBGD, v_TBGD, scores)
            for tile in _tiles(q, v, part, dropout, padded):
                y, lse = _forward(_TileInputs.of(q, k, v, part, tile, dropout, padded))
                at = tile.samples, slice(None), tile.queries
                _merge(y_BNSD[at], lse_BNS[at], y[..., :width], lse)

        key_values.forward(k_SBGD, v_SBGD, mask, attend)
        if sink_N is not None:  # it adds to the sums of exponentials only
            whole_BNS = torch.logaddexp(lse_BNS, sink_N.to(dtype).unsqueeze(-1))
            y_BNSD *= (lse_BNS - whole_BNS).exp_().unsqueeze(-1)
            lse_BNS = whole_BNS
        y_SBND = y_SBND.to(q_SBND.dtype)
        ctx.save_for_backward(q_SBND, k_SBGD, v_SBGD, sink_N, y_SBND, lse_BNS)
        return y_SBND

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_SBND: Tensor) -> tuple[Tensor | None, ...]:
        """Compute the gradients of queries, keys, values and the sink, tile by tile."""
        q_SBND, k_SBGD, v_SBGD, sink_N, y_SBND, lse_BNS = ctx.saved_tensors
        dsink_N = None
        if sink_N is not None:  # P (dP - sum(dy y)) of a key whose value is zero
            mean_BNS = dy_SBND.to(lse_BNS.dtype).mul(y_SBND).sum(-1).permute(1, 2, 0)
            dsink_N = -(sink_N.unsqueeze(-1) - lse_BNS).exp_().mul_(mean_BNS).sum((0, 2))
        pad, width, value_width = _padding(ctx.dropout, ctx.scores), q_SBND.shape[3], v_SBGD.shape[3]
        dy_SBND, y_SBND = (pad(q_SBND, q_SBND, t, ctx.scores)[2] for t in (dy_SBND, y_SBND))
        if ctx.single is not None:
            q, k, v, scores = pad(q_SBND, k_SBGD, v_SBGD, ctx.scores)
            inputs = _TileInputs.of(q, k, v, ctx.mask, ctx.single, None, scores)
            grads = _backward(inputs, dy_SBND.permute(1, 2, 0, 3), y_SBND.permute(1, 2, 0, 3), lse_BNS)
            dq_SBND, dk_SBGD, dv_SBGD = (grad.permute(2, 0, 1, 3) for grad in grads)
            return dq_SBND[..., :width], dk_SBGD[..., :width], dv_SBGD[..., :value_width], *(None,) * 5
        dq_SBND = lse_BNS.new_zeros(q_SBND.shape)
        dq_BNSD = dq_SBND.permute(1, 2, 0, 3)

        def differentiate(k_TBGD: Tensor, v_TBGD: Tensor, part: AttentionMask) -> tuple[Tensor, Tensor]:
            dk_TBGD, dv_TBGD = (lse_BNS.new_zeros(t.shape) for t in (k_TBGD, v_TBGD))
            dk_BGTD, dv_BGTD = (grad.permute(1, 2, 0, 3) for grad in (dk_TBGD, dv_TBGD))
            q, k, v, scores = pad(q_SBND, k_TBGD, v_TBGD, ctx.scores)
            for tile in _tiles(q, v, part, ctx.dropout, scores):
                dy, y = (_rows(t, tile.samples, tile.queries) for t in (dy_SBND, y_SBND))
                inputs = _TileInputs.of(q, k, v, part, tile, ctx.dropout, scores)
                dq, dk, dv = _backward(inputs, dy, y, lse_BNS[tile.samples, :, tile.queries])
                del inputs  # before those of the next tile
                dq_BNSD[tile.samples, :, tile.queries] += dq[..., :width]
                dk_BGTD[tile.samples, :, tile.keys] += dk[..., :width]
                dv_BGTD[tile.samples, :, tile.keys] += dv[..., :value_width]
            return dk_TBGD.to(k_TBGD.dtype), dv_TBGD.to(v_TBGD.dtype)

        dk_SBGD, dv_SBGD = ctx.key_values.backward(k_SBGD, v_SBGD, ctx.mask, differentiate)
        return dq_SBND.to(q_SBND.dtype), dk_SBGD, dv_SBGD, dsink_N, None, None, None, None


def _padding(dropout: AttentionDropout | None, scores: AttentionScores) -> Callable[..., tuple[Any, ...]]:
    """Return :func:`equal_widths` for fused kernels; products of their own take any widths."""
    return equal_widths if dropout is None and scores.softcap is None else lambda *inputs: inputs


def _tiles(
    q_SBND: Tensor, v_SBGD: Tensor, mask: AttentionMask, dropout: AttentionDropout | None, scores: AttentionScores
) -> list[Tile]:
    flash = _flash_covers_tiles(q_SBND, v_SBGD)
    if dropout is not None or scores.softcap is not None or not (flash or q_SBND.device.type == "cpu"):
        return mask.tiles(UNFUSED_BLOCK, whole=False)
    return mask.bands() if flash and mask.pattern.rule is None else mask.tiles(BLOCK)


def _single_tile(
    q_SBND: Tensor, k_SBGD: Tensor, v_SBGD: Tensor, mask: AttentionMask, scores: AttentionScores
) -> Tile | None:
    """Return the tile of the queries and keys that one call on a GPU computes, so that there is nothing to merge."""
    if scores.softcap is not None or mask.pattern.rule is not None or not _flash_covers_tiles(q_SBND, v_SBGD):
        return None
    tiles = mask.bands()
    if len(tiles) != 1:
        return None
    parts = q_SBND[tiles[0].queries, tiles[0].samples], k_SBGD[tiles[0].keys, tiles[0].samples]
    return tiles[0] if [t.shape for t in parts] == [q_SBND.shape, k_SBGD.shape] else None


def _rows(t_SBND: Tensor, samples: slice, rows: slice) -> Tensor:
    return t_SBND[rows, samples].permute(1, 2, 0, 3)


def _merge(y_BNSD: Tensor, lse_BNS: Tensor, new_y_BNSD: Tensor, new_lse_BNS: Tensor) -> None:
    """Merge the results for more keys into ``y`` and ``lse``: softmax over both is their mean weighted by exp(lse)."""
    weight_BNS = (new_lse_BNS - lse_BNS).sigmoid_().nan_to_num_(0.0)  # NaN where a query has seen no key yet
    y_BNSD.lerp_(new_y_BNSD.to(y_BNSD.dtype), weight_BNS.to(y_BNSD.dtype).unsqueeze(-1))
    torch.logaddexp(lse_BNS, new_lse_BNS, out=lse_BNS)


@dataclass(frozen=True)
class _TileInputs:
    """Inputs of a tile: ``q [B, N, S, D]``, ``k`` and ``v [B, G, T, D]``."""

    q: Tensor
    k: Tensor
    v: Tensor
    tile: Tile
    # bool [B or 1, 1, S, T]; None where the kind of the tile determines which keys are visible.
    visible: Tensor | None
    # Factors on the attention weights.
    dropout_scale: Tensor | None
    # Factor on the products of queries and keys, and the cap of the scores.
    scale: float
    softcap: float | None
    # cuDNN or FlashAttention computes the tile, on a GPU.
    flash: bool

    @classmethod
    def of(
        cls,
        q_SBND: Tensor,
        k_TBGD: Tensor,
        v_TBGD: Tensor,
        mask: AttentionMask,
        tile: Tile,
        dropout: AttentionDropout | None,
        scores: AttentionScores,
    ) -> _TileInputs:
        q = _rows(q_SBND, tile.samples, tile.queries)
        k, v = (_rows(t, tile.samples, tile.keys) for t in (k_TBGD, v_TBGD))
        dropped = None if dropout is None else dropout.scale(mask, tile, q.shape[1], q.dtype)
        can_fuse = dropout is None and scores.softcap is None
        flash = can_fuse and tile.kind != PARTIAL and _flash_covers_tiles(q, v)
        fused = flash or (can_fuse and q.device.type == "cpu")
        implied = tile.kind in (FULL, BAND) or (tile.kind == TRIANGLE and fused)
        visible = None if implied else mask.dense(tile.samples, tile.queries, tile.keys)
        return cls(q, k, v, tile, visible, dropped, scores.factor(q.shape[3]), scores.softcap, flash)

    @property
    def causal(self) -> bool:
        """True if queries see only keys up to themselves, without a mask tensor."""
        return self.tile.causal or (self.tile.kind == TRIANGLE and self.visible is None)

    @property
    def fused_on_cpu(self) -> bool:
        """True if PyTorch's FlashAttention for CPUs computes the tile."""
        return self.dropout_scale is None and self.softcap is None and self.q.device.type == "cpu"

    @property
    def bias(self) -> Tensor | None:
        """0 where a key is visible, -infinity elsewhere, for the kernel of CPUs."""
        if self.visible is None:
            return None
        zeros = torch.zeros(self.visible.shape, dtype=self.q.dtype, device=self.visible.device)
        return zeros.masked_fill_(~self.visible, -torch.inf)

    def scores(self) -> Tensor:
        """Return the scores ``[B, N, S, T]`` in at least fp32, -infinity where a key is not visible."""
        scores_group = _product(_by_group(self.q, self.k), self.k.transpose(2, 3)).mul_(self.scale)
        scores = scores_group.view(*self.q.shape[:3], self.k.shape[2])
        if self.softcap is not None:
            scores.div_(self.softcap).tanh_().mul_(self.softcap)
        return scores if self.visible is None else scores.masked_fill_(~self.visible, -torch.inf)


def _flash_covers_tiles(q: Tensor, v: Tensor) -> bool:
    """Return True if PyTorch's FlashAttention 2 computes tiles without a mask tensor."""
    width = max(q.shape[3], v.shape[3])
    shape_fits = width % 8 == 0 and width <= 256
    return half_on_gpu(q.device, q.dtype) and shape_fits and torch.cuda.get_device_capability(q.device) >= (8, 0)


def _by_group(t_BNSE: Tensor, k_BGTD: Tensor) -> Tensor:
    """Put the rows of the query heads that share a key/value head below each other: ``[B, G, X S, E]``."""
    return t_BNSE.unflatten(1, (k_BGTD.shape[1], -1)).flatten(2, 3)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Return the matrix products of a batch ``[B, G, ., .]`` in at least fp32; logits are too large for 16 bits."""
    if half_on_gpu(a.device, a.dtype):
        return torch.bmm(a.flatten(0, 1), b.flatten(0, 1), out_dtype=torch.float32).unflatten(0, a.shape[:2])
    wide = torch.promote_types(a.dtype, torch.float32)
    return a.to(wide).matmul(b.to(wide))


def _forward(tile: _TileInputs) -> tuple[Tensor, Tensor]:
    """Return ``y [B, N, S, D]`` of a tile, and ``lse [B, N, S]`` in at least fp32."""
    q, k, v = tile.q, tile.k, tile.v
    if tile.flash:
        return _cudnn_forward(tile) if _cudnn_covers_tile(tile) else _flash_forward(tile)
    if tile.fused_on_cpu:
        y, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, tile.causal, attn_mask=tile.bias, scale=tile.scale
        )
        if tile.visible is not None:  # the kernel returns 0 for rows that see nothing
            lse = lse.masked_fill(~tile.visible.any(-1), -torch.inf)
        return y, lse
    scores = tile.scores()
    lse = scores.logsumexp(-1, keepdim=True)
    weights = (scores - lse.masked_fill(lse == -torch.inf, 0.0)).exp_()
    if tile.dropout_scale is not None:
        weights *= tile.dropout_scale
    y = _product(_by_group(weights.to(q.dtype), k), v).view(*q.shape[:3], v.shape[3])
    return y, lse.squeeze(-1)


def _backward(tile: _TileInputs, dy: Tensor, y: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``dq, dk, dv`` of a tile, from the final ``y`` and ``lse`` of its queries.

    ``dS = P (dP - sum(dy y))`` with ``P = exp(S - lse)`` and ``dP = dy vᵀ`` (FlashAttention, algorithm 4).
    Capped scores pass on ``1 - (S / softcap)²`` of their gradient, the derivative of tanh.
    """
    q, k, v = tile.q, tile.k, tile.v
    if tile.flash:
        return (_cudnn_backward if _cudnn_covers_tile(tile) else _flash_backward)(tile, dy, y, lse)
    if tile.fused_on_cpu:
        dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            dy, q, k, v, y, lse, 0.0, tile.causal, attn_mask=tile.bias, scale=tile.scale
        )
        return dq, dk, dv
    scores, dy_group = tile.scores(), _by_group(dy, k)
    weights = (scores - lse.unsqueeze(-1)).exp_()
    dweights = _product(dy_group, v.transpose(2, 3)).view_as(weights)
    dropped = weights
    if tile.dropout_scale is not None:
        dropped = weights * tile.dropout_scale
        dweights *= tile.dropout_scale
    dv = _product(_by_group(dropped.to(q.dtype), k).transpose(2, 3), dy_group)
    mean = (dy.to(weights.dtype) * y).sum(-1, keepdim=True)
    dscores = weights.mul_(dweights.sub_(mean)).mul_(tile.scale)
    if tile.softcap is not None:  # scores of hidden keys are -infinity
        dscores *= 1.0 - scores.div_(tile.softcap).clamp_(min=-1.0).square_()
    dscores_group = _by_group(dscores.to(q.dtype), k)
    return _product(dscores_group, k).view_as(q), _product(dscores_group.transpose(2, 3), _by_group(q, k)), dv


def _cudnn_covers_tile(tile: _TileInputs) -> bool:
    """Return True for whole and triangular tiles on Hopper and later, where cuDNN takes about half of the time.

    It builds a plan for every new length, so tiles of documents are left to FlashAttention.
    """
    of, s, t = tile.tile, tile.q.shape[2], tile.k.shape[2]
    plain = of.samples == slice(None) and of.left == -1 and of.queries.step in (1, None) and (s == t or not tile.causal)
    if not plain or torch.are_deterministic_algorithms_enabled() or not cudnn_is_fast(tile.q.device):
        return False
    grouped = tile.q.shape[1] > tile.k.shape[1]
    return can_use_cudnn_attention(SDPAParams(tile.q, tile.k, tile.v, None, 0.0, tile.causal, grouped))


def cudnn_is_fast(device: torch.device) -> bool:
    """Return True for Hopper and data-centre Blackwell.

    Elsewhere FlashAttention 2 is as fast or faster (https://github.com/huggingface/transformers/pull/48163).
    """
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] in (9, 10)


def _cudnn_forward(tile: _TileInputs) -> tuple[Tensor, Tensor]:
    y, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        tile.q, tile.k, tile.v, None, True, 0.0, tile.causal, False, scale=tile.scale
    )
    return y, lse.view(tile.q.shape[:3])


def _cudnn_backward(tile: _TileInputs, dy: Tensor, y: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v, sizes = tile.q, tile.k, tile.v, (tile.q.shape[2], tile.k.shape[2])
    unused = torch.empty(0, dtype=torch.int64, device=q.device)  # state of the random numbers of dropout
    dq, dk, dv = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        *(dy, q, k, v, y, lse.unsqueeze(-1).contiguous(), unused, unused, None, None, None, *sizes, 0.0, tile.causal),
        scale=tile.scale,
    )
    return dq, dk, dv


def _flash_forward(tile: _TileInputs) -> tuple[Tensor, Tensor]:
    q, k, v = (_sequences(tile, t) for t in (tile.q, tile.k, tile.v))
    y, lse, *_ = torch.ops.aten._flash_attention_forward(
        q, k, v, *_boundaries(tile), 0.0, tile.causal, False, scale=tile.scale, window_size_left=tile.tile.left
    )
    return _from_sequences(tile, y), lse if tile.tile.boundaries is None else lse.unsqueeze(0)


def _flash_backward(tile: _TileInputs, dy: Tensor, y: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v, dy, y = (_sequences(tile, t) for t in (tile.q, tile.k, tile.v, dy, y))
    lse = (lse if tile.tile.boundaries is None else lse[0]).contiguous()
    unused = torch.empty(0, device=q.device)  # state of the random numbers of dropout
    dq, dk, dv = torch.ops.aten._flash_attention_backward(
        *(dy, q, k, v, y, lse, *_boundaries(tile), 0.0, tile.causal, unused, unused),
        scale=tile.scale,
        window_size_left=tile.tile.left,
    )
    return _from_sequences(tile, dq), _from_sequences(tile, dk), _from_sequences(tile, dv)


def _sequences(tile: _TileInputs, t_BNSD: Tensor) -> Tensor:
    """Return what FlashAttention takes: ``[B, S, N, D]``, or ``[S, N, D]`` of sequences with boundaries."""
    return t_BNSD.transpose(1, 2) if tile.tile.boundaries is None else t_BNSD[0].transpose(0, 1)


def _from_sequences(tile: _TileInputs, t: Tensor) -> Tensor:
    return t.transpose(1, 2) if tile.tile.boundaries is None else t.transpose(0, 1).unsqueeze(0)


def _boundaries(tile: _TileInputs) -> tuple[Tensor | None, Tensor | None, int, int]:
    """Return the boundaries of queries and keys, and the largest numbers of them in a sequence."""
    if tile.tile.boundaries is None:
        return None, None, tile.q.shape[2], tile.k.shape[2]
    boundaries, longest = tile.tile.boundaries
    return boundaries, boundaries, longest, longest
