"""Grouped linears in Triton: one launch per product, whatever the number of experts.

Both kernels sum in fp32, and each element of a result is summed by one program in a fixed order: results are bitwise
reproducible. Rows of padding are neither read nor written.

Shapes: R rows, E experts, N columns of a result, K summed.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron.kernels.fp8 import Float8Tensor
from megatron.kernels.grouped_fp8 import GroupedFloat8Kernel
from megatron.kernels.grouped_linear import GroupedLinearKernel

WIDE_TILE_ROWS = 96
"""Mean rows of an expert from which tiles have 128 rows instead of 64."""


class MatmulTile(NamedTuple):
    """Sizes of the tile of a program, and its launch."""

    rows: int
    columns: int
    # Summed at a time.
    summed: int
    warps: int
    stages: int


def _tile(x: Tensor, many_rows: bool = True) -> MatmulTile:
    """Return tiles whose operands fit in the 99 KiB of shared memory that all GPUs since Ampere have."""
    if x.element_size() == 4:
        return MatmulTile(64, 64, 32, 4, 2)
    summed = 128 // x.element_size()
    return MatmulTile(128 if many_rows else 64, 128, summed, 8 if many_rows else 4, 3)


@triton.jit
def _expert_of(tile, offsets, experts, EXPERTS: tl.constexpr, ROWS: tl.constexpr):
    """Return the expert of a tile of rows, and its number among the expert's tiles; ``experts`` after the last tile."""
    e = tl.arange(0, EXPERTS)
    ends = tl.load(offsets + e, e < experts, 0)
    starts = tl.load(offsets + e - 1, (e > 0) & (e < experts), 0)
    tiles = tl.where(e < experts, (ends - starts + ROWS - 1) // ROWS, 0)
    last = tl.cumsum(tiles, 0)
    before = (last <= tile) & (e < experts)
    return tl.sum(before.to(tl.int32), 0), tile - tl.sum(tl.where(before, tiles, 0), 0)


@triton.jit
def _multiply_rows(
    x_RK, w_ENK, y_RN, offsets, experts, row_tiles, N, K, w_e, w_n, w_k,
    x_scale, w_scale, xs_r, xs_k, ws_e, ws_n, ws_k,
    EXPERTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, SUMMED: tl.constexpr, GROUP: tl.constexpr,
    PRECISION: tl.constexpr, SCALED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """``y = x W_e^T`` for rows of expert e.

    SCALED operands in FP8 have a scale for each row of x and BLOCK rows of W: for each SUMMED columns if BLOCK is over
    1, else for all. Tensor cores sum FP8 products with few digits, so only SUMMED of them are left to these.
    """
    # Programs that run together share rows and weights: GROUP tiles of rows, column by column.
    column_tiles = tl.cdiv(N, COLUMNS)
    group = tl.program_id(0) // (GROUP * column_tiles)
    size = min(row_tiles - group * GROUP, GROUP)
    within = tl.program_id(0) - group * GROUP * column_tiles
    expert, number = _expert_of(group * GROUP + within % size, offsets, experts, EXPERTS, ROWS)
    if expert >= experts:
        return
    start = tl.load(offsets + expert - 1, expert > 0, 0)
    end = tl.load(offsets + expert)
    rows = start + number * ROWS + tl.arange(0, ROWS)
    columns = within // size * COLUMNS + tl.arange(0, COLUMNS)
    k = tl.arange(0, SUMMED)
    at_x = x_RK + rows.to(tl.int64)[:, None] * K + k[None, :]
    at_w = w_ENK + expert.to(tl.int64) * w_e + columns.to(tl.int64)[None, :] * w_n + k[:, None] * w_k
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(0, K, SUMMED):
        inside = k < K - first
        x = tl.load(at_x, (rows < end)[:, None] & inside[None, :], 0.0)
        w = tl.load(at_w, inside[:, None] & (columns < N)[None, :], 0.0)
        if SCALED:
            part = tl.dot(x, w)
            if BLOCK > 1:
                part *= tl.load(x_scale + rows * xs_r + first // SUMMED * xs_k, rows < end, 0.0)[:, None]
                at = w_scale + expert * ws_e + columns // BLOCK * ws_n + first // SUMMED * ws_k
                part *= tl.load(at, columns < N, 0.0)[None, :]
            total += part
        else:
            total = tl.dot(x, w, total, input_precision=PRECISION)
        at_x += SUMMED
        at_w += SUMMED * w_k
    if SCALED and BLOCK == 1:
        total *= tl.load(x_scale + rows * xs_r, rows < end, 0.0)[:, None]
        total *= tl.load(w_scale + expert * ws_e + columns * ws_n, columns < N, 0.0)[None, :]
    at_y = y_RN + rows.to(tl.int64)[:, None] * N + columns[None, :]
    tl.store(at_y, total.to(y_RN.dtype.element_ty), (rows < end)[:, None] & (columns < N)[None, :])


@triton.jit
def _accumulate_products(
    x_RI, dy_RO, target_EOI, offsets, outputs, inputs, t_e, t_o,
    BETA: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """``target_e = beta target_e + dy_e^T x_e``."""
    input_tiles = tl.cdiv(inputs, INPUTS)
    tiles = tl.cdiv(outputs, OUTPUTS) * input_tiles
    expert, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    start = tl.load(offsets + expert - 1, expert > 0, 0)
    end = tl.load(offsets + expert)
    if BETA and start == end:
        return
    o = tile // input_tiles * OUTPUTS + tl.arange(0, OUTPUTS)
    i = tile % input_tiles * INPUTS + tl.arange(0, INPUTS)
    total = tl.zeros((OUTPUTS, INPUTS), tl.float32)
    for first in range(start, end, ROWS):
        rows = first + tl.arange(0, ROWS)
        at = rows.to(tl.int64)[:, None]
        inside = (rows < end)[:, None]
        dy = tl.load(dy_RO + at * outputs + o[None, :], inside & (o < outputs)[None, :], 0.0)
        x = tl.load(x_RI + at * inputs + i[None, :], inside & (i < inputs)[None, :], 0.0)
        total = tl.dot(tl.trans(dy), x, total, input_precision=PRECISION)
    at = target_EOI + expert.to(tl.int64) * t_e + o.to(tl.int64)[:, None] * t_o + i[None, :]
    mask = (o < outputs)[:, None] & (i < inputs)[None, :]
    if BETA:
        total += tl.load(at, mask, 0.0)
    tl.store(at, total, mask)


@triton.jit
def _sum_rows_of_experts(
    dy_RO, factor_R, out_EO, offsets, dy_r, outputs,
    FACTOR: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr,
):  # fmt: skip
    """``out_e = factor_e^T dy_e``."""
    expert = tl.program_id(0)
    start = tl.load(offsets + expert - 1, expert > 0, 0)
    end = tl.load(offsets + expert)
    o = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    total = tl.zeros((ROWS, OUTPUTS), tl.float32)
    for first in range(start, end, ROWS):
        rows = first + tl.arange(0, ROWS)
        inside = rows < end
        mask = inside[:, None] & (o < outputs)[None, :]
        dy = tl.load(dy_RO + rows.to(tl.int64)[:, None] * dy_r + o[None, :], mask, 0.0).to(tl.float32)
        if FACTOR:
            dy *= tl.load(factor_R + rows, inside, 0.0)[:, None]
        total += dy
    tl.store(out_EO + expert * outputs + o, tl.sum(total, 0), o < outputs)


@triton.jit
def _quantize_rows(
    x_RK, data_RK, scale_RG, offsets, experts, K, largest,
    GIVEN: tl.constexpr, GROUPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Divide a row by its scales, one for each BLOCK columns, as :func:`megatron.kernels.fp8.quantize`."""
    row = tl.program_id(0).to(tl.int64)
    if row >= tl.load(offsets + experts - 1):
        return
    groups = tl.arange(0, GROUPS)
    columns = groups[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    value = tl.load(x_RK + row * K + columns, columns < K, 0.0).to(tl.float32)
    count = tl.cdiv(K, BLOCK)
    at_scale = scale_RG + row * count + groups
    if GIVEN:
        scale = tl.load(at_scale, groups < count, 1.0)
    else:
        size = tl.abs(value)
        infinite = tl.max((size < float("inf")).to(tl.int32) ^ 1, 1)  # nan, too, which maxima leave out
        scale = tl.maximum(tl.div_rn(tl.max(size, 1), tl.full((GROUPS,), largest, tl.float32)), 1.1754943508222875e-38)
        scale = tl.where(infinite > 0, float("nan"), scale)
        tl.store(at_scale, scale, groups < count)
    value = tl.div_rn(value, tl.broadcast_to(scale[:, None], (GROUPS, BLOCK)))
    value = tl.where(value > largest, largest, tl.where(value < -largest, -largest, value))  # keeps nan
    tl.store(data_RK + row * K + columns, value.to(data_RK.dtype.element_ty), columns < K)


def _times(
    x: Tensor, weight_ENK: Tensor, offsets: Tensor, dtype: torch.dtype, scales: tuple[Tensor, Tensor] | None = None
) -> Tensor:
    """Return ``x_e W_e^T``; the weight may be transposed. Operands in FP8 have scales ``[R, k]`` and ``[E, n, k]``."""
    x, (experts, columns, summed) = x.contiguous(), weight_ENK.shape
    y = x.new_empty(len(x), columns, dtype=dtype)
    if not y.numel():
        return y
    x_scale, w_scale = scales or (None, None)
    strides = (0,) * 5 if x_scale is None or w_scale is None else (*x_scale.stride(), *w_scale.stride())
    block = 1 if w_scale is None else columns // w_scale.shape[1]
    tile = _tile(x, len(x) >= WIDE_TILE_ROWS * experts)
    row_tiles = triton.cdiv(len(x), tile.rows) + experts  # at most: each expert has an incomplete one
    _multiply_rows[row_tiles * triton.cdiv(columns, tile.columns),](
        x, weight_ENK, y, offsets, experts, row_tiles, columns, summed, *weight_ENK.stride(),
        x_scale, w_scale, *strides,
        triton.next_power_of_2(experts), tile.rows, tile.columns, tile.summed, 8, _precision(x),
        x_scale is not None, block, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    return y


def _precision(x: Tensor) -> str:
    """Return the precision of products in fp32, which are exact."""
    return "ieee" if x.dtype == torch.float32 else "tf32"


def forward(x_RI: Tensor, weight_EOI: Tensor, offsets: Tensor) -> Tensor:
    """Return ``x_e W_e^T``."""
    return _times(x_RI, weight_EOI, offsets, x_RI.dtype)


def input_gradient(dy_RO: Tensor, weight_EOI: Tensor, offsets: Tensor) -> Tensor:
    """Return ``dy_e W_e``."""
    return _times(dy_RO, weight_EOI.transpose(1, 2), offsets, dy_RO.dtype)


def weight_gradient(target_EOI: Tensor, x_RI: Tensor, dy_RO: Tensor, offsets: Tensor, beta: float = 1.0) -> None:
    """Accumulate ``dy_e^T x_e`` into a target whose rows are contiguous."""
    experts, outputs, inputs = target_EOI.shape
    x, dy, tile = x_RI.contiguous(), dy_RO.contiguous(), _tile(x_RI)
    tiles = triton.cdiv(outputs, tile.rows) * triton.cdiv(inputs, tile.columns)
    _accumulate_products[experts * tiles,](
        x, dy, target_EOI, offsets, outputs, inputs, target_EOI.stride(0), target_EOI.stride(1),
        bool(beta), tile.summed, tile.rows, tile.columns, _precision(x), num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


def bias_gradient(dy_RO: Tensor, offsets: Tensor, factor_R: Tensor | None = None) -> Tensor:
    """Return the column sums of the rows of each expert, times their factors."""
    dy, experts, outputs = dy_RO if dy_RO.stride(1) == 1 else dy_RO.contiguous(), len(offsets), dy_RO.shape[1]
    out = dy.new_empty(experts, outputs, dtype=torch.float32)
    _sum_rows_of_experts[experts, triton.cdiv(outputs, 128)](
        dy, factor_R, out, offsets, dy.stride(0), outputs, factor_R is not None, 16, 128
    )
    return out


def quantize_rows(
    x_RK: Tensor, block: int | None, dtype: torch.dtype, offsets: Tensor, scale: Tensor | None = None
) -> Float8Tensor:
    """Quantise rows, with their scales if they are known; one launch, which reads them once."""
    x, (rows, columns) = x_RK.contiguous(), x_RK.shape
    width = block or triton.next_power_of_2(columns)
    groups, given = triton.cdiv(columns, width), scale is not None
    data = torch.empty_like(x, dtype=dtype)
    scale = x.new_empty(rows, groups, dtype=torch.float32) if scale is None else scale.contiguous()
    if rows:
        size = triton.next_power_of_2(groups)
        _quantize_rows[rows,](
            x, data, scale, offsets, len(offsets), columns, torch.finfo(dtype).max, given, size, width,
            num_warps=4 if size * width <= 4096 else 8,
        )  # fmt: skip
    return Float8Tensor(data, scale)


def grouped_fp8_product(a: Float8Tensor, b: Float8Tensor, offsets: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``A_e B_e^T``; scales cover whole rows, or blocks of 128."""
    return _times(a.data, b.data, offsets, dtype, (a.scale, b.scale))


grouped_linear = GroupedLinearKernel(forward, input_gradient, weight_gradient, bias_gradient)
grouped_fp8 = GroupedFloat8Kernel(grouped_fp8_product, quantize_rows)
