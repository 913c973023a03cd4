"""Parameter store: the weights of a rank in flat buffers, gathered before each use of a block.

The buffers have the layout of the gradient buckets. A rank rounds its shards of the main parameters into its part of
each buffer, and an all-gather gives the part to the ranks that share the bucket.

:class:`ParameterStore` (ZeRO-0, 1 and 2) keeps whole buffers. They are gathered once after an update, which may overlap
with the next forward pass. That of ZeRO-3 (:mod:`megatron.optimizer.sharded_parameter_store`) gathers a block around
its use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megatron.config.parallel import ParallelConfig
from megatron.distributed import comm
from megatron.distributed.comm import Group, Pending
from megatron.distributed.param_layout import ParamShard
from megatron.optimizer.grad_buffer import BucketLayout, GradBuffer

Initialize = Callable[[str, Tensor], None]
"""Writes the initial values of the parameter ``name`` into a zeroed tensor of its local shape."""


@dataclass
class WeightBuffer:
    """The weights of a bucket."""

    # Flat, of all ranks that share the bucket.
    whole: Tensor
    # What this rank updates, [elements / shards].
    part: Tensor
    # The ranks to gather over.
    group: Group
    # Parameters, and their places in ``whole``.
    views: Sequence[tuple[nn.Parameter, Tensor]]
    pending: Pending | None = None  # the all-gather in flight

    def start_gather(self) -> None:
        """Start to gather the parts of all ranks."""
        if self.group.size > 1:
            self.pending = comm.start_all_gather(self.part, self.group, self.whole)

    def wait(self) -> None:
        """Wait for the all-gather in flight, if there is one."""
        if self.pending is not None:
            self.pending.wait()
            self.pending = None


class ParameterStore:
    """Holds the weights of all blocks, and makes them complete when a block uses them.

    After an update :meth:`start_gather` starts to exchange the new weights. :meth:`gather` precedes every use of a
    block. The buffers are as large as the model, and nothing is freed after the use.
    """

    buffers: Sequence[WeightBuffer]
    # True if :attr:`shards` are in host memory.
    on_host = False

    def __init__(
        self,
        params: Mapping[str, nn.Parameter],
        buckets: GradBuffer,
        config: ParallelConfig,
        initialize: Initialize | None = None,
    ) -> None:
        """Move the parameters into the buffers, one buffer at a time.

        Args:
            params: by name; they become views of the buffers.
            buckets: of their gradients.
            config: overlap of gathering; for a sharded store also when weights are freed, and how many blocks are
                prefetched.
            initialize: writes the initial values; None to take those of ``params``.
        """
        self._config = config
        layouts = [*(bucket.layout for bucket in buckets.buckets), *buckets.without_gradients]
        self.buffers = [self._move(params, layout, initialize) for layout in layouts]
        # By id of the parameter, and by block: indices of the buffers.
        self._index_of = {id(param): i for i, buffer in enumerate(self.buffers) for param, _ in buffer.views}
        self._indices_of: dict[nn.Module, list[int]] = {}
        # This rank's shards of the weights that are trained, by name; shaped like their gradients.
        self.shards: dict[str, Tensor] = {}
        # Those of frozen weights, and their elements.
        self.frozen: dict[str, Tensor] = {}
        self.frozen_shards: dict[str, ParamShard] = {}
        for layout, buffer in zip(layouts, self.buffers):
            for name, spec in layout.specs.items():
                if (share := layout.shard(name)) is not None:
                    held = layout.shard_view(buffer.part, name, share)
                    if spec.frozen:
                        self.frozen[name], self.frozen_shards[name] = held, share
                    else:
                        self.shards[name] = held
        self.shards = {name: self.shards[name] for name in buckets.shards}

    def _move(
        self, params: Mapping[str, nn.Parameter], layout: BucketLayout, initialize: Initialize | None
    ) -> WeightBuffer:
        """Move the parameters of a bucket into a buffer."""
        first, views = params[next(iter(layout.specs))], []
        whole = torch.zeros(layout.packing.size, dtype=first.dtype, device=first.device)
        for name in layout.specs:
            view = layout.view(whole, name)
            if initialize is None:
                view.copy_(params[name].detach())
            else:
                initialize(name, view)
            params[name].data = view
            views.append((params[name], view))
        return self._buffer(whole, layout.gather, views)

    def _buffer(self, whole: Tensor, group: Group, views: Sequence[tuple[nn.Parameter, Tensor]]) -> WeightBuffer:
        """Return the buffer of weights that have their initial values."""
        return WeightBuffer(whole, whole.view(group.size, -1)[group.rank], group, views)

    def start_gather(self) -> None:
        """Start all-gathering the updated weights, in the order of forward.

        :attr:`shards` must not be written, nor other ranks' weights read, before :meth:`wait` or :meth:`gather`.
        """
        self.wait()
        for buffer in reversed(self.buffers):
            buffer.start_gather()
        if not self._config.overlap_param_gather:
            self.wait()

    def gather(self, block: nn.Module) -> None:
        """Wait until all weights of ``block`` are complete on this rank. Call it before every use of the block."""
        for buffer in self._buffers(block):
            buffer.wait()

    def gather_before_use(self, blocks: Sequence[nn.Module]) -> None:
        """Register hooks that :meth:`gather` the blocks of a chunk, given in the order of forward, before their use."""
        for block in blocks:
            block.register_forward_pre_hook(lambda used, _: self.gather(used))

    @contextmanager
    def gathered(self, blocks: Iterable[nn.Module]) -> Iterator[None]:
        """Keep all weights of these blocks complete inside."""
        self.wait()
        yield

    def wait(self) -> None:
        """Wait for all weights that are being gathered."""
        for buffer in reversed(self.buffers):
            buffer.wait()

    def release(self) -> None:
        """Free what a step has gathered."""

    def discard(self) -> None:
        """Forget all-gathers that were captured, and so never ran."""
        for buffer in self.buffers:
            buffer.pending = None

    def _buffers(self, block: nn.Module) -> Sequence[WeightBuffer]:
        return [self.buffers[i] for i in self._indices(block)]

    def _indices(self, block: nn.Module) -> list[int]:
        if block not in self._indices_of:
            self._indices_of[block] = [*dict.fromkeys(self._index_of[id(p)] for p in block.parameters())]
        return self._indices_of[block]
