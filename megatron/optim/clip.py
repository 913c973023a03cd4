"""The global gradient norm, each parameter counted once whatever the layout."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import torch
from torch import Tensor

from megatron.parallel import comm
from megatron.parallel.mesh import Mesh
from megatron.parallel.shard import ShardSpec

BLOCK = 1 << 14
"""Elements of a CPU norm: torch's CPU kernel adds up in order and loses digits over more."""


class GradNorm:
    """The 2-norm over all parameters: pieces this rank owns, summed over the ranks that hold one model copy."""

    def __init__(self, specs: Mapping[str, ShardSpec], grads: Mapping[str, Tensor], mesh: Mesh) -> None:
        """Find the owned pieces.

        Args:
            specs: of all parameters.
            grads: their gradient buffers, local stored shape.
            mesh: the groups.

        """
        self._owned: dict[tuple[str, ...], list[Tensor]] = defaultdict(list)
        for name, spec in specs.items():
            view = grads[name].view(spec.local_view)
            blocks = [block for piece in spec.owned for block in _blocks(view[piece.local.slices])]
            self._owned[spec.model_axes] += blocks
        self._mesh = mesh
        self._zero = torch.zeros((), dtype=torch.float64, device=next(iter(grads.values())).device)

    def compute(self) -> Tensor:
        """The norm, an fp64 scalar; not finite when any gradient is not."""
        total = self._zero
        for axes, blocks in self._owned.items():
            square = torch.stack(torch._foreach_norm(blocks)).double().square().sum() if blocks else self._zero.clone()
            total = total + comm.all_reduce(square, self._mesh.group(*axes))
        return total.sqrt()


def _blocks(piece: Tensor) -> list[Tensor]:
    return [piece] if piece.is_cuda else list(piece.flatten().split(BLOCK))
