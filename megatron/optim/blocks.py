"""Cutting lists of tensors into blocks, so that what an update needs besides them stays small."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

ELEMENTS = {"cuda": 1 << 22, "cpu": 1 << 17}
"""Of a block: enough to keep a GPU busy, little beside the parameters of a rank; on a CPU, what caches hold."""


@dataclass(frozen=True)
class Cut:
    """Elements ``start <= i < stop`` of tensor ``index`` of a list, counted in its flattened form."""

    index: int
    start: int
    stop: int

    def of(self, tensors: Sequence[Tensor]) -> Tensor:
        """A flat view of these elements in a list of contiguous tensors."""
        return tensors[self.index].view(-1)[self.start : self.stop]


def blocks(tensors: Sequence[Tensor], elements: int | None = None) -> Iterator[list[Cut]]:
    """Cuts that cover all tensors in order, as many at a time as have together at most ``elements`` elements."""
    if elements is None:
        elements = ELEMENTS["cuda" if any(t.is_cuda for t in tensors) else "cpu"]
    block: list[Cut] = []
    room = elements
    for index, tensor in enumerate(tensors):
        start = 0
        while start < tensor.numel():
            stop = min(tensor.numel(), start + room)
            block.append(Cut(index, start, stop))
            room, start = room - (stop - start), stop
            if room == 0:
                yield block
                block, room = [], elements
    if block:
        yield block
