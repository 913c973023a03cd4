"""Differentiable collectives; the backward of each is its adjoint.

``x_i`` is the tensor of rank ``i`` of ``p`` ranks; ``[n]`` stands for dimension 0 (rows), other dimensions are
omitted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron.distributed import comm
from megatron.distributed.comm import Group


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return comm.all_reduce(dy.clone(), ctx.group), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        return comm.all_reduce(x.clone(), group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return dy, None


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return comm.all_gather(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return comm.reduce_scatter(dy, ctx.group), None


class _ScatterRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return comm.reduce_scatter(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return comm.all_gather(dy, ctx.group), None


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sent: Sequence[int], received: Sequence[int], group: Group) -> Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        return comm.all_to_all_rows(x, sent, received, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None]:
        return comm.all_to_all_rows(dy, ctx.received, ctx.sent, ctx.group), None, None, None


def copy_to_region(x: Tensor, group: Group) -> Tensor:
    """Enter a tensor-parallel region: ``y_i = x``, backward ``dx = sum_i dy_i`` (all-reduce).

    ``x`` ``[n]`` is equal on all ranks. Adjoint of :func:`reduce_from_region`.
    """
    return x if group.size == 1 else _Copy.apply(x, group)


def reduce_from_region(x: Tensor, group: Group) -> Tensor:
    """Leave a tensor-parallel region: ``y = sum_i x_i`` (all-reduce), backward ``dx_i = dy``.

    ``x_i`` ``[n]`` is a partial sum; ``y`` is equal on all ranks. Adjoint of :func:`copy_to_region`.
    """
    return x if group.size == 1 else _Reduce.apply(x, group)


def gather_rows(x: Tensor, group: Group) -> Tensor:
    """Gather rows: ``x_i`` ``[n/p]`` -> ``y = concat_i x_i`` ``[n]``, backward ``dx_i = (sum_j dy_j)[rows i]``.

    Enters a tensor-parallel region from a sequence-parallel one. Adjoint of :func:`reduce_scatter_rows`.
    """
    return x if group.size == 1 else _GatherRows.apply(x, group)


def reduce_scatter_rows(x: Tensor, group: Group) -> Tensor:
    """Reduce-scatter rows: ``x_i`` ``[n]`` -> ``y_i = (sum_j x_j)[rows i]`` ``[n/p]``, backward ``dx = concat_i dy_i``.

    Leaves a tensor-parallel region into a sequence-parallel one. Adjoint of :func:`gather_rows`.
    """
    return x if group.size == 1 else _ScatterRows.apply(x, group)


def all_to_all(x: Tensor, sent: Sequence[int], received: Sequence[int], group: Group) -> Tensor:
    """Exchange rows (all-to-all): ``x_i`` ``[sum_j n_ij]`` -> ``y_j = concat_i x_i[rows for j]`` ``[sum_i n_ij]``.

    Its own adjoint, with ``sent`` and ``received`` exchanged.

    Args:
        x: this rank's rows, ordered by target rank.
        sent: number of rows for each rank.
        received: number of rows from each rank.
        group: the ranks.

    """
    return x if group.size == 1 else _Exchange.apply(x, sent, received, group)
