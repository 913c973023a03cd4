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

With LoRA's adapter, W is frozen, and the layer multiplies by ``W + s B A``, with A ``[R, I]`` and B ``[O, R]`` of rank
R. Both products are inside the communication of the table. In backward ``u = s x A^T`` and ``v = s dy B``:

===========  ======================  =================  =====================  ======================
layer        A and B                 forward adds       input gradient adds    gradients of A and B
===========  ======================  =================  =====================  ======================
column       ``[R, I]``, ``[O/tp]``  ``(x A^T) s B^T``  ``(dy s B) A``         ``v^T x``, ``dy^T u``
row          ``[I/tp]``, ``[O, R]``  ``(x A^T) s B^T``  ``(dy s B) A``         ``v^T x``, ``dy^T u``
===========  ======================  =================  =====================  ======================

The gradient of A in a column-parallel layer and that of B in a row-parallel one are partial sums, because v or u is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megatron.distributed import comm
from megatron.distributed.comm import Group, Pending
from megatron.distributed.grad_accumulator import GradAccumulator, WgradOperand
from megatron.distributed.tensor_parallel import REPLICATED, SEQUENCE_PARALLEL, Product, TPComm
from megatron.kernels.linear import LinearKernel
from megatron.kernels.quantized import dequantize
from megatron.layers.adapter_parameters import adapted_parts, linear_parts, part_of_rows
from megatron.layers.context import Adapters, BuildContext
from megatron.layers.fp8 import Float8Function, Float8Linear


@dataclass(frozen=True)
class LowRankAdapter:
    """Adapter of a linear (LoRA, arXiv 2106.09685), which adds ``s B A`` to its weight.

    The parts of a fused linear, such as q, k and v, have rows of A of their own. As a matrix ``[O, parts x rank]``, B
    is zero outside of the part of each output row.
    """

    # Global name of the linear.
    name: str
    # Its factor s.
    scale: float
    # [O, parts, 1]: True for the part of each output row, without those that have no adapter. None for a single part.
    own: Tensor | None
    # Of the model.
    adapters: Adapters

    @classmethod
    def of(cls, context: BuildContext) -> LowRankAdapter | None:
        """Return that of the layer under construction; None if it has none."""
        if context.name("lora_a") not in context.specs:
            return None
        config, weight, own = context.adapters.config, context.spec("weight"), None
        if len(linear_parts(weight)) > 1:
            parts = torch.tensor(adapted_parts(config, context.prefix, weight))
            own = (torch.tensor(part_of_rows(weight)).unsqueeze(1) == parts).unsqueeze(2).to(context.device)
        return cls(context.prefix, config.lora_scale, own, context.adapters)

    def output_matrix(self, b: Tensor) -> Tensor:
        """Return ``s B`` as ``[O, parts x rank]``."""
        return b * self.scale if self.own is None else (b.unsqueeze(1) * self.own * self.scale).flatten(1)

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

    def accumulate(
        self, accumulator: GradAccumulator, x: Tensor, v: Tensor, u: WgradOperand, dy: WgradOperand
    ) -> tuple[Tensor | None, Tensor | None]:
        """Accumulate the gradients ``v^T x`` of A and ``dy^T u`` of B, with ``v = s dy B`` and ``u = s x A^T``."""
        da = accumulator.accumulate_wgrad(f"{self.name}.lora_a", WgradOperand(x.detach()), WgradOperand(v))
        own = self.multiply_own(accumulator.multiply)
        return da, accumulator.accumulate_wgrad(f"{self.name}.lora_b", u, dy, multiply=own)


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
    adapter: LowRankAdapter | None
    # Of a quantised weight, and the dtype that it is converted to; None for others.
    quantized: tuple[str, torch.dtype] | None

    @classmethod
    def of(cls, context: BuildContext) -> _LinearSpec:
        kernel, tp, name = context.kernels.linear, context.tp, context.name("weight")
        plain = SEQUENCE_PARALLEL if context.sequence_parallel else REPLICATED
        overlapped = context.tp_overlap if context.sequence_parallel and context.tp_overlap else plain
        sequence_group = tp if context.sequence_parallel else None
        adapter, precision = LowRankAdapter.of(context), context.adapters.config.frozen_weights_precision
        quantized = None if precision is None or context.spec("weight").dense is None else (precision, context.dtype)
        return cls(kernel, context.grad_accumulator, name, tp, sequence_group, overlapped, plain, adapter, quantized)

    def dense(self, weight: Tensor) -> Tensor:
        """Return the weight ``[O, I]``."""
        return weight if self.quantized is None else dequantize(weight, *self.quantized)

    def product(self, weight: Tensor, bias: Tensor | None, a: Tensor | None, sb: Tensor | None) -> Product:
        """``x -> x (W + s B A)^T + c``; A and ``s B`` are None without an adapter."""
        dense = self.dense(weight)

        def compute(rows: Tensor) -> Tensor:
            return _add_product(self.kernel.forward(rows, dense, bias), rows, a, sb, transposed=True)

        return Product(compute, dense.t(), bias)

    def gradient_product(self, weight: Tensor, a: Tensor | None, sb: Tensor | None) -> Product:
        """``dy -> dy (W + s B A)``."""
        dense = self.dense(weight)

        def compute(rows: Tensor) -> Tensor:
            return _add_product(self.kernel.input_gradient(rows, dense), rows, a, sb, transposed=False)

        return Product(compute, dense)

    def output_matrix(self, b: Tensor | None) -> Tensor | None:
        """Return ``s B`` of the adapter, if there is one."""
        return None if b is None or self.adapter is None else self.adapter.output_matrix(b)


