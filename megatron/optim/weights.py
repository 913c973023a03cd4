"""Model weights in flat buffers with the layout of the gradient buckets.

A rank rounds its main parameters into its part of each buffer, and an all-gather gives it to the other ranks. The
all-gather may overlap with the next forward, in which every module then waits for its own weights.
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
    """All parameters of a rank, as views of flat buffers."""

    def __init__(self, params: Mapping[str, nn.Parameter], buckets: GradBuckets, mesh: Mesh, overlap: bool) -> None:
        """Move the parameters' values into the buffers.

        Args:
            params: by name; they become views of the buffers.
            buckets: of their gradients.
            mesh: the groups.
            overlap: let :meth:`gather` return before the all-gathers are complete.

        """
        self._overlap = overlap
        # This rank's shards of the weights, by name; shaped like their gradients.
        self.own: dict[str, Tensor] = {}
        self._buffers: list[tuple[Tensor, Tensor, Group]] = []  # the buffer, this rank's part, the ranks to gather over
        self._pending: dict[int, Pending] = {}
        self._buffer_of: dict[int, int] = {}  # index of the buffer, by id of the parameter
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
        """Start all-gathering the updated weights, in the order of forward.

        :attr:`own` must not be written, nor other ranks' weights read, before :meth:`wait`.
        """
        self.wait()
        for number in reversed(range(len(self._buffers))):
            buffer, part, group = self._buffers[number]
            if group.size > 1:
                self._pending[number] = comm.start_all_gather(part, group, buffer)
        if not self._overlap:
            self.wait()

    def wait(self, buffers: Iterable[int] | None = None) -> None:
        """Wait for the all-gathers of some buffers; by default of all."""
        for number in [*self._pending] if buffers is None else buffers:
            if number in self._pending:
                self._pending.pop(number).wait()

    def awaited_by(self, modules: Iterable[nn.Module]) -> None:
        """Register hooks that make each of the modules wait for its own weights before its forward."""
        for module in modules:
            own_buffers = sorted({self._buffer_of[id(parameter)] for parameter in module.parameters()})
            module.register_forward_pre_hook(lambda *_, buffers=own_buffers: self.wait(buffers))
