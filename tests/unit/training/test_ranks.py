from __future__ import annotations

import statistics
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.distributed.comm import BUBBLE
from megatron.training.loggers.base import MEMORY_CAPACITY
from megatron.training.metrics import RankStats, compare_ranks, timer_metrics

RANK = RankStats(1.0, {"tp": 0.1, "dp": 0.1}, {"batch-generator": 0.01, "optimizer": 0.2}, 10, 80)


def test_who_is_fullest_and_who_is_slowest() -> None:
    """Steps take all ranks the same time; the slowest is the one for which the others wait."""
    ranks = [RANK, replace(RANK, memory_bytes=27, memory_total_bytes=81), RANK, RANK]
    ranks[2] = replace(RANK, waits={"tp": 0.02, "dp": 0.02}, phases={"batch-generator": 0.03, "optimizer": 0.1})
    seen = compare_ranks(ranks)
    assert (seen["mem-max-rank"], seen["mem-max-allocated-bytes"], seen[MEMORY_CAPACITY]) == (1, 27, 81)
    assert seen["slowest-rank"] == 2
    assert seen["slowest-rank-excess"] == pytest.approx(0.96 / 0.8 - 1)
    assert (seen["communication-tp"], seen["communication-dp"]) == pytest.approx((0.08, 0.08))
    assert seen["communication-share"] == pytest.approx(0.16)
    assert seen["data-wait"] == 0.03


def test_what_ranks_send_is_their_mean() -> None:
    seen = compare_ranks([replace(RANK, sent={"tp": 2.0, "dp": n}) for n in (1.0, 5.0)])
    assert (seen["sent-bytes-tp"], seen["sent-bytes-dp"]) == (2.0, 3.0)


def test_the_share_of_waits_is_that_of_the_mean_step() -> None:
    """0.4 s of two steps that took 1 and 3 s, whoever waited."""
    seen = compare_ranks([RANK, replace(RANK, seconds=3.0)])
    assert seen["communication-share"] == pytest.approx(0.4 / 4.0)


def test_waits_for_the_pipeline_are_no_communication() -> None:
    """Half a second and none, of two steps of a second; the rank that never waits for its neighbours is the slowest."""
    bubbles = [replace(RANK, waits=RANK.waits | {BUBBLE: seconds}) for seconds in (0.5, 0.0)]
    seen = compare_ranks(bubbles)
    assert seen["bubble"] == pytest.approx(0.25)
    assert (seen["communication-tp"], seen["communication-dp"]) == pytest.approx((0.1, 0.1))
    assert "communication-bubble" not in seen
    assert seen["communication-share"] == pytest.approx(0.2)
    assert seen["slowest-rank"] == 1
    assert "bubble" not in compare_ranks([RANK])


def test_one_rank_is_compared_with_nobody() -> None:
    seen = compare_ranks([RANK])
    assert not {"slowest-rank", "slowest-rank-excess", "mem-max-rank"} & seen.keys()
    assert timer_metrics([RANK], "all")["optimizer-time"] == 0.2


def test_options_of_timers() -> None:
    ranks = [RANK, replace(RANK, phases={"batch-generator": 0.0, "optimizer": 0.4})]
    assert timer_metrics(ranks, "max")["optimizer-time"] == 0.4
    assert timer_metrics(ranks, "minmax")["optimizer-time-min"] == 0.2
    assert timer_metrics(ranks, "all")["optimizer-time-by-rank"] == [0.2, 0.4]


def test_a_timer_that_never_ran_is_left_out() -> None:
    assert timer_metrics([replace(RANK, phases={"optimizer": 0.0})], "max") == {}


@settings(max_examples=50, derandomize=True)
@given(st.lists(st.integers(0, 900), min_size=2, max_size=40))
def test_the_slowest_waits_least(milliseconds: list[int]) -> None:
    waits = [wait / 1000 for wait in milliseconds]
    ranks = [replace(RANK, waits={"world": wait}) for wait in waits]
    seen = compare_ranks(ranks)
    assert waits[seen["slowest-rank"]] == min(waits)
    assert seen["slowest-rank-excess"] == pytest.approx((1 - min(waits)) / statistics.median(1 - w for w in waits) - 1)
    assert seen["slowest-rank-excess"] >= 0
