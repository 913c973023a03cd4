"""Division of lists of tensors into blocks, to bound the temporary memory of optimizer updates."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

ELEMENTS = {"cuda": 1 << 22, "cpu": 1 << 17}
"""Elements per block: on a GPU enough to keep it busy, on a CPU what fits into the caches."""


@dataclass(frozen=True)
class Cut:
    """Elements ``start <= i < stop`` of the flattened tensor ``index`` of a list."""

    index: int
    start: int
    stop: int

    def of(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return a flat view of the elements in a list of contiguous tensors."""
        return tensors[self.index].view(-1)[self.start : self.stop]


def blocks(tensors: Sequence[Tensor], elements: int | None = None) -> Iterator[list[Cut]]:
    """Yield blocks of at most ``elements`` elements that together cover all tensors, in order."""
    if elements is None:
        elements = ELEMENTS["cuda" if any(t.is_cuda for t in tensors) else "cpu"]
    block: list[Cut] = []
    left = elements  # capacity left in the block
    for index, tensor in enumerate(tensors):
        start = 0
        while start < tensor.numel():
            stop = min(tensor.numel(), start + left)
            block.append(Cut(index, start, stop))
            left -= stop - start
            start = stop
            if left == 0:
                yield block
                block, left = [], elements
    if block:
        yield block
