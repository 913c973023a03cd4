"""Global gradient norm; every parameter element counts once, whatever the layout."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from megatron.optim.buckets import GradBuckets
from megatron.parallel import comm
from megatron.parallel.mesh import Mesh
from megatron.parallel.ownership import slots
from megatron.parallel.shard import ShardSpec

BLOCK = 1 << 14
"""Elements per norm on the CPU: torch's CPU kernel adds sequentially and loses precision over more."""


class GradNorm:
    """2-norm over all parameters, with one sum over all ranks.

    Every element is counted by one rank, whichever rank updates it. The result is bitwise equal on all ranks.
    """

    def __init__(self, specs: Mapping[str, ShardSpec], buckets: GradBuckets, mesh: Mesh) -> None:
        """Collect the gradient views that this rank counts."""
        self._counted: list[Tensor] = []
        for name, share in buckets.counted().items():
            spec, start = specs[name], buckets.shares[name].start
            gradient = buckets.grads[name].view(-1)[share.start - start : share.stop - start]
            for slot in slots(spec, share, spec.owned):
                box = slot.of(gradient)
                self._counted += [box] if box.is_cuda else box.view(-1).split(BLOCK)
        self._world = mesh.world
        self._zero = torch.zeros((), dtype=torch.float64, device=buckets.buckets[0].own.device)

    def compute(self) -> Tensor:
        """Return the norm, an fp64 scalar; not finite if any gradient is not."""
        total = self._zero.clone()
        if self._counted:
            total += torch.stack(torch._foreach_norm(self._counted)).double().square().sum()
        return comm.all_reduce(total, self._world).sqrt()
