"""The products of a linear with its weight: ``x W^T``, ``dy W`` and ``dy^T x``, and how they communicate.

A layer of the tensor-parallel region (:mod:`megatron.layers.linear`) knows the interface alone. What multiplies is a
provider: a plain weight here, other weights and additions to them in files beside this one, which
:func:`megatron.layers.providers.build_product` asks in order.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import partial
from typing import Any, NamedTuple, Protocol, Self

import torch
from torch import Tensor, nn

from megatron.distributed.comm import Group, Pending
from megatron.distributed.grad_accumulator import WgradOperand
from megatron.distributed.tensor_parallel import REPLICATED, SEQUENCE_PARALLEL, Product, TPComm
from megatron.layers.context import BuildContext

Weights = tuple[Tensor | None, ...]
"""A value per weight of a product: the tensors themselves, or their gradients."""


class LinearComm(NamedTuple):
    """How a linear of the tensor-parallel region communicates."""

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


class LinearGradients(Protocol):
    """The products of one backward pass."""

    @property
    def input_gradient(self) -> Product:
        """``dy -> dy W``."""

    @property
    def immediate(self) -> bool:
        """True if :meth:`accumulate` multiplies, which can hide communication, rather than deferring its product."""

    def accumulate(self, dy: Tensor) -> Weights:
        """Accumulate the gradients of the weights.

        Args:
            dy: all rows, as ``LinearComm.tp_comm`` has gathered them.

        Returns:
            What backward returns for each weight (:class:`megatron.distributed.grad_accumulator.GradAccumulator`).
        """


class LinearProduct(ABC):
    """The products of one linear."""

    # Name of the layer.
    name: str
    comm: LinearComm
    # The layer's, by local name, in the order of their declaration.
    parameters: dict[str, nn.Parameter | None]
    # Those whose gradients the products compute.
    weights: tuple[nn.Parameter, ...]

    @abstractmethod
    def forward(self, x: Tensor, bias: Tensor | None, *weights: Tensor) -> tuple[Product, Weights]:
        """Return ``x -> x W^T + c``, and the tensors to save for :meth:`backward`."""

    @abstractmethod
    def backward(self, dy: Tensor, *saved: Any) -> LinearGradients:
        """Begin the products of a backward pass; ``dy`` are this rank's rows."""

    def apply(self, function: type[torch.autograd.Function], x: Tensor) -> Tensor:
        """Apply a layer's function of ``(x, bias, product, *weights)``."""
        y: Tensor = function.apply(x, self.parameters["bias"], self, *self.weights)
        return y


class PlainProduct(LinearProduct):
    """The products with a weight of the activations' dtype."""

    def __init__(self, context: BuildContext, column: bool) -> None:
        self.name, self.comm = context.prefix, LinearComm.of(context, column)
        self.kernel, self.grad_accumulator = context.kernels.linear, context.grad_accumulator
        self.weight, self.weight_name = context.parameter("weight"), context.name("weight")
        self.parameters = {"weight": self.weight, "bias": context.bias(autograd=True)}
        self.weights = (self.weight,)

    @classmethod
    def of(cls, context: BuildContext, column: bool) -> Self | None:
        """Return the products of the layer under construction, or None if another provider has to compute them."""
        return cls(context, column)

    def dense(self, weight: Tensor) -> Tensor:
        """Return the weight ``[O, I]``."""
        return weight

    def forward(self, x: Tensor, bias: Tensor | None, *weights: Tensor) -> tuple[Product, Weights]:
        """Return ``x -> x W^T + c``, and the weight and ``x`` if the weight is trained."""
        (weight,) = weights
        dense = self.dense(weight)

        def compute(rows: Tensor) -> Tensor:
            return self.kernel.forward(rows, dense, bias)

        return Product(compute, dense.t(), bias), (weight, x if self.weight.requires_grad else None)

    def backward(self, dy: Tensor, *saved: Any) -> LinearGradients:
        """Begin the products of a backward pass."""
        return PlainGradients(self, dy, *saved)


class PlainGradients:
    """``dy W`` and, unless the weight is frozen, ``dy^T x``."""

    def __init__(self, product: PlainProduct, dy: Tensor, weight: Tensor, x: Tensor | None) -> None:
        dense = product.dense(weight)
        self.input_gradient = Product(partial(_input_gradient, product, dense), dense)
        self.product, self.dy, accumulator = product, dy, product.grad_accumulator
        self.x = None if x is None else accumulator.wgrad_input(x, product.comm.x_group)
        self.immediate = x is not None and not accumulator.defers_wgrad

    def accumulate(self, dy: Tensor) -> Weights:
        """Accumulate the gradient of the weight."""
        if self.x is None:
            return (None,)
        product, rows = self.product, WgradOperand(self.dy, self.product.comm.dy_group, Pending(dy))
        return (product.grad_accumulator.accumulate_wgrad(product.weight_name, self.x, rows),)


def _input_gradient(product: PlainProduct, dense: Tensor, rows: Tensor) -> Tensor:
    return product.kernel.input_gradient(rows, dense)
