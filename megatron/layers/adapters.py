"""Low-rank adapters of linears: LoRA (arXiv 2106.09685) and DoRA (arXiv 2402.09353); and quantised frozen weights.

The weight W of an adapted layer is frozen. The layer multiplies by ``W + s B A``, with A ``[R, I]`` and B ``[O, R]`` of
rank R. All products are inside the communication of :mod:`megatron.layers.linear`. In backward ``u = s x A^T`` and
``v = s dy B``:

===========  ======================  =================  =====================  ======================
layer        A and B                 forward adds       input gradient adds    gradients of A and B
===========  ======================  =================  =====================  ======================
column       ``[R, I]``, ``[O/tp]``  ``(x A^T) s B^T``  ``(dy s B) A``         ``v^T x``, ``dy^T u``
row          ``[I/tp]``, ``[O, R]``  ``(x A^T) s B^T``  ``(dy s B) A``         ``v^T x``, ``dy^T u``
===========  ======================  =================  =====================  ======================

The gradient of A in a column-parallel layer and that of B in a row-parallel one are partial sums, because v or u is.
Only narrow operands are communicated for them: a column-parallel layer scatters v and gathers u.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn

from megatron.distributed import comm
from megatron.distributed.comm import Pending
from megatron.distributed.grad_accumulator import WgradOperand
from megatron.distributed.mappings import Product
from megatron.kernels.quantized import dequantize
from megatron.layers.adapter_parameters import adapted_parts, linear_parts, part_of_rows
from megatron.layers.context import BuildContext
from megatron.layers.linear import LinearGradients, LinearProduct, Parallel, Parameters, PlainProduct, Weights


class QuantizedProduct(PlainProduct):
    """The products with a quantised weight, which each pass converts to the dtype of the activations."""

    def __init__(self, context: BuildContext, parallel: Parallel, precision: str) -> None:
        super().__init__(context, parallel)
        self.precision, self.dtype = precision, context.dtype

    @classmethod
    def of(cls, context: BuildContext, parallel: Parallel) -> Self | None:
        """Return the products of the layer under construction, or None if its weight is not declared as bytes."""
        precision = context.spec("weight").precision
        return None if precision is None else cls(context, parallel, precision)

    def dense(self, weight: Tensor) -> Tensor:
        """Return the weight ``[O, I]``."""
        return dequantize(weight, self.precision, self.dtype)


class LowRankProduct(LinearProduct):
    """The products with ``W + s B A``, over those of a frozen W.

    The parts of a fused linear, such as q, k and v, have rows of A of their own. As a matrix ``[O, parts x rank]``, B
    is zero outside of the part of each output row.
    """

    weights = ("weight", "lora_a", "lora_b")

    def __init__(self, context: BuildContext, parallel: Parallel) -> None:
        super().__init__(context, parallel)
        self.base = QuantizedProduct.of(context, parallel) or PlainProduct(context, parallel)
        self.scale, self.switch = context.model.lora_scale, context.adapters
        # [O, parts, 1]: True for the part of each output row, without those that have no adapter. None for one part.
        self.own: Tensor | None = None
        weight = context.spec("weight")
        if len(linear_parts(weight)) > 1:
            parts = torch.tensor(adapted_parts(context.model, context.prefix, weight))
            self.own = (torch.tensor(part_of_rows(weight)).unsqueeze(1) == parts).unsqueeze(2).to(context.device)

    @classmethod
    def of(cls, context: BuildContext, parallel: Parallel) -> LowRankProduct | None:
        """Return the products of the layer under construction, or None if no adapter is declared for it."""
        if context.name("lora_a") not in context.specs:
            return None
        return (MagnitudeProduct if context.name("lora_magnitude") in context.specs else LowRankProduct)(
            context, parallel
        )

    def output_matrix(self, b: Tensor) -> Tensor:
        """Return ``s B`` as ``[O, parts x rank]``."""
        return b * self.scale if self.own is None else (b.unsqueeze(1) * self.own * self.scale).flatten(1)

    def forward(self, x: Tensor, bias: Tensor | None, *weights: Tensor) -> tuple[Product, Weights]:
        """Return ``x -> x (W + s B A)^T + c``, and the weights and ``x``."""
        weight, a, b = weights
        product, _ = self.base.forward(x, bias, weight)
        return _adding(product, a.t(), self.output_matrix(b).t()), (weight, a, b, x)

    def backward(self, dy: Tensor, *saved: Any) -> LinearGradients:
        """Begin ``dy (W + s B A)``, and the gradients ``v^T x`` of A and ``dy^T u`` of B."""
        (weight, a, b, x), x_group, accumulator = saved, self.comm.x_group, self.grad_accumulator
        x, sb = x.detach(), self.output_matrix(b)
        v = None if x_group is None else comm.start_reduce_scatter(dy.matmul(sb), x_group)

        def accumulate(full_dy: Tensor) -> Weights:
            u = WgradOperand(x.matmul(a.t()) * self.scale, x_group)
            v_rows = WgradOperand(full_dy.matmul(sb) if v is None else v.wait())
            dy_rows = WgradOperand(dy, self.comm.dy_group, Pending(full_dy))
            da = accumulator.accumulate_wgrad(f"{self.name}.lora_a", WgradOperand(x), v_rows)
            own = self.multiply_own(accumulator.multiply)
            return None, da, accumulator.accumulate_wgrad(f"{self.name}.lora_b", u, dy_rows, multiply=own)

        return LinearGradients(_adding(self.base.backward(dy, weight, None).input_gradient, sb, a), accumulate)

    def multiply_own(self, multiply: Callable[..., None]) -> Callable[..., None]:
        """Return the product for the gradient of B, which takes from ``dy^T u`` the part of each output row."""
        own = self.own
        if own is None:
            return multiply

        def multiply_and_select(target: Tensor, u: Tensor, dy: Tensor, beta: float = 1.0) -> None:
            product = target.new_empty(len(target), u.shape[-1])
            multiply(product, u, dy, beta=0.0)
            selected = (product.unflatten(1, (own.shape[1], -1)) * own).sum(1)
            torch.add(selected, target, alpha=beta, out=target) if beta else target.copy_(selected)

        return multiply_and_select

    def apply(self, function: type[torch.autograd.Function], x: Tensor, parameters: Parameters) -> Tensor:
        """Apply a layer's function, to the frozen weight alone while adapters are off."""
        return super().apply(function, x, parameters) if self.switch.on else self.base.apply(function, x, parameters)


