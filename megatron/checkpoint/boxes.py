"""Arithmetic of boxes of a tensor: intersect them, cut them small, prove that they make up the whole.

The proof is needed because nothing below it notices: torch.distributed.checkpoint drops boxes that are written twice
and leaves holes as they are.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, pairwise, product
from math import prod

from megatron.parallel.shard import Box

View = tuple[int, ...]


def whole(view: View) -> Box:
    """The box that is all of a tensor of shape ``view``."""
    return Box((0,) * len(view), view)


def ends(box: Box) -> tuple[int, ...]:
    """First index after the box, per dimension."""
    return tuple(start + size for start, size in zip(box.start, box.size))


def is_inside(box: Box, view: View) -> bool:
    """Whether a box is one of a tensor of shape ``view``."""
    return (
        len(box.start) == len(box.size) == len(view)
        and all(start >= 0 and size >= 0 for start, size in zip(box.start, box.size))
        and all(end <= limit for end, limit in zip(ends(box), view))
    )


def intersect(a: Box, b: Box) -> Box | None:
    """What two boxes of one tensor share; None when that is no element."""
    start = tuple(map(max, a.start, b.start))
    size = tuple(min(end_a, end_b) - first for end_a, end_b, first in zip(ends(a), ends(b), start))
    return Box(start, size) if all(n > 0 for n in size) else None


class BoxIndex:
    """Finds those of many boxes of a tensor that share elements with another one, without comparing it with all.

    They are sorted by where they begin along the first dimension, along which tensors are cut first.
    """

    def __init__(self, boxes: Iterable[Box]) -> None:
        self._sorted = sorted(enumerate(boxes), key=lambda item: _rows(item[1])[0])
        rows = [_rows(box) for _, box in self._sorted]
        self._starts = [start for start, _ in rows]
        self._longest = max((end - start for start, end in rows), default=0)

    def shared(self, box: Box) -> Iterator[tuple[int, Box]]:
        """What ``box`` shares with each of them: its number, counted as they were given, and the elements."""
        start, end = _rows(box)
        candidates = slice(bisect_right(self._starts, start - self._longest), bisect_left(self._starts, end))
        for number, other in self._sorted[candidates]:
            found = intersect(other, box)
            if found is not None:
                yield number, found


def _rows(box: Box) -> tuple[int, int]:
    """First index along the first dimension, and first index after it; a scalar is one row."""
    return (box.start[0], box.start[0] + box.size[0]) if box.start else (0, 1)


def relative(box: Box, outer: Box) -> Box:
    """The same elements counted from the first corner of ``outer``."""
    return Box(tuple(a - b for a, b in zip(box.start, outer.start)), box.size)


def cut(box: Box, limit: int) -> Iterator[Box]:
    """Boxes of at most ``limit`` elements (at least one each) that make up ``box``, in row-major order."""
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
    """Why ``boxes`` are not a partition of a tensor of shape ``view``: a sentence, or None when they are one.

    Sweeps along the first dimension; between two neighbouring edges the boxes that are there must partition the
    dimensions left. Near linear in the number of boxes where they are cut along few dimensions, as all layouts do.
    """
    for box in boxes:
        if not is_inside(box, view):
            return f"{describe(box)} is not inside {list(view)}"
    return _sweep(view, [(box.start, ends(box)) for box in boxes if box.numel], (), ())


Span = tuple[View, View]
"""First index of a box, and first index after it: what the sweep compares again and again."""


def _sweep(view: View, spans: Sequence[Span], low: View, high: View) -> str | None:
    """The first hole or overlap among ``spans``, which all reach across the column ``low..high`` swept so far."""
    dim = len(low)
    if len(spans) == 1 and not any(spans[0][0][dim:]) and spans[0][1][dim:] == view[dim:]:
        return None
    if dim == len(view) or not spans:
        return _blame(spans, (*low, *(0 for _ in view[dim:])), (*high, *view[dim:]))
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


def _blame(spans: Sequence[Span], low: View, high: View) -> str | None:
    """What to say of a column that no span, or more than one, reaches across."""
    column = _spanned(low, high)
    if not column.numel:
        return None
    if not spans:
        return f"nothing holds {describe(column)}"
    a, b, *_ = (describe(_spanned(*span)) for span in spans)
    return f"{a} and {b} overlap in {describe(column)}"


def _spanned(start: View, end: View) -> Box:
    return Box(start, tuple(b - a for a, b in zip(start, end)))


def describe(box: Box) -> str:
    """A box as people index: ``[0:4, 2:3]``."""
    return "[" + ", ".join(f"{start}:{end}" for start, end in zip(box.start, ends(box))) + "]"


def folding(shape: View, view: View) -> tuple[slice, ...] | None:
    """Which dimensions of ``view`` make up each dimension of ``shape``; None when it does not refine the shape.

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
    """A box of the view as boxes of the stored shape: pairs (part of ``box``, the same elements in ``shape``).

    Raises:
        ValueError: when the view does not refine the shape.
    """
    groups = folding(shape, view)
    if groups is None:
        raise ValueError(f"{list(view)} is not a view of {list(shape)}")
    for runs in product(*(list(_runs(box.start[g], box.size[g], view[g])) for g in groups)):
        inner = Box(sum((r[0].start for r in runs), ()), sum((r[0].size for r in runs), ()))
        yield inner, Box(tuple(r[1] for r in runs), tuple(r[0].numel for r in runs))


def _runs(start: View, size: View, view: View) -> Iterator[tuple[Box, int]]:
    """The runs of neighbouring elements in a box: (the run as a box, its first element counted row by row)."""
    strides = [*accumulate(reversed(view[1:]), lambda a, b: a * b, initial=1)][::-1]
    inner = len(view) - 1
    while inner and size[inner] == view[inner]:
        inner -= 1
    for outer in product(*(range(a, a + n) for a, n in zip(start[:inner], size[:inner]))):
        first = (*outer, *start[inner:])
        yield Box(first, (*(1 for _ in outer), *size[inner:])), sum(a * b for a, b in zip(first, strides))
