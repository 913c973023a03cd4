"""LayerNorm and RMSNorm over the last dimension, alone and fused with a residual sum.

Shapes: R any leading dimensions, W the normalised width.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.kernels.compile import compiled, compiler_missing, triton_missing, triton_region
from megatron.kernels.linear import with_bias_gradient
from megatron.kernels.operation import HALF_DTYPES, Candidate, KernelCheck, Operation, missing_modules

MAX_TRITON_WIDTH = 8192
"""Widest row whose backward fits into the registers of a program."""

NormKernel = Callable[[Tensor, Tensor, Tensor | None, float], Tensor]
"""``norm(x_RW, weight_W, bias_W, eps) -> y_RW``; RMSNorm without a bias. Statistics in at least fp32.

Weight and bias may be wider than ``x``; the result is rounded once."""

AddNormKernel = Callable[[Tensor, Tensor, Tensor | None, Tensor, Tensor | None, float], tuple[Tensor, Tensor]]
"""``add_norm(x_RW, y_RW, y_bias_W, weight_W, bias_W, eps) -> (x + y, norm(x + y))``; on ``y_bias`` see
``kernels/linear.py``."""


def norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """Compute LayerNorm, ``(x - mean) / sqrt(var + eps) * weight + bias``, or without a bias RMSNorm.

    RMSNorm is ``x / sqrt(mean(x^2) + eps) * weight``.
    """
    if weight.dtype != x.dtype:
        return norm(x.to(weight.dtype), weight, bias, eps).to(x.dtype)
    if bias is None:
        return F.rms_norm(x, weight.shape, weight, eps)
    if x.dtype in HALF_DTYPES and x.device.type == "cpu":
        y: Tensor = _LayerNormOnCPU.apply(x, weight, bias, eps)
        return y
    return F.layer_norm(x, weight.shape, weight, bias, eps)


class _LayerNormOnCPU(torch.autograd.Function):
    """LayerNorm with backward in fp32: torch sums those of weight and bias in 16 bits on CPUs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        ctx.save_for_backward(x, weight, bias)
        ctx.eps = eps
        return F.layer_norm(x, weight.shape, weight, bias, eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias = (t.float() for t in ctx.saved_tensors)
        _, mean, rstd = torch.native_layer_norm(x, weight.shape, weight, bias, ctx.eps)
        return *torch.ops.aten.native_layer_norm_backward(
            dy.float(), x, weight.shape, mean, rstd, weight, bias, [True, True, True]
        ), None


def add_norm(
    x: Tensor, y: Tensor, y_bias: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """Return the residual sum, and its norm; ``y`` contains ``y_bias``."""
    total = x + with_bias_gradient(y, y_bias)
    return total, norm(total, weight, bias, eps)


def _apex_missing(device: torch.device, dtype: torch.dtype) -> str | None:
    if device.type != "cuda" or dtype == torch.float64:
        return "apex needs fp32, bf16 or fp16 on a GPU"
    return missing_modules("apex", "fused_layer_norm_cuda")


def _apex() -> NormKernel:
    """Load apex's fused norms."""
    fused: Any = importlib.import_module("apex.normalization.fused_layer_norm")

    def apex_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        out: Tensor
        if bias is None:
            out = fused.fused_rms_norm_affine(x, weight, weight.shape, eps)
        else:
            out = fused.fused_layer_norm_affine(x, weight, bias, weight.shape, eps)
        return out

    return apex_norm


def _checks() -> Sequence[KernelCheck]:
    generator = torch.Generator().manual_seed(0)
    # More rows than the programs of a kernel, so that some work on several.
    x, y = torch.randn(2, 300, 2, 64, generator=generator, dtype=torch.float64)
    weight, bias = torch.randn(2, 64, generator=generator, dtype=torch.float64)

    def wide(f: NormKernel, t: Sequence[Tensor]) -> Sequence[Tensor]:
        result = f(t[0], t[1].to(torch.promote_types(t[1].dtype, torch.float32)), None, 1e-5)
        if result.dtype != t[0].dtype:
            raise TypeError(f"the norm of {t[0].dtype} is {result.dtype} where the weight is wider")
        return (result,)

    return [
        KernelCheck(lambda f, t: (f(t[0], t[1], None, 1e-5),), (x, weight)),
        KernelCheck(lambda f, t: (f(t[0], t[1], t[2], 1e-5),), (y, weight, bias)),
        KernelCheck(wide, (x, weight)),
    ]


def _sum_checks() -> Sequence[KernelCheck]:
    (x, weight), (y, _, bias) = (check.inputs for check in _checks()[:2])
    return [
        KernelCheck(lambda f, t: f(t[0], t[1], None, t[2], None, 1e-5), (x, y, weight)),
        KernelCheck(lambda f, t: f(t[0], t[1], t[4], t[2], t[3], 1e-5), (x, y, weight, bias, y[0, 0])),
    ]


NORM = Operation(
    {
        "apex": Candidate(
            _apex, _apex_missing, deterministic=False, covers=lambda x, weight, *_: weight.dtype == x.dtype
        ),
        "triton": Candidate(
            triton_region("norm"), triton_missing, covers=lambda x, *_: x.shape[-1] <= MAX_TRITON_WIDTH
        ),
        "compiled": Candidate(compiled(norm), compiler_missing),
        "torch": Candidate(lambda: norm),
    },
    _checks,
)
ADD_NORM = Operation(
    {
        "triton": Candidate(
            triton_region("add_norm"), triton_missing, covers=lambda x, *_: x.shape[-1] <= MAX_TRITON_WIDTH
        ),
        "compiled": Candidate(compiled(add_norm), compiler_missing),
        "torch": Candidate(lambda: add_norm),
    },
    _sum_checks,
)
