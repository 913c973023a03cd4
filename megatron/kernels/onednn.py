"""Products of fp32 matrices by oneDNN, on CPUs where PyTorch's BLAS does not use the widest vectors.

MKL multiplies with AVX2 on processors of AMD. oneDNN uses AVX-512 there, which doubles the speed
(``python -m benchmarks.train_step``). PyTorch calls it for 16-bit matrices by itself, so those are left to PyTorch,
except in weight gradients, which are fp32.

Shapes: T any leading dimensions (tokens), R rows, E experts, I in, O out.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

SMALL = 1 << 15
"""Elements of a matrix of weights below which PyTorch's products are as fast."""

BLOCK_ELEMENTS = 1 << 18
"""Elements of a weight gradient that are computed at a time, before they are added: what a cache keeps."""


def missing(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why oneDNN cannot be used, or None."""
    if device.type != "cpu" or dtype == torch.float64:
        return "oneDNN needs at most 32 bits on a CPU"
    return None if torch.backends.mkldnn.is_available() else "this torch is built without oneDNN"


def fast(device: torch.device) -> bool:
    """Return True for processors of AMD with AVX-512."""
    if device.type != "cpu" or torch.backends.cpu.get_cpu_capability() != "AVX512":
        return False
    information = Path("/proc/cpuinfo")
    return information.exists() and "AuthenticAMD" in information.read_text()


def linear(x_TI: Tensor, weight_OI: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return ``x W^T + b``; not differentiable."""
    if x_TI.dtype != torch.float32 or not x_TI.numel() or weight_OI.numel() < SMALL:
        return F.linear(x_TI, weight_OI, bias)
    y_TO: Tensor = torch.ops.mkldnn._linear_pointwise(x_TI, weight_OI, bias, "none", [], "")
    return y_TO


def input_gradient(dy_TO: Tensor, weight_OI: Tensor) -> Tensor:
    """Return ``dy W``."""
    return linear(dy_TO, weight_OI.t())


def weight_gradient(target: Tensor, x: Tensor, dy: Tensor, beta: float = 1.0) -> None:
    """Accumulate ``dy^T x``; see :class:`megatron.kernels.linear.LinearKernel`."""
    x_IT, dy_OT = x.flatten(0, -2).to(target.dtype).t(), dy.flatten(0, -2).to(target.dtype).t()
    if target.numel() < SMALL:
        torch.addmm(target, dy_OT, x_IT.t(), beta=beta, out=target)
        return
    rows = max(1, BLOCK_ELEMENTS // len(x_IT))
    for block, dy_BT in zip(target.split(rows), dy_OT.split(rows)):
        product = linear(dy_BT, x_IT)
        block.add_(product) if beta else block.copy_(product)


# ---- Rows sorted by expert (:mod:`megatron.kernels.grouped_linear`)


def common_rows(rows: int) -> int:
    """Return one of few numbers from ``rows`` on, at most 15 or an eighth above it.

    oneDNN compiles a kernel for each shape, in the time of some products of narrow experts, and keeps the last 1024.
    """
    step = max(16, 1 << max(0, rows.bit_length() - 4))
    return -(-rows // step) * step


def grouped(x_RI: Tensor, weight_EOI: Tensor, offsets: Tensor) -> Tensor:
    """Return ``x_e W_e^T``; rows of padding are 0."""
    y_RO, ends, total = x_RI.new_empty(len(x_RI), weight_EOI.shape[1]), offsets.tolist(), len(x_RI)
    for start, end, weight_OI in zip([0, *ends], ends, weight_EOI):
        if start < end:
            # the results of some neighbouring rows are not used
            stop = min(start + common_rows(end - start), total)
            first = max(0, stop - common_rows(end - start))
            y_RO[start:end] = linear(x_RI[first:stop], weight_OI)[start - first : end - first]
    y_RO[ends[-1] :].zero_()
    return y_RO


def grouped_input_gradient(dy_RO: Tensor, weight_EOI: Tensor, offsets: Tensor) -> Tensor:
    """Return ``dy_e W_e``."""
    return grouped(dy_RO, weight_EOI.transpose(1, 2), offsets)


def grouped_weight_gradient(
    target_EOI: Tensor, x_RI: Tensor, dy_RO: Tensor, offsets: Tensor, beta: float = 1.0
) -> None:
    """Accumulate ``dy_e^T x_e``."""
    ends = offsets.tolist()
    for start, end, target_OI in zip([0, *ends], ends, target_EOI):
        if start < end:
            zeros = (0, 0, 0, common_rows(end - start) - (end - start))
            x, dy = (F.pad(t[start:end], zeros) for t in (x_RI, dy_RO))
            weight_gradient(target_OI, x, dy, beta)
        elif not beta:
            target_OI.zero_()
