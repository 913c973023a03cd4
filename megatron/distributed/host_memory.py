"""Host memory that holds what a GPU offloads, and the side stream that copies between them.

On a CPU the "device" is host memory too; the same code then makes plain copies.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


def page_lock(memory: Tensor) -> None:
    """Page-lock host memory, so that GPUs copy from and to it directly; it must live as long as the process.

    ``pin_memory`` of torch would round the allocation up to a power of two.
    """
    locked = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.untyped_storage().nbytes(), 0)
    torch.cuda.check_error(int(locked))


def host_buffer(elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Allocate a flat host tensor of zeros for copies from and to ``device``; on ``meta`` if that is the device."""
    if device.type == "meta":
        return torch.empty(elements, dtype=dtype, device=device)
    memory = torch.empty(elements, dtype=dtype).fill_(0)  # touch the pages
    if device.type == "cuda" and elements:
        page_lock(memory)
    return memory


class CopyStream:
    """Copies between a device and the host that overlap with the device's computation."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @contextmanager
    def ordered(self) -> Iterator[None]:
        """Issue the copies inside after everything that the current stream has been given so far."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            yield

    def mark(self) -> torch.cuda.Event | None:
        """Return an event after all copies issued so far; None on a CPU, where they are done."""
        return None if self._stream is None else self._stream.record_event()

    def wait(self, event: torch.cuda.Event | None = None) -> None:
        """Let the current stream wait for ``event``, or for all copies issued so far."""
        if self._stream is not None:
            current = torch.cuda.current_stream(self._stream.device)
            current.wait_event(event) if event is not None else current.wait_stream(self._stream)

    def synchronize(self) -> None:
        """Let the host wait for all copies issued so far."""
        if self._stream is not None:
            self._stream.record_event().synchronize()
