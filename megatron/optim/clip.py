"""The global gradient norm, each parameter counted once whatever the layout."""

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
"""Elements of a CPU norm: torch's CPU kernel adds up in order and loses digits over more."""


class GradNorm:
    """The 2-norm over all parameters: every element is counted by one rank, and there is one sum over all ranks.

    So all ranks get the same bits, and who counts what does not depend on who updates what.
    """

    def __init__(self, specs: Mapping[str, ShardSpec], buckets: GradBuckets, mesh: Mesh) -> None:
        """Find the elements that this rank counts.

        Args:
            specs: of all parameters.
            buckets: of their gradients.
            mesh: the groups.

        """
        self._counted: list[Tensor] = []
        for name, share in buckets.counted().items():
            spec, start = specs[name], buckets.shares[name].start
            gradient = buckets.grads[name].view(-1)[share.start - start : share.stop - start]
            self._counted += [b for slot in slots(spec, share, spec.owned) for b in _blocks(slot.of(gradient))]
        self._world = mesh.world
        self._zero = torch.zeros((), dtype=torch.float64, device=buckets.buckets[0].own.device)

    def compute(self) -> Tensor:
        """The norm, an fp64 scalar; not finite when any gradient is not."""
        counted, total = self._counted, self._zero.clone()
        if counted:
            total += torch.stack(torch._foreach_norm(counted)).double().square().sum()
        return comm.all_reduce(total, self._world).sqrt()


def _blocks(piece: Tensor) -> list[Tensor]:
    return [piece] if piece.is_cuda else list(piece.view(-1).split(BLOCK))
