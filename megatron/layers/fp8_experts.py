"""Experts in FP8.

Forward and input gradient are products of quantised rows and weights; weight gradients have 16-bit operands. A row of
``x`` or ``dy`` has scales of its own, over the columns that the product sums. Expert-TP cuts the columns of fc2's
``x`` and of fc1's ``dy``: where a scale covers the whole row, it is the maximum of those of the ranks. The same holds
for weights. So the quantised values are equal in every layout, and whatever the size of the micro-batches.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.distributed import comm
from megatron.kernels.fp8 import Float8Kernel, Float8Tensor, block_scale
from megatron.kernels.grouped_fp8 import GroupedFloat8Kernel, experts_recipe
from megatron.kernels.grouped_linear import GroupedLinearKernel
from megatron.layers.context import BuildContext


class Float8Experts:
    """The products of a grouped linear in FP8."""

    def __init__(self, context: BuildContext, kernel: Float8Kernel, grouped: GroupedFloat8Kernel) -> None:
        self.kernel, self.grouped, self.recipe = kernel, grouped, experts_recipe(kernel.recipe)
        self.casts, self.name, self.mesh = context.fp8.casts, context.name("weight"), context.mesh
        self.inputs_cut = context.spec("weight").row_parallel

    @classmethod
    def of(cls, context: BuildContext) -> GroupedLinearKernel | None:
        """Return the products of the grouped linear under construction, or None if it is not in FP8."""
        kernel, grouped = context.kernels.fp8, context.kernels.grouped_fp8
        if kernel is None or grouped is None or context.layer not in context.fp8.layers:
            return None
        made = cls(context, kernel, grouped)
        return context.kernels.grouped_linear._replace(forward=made.forward, input_gradient=made.input_gradient)

    def quantize(self, x: Tensor, dtype: torch.dtype, cut: bool, offsets: Tensor | None = None) -> Float8Tensor:
        """Quantise rows with their offsets, or weights.

        Args:
            x: the matrix, quantised along its columns.
            dtype: to quantise to.
            cut: expert-TP ranks hold other columns of it.
            offsets: of rows; None for weights.
        """
        block, scale, etp = self.recipe.block(1, weight=offsets is None), None, self.mesh.group("etp")
        if cut and block[1] is None and etp.size > 1:
            scale = comm.all_reduce(block_scale(x, block, dtype, power_of_two=False), etp, op="max")
        if offsets is None:
            return self.kernel.quantize(x, block, dtype, scale=scale)
        return self.grouped.quantize_rows(x, block[1], dtype, offsets, scale)

    def weights(self, weight_ENK: Tensor, along: int, cut: bool) -> Float8Tensor:
        """Return the quantised weights for a product that sums over K, dimension ``along`` of ``[O, I]``."""

        def quantize() -> Float8Tensor:
            return self.quantize(weight_ENK.flatten(0, 1), self.recipe.forward_dtype, cut)

        data, scale = self.casts.get((self.name, along), quantize)
        experts = len(weight_ENK)
        return Float8Tensor(data.unflatten(0, (experts, -1)), scale.unflatten(0, (experts, -1)))

    def multiply(self, x_RK: Tensor, weight_ENK: Tensor, offsets: Tensor, dtype: torch.dtype, along: int) -> Tensor:
        """Return ``x_e W_e^T``."""
        cut = self.inputs_cut == (along == 1)
        if not len(x_RK):
            return x_RK.new_empty(0, weight_ENK.shape[1])
        rows, weights = self.quantize(x_RK, dtype, cut, offsets), self.weights(weight_ENK, along, cut)
        return self.grouped.product(rows, weights, offsets, x_RK.dtype)

    def forward(self, x_RI: Tensor, weight_EOI: Tensor, offsets: Tensor) -> Tensor:
        """Return ``x_e W_e^T``."""
        return self.multiply(x_RI, weight_EOI, offsets, self.recipe.forward_dtype, 1)

    def input_gradient(self, dy_RO: Tensor, weight_EOI: Tensor, offsets: Tensor) -> Tensor:
        """Return ``dy_e W_e``."""
        return self.multiply(dy_RO, weight_EOI.transpose(1, 2), offsets, self.recipe.gradient_dtype, 0)
