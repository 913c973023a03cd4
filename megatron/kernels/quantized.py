"""Blockwise quantisation of weights that are not trained: 8-bit integers, or 4-bit NormalFloat (arXiv 2305.14314).

``BLOCK`` neighbouring inputs of a row share a scale, the largest absolute value among them. A block is stored as its
codes, followed by the scale in fp32, so a rank's inputs are a range of bytes.
"""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from statistics import NormalDist

import torch
from torch import Tensor

from megatron.config.adapters import QUANTIZED_BITS, QUANTIZED_BLOCK

INT8_MAX = 127
"""Code of the largest value of a block."""

NF4_OFFSET = 0.9677083
"""Largest probability of which NormalFloat takes the quantile (QLoRA's code)."""


@cache
def normal_float_codes() -> tuple[float, ...]:
    """Return the 16 values of 4-bit NormalFloat, ascending from -1 to 1: quantiles of a normal distribution, and 0."""

    def quantiles(count: int) -> list[float]:
        step = (NF4_OFFSET - 0.5) / count
        return [NormalDist().inv_cdf(NF4_OFFSET - i * step) for i in range(count)]

    positive, negative = quantiles(8), quantiles(7)
    return tuple(sorted([value / positive[0] for value in (*positive, 0.0, *(-value for value in negative))]))


def quantize(weight_OI: Tensor, precision: str) -> Tensor:
    """Return the bytes of a weight, uint8 ``[O, I / BLOCK x bytes of a block]``."""
    blocks = weight_OI.unflatten(1, (-1, QUANTIZED_BLOCK)).to(torch.promote_types(weight_OI.dtype, torch.float32))
    scale = blocks.abs().amax(2, keepdim=True).float()
    relative = blocks / scale.where(scale > 0, 1.0)
    if precision == "int8":
        codes = (relative * INT8_MAX).round().to(torch.int8).view(torch.uint8)
    else:
        midpoints = [(a + b) / 2 for a, b in pairwise(normal_float_codes())]
        nearest = torch.bucketize(relative, torch.tensor(midpoints, dtype=relative.dtype, device=relative.device))
        low, high = nearest.to(torch.uint8).unflatten(2, (-1, 2)).unbind(3)
        codes = low | high << 4
    return torch.cat([codes, scale.view(torch.uint8)], 2).flatten(1)


def dequantize(packed: Tensor, precision: str, dtype: torch.dtype) -> Tensor:
    """Return the weight ``[O, I]`` that :func:`quantize` has packed, rounded to ``dtype``."""
    width = QUANTIZED_BLOCK * QUANTIZED_BITS[precision] // 8
    blocks = packed.unflatten(1, (-1, width + torch.float32.itemsize))
    wide = torch.promote_types(dtype, torch.float32)
    codes, scale = blocks[..., :width], blocks[..., width:].view(torch.float32).to(wide)
    if precision == "int8":
        values = codes.view(torch.int8).to(wide) / INT8_MAX
    else:
        table = torch.tensor(normal_float_codes(), dtype=wide, device=packed.device)
        values = table[torch.stack([codes & 15, codes >> 4], 3).flatten(2).int()]
    return (values * scale).to(dtype).flatten(1)
