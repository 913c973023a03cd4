"""Gather of rows, and sums of gathered rows: what a mixture of experts does with its tokens.

Shapes: R rows, T tokens, C rows of a token at most, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.kernels.compile import triton_missing, triton_region
from megatron.kernels.operation import Candidate, KernelCheck, Operation

SumRowsKernel = Callable[[Tensor, Tensor, bool], Tensor]
"""``sum_rows(x_RH, places_TC, complete) -> y_TH``; not differentiable."""


def sum_rows(x_RH: Tensor, places_TC: Tensor, complete: bool) -> Tensor:
    """Return ``y_t = sum_c x[places[t, c]]``, added in at least fp32 and rounded once; a gather if C is 1.

    Args:
        x_RH: the rows.
        places_TC: their numbers, int64; R and above add nothing.
        complete: no number is above R - 1.

    """
    rows = len(x_RH)
    if not complete:
        x_RH, places_TC = torch.cat([x_RH, x_RH.new_zeros(1, x_RH.shape[1])]), places_TC.clamp(max=rows)
    if places_TC.shape[1] == 1 or not len(places_TC):
        return x_RH.index_select(0, places_TC[:, 0])
    if x_RH.is_cuda or x_RH.dtype in (torch.float32, torch.float64):
        return F.embedding_bag(places_TC, x_RH, mode="sum")
    return x_RH[places_TC].sum(1)  # on CPUs a bag adds in half precision


def _checks() -> Sequence[KernelCheck]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(40, 96, generator=generator, dtype=torch.float64)
    every, some = (torch.randint(end, (30, 4), generator=generator) for end in (40, 60))

    def run(f: SumRowsKernel, t: Sequence[Tensor]) -> Sequence[Tensor]:
        return f(t[0], t[1], True), f(t[0], t[2], False), f(t[0], t[2][:, :1].contiguous(), False)

    return [KernelCheck(run, (x, every, some), differentiated=False)]


SUM_ROWS = Operation(
    {
        "triton": Candidate(triton_region("sum_rows", "triton_rows"), triton_missing),
        "torch": Candidate(lambda: sum_rows),
    },
    _checks,
)
