"""The products of a linear with its weight: ``x W^T``, ``dy W`` and ``dy^T x``, and how they communicate.

A layer of the tensor-parallel region (:mod:`megatron.layers.linear`) has the interface alone. What multiplies is a
provider: a plain weight here, other weights and additions to them in files beside this one, which
:func:`megatron.layers.providers.build_product` asks in order.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from megatron.distributed.comm import Group, Pending
from megatron.distributed.grad_accumulator import WgradOperand
from megatron.distributed.mappings import REPLICATED, SEQUENCE_PARALLEL, Product, TPComm
from megatron.layers.context import BuildContext

Weights = tuple[Tensor | None, ...]
"""A value per weight of a product: the tensors themselves, or their gradients."""

Parameters = Mapping[str, Any]
"""The parameters of a layer by local name, of which ``bias`` may be missing."""


class LinearComm(NamedTuple):
    """Communication of a linear of the tensor-parallel region."""

    # Column-parallel, else row-parallel.
    column: bool
    # Tensor-parallel peers.
    tp: Group
    # The ranks that hold the other rows of ``x``, and of ``dy``; None where this rank has all that it multiplies.
    x_group: Group | None
    dy_group: Group | None
    # Communication of a product, and of one that another product hides.
    tp_comm: TPComm
    hidden_tp_comm: TPComm

    @classmethod
    def of(cls, context: BuildContext, column: bool) -> Self:
        """Return the communication of the layer under construction."""
        plain = SEQUENCE_PARALLEL if context.sequence_parallel else REPLICATED
        overlapped = context.tp_overlap if context.sequence_parallel and context.tp_overlap else plain
        group = context.tp if context.sequence_parallel else None
        x_group, dy_group = (group, None) if column else (None, group)
        return cls(column, context.tp, x_group, dy_group, overlapped, plain)


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

    def __init__(self, context: BuildContext, column: bool) -> None:
        self.name, self.comm = context.prefix, LinearComm.of(context, column)
        self.grad_accumulator = context.grad_accumulator

    @abstractmethod
    def forward(self, x: Tensor, bias: Tensor | None, *weights: Tensor) -> tuple[Product, Weights]:
        """Return ``x -> x W^T + c``, and the tensors to save for :meth:`backward`."""

    @abstractmethod
    def backward(self, dy: Tensor, *saved: Any) -> LinearGradients:
        """Begin the products of a backward pass with this rank's rows of ``dy``."""

    def apply(self, function: type[torch.autograd.Function], x: Tensor, parameters: Parameters) -> Tensor:
        """Apply a layer's function of ``(x, bias, product, *weights)``."""
        y: Tensor = function.apply(x, parameters.get("bias"), self, *[parameters[name] for name in self.weights])
        return y


class PlainProduct(LinearProduct):
    """The products with a weight of the activations' dtype."""

    def __init__(self, context: BuildContext, column: bool) -> None:
        super().__init__(context, column)
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
