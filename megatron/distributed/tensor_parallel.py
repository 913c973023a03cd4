"""Communication before and after the matrix product of a tensor-parallel linear.

``x_i`` is the tensor of rank ``i`` of ``p`` ranks, ``M_i`` this rank's part of the matrix. Every :class:`TPComm` has
two operations; each is the adjoint of the other, so a layer uses one in forward and the other in backward:

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

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from megatron.distributed import comm
from megatron.distributed.comm import Group


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
