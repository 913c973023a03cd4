"""The three matrix products of a linear layer, forward, input gradient and weight gradient, and that of its bias.

A linear adds its bias in forward. Backward needs the sum of ``dy`` over all rows, and ``dy`` is what the backward of
the consumer of ``y`` computes: the activation, the split into q, k and v, dropout, or the residual sum. So a consumer
takes the bias as an argument that has no effect on its values, and also returns its gradient, from the same kernel.

Shapes: T any leading dimensions (tokens), I in, O out.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.kernels import onednn
from megatron.kernels.operation import Candidate, KernelCheck, Operation, half_on_gpu, missing_modules


class LinearKernel(NamedTuple):
    """An implementation of linear layers, without communication."""

    # (x_TI, weight_OI, bias_O or None) -> y_TO
    forward: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    # (dy_TO, weight_OI) -> dx_TI
    input_gradient: Callable[[Tensor, Tensor], Tensor]
    # (target_OI, x_TI, dy_TO, beta=1.0): target = beta * target + dy^T x, with beta 0 or 1. The target is at least
    # fp32; with beta 0 its content is ignored. The product is never rounded to the dtype of x.
    weight_gradient: Callable[..., None]
    # For projections that are no layers of their own, differentiable: ``forward``, and (function, x) -> function(x) of
    # each element.
    differentiable: Callable[..., Tensor] = F.linear
    elementwise: Callable[[Callable[[Tensor], Tensor], Tensor], Tensor] = lambda function, x: function(x)
    # Generation may multiply weights in another order than training, where that is faster.
    reassociates: bool = True


def input_gradient(dy_TO: Tensor, weight_OI: Tensor) -> Tensor:
    """Return ``dy W``."""
    return dy_TO.matmul(weight_OI)


def accumulate_wgrad(target: Tensor, x: Tensor, dy: Tensor, beta: float = 1.0) -> None:
    """Accumulate with stock PyTorch; on GPUs, 16-bit operands need a separate product and add."""
    x_TI, dy_TO = x.flatten(0, -2), dy.flatten(0, -2)
    if target.dtype == x_TI.dtype or not target.is_cuda:
        torch.addmm(target, dy_TO.t().to(target.dtype), x_TI.to(target.dtype), beta=beta, out=target)
    else:
        product = torch.mm(dy_TO.t(), x_TI, out_dtype=target.dtype)
        torch.add(product, target, alpha=beta, out=target) if beta else target.copy_(product)


TORCH_LINEAR = LinearKernel(F.linear, input_gradient, accumulate_wgrad)


def column_sum(dy: Tensor) -> Tensor:
    """``[..., O] -> [O]``, summed in at least fp32."""
    return dy.flatten(0, -2).sum(0, dtype=torch.promote_types(dy.dtype, torch.float32))


def with_bias_gradient(y: Tensor, bias: Tensor | None) -> Tensor:
    """Return ``y``, which contains ``bias``; in backward the bias receives the column sum of ``dy``."""
    return y if bias is None or not bias.requires_grad else _BiasGradient.apply(y, bias)


class _BiasGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, bias: Tensor) -> Tensor:
        return y.view_as(y)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        return dy, column_sum(dy)


def _fused_wgrad(target: Tensor, x: Tensor, dy: Tensor, beta: float = 1.0) -> None:
    """Accumulate within the matrix product: one kernel, without a temporary."""
    x_TI, dy_TO = x.flatten(0, -2), dy.flatten(0, -2)
    if target.dtype == x_TI.dtype:
        accumulate_wgrad(target, x_TI, dy_TO, beta)
    else:
        torch.addmm(target, dy_TO.t(), x_TI, out_dtype=target.dtype, beta=beta, out=target)


def _addmm_missing(device: torch.device, dtype: torch.dtype) -> str | None:
    return None if half_on_gpu(device, dtype) else "it needs bf16 or fp16 on a GPU"


def _apex_missing(device: torch.device, dtype: torch.dtype) -> str | None:
    if not half_on_gpu(device, dtype):
        return "apex needs bf16 or fp16 on a GPU"
    return missing_modules("fused_weight_gradient_mlp_cuda")


def _apex() -> LinearKernel:
    """Load apex's ``wgrad_gemm_accum_fp32(input, d_output, d_weight)``, which assumes contiguous inputs and adds."""
    fused: Any = importlib.import_module("fused_weight_gradient_mlp_cuda")

    def apex_wgrad(target: Tensor, x: Tensor, dy: Tensor, beta: float = 1.0) -> None:
        if not beta:
            target.zero_()
        fused.wgrad_gemm_accum_fp32(x.flatten(0, -2).contiguous(), dy.flatten(0, -2).contiguous(), target)

    return TORCH_LINEAR._replace(weight_gradient=apex_wgrad)


def _checks() -> Sequence[KernelCheck]:
    generator = torch.Generator().manual_seed(0)
    x, dy = (torch.randn(5, 2, n, generator=generator, dtype=torch.float64) for n in (32, 48))
    weight, target = torch.randn(2, 48, 32, generator=generator, dtype=torch.float64)
    bias = torch.randn(48, generator=generator, dtype=torch.float64)

    def run(f: LinearKernel, t: Sequence[Tensor]) -> Sequence[Tensor]:
        x, dy, weight, bias, target = t
        accumulated, overwritten = (target.to(torch.promote_types(x.dtype, torch.float32), copy=True) for _ in range(2))
        f.weight_gradient(accumulated, x, dy)
        f.weight_gradient(accumulated, x[:, 0], dy[:, 0])  # not contiguous
        f.weight_gradient(overwritten, x, dy, beta=0.0)
        outputs = f.forward(x, weight, None), f.forward(x[:, 0], weight, bias)
        return *outputs, f.input_gradient(dy, weight), f.input_gradient(dy[:, 0], weight), accumulated, overwritten

    return [KernelCheck(run, (x, dy, weight, bias, target), differentiated=False)]


LINEAR = Operation(
    {
        "apex": Candidate(_apex, _apex_missing),
        "addmm": Candidate(lambda: TORCH_LINEAR._replace(weight_gradient=_fused_wgrad), _addmm_missing),
        "onednn": Candidate(
            lambda: LinearKernel(onednn.linear, onednn.input_gradient, onednn.weight_gradient),
            onednn.missing,
            fast=onednn.fast,
        ),
        "torch": Candidate(lambda: TORCH_LINEAR),
    },
    _checks,
)
