"""Communication inside a model: differentiable collectives, and that around tensor-parallel matrix products.

``x_i`` is the tensor of rank ``i`` of ``p`` ranks; ``[n]`` stands for dimension 0 (rows), other dimensions are
omitted. The backward of each collective is its adjoint.

A tensor-parallel linear communicates through a :class:`TPComm`: two operations, each the adjoint of the other, so that
a layer uses one in forward and the other in backward. ``M_i`` is this rank's part of the matrix:

=================  ==================  ========================  =============================
``TPComm``         rows held by ranks  ``gather_matmul``         ``matmul_scatter``
=================  ==================  ========================  =============================
REPLICATED         all on every rank   ``x M_i``                 all-reduce of ``x_i M_i``
SEQUENCE_PARALLEL  1/p on each rank    ``concat_j(x_j) M_i``     reduce-scatter of ``x_i M_i``
PIPELINED          the same            the same, rank by rank    the same, rank by rank
SYMMETRIC_MEMORY   the same            the same, fused           the same, fused
=================  ==================  ========================  =============================

PIPELINED divides the product by rows: one part per rank of the group, as a ring does. One part is multiplied while
others are sent, so all but the first or the last transfer can overlap with a product. A part of a product may be
rounded differently from the whole, and a sum over three or more ranks may be added in another order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

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


class _AllToAll:
    """An all-to-all in both directions."""

    # Under way in the current direction.
    pending: comm.Pending

    def __init__(self, sent: Sequence[int] | None, received: Sequence[int] | None, group: Group) -> None:
        self.sent, self.received, self.group = sent, received, group

    def wait(self) -> Tensor:
        result = self.pending.wait()
        del self.pending
        return result


class _StartAllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, transfer: _AllToAll) -> Tensor:
        ctx.transfer = transfer
        transfer.pending = comm.start_all_to_all_rows(x, transfer.sent, transfer.received, transfer.group)
        return transfer.pending.result.detach()  # an object of its own, or it would hold itself

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        transfer: _AllToAll = ctx.transfer
        return transfer.wait(), None


class _FinishAllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, transfer: _AllToAll) -> Tensor:
        ctx.transfer = transfer
        transfer.wait()
        return y.view_as(y)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        transfer: _AllToAll = ctx.transfer
        transfer.pending = comm.start_all_to_all_rows(dy, transfer.received, transfer.sent, transfer.group)
        return dy, None  # of the shape that autograd expects; the other half returns the gradient


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


def start_all_to_all(
    x: Tensor, sent: Sequence[int] | None, received: Sequence[int] | None, group: Group
) -> Callable[[], Tensor]:
    """Start to exchange rows (all-to-all): ``x_i`` ``[sum_j n_ij]`` -> ``y_j = concat_i x_i[rows for j]``.

    Its own adjoint, with ``sent`` and ``received`` exchanged. The transfer in backward lasts from the backward of the
    wait to that of the start: what was computed between them in forward hides it in both directions.

    Args:
        x: this rank's rows, ordered by target rank.
        sent: number of rows for each rank; None for equally many.
        received: number of rows from each rank; None for equally many.
        group: the ranks.

    Returns:
        A function that waits, and returns this rank's ``y``.
    """
    if group.size == 1:
        return lambda: x
    transfer = _AllToAll(sent, received, group)
    y: Tensor = _StartAllToAll.apply(x, transfer)

    def wait() -> Tensor:
        result: Tensor = _FinishAllToAll.apply(y, transfer)
        return result

    return wait


def all_to_all(x: Tensor, sent: Sequence[int], received: Sequence[int], group: Group) -> Tensor:
    """Exchange rows as :func:`start_all_to_all` does, and wait for them."""
    return start_all_to_all(x, sent, received, group)()


class Product(NamedTuple):
    """``x -> x M + b``, by rows."""

    # Computed by the kernel of the layer.
    compute: Callable[[Tensor], Tensor]
    # M ``[in, out]`` and b ``[out]``, for operations that include the product.
    matrix: Tensor
    bias: Tensor | None = None


class TPComm(NamedTuple):
    """How a tensor-parallel matrix product communicates."""

    # (x_i, product, group) -> (all rows of x, their product)
    gather_matmul: Callable[[Tensor, Product, Group], tuple[Tensor, Tensor]]
    # (x_i, product, group) -> function that waits for this rank's rows of the sum and returns them
    matmul_scatter: Callable[[Tensor, Product, Group], Callable[[], Tensor]]


def _replicated_matmul(x: Tensor, product: Product, group: Group) -> tuple[Tensor, Tensor]:
    return x, product.compute(x)


def _matmul_all_reduce(x: Tensor, product: Product, group: Group) -> Callable[[], Tensor]:
    return comm.start_all_reduce(product.compute(x), group).wait


def _all_gather_matmul(x: Tensor, product: Product, group: Group) -> tuple[Tensor, Tensor]:
    rows = comm.all_gather(x, group)
    return rows, product.compute(rows)


def _matmul_reduce_scatter(x: Tensor, product: Product, group: Group) -> Callable[[], Tensor]:
    return comm.start_reduce_scatter(product.compute(x), group).wait


def _pipelined_gather_matmul(x: Tensor, product: Product, group: Group) -> tuple[Tensor, Tensor]:
    """Broadcast the rows of each rank in turn, and multiply those that have arrived; this rank's own come first."""
    rows = torch.empty((group.size, *x.shape), dtype=x.dtype, device=x.device)
    rows[group.rank] = x
    order = sorted(range(group.size), key=lambda rank: rank != group.rank)
    pending: list[comm.Pending] = []
    parts: dict[int, Tensor] = {}
    for rank, following in zip(order, [*order[1:], group.size - 1]):
        # Not all at once: with CUDA_DEVICE_MAX_CONNECTIONS=1, a product runs only after all broadcasts issued before it
        # have begun.
        while len(pending) <= following:
            pending.append(comm.start_broadcast(rows[len(pending)], group, len(pending)))
        parts[rank] = product.compute(x if rank == group.rank else pending[rank].wait())
    pending[group.rank].wait()
    return rows.flatten(0, 1), torch.cat([parts[rank] for rank in range(group.size)])


def _pipelined_matmul_scatter(x: Tensor, product: Product, group: Group) -> Callable[[], Tensor]:
    """Reduce the rows of each rank to it while the next rank's are multiplied."""
    pending = [comm.start_reduce(product.compute(part), group, i) for i, part in enumerate(x.chunk(group.size))]

    def wait() -> Tensor:
        return [each.wait() for each in pending][group.rank]

    return wait


def _fused_gather_matmul(x: Tensor, product: Product, group: Group) -> tuple[Tensor, Tensor]:
    rows, y = comm.all_gather_matmul(x, product.matrix, group)
    return rows, y if product.bias is None else y.add_(product.bias)


def _fused_matmul_scatter(x: Tensor, product: Product, group: Group) -> Callable[[], Tensor]:
    y = comm.matmul_reduce_scatter(x, product.matrix, group)
    return lambda: y


REPLICATED = TPComm(_replicated_matmul, _matmul_all_reduce)
SEQUENCE_PARALLEL = TPComm(_all_gather_matmul, _matmul_reduce_scatter)
PIPELINED = TPComm(_pipelined_gather_matmul, _pipelined_matmul_scatter)
SYMMETRIC_MEMORY = TPComm(_fused_gather_matmul, _fused_matmul_scatter)