def _add_product(y: Tensor, rows: Tensor, a: Tensor | None, sb: Tensor | None, transposed: bool) -> Tensor:
    """Add the product of the rows with ``s B A``, or its transpose, to ``y`` in place."""
    if a is not None and sb is not None:
        first, second = (a.t(), sb.t()) if transposed else (sb, a)
        y.view(-1, y.shape[-1]).addmm_(rows.matmul(first).flatten(0, -2), second)
    return y


class _ColumnParallelFunction(torch.autograd.Function):
    """``y = gather(x) W^T + c``.

    Backward: ``dx = scatter(dy W)`` overlaps with ``dW = dy^T gather(x)``. The input is gathered again rather than
    kept. With an adapter only the narrow operands ``scatter(dy B)`` and ``gather(x A^T)`` are communicated.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        layer: _LinearSpec,
        a: Tensor | None = None,
        b: Tensor | None = None,
    ) -> Tensor:
        ctx.save_for_backward(x if weight.requires_grad or a is not None else None, weight, a, b)
        ctx.layer = layer
        _, y = layer.tp_comm.gather_matmul(x, layer.product(weight, bias, a, layer.output_matrix(b)), layer.tp)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, a, b = ctx.saved_tensors
        layer: _LinearSpec = ctx.layer
        accumulator, group, trains = layer.grad_accumulator, layer.sequence_group, ctx.needs_input_grad[1]
        sb = layer.output_matrix(b)
        v = None if sb is None else Pending(dy.matmul(sb))
        if v is not None and group is not None:
            v = comm.start_reduce_scatter(v.wait(), group)
        wgrad_input = accumulator.wgrad_input(x, group) if trains else None
        # The weight gradient hides the scatter, unless it is deferred.
        tp_comm = layer.hidden_tp_comm if trains and not accumulator.defers_wgrad else layer.tp_comm
        wait_dx = tp_comm.matmul_scatter(dy, layer.gradient_product(weight, a, sb), layer.tp)
        dw = da = db = None
        if wgrad_input is not None:
            dw = accumulator.accumulate_wgrad(layer.weight, wgrad_input, WgradOperand(dy))
        elif layer.adapter is not None and v is not None:
            u = WgradOperand(x.detach().matmul(a.t()) * layer.adapter.scale, group)
            da, db = layer.adapter.accumulate(accumulator, x, v.wait(), u, WgradOperand(dy))
        return wait_dx(), dw, None, None, da, db


class _RowParallelFunction(torch.autograd.Function):
    """``y = scatter(x W^T) + c``.

    Backward: ``dY = gather(dy)``, ``dx = dY W``, ``dW = dY^T x``.

    The bias is added once, after the reduction.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        layer: _LinearSpec,
        a: Tensor | None = None,
        b: Tensor | None = None,
    ) -> Tensor:
        ctx.save_for_backward(x if weight.requires_grad or a is not None else None, weight, a, b)
        ctx.layer = layer
        in_product = x.is_cuda and layer.tp.size == 1  # cuBLASLt adds the bias without another pass
        product = layer.product(weight, bias if in_product else None, a, layer.output_matrix(b))
        y = layer.tp_comm.matmul_scatter(x, product, layer.tp)()
        return y if bias is None or in_product else y.add_(bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, a, b = ctx.saved_tensors
        layer: _LinearSpec = ctx.layer
        accumulator, sb = layer.grad_accumulator, layer.output_matrix(b)
        full_dy, dx = layer.tp_comm.gather_matmul(dy, layer.gradient_product(weight, a, sb), layer.tp)
        wgrad_dy = WgradOperand(dy, layer.sequence_group, Pending(full_dy))
        dw = da = db = None
        if ctx.needs_input_grad[1]:
            dw = accumulator.accumulate_wgrad(layer.weight, accumulator.wgrad_input(x, None), wgrad_dy)
        elif layer.adapter is not None and sb is not None:
            u = WgradOperand(x.detach().matmul(a.t()) * layer.adapter.scale)
            da, db = layer.adapter.accumulate(accumulator, x, full_dy.matmul(sb), u, wgrad_dy)
        return dx, dw, None, None, da, db


class ParallelLinear(nn.Module):
    """A linear of the tensor-parallel region."""

    function: type[torch.autograd.Function]
    column: bool

    def __init__(self, context: BuildContext) -> None:
        super().__init__()
        self.name = context.prefix
        self.weight, self.bias = context.parameter("weight"), context.bias(autograd=True)
        self._spec, self._fp8 = _LinearSpec.of(context), Float8Linear.of(context, self.column)
        self.lora_a, self.lora_b = context.optional("lora_a"), context.optional("lora_b")
        self.lora_magnitude = context.optional("lora_magnitude", autograd=True)
        # Squares of the rows of W, of this rank's inputs alone; computed at their first use.
        self._frozen_squares: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer."""
        y: Tensor
        adapter = self._spec.adapter
        if self._fp8 is not None:
            y = Float8Function.apply(x, self.weight, self.bias, self._fp8)
        elif adapter is None or not adapter.adapters.enabled:
            y = self.function.apply(x, self.weight, self.bias, self._spec)
        else:
            y = self.function.apply(x, self.weight, self.bias, self._spec, self.lora_a, self.lora_b)
            if self.lora_magnitude is not None:
                y = self._to_magnitudes(y, self.lora_magnitude, adapter)
        return y

    def _to_magnitudes(self, y: Tensor, magnitude: Tensor, adapter: LowRankAdapter) -> Tensor:
        """Scale the outputs, without the bias that they contain, to DoRA's magnitudes, rounding once.

        A row of norm 0 has factor 1; its own is 0/0.
        """
        norms = self.row_norms()
        scaled = norms > 0
        if adapter.own is not None:
            scaled &= adapter.own.flatten(1).any(1)
        factor = (magnitude / norms.where(scaled, 1.0)).where(scaled, 1.0)
        wide = y * factor
        return (wide if self.bias is None else wide + self.bias * (1.0 - factor)).to(y.dtype)

    @torch.no_grad()
    def row_norms(self) -> Tensor:
        """Return the 2-norms of the rows of ``W + s B A``, in at least fp32 ``[O]``.

        DoRA (arXiv 2402.09353) divides by them, and treats them as constants in backward (section 4.3). With rows w of
        W and b of ``s B``, their squares are ``|w|^2 + b . (2 A w + A A^T b)``, whose first term is computed once.
        """
        weight = self._spec.dense(self.weight)
        weight = weight.to(torch.promote_types(weight.dtype, torch.float32))
        if self._frozen_squares is None:
            self._frozen_squares = torch.linalg.vector_norm(weight, dim=1).square_()
        squares = self._frozen_squares
        if self.lora_a is not None and (sb := self._spec.output_matrix(self.lora_b)) is not None:
            a, sb = self.lora_a.to(weight.dtype), sb.to(weight.dtype)
            squares = squares + (sb * torch.addmm(2.0 * weight.matmul(a.t()), sb, a.matmul(a.t()))).sum(1)
        squares = squares if self.column else comm.all_reduce(squares, self._spec.tp)
        return squares.clamp(min=0.0).sqrt()  # rounding may make a sum of nearly nothing negative


class ColumnParallelLinear(ParallelLinear):
    """``[S(/tp), B, I] -> [S, B, O/tp]``: each rank computes a part of the outputs."""

    function, column = _ColumnParallelFunction, True


class RowParallelLinear(ParallelLinear):
    """``[S, B, I/tp] -> [S(/tp), B, O]``: each rank holds a part of the inputs; outputs are summed over ranks."""

    function, column = _RowParallelFunction, False
