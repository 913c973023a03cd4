"""Sorting of keys, gathers of rows, and sums of gathered rows: what a mixture of experts does with its tokens.

Shapes: R rows, T tokens, C rows of a token at most, H hidden, N keys, G groups.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.kernels.compile import triton_missing, triton_region
from megatron.kernels.operation import Candidate, KernelCheck, Operation


class SortedKeys(NamedTuple):
    """A stable order of keys."""

    # Index of the n-th smallest key, and the place of every key, int64 [N].
    order: Tensor
    places: Tensor
    # Number of keys up to 0, 1, ..., int32 [G].
    ends: Tensor


class RowKernels(NamedTuple):
    """An implementation of both; neither is differentiable."""

    # (x_RH, places_TC, complete) -> y_TH
    sum_rows: Callable[[Tensor, Tensor, bool], Tensor]
    # (keys, groups, most) -> SortedKeys
    sort_keys: Callable[[Tensor, int, int], SortedKeys]


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


def sort_keys(keys: Tensor, groups: int, most: int) -> SortedKeys:
    """Sort integers from 0 to ``most`` stably; ``ends`` has those below ``groups``."""
    # A radix sort takes a pass per byte.
    dtype = torch.uint8 if most < 256 else torch.int16 if most < 32768 else torch.int32
    found, order = torch.sort(keys.flatten().to(dtype), stable=True)
    numbers, below = torch.arange(len(order), device=keys.device), torch.arange(groups, device=keys.device)
    places = torch.empty_like(order).scatter_(0, order, numbers)
    return SortedKeys(order, places, torch.searchsorted(found, below.to(dtype), right=True, out_int32=True))


TORCH_ROWS = RowKernels(sum_rows, sort_keys)


def _checks() -> Sequence[KernelCheck]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(40, 96, generator=generator, dtype=torch.float64)
    every, some = (torch.randint(end, (30, 4), generator=generator) for end in (40, 60))

    def add(f: RowKernels, t: Sequence[Tensor]) -> Sequence[Tensor]:
        one = f.sum_rows(t[0], t[2][:, :1].contiguous(), False)
        return f.sum_rows(t[0], t[1], True), f.sum_rows(t[0], t[2], False), one

    def sort(f: RowKernels, t: Sequence[Tensor]) -> Sequence[Tensor]:
        keys = t[0]
        some_groups = f.sort_keys(keys, 37, 41), f.sort_keys(keys[:3], 41, 41), f.sort_keys(7 * keys, 290, 290)
        return [each.double() for found in some_groups for each in found]

    keys = torch.randint(42, (3000,), generator=generator)
    return [
        KernelCheck(run, inputs, differentiated=False) for run, inputs in ((add, (x, every, some)), (sort, (keys,)))
    ]


ROWS = Operation(
    {
        "triton": Candidate(triton_region("TRITON_ROWS", "triton_rows"), triton_missing),
        "torch": Candidate(lambda: TORCH_ROWS),
    },
    _checks,
)
