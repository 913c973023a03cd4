"""Linear layers in FP8.

The quantised values are those of one process with the same micro-batches: scales cover the whole matrix, whichever
ranks hold its parts. A scale whose block is cut over ranks is the maximum of theirs, in one all-reduce over all axes
that cut it. Replicas (DP) have other micro-batches, and scales of their own. Sequence-parallel rows are gathered after
the quantisation, one byte per element; context-parallel rows stay where they are. T are the tokens of a micro-batch
(sequence x batch), I in, O out; sp is tp with sequence parallelism, else nothing:

===========  ==================  =====================  =====================
layer        weight              ``x``                  ``dy``
===========  ==================  =====================  =====================
column       ``[O/tp, I]``       ``[T/cp/sp, I]``       ``[T/cp, O/tp]``
row          ``[O, I/tp]``       ``[T/cp, I/tp]``       ``[T/cp/sp, O]``
replicated   ``[O, I]``          ``[T/cp/sp, I]``       ``[T/cp/sp, O]``
===========  ==================  =====================  =====================

So these ranks share a scale (blocks of the other recipes are not cut):

==========  ======================  ======================================  ===============
recipe      ``x W^T`` and ``dy W``  ``dy^T x``                              weights
==========  ======================  ======================================  ===============
tensorwise  cp and tp               cp and tp, the same scales              tp
rowwise     tp where columns are    cp, and tp with sequence-parallel rows  tp where the
            cut                                                             block is cut
==========  ======================  ======================================  ===============
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor

from megatron.distributed import comm
from megatron.distributed.comm import Group, Pending
from megatron.distributed.grad_accumulator import Operand, WgradOperand
from megatron.distributed.mappings import REPLICATED, Product
from megatron.kernels.fp8 import Block, Float8Kernel, Float8Tensor
from megatron.layers.context import BuildContext
from megatron.layers.linear import LinearGradients, LinearProduct, Parallel, Weights

ROWS, COLUMNS = 0, 1
"""Dimensions of a matrix."""

Cuts = tuple[tuple[str, ...], tuple[str, ...]]
"""Axes of the rank grid that cut the rows of a matrix, and its columns."""


@dataclass
class Float8Operand:
    """A quantised operand, whose rows may have to be gathered over the sequence-parallel ranks first."""

    # This rank's rows.
    shard: Float8Tensor
    # The ranks that hold the others; None when the rows are complete.
    group: Group | None
    # Each block of a scale lies in the rows of one rank.
    scale_cut: bool
    # The all-gathers of data and scales, once started.
    pending: list[Pending] = field(default_factory=list)

    def start(self) -> Float8Operand:
        """Start the all-gathers, if there are any."""
        if self.group is not None and not self.pending:
            data, scale = self.shard
            self.pending = [comm.start_all_gather(data.view(torch.uint8), self.group)]
            self.pending += [comm.start_all_gather(scale, self.group)] if self.scale_cut else []
        return self

    def ungathered(self) -> Float8Operand:
        """Return the operand without its gathered rows, to be gathered again later."""
        return Float8Operand(self.shard, self.group, self.scale_cut)

    def wait(self) -> Float8Tensor:
        """Return all rows."""
        if self.start().group is None:
            return self.shard
        data, *scale = [each.wait() for each in self.pending]
        return Float8Tensor(data.view(self.shard.data.dtype), scale[0] if scale else self.shard.scale)


class Float8Product(LinearProduct):
    """The products with a weight in FP8."""

    def __init__(self, context: BuildContext, parallel: Parallel, kernel: Float8Kernel) -> None:
        super().__init__(context, parallel)
        self.kernel, self.casts, self.weight_name = kernel, context.fp8.casts, context.name("weight")
        self.mesh = context.mesh
        # Products gather their rows themselves, quantised.
        scatters = self.comm.hidden_tp_comm._replace(gather_matmul=REPLICATED.gather_matmul)
        self.comm = self.comm._replace(tp_comm=scatters, hidden_tp_comm=scatters)
        outside: Cuts = (("cp", "tp") if context.sequence_parallel else ("cp",)), ()
        inside: Cuts = ("cp",), ("tp",)
        # Of ``x`` and ``dy``, which lie outside the tensor-parallel region or inside; and of the weight.
        self.x_cuts, self.dy_cuts, self.weight_cuts = {
            "column": (outside, inside, (("tp",), ())),
            "row": (inside, outside, ((), ("tp",))),
            "replicated": (outside, outside, ((), ())),
        }[parallel]

    @classmethod
    def of(cls, context: BuildContext, parallel: Parallel) -> Self | None:
        """Return the products of the layer under construction, or None if it is not in FP8."""
        kernel = context.kernels.fp8
        return None if kernel is None or context.layer not in context.fp8.layers else cls(context, parallel, kernel)

    def quantize(
        self, x: Tensor, block: Block, dtype: torch.dtype, cuts: Cuts, transposed: bool, scale: Tensor | None = None
    ) -> Float8Tensor:
        """Quantise this rank's part of a matrix, with the scales of the whole one."""
        axes = tuple(axis for of, size in zip(cuts, block) if size is None for axis in of)
        group = self.mesh.group(*sorted(axes)) if axes else None  # "cp" before "tp", as on the grid
        if scale is None and group is not None and group.size > 1:
            scale = comm.all_reduce(self.kernel.scale(x, block, dtype), group, op="max")
        return self.kernel.quantize(x, block, dtype, transposed, scale)

    def operand(
        self, x: Tensor, along: int, dtype: torch.dtype, cuts: Cuts, scale: Tensor | None = None
    ) -> Float8Operand:
        """Quantise activations or gradients ``[T, ...]``, with their scale if it is known.

        Args:
            x: the matrix.
            along: the dimension over which the product sums.
            dtype: to quantise to.
            cuts: axes that cut the dimensions.
            scale: of its blocks.
        """
        block = self.kernel.recipe.block(along)
        group = self.gathers(cuts)
        shard = self.quantize(x, block, dtype, cuts, along == ROWS and group is None, scale)
        return Float8Operand(shard, group, block[ROWS] is not None)

    def gathers(self, cuts: Cuts) -> Group | None:
        """Return the ranks that gather rows for a product; None where it needs no others."""
        return self.comm.tp if "tp" in cuts[ROWS] and self.comm.tp.size > 1 else None

    def wgrad_operand(self, x: Tensor, dtype: torch.dtype, cuts: Cuts, scale: Tensor | None = None) -> Operand:
        """Return an operand of the weight gradient; its gather starts unless W is deferred."""
        operand: Operand
        if self.kernel.recipe.wgrad:
            operand = self.operand(x, ROWS, dtype, cuts, scale)
        else:
            operand = WgradOperand(x, self.gathers(cuts))
        return operand if self.grad_accumulator.defers_wgrad else operand.start()

    def weight_operand(self, weight: Tensor, along: int) -> Float8Tensor:
        """Return the quantised weight for a product which sums over ``along``."""

        def quantize() -> Float8Tensor:
            block, dtype = self.kernel.recipe.block(along, weight=True), self.kernel.recipe.forward_dtype
            shared = along == ROWS and block == self.kernel.recipe.block(COLUMNS, weight=True)
            scale = self.weight_operand(weight, COLUMNS).scale if shared else None
            return self.quantize(weight, block, dtype, self.weight_cuts, along == ROWS, scale)

        return self.casts.get((self.weight_name, along), quantize)

    def forward(self, x: Tensor, bias: Tensor | None, *weights: Tensor) -> tuple[Product, Weights]:
        """Return ``x -> x W^T + c``, and the weight, ``x``, and the scale of ``x`` if backward has the same one."""
        (weight,), recipe = weights, self.kernel.recipe
        operand = self.operand(x.flatten(0, -2), COLUMNS, recipe.forward_dtype, self.x_cuts)

        def compute(rows: Tensor) -> Tensor:
            y = self.kernel.forward(operand.wait(), self.weight_operand(weight, COLUMNS), rows.dtype)
            y = y.view(-1, *rows.shape[1:-1], len(weight))
            return y if bias is None else y.add_(bias)

        scale = operand.shard.scale if recipe.name == "tensorwise" else None
        return Product(compute, weight.t(), bias), (weight, x, scale)

    def backward(self, dy: Tensor, *saved: Any) -> LinearGradients:
        """Begin ``dy W`` and ``dy^T x``; the operands gather their rows of ``dy``."""
        (weight, x, x_scale), recipe, dy_rows = saved, self.kernel.recipe, dy.flatten(0, -2)
        operand = self.operand(dy_rows, COLUMNS, recipe.gradient_dtype, self.dy_cuts).start()
        x_wgrad = self.wgrad_operand(x.detach().flatten(0, -2), recipe.forward_dtype, self.x_cuts, x_scale)
        # A scale for the whole tensor serves both products; gathered rows too.
        dy_wgrad: Operand = operand
        if recipe.name != "tensorwise" or operand.group is None or not recipe.wgrad:
            dy_scale = operand.shard.scale if recipe.name == "tensorwise" else None
            dy_wgrad = self.wgrad_operand(dy_rows, recipe.gradient_dtype, self.dy_cuts, dy_scale)

        def compute(rows: Tensor) -> Tensor:
            dx = self.kernel.input_gradient(operand.wait(), self.weight_operand(weight, ROWS), rows.dtype)
            return dx.view(-1, *x.shape[1:])

        def accumulate(_: Tensor) -> Weights:
            multiply = self.kernel.weight_gradient if recipe.wgrad else None
            return (self.grad_accumulator.accumulate_wgrad(self.weight_name, x_wgrad, dy_wgrad, multiply=multiply),)

        return LinearGradients(Product(compute, weight), accumulate, not self.grad_accumulator.defers_wgrad)