def _adding(product: Product, first: Tensor, second: Tensor) -> Product:
    """Return a product that adds ``rows first second`` to its result."""

    def compute(rows: Tensor) -> Tensor:
        y = product.compute(rows)
        y.view(-1, y.shape[-1]).addmm_(rows.matmul(first).flatten(0, -2), second)
        return y

    return product._replace(compute=compute)


class MagnitudeProduct(LowRankProduct):
    """Products whose outputs are scaled to magnitudes that are trained (DoRA)."""

    scales = ("lora_magnitude",)

    def __init__(self, context: BuildContext, parallel: Parallel) -> None:
        super().__init__(context, parallel)
        # Squares of the rows of W, of this rank's inputs alone; computed at their first use.
        self._frozen_squares: Tensor | None = None

    def apply(self, function: type[torch.autograd.Function], x: Tensor, parameters: Parameters) -> Tensor:
        """Apply a layer's function, and scale its outputs without their bias, rounding once.

        A row of norm 0 has factor 1; its own is 0/0.
        """
        y = super().apply(function, x, parameters)
        if not self.switch.on:
            return y
        bias, magnitude, norms = parameters.get("bias"), parameters["lora_magnitude"], self.row_norms(parameters)
        scaled = norms > 0
        if self.own is not None:
            scaled &= self.own.flatten(1).any(1)
        factor = (magnitude / norms.where(scaled, 1.0)).where(scaled, 1.0)
        wide = y * factor
        return (wide if bias is None else wide + bias * (1.0 - factor)).to(y.dtype)

    @torch.no_grad()
    def row_norms(self, parameters: Parameters) -> Tensor:
        """Return the 2-norms of the rows of ``W + s B A``, in at least fp32 ``[O]``.

        DoRA divides by them, and treats them as constants in backward (section 4.3). With rows w of W and b of ``s B``,
        their squares are ``|w|^2 + b . (2 A w + A A^T b)``, whose first term is computed once.
        """
        weight, a, b = (parameters[name] for name in self.weights)
        weight = self.base.dense(weight)
        weight = weight.to(torch.promote_types(weight.dtype, torch.float32))
        if self._frozen_squares is None:
            self._frozen_squares = torch.linalg.vector_norm(weight, dim=1).square_()
        a, sb = a.to(weight.dtype), self.output_matrix(b).to(weight.dtype)
        products = torch.addmm(2.0 * weight.matmul(a.t()), sb, a.matmul(a.t()))
        squares = self._frozen_squares + (sb * products).sum(1)
        squares = comm.all_reduce(squares, self.comm.tp) if self.comm.parallel == "row" else squares
        return squares.clamp(min=0.0).sqrt()  # rounding may make a sum of nearly nothing negative


def adapted_linears(module: nn.Module) -> dict[nn.Module, LowRankProduct]:
    """Return the linears in a module that have adapters, and their products."""
    products = {linear: getattr(linear, "product", None) for linear in module.modules()}
    return {linear: product for linear, product in products.items() if isinstance(product, LowRankProduct)}


def adapted_row_norms(module: nn.Module) -> dict[str, Tensor]:
    """Return the row norms of the adapted weights in a module, by the names of their magnitudes. Collective."""
    scaled = [(linear, p) for linear, p in adapted_linears(module).items() if isinstance(p, MagnitudeProduct)]
    return {f"{product.name}.lora_magnitude": product.row_norms(linear._parameters) for linear, product in scaled}
