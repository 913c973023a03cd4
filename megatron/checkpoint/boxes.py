"""Arithmetic of boxes of a tensor: intersect, split, and check that they partition the tensor.

The partition check is necessary: torch.distributed.checkpoint silently drops duplicate boxes and ignores holes.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, pairwise, product
from math import prod

from megatron.parallel.shard import Box

View = tuple[int, ...]


def whole(view: View) -> Box:
    """Return the box that covers a tensor of shape ``view``."""
    return Box((0,) * len(view), view)


def ends(box: Box) -> tuple[int, ...]:
    """Return the exclusive end index of the box, per dimension."""
    return tuple(start + size for start, size in zip(box.start, box.size))


def is_inside(box: Box, view: View) -> bool:
    """Return True if the box is valid for a tensor of shape ``view``."""
    return (
        len(box.start) == len(box.size) == len(view)
        and all(start >= 0 and size >= 0 for start, size in zip(box.start, box.size))
        and all(end <= limit for end, limit in zip(ends(box), view))
    )


def intersect(a: Box, b: Box) -> Box | None:
    """Return the intersection of two boxes; None if it is empty."""
    start = tuple(map(max, a.start, b.start))
    size = tuple(min(end_a, end_b) - first for end_a, end_b, first in zip(ends(a), ends(b), start))
    return Box(start, size) if all(n > 0 for n in size) else None


class BoxIndex:
    """An index over boxes of a tensor that finds those intersecting a given box without comparing all pairs.

    Boxes are sorted by their start along the first dimension, along which tensors are split first.
    """

    def __init__(self, boxes: Iterable[Box]) -> None:
        self._sorted = sorted(enumerate(boxes), key=lambda item: _rows(item[1])[0])
        rows = [_rows(box) for _, box in self._sorted]
        self._starts = [start for start, _ in rows]
        self._longest = max((end - start for start, end in rows), default=0)

    def shared(self, box: Box) -> Iterator[tuple[int, Box]]:
        """Yield the position (in the order given) of each box that intersects ``box``, and the intersection."""
        start, end = _rows(box)
        candidates = slice(bisect_right(self._starts, start - self._longest), bisect_left(self._starts, end))
        for number, other in self._sorted[candidates]:
            found = intersect(other, box)
            if found is not None:
                yield number, found


def _rows(box: Box) -> tuple[int, int]:
    """Return start and end along the first dimension; a scalar counts as one row."""
    return (box.start[0], box.start[0] + box.size[0]) if box.start else (0, 1)


def relative(box: Box, outer: Box) -> Box:
    """Return ``box`` in coordinates relative to the start of ``outer``."""
    return Box(tuple(a - b for a, b in zip(box.start, outer.start)), box.size)


def cut(box: Box, limit: int) -> Iterator[Box]:
    """Split ``box`` into boxes of at most ``limit`` elements (at least one each), in row-major order."""
    if box.numel <= limit:
        if box.numel:
            yield box
        return
    dim = next(i for i, n in enumerate(box.size) if n > 1)
    step = max(1, limit // prod(box.size[dim + 1 :]))
    for first in range(0, box.size[dim], step):
        start = (*box.start[:dim], box.start[dim] + first, *box.start[dim + 1 :])
        size = (*box.size[:dim], min(step, box.size[dim] - first), *box.size[dim + 1 :])
        yield from cut(Box(start, size), limit)


def partition_problem(view: View, boxes: Sequence[Box]) -> str | None:
    """Return why ``boxes`` are not a partition of a tensor of shape ``view``; None if they are.

    Sweeps along the first dimension: between two neighbouring edges, the boxes present must partition the remaining
    dimensions. Near linear in the number of boxes if they are split along few dimensions, as in all layouts.
    """
    for box in boxes:
        if not is_inside(box, view):
            return f"{describe(box)} is not inside {list(view)}"
    return _sweep(view, [(box.start, ends(box)) for box in boxes if box.numel], (), ())


Span = tuple[View, View]
"""Start and exclusive end of a box; precomputed because the sweep compares them repeatedly."""


def _sweep(view: View, spans: Sequence[Span], low: View, high: View) -> str | None:
    """Return the first hole or overlap among ``spans``, which all cover the column ``low..high`` swept so far."""
    dim = len(low)
    if len(spans) == 1 and not any(spans[0][0][dim:]) and spans[0][1][dim:] == view[dim:]:
        return None
    if dim == len(view) or not spans:
        return _column_problem(spans, (*low, *(0 for _ in view[dim:])), (*high, *view[dim:]))
    edges = {0, view[dim], *(start[dim] for start, _ in spans), *(end[dim] for _, end in spans)}
    waiting = sorted(spans, key=lambda span: span[0][dim], reverse=True)
    active: list[Span] = []
    for first, last in pairwise(sorted(edges)):
        active = [span for span in active if span[1][dim] > first]
        while waiting and waiting[-1][0][dim] == first:
            active.append(waiting.pop())
        problem = _sweep(view, active, (*low, first), (*high, last))
        if problem:
            return problem
    return None


def _column_problem(spans: Sequence[Span], low: View, high: View) -> str | None:
    """Return the message for a column that is covered by no span or by several."""
    column = _span_box(low, high)
    if not column.numel:
        return None
    if not spans:
        return f"{describe(column)} is not covered"
    a, b, *_ = (describe(_span_box(*span)) for span in spans)
    return f"{a} and {b} overlap in {describe(column)}"


def _span_box(start: View, end: View) -> Box:
    return Box(start, tuple(b - a for a, b in zip(start, end)))


def describe(box: Box) -> str:
    """Format a box as an index expression: ``[0:4, 2:3]``."""
    return "[" + ", ".join(f"{start}:{end}" for start, end in zip(box.start, ends(box))) + "]"


def folding(shape: View, view: View) -> tuple[slice, ...] | None:
    """Return the dimensions of ``view`` that make up each dimension of ``shape``; None if it does not refine ``shape``.

    >>> folding((12, 5), (2, 6, 5))
    (slice(0, 2, None), slice(2, 3, None))
    """
    found, first = [], 0
    for i, n in enumerate(shape):
        last = first
        while last < len(view) and (last == first or prod(view[first:last]) < n or i == len(shape) - 1):
            last += 1
        if prod(view[first:last]) != n or last == first:
            return None
        found.append(slice(first, last))
        first = last
    return tuple(found) if first == len(view) else None


def folded(box: Box, shape: View, view: View) -> Iterator[tuple[Box, Box]]:
    """Yield the boxes of the stored shape that make up a box of the view, as pairs (part of ``box``, box in ``shape``).

    Raises:
        ValueError: if ``view`` does not refine ``shape``.
    """
    groups = folding(shape, view)
    if groups is None:
        raise ValueError(f"{list(view)} is not a view of {list(shape)}")
    for runs in product(*(list(_runs(box.start[g], box.size[g], view[g])) for g in groups)):
        inner = Box(sum((r[0].start for r in runs), ()), sum((r[0].size for r in runs), ()))
        yield inner, Box(tuple(r[1] for r in runs), tuple(r[0].numel for r in runs))


def _runs(start: View, size: View, view: View) -> Iterator[tuple[Box, int]]:
    """Yield the contiguous runs of elements in a box, each with the row-major index of its first element."""
    strides = [*accumulate(reversed(view[1:]), lambda a, b: a * b, initial=1)][::-1]
    inner = len(view) - 1
    while inner and size[inner] == view[inner]:
        inner -= 1
    for outer in product(*(range(a, a + n) for a, n in zip(start[:inner], size[:inner]))):
        first = (*outer, *start[inner:])
        yield Box(first, (*(1 for _ in outer), *size[inner:])), sum(a * b for a, b in zip(first, strides))
