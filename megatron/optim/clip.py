"""The global gradient norm, each parameter counted once whatever the layout."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from megatron.parallel import comm
from megatron.parallel.mesh import Mesh
from megatron.parallel.shard import ShardSpec


class GradNorm:
    """The 2-norm over all parameters: pieces this rank owns, summed over the ranks that hold one model copy."""

    def __init__(self, specs: Mapping[str, ShardSpec], grads: Mapping[str, Tensor], mesh: Mesh) -> None:
        """Find the owned pieces.

        Args:
            specs: of all parameters.
            grads: their gradient buffers, local stored shape.
            mesh: the groups.

        """
        self._group = mesh.group("pp", "tp")
        self._owned = [grads[n].view(s.local_view)[p.local.slices] for n, s in specs.items() for p in s.owned]
        self._zero = torch.zeros((), dtype=torch.float64, device=next(iter(grads.values())).device)

    def compute(self) -> Tensor:
        """The norm, an fp64 scalar; not finite when any gradient is not."""
        square = self._zero.clone()
        if self._owned:
            square += torch.stack(torch._foreach_norm(self._owned)).double().square().sum()
        return comm.all_reduce(square, self._group).sqrt()
