"""Activation offload: tensors that the first blocks of a chunk save for backward are kept in host memory.

Hooks on autograd's saved tensors collect the memory that a block keeps. After its forward a side stream copies it to
the host. The device's memory is freed when the block after next begins: by then the copy has had a block's time. In
backward, the first saved tensor that a block takes starts the copies of the block before it, so these overlap with the
block's backward as well. When backward begins, the memory of the last blocks stays if they are taken next.

Left on the device are weights, rotary tables, and memory of fewer than ``min_elements`` elements. Saved tensors that
are views of the same memory (q, k and v of one projection) are copied once.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron.config.training import TrainingConfig
from megatron.distributed.host_memory import CopyStream, host_buffer

BlockContext = Callable[[int], AbstractContextManager[object]]
"""Returns the context in which to run the forward of a chunk's block, by its position in the chunk."""

MAX_UNUSED = 1.25
"""Largest ratio of a reused host buffer to what it holds. Experts keep other numbers of rows in every step."""

MAX_UNRELEASED = 1
"""Blocks whose copies may be incomplete when the next one begins."""


class HostPool:
    """Host buffers that offloaded memory uses in turn; they live as long as the run."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: list[Tensor] = []
        # Of all buffers, in bytes.
        self.size = 0

    def take(self, size: int) -> Tensor:
        """Return a buffer of at least ``size`` bytes, with any content."""
        fitting = [n for n, buffer in enumerate(self._free) if size <= buffer.numel() <= MAX_UNUSED * size]
        if fitting:
            return self._free.pop(min(fitting, key=lambda n: self._free[n].numel()))
        self.size += size
        return host_buffer(size, torch.uint8, self._device)

    def put(self, buffer: Tensor) -> None:
        """Let others use a buffer. All copies use one stream, so those in flight are done before."""
        self._free.append(buffer)


class SavedRange:
    """A range of memory that saved tensors of a block refer to: on the device, on the host, or both."""

    def __init__(self, saved: Tensor, start: int, stop: int) -> None:
        self.start, self.stop, self.dtype = start, stop, saved.dtype
        self.device: Tensor | None = saved.as_strided((stop - start,), (1,), start)
        self.host: Tensor | None = None

    def view(self, of: Tensor, size: torch.Size, stride: tuple[int, ...], offset: int) -> Tensor:
        """Return a saved tensor in the device memory ``of``."""
        return of.as_strided(size, stride, of.storage_offset() + offset - self.start)


@dataclass
class _Saved:
    """Stands in for a saved tensor in autograd's graph."""

    block: SavedBlock
    memory: SavedRange
    place: tuple[torch.Size, tuple[int, ...], int]


@dataclass(eq=False)
class SavedBlock:
    """Tensors that one block saves for the backward of one micro-batch."""

    offload: ActivationOffload
    # The block before it in the chunk.
    previous: SavedBlock | None
    # Copied to the host; only autograd's graph keeps them alive after that.
    ranges: list[weakref.ref[SavedRange]] = field(default_factory=list)
    _fetched: bool = False
    _event: torch.cuda.Event | None = None

    def fetch(self) -> None:
        """Start copying the memory back, unless it is there."""
        if self._fetched:
            return
        self._fetched = True
        self.offload.release(0, kept=(self, self.previous))
        missing = [found for ref in self.ranges if (found := ref()) is not None and found.device is None]
        for found in missing:
            if found.host is not None:
                found.device = torch.empty_like(found.host, device=self.offload.device)
        with self.offload.copies.ordered():
            for found in missing:
                if found.device is not None and found.host is not None:
                    found.device.copy_(found.host, non_blocking=True)
        self._event = self.offload.copies.mark()

    def take(self, saved: _Saved) -> Tensor:
        """Return a saved tensor on the device, and start copying the memory of the block before."""
        self.fetch()
        self.offload.copies.wait(self._event)
        if self.previous is not None:
            self.previous.fetch()
        if saved.memory.device is None:
            raise RuntimeError("an offloaded activation is taken after its memory was released")
        return saved.memory.view(saved.memory.device, *saved.place)


class _Copied(NamedTuple):
    """Memory of a block that is on its way to the host."""

    block: SavedBlock
    event: torch.cuda.Event | None
    ranges: list[tuple[weakref.ref[SavedRange], Tensor]]


