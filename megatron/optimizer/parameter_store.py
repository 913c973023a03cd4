"""Parameter stores: the weights of a rank in flat buffers, gathered before each use of a block.

The buffers have the layout of the gradient buckets. A rank rounds its shards of the main parameters into its part of
each buffer, and an all-gather gives the part to the ranks that share the bucket.

* :class:`ParameterStore` (ZeRO-0, 1 and 2) keeps whole buffers. They are gathered once after an update, which may
  overlap with the next forward pass.
* :class:`ShardedParameterStore` (ZeRO-3, arXiv 1910.02054; FSDP, arXiv 2304.11277) keeps this rank's parts. A whole
  buffer exists only while a block uses it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from megatron.config.parallel import ParallelConfig
from megatron.distributed import comm
from megatron.distributed.comm import Group, Pending
from megatron.distributed.host_memory import CopyStream, host_buffer
from megatron.distributed.param_layout import ParamShard
from megatron.optimizer.grad_buffer import BucketLayout, GradBuffer

Initialize = Callable[[str, Tensor], None]
"""Writes the initial values of the parameter ``name`` into a zeroed tensor of its local shape."""


@dataclass
class WeightBuffer:
    """The weights of a bucket."""

    # Flat, of all ranks that share the bucket. In a sharded store its memory is freed while no block uses it.
    whole: Tensor
    # What this rank keeps and updates, [elements / shards].
    part: Tensor
    # The ranks to gather over.
    group: Group
    # Parameters, their places in ``whole``, and what they are while its memory is free: NaN.
    views: list[tuple[nn.Parameter, Tensor, Tensor]] = field(default_factory=list)
    pending: Pending | None = None  # the all-gather in flight
    # If ``part`` is in host memory: its place in ``whole``, the stream of copies there, and an event after the last.
    place: Tensor | None = None
    copies: CopyStream | None = None
    copied: torch.cuda.Event | None = None
    is_whole: bool = True  # or will be once ``pending`` is complete
    pinned: bool = False  # not to be freed

    def start_gather(self) -> None:
        """Start to gather the parts of all ranks."""
        self.is_whole = True
        part = self.part
        with nullcontext() if self.copies is None else self.copies.ordered():
            if self.place is not None:
                part = self.place.copy_(self.part, non_blocking=True)
            if self.group.size > 1:  # after the copy, on its stream
                self.pending = comm.start_all_gather(part, self.group, self.whole)
        self.copied = None if self.copies is None else self.copies.mark()

    def wait(self) -> None:
        """Wait for the all-gather in flight, if there is one."""
        if self.pending is not None:
            self.pending.wait()
            self.pending = None
        if self.copies is not None and self.copied is not None:
            self.copies.wait(self.copied)
            self.copied = None


class ParameterStore:
    """Holds the weights of all blocks, and makes them complete when a block uses them.

    After an update :meth:`start_gather` starts to exchange the new weights. :meth:`gather` precedes every use of a
    block. The buffers are as large as the model, and nothing is freed after the use.
    """

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
        # This rank's shards of the weights that are trained, by name; shaped like their gradients.
        self.shards: dict[str, Tensor] = {}
        # Those of frozen weights, and their elements.
        self.frozen: dict[str, Tensor] = {}
        self.frozen_shards: dict[str, ParamShard] = {}
        self.buffers: list[WeightBuffer] = []
        self._buffer_of: dict[int, WeightBuffer] = {}  # by id of the parameter
        self._buffers_of: dict[nn.Module, list[WeightBuffer]] = {}  # by block
        for layout in (*(bucket.layout for bucket in buckets.buckets), *buckets.frozen):
            buffer = self._add_buffer(params, layout, initialize)
            for name, spec in layout.specs.items():
                if (share := layout.shard(name)) is not None:
                    held = layout.shard_view(buffer.part, name, share)
                    if spec.frozen:
                        self.frozen[name], self.frozen_shards[name] = held, share
                    else:
                        self.shards[name] = held
        self.shards = {name: self.shards[name] for name in buckets.shards}

    def _add_buffer(
        self, params: Mapping[str, nn.Parameter], layout: BucketLayout, initialize: Initialize | None
    ) -> WeightBuffer:
        """Move the parameters of a bucket into a buffer."""
        first, group = params[next(iter(layout.specs))], layout.gather
        whole = torch.zeros(layout.packing.size, dtype=first.dtype, device=first.device)
        buffer = WeightBuffer(whole, whole.view(group.size, -1)[group.rank], group)
        nan = whole.new_full((), torch.nan if whole.is_floating_point() else 0)
        for name in layout.specs:
            view = layout.view(whole, name)
            if initialize is None:
                view.copy_(params[name].detach())
            else:
                initialize(name, view)
            params[name].data = view
            buffer.views.append((params[name], view, nan.expand(view.shape)))
            self._buffer_of[id(params[name])] = buffer
        self._adopt(buffer)
        self.buffers.append(buffer)
        return buffer

    @property
    def on_host(self) -> bool:
        """True if :attr:`shards` are in host memory."""
        return self._config.offloads_weights

    def _adopt(self, buffer: WeightBuffer) -> None:
        """Take over a buffer that holds its initial values."""

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

    def _buffers(self, block: nn.Module) -> list[WeightBuffer]:
        if block not in self._buffers_of:
            found = {id(buffer): buffer for buffer in (self._buffer_of[id(p)] for p in block.parameters())}
            self._buffers_of[block] = list(found.values())
        return self._buffers_of[block]


class ShardedParameterStore(ParameterStore):
    """Holds this rank's parts of the weights, and whole buffers only around their use (ZeRO-3).

    While a block runs forward or backward, the weights of the next ones are gathered (``param_gather_prefetch``
    blocks; a norm between blocks goes with the next one). They are freed after forward, and gathered again for
    backward, except those of the last blocks, which backward would gather first. If ``reshard_after_forward`` is off,
    all are kept until :meth:`release` at the end of the step. Parameters of a freed buffer read as NaN.

    The storage of a buffer is freed and allocated again, so the parameters and what autograd has saved of them are
    valid views of it in backward.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        """Move the parameters' parts into the buffers; see :class:`ParameterStore`."""
        self._copies: CopyStream | None = None  # of parts in host memory (``param_cpu_offload``)
        super().__init__(*arguments, **options)
        self._reshards = self._config.reshards_after_forward
        self._backward: nn.Module | None = None  # the block whose backward runs
        self._kept_for_backward: set[nn.Module] = set()  # not freed after a forward that backward follows

    def _adopt(self, buffer: WeightBuffer) -> None:
        if self._config.offloads_weights:
            if self._copies is None:
                self._copies = CopyStream(buffer.part.device)
            host = host_buffer(buffer.part.numel(), buffer.part.dtype, buffer.part.device)
            buffer.place, buffer.part, buffer.copies = buffer.part, host.copy_(buffer.part), self._copies
            self._free(buffer)
        elif buffer.group.size > 1:
            buffer.part = buffer.part.clone()
            self._free(buffer)

    def start_gather(self) -> None:
        """Free all whole buffers, which an update has made obsolete. Nothing is gathered before its use."""
        self.release()

    def gather(self, block: nn.Module) -> None:
        """Make all weights of ``block`` complete on this rank. Call it before every use of the block."""
        self._start(block)
        super().gather(block)

    def gather_before_use(self, blocks: Sequence[nn.Module]) -> None:
        """Register hooks around the forward and backward of the blocks of a chunk, given in the order of forward."""
        for index, block in enumerate(blocks):
            block.register_forward_pre_hook(partial(self._before_forward, blocks, index))
            block.register_forward_hook(partial(self._after_forward, blocks, index))
        before_last = (block for block in self._prefetched(reversed(blocks[:-1])) if reads_weights_in_backward(block))
        self._kept_for_backward |= {blocks[-1], *before_last}

    @contextmanager
    def gathered(self, blocks: Iterable[nn.Module]) -> Iterator[None]:
        """Keep all weights of these blocks complete inside; free all weights at the end."""
        for block in blocks:
            self.gather(block)
            for buffer in self._buffers(block):
                buffer.pinned = True
        try:
            yield
        finally:
            for buffer in self.buffers:
                buffer.pinned = False
            self.release()

    def release(self) -> None:
        """Free all whole buffers."""
        self._backward = None
        for buffer in self.buffers:
            self._free(buffer)

    def _start(self, block: nn.Module) -> None:
        for buffer in self._buffers(block):
            if not buffer.is_whole:
                buffer.whole.untyped_storage().resize_(buffer.whole.nbytes)
                for param, view, _ in buffer.views:
                    param.data = view
                buffer.start_gather()

    def _free(self, buffer: WeightBuffer) -> None:
        if (buffer.group.size == 1 and buffer.place is None) or buffer.pinned or not buffer.is_whole:
            return
        buffer.wait()
        buffer.is_whole = False
        for param, _, nan in buffer.views:
            param.data = nan
        buffer.whole.untyped_storage().resize_(0)

    def _before_forward(
        self, blocks: Sequence[nn.Module], index: int, block: nn.Module, inputs: tuple[Any, ...]
    ) -> None:
        self._start(block)
        last = len(blocks) - 1
        if self._backward in blocks:  # recomputation: the weights of later blocks have had their use
            last = blocks.index(self._backward)
        for following in self._prefetched(blocks[index + 1 : last + 1]):
            self._start(following)
        super().gather(block)
        if torch.is_grad_enabled():
            for x in _differentiable(inputs):
                x.register_hook(partial(self._after_backward, block))

    def _after_forward(
        self, blocks: Sequence[nn.Module], index: int, block: nn.Module, inputs: tuple[Any, ...], outputs: Any
    ) -> None:
        differentiates = torch.is_grad_enabled()
        if differentiates and reads_weights_in_backward(block):
            passed = {id(x) for x in _differentiable(inputs)}  # a norm returns its input, too
            for y in (y for y in _differentiable(outputs) if id(y) not in passed):
                y.register_hook(partial(self._before_backward, blocks, index))
        # Backward follows recomputation.
        kept = differentiates and (block in self._kept_for_backward or self._backward is not None)
        if self._reshards and not kept:
            self._free_block(block)

    def _before_backward(self, blocks: Sequence[nn.Module], index: int, gradient: Tensor) -> None:
        if self._backward is blocks[index]:
            return
        if self._reshards and self._backward is not None:  # its backward is done; free it before more is gathered
            self._free_block(self._backward)
        self._backward = blocks[index]
        self._start(blocks[index])
        for following in self._prefetched(reversed(blocks[:index])):
            if reads_weights_in_backward(following):
                self._start(following)
        super().gather(blocks[index])

    def _after_backward(self, block: nn.Module, gradient: Tensor) -> None:
        if self._backward is block:
            self._backward = None
        if self._reshards:
            self._free_block(block)

    def _prefetched(self, blocks: Iterable[nn.Module]) -> Iterator[nn.Module]:
        """Yield those of the next blocks that are gathered while another one computes.

        A block with ``joins_next``, such as a norm, is gathered with the next one, and does not count.
        """
        left = self._config.param_gather_prefetch
        for block in blocks:
            if not getattr(block, "joins_next", False):
                if left == 0:
                    return
                left -= 1
            yield block

    def _free_block(self, block: nn.Module) -> None:
        for buffer in self._buffers(block):
            self._free(buffer)


def reads_weights_in_backward(block: nn.Module) -> bool:
    """Return True if the backward of a block needs its weights; one that does not has an attribute of this name."""
    return bool(getattr(block, "reads_weights_in_backward", True))


def _differentiable(values: Any) -> list[Tensor]:
    """Return the activations in a nest of tuples that require a gradient."""
    tensors = [x for x in tree_leaves(values) if isinstance(x, Tensor) and not isinstance(x, nn.Parameter)]
    return [x for x in tensors if x.requires_grad]
