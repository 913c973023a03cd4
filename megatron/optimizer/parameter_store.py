"""Parameter store: the weights of a rank in flat buffers, gathered before each use of a block.

The buffers have the layout of the gradient buckets. A rank rounds its shards of the main parameters into its part of
each buffer, and an all-gather gives the part to the ranks that share the bucket (ZeRO-1 and 2). The all-gathers may
overlap with the next forward pass, in which every block waits for its own weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from megatron.distributed import comm
from megatron.distributed.comm import Group, Pending
from megatron.distributed.mesh import Mesh
from megatron.optimizer.grad_buffer import GradBuffer, param_view


class ParameterStore:
    """Holds the weights of all blocks, and makes them complete when a block uses them.

    After an update :meth:`start_gather` starts to exchange the new weights. :meth:`gather` precedes every use of a
    block. The buffers are as large as the model, so nothing is freed after the use.
    """

    def __init__(self, params: Mapping[str, nn.Parameter], buckets: GradBuffer, mesh: Mesh, overlap: bool) -> None:
        """Move the parameters' values into the buffers.

        Args:
            params: by name; they become views of the buffers.
            buckets: of their gradients.
            mesh: the groups.
            overlap: let :meth:`start_gather` return before the all-gathers are complete. Blocks must then be gathered
                before their use; see :meth:`gather_before_forward`.

        """
        self._overlap = overlap
        # This rank's shards of the weights, by name; shaped like their gradients.
        self.shards: dict[str, Tensor] = {}
        self._buffers: list[tuple[Tensor, Tensor, Group]] = []  # the buffer, this rank's part, the ranks to gather over
        self._pending: dict[int, Pending] = {}  # all-gathers, by index of the buffer
        self._buffer_of: dict[int, int] = {}  # index of the buffer, by id of the parameter
        self._buffers_of: dict[nn.Module, tuple[int, ...]] = {}  # by block, in ascending order
        for index, bucket in enumerate(buckets.buckets):
            names, group = list(bucket.specs), bucket.layout.shards
            first = params[names[0]]
            buffer = torch.zeros(bucket.layout.packing.size, dtype=first.dtype, device=first.device)
            for name in names:
                view = param_view(buffer, bucket.layout.packing, name, bucket.specs[name])
                view.copy_(params[name].detach())
                params[name].data = view
            part = buffer.view(group.size, -1)[group.rank]
            self._buffers.append((buffer, part, mesh.weight_gather_group(*bucket.specs[names[0]].reduce_axes)))
            self._buffer_of |= {id(params[name]): index for name in names}
            self.shards |= {name: buckets.shard_view(part, name) for name in names if name in buckets.shards}
        self.shards = {name: self.shards[name] for name in buckets.shards}

    def start_gather(self) -> None:
        """Start all-gathering the updated weights, in the order of forward.

        :attr:`shards` must not be written, nor other ranks' weights read, before :meth:`wait` or :meth:`gather`.
        """
        self.wait()
        for index in reversed(range(len(self._buffers))):
            buffer, part, group = self._buffers[index]
            if group.size > 1:
                self._pending[index] = comm.start_all_gather(part, group, buffer)
        if not self._overlap:
            self.wait()

    def gather(self, block: nn.Module) -> None:
        """Wait until all weights of ``block`` are complete on this rank. Call it before every use of the block."""
        if not self._pending:
            return
        if block not in self._buffers_of:
            self._buffers_of[block] = tuple(sorted({self._buffer_of[id(p)] for p in block.parameters()}))
        self._wait_for(self._buffers_of[block])

    def gather_before_forward(self, blocks: Iterable[nn.Module]) -> None:
        """Register hooks that :meth:`gather` each block before its forward."""
        for block in blocks:
            block.register_forward_pre_hook(lambda used, _: self.gather(used))

    def wait(self) -> None:
        """Wait for all weights."""
        self._wait_for(tuple(self._pending))

    def discard(self) -> None:
        """Forget all-gathers that were captured, and so never ran."""
        self._pending.clear()

    def _wait_for(self, buffers: Iterable[int]) -> None:
        for index in buffers:
            if index in self._pending:
                self._pending.pop(index).wait()