class ActivationOffload:
    """Offloads the activations of a rank's first blocks of every chunk."""

    def __init__(self, device: torch.device, num_blocks: int, min_elements: int) -> None:
        """Create the side stream.

        Args:
            device: of the activations.
            num_blocks: blocks of every chunk to offload.
            min_elements: fewer elements are left on the device.
        """
        self.device, self.num_blocks, self.min_elements = device, num_blocks, min_elements
        self.copies, self.pool = CopyStream(device), HostPool(device)
        self._left_out: set[int] = set()  # storages, which need not have memory all the time
        # Blocks, the events after the copies of their memory to the host, and this memory, which must not be reused
        # before. Its ranges are gone if backward is done with them.
        self._unreleased: deque[_Copied] = deque()

    @classmethod
    def from_config(cls, config: TrainingConfig, device: torch.device) -> ActivationOffload | None:
        """Return the offload that the flags select."""
        layers = config.cpu_offloading_num_layers
        return cls(device, layers, config.min_offloaded_tensor_size) if layers else None

    def leave_out(self, tensors: Iterable[Tensor]) -> None:
        """Leave saved tensors in the storage of these on the device, such as weights."""
        self._left_out |= {tensor.untyped_storage()._cdata for tensor in tensors}

    def blocks(self, tables: Iterable[Tensor]) -> BlockContext:
        """Return the contexts for a forward of a chunk, in which saved tensors in the storage of ``tables`` stay."""
        if not torch.is_grad_enabled():
            return nullcontext
        stays = {table.untyped_storage()._cdata for table in tables}
        previous: SavedBlock | None = None

        def context(number: int) -> AbstractContextManager[None]:
            nonlocal previous
            self.release(MAX_UNRELEASED)
            if number > self.num_blocks:
                return nullcontext()
            previous = SavedBlock(self, previous)
            # the block after the last one only starts the copies back
            return self._saving(previous, stays) if number < self.num_blocks else _prefetching(previous)

        return context

    def release(self, left: int, kept: Sequence[SavedBlock | None] = ()) -> None:
        """Free the device memory of all but the newest ``left`` blocks, once it is copied.

        Backward frees that of the blocks ``kept``, which it takes next.
        """
        while len(self._unreleased) > left:
            block, event, copied = self._unreleased.popleft()
            self.copies.wait(event)
            for ref, _ in copied:
                if (memory := ref()) is not None and block not in kept:
                    memory.device = None

    @contextmanager
    def _saving(self, block: SavedBlock, stays: set[int]) -> Iterator[None]:
        found: dict[int, list[SavedRange]] = {}

        def pack(saved: Tensor) -> Tensor | _Saved:
            storage, start = saved.untyped_storage()._cdata, int(saved.storage_offset())
            if storage in stays or storage in self._left_out or saved.device.type != self.device.type:
                return saved.detach()  # an output would refer to its node, a cycle
            stop = start + 1 + sum((size - 1) * stride for size, stride in zip(saved.shape, saved.stride()))
            if stop - start > saved.numel():  # with gaps, which other saved tensors fill
                start, stop = 0, saved.untyped_storage().nbytes() // saved.itemsize
            if stop - start < self.min_elements:
                return saved.detach()
            ranges = found.setdefault(storage, [])
            for memory in ranges:
                if memory.start <= start and stop <= memory.stop and memory.dtype == saved.dtype:
                    break
            else:
                memory = SavedRange(saved.detach(), start, stop)
                ranges.append(memory)
            return _Saved(block, memory, (saved.shape, saved.stride(), int(saved.storage_offset())))

        with torch.autograd.graph.saved_tensors_hooks(pack, _take):
            yield
        self._store(block, [memory for ranges in found.values() for memory in ranges])
        found.clear()  # the graph keeps the hooks until the block's backward is over

    def _store(self, block: SavedBlock, ranges: list[SavedRange]) -> None:
        """Start copying a block's memory to the host."""
        copied = []
        with self.copies.ordered():
            for memory in ranges:
                if memory.device is not None:
                    buffer = self.pool.take(memory.device.nbytes)
                    weakref.finalize(memory, self.pool.put, buffer)
                    memory.host = buffer[: memory.device.nbytes].view(memory.dtype)
                    memory.host.copy_(memory.device, non_blocking=True)
                    copied.append((weakref.ref(memory), memory.device))
        block.ranges = [ref for ref, _ in copied]
        self._unreleased.append(_Copied(block, self.copies.mark(), copied))


@contextmanager
def _prefetching(block: SavedBlock) -> Iterator[None]:
    """Start the copies of the block before as soon as backward takes the first saved tensor of this one."""

    def unpack(saved: Tensor) -> Tensor:
        if block.previous is not None:
            block.previous.fetch()
        return saved

    with torch.autograd.graph.saved_tensors_hooks(Tensor.detach, unpack):
        yield


def _take(saved: Any) -> Any:
    return saved.block.take(saved) if isinstance(saved, _Saved) else saved
