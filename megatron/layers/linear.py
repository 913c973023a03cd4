"""Column- and row-parallel linear layers, and replicated ones.

Shapes: S sequence, B batch, I in, O out; a suffix ``/tp`` means sharded over the tensor-parallel ranks.

===========  ==============  ===============  ===============  ===============================
layer        weight          forward          input gradient   weight gradient
===========  ==============  ===============  ===============  ===============================
column       ``[O/tp, I]``   gather, matmul   matmul, scatter  gather of the input, matmul
row          ``[O, I/tp]``   matmul, scatter  gather, matmul   matmul with the gathered ``dy``
replicated   ``[O, I]``      matmul           matmul           matmul
===========  ==============  ===============  ===============  ===============================

Without sequence parallelism, gather does nothing and scatter is an all-reduce. With it, they are an all-gather and a
reduce-scatter of rows of the sequence, which ``--tp-comm-overlap`` pipelines with the matmul beside them
(:mod:`megatron.distributed.mappings`).

What multiplies is a :class:`LinearProduct`. That of a plain weight is here; the providers of other weights, and of
additions to them, are in files beside this one (:mod:`megatron.layers.providers`), and are asked first.

The gradient of a bias, the sum of ``dy`` over its rows, is computed by the kernel that consumes ``y``
(:mod:`megatron.kernels.linear`): its backward has ``dy`` in registers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, Self

from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from megatron.distributed.comm import Group, Pending
from megatron.distributed.grad_accumulator import WgradOperand
from megatron.distributed.mappings import REPLICATED, SEQUENCE_PARALLEL, Product, TPComm
from megatron.layers.context import BuildContext

Weights = tuple[Tensor | None, ...]
"""A value per weight of a product: the tensors themselves, or their gradients."""

Parallel = Literal["column", "row", "replicated"]
"""Part of a weight ``[O, I]`` on a tensor-parallel rank: some outputs, some inputs, or all of it."""

Parameters = Mapping[str, Any]
"""The parameters of a layer by local name, of which ``bias`` may be missing."""


class LinearComm(NamedTuple):
    """Communication of a linear of the tensor-parallel region."""

    parallel: Parallel
    # The ranks that hold the other parts of the weight.
    tp: Group
    # The ranks that hold the other rows of ``x``, and of ``dy``; None where this rank has all that it multiplies.
    x_group: Group | None
    dy_group: Group | None
    # Communication of a product, and of one that another product hides.
    tp_comm: TPComm
    hidden_tp_comm: TPComm

    @classmethod
    def of(cls, context: BuildContext, parallel: Parallel) -> Self:
        """Return the communication of the layer under construction."""
        if parallel == "replicated":
            return cls(parallel, Group(), None, None, REPLICATED, REPLICATED)
        plain = SEQUENCE_PARALLEL if context.sequence_parallel else REPLICATED
        overlapped = context.tp_overlap if context.sequence_parallel and context.tp_overlap else plain
        group = context.tp if context.sequence_parallel else None
        x_group, dy_group = (group, None) if parallel == "column" else (None, group)
        return cls(parallel, context.tp, x_group, dy_group, overlapped, plain)


class LinearGradients(NamedTuple):
    """The products of one backward pass."""

    # ``dy -> dy W``
    input_gradient: Product
    # Accumulates ``dy^T x`` and returns what backward returns for each weight. Takes all rows of ``dy``, as
    # ``LinearComm.tp_comm`` gathers them.
    accumulate: Callable[[Tensor], Weights]
    # ``accumulate`` multiplies, which hides communication, rather than deferring its product.
    immediate: bool = False


class LinearProduct(ABC):
    """The products of one linear."""

    # Local names of the parameters that are multiplied, and whose gradients the products compute; and of those that
    # scale the outputs, which autograd differentiates.
    weights: tuple[str, ...] = ("weight",)
    scales: tuple[str, ...] = ()

    def __init__(self, context: BuildContext, parallel: Parallel) -> None:
        self.name, self.comm = context.prefix, LinearComm.of(context, parallel)
        self.grad_accumulator = context.grad_accumulator

    @abstractmethod
    def forward(self, x: Tensor, bias: Tensor | None, *weights: Tensor) -> tuple[Product, Weights]:
        """Return ``x -> x W^T + c``, and the tensors to save for :meth:`backward`."""

    @abstractmethod
    def backward(self, dy: Tensor, *saved: Any) -> LinearGradients:
        """Begin the products of a backward pass with this rank's rows of ``dy``."""

    def apply(self, function: type[Function], x: Tensor, parameters: Parameters) -> Tensor:
        """Apply a layer's function of ``(x, bias, product, *weights)``."""
        y: Tensor = function.apply(x, parameters.get("bias"), self, *[parameters[name] for name in self.weights])
        return y


