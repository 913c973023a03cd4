"""Summing the gradients of what several ranks of one copy of the model hold, and each computed in part."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import torch
from torch import Tensor

from megatron.optim.buckets import GradBuckets
from megatron.parallel import comm
from megatron.parallel.comm import Group
from megatron.parallel.mesh import Mesh
from megatron.parallel.ownership import slots
from megatron.parallel.shard import ShardSpec


class ReplicaGrads:
    """Norms under sequence parallelism, q/k norms, shared key/value heads: one all-reduce per set of sharers.

    Then a tied weight that the first and the last stage hold on two ranks. All get the same bits, as do the weights.
    """

    def __init__(self, specs: Mapping[str, ShardSpec], buckets: GradBuckets, mesh: Mesh) -> None:
        """Find the pieces. The sharers of one have the same shares of it, because they pack their buckets alike.

        Args:
            specs: of all parameters.
            buckets: of their gradients.
            mesh: the groups.

        """
        views: dict[tuple[int, ...], list[Tensor]] = defaultdict(list)
        for name, gradient in buckets.grads.items():
            shared = [piece for piece in specs[name].pieces if piece.partial and len(piece.replicas) > 1]
            for slot in slots(specs[name], buckets.shares[name], shared):
                views[slot.piece.replicas].append(slot.of(gradient))
        self._parts: list[tuple[Group, list[Tensor]]] = [(mesh.sharers(r), v) for r, v in sorted(views.items())]
        self._ends, self._tied = mesh.ends, [x for name, x in buckets.grads.items() if specs[name].tied]

    def reduce(self) -> None:
        """Give every sharer the whole gradient."""
        for group, views in self._parts:
            flat = comm.all_reduce(torch.cat([v.flatten() for v in views]), group)
            parts = flat.split([v.numel() for v in views])
            torch._foreach_copy_(views, [part.view_as(v) for part, v in zip(parts, views)])
        for gradient in self._tied:
            comm.all_reduce(gradient, self._ends)
