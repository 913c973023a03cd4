"""Kernels whose results for a row do not depend on the other rows: their number, their lengths, or their place.

Libraries choose an algorithm by the shape of a call, so a token's product with a weight differs in its last bits
between a batch of 1 and of 32. Training and generation then disagree about the probability of the same token. Here
every reduction has a fixed shape and order:

* products are computed for :data:`ROWS` rows at a time, the last of them padding;
* attention adds over blocks of :data:`KEYS` keys, counted from the first token of a document, one after the other.
  Keys that a query does not see add exactly 0, so a longer sequence changes nothing;
* functions of elements see rows of whole vectors. PyTorch computes what is left of a vector with scalar code, which
  rounds differently.

Norms, softmax and the sums of the cross-entropy are PyTorch's, which treat every row alike on CPUs. Gradients are
correct, but not batch-invariant.

Shapes: R rows, W their width, S queries, T keys, N query heads, G key/value heads, X query heads per key/value head,
D channels of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.config.model import GATED_ACTIVATIONS
from megatron.kernels import activation as plain
from megatron.kernels.attention_mask import PLAIN_SCORES, AttentionMask, AttentionScores
from megatron.kernels.block_attention import LOCAL, AttentionDropout, BlockAttention, KeyValues
from megatron.kernels.grouped_linear import TORCH_GROUPED_LINEAR, GroupedLinearKernel
from megatron.kernels.linear import TORCH_LINEAR, with_bias_gradient
from megatron.kernels.operation import Candidate

ROWS = 32
"""Rows of a product."""

QUERIES, KEYS = 32, 128
"""Queries and keys of a block of attention."""

VECTOR = 64
"""Elements of which rows are a multiple: two of the widest vectors, in 16 bits."""

SERIAL = 1 << 15
"""Elements of a call that PyTorch does not divide over threads."""


def in_tiles(function: Callable[[Tensor], Tensor], x: Tensor, rows: int) -> Tensor:
    """Apply a function of rows ``[rows, W] -> [rows, ...]`` to the rows ``[..., W]``, padded with zeros."""
    x_RW = x.flatten(0, -2)
    padded = F.pad(x_RW, (0, 0, 0, -len(x_RW) % rows)).contiguous()
    tiles = (
        [function(tile) for tile in padded.split(rows)]
        if len(x_RW)
        else [function(padded.new_zeros(rows, x.shape[-1]))]
    )
    return torch.cat(tiles)[: len(x_RW)].unflatten(0, x.shape[:-1])


def linear(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """Return ``x W^T + b``; differentiable."""
    return in_tiles(lambda tile: F.linear(tile, weight_OI, bias_O), x, ROWS)


def grouped_linear(x_RI: Tensor, weight_EOI: Tensor, offsets: Tensor) -> Tensor:
    """Return ``x_e W_e^T`` of rows sorted by expert; rows of padding are 0. Reads the offsets on the host."""
    y, ends = x_RI.new_zeros(len(x_RI), weight_EOI.shape[1]), offsets.tolist()
    for start, end, weight_OI in zip([0, *ends], ends, weight_EOI):
        if start < end:
            y[start:end] = linear(x_RI[start:end], weight_OI)
    return y


def elementwise(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Return ``function(x)`` of a function of elements, in rows of whole vectors that no thread cuts."""
    width = x.shape[-1]
    padded = F.pad(x, (0, -width % VECTOR))
    return in_tiles(function, padded, max(1, SERIAL // padded.shape[-1]))[..., :width]


def activation(
    x: Tensor,
    bias: Tensor | None,
    name: str,
    limit: float | None = None,
    offset: float = 0.0,
    rows: plain.WeightedRows | None = None,
) -> Tensor:
    """Apply an activation; see :func:`megatron.kernels.activation.activation`."""
    parts = 2 if name in GATED_ACTIVATIONS else 1
    width = x.shape[-1] // parts
    padded = F.pad(with_bias_gradient(x, bias).unflatten(-1, (parts, width)), (0, -width % VECTOR)).flatten(-2)
    tile = max(1, SERIAL // padded.shape[-1])
    y = in_tiles(lambda tile: plain.activation(tile, None, name, limit, offset), padded, tile)[..., :width]
    return y if rows is None else (y * rows.weights.unsqueeze(-1)).to(y.dtype)


def attention(
    q_SBND: Tensor, k_TBGD: Tensor, v_TBGD: Tensor, mask: AttentionMask, scores: AttentionScores = PLAIN_SCORES
) -> Tensor:
    """Compute attention with sums over keys in a fixed order; see :class:`AttentionKernel`."""
    inputs = q_SBND, k_TBGD, v_TBGD, scores.sink
    y: Tensor = _BatchInvariantAttention.apply(*inputs, mask, None, LOCAL, replace(scores, sink=None))
    return y


class _BatchInvariantAttention(BlockAttention):
    """Forward in a fixed order; backward is that of block attention, from the same results."""

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
        s, b, n, _ = q_SBND.shape
        dtype = torch.promote_types(q_SBND.dtype, torch.float32)
        ctx.mask, ctx.dropout, ctx.key_values, ctx.scores, ctx.single = mask, dropout, key_values, scores, None
        y_SBND, lse_BNS = q_SBND.new_empty((s, b, n, v_SBGD.shape[3])), q_SBND.new_empty((b, n, s), dtype=dtype)
        sink = None if sink_N is None else sink_N.to(dtype)
        for sample in range(b):
            q, k, v = (t[:, sample].to(dtype) for t in (q_SBND, k_SBGD, v_SBGD))
            for queries, keys in _documents(mask, sample):
                for first in range(queries.start, queries.stop, QUERIES):
                    rows = slice(first, min(first + QUERIES, queries.stop))
                    y, lse = _attend(q[rows], k[keys], v[keys], mask.dense(_of(mask, sample), rows, keys), scores, sink)
                    y_SBND[rows, sample], lse_BNS[sample, :, rows] = y.to(y_SBND.dtype), lse
        ctx.save_for_backward(q_SBND, k_SBGD, v_SBGD, sink_N, y_SBND, lse_BNS)
        return y_SBND


def _of(mask: AttentionMask, sample: int) -> slice:
    return slice(sample, sample + 1) if mask.documents is not None else slice(None)


def _documents(mask: AttentionMask, sample: int) -> Iterator[tuple[slice, slice]]:
    """Yield the rows of the queries of each document, and those of its keys."""
    (keys,), (queries,) = mask.keys, mask.queries
    starts = [0]
    if mask.documents is not None:
        ids = (mask.documents if mask.host_documents is None else mask.host_documents)[sample].tolist()
        starts = [at for at in range(len(ids)) if at == 0 or ids[at] != ids[at - 1]]
    for start, stop in zip(starts, [*starts[1:], keys.stop]):
        first, last = max(start, queries.start), min(stop, queries.stop)
        if first < last:
            yield slice(first - queries.start, last - queries.start), slice(start - keys.start, stop - keys.start)


def _attend(
    q_SND: Tensor, k_TGD: Tensor, v_TGD: Tensor, visible: Tensor, scores: AttentionScores, sink_N: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return ``y [S, N, D]`` of at most ``QUERIES`` queries of a document, and ``lse [N, S]``."""
    count, groups = len(q_SND), k_TGD.shape[1]
    q_SND = F.pad(q_SND, (0, 0, 0, 0, 0, QUERIES - count))
    q_GRD = q_SND.permute(1, 0, 2).unflatten(0, (groups, -1)).flatten(1, 2).contiguous()
    hidden_ST = F.pad(~visible[0, 0], (0, -visible.shape[3] % KEYS), value=True)
    hidden_ST = F.pad(hidden_ST, (0, 0, 0, QUERIES - count))
    seen = [not hidden.all() for hidden in hidden_ST[:count].split(KEYS, 1)]
    products, values = [], []
    for block, (k, v) in enumerate(zip(k_TGD.split(KEYS), v_TGD.split(KEYS))):
        if seen[block]:  # what no query sees adds 0
            k_GDT, v_GTD = (F.pad(t, (0, 0, 0, 0, 0, KEYS - len(t))).transpose(0, 1).contiguous() for t in (k, v))
            product = torch.bmm(q_GRD, k_GDT.transpose(1, 2)).mul_(scores.factor(q_SND.shape[2]))
            if scores.softcap is not None:
                product.div_(scores.softcap).tanh_().mul_(scores.softcap)
            hidden = hidden_ST[:, block * KEYS : (block + 1) * KEYS]
            products.append(product.unflatten(1, (-1, QUERIES)).masked_fill_(hidden, -torch.inf))
            values.append(v_GTD)
    top_GXS1 = torch.stack([product.amax(-1, keepdim=True) for product in products]).amax(0)
    if sink_N is not None:
        sink_GX11 = sink_N.view(groups, -1, 1, 1)
        top_GXS1 = torch.maximum(top_GXS1, sink_GX11)
    total_GXS1 = torch.zeros_like(top_GXS1) if sink_N is None else (sink_GX11 - top_GXS1).exp()
    y_GRD = q_GRD.new_zeros(*q_GRD.shape[:2], v_TGD.shape[2])
    for product, v_GTD in zip(products, values):
        weights = product.sub_(top_GXS1).exp_()
        total_GXS1 = total_GXS1 + weights.sum(-1, keepdim=True)
        y_GRD = y_GRD + torch.bmm(weights.flatten(1, 2), v_GTD)
    y_GXSD = y_GRD.unflatten(1, (-1, QUERIES)) / total_GXS1
    lse_GXS = (total_GXS1.log() + top_GXS1).squeeze(-1)
    return y_GXSD[:, :, :count].flatten(0, 1).transpose(0, 1), lse_GXS[:, :, :count].flatten(0, 1)


LINEAR = TORCH_LINEAR._replace(forward=linear, differentiable=linear, elementwise=elementwise, reassociates=False)
GROUPED_LINEAR: GroupedLinearKernel = TORCH_GROUPED_LINEAR._replace(forward=grouped_linear)


def _missing(device: torch.device, dtype: torch.dtype) -> str | None:
    return None if device.type == "cpu" else "its rows are known to be independent of each other on CPUs only"


def _candidate(implementation: Any) -> Candidate:
    return Candidate(lambda: implementation, _missing, fast=lambda device: False)


CANDIDATES = {
    "activation": _candidate(activation),
    "attention": _candidate(attention),
    "linear": _candidate(LINEAR),
    "grouped_linear": _candidate(GROUPED_LINEAR),
}
"""By operation; ``auto`` does not take them."""
