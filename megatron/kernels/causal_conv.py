"""Short causal convolution of every channel, with SiLU, as before the scans of Mamba-2 and gated DeltaNet.

Shapes: B sequences, L rows, T = L + W - 1 rows with those before them, C channels, W width of the convolution.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.kernels.operation import Candidate, KernelCheck, Operation, half_on_gpu, missing_modules

SEGMENT_ROWS = 2048
"""Rows of a sequence that are computed at a time."""

CausalConvKernel = Callable[[Tensor, Tensor, Tensor | None, Tensor | None], Tensor]
"""``causal_conv(x_BTC, weight_CW, bias_C, runs_BT) -> y_BLC``."""


def causal_conv(x_BTC: Tensor, weight_CW: Tensor, bias_C: Tensor | None, runs_BT: Tensor | None) -> Tensor:
    """Return ``y_t = silu(bias + sum over w of weight_w x_(t + w))`` of the last L rows, summed in at least fp32.

    Only the inputs are kept for backward.

    Args:
        x_BTC: the rows, after the W - 1 rows before them; zeros where there are none.
        weight_CW: of the rows W - 1 before, .., of the row itself.
        bias_C: added before the activation.
        runs_BT: numbers of the documents, of all rows: rows of others are zeros. None for one document.
    """
    y: Tensor = _CausalConv.apply(x_BTC, weight_CW, bias_C, runs_BT)
    return y


class _CausalConv(torch.autograd.Function):
    """The convolution of some rows at a time, which bounds the memory of their copies in at least fp32."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, runs: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight, bias, runs)
        y = x.new_empty(x.shape[0], x.shape[1] - weight.shape[1] + 1, x.shape[2])
        for rows, taps in _segments(y, weight):
            y[:, rows] = F.silu(_convolve(x[:, taps], weight, bias, None if runs is None else runs[:, taps]))
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, runs = ctx.saved_tensors
        before, wide = weight.shape[1] - 1, torch.promote_types(x.dtype, torch.float32)
        dx, dweight = torch.empty_like(x), torch.zeros_like(weight, dtype=wide)
        dbias = None if bias is None else torch.zeros_like(bias, dtype=wide)
        carried = x.new_zeros(x.shape[0], before, x.shape[2], dtype=wide)  # of the rows before those that come
        for rows, taps in _segments(dy, weight):
            of_taps, documents = x[:, taps], None if runs is None else runs[:, taps]
            z = _convolve(of_taps, weight, bias, documents)
            dz = torch.ops.aten.silu_backward(dy[:, rows].to(z), z)
            found = F.pad(carried, (0, 0, 0, dz.shape[1]))
            for w, of_row in enumerate(weight.to(wide).unbind(1)):
                found[:, w : w + dz.shape[1]] += _of_document(dz * of_row, w, weight, documents)
                dweight[:, w] += (dz * _tap(of_taps, w, weight, documents)).sum((0, 1))
            if dbias is not None:
                dbias += dz.sum((0, 1))
            dx[:, rows], carried = found[:, : dz.shape[1]], found[:, dz.shape[1] :]
        dx[:, dy.shape[1] :] = carried
        return dx, dweight.to(weight.dtype), None if bias is None or dbias is None else dbias.to(bias.dtype), None


def _segments(y: Tensor, weight: Tensor) -> Iterator[tuple[slice, slice]]:
    """Yield the rows that are computed at a time, and those that they are computed from."""
    for start in range(0, y.shape[1], SEGMENT_ROWS):
        stop = min(start + SEGMENT_ROWS, y.shape[1])
        yield slice(start, stop), slice(start, stop + weight.shape[1] - 1)


def _convolve(x: Tensor, weight: Tensor, bias: Tensor | None, runs: Tensor | None) -> Tensor:
    """Return the convolution in at least fp32, before the activation."""
    width, wide = weight.shape[1], torch.promote_types(x.dtype, torch.float32)
    z = x.new_zeros(x.shape[0], x.shape[1] - width + 1, x.shape[2], dtype=wide)
    if bias is not None:
        z += bias
    for w, of_row in enumerate(weight.to(wide).unbind(1)):
        z.addcmul_(_tap(x, w, weight, runs).to(wide), of_row)
    return z


def _tap(x: Tensor, w: int, weight: Tensor, runs: Tensor | None) -> Tensor:
    """Return of each of the L rows the row that weight ``w`` multiplies."""
    return _of_document(x[:, w : x.shape[1] - weight.shape[1] + 1 + w], w, weight, runs)


def _of_document(rows: Tensor, w: int, weight: Tensor, runs: Tensor | None) -> Tensor:
    """Return zeros in the place of what weight ``w`` would bring from another document."""
    if runs is None:
        return rows
    own = runs[:, weight.shape[1] - 1 :]
    return rows.masked_fill((runs[:, w : w + own.shape[1]] != own).unsqueeze(2), 0.0)


def _library_missing(device: torch.device, dtype: torch.dtype) -> str | None:
    if not half_on_gpu(device, dtype) and not (device.type == "cuda" and dtype == torch.float32):
        return "causal_conv1d needs fp32, bf16 or fp16 on a GPU"
    return missing_modules("causal_conv1d")


def _library() -> CausalConvKernel:
    """Load the kernel of the package causal-conv1d, which takes channels in rows, and documents as int32."""
    convolve: Any = importlib.import_module("causal_conv1d").causal_conv1d_fn

    def library_conv(x_BTC: Tensor, weight_CW: Tensor, bias_C: Tensor | None, runs_BT: Tensor | None) -> Tensor:
        documents = None if runs_BT is None else runs_BT.to(torch.int32)
        y_BCT = convolve(x_BTC.transpose(1, 2), weight_CW, bias_C, seq_idx=documents, activation="silu")
        y_BLC: Tensor = y_BCT.transpose(1, 2)[:, weight_CW.shape[1] - 1 :]
        return y_BLC

    return library_conv


def _library_covers(x_BTC: Tensor, weight_CW: Tensor, *rest: Any) -> bool:
    return x_BTC.shape[2] % 8 == 0 and x_BTC.stride(2) == 1 and 2 <= weight_CW.shape[1] <= 4


def _checks() -> Sequence[KernelCheck]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 203, 32, generator=generator, dtype=torch.float64)
    weight, bias = (torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in ((32, 4), (32,)))
    runs = (torch.rand(2, 203, generator=generator) < 0.1).long().cumsum(1)
    return [
        KernelCheck(lambda f, t: (f(t[0], t[1], None, None),), (x, weight)),
        KernelCheck(lambda f, t: (f(t[0], t[1], t[2], t[3]),), (x, weight, bias, runs)),
    ]


CAUSAL_CONV = Operation(
    {
        "causal_conv1d": Candidate(_library, _library_missing, deterministic=False, covers=_library_covers),
        "torch": Candidate(lambda: causal_conv),
    },
    _checks,
)
