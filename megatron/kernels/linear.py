"""Weight gradients of linear layers, accumulated in the gradient buffer by the matrix product."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron.kernels.operation import Candidate, KernelCheck, Operation, half_on_gpu, missing_modules

WeightGradientKernel = Callable[..., None]
"""``weight_gradient(target, x, dy, beta=1.0)``: ``target = beta * target + dy^T x``, with ``beta`` 0 or 1.

``target`` ``[O, I]`` is at least fp32, ``x`` is ``[..., I]`` and ``dy`` ``[..., O]``. With ``beta`` 0 the content of
``target`` is ignored. The product is never rounded to the dtype of ``x``.
"""


def accumulate_wgrad(target: Tensor, x: Tensor, dy: Tensor, beta: float = 1.0) -> None:
    """Run :data:`WeightGradientKernel` with stock PyTorch; on GPUs, 16-bit operands need a separate product and add."""
    x_TI, dy_TO = x.flatten(0, -2), dy.flatten(0, -2)
    if target.dtype == x_TI.dtype or not target.is_cuda:
        torch.addmm(target, dy_TO.t().to(target.dtype), x_TI.to(target.dtype), beta=beta, out=target)
    else:
        product = torch.mm(dy_TO.t(), x_TI, out_dtype=target.dtype)
        torch.add(product, target, alpha=beta, out=target) if beta else target.copy_(product)


def _accumulate(target: Tensor, x: Tensor, dy: Tensor, beta: float = 1.0) -> None:
    """Accumulate within the matrix product: one kernel, without a temporary."""
    x_TI, dy_TO = x.flatten(0, -2), dy.flatten(0, -2)
    if target.dtype == x_TI.dtype:
        accumulate_wgrad(target, x_TI, dy_TO, beta)
    else:
        torch.addmm(target, dy_TO.t(), x_TI, out_dtype=target.dtype, beta=beta, out=target)


def _accumulate_missing(device: torch.device, dtype: torch.dtype) -> str | None:
    return None if half_on_gpu(device, dtype) else "it needs bf16 or fp16 on a GPU"


def _apex_missing(device: torch.device, dtype: torch.dtype) -> str | None:
    if not half_on_gpu(device, dtype):
        return "apex needs bf16 or fp16 on a GPU"
    return missing_modules("fused_weight_gradient_mlp_cuda")


def _apex() -> WeightGradientKernel:
    """Load apex's ``wgrad_gemm_accum_fp32(input, d_output, d_weight)``, which assumes contiguous inputs and adds."""
    fused: Any = importlib.import_module("fused_weight_gradient_mlp_cuda")

    def apex_weight_gradient(target: Tensor, x: Tensor, dy: Tensor, beta: float = 1.0) -> None:
        if not beta:
            target.zero_()
        fused.wgrad_gemm_accum_fp32(x.flatten(0, -2).contiguous(), dy.flatten(0, -2).contiguous(), target)

    return apex_weight_gradient


def _trials() -> Sequence[KernelCheck]:
    generator = torch.Generator().manual_seed(0)
    x, dy = (torch.randn(5, 2, n, generator=generator, dtype=torch.float64) for n in (32, 48))
    target = torch.randn(48, 32, generator=generator, dtype=torch.float64)

    def run(f: WeightGradientKernel, t: Sequence[Tensor]) -> Sequence[Tensor]:
        target, x, dy = t
        accumulated, overwritten = (target.to(torch.promote_types(x.dtype, torch.float32), copy=True) for _ in range(2))
        f(accumulated, x, dy)
        f(accumulated, x[:, 0], dy[:, 0])  # not contiguous
        f(overwritten, x, dy, beta=0.0)
        return accumulated, overwritten

    return [KernelCheck(run, (target, x, dy), differentiated=False)]


WEIGHT_GRADIENT = Operation(
    {
        "apex": Candidate(_apex, _apex_missing),
        "addmm": Candidate(lambda: _accumulate, _accumulate_missing),
        "torch": Candidate(lambda: accumulate_wgrad),
    },
    _trials,
)
