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
(:mod:`megatron.distributed.mappings`). What multiplies is a provider's (:mod:`megatron.layers.products`).

The gradient of a bias, the sum of ``dy`` over its rows, is computed by the kernel that consumes ``y``
(:mod:`megatron.kernels.bias`): its backward has ``dy`` in registers.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from megatron.layers.context import BuildContext
from megatron.layers.products import LinearProduct
from megatron.layers.providers import build_product


class _ColumnParallelFunction(Function):
    """``y = gather(x) W^T + c``.

    Backward: ``dx = scatter(dy W)`` overlaps with ``dW = dy^T gather(x)``. The input is gathered again rather than
    kept.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, product: LinearProduct, *weights: Tensor) -> Tensor:
        multiply, saved = product.forward(x, bias, *weights)
        ctx.save_for_backward(*saved)
        ctx.product = product
        _, y = product.comm.tp_comm.gather_matmul(x, multiply, product.comm.tp)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        product: LinearProduct = ctx.product
        comm, gradients = product.comm, product.backward(dy, *ctx.saved_tensors)
        # The weight gradient hides the scatter, unless it is deferred.
        tp_comm = comm.hidden_tp_comm if gradients.immediate else comm.tp_comm
        wait_dx = tp_comm.matmul_scatter(dy, gradients.input_gradient, comm.tp)
        dw = gradients.accumulate(dy)
        return wait_dx(), None, None, *dw


class _RowParallelFunction(Function):
    """``y = scatter(x W^T) + c``.

    Backward: ``dY = gather(dy)``, ``dx = dY W``, ``dW = dY^T x``.

    The bias is added once, after the reduction.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, product: LinearProduct, *weights: Tensor) -> Tensor:
        comm = product.comm
        in_product = x.is_cuda and comm.tp.size == 1  # cuBLASLt adds the bias without another pass
        multiply, saved = product.forward(x, bias if in_product else None, *weights)
        ctx.save_for_backward(*saved)
        ctx.product = product
        y = comm.tp_comm.matmul_scatter(x, multiply, comm.tp)()
        return y if bias is None or in_product else y.add_(bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        product: LinearProduct = ctx.product
        comm, gradients = product.comm, product.backward(dy, *ctx.saved_tensors)
        full_dy, dx = comm.tp_comm.gather_matmul(dy, gradients.input_gradient, comm.tp)
        return dx, None, None, *gradients.accumulate(full_dy)


class ParallelLinear(nn.Module):
    """A linear of the tensor-parallel region."""

    function: type[Function]
    column: bool

    def __init__(self, context: BuildContext) -> None:
        super().__init__()
        self.name, self.product = context.prefix, build_product(context, self.column)
        self.weight, self.bias = context.parameter("weight"), context.bias(autograd=True)
        for name in (*self.product.weights[1:], *self.product.scales):
            self.register_parameter(name, context.parameter(name, autograd=name in self.product.scales))

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer."""
        return self.product.apply(self.function, x, self._parameters)


class ColumnParallelLinear(ParallelLinear):
    """``[S(/tp), B, I] -> [S, B, O/tp]``: each rank computes a part of the outputs."""

    function, column = _ColumnParallelFunction, True


class RowParallelLinear(ParallelLinear):
    """``[S, B, I/tp] -> [S(/tp), B, O]``: each rank holds a part of the inputs; outputs are summed over ranks."""

    function, column = _RowParallelFunction, False
