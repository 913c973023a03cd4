"""Triton kernel of :mod:`megatron.kernels.rows`: each program adds a tile of a token's rows in fp32."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 1024
"""Columns of a program."""


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
