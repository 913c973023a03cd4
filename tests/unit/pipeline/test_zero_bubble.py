"""Schedules with backward in halves have the bubbles and the memory that their papers state."""

from __future__ import annotations

import pytest

from megatron.pipeline.schedules import ActionList, make_schedule
from tests.unit.pipeline.clock import bubbles, clock, memory

SECONDS = [(1, 1, 1), (2, 2, 1), (3, 3, 2), (2, 3, 2), (1, 2, 1), (2, 1, 1)]
"""f, i and w of a stage, with w <= f and w <= i."""


def durations(f: int, i: int, w: int) -> dict[str, int]:
    return {"F": f, "B": i + w, "I": i, "W": w}


def peaks(name: str, p: int, m: int) -> list[int]:
    return [memory(actions) for actions in make_schedule(name, p, 2 if "-v" in name else 1, m).ranks]


@pytest.mark.parametrize("seconds", SECONDS)
@pytest.mark.parametrize("p", [1, 2, 3, 4, 7, 8])
def test_bubbles_of_zb_h1_and_h2(p: int, seconds: tuple[int, int, int]) -> None:
    f, i, w = seconds
    for m in (p, 2 * p - 1, 2 * p, 3 * p + 1, 6 * p):
        assert max(bubbles(make_schedule("zb-h1", p, 1, m), durations(f, i, w))) == (p - 1) * (f + i - w)
        if m >= 2 * p - 1:
            assert max(bubbles(make_schedule("zb-h2", p, 1, m), durations(f, i, w))) == (p - 1) * max(0, f + i - 2 * w)


@pytest.mark.parametrize("name", ["zb-h2", "zb-v"])
def test_no_rank_idles_where_all_take_equally_long(name: str) -> None:
    """The last rank starts p - 1 later than the first: so much longer is the step than the work."""
    for p in range(1, 9):
        for m in (2 * p - 1, 2 * p, 3 * p + 1, 5 * p - 1):
            schedule = make_schedule(name, p, 2 if name == "zb-v" else 1, m)
            assert bubbles(schedule) == [0] * p, (p, m)
            assert max(end for _, end in clock(schedule)) == 3 * m * schedule.stages // p + p - 1


@pytest.mark.parametrize("seconds", [(1, 1, 1), (2, 2, 1), (3, 2, 1), (2, 1, 1), (3, 3, 2)])
@pytest.mark.parametrize("p", [1, 2, 3, 4, 7, 8])
def test_bubble_of_dualpipe_v(p: int, seconds: tuple[int, int, int]) -> None:
    """Half of (p - 1)(f + i - w), where w <= i <= f <= b; a stage's seconds are half of a rank's."""
    f, i, w = seconds
    for m in (2 * p, 2 * p + 1, 5 * p):
        assert max(bubbles(make_schedule("dualpipe-v", p, 2, m), durations(f, i, w))) == (p - 1) * (f + i - w)


def test_memory() -> None:
    """ZB-H1 as 1F1B, ZB-H2 one less than twice that, ZB-V as 1F1B, DualPipeV half a micro-batch more."""
    for p in range(1, 9):
        for m in range(1, 5 * p):
            assert peaks("zb-h1", p, m) == [min(m, p)] * p
            assert peaks("zb-h2", p, m) == [min(m, 2 * p - 1)] * p
            assert max(peaks("zb-v", p, m)) == min(2 * m, 2 * p)
            assert max(peaks("dualpipe-v", p, m)) == min(2 * m, 2 * p + 1)
            if m >= 2 * p:
                assert set(peaks("zb-v", p, m)) == {2 * p}
                assert set(peaks("dualpipe-v", p, m)) == {2 * p + 1}


def test_weights_follow_inputs_in_order() -> None:
    """So weight gradients are summed in the order of the micro-batches, as in schedules with whole backwards."""
    for name in ("zb-h1", "zb-h2", "zb-v", "dualpipe-v"):
        schedule = make_schedule(name, 4, 2 if "-v" in name else 1, 11)
        for actions in schedule.ranks:
            for stage in {action.stage for action in actions}:
                done = [action.microbatch for action in actions if action.stage == stage and action.kind in "BW"]
                assert done == list(range(11)), (name, stage)


def test_a_line_counts_each_kind_and_leaves_out_what_is_not_there() -> None:
    line = ActionList(microbatches=2)
    line.add(3, "F", times=3)
    line.add(5, "F", "I")
    line.add(3, "B")
    line.add(3, "I", "W")
    line.add(3, "W", times=-1)
    assert [str(action) for action in line.actions] == ["3F0", "3F1", "5F0", "5I0", "3B0", "3I1", "3W1"]
