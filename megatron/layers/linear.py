"""Column- and row-parallel linear layers.

Shapes: S sequence, B batch, I in, O out; a suffix ``/tp`` means sharded over the tensor-parallel ranks.

===========  ==============  ===============  ===============  ===============================
layer        weight          forward          input gradient   weight gradient
===========  ==============  ===============  ===============  ===============================
column       ``[O/tp, I]``   gather, matmul   matmul, scatter  gather of the input, matmul
row          ``[O, I/tp]``   matmul, scatter  gather, matmul   matmul with the gathered ``dy``
===========  ==============  ===============  ===============  ===============================

Without sequence parallelism, gather does nothing and scatter is an all-reduce. With it, they are an all-gather and a
reduce-scatter of rows of the sequence, which ``--tp-comm-overlap`` pipelines with the matmul beside them
(:mod:`megatron.distributed.tensor_parallel`).

The gradient of a bias, the sum of ``dy`` over its rows, is computed by the kernel that consumes ``y``
(:mod:`megatron.kernels.bias`): its backward has ``dy`` in registers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megatron.distributed.comm import Group, Pending
from megatron.distributed.grad_accumulator import GradAccumulator, WgradOperand
from megatron.distributed.tensor_parallel import REPLICATED, SEQUENCE_PARALLEL, Product, TPComm
from megatron.kernels.linear import LinearKernel
from megatron.layers.context import BuildContext
from megatron.layers.fp8 import Float8Function, Float8Linear


@dataclass(frozen=True)
class _LinearSpec:
    """The layer's properties that its autograd function needs."""

    kernel: LinearKernel
    grad_accumulator: GradAccumulator
    weight: str
    tp: Group
    # The group that shards the sequence outside the tensor-parallel region; None without sequence parallelism.
    sequence_group: Group | None
    # Communication of the layer's products, and of those that another product hides.
    tp_comm: TPComm
    hidden_tp_comm: TPComm

    @classmethod
    def of(cls, context: BuildContext) -> _LinearSpec:
        kernel, tp = context.kernels.linear, context.tp
        plain = SEQUENCE_PARALLEL if context.sequence_parallel else REPLICATED
        overlapped = context.tp_overlap if context.sequence_parallel and context.tp_overlap else plain
        sequence_group = tp if context.sequence_parallel else None
        return cls(kernel, context.grad_accumulator, context.name("weight"), tp, sequence_group, overlapped, plain)

    def product(self, weight: Tensor, bias: Tensor | None) -> Product:
        """``x -> x W^T + b``."""
        return Product(lambda rows: self.kernel.forward(rows, weight, bias), weight.t(), bias)

    def gradient_product(self, weight: Tensor) -> Product:
        """``dy -> dy W``."""
        return Product(lambda rows: self.kernel.input_gradient(rows, weight), weight)


class _ColumnParallelFunction(torch.autograd.Function):
    """``y = gather(x) W^T + b``.

    Backward: ``dx = scatter(dy W)`` overlaps with ``dW = dy^T gather(x)``. The input is gathered again rather than
    kept.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, layer: _LinearSpec) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.layer = layer
        _, y = layer.tp_comm.gather_matmul(x, layer.product(weight, bias), layer.tp)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        layer: _LinearSpec = ctx.layer
        wgrad_input = layer.grad_accumulator.wgrad_input(x, layer.sequence_group)
        # The weight gradient hides the scatter, unless it is deferred.
        tp_comm = layer.tp_comm if layer.grad_accumulator.defers_wgrad else layer.hidden_tp_comm
        wait_dx = tp_comm.matmul_scatter(dy, layer.gradient_product(weight), layer.tp)
        dw = layer.grad_accumulator.accumulate_wgrad(layer.weight, wgrad_input, WgradOperand(dy))
        return wait_dx(), dw, None, None


class _RowParallelFunction(torch.autograd.Function):
    """``y = scatter(x W^T) + b``.

    Backward: ``dY = gather(dy)``, ``dx = dY W``, ``dW = dY^T x``.

    The bias is added once, after the reduction.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, layer: _LinearSpec) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.layer = layer
        in_product = x.is_cuda and layer.tp.size == 1  # cuBLASLt adds the bias without another pass
        y = layer.tp_comm.matmul_scatter(x, layer.product(weight, bias if in_product else None), layer.tp)()
        return y if bias is None or in_product else y.add_(bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        layer: _LinearSpec = ctx.layer
        full_dy, dx = layer.tp_comm.gather_matmul(dy, layer.gradient_product(weight), layer.tp)
        wgrad_dy = WgradOperand(dy, layer.sequence_group, Pending(full_dy))
        dw = layer.grad_accumulator.accumulate_wgrad(
            layer.weight, layer.grad_accumulator.wgrad_input(x, None), wgrad_dy
        )
        return dx, dw, None, None


class ColumnParallelLinear(nn.Module):
    """``[S(/tp), B, I] -> [S, B, O/tp]``: each rank computes a part of the outputs."""

    def __init__(self, context: BuildContext) -> None:
        super().__init__()
        self.weight, self.bias = context.parameter("weight"), context.bias(autograd=True)
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
        self.weight, self.bias = context.parameter("weight"), context.bias(autograd=True)
        self._spec, self._fp8 = _LinearSpec.of(context), Float8Linear.of(context, column=False)

    def forward(self, x_SBI: Tensor) -> Tensor:
        """Apply the layer."""
        function, spec = (_RowParallelFunction, self._spec) if self._fp8 is None else (Float8Function, self._fp8)
        y: Tensor = function.apply(x_SBI, self.weight, self.bias, spec)
        return y
