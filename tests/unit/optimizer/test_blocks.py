"""Blocks cover every element once, in order, and none is too large."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.optimizer.rules import iterate_blocks


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, 20), max_size=6), st.integers(1, 25))
def test_blocks_are_a_partition(sizes: list[int], elements: int) -> None:
    ends = torch.tensor([0, *sizes]).cumsum(0).tolist()
    tensors = [torch.arange(a, b) for a, b in zip(ends, ends[1:])]
    found = [[cut.view_in(tensors) for cut in block] for block in iterate_blocks(tensors, elements)]
    lengths = [sum(map(len, block)) for block in found]
    assert [i for block in found for piece in block for i in piece.tolist()] == list(range(ends[-1]))
    assert all(length == elements for length in lengths[:-1])
    assert all(0 < n <= elements for n in lengths)


def test_a_cut_is_a_view() -> None:
    tensors = [torch.zeros(2, 3), torch.zeros(4)]
    for block in iterate_blocks(tensors, 5):
        for cut in block:
            cut.view_in(tensors).add_(1)
    assert all((t == 1).all() for t in tensors)
