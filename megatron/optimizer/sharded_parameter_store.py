"""Sharded parameter store (ZeRO-3, arXiv 1910.02054; FSDP, arXiv 2304.11277).

A rank keeps its parts of the weights. A whole buffer exists only while a block uses it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from megatron.distributed import comm
from megatron.distributed.comm import Group
from megatron.distributed.host_memory import CopyStream, host_buffer
from megatron.optimizer.parameter_store import ParameterStore, WeightBuffer


class ShardedWeightBuffer(WeightBuffer):
    """The weights of a bucket, of which this rank keeps its part; the memory of the whole is freed and allocated again.

    Parameters of a freed buffer read as NaN. They, and what autograd has saved of them, are views of the storage, so
    they are valid again once it is allocated.
    """

    def __init__(
        self,
        whole: Tensor,
        group: Group,
        views: Sequence[tuple[nn.Parameter, Tensor]],
        copies: CopyStream | None,
    ) -> None:
        """Take over weights that have their initial values, and free them.

        Args:
            whole: flat, of all ranks that share the bucket.
            group: the ranks to gather over.
            views: parameters, and their places in ``whole``.
            copies: of the part, if it is kept in host memory.
        """
        super().__init__(whole, whole.view(group.size, -1)[group.rank], group, views)
        nan = whole.new_full((), torch.nan if whole.is_floating_point() else 0)
        self._nans = [nan.expand(view.shape) for _, view in views]
        # The place of the part in ``whole``, and an event after the last copy to there.
        self._place, self._copies = self.part, copies
        self._copied: torch.cuda.Event | None = None
        self.is_whole = True  # or will be once ``pending`` is complete
        self.pinned = False  # not to be freed
        if copies is not None:
            self.part = host_buffer(self.part.numel(), self.part.dtype, self.part.device).copy_(self.part)
        elif group.size > 1:
            self.part = self.part.clone()
        self.free()

    def start_gather(self) -> None:
        """Start to gather the parts of all ranks."""
        self.is_whole = True
        part = self.part
        with nullcontext() if self._copies is None else self._copies.ordered():
            if self._copies is not None:
                part = self._place.copy_(self.part, non_blocking=True)
            if self.group.size > 1:  # after the copy, on its stream
                self.pending = comm.start_all_gather(part, self.group, self.whole)
        self._copied = None if self._copies is None else self._copies.mark()

    def wait(self) -> None:
        """Wait for the all-gather in flight, if there is one."""
        super().wait()
        if self._copies is not None and self._copied is not None:
            self._copies.wait(self._copied)
            self._copied = None

    def gather_if_freed(self) -> None:
        """Allocate the whole buffer and start to gather it, unless it is there."""
        if not self.is_whole:
            self.whole.untyped_storage().resize_(self.whole.nbytes)
            for param, view in self.views:
                param.data = view
            self.start_gather()

    def free(self) -> None:
        """Free the memory of the whole buffer, unless it is this rank's part or pinned."""
        if (self.group.size == 1 and self._copies is None) or self.pinned or not self.is_whole:
            return
        self.wait()
        self.is_whole = False
        for (param, _), nan in zip(self.views, self._nans):
            param.data = nan
        self.whole.untyped_storage().resize_(0)


class ShardedParameterStore(ParameterStore):
    """Holds this rank's parts of the weights, and whole buffers only around their use (ZeRO-3).

    While a block runs forward or backward, the weights of the next ones are gathered (``param_gather_prefetch``
    blocks; a norm between blocks goes with the next one). They are freed after forward, and gathered again for
    backward, except those of the last blocks, which backward would gather first. If ``reshard_after_forward`` is off,
    all are kept until :meth:`release` at the end of the step.
    """

    buffers: Sequence[ShardedWeightBuffer]

    def __init__(self, *arguments: Any, **options: Any) -> None:
        """Move the parameters' parts into the buffers; see :class:`ParameterStore`."""
        self._copies: CopyStream | None = None  # of parts in host memory (``param_cpu_offload``)
        super().__init__(*arguments, **options)
        self._reshards = self._config.reshards_after_forward
        self._backward: nn.Module | None = None  # the block whose backward runs
        self._kept_for_backward: set[nn.Module] = set()  # not freed after a forward that backward follows

    def _buffer(self, whole: Tensor, group: Group, views: Sequence[tuple[nn.Parameter, Tensor]]) -> ShardedWeightBuffer:
        """Return the buffer of weights that have their initial values."""
        if self._config.offloads_weights:
            self.on_host, self._copies = True, self._copies or CopyStream(whole.device)
        return ShardedWeightBuffer(whole, group, views, self._copies)

    def _buffers(self, block: nn.Module) -> Sequence[ShardedWeightBuffer]:
        return [self.buffers[i] for i in self._indices(block)]

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
            buffer.free()

    def _start(self, block: nn.Module) -> None:
        for buffer in self._buffers(block):
            buffer.gather_if_freed()

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
        previous, self._backward = self._backward, blocks[index]
        if self._reshards and previous is not None:  # its backward is done; free it before more is gathered
            self._free_block(previous)
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
        """Free the buffers of a block, except those that it shares with the one whose backward runs."""
        used = [] if self._backward in (None, block) else self._indices(self._backward)
        for index in self._indices(block):
            if index not in used:
                self.buffers[index].free()


def reads_weights_in_backward(block: nn.Module) -> bool:
    """Return True if the backward of a block needs its weights; one that does not has an attribute of this name."""
    return bool(getattr(block, "reads_weights_in_backward", True))


def _differentiable(values: Any) -> list[Tensor]:
    """Return the activations in a nest of tuples that require a gradient."""
    tensors = [x for x in tree_leaves(values) if isinstance(x, Tensor) and not isinstance(x, nn.Parameter)]
    return [x for x in tensors if x.requires_grad]
