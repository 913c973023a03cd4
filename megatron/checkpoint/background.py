"""Asynchronous saving: copy tensors to host memory, then write them in a thread while training continues."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import replace
from threading import Thread
from typing import TypeVar

import torch

from megatron.checkpoint.parts import GlobalTensor, Part
from megatron.parallel.ownership import round_up

ALIGNMENT = 64
"""Bytes; every part starts at a multiple."""

T = TypeVar("T")


class Staging:
    """A host buffer, allocated once, that holds a copy of all parts of a rank."""

    def __init__(self, tensors: Mapping[str, GlobalTensor], pinned: bool = False) -> None:
        """Allocate the buffer and touch its pages, so that the first copy is as fast as later ones.

        Args:
            tensors: whose parts have the sizes that will be copied.
            pinned: page-lock the buffer, so that GPUs copy into it directly.

        Raises:
            RuntimeError: if the memory cannot be allocated or locked.
        """
        size = sum(_padded_bytes(part, tensor.dtype) for tensor in tensors.values() for part in tensor.parts)
        self._memory = torch.empty(size, dtype=torch.uint8).fill_(0)
        if pinned and size:  # torch rounds its own pinned allocations up to a power of two
            locked = torch.cuda.cudart().cudaHostRegister(self._memory.data_ptr(), size, 0)
            torch.cuda.check_error(int(locked))

    @property
    def bytes(self) -> int:
        """Size of the buffer: that of all parts, each rounded up to ``ALIGNMENT``."""
        return self._memory.numel()

    @torch.no_grad()
    def copy(self, tensors: Mapping[str, GlobalTensor]) -> dict[str, GlobalTensor]:
        """Return the same tensors with parts copied into the buffer; the copies are valid until the next call.

        Raises:
            ValueError: if the parts do not fit the buffer.
        """
        at, copies, on_gpu = 0, {}, False
        for name, tensor in tensors.items():
            parts = []
            for part in tensor.parts:
                padded = _padded_bytes(part, tensor.dtype)
                if at + padded > self.bytes:
                    raise ValueError(f"{name} does not fit into the host buffer")
                source = part.resolve()
                flat = self._memory[at : at + part.box.numel * tensor.dtype.itemsize]
                target = flat.view(tensor.dtype).view(part.box.size)
                target.copy_(source, non_blocking=source.is_cuda)
                on_gpu |= source.is_cuda
                parts.append(Part(part.box, target))
                at += padded
            copies[name] = replace(tensor, parts=tuple(parts))
        if on_gpu:
            torch.cuda.current_stream().synchronize()
        return copies


def _padded_bytes(part: Part, dtype: torch.dtype) -> int:
    return round_up(part.box.numel * dtype.itemsize, ALIGNMENT)


def in_background(work: Callable[[], T], name: str) -> Future[T]:
    """Run ``work`` in a daemon thread and return its future.

    The interpreter does not join the thread at exit, because it may be blocked in a collective with a dead rank.
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            result = work()
        except BaseException as error:  # raised by future.result()
            future.set_exception(error)
        else:
            future.set_result(result)

    Thread(target=run, name=name, daemon=True).start()
    return future