class PlainProduct(LinearProduct):
    """The products with a weight of the activations' dtype."""

    def __init__(self, context: BuildContext, parallel: Parallel) -> None:
        super().__init__(context, parallel)
        self.kernel, self.weight_name = context.kernels.linear, context.name("weight")

    def dense(self, weight: Tensor) -> Tensor:
        """Return the weight ``[O, I]``."""
        return weight

    def forward(self, x: Tensor, bias: Tensor | None, *weights: Tensor) -> tuple[Product, Weights]:
        """Return ``x -> x W^T + c``; save the weight, and ``x`` unless the weight is frozen."""
        (weight,) = weights
        dense = self.dense(weight)

        def compute(rows: Tensor) -> Tensor:
            return self.kernel.forward(rows, dense, bias)

        return Product(compute, dense.t(), bias), (weight, x if weight.requires_grad else None)

    def backward(self, dy: Tensor, weight: Tensor, x: Tensor | None) -> LinearGradients:
        """Begin ``dy W`` and, with ``x``, ``dy^T x``."""
        dense, accumulator = self.dense(weight), self.grad_accumulator
        rows = None if x is None else accumulator.wgrad_input(x, self.comm.x_group)

        def compute(rows: Tensor) -> Tensor:
            return self.kernel.input_gradient(rows, dense)

        def accumulate(full_dy: Tensor) -> Weights:
            if rows is None:
                return (None,)
            dy_rows = WgradOperand(dy, self.comm.dy_group, Pending(full_dy))
            return (accumulator.accumulate_wgrad(self.weight_name, rows, dy_rows),)

        return LinearGradients(Product(compute, dense), accumulate, rows is not None and not accumulator.defers_wgrad)


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
    parallel: Parallel

    def __init__(self, context: BuildContext) -> None:
        super().__init__()
        providers = (*context.providers, PlainProduct)
        products = (provider(context, self.parallel) for provider in providers)
        self.name, self.product = context.prefix, next(product for product in products if product is not None)
        self.weight, self.bias = context.parameter("weight"), context.bias(autograd=True)
        for name in (*self.product.weights[1:], *self.product.scales):
            self.register_parameter(name, context.parameter(name, autograd=name in self.product.scales))

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer."""
        return self.product.apply(self.function, x, self._parameters)


class ColumnParallelLinear(ParallelLinear):
    """``[S(/tp), B, I] -> [S, B, O/tp]``: each rank computes a part of the outputs."""

    function, parallel = _ColumnParallelFunction, "column"


class RowParallelLinear(ParallelLinear):
    """``[S, B, I/tp] -> [S(/tp), B, O]``: each rank holds a part of the inputs; outputs are summed over ranks."""

    function, parallel = _RowParallelFunction, "row"


class ReplicatedLinear(ParallelLinear):
    """``[S(/tp), B, I] -> [S(/tp), B, O]``: each rank has the whole weight, and multiplies the rows that it has.

    Its parameters are declared by :func:`megatron.layers.mixers.base.replicated_projection`.
    """

    function, parallel = _ColumnParallelFunction, "replicated"
