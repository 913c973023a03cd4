from __future__ import annotations

import statistics
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.distributed.comm import BUBBLE
from megatron.training.metrics import RankStats, compare_ranks

RANK = RankStats(1.0, {"tp": 0.1, "dp": 0.1}, {"batch-generator": 0.01, "optimizer": 0.2}, 10, 80)


def test_who_is_fullest_and_who_is_slowest() -> None:
    """Steps take all ranks the same time; the slowest is the one for which the others wait."""
    ranks = [RANK, replace(RANK, memory_bytes=27, memory_total_bytes=81), RANK, RANK]
    ranks[2] = replace(RANK, waits={"tp": 0.02, "dp": 0.02}, phases={"batch-generator": 0.03, "optimizer": 0.1})
    seen = compare_ranks(ranks)
    assert (seen.fullest_rank, seen.memory_bytes, seen.memory_total_bytes) == (1, 27, 81)
    assert seen.slowest_rank == 2
    assert seen.slowest_excess == pytest.approx(0.96 / 0.8 - 1)
    assert seen.communication == pytest.approx({"tp": 0.08, "dp": 0.08})
    assert seen.communication_share == pytest.approx(0.16)
    assert seen.data_wait == 0.03


def test_what_ranks_send_is_their_mean() -> None:
    assert compare_ranks([replace(RANK, sent={"tp": 2.0, "dp": n}) for n in (1.0, 5.0)]).sent == {"tp": 2.0, "dp": 3.0}


def test_the_share_of_waits_is_that_of_the_mean_step() -> None:
    """0.4 s of two steps that took 1 and 3 s, whoever waited."""
    seen = compare_ranks([RANK, replace(RANK, seconds=3.0)])
    assert seen.communication_share == pytest.approx(0.4 / 4.0)


def test_waits_for_the_pipeline_are_no_communication() -> None:
    """Half a second and none, of two steps of a second; the rank that never waits for its neighbours is the slowest."""
    bubbles = [replace(RANK, waits=RANK.waits | {BUBBLE: seconds}) for seconds in (0.5, 0.0)]
    seen = compare_ranks(bubbles)
    assert seen.bubble == pytest.approx(0.25)
    assert seen.communication == pytest.approx({"tp": 0.1, "dp": 0.1})
    assert seen.communication_share == pytest.approx(0.2)
    assert seen.slowest_rank == 1
    assert compare_ranks([RANK]).bubble is None


def test_one_rank_is_compared_with_nobody() -> None:
    seen = compare_ranks([RANK])
    assert (seen.slowest_rank, seen.slowest_excess, seen.fullest_rank) == (0, 0.0, 0)
    assert seen.timer_metrics("all")["optimizer-time"] == 0.2


def test_options_of_timers() -> None:
    seen = compare_ranks([RANK, replace(RANK, phases={"batch-generator": 0.0, "optimizer": 0.4})])
    assert seen.timer_metrics("max")["optimizer-time"] == 0.4
    assert seen.timer_metrics("minmax")["optimizer-time-min"] == 0.2
    assert seen.timer_metrics("all")["optimizer-time-by-rank"] == [0.2, 0.4]


def test_a_timer_that_never_ran_is_left_out() -> None:
    assert compare_ranks([replace(RANK, phases={"optimizer": 0.0})]).timer_metrics("max") == {}


@settings(max_examples=50, derandomize=True)
@given(st.lists(st.integers(0, 900), min_size=1, max_size=40))
def test_the_slowest_waits_least(milliseconds: list[int]) -> None:
    waits = [wait / 1000 for wait in milliseconds]
    ranks = [replace(RANK, waits={"world": wait}) for wait in waits]
    seen = compare_ranks(ranks)
    assert waits[seen.slowest_rank] == min(waits)
    assert seen.slowest_excess == pytest.approx((1 - min(waits)) / statistics.median(1 - w for w in waits) - 1)
    assert seen.slowest_excess >= 0
