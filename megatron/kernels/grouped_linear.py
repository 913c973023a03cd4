"""The three matrix products of grouped linears, whose rows are multiplied by the weight of their expert.

Rows are sorted by expert. ``offsets`` are the cumulative numbers of rows, int32 ``[E]`` on the device: expert e has the
rows from ``offsets[e - 1]`` to ``offsets[e]``, of which there may be none. Rows from ``offsets[E - 1]`` on are padding,
which fills buffers of a fixed size. No product reads padding, and the outputs of padding are undefined: do not read
them.

Shapes: R rows, E experts, I in, O out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.kernels import onednn
from megatron.kernels.compile import triton_missing, triton_region
from megatron.kernels.linear import TORCH_LINEAR, column_sum
from megatron.kernels.operation import Candidate, KernelCheck, Operation


class GroupedLinearKernel(NamedTuple):
    """An implementation of grouped linears, without communication."""

    # (x_RI, weight_EOI, offsets_E) -> y_RO: rows ``x_e W_e^T``
    forward: Callable[[Tensor, Tensor, Tensor], Tensor]
    # (dy_RO, weight_EOI, offsets_E) -> dx_RI: rows ``dy_e W_e``
    input_gradient: Callable[[Tensor, Tensor, Tensor], Tensor]
    # (target_EOI, x_RI, dy_RO, offsets_E, beta=1.0): target_e = beta * target_e + dy_e^T x_e, with beta 0 or 1. The
    # target is at least fp32; with beta 0 its content is ignored. The product is never rounded to the dtype of x.
    weight_gradient: Callable[..., None]
    # (dy_RO, offsets_E, factor_R or None) -> db_EO: sums of ``factor * dy_e`` over rows, in at least fp32
    bias_gradient: Callable[[Tensor, Tensor, Tensor | None], Tensor]


def split_by_expert(x: Tensor, offsets: Tensor) -> list[Tensor]:
    """Return the rows of each expert. Reads the offsets on the host."""
    ends = offsets.tolist()
    return [x[start:end] for start, end in zip([0, *ends], ends)]


def products(x: Tensor, matrices: Tensor, offsets: Tensor) -> Tensor:
    """Return the rows of each expert times its matrix; rows of padding are 0."""
    y, ends = x.new_empty(len(x), matrices.shape[2]), offsets.tolist()
    for start, end, matrix in zip([0, *ends], ends, matrices):
        if start < end:
            torch.mm(x[start:end], matrix, out=y[start:end])
    y[ends[-1] :].zero_()
    return y


def forward(x_RI: Tensor, weight_EOI: Tensor, offsets: Tensor) -> Tensor:
    """Return ``x_e W_e^T``."""
    return products(x_RI, weight_EOI.transpose(1, 2), offsets)


def input_gradient(dy_RO: Tensor, weight_EOI: Tensor, offsets: Tensor) -> Tensor:
    """Return ``dy_e W_e``."""
    return products(dy_RO, weight_EOI, offsets)


def weight_gradient(target_EOI: Tensor, x_RI: Tensor, dy_RO: Tensor, offsets: Tensor, beta: float = 1.0) -> None:
    """Accumulate ``dy_e^T x_e``."""
    rows = zip(target_EOI, split_by_expert(x_RI, offsets), split_by_expert(dy_RO, offsets), strict=True)
    for target, x, dy in rows:
        if len(x):
            TORCH_LINEAR.weight_gradient(target, x, dy, beta=beta)
        elif not beta:
            target.zero_()


def bias_gradient(dy_RO: Tensor, offsets: Tensor, factor_R: Tensor | None = None) -> Tensor:
    """Return the column sums of the rows of each expert, times their factors."""
    dy = dy_RO if factor_R is None else dy_RO * factor_R.unsqueeze(1)
    return torch.stack([column_sum(rows) for rows in split_by_expert(dy, offsets)])


TORCH_GROUPED_LINEAR = GroupedLinearKernel(forward, input_gradient, weight_gradient, bias_gradient)
"""One expert after the other. Reads the offsets on the host, which costs nothing on a CPU."""


def _checks() -> Sequence[KernelCheck]:
    generator = torch.Generator().manual_seed(0)
    wide, narrow, rows = 96, 160, 400

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    def run(f: GroupedLinearKernel, t: Sequence[Tensor]) -> Sequence[Tensor]:
        x, dy, weight, target, factor, offsets = t
        end = int(offsets[-1])
        x[end:], dy[end:], factor[end:] = torch.nan, torch.nan, torch.nan
        accumulated, overwritten = (target.to(torch.promote_types(x.dtype, torch.float32), copy=True) for _ in range(2))
        f.weight_gradient(accumulated, x, dy, offsets)
        f.weight_gradient(overwritten.fill_(torch.nan), x, dy, offsets, beta=0.0)
        rows = f.forward(x, weight, offsets), f.input_gradient(dy, weight, offsets)
        biases = f.bias_gradient(dy, offsets, None), f.bias_gradient(dy, offsets, factor)
        return *(y[:end] for y in rows), accumulated, overwritten, *biases

    # Experts without rows at the start, inside and at the end; tiles that are full and not; one expert has all rows.
    counts = [[0, 130, 1, 0, 77, 128, 0], [0, 0, 0, rows, 0, 0, 0], [400 - 6 * 57, *6 * [57]]]
    weight, target = randn(2, 7, narrow, wide)
    inputs = randn(rows, wide), randn(rows, narrow), weight, target, randn(rows)
    offsets = [torch.tensor(each).cumsum(0, dtype=torch.int32) for each in counts]
    return [KernelCheck(run, (*inputs, ends), differentiated=False) for ends in offsets]


def _triton() -> GroupedLinearKernel:
    """Load the Triton kernels."""
    return cast("GroupedLinearKernel", triton_region("grouped_linear", "triton_grouped")())


def _grouped_mm() -> GroupedLinearKernel:
    """Return PyTorch's products, CUTLASS kernels in two launches, where shapes and addresses suit them.

    Others, and weight gradients, which PyTorch would round to bf16, are left to Triton.
    """
    rest = _triton()

    def suits(x: Tensor, weight: Tensor) -> bool:
        aligned = all(t.data_ptr() % 16 == 0 for t in (x, weight))
        return len(x) > 0 and aligned and all(size % 8 == 0 for size in weight.shape[1:])

    def forward(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
        x = x.contiguous()
        if not suits(x, weight):
            return rest.forward(x, weight, offsets)
        return F.grouped_mm(x, weight.transpose(1, 2), offs=offsets)

    def input_gradient(dy: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
        dy = dy.contiguous()
        if not suits(dy, weight):
            return rest.input_gradient(dy, weight, offsets)
        return F.grouped_mm(dy, weight, offs=offsets)

    return rest._replace(forward=forward, input_gradient=input_gradient)


def _onednn() -> GroupedLinearKernel:
    """Return the loop over experts with other products."""
    return TORCH_GROUPED_LINEAR._replace(
        forward=onednn.grouped,
        input_gradient=onednn.grouped_input_gradient,
        weight_gradient=onednn.grouped_weight_gradient,
    )


def _grouped_mm_missing(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why PyTorch's products cannot be used, or None. On other GPUs they loop over experts on the host."""
    if device.type != "cuda" or dtype != torch.bfloat16:
        return "it needs bf16 on a GPU"
    if torch.cuda.get_device_capability(device) not in ((9, 0), (10, 0)):
        return "it needs a GPU of compute capability 9.0 or 10.0"
    return triton_missing(device, dtype)


GROUPED_LINEAR = Operation(
    {
        "grouped_mm": Candidate(_grouped_mm, _grouped_mm_missing),
        "triton": Candidate(_triton, triton_missing),
        "onednn": Candidate(_onednn, onednn.missing, fast=onednn.fast),
        "torch": Candidate(lambda: TORCH_GROUPED_LINEAR),
    },
    _checks,
)
