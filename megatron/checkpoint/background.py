"""What lets training go on while a checkpoint is written: a copy in the host's memory, and a thread."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import replace
from threading import Thread
from typing import TypeVar

import torch
from torch import Tensor

from megatron.checkpoint.parts import GlobalTensor, Part
from megatron.parallel.ownership import round_up

ALIGNMENT = 64
"""Bytes: every part starts at a multiple."""

T = TypeVar("T")


class Staging:
    """Memory of the host for a copy of a rank's parts: as many bytes as they have, taken once and kept."""

    def __init__(self, tensors: Mapping[str, GlobalTensor], pinned: bool = False) -> None:
        """Take the memory for these, and touch it, so that the first copy is as fast as any other.

        Args:
            tensors: with parts of the sizes that are going to be copied.
            pinned: lock it, so that a GPU writes to it directly.

        Raises:
            RuntimeError: when there is not so much memory, or it cannot be locked.
        """
        size = sum(_room(part, tensor.dtype) for tensor in tensors.values() for part in tensor.parts)
        self._memory = torch.empty(size, dtype=torch.uint8).fill_(0)
        if pinned and size:  # torch's own pinned memory comes in powers of two
            locked = torch.cuda.cudart().cudaHostRegister(self._memory.data_ptr(), size, 0)
            torch.cuda.check_error(int(locked))

    @property
    def bytes(self) -> int:
        """Its size: that of the parts, each rounded up to ``ALIGNMENT``."""
        return self._memory.numel()

    @torch.no_grad()
    def copy(self, tensors: Mapping[str, GlobalTensor]) -> dict[str, GlobalTensor]:
        """The same tensors with parts that are copies; they hold until the next call.

        Raises:
            ValueError: when the parts do not have the sizes that the memory was taken for.
        """
        at, copies, on_gpu = 0, {}, False
        for name, tensor in tensors.items():
            parts = []
            for part in tensor.parts:
                room = _room(part, tensor.dtype)
                if at + room > self.bytes:
                    raise ValueError(f"{name} does not fit into the memory that was taken for the copy")
                source, target = part.resolve(), self._at(at, part, tensor.dtype)
                target.copy_(source, non_blocking=source.is_cuda)
                on_gpu |= source.is_cuda
                parts.append(Part(part.box, target))
                at += room
            copies[name] = replace(tensor, parts=tuple(parts))
        if on_gpu:
            torch.cuda.current_stream().synchronize()
        return copies

    def _at(self, offset: int, part: Part, dtype: torch.dtype) -> Tensor:
        """The place of a part, in its shape."""
        flat = self._memory[offset : offset + part.box.numel * dtype.itemsize]
        return flat.view(dtype).view(part.box.size)


def _room(part: Part, dtype: torch.dtype) -> int:
    """Bytes that a part takes."""
    return round_up(part.box.numel * dtype.itemsize, ALIGNMENT)


def in_background(work: Callable[[], T], name: str) -> Future[T]:
    """What ``work`` returns or raises, once it is done in a thread of that name.

    Nothing waits for the thread at the end of the process, as it may wait for ranks that are gone.
    """
    future: Future[T] = Future()

    def act() -> None:
        try:
            result = work()
        except BaseException as error:  # whoever asks for the result gets it
            future.set_exception(error)
        else:
            future.set_result(result)

    Thread(target=act, name=name, daemon=True).start()
    return future
