"""Column- and row-parallel linear layers.

Shapes: S sequence, B batch, I in, O out; a suffix ``/tp`` means sharded over the tensor-parallel ranks.

===========  ==========================  =======================  ============================
layer        weight                      sequence parallel off    sequence parallel on
===========  ==========================  =======================  ============================
column       ``[O/tp, I]``               copy, matmul             gather rows, matmul
row          ``[O, I/tp]``               matmul, all-reduce       matmul, reduce-scatter rows
===========  ==========================  =======================  ============================
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megatron.distributed import comm
from megatron.distributed.comm import Group
from megatron.distributed.grad_accumulator import GradAccumulator, WgradOperand
from megatron.kernels.linear import LinearKernel
from megatron.layers.context import BuildContext
from megatron.layers.fp8 import Float8Function, Float8Linear


@dataclass(frozen=True)
class _LinearSpec:
    """The layer's properties that its autograd function needs."""

    kernel: LinearKernel
    grad_accumulator: GradAccumulator
    weight: str
    bias: str
    tp: Group
    sequence_parallel: bool

    @classmethod
    def of(cls, context: BuildContext) -> _LinearSpec:
        weight, bias = context.name("weight"), context.name("bias")
        return cls(
            context.kernels.linear, context.grad_accumulator, weight, bias, context.tp, context.sequence_parallel
        )

    @property
    def sequence_group(self) -> Group | None:
        """The group that shards the sequence outside the tensor-parallel region; None without sequence parallelism."""
        return self.tp if self.sequence_parallel else None


class _ColumnParallelFunction(torch.autograd.Function):
    """``y = X W^T + b`` with ``X = gather(x)``, or ``X = x`` without sequence parallelism.

    Backward: ``dx = reduce_scatter(dy_i W_i)`` (or all-reduce) overlaps with ``dW = dy^T X``. X is gathered again
    rather than kept.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, layer: _LinearSpec) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.layer, ctx.has_bias = layer, bias is not None
        return layer.kernel.forward(comm.all_gather(x, layer.tp) if layer.sequence_parallel else x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        layer: _LinearSpec = ctx.layer
        wgrad_input = layer.grad_accumulator.wgrad_input(x, layer.sequence_group)
        dx = layer.kernel.input_gradient(dy, weight)
        if layer.sequence_parallel:
            pending = comm.start_reduce_scatter(dx, layer.tp)
        else:
            pending = comm.start_all_reduce(dx, layer.tp)
        dw = layer.grad_accumulator.accumulate_wgrad(layer.weight, wgrad_input, WgradOperand(dy))
        db = layer.grad_accumulator.accumulate(layer.bias, _bias_gradient(dy)) if ctx.has_bias else None
        return pending.wait(), dw, db, None


class _RowParallelFunction(torch.autograd.Function):
    """``y = reduce_scatter(x_i W_i^T) + b``, or all-reduce without sequence parallelism.

    Backward: ``dY = gather(dy)`` (or ``dy``), ``dx_i = dY W_i``, ``dW_i = dY^T x_i``.

    The bias is added once, after the reduction; with sequence parallelism ``db`` covers this rank's rows only.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, layer: _LinearSpec) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.layer, ctx.has_bias = layer, bias is not None
        y = layer.kernel.forward(x, weight, None)
        if layer.sequence_parallel:
            y = comm.reduce_scatter(y, layer.tp)
        else:
            y = comm.all_reduce(y, layer.tp)
        return y if bias is None else y.add_(bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        layer: _LinearSpec = ctx.layer
        full_dy = WgradOperand(dy, layer.sequence_group).start()
        db = layer.grad_accumulator.accumulate(layer.bias, _bias_gradient(dy)) if ctx.has_bias else None
        dw = layer.grad_accumulator.accumulate_wgrad(layer.weight, layer.grad_accumulator.wgrad_input(x, None), full_dy)
        return layer.kernel.input_gradient(full_dy.wait(), weight), dw, db, None


class ColumnParallelLinear(nn.Module):
    """``[S(/tp), B, I] -> [S, B, O/tp]``: each rank computes a part of the outputs."""

    def __init__(self, context: BuildContext) -> None:
        super().__init__()
        self.weight, self.bias = context.parameter("weight"), context.bias()
        self._spec, self._fp8 = _LinearSpec.of(context), Float8Linear.of(context, column=True)

    def forward(self, x_SBI: Tensor) -> Tensor:
        """Apply the layer."""
        function, spec = (_ColumnParallelFunction, self._spec) if self._fp8 is None else (Float8Function, self._fp8)
        y: Tensor = function.apply(x_SBI, self.weight, self.bias, spec)
        return y


class RowParallelLinear(nn.Module):
    """``[S, B, I/tp] -> [S(/tp), B, O]``: each rank holds a part of the inputs; outputs are summed over ranks."""

    def __init__(self, context: BuildContext) -> None:
        super().__init__()
        self.weight, self.bias = context.parameter("weight"), context.bias()
        self._spec, self._fp8 = _LinearSpec.of(context), Float8Linear.of(context, column=False)

    def forward(self, x_SBI: Tensor) -> Tensor:
        """Apply the layer."""
        function, spec = (_RowParallelFunction, self._spec) if self._fp8 is None else (Float8Function, self._fp8)
        y: Tensor = function.apply(x_SBI, self.weight, self.bias, spec)
        return y


def _bias_gradient(dy: Tensor) -> Tensor:
    """``[..., O] -> [O]``, summed in at least fp32."""
    return dy.flatten(0, -2).sum(0, dtype=torch.promote_types(dy.dtype, torch.float32))
