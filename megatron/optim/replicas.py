"""Sums gradients that several ranks of one model replica compute in part."""

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
    """All-reduces partial gradients: norms under sequence parallelism, q/k norms, key/value heads shared over TP.

    Also the gradients of a tied weight, over the ranks of the first and the last pipeline stage. Ranks that hold the
    same piece of a parameter also update the same range of it, because they pack their buckets alike.
    """

    def __init__(self, specs: Mapping[str, ShardSpec], buckets: GradBuckets, mesh: Mesh) -> None:
        views: dict[tuple[int, ...], list[Tensor]] = defaultdict(list)
        for name, gradient in buckets.grads.items():
            shared = [piece for piece in specs[name].pieces if piece.partial and len(piece.replicas) > 1]
            for slot in slots(specs[name], buckets.shares[name], shared):
                views[slot.piece.replicas].append(slot.of(gradient))
        self._partial: list[tuple[Group, list[Tensor]]] = [
            (mesh.sharers(tp_ranks), grads) for tp_ranks, grads in sorted(views.items())
        ]
        self._tied_group, self._tied = mesh.ends, [x for name, x in buckets.grads.items() if specs[name].tied]

    def reduce(self) -> None:
        """Sum the gradients in place: one all-reduce per set of ranks, and one per tied weight."""
        for group, grads in self._partial:
            flat = comm.all_reduce(torch.cat([grad.flatten() for grad in grads]), group)
            sums = flat.split([grad.numel() for grad in grads])
            torch._foreach_copy_(grads, [total.view_as(grad) for total, grad in zip(sums, grads)])
        for gradient in self._tied:
            comm.all_reduce(gradient, self._tied_group)
