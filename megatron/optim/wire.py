"""Sums of gradients over ranks, which may travel as bf16: then every addend is rounded once and added up in fp32."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.parallel import comm
from megatron.parallel.comm import Group, Pending


@dataclass
class Sum:
    """A sum on its way.

    Attributes:
        pending: what travels.
        made_of: makes the sum of it, once it is there.
    """

    pending: Pending
    made_of: Callable[[Tensor], Tensor] = lambda x: x

    def wait(self) -> Tensor:
        """The sum, flat."""
        return self.made_of(self.pending.wait())


def start_reduce_scatter(x: Tensor, group: Group, wire: torch.dtype) -> Sum:
    """This rank's part ``[n / size]`` of the sum of ``x`` ``[n]`` over the group, in the format of ``x``.

    Args:
        x: flat; must stay as it is until the sum is there, which on GPUs takes the place of this rank's part.
        group: over which to sum.
        wire: what travels.

    """
    if group.size == 1 or wire == x.dtype:
        return Sum(comm.start_reduce_scatter(x, group, x.view(group.size, -1)[group.rank]))
    # Each rank gets everybody's addends of its own part and adds them in the order of the ranks.
    addends = comm.start_all_to_all(x.to(wire), group)
    return Sum(addends, lambda parts: parts.view(group.size, -1).sum(0, dtype=x.dtype))


def start_all_reduce(x: Tensor, group: Group, wire: torch.dtype) -> Sum:
    """The sum of ``x`` ``[n]`` over the group, ``n`` a multiple of its size; ``x`` itself where nothing is rounded."""
    if group.size == 1 or wire == x.dtype:
        return Sum(comm.start_all_reduce(x, group))
    part = start_reduce_scatter(x, group, wire)
    return Sum(part.pending, lambda addends: comm.all_gather(part.made_of(addends).to(wire), group).to(x.dtype))
