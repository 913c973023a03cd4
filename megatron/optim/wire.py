"""Asynchronous sums of gradients over ranks, in fp32 or in bf16.

In bf16 each addend is rounded once, and the sum is computed in fp32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.parallel import comm
from megatron.parallel.comm import Group, Pending


@dataclass
class Sum:
    """A reduction in flight."""

    pending: Pending
    # Computes the sum from what was communicated.
    made_of: Callable[[Tensor], Tensor] = lambda x: x

    def wait(self) -> Tensor:
        """Wait for the sum, and return it flat."""
        return self.made_of(self.pending.wait())


def start_reduce_scatter(x: Tensor, group: Group, wire: torch.dtype) -> Sum:
    """Start summing ``x`` ``[n]`` over the group; the result is this rank's part ``[n / size]``, in the dtype of ``x``.

    Args:
        x: flat; must not change until the sum is complete. On GPUs the sum overwrites this rank's part of it.
        group: ranks to sum over.
        wire: dtype in which gradients are communicated.

    """
    if group.size == 1 or wire == x.dtype:
        return Sum(comm.start_reduce_scatter(x, group, x.view(group.size, -1)[group.rank]))
    # Each rank receives the addends of its part, and adds them in rank order.
    addends = comm.start_all_to_all(x.to(wire), group)
    return Sum(addends, lambda parts: parts.view(group.size, -1).sum(0, dtype=x.dtype))


def start_all_reduce(x: Tensor, group: Group, wire: torch.dtype) -> Sum:
    """Start summing ``x`` ``[n]`` over the group, in place unless ``wire`` differs; ``n`` is divisible by the size."""
    if group.size == 1 or wire == x.dtype:
        return Sum(comm.start_all_reduce(x, group))
    part = start_reduce_scatter(x, group, wire)
    return Sum(part.pending, lambda addends: comm.all_gather(part.made_of(addends).to(wire), group).to(x.dtype))
