"""In which order channels are opened."""

from __future__ import annotations

from collections import Counter

import pytest

from megatron.parallel.mesh import in_turns
from megatron.pipeline.comms import channels

MOST_TURNS = 8


@pytest.mark.parametrize("ranks", [2, 3, 4, 7, 16, 64])
@pytest.mark.parametrize("shape", ["a line", "a circle", "a V"])
def test_channels_open_in_a_few_turns_however_many_ranks_there_are(shape: str, ranks: int) -> None:
    """An edge opens once both of its ranks have opened those of theirs that are before it."""
    there = [*range(ranks)]
    placement = {"a line": there, "a circle": there * 2, "a V": there + there[::-1]}[shape]
    edges, turn = channels(placement), Counter[int]()
    opened = in_turns(edges)
    assert sorted(opened) == sorted(edges)
    for edge in opened:
        turn.update(dict.fromkeys(edge, 0))
        turn[edge[0]] = turn[edge[1]] = 1 + max(turn[rank] for rank in edge)
    assert max(turn.values()) <= MOST_TURNS
