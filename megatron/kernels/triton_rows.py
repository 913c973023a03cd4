"""Triton kernels of :mod:`megatron.kernels.rows`.

A sum of rows is one launch: each program adds a tile of a token's rows in fp32. Sorting is three, for keys that are few
numbers: count the keys of each block, add up the counts of the blocks before, and place each key after those before it.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron.kernels import rows
from megatron.kernels.rows import RowKernels, SortedKeys

TILE = 1024
"""Columns of a program that adds rows."""

ELEMENTS = 16_384
"""Elements of a program that sorts: keys by numbers, and blocks by numbers."""

MAX_NUMBERS, MAX_BLOCKS = 1024, 4096
"""Above, PyTorch sorts."""


@triton.jit
def _sum_rows(x, places, y, rows, width, C: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    total = tl.zeros((BLOCK,), tl.float32)
    for c in tl.static_range(C):
        row = tl.load(places + token * C + c).to(tl.int64)
        total += tl.load(x + row * width + columns, inside & (row < rows), 0.0).to(tl.float32)
    tl.store(y + token * width + columns, total, inside)


def sum_rows(x_RH: Tensor, places_TC: Tensor, complete: bool) -> Tensor:
    """See :func:`megatron.kernels.rows.sum_rows`."""
    (rows, width), (tokens, count) = x_RH.shape, places_TC.shape
    y = torch.empty((tokens, width), dtype=x_RH.dtype, device=x_RH.device)
    block: Any = min(TILE, triton.next_power_of_2(width))
    if y.numel():
        grid = tokens, triton.cdiv(width, block)
        _sum_rows[grid](x_RH.contiguous(), places_TC.contiguous(), y, rows, width, count, block, num_warps=4)
    return y


@triton.jit
def _count_keys(keys, counts, total, NUMBERS: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    numbers = tl.arange(0, NUMBERS)
    key = tl.load(keys + at, at < total, -1).to(tl.int32)
    found = (key[:, None] == numbers[None, :]).to(tl.int32)
    tl.store(counts + tl.program_id(0) * NUMBERS + numbers, tl.sum(found, 0))


@triton.jit
def _add_blocks(counts, totals, blocks, NUMBERS: tl.constexpr, BLOCKS: tl.constexpr, TILE: tl.constexpr):
    numbers = tl.program_id(0) * TILE + tl.arange(0, TILE)
    block = tl.arange(0, BLOCKS)
    at = block[:, None] * NUMBERS + numbers[None, :]
    inside = (block < blocks)[:, None] & (numbers < NUMBERS)[None, :]
    count = tl.load(counts + at, inside, 0)
    tl.store(counts + at, tl.cumsum(count, 0) - count, inside)
    tl.store(totals + numbers, tl.sum(count, 0), numbers < NUMBERS)


@triton.jit
def _place_keys(keys, before, totals, order, places, ends, total, groups, NUMBERS: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < total
    numbers = tl.arange(0, NUMBERS)
    count = tl.load(totals + numbers)
    end = tl.cumsum(count, 0)
    first = end - count + tl.load(before + tl.program_id(0) * NUMBERS + numbers)
    key = tl.load(keys + at, inside, -1).to(tl.int32)
    found = (key[:, None] == numbers[None, :]).to(tl.int32)
    place = tl.sum(found * (first[None, :] + tl.cumsum(found, 0) - 1), 1).to(tl.int64)
    tl.store(places + at, place, inside)
    tl.store(order + place, at.to(tl.int64), inside)
    if tl.program_id(0) == 0:
        tl.store(ends + numbers, end, numbers < groups)


def sort_keys(keys: Tensor, groups: int, most: int) -> SortedKeys:
    """See :func:`megatron.kernels.rows.sort_keys`."""
    keys = keys.flatten()
    numbers: Any = max(16, triton.next_power_of_2(most + 1))
    block: Any = max(16, min(128, ELEMENTS // numbers))
    total, blocks = len(keys), triton.cdiv(len(keys), block)
    if numbers > MAX_NUMBERS or not 0 < blocks <= MAX_BLOCKS:
        return rows.sort_keys(keys, groups, most)
    order, places = (torch.empty(total, dtype=torch.int64, device=keys.device) for _ in range(2))
    counts = torch.empty((blocks + 1, numbers), dtype=torch.int32, device=keys.device)
    ends = torch.empty(groups, dtype=torch.int32, device=keys.device)
    size: Any = max(16, triton.next_power_of_2(blocks))
    tile: Any = min(numbers, max(1, ELEMENTS // size))
    _count_keys[(blocks,)](keys, counts, total, numbers, block, num_warps=8)
    _add_blocks[(triton.cdiv(numbers, tile),)](counts, counts[blocks], blocks, numbers, size, tile, num_warps=8)
    _place_keys[(blocks,)](
        keys, counts, counts[blocks], order, places, ends, total, groups, numbers, block, num_warps=8
    )
    return SortedKeys(order, places, ends)


TRITON_ROWS = RowKernels(sum_rows, sort_keys)
