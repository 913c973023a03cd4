"""Drawings of text read back, column by column; the numbers above them."""

from __future__ import annotations

import re
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.pipeline.communication import add_communication
from megatron.pipeline.schedules import SCHEDULES, make_schedule
from megatron.pipeline.simulate import StageCosts, Timeline, simulate
from megatron.planner.timeline import chunk_indices, draw_text, format_number, headline, text_legend


def timeline(name: str, ranks: int, chunks: int, microbatches: int, latency: float = 0) -> Timeline:
    return simulate(
        add_communication(make_schedule(name, ranks, chunks, microbatches)),
        StageCosts.uniform(ranks * chunks, latency=latency),
    )


def test_a_small_pipeline_by_hand() -> None:
    lines = draw_text(timeline("1f1b", 2, 1, 2), width=7 + 3 * 9).splitlines()
    assert lines == [
        "rank 0 F0-F1-      B0----   B1----",
        "rank 1    F0-B0----F1-B1----",
    ]


def test_where_there_is_no_room_the_kinds_remain() -> None:
    assert draw_text(timeline("1f1b", 2, 1, 12), width=7 + 39).splitlines() == [
        "rank 0 FF  B0FB1FB2FB3FB4FB5FB6FB7FB8FB9FB- B-",
        "rank 1  FB0FB1FB2FB3FB4FB5FB6FB7FB8FB9FB-FB-",
    ]


def test_a_transfer_that_is_waited_for() -> None:
    lines = draw_text(timeline("1f1b", 2, 1, 1, latency=1), width=7 + 2 * 8).splitlines()
    assert lines == ["rank 0 F0        ~~B0--", "rank 1   ~~F0B0--"]


def test_every_second_stage_is_in_lower_case() -> None:
    lines = draw_text(timeline("interleaved", 2, 2, 2), width=7 + 3 * 15).splitlines()
    assert lines[1] == "rank 1    F0-F1-f0-b0----f1-b1----B0----B1----"


@settings(derandomize=True, max_examples=60, deadline=None)
@given(
    name=st.sampled_from(sorted(SCHEDULES)),
    ranks=st.integers(1, 6),
    microbatches=st.integers(1, 12),
    room=st.sampled_from([1, 3, 5]),
)
def test_with_room_for_every_action_the_order_reads_back(name: str, ranks: int, microbatches: int, room: int) -> None:
    made = timeline(name, ranks, SCHEDULES[name].chunks or 2, microbatches)
    clock = max(13, int(made.makespan))
    lines = draw_text(made, width=7 + room * clock, clock=clock).splitlines()
    for intervals, line in zip(made.intervals, lines, strict=True):
        if room > 2:
            assert re.findall(r"[FBIW]\d+", line[7:].upper()) == [f"{a.kind}{a.microbatch}" for a, _, _ in intervals]
        for action, start, _ in intervals:  # each begins in the column of its time
            assert line[7 + room * int(start)].upper() == action.kind


def test_colours_change_nothing_but_the_colour() -> None:
    made = timeline("zb-h1", 3, 1, 5)
    colored = draw_text(made, color=True)
    assert "\x1b[" in colored
    assert "\n".join(x.rstrip() for x in re.sub(r"\x1b\[[\d;]*m", "", colored).splitlines()) == draw_text(made)


def test_two_drawings_on_one_clock() -> None:
    short, long = timeline("zb-h1", 2, 1, 4), timeline("1f1b", 2, 1, 4)
    (whole, *_), (part, *_) = (draw_text(t, 7 + 60, clock=15).splitlines() for t in (long, short))
    assert len(whole) == 7 + 60
    assert len(part) == 7 + 4 * 13


def test_the_headline_tells_span_from_makespan() -> None:
    assert headline(timeline("zb-h2", 4, 1, 12)) == ("makespan 39, bubble 7.7% (0.0% of the span 36), peak memory 7")


@pytest.mark.parametrize(
    ("value", "text"),
    [(120, "120"), (1 / 3, "0.3333"), (Fraction(1, 3), "0.3333"), (123456, "123456"), (0, "0"), (1e-7, "1e-07")],
)
def test_numbers(value: float, text: str) -> None:
    assert format_number(value) == text


def test_the_legend_names_what_there_is() -> None:
    assert text_legend([timeline("1f1b", 2, 1, 2)]) == "F forward, B backward"
    assert "lower case" in text_legend([timeline("zb-v", 2, 2, 4)])
    assert text_legend([timeline("1f1b", 2, 1, 2, latency=1)]).endswith("~ waits for a transfer")


def test_stages_of_a_rank_are_counted() -> None:
    assert chunk_indices(timeline("zb-v", 2, 2, 4)) == {0: 0, 1: 0, 2: 1, 3: 1}
    assert chunk_indices(Timeline("", ((), ()))) == {}
