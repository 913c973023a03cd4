"""The weights a model computes with, in flat buffers beside those of their gradients.

A rank rounds the masters of its share into its part of each buffer; the others get it by an all-gather, which may go on
while the next forward begins: then every module waits for its own weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from megatron.optim.buckets import GradBuckets, view_of
from megatron.parallel import comm
from megatron.parallel.comm import Group, Pending
from megatron.parallel.mesh import Mesh


class Weights:
    """All parameters of a rank, as views of flat buffers.

    Attributes:
        own: this rank's shares of the weights, by name, shaped as the gradients are.
    """

    def __init__(self, params: Mapping[str, nn.Parameter], buckets: GradBuckets, mesh: Mesh, overlap: bool) -> None:
        """Move the parameters' values into the buffers.

        Args:
            params: by name; their memory becomes part of the buffers.
            buckets: of their gradients.
            mesh: the groups.
            overlap: whether :meth:`gather` returns before the weights are there.

        """
        self._overlap = overlap
        self.own: dict[str, Tensor] = {}
        self._buffers: list[tuple[Tensor, Tensor, Group]] = []
        self._pending: dict[int, Pending] = {}
        self._buffer_of: dict[int, int] = {}
        for number, bucket in enumerate(buckets.buckets):
            names, shards = list(bucket.specs), bucket.room.shards
            first = params[names[0]]
            buffer = torch.zeros(bucket.room.packing.size, dtype=first.dtype, device=first.device)
            for name in names:
                view = view_of(buffer, bucket.room.packing, name, bucket.specs[name])
                view.copy_(params[name].detach())
                params[name].data = view
            part = buffer.view(shards.size, -1)[shards.rank]
            self._buffers.append((buffer, part, mesh.gathers(*bucket.specs[names[0]].reduce_axes)))
            self._buffer_of |= {id(params[name]): number for name in names}
            self.own |= {name: buckets.share_of(part, name) for name in names if name in buckets.shares}
        self.own = {name: self.own[name] for name in buckets.shares}

    def gather(self) -> None:
        """Give every rank the weights of all; those that forward uses first go first.

        Nobody may write into :attr:`own`, nor read other ranks' weights, before :meth:`wait`.
        """
        self.wait()
        for number in reversed(range(len(self._buffers))):
            buffer, part, group = self._buffers[number]
            if group.size > 1:
                self._pending[number] = comm.start_all_gather(part, group, buffer)
        if not self._overlap:
            self.wait()

    def wait(self, buffers: Iterable[int] | None = None) -> None:
        """Wait until the weights in some buffers are there; by default in all."""
        for number in [*self._pending] if buffers is None else buffers:
            if number in self._pending:
                self._pending.pop(number).wait()

    def awaited_by(self, modules: Iterable[nn.Module]) -> None:
        """Have every one of these modules wait for its weights, whenever it is called."""
        for module in modules:
            buffers = sorted({self._buffer_of[id(parameter)] for parameter in module.parameters()})
            module.register_forward_pre_hook(lambda *_, wanted=buffers: self.wait(wanted))
