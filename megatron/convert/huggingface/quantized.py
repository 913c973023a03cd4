"""Quantised weights in Hugging Face folders, which are dequantised to bf16 while they are read.

DeepSeek-V3 and Kimi K2 are published in FP8: beside ``NAME`` there is ``NAME_scale_inv``, a factor for each block of
128 x 128 elements of the last two dimensions. GPT-OSS has experts in MXFP4 (OCP microscaling formats, version 1.0):
``NAME_blocks`` holds 32 FP4 numbers in 16 bytes, the first in the low bits, and ``NAME_scales`` their exponent.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.checkpoint.errors import CheckpointError
from megatron.checkpoint.tensor_file import TensorFile

FP8_FACTORS, FP4_PAIRS, FP4_EXPONENTS = "_scale_inv", "_blocks", "_scales"
"""Suffixes of names."""

FP4_PAIRS_OF_BLOCK = 16
"""Bytes of a block in MXFP4."""

CHUNK_ELEMENTS = 4 << 20
"""Elements that are dequantised at a time, unless a row has more."""

_FP4 = [sign * value for sign in (1, -1) for value in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)]
_OF_BYTE = torch.tensor([[_FP4[byte & 15], _FP4[byte >> 4]] for byte in range(256)])
_OF_EXPONENT = torch.tensor([*(2.0 ** (byte - 127) for byte in range(255)), math.nan])


@dataclass(frozen=True)
class QuantizedTensor:
    """A tensor that is stored quantised, with the methods of a `TensorFile`."""

    stored_shape: tuple[int, ...]
    # Returns rows of the first dimension, in bf16.
    dequantize: Callable[[slice], Tensor]

    def dtype(self, key: str) -> torch.dtype:
        """Return the type of the tensor."""
        return torch.bfloat16

    def shape(self, key: str) -> tuple[int, ...]:
        """Return the shape of the tensor."""
        return self.stored_shape

    def tensor(self, key: str, rows: range | None = None) -> Tensor:
        """Return the tensor; of its first dimension only ``rows`` are set, and use memory."""
        rows = rows or range(self.stored_shape[0])
        out = torch.empty(self.stored_shape, dtype=torch.bfloat16)
        step = max(1, CHUNK_ELEMENTS // max(1, math.prod(self.stored_shape[1:])))
        for start in rows[::step]:
            part = slice(start, min(start + step, rows.stop))
            out[part] = self.dequantize(part)
        return out


StoredTensor = TensorFile | QuantizedTensor


def dequantized(files: Mapping[str, TensorFile], block: tuple[int, int]) -> dict[str, StoredTensor]:
    """Return what holds each tensor, with one name in place of those of its quantised form.

    Args:
        files: files by the names of the tensors in them.
        block: rows and columns of a block in FP8.

    Raises:
        CheckpointError: if a tensor and its factors do not fit together, or a tensor is there in both forms.
    """
    found: dict[str, StoredTensor] = dict(files)
    for key in files:
        for suffix, other, read in ((FP8_FACTORS, "", _open_fp8), (FP4_EXPONENTS, FP4_PAIRS, _open_mxfp4)):
            name = key.removesuffix(suffix)
            if name != key and name + other in files:
                if other and name in files:
                    raise CheckpointError(f"{name} is stored twice: as it is, and as {name}{other} with {key}")
                values, factors = (files[each].tensor(each) for each in (name + other, key))
                del found[key], found[name + other]
                found[name] = read(key, values, factors, block)
    return found


def _open_fp8(key: str, weight: Tensor, factors: Tensor, block: tuple[int, int]) -> QuantizedTensor:
    height, width = block
    expected = (*weight.shape[:-2], *(-(-size // of_block) for size, of_block in zip(weight.shape[-2:], block)))
    is_matrix = weight.dim() >= 2 and weight.dtype == torch.float8_e4m3fn
    _check(key, weight, factors, is_matrix and factors.is_floating_point() and factors.shape == expected)

    def dequantize(rows: slice) -> Tensor:
        values = weight[rows].float()
        if weight.dim() == 2:
            by_row = factors[torch.arange(rows.start, rows.stop) // height]
        else:
            by_row = factors[rows].repeat_interleave(height, -2)[..., : values.shape[-2], :]
        for columns, factor in zip(values.split(width, -1), by_row.float().unbind(-1), strict=True):
            columns.mul_(factor.unsqueeze(-1))
        return values.bfloat16()

    return QuantizedTensor(tuple(weight.shape), dequantize)


def _open_mxfp4(key: str, pairs: Tensor, exponents: Tensor, block: tuple[int, int]) -> QuantizedTensor:
    in_blocks = pairs.dim() == 4 and pairs.shape[-1] == FP4_PAIRS_OF_BLOCK
    in_bytes = pairs.dtype == exponents.dtype == torch.uint8
    _check(key, pairs, exponents, in_blocks and in_bytes and exponents.shape == pairs.shape[:-1])
    experts, outputs, groups, size = pairs.shape

    def dequantize(rows: slice) -> Tensor:
        values = _OF_BYTE[pairs[rows].int()].flatten(-2) * _OF_EXPONENT[exponents[rows].int()].unsqueeze(-1)
        return values.flatten(-2).mT.bfloat16()

    return QuantizedTensor((experts, groups * 2 * size, outputs), dequantize)


def _check(key: str, values: Tensor, factors: Tensor, fits: bool) -> None:
    if not fits:
        seen, weight = (f"{each.dtype} {list(each.shape)}" for each in (factors, values))
        raise CheckpointError(f"{key} is {seen}, and does not fit the quantised weight, which is {weight}")
