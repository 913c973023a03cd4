"""Bytes that a rank sends, as a ring sends them: the ring itself is played here, message by message."""

from __future__ import annotations

import pytest

from megatron.distributed.comm import ALL_GATHER, ALL_REDUCE, BUBBLE, REDUCE_SCATTER, CommMeter, Group


@pytest.mark.parametrize("ranks", [2, 3, 4, 7])
def test_a_ring_of_ranks(ranks: int) -> None:
    """A tensor falls into as many blocks as there are ranks; in n - 1 rounds each rank sends one to the next.

    After the first n - 1 rounds each has the sum of one block, after n - 1 more all have all.
    """
    size, sent = 4 * 3 * ranks, 0
    holds = [{rank} for rank in range(ranks)]  # blocks whose sum a rank has at the end of the first half
    for _ in range(ranks - 1):
        sent += size // ranks
    scattered, gathered = sent, 0
    while any(len(blocks) < ranks for blocks in holds):
        holds = [blocks | holds[rank - 1] for rank, blocks in enumerate(holds)]
        gathered += size // ranks
    group = Group(tuple(range(ranks)), 0, None, "dp")
    group.sends(REDUCE_SCATTER, size)
    group.sends(ALL_GATHER, size)
    group.sends(ALL_REDUCE, 2 * size)
    assert group.meter.pop_bytes_sent() == {
        ("dp", REDUCE_SCATTER): scattered,
        ("dp", ALL_GATHER): gathered,
        ("dp", ALL_REDUCE): scattered + gathered,
    }


def test_bytes_add_up_until_they_are_taken_and_not_in_pauses() -> None:
    meter = CommMeter(["tp"])
    meter.sends("tp", "send", 1.0)
    with meter.paused():
        meter.sends("tp", "send", 10.0)
    meter.sends("tp", "send", 2.0)
    meter.add("tp", 0.5)
    assert meter.pop_bytes_sent() == {("tp", "send"): 3.0}
    assert meter.pop_bytes_sent() == {}
    assert meter.pop() == {"tp": 0.5}


def test_a_group_of_a_pipeline_sends_under_the_name_of_its_axis() -> None:
    group = Group((0, 1), 0, None, BUBBLE)
    group.sends(ALL_REDUCE, 16)
    assert group.meter.pop_bytes_sent() == {("pp", ALL_REDUCE): 8.0}
