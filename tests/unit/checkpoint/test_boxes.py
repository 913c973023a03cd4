"""Boxes against brute force: a numpy array that counts the holders of each element."""

from __future__ import annotations

import time
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.checkpoint import format
from megatron.distributed.sharding import Box

quick = settings(max_examples=50, deadline=None, derandomize=True)
shapes = st.lists(st.integers(1, 5), min_size=0, max_size=4).map(tuple)


@st.composite
def box_of(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    start = tuple(draw(st.integers(0, n)) for n in shape)
    return Box(start, tuple(draw(st.integers(0, n - a)) for n, a in zip(shape, start)))


@st.composite
def partition_of(draw: st.DrawFn, box: Box, depth: int = 4) -> list[Box]:
    """Cut in two, again and again, at random places."""
    wide = [i for i, n in enumerate(box.size) if n > 1]
    if not wide or not depth or draw(st.booleans()):
        return [box]
    dim = draw(st.sampled_from(wide))
    n = draw(st.integers(1, box.size[dim] - 1))
    lower = Box(box.start, (*box.size[:dim], n, *box.size[dim + 1 :]))
    start = (*box.start[:dim], box.start[dim] + n, *box.start[dim + 1 :])
    upper = Box(start, (*box.size[:dim], box.size[dim] - n, *box.size[dim + 1 :]))
    return draw(partition_of(lower, depth - 1)) + draw(partition_of(upper, depth - 1))


def counted(shape: tuple[int, ...], found: list[Box]) -> np.ndarray:
    held = np.zeros(shape, dtype=int)
    for box in found:
        held[box.slices] += 1
    return held


@quick
@given(st.data(), st.integers(1, 40))
def test_cut(data: st.DataObject, limit: int) -> None:
    shape = data.draw(shapes)
    box = data.draw(box_of(shape))
    pieces = list(format.split_box(box, limit))
    assert np.array_equal(counted(shape, pieces), counted(shape, [box]))
    assert all(0 < piece.numel <= limit for piece in pieces)
    order = np.arange(prod(shape)).reshape(shape)
    flat = [order[piece.slices].reshape(-1) for piece in pieces]
    assert np.array_equal(np.concatenate(flat) if flat else [], order[box.slices].reshape(-1))


@quick
@given(st.data())
def test_any_boxes_against_counting(data: st.DataObject) -> None:
    shape = data.draw(shapes)
    pieces = data.draw(st.permutations(data.draw(partition_of(format.whole_box(shape)))))
    assert format.partition_problem(shape, pieces) is None
    assert format.partition_problem(shape, pieces[1:]) is not None
    assert "overlap" in str(format.partition_problem(shape, [*pieces, pieces[0]]))
    pieces = data.draw(st.lists(box_of(shape), max_size=4))
    assert (format.partition_problem(shape, pieces) is None) == bool((counted(shape, pieces) == 1).all())


@pytest.mark.parametrize(
    ("found", "sentence"),
    [
        ([Box((0, 0), (4, 2))], "element [0, 2] is not covered"),
        ([Box((0, 0), (4, 3)), Box((1, 1), (2, 1))], "[0:4, 0:3] and [1:3, 1:2] overlap"),
        ([Box((0, 0), (5, 3))], "[0:5, 0:3] is not inside [4, 3]"),
    ],
)
def test_sentences(found: list[Box], sentence: str) -> None:
    assert format.partition_problem((4, 3), found) == sentence


def grid(rows: int, columns: int) -> list[Box]:
    return [Box((i, j), (1, 1)) for i in range(rows) for j in range(columns)]


def staircase(steps: int) -> list[Box]:
    """Rows below the diagonal and columns above it: each of them is beside all others."""
    return [Box((i, 0), (1, i + 1)) for i in range(steps)] + [Box((0, i), (i, 1)) for i in range(1, steps)]


@pytest.mark.parametrize(
    ("view", "boxes"),
    [((1, 20_000), grid(1, 20_000)), ((140, 140), grid(140, 140)), ((10_000, 10_000), staircase(10_000))],
)
def test_twenty_thousand_boxes_take_a_second(view: tuple[int, ...], boxes: list[Box]) -> None:
    start = time.process_time()
    assert format.partition_problem(view, boxes) is None
    assert format.partition_problem(view, boxes[1:]) == "element [0, 0] is not covered"
    assert time.process_time() - start < 2


@quick
@given(st.data())
def test_folded(data: st.DataObject) -> None:
    groups = data.draw(st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=3), min_size=1, max_size=2))
    view = tuple(n for group in groups for n in group)
    shape = tuple(prod(group) for group in groups)
    box = data.draw(box_of(view))
    order = np.arange(prod(view))
    for inner, outer in format.boxes_in_shape(box, shape, view):
        assert np.array_equal(order.reshape(view)[inner.slices].reshape(outer.size), order.reshape(shape)[outer.slices])
    pieces = [inner for inner, _ in format.boxes_in_shape(box, shape, view)]
    assert np.array_equal(counted(view, pieces), counted(view, [box]))


def test_shapes_that_are_no_view_are_rejected() -> None:
    assert format.match_view_dims((12, 5), (2, 6, 5)) == (slice(0, 2), slice(2, 3))
    assert (
        format.match_view_dims((12, 5), (5, 12))
        is format.match_view_dims((8,), (2, 3))
        is format.match_view_dims((2, 3), (6,))
        is None
    )
    with pytest.raises(ValueError, match="not a view"):
        list(format.boxes_in_shape(format.whole_box((5, 12)), (12, 5), (5, 12)))


@quick
@given(st.data())
def test_the_index_matches_a_search(data: st.DataObject) -> None:
    shape = data.draw(shapes)
    among = data.draw(st.lists(box_of(shape), max_size=8)) + data.draw(partition_of(format.whole_box(shape)))
    box = data.draw(box_of(shape))
    found = sorted(format.BoxIndex(among).shared(box), key=lambda item: item[0])
    searched = [(number, format.intersect(other, box)) for number, other in enumerate(among)]
    assert found == [(number, shared) for number, shared in searched if shared is not None]


def test_the_index_looks_at_neighbours_only(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [Box((8 * i, 0), (8, 5)) for i in range(10_000)]
    index, real, looked = format.BoxIndex(rows), format.intersect, []
    monkeypatch.setattr(format, "intersect", lambda a, b: looked.append(a) or real(a, b))
    assert [number for number, _ in index.shared(Box((804, 1), (12, 2)))] == [100, 101]
    assert len(looked) <= 3
