"""The products of grouped linears in FP8: rows sorted by expert, times the quantised weight of their expert.

Both operands are quantised along the dimension that is summed (:mod:`megatron.kernels.fp8`). A row's scales depend on
that row alone, so neither the order of rows nor the ranks that sent them change a value; ``tensorwise`` has the scales
of ``rowwise`` here. Weight gradients are sums over rows: they are products in 16 bits
(:mod:`megatron.kernels.grouped_linear`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.kernels.compile import triton_missing, triton_region
from megatron.kernels.fp8 import Float8Kernel, Float8Recipe, Float8Tensor, emulated_product, quantize
from megatron.kernels.operation import Candidate, KernelCheck, Operation


class GroupedFloat8Kernel(NamedTuple):
    """An implementation of grouped linears in FP8; on ``offsets`` see ``kernels/grouped_linear.py``."""

    # (a [R, K], b [E, N, K], offsets_E, dtype) -> [R, N]: rows ``A_e B_e^T``
    product: Callable[[Float8Tensor, Float8Tensor, Tensor, torch.dtype], Tensor]
    # (x_RK, block, dtype, offsets_E, scale=None) -> Float8Tensor: rows with a scale for each ``block`` columns, or for
    # all if it is None. Scales ``[R, k]`` are passed if they are known.
    quantize_rows: Callable[..., Float8Tensor]


def experts_recipe(recipe: Float8Recipe) -> Float8Recipe:
    """Return the recipe that experts use where linears use ``recipe``: rows have scales of their own."""
    return replace(recipe, name="rowwise") if recipe.name == "tensorwise" else recipe


def emulated_grouped_product(a: Float8Tensor, b: Float8Tensor, offsets: Tensor, dtype: torch.dtype) -> Tensor:
    """Multiply the dequantised operands, one expert after the other; reads the offsets on the host."""
    y, ends = a.data.new_zeros(len(a.data), b.data.shape[1], dtype=dtype), offsets.tolist()
    for start, end, weight, weight_scale in zip([0, *ends], ends, b.data, b.scale):
        if start < end:
            rows = Float8Tensor(a.data[start:end], a.scale[start:end])
            y[start:end] = emulated_product(rows, Float8Tensor(weight, weight_scale), dtype)
    return y


def emulated_quantize_rows(
    x: Tensor, block: int | None, dtype: torch.dtype, offsets: Tensor, scale: Tensor | None = None
) -> Float8Tensor:
    """Quantise all rows, those of padding too."""
    return Float8Tensor(*quantize(x, (1, block), dtype, False, False, scale))


TORCH_GROUPED_FP8 = GroupedFloat8Kernel(emulated_grouped_product, emulated_quantize_rows)


def _triton() -> GroupedFloat8Kernel:
    """Load the Triton kernels."""
    return cast("GroupedFloat8Kernel", triton_region("grouped_fp8", "triton_grouped")())


def _scaled_grouped_mm() -> GroupedFloat8Kernel:
    """Return PyTorch's product, which takes e4m3 with a scale per row; others are left to Triton."""
    rest, rowwise = _triton(), F.ScalingType.RowWise
    multiply: Callable[..., Tensor] = cast("Any", F).scaled_grouped_mm

    def product(a: Float8Tensor, b: Float8Tensor, offsets: Tensor, dtype: torch.dtype) -> Tensor:
        suits = a.data.dtype == b.data.dtype and len(a.data) and all(size % 16 == 0 for size in b.data.shape[1:])
        if not suits:
            return rest.product(a, b, offsets, dtype)
        return multiply(
            a.data.contiguous(),
            b.data.transpose(1, 2),
            a.scale.flatten(),
            rowwise,
            b.scale.flatten(1),
            rowwise,
            offs=offsets,
            output_dtype=dtype,
        )

    return rest._replace(product=product)


def _triton_missing(recipe: Float8Recipe, device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why a device cannot multiply in FP8, or None."""
    if device.type != "cuda" or dtype != torch.bfloat16:
        return "FP8 products need --bf16 on a GPU"
    if recipe.name == "mxfp8":
        return "experts have no product in mxfp8"
    if torch.cuda.get_device_capability(device) < (8, 9):
        return "it needs a GPU of compute capability 8.9"
    return triton_missing(device, dtype)


def _scaled_grouped_mm_missing(recipe: Float8Recipe, device: torch.device, dtype: torch.dtype) -> str | None:
    if missing := _triton_missing(recipe, device, dtype):
        return missing
    suitable = recipe.name == "rowwise" and torch.cuda.get_device_capability(device) in ((9, 0), (10, 0))
    return None if suitable else "it needs a scale per row and a GPU of compute capability 9.0 or 10.0"


def _checks(recipe: Float8Recipe) -> Sequence[KernelCheck]:
    generator, rows = torch.Generator().manual_seed(0), 300
    kernel, block = Float8Kernel(recipe), recipe.block(1)
    x = torch.randn(rows, 384, generator=generator, dtype=torch.float64)
    weight = torch.randn(4 * 128, 384, generator=generator, dtype=torch.float64)

    def run(f: GroupedFloat8Kernel, t: Sequence[Tensor]) -> Sequence[Tensor]:
        x, weight, offsets = t
        b = kernel.quantize(weight, recipe.block(1, weight=True), recipe.forward_dtype)
        stacked, end = Float8Tensor(*(each.unflatten(0, (4, -1)) for each in b)), int(offsets[-1])
        outputs = []
        x[end:] = torch.nan
        for dtype in (recipe.forward_dtype, recipe.gradient_dtype):
            a = f.quantize_rows(x, block[1], dtype, offsets)
            again = f.quantize_rows(x, block[1], dtype, offsets, 2.0 * a.scale)
            outputs += [f.product(rows, stacked, offsets, x.dtype)[:end] for rows in (a, again)]
        return outputs

    counts = ([0, 150, 1, 140], [0, 0, rows, 0])
    offsets = [torch.tensor(each).cumsum(0, dtype=torch.int32) for each in counts]
    return [KernelCheck(run, (x, weight, ends), differentiated=False) for ends in offsets]


def grouped_fp8_operation(of: Float8Recipe) -> Operation:
    """Return the implementations for the experts of a run with a recipe."""
    recipe = experts_recipe(of)
    candidates: dict[str, Candidate] = {
        "scaled_grouped_mm": Candidate(_scaled_grouped_mm, partial(_scaled_grouped_mm_missing, recipe)),
        "triton": Candidate(_triton, partial(_triton_missing, recipe)),
        "torch": Candidate(lambda: TORCH_GROUPED_FP8),
    }
    return Operation(candidates, partial(_checks, recipe))
