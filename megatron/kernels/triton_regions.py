"""Triton kernels for the regions between matrix products: norms, activations, and the split into q, k and v.

Backward is two launches. In the first, each of `PROGRAMS` programs computes the gradients of every `PROGRAMS`-th row,
and keeps their column sums, the gradients of weights and biases, in registers; the second adds the sums of all programs
in a fixed order. torch.compile takes up to seven launches and reads its inputs twice, because it computes column sums
apart. Arithmetic and the gradients of parameters are fp32. For backward, only inputs and the residual sum are kept.

Shapes: K parameters with column sums, P programs; others as in :mod:`megatron.kernels.qkv`.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.kernels.activation import WeightedRows
from megatron.kernels.qkv import HeadNorms, RotaryCosSin

PROGRAMS = 512
"""Programs over rows: about 4 per multiprocessor; their column sums are a few percent of the traffic."""

STAGES = 3
"""Stages of the norms' loop over rows: one computes, the others load later rows into shared memory."""

TILE = 1024
"""Columns of a program of the activations and of the split's forward."""

QKV_TILE = 512
"""Columns of a program of the split's backward, in one warp: other tiles take up to 1.4 times as long on an H200."""


@triton.jit
def _sum_programs(partial_KPW, out_KW, programs, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    first = tl.program_id(1) * programs
    total = tl.zeros((COLUMNS,), tl.float32)
    for start in range(0, programs, ROWS):
        rows = start + tl.arange(0, ROWS)
        at = (first + rows)[:, None] * width + columns[None, :]
        mask = (rows < programs)[:, None] & (columns < width)[None, :]
        total += tl.sum(tl.load(partial_KPW + at, mask, 0.0), 0)
    tl.store(out_KW + tl.program_id(1) * width + columns, total, columns < width)


def _summed(partial_KPW: Tensor) -> list[Tensor]:
    """Add the column sums of all programs: ``[K, P, W] -> K x [W]``."""
    count, programs, width = partial_KPW.shape
    out = partial_KPW.new_empty(count, width)
    _sum_programs[triton.cdiv(width, 16), count](partial_KPW, out, programs, width, 512, 16, num_warps=8)
    return list(out.unbind())


@triton.jit
def _norm_forward(
    x, y, weight, bias, total, normed, eps, x_stride, width,
    SUM: tl.constexpr, CENTRED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    columns, row = tl.arange(0, BLOCK), tl.program_id(0).to(tl.int64)
    mask, at = columns < width, row * width + columns
    value = tl.load(x + row * x_stride + columns, mask, 0.0).to(tl.float32)
    if SUM:
        rounded = (value + tl.load(y + at, mask, 0.0).to(tl.float32)).to(total.dtype.element_ty)
        tl.store(total + at, rounded, mask)
        value = rounded.to(tl.float32)  # as in backward, which reads the stored sum
    if CENTRED:
        value = tl.where(mask, value - tl.sum(value) / width, 0.0)
    value *= tl.rsqrt(tl.sum(value * value) / width + eps) * tl.load(weight + columns, mask, 0.0).to(tl.float32)
    if CENTRED:
        value += tl.load(bias + columns, mask, 0.0).to(tl.float32)
    tl.store(normed + at, value, mask)


@triton.jit
def _norm_backward(
    x, dnormed, dtotal, weight, dx, partial_KPW, eps, x_stride, rows, width,
    SUM: tl.constexpr, CENTRED: tl.constexpr, Y_BIAS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """``dx = (g - mean(g) - n mean(g n)) / std``, n = (x - mean) / std, g = weight dy (arXiv 1607.06450).

    RMSNorm (arXiv 1910.07467) has the same without both means of a single factor.
    """
    program, programs = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    columns = tl.arange(0, BLOCK)
    mask = columns < width
    scale = tl.load(weight + columns, mask, 0.0).to(tl.float32)
    dweight = tl.zeros((BLOCK,), tl.float32)
    dbias = tl.zeros((BLOCK,), tl.float32)
    dy_bias = tl.zeros((BLOCK,), tl.float32)
    for i in tl.range(tl.cdiv(rows - program, programs), num_stages=STAGES):
        row = program + i * programs
        at = row * width + columns
        value = tl.load(x + row * x_stride + columns, mask, 0.0).to(tl.float32)
        dy = tl.load(dnormed + at, mask, 0.0).to(tl.float32)
        if SUM:  # here, because loads wait for reductions before them
            dx_sum = tl.load(dtotal + at, mask, 0.0).to(tl.float32)
        if CENTRED:
            value = tl.where(mask, value - tl.sum(value) / width, 0.0)
        inverse = tl.rsqrt(tl.sum(value * value) / width + eps)
        value *= inverse
        g = dy * scale
        d = g - value * (tl.sum(g * value) / width)
        if CENTRED:
            d -= tl.sum(g) / width
            dbias += dy
        d *= inverse
        if SUM:
            d += dx_sum
        tl.store(dx + at, d, mask)
        dweight += dy * value
        if Y_BIAS:
            dy_bias += d
    out = partial_KPW + program * width + columns
    tl.store(out, dweight, mask)
    if CENTRED:
        out += programs * width
        tl.store(out, dbias, mask)
    if Y_BIAS:
        tl.store(out + programs * width, dy_bias, mask)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, y: Tensor | None, y_bias: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor] | Tensor:
        rows = _rows(x)
        total, normed = rows if y is None else x.new_empty(x.shape), x.new_empty(x.shape)
        block, warps = _row(width := x.shape[-1])
        arguments = rows, y if y is None else y.contiguous(), weight, bias, total, normed, eps, rows.stride(0), width
        _norm_forward[(x.numel() // width,)](*arguments, y is not None, bias is not None, block, num_warps=warps)
        ctx.save_for_backward(total, weight)
        ctx.flags, ctx.eps = (y is not None, bias is not None, y_bias is not None), eps
        return normed if y is None else (total, normed)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        total, weight = ctx.saved_tensors
        has_sum, has_bias, has_y_bias = ctx.flags
        width, dx = total.shape[-1], total.new_empty(grads[-1].shape)
        rows, (block, warps) = total.numel() // width, _row(width)
        partial = weight.new_empty(1 + has_bias + has_y_bias, min(PROGRAMS, rows), width, dtype=torch.float32)
        dtotal, dnormed = (grads[0] if has_sum else None), grads[-1].contiguous()
        arguments = total, dnormed, dtotal if dtotal is None else dtotal.contiguous(), weight, dx, partial
        stages = STAGES if block * total.element_size() <= 8192 else 1  # 48 KiB, which all GPUs have
        sizes = _rows(total).stride(0), rows, width
        _norm_backward[partial.shape[1],](*arguments, ctx.eps, *sizes, *ctx.flags, block, stages, num_warps=warps)
        dweight, *more = _summed(partial)
        dbias = more.pop(0) if has_bias else None
        return dx, dx if has_sum else None, more.pop() if has_y_bias else None, dweight, dbias, None


def _rows(x: Tensor) -> Tensor:
    """Return ``[rows, width]``; a copy unless rows are evenly spaced, as those of a part of the columns are."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _row(width: int) -> tuple[int, int]:
    """Return the block that covers a row, and the warps for it."""
    block = triton.next_power_of_2(width)
    return block, min(max(block // 512, 2), 16)


def norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """As :func:`megatron.kernels.norm.norm`."""
    return _Norm.apply(x, None, None, weight, bias, eps)


def add_norm(
    x: Tensor, y: Tensor, y_bias: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """As :func:`megatron.kernels.norm.add_norm`."""
    return _Norm.apply(x, y, y_bias, weight, bias, eps)


@triton.jit
def _value_and_slope(x, NAME: tl.constexpr):
    """Return an activation and its derivative; of swiglu, SiLU's."""
    if NAME == "gelu":
        cdf = 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
        return x * cdf, cdf + x * tl.exp(-0.5 * x * x) * 0.3989422804014327
    if NAME == "gelu_tanh":
        # 0.5 (1 + tanh(u)) = sigmoid(2 u)
        cdf = tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
        return x * cdf, cdf + x * cdf * (1.0 - cdf) * 1.5957691216057308 * (1.0 + 0.134145 * x * x)
    if NAME == "relu2":
        positive = tl.maximum(x, 0.0)
        return positive * positive, 2.0 * positive
    gate = tl.sigmoid(x)
    return x * gate, gate * (1.0 + x * (1.0 - gate))


@triton.jit
def _activation_forward(x, weights, end, y, width, NAME: tl.constexpr, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr):
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask, row = columns < width, tl.program_id(0).to(tl.int64)
    if WEIGHTED:
        mask &= row < tl.load(end)
    at = row * width + columns
    if NAME == "swiglu":
        at_x = row * 2 * width + columns
        value, _ = _value_and_slope(tl.load(x + at_x, mask, 0.0).to(tl.float32), NAME)
        value *= tl.load(x + at_x + width, mask, 0.0).to(tl.float32)
    else:
        value, _ = _value_and_slope(tl.load(x + at, mask, 0.0).to(tl.float32), NAME)
    if WEIGHTED:
        value *= tl.load(weights + row)
    tl.store(y + at, value, mask)


@triton.jit
def _activation_backward(
    x, dy, dx, partial_PW, rows, width, NAME: tl.constexpr, BIAS: tl.constexpr, BLOCK: tl.constexpr
):
    program, programs = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < width
    dbias = tl.zeros((BLOCK,), tl.float32)
    dbias_up = tl.zeros((BLOCK,), tl.float32)
    for i in range(tl.cdiv(rows - program, programs)):
        row = program + i * programs
        at = row * width + columns
        d = tl.load(dy + at, mask, 0.0).to(tl.float32)
        if NAME == "swiglu":
            at += row * width
            value, slope = _value_and_slope(tl.load(x + at, mask, 0.0).to(tl.float32), NAME)
            d_up = d * value
            tl.store(dx + at + width, d_up, mask)
            dbias_up += d_up
            d *= tl.load(x + at + width, mask, 0.0).to(tl.float32)
        else:
            _, slope = _value_and_slope(tl.load(x + at, mask, 0.0).to(tl.float32), NAME)
        d *= slope
        tl.store(dx + at, d, mask)
        dbias += d
    if BIAS:
        if NAME == "swiglu":
            out = partial_PW + program * 2 * width + columns
            tl.store(out + width, dbias_up, mask)
        else:
            out = partial_PW + program * width + columns
        tl.store(out, dbias, mask)


@triton.jit
def _weighted_backward(x, weights, end, dy, dx, dweights, width, NAME: tl.constexpr, BLOCK: tl.constexpr):
    """``dx = p f'(x) dy`` and ``dp = f(x) dy``, with the weight p of a row."""
    row = tl.program_id(0).to(tl.int64)
    if row >= tl.load(end):
        return
    weight = tl.load(weights + row)
    dweight = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, width, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        mask = columns < width
        at = row * width + columns
        d = tl.load(dy + at, mask, 0.0).to(tl.float32)
        if NAME == "swiglu":
            at += row * width
            value, slope = _value_and_slope(tl.load(x + at, mask, 0.0).to(tl.float32), NAME)
            up = tl.load(x + at + width, mask, 0.0).to(tl.float32)
            dweight += d * value * up
            d *= weight
            tl.store(dx + at + width, d * value, mask)
            d *= up
        else:
            value, slope = _value_and_slope(tl.load(x + at, mask, 0.0).to(tl.float32), NAME)
            dweight += d * value
            d *= weight
        tl.store(dx + at, d * slope, mask)
    tl.store(dweights + row, tl.sum(dweight, 0))


class _Activation(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, bias: Tensor | None, name: str, weights: Tensor | None, end: Tensor | None
    ) -> Tensor:
        x, weights = x.contiguous(), None if weights is None else weights.contiguous()
        width = x.shape[-1] // 2 if name == "swiglu" else x.shape[-1]
        y = x.new_empty(*x.shape[:-1], width)
        if y.numel():  # an expert may have no tokens
            grid = y.numel() // width, triton.cdiv(width, TILE)
            _activation_forward[grid](x, weights, end, y, width, name, weights is not None, TILE)
        ctx.save_for_backward(x, weights, end)
        ctx.name, ctx.has_bias, ctx.width = name, bias is not None, width
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weights, end = ctx.saved_tensors
        width, dx, partial = ctx.width, torch.empty_like(x), None
        rows = dy.numel() // width
        if weights is not None:
            dweights, block = torch.empty_like(weights), min(TILE, triton.next_power_of_2(width))
            if rows:
                _weighted_backward[rows,](x, weights, end, dy.contiguous(), dx, dweights, width, ctx.name, block)
            return dx, None, None, dweights, None
        programs = min(PROGRAMS, rows) if ctx.has_bias else rows
        if ctx.has_bias:
            partial = x.new_empty(1, programs, x.shape[-1], dtype=torch.float32)
        if rows:
            _activation_backward[programs, triton.cdiv(width, TILE)](
                x, dy.contiguous(), dx, partial, rows, width, ctx.name, ctx.has_bias, TILE
            )
        return dx, None if partial is None else _summed(partial)[0], None, None, None


def activation(
    x: Tensor,
    bias: Tensor | None,
    name: str,
    limit: float | None = None,
    offset: float = 0.0,
    rows: WeightedRows | None = None,
) -> Tensor:
    """As :func:`megatron.kernels.activation.activation`, without limit and offset."""
    if rows is None:
        return _Activation.apply(x, bias, name, None, None)
    end = torch.full((1,), len(x), dtype=torch.int32, device=x.device) if rows.end is None else rows.end
    return _Activation.apply(x, None, name, rows.weights, end)


@triton.jit
def _partner(channel, ROTARY: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Return the channel that a channel is rotated with, and the sign of its sine."""
    if INTERLEAVED:
        return channel ^ 1, tl.where(channel % 2 == 0, -1.0, 1.0)
    first = channel < ROTARY // 2
    return tl.where(first, channel + ROTARY // 2, channel - ROTARY // 2), tl.where(first, -1.0, 1.0)


@triton.jit
def _qkv_forward(
    qkv, q, k, v, cos, sin, batch, angles_batch, width,
    X: tl.constexpr, D: tl.constexpr, ROTARY: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask, row = columns < width, tl.program_id(0).to(tl.int64)
    groups = width // ((X + 2) * D)
    group, head, channel = columns // ((X + 2) * D), columns // D % (X + 2), columns % D
    at = qkv + row * width + columns
    value = tl.load(at, mask, 0.0)
    turned = mask & (head <= X) & (channel < ROTARY)
    partner, sign = _partner(channel, ROTARY, INTERLEAVED)
    other = tl.load(at - channel + partner, turned, 0.0).to(tl.float32)
    angle = (row // batch * angles_batch + row % batch % angles_batch) * ROTARY + channel
    cosine = tl.load(cos + angle, turned, 1.0).to(tl.float32)
    value = value.to(tl.float32) * cosine + sign * other * tl.load(sin + angle, turned, 0.0).to(tl.float32)
    tl.store(q + ((row * groups + group) * X + head) * D + channel, value, mask & (head < X))
    tl.store(k + (row * groups + group) * D + channel, value, mask & (head == X))
    tl.store(v + (row * groups + group) * D + channel, value, mask & (head == X + 1))


@triton.jit
def _qkv_backward(
    dq, dk, dv, dqkv, cos, sin, partial_PO,
    q_s, q_b, q_n, k_s, k_b, k_g, v_s, v_b, v_g, rows, batch, angles_batch, width,
    X: tl.constexpr, D: tl.constexpr, ROTARY: tl.constexpr, INTERLEAVED: tl.constexpr, BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    program, programs = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < width
    group, head, channel = columns // ((X + 2) * D), columns // D % (X + 2), columns % D
    dbias = tl.zeros((BLOCK,), tl.float32)
    for i in range(tl.cdiv(rows - program, programs)):
        row = program + i * programs
        s, b = row // batch, row % batch
        at_q = dq + s * q_s + b * q_b + (group * X + head) * q_n
        at_k = dk + s * k_s + b * k_b + group * k_g
        at_v = dv + s * v_s + b * v_b + group * v_g
        at = tl.where(head < X, at_q, tl.where(head == X, at_k, at_v))
        d = tl.load(at + channel, mask, 0.0).to(tl.float32)
        if ROTARY:  # the adjoint of a rotation, for any cosines and sines
            partner, sign = _partner(channel, ROTARY, INTERLEAVED)
            turned = mask & (head <= X) & (channel < ROTARY)
            other = tl.load(at + partner, turned, 0.0).to(tl.float32)
            angle = (s * angles_batch + b % angles_batch) * ROTARY
            d *= tl.load(cos + angle + channel, turned, 1.0).to(tl.float32)
            d -= sign * other * tl.load(sin + angle + partner, turned, 0.0).to(tl.float32)
        tl.store(dqkv + row * width + columns, d, mask)
        dbias += d
    if BIAS:
        tl.store(partial_PO + program * width + columns, dbias, mask)


class _SplitQKV(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, qkv_SBO: Tensor, bias: Tensor | None, heads: tuple[int, int], rotary: RotaryCosSin | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.heads, ctx.rotary, ctx.has_bias = heads, rotary, bias is not None
        (groups, d), (s, b, width) = heads, qkv_SBO.shape
        queries = width // (groups * d) - 2
        if rotary is None:  # views, which attention reads in place
            q, k, v = qkv_SBO.unflatten(2, (groups, queries + 2, d)).split((queries, 1, 1), dim=3)
            return q.flatten(2, 3), k.squeeze(3), v.squeeze(3)
        qkv_SBO = qkv_SBO.contiguous()
        # v is copied too: a view would keep the whole projection in memory until backward.
        q, k, v = (qkv_SBO.new_empty(s, b, n, d) for n in (groups * queries, groups, groups))
        _qkv_forward[s * b, triton.cdiv(width, TILE)](
            qkv_SBO, q, k, v, *_angles(rotary, b), width, queries, d, rotary.cos.shape[-1], rotary.interleaved, TILE
        )
        return q, k, v

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dq, dk, dv = (dy if dy.stride(3) == 1 else dy.contiguous() for dy in grads)
        (groups, d), (s, b, n, _) = ctx.heads, dq.shape
        width, rotary = (n + 2 * groups) * d, ctx.rotary
        dqkv = dq.new_empty(s, b, width)
        programs = min(PROGRAMS, s * b) if ctx.has_bias else s * b
        partial = dq.new_empty(1, programs, width, dtype=torch.float32) if ctx.has_bias else None
        cos, sin, *batches = _angles(rotary, b)
        strides = (stride for dy in (dq, dk, dv) for stride in dy.stride()[:3])
        _qkv_backward[programs, triton.cdiv(width, QKV_TILE)](
            dq, dk, dv, dqkv, cos, sin, partial, *strides, s * b, *batches, width,
            n // groups, d, *_turned(rotary), ctx.has_bias, QKV_TILE, num_warps=1,
        )  # fmt: skip
        return dqkv, None if partial is None else _summed(partial)[0], None, None


@triton.jit
def _normed(value, mask, eps, D: tl.constexpr, CENTRED: tl.constexpr):
    """Return the mean of every row of a tile, 0 unless centred, and its inverse deviation."""
    mean = tl.zeros((value.shape[0], 1), tl.float32)
    if CENTRED:
        mean += (tl.sum(value, 1) / D)[:, None]
        value = tl.where(mask, value - mean, 0.0)
    return mean, tl.rsqrt(tl.sum(value * value, 1) / D + eps)[:, None]


@triton.jit
def _of_head(q_D, k_D, is_key, channel, D: tl.constexpr):
    """Return a parameter of query or key heads."""
    of_query = tl.load(q_D + channel, channel < D, 0.0).to(tl.float32)
    return tl.where(is_key, tl.load(k_D + channel, channel < D, 0.0).to(tl.float32), of_query)


@triton.jit
def _normed_qkv_forward(
    qkv, q, k, q_weight, q_bias, k_weight, k_bias, cos, sin, batch, angles_batch, eps, groups,
    X: tl.constexpr, D: tl.constexpr, ROTARY: tl.constexpr, INTERLEAVED: tl.constexpr, CENTRED: tl.constexpr,
    HEADS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Normalise and rotate tiles of heads, without those of values."""
    row, channel = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)[None, :]
    number = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    group, head = number // (X + 1), number % (X + 1)
    mask, is_key = (group < groups) & (channel < D), head == X
    at = qkv + ((row * groups + group) * (X + 2) + head) * D
    value = tl.load(at + channel, mask, 0.0).to(tl.float32)
    mean, inverse = _normed(value, mask, eps, D, CENTRED)
    value = (value - mean) * inverse * _of_head(q_weight, k_weight, is_key, channel, D)
    if CENTRED:
        value += _of_head(q_bias, k_bias, is_key, channel, D)
    if ROTARY:
        partner, sign = _partner(channel, ROTARY, INTERLEAVED)
        turned = channel < ROTARY
        partner = tl.where(turned, partner, channel)
        other = (tl.load(at + partner, mask, 0.0).to(tl.float32) - mean) * inverse
        other *= _of_head(q_weight, k_weight, is_key, partner, D)
        if CENTRED:
            other += _of_head(q_bias, k_bias, is_key, partner, D)
        angle = (row // batch * angles_batch + row % batch % angles_batch) * ROTARY + channel
        value *= tl.load(cos + angle, turned, 1.0).to(tl.float32)
        value += sign * other * tl.load(sin + angle, turned, 0.0).to(tl.float32)
    tl.store(q + ((row * groups + group) * X + head) * D + channel, value, mask & (head < X))
    tl.store(k + (row * groups + group) * D + channel, value, mask & is_key)


@triton.jit
def _normed_qkv_backward(
    qkv, dq, dk, dv, dqkv, q_weight, k_weight, cos, sin, batch, angles_batch, norms_KPD, partial_PO, eps,
    q_s, q_b, q_n, k_s, k_b, k_g, v_s, v_b, v_g, rows, groups,
    X: tl.constexpr, D: tl.constexpr, ROTARY: tl.constexpr, INTERLEAVED: tl.constexpr, CENTRED: tl.constexpr,
    BIAS: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program, programs = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    channel = tl.arange(0, BLOCK)[None, :]
    number = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    group, head = number // (X + 2), number % (X + 2)
    mask, width = (group < groups) & (channel < D), groups * (X + 2) * D
    scale = _of_head(q_weight, k_weight, head == X, channel, D)
    dscale = tl.zeros((HEADS, BLOCK), tl.float32)
    dshift = tl.zeros((HEADS, BLOCK), tl.float32)
    dbias = tl.zeros((HEADS, BLOCK), tl.float32)
    for i in range(tl.cdiv(rows - program, programs)):
        row = program + i * programs
        s, b = row // batch, row % batch
        at_q = dq + s * q_s + b * q_b + (group * X + head) * q_n
        at_k = dk + s * k_s + b * k_b + group * k_g
        at_v = dv + s * v_s + b * v_b + group * v_g
        at = tl.where(head < X, at_q, tl.where(head == X, at_k, at_v))
        here = row * width + number * D + channel
        value = tl.load(qkv + here, mask, 0.0).to(tl.float32)
        given = tl.load(at + channel, mask, 0.0).to(tl.float32)
        d = given
        if ROTARY:
            partner, sign = _partner(channel, ROTARY, INTERLEAVED)
            turned, angle = channel < ROTARY, (s * angles_batch + b % angles_batch) * ROTARY
            other = tl.load(at + partner, mask & turned, 0.0).to(tl.float32)
            d *= tl.load(cos + angle + channel, turned, 1.0).to(tl.float32)
            d -= sign * other * tl.load(sin + angle + partner, turned, 0.0).to(tl.float32)
        mean, inverse = _normed(value, mask, eps, D, CENTRED)
        value = tl.where(mask, (value - mean) * inverse, 0.0)
        g = d * scale
        dx = g - value * (tl.sum(g * value, 1) / D)[:, None]
        if CENTRED:
            dx -= (tl.sum(g, 1) / D)[:, None]
            dshift += d
        dscale += d * value
        dx = tl.where(head <= X, dx * inverse, given)
        tl.store(dqkv + here, dx, mask)
        if BIAS:
            dbias += dx
    column = tl.arange(0, BLOCK)
    tiles = tl.num_programs(1)
    out = norms_KPD + (program * tiles + tl.program_id(1)) * D + column
    size = programs.to(tl.int64) * tiles * D
    tl.store(out, tl.sum(tl.where(head < X, dscale, 0.0), 0), column < D)
    tl.store(out + size, tl.sum(tl.where(head == X, dscale, 0.0), 0), column < D)
    if CENTRED:
        tl.store(out + 2 * size, tl.sum(tl.where(head < X, dshift, 0.0), 0), column < D)
        tl.store(out + 3 * size, tl.sum(tl.where(head == X, dshift, 0.0), 0), column < D)
    if BIAS:
        tl.store(partial_PO + program * width + number * D + channel, dbias, mask)


class _SplitNormedQKV(torch.autograd.Function):
    """Values are a view of the projection, which backward needs anyway."""

    @staticmethod
    def forward(
        ctx: Any,
        qkv_SBO: Tensor,
        bias: Tensor | None,
        heads: tuple[int, int],
        rotary: RotaryCosSin | None,
        q_weight: Tensor,
        q_bias: Tensor | None,
        k_weight: Tensor,
        k_bias: Tensor | None,
        eps: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        qkv_SBO = qkv_SBO.contiguous()
        (groups, d), (s, b, width) = heads, qkv_SBO.shape
        queries, block, centred = width // (groups * d) - 2, triton.next_power_of_2(d), q_bias is not None
        q, k = (qkv_SBO.new_empty(s, b, n, d) for n in (groups * queries, groups))
        tile = max(1, TILE // block)
        _normed_qkv_forward[s * b, triton.cdiv(groups * (queries + 1), tile)](
            qkv_SBO, q, k, q_weight, q_bias, k_weight, k_bias, *_angles(rotary, b), eps, groups,
            queries, d, *_turned(rotary), centred, tile, block,
        )  # fmt: skip
        ctx.save_for_backward(qkv_SBO, q_weight, k_weight)
        ctx.heads, ctx.rotary, ctx.has_bias, ctx.centred, ctx.eps = heads, rotary, bias is not None, centred, eps
        return q, k, qkv_SBO.unflatten(2, (groups, queries + 2, d))[:, :, :, -1]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        qkv, q_weight, k_weight = ctx.saved_tensors
        dq, dk, dv = (dy if dy.stride(3) == 1 else dy.contiguous() for dy in grads)
        (groups, d), (s, b, width) = ctx.heads, qkv.shape
        queries, block = width // (groups * d) - 2, triton.next_power_of_2(d)
        tile = max(1, QKV_TILE // block)
        programs, tiles = min(PROGRAMS, s * b), triton.cdiv(groups * (queries + 2), tile)
        dqkv = torch.empty_like(qkv)
        norms = qkv.new_empty(4 if ctx.centred else 2, programs * tiles, d, dtype=torch.float32)
        biases = qkv.new_empty(1, programs, width, dtype=torch.float32) if ctx.has_bias else None
        strides = (stride for dy in (dq, dk, dv) for stride in dy.stride()[:3])
        _normed_qkv_backward[programs, tiles](
            qkv, dq, dk, dv, dqkv, q_weight, k_weight, *_angles(ctx.rotary, b), norms, biases, ctx.eps,
            *strides, s * b, groups,
            queries, d, *_turned(ctx.rotary), ctx.centred, ctx.has_bias, tile, block, num_warps=1,
        )  # fmt: skip
        dbias = None if biases is None else _summed(biases)[0]
        dq_weight, dk_weight, dq_bias, dk_bias = (*_summed(norms), None, None)[:4]
        return dqkv, dbias, None, None, dq_weight, dq_bias, dk_weight, dk_bias, None


def _angles(rotary: RotaryCosSin | None, batch: int) -> tuple[Tensor | None, Tensor | None, int, int]:
    """Return cosines and sines, the batch, and that of the angles."""
    if rotary is None:
        return None, None, batch, 1
    return rotary.cos.contiguous(), rotary.sin.contiguous(), batch, rotary.cos.shape[1]


def _turned(rotary: RotaryCosSin | None) -> tuple[int, bool]:
    """Return the number of channels that are rotated, and whether in pairs of neighbours."""
    return (0, False) if rotary is None else (rotary.cos.shape[-1], rotary.interleaved)


def split_qkv(
    qkv_SBO: Tensor, bias_O: Tensor | None, heads: tuple[int, int], norms: HeadNorms | None, rotary: RotaryCosSin | None
) -> tuple[Tensor, Tensor, Tensor]:
    """As :func:`megatron.kernels.qkv.split_qkv`."""
    if norms is not None:
        return _SplitNormedQKV.apply(qkv_SBO, bias_O, heads, rotary, *norms)
    return _SplitQKV.apply(qkv_SBO, bias_O, heads, rotary)
