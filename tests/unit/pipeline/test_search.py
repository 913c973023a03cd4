"""Searched schedules: valid, within the limit, never worse than what is written by hand, better where it can be."""

from __future__ import annotations

import math
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.pipeline.actions import Action, PipelineSchedule, ScheduleError
from megatron.pipeline.communication import add_communication
from megatron.pipeline.schedules import SCHEDULES, make_schedule
from megatron.pipeline.search import SEARCHED, search_schedule
from megatron.pipeline.simulate import StageCosts, Timeline, simulate
from megatron.pipeline.validate import validate_program


def simulated(schedule: PipelineSchedule, costs: StageCosts) -> Timeline:
    return simulate(add_communication(schedule), costs)


def by_hand(ranks: int, chunks: int, microbatches: int, costs: StageCosts, limit: float = math.inf) -> float:
    """The makespan of the best hand-written schedule that fits; infinite when none does."""
    names = [name for name, recipe in SCHEDULES.items() if recipe.chunks in (None, chunks)]
    timelines = [simulated(make_schedule(name, ranks, chunks, microbatches), costs) for name in names]
    return min((made.makespan for made in timelines if max(made.peak_memory) <= limit), default=math.inf)


@st.composite
def problems(draw: st.DrawFn) -> tuple[int, int, int, StageCosts, float | None]:
    ranks, chunks, microbatches = draw(st.integers(1, 4)), draw(st.integers(1, 3)), draw(st.integers(1, 6))
    stages = ranks * chunks
    durations = st.tuples(*[st.integers(1, 9)] * stages)
    sizes = st.tuples(*[st.integers(2, 4)] * stages)
    activation = draw(sizes)
    weight = tuple(min(2, size) for size in activation)
    costs = StageCosts(
        draw(durations), draw(durations), draw(durations), draw(st.integers(0, 4)), 0, activation, weight
    )
    largest = sum(sorted(activation)[-chunks:])  # one micro-batch fits on any rank
    return ranks, chunks, microbatches, costs, draw(st.none() | st.integers(largest, 3 * largest))


@settings(derandomize=True, deadline=None, max_examples=25)
@given(problems())
def test_it_is_valid_fits_and_is_never_worse_than_by_hand(
    drawn: tuple[int, int, int, StageCosts, float | None],
) -> None:
    ranks, chunks, microbatches, costs, limit = drawn
    found = search_schedule(ranks, chunks, microbatches, costs, limit)
    assert (len(found.ranks), found.stages, found.microbatches) == (ranks, ranks * chunks, microbatches)
    validate_program(add_communication(found))
    made = simulated(found, costs)
    bound = math.inf if limit is None else limit
    assert max(made.peak_memory) <= bound
    assert made.makespan <= by_hand(ranks, chunks, microbatches, costs, bound)


@pytest.mark.parametrize(
    ("ranks", "chunks", "microbatches", "costs", "limit", "gain"),
    [
        (4, 2, 8, StageCosts.uniform(8, latency=0.6), 16, 0.10),  # communication
        (4, 1, 8, StageCosts.uniform(4, 1.0, 1.2, 0.8, 0.1), 6, 0.07),  # memory between that of ZB-H1 and of ZB-H2
        (4, 1, 8, StageCosts((1, 1, 1, 1.5), (1, 1, 1, 1.5), (0.5,) * 4), 6, 0.03),  # a slow last stage
        (4, 1, 8, StageCosts.uniform(4, 1, 2, 1), 6, 0.05),  # slow input gradients
        (4, 3, 12, StageCosts.uniform(12), 12, math.inf),  # three stages on a rank in little memory: none by hand
    ],
)
def test_it_is_better_than_all_by_hand(
    ranks: int, chunks: int, microbatches: int, costs: StageCosts, limit: float | None, gain: float
) -> None:
    found = search_schedule(ranks, chunks, microbatches, costs, limit)
    best = by_hand(ranks, chunks, microbatches, costs, math.inf if limit is None else limit)
    assert found.name == SEARCHED
    if gain == math.inf:
        assert best == math.inf
    else:
        assert simulated(found, costs).makespan < (1 - gain) * best


@pytest.mark.parametrize(
    ("ranks", "microbatches", "f", "i", "w", "hop", "published"),
    [
        (8, 24, 18.522, 18.086, 9.337, 0.601, 0.1585),
        (8, 32, 29.802, 29.428, 19.530, 0.577, 0.1045),
    ],
)
def test_in_the_memory_of_1f1b_it_is_as_good_as_the_published_search(
    ranks: int, microbatches: int, f: float, i: float, w: float, hop: float, published: float
) -> None:
    """ZB-1p of Qi et al., arXiv 2401.10241, table 5."""
    costs = StageCosts.uniform(ranks, f, i, w, latency=hop)
    assert (
        round(simulated(search_schedule(ranks, 1, microbatches, costs, limit=ranks), costs).span_bubble, 4) <= published
    )


Order = tuple[Action, ...]


def every_order(microbatches: int, costs: StageCosts) -> float:
    """The least makespan of any schedule with one stage on each of two ranks, by trying every order on each."""
    pairs = product(*(orders(stage, (0, 0, 0), microbatches) for stage in range(2)))
    return min(simulated(PipelineSchedule("tried", pair), costs).makespan for pair in pairs if comes_to_its_end(pair))


def orders(stage: int, done: tuple[int, ...], microbatches: int) -> list[Order]:
    """All orders of what a rank has left after ``done`` of F, I and W each: I after its F, W after its I."""
    if done == (microbatches,) * 3:
        return [()]
    found: list[Order] = []
    for index, kind in enumerate("FIW"):
        if done[index] < (done[index - 1] if index else microbatches):
            after = tuple(count + (place == index) for place, count in enumerate(done))
            found += [(Action(stage, kind, done[index]), *rest) for rest in orders(stage, after, microbatches)]
    return found


def comes_to_its_end(ranks: tuple[Order, ...]) -> bool:
    try:
        validate_program(add_communication(PipelineSchedule("tried", ranks)))
    except ScheduleError:
        return False
    return True


@pytest.mark.parametrize("hop", [0, 1])
@pytest.mark.parametrize("seconds", [(1, 1, 1), (2, 3, 1), (1, 1, 4)])
def test_on_two_ranks_it_is_the_best_of_all_orders(seconds: tuple[int, int, int], hop: int) -> None:
    costs = StageCosts.uniform(2, *seconds, latency=hop)
    assert simulated(search_schedule(2, 1, 2, costs), costs).makespan == every_order(2, costs)


@pytest.mark.parametrize(
    ("name", "ranks", "chunks", "limit"),
    [("zb-h1", 4, 1, 4), ("zb-h1", 8, 1, 8), ("zb-h2", 6, 1, 11), ("zb-v", 4, 2, 8)],
)
def test_it_finds_what_others_found_by_hand(
    name: str, ranks: int, chunks: int, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where all actions take equally long, and the hand-written schedules are no candidates."""
    costs = StageCosts.uniform(ranks * chunks)
    found = simulated(make_schedule(name, ranks, chunks, 3 * ranks), costs)
    monkeypatch.setattr("megatron.pipeline.search.SCHEDULES", {})
    made = simulated(search_schedule(ranks, chunks, 3 * ranks, costs, limit), costs)
    assert made.makespan == found.makespan
    assert max(made.peak_memory) <= max(found.peak_memory)


def test_the_same_question_has_the_same_answer() -> None:
    costs = StageCosts.uniform(8, 1.1, 1.3, 0.7, latency=0.2)
    assert search_schedule(4, 2, 8, costs, 12) == search_schedule(4, 2, 8, costs, 12)


def test_of_equally_fast_schedules_it_takes_the_one_that_holds_least() -> None:
    """1F1B and GPipe take equally long on one rank, and so does everything else."""
    costs = StageCosts.uniform(1)
    assert max(simulated(search_schedule(1, 1, 8, costs), costs).peak_memory) == 1


@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_a_limit_below_one_micro_batch_is_refused_with_the_least_that_is_not(chunks: int) -> None:
    costs = StageCosts.uniform(3 * chunks, latency=0.1)
    with pytest.raises(ScheduleError, match=f"fits in a memory limit of {chunks - 0.5:g}") as error:
        search_schedule(3, chunks, 5, costs, chunks - 0.5)
    assert error.value.fixes == (f"a memory limit of {chunks}",)
    made = simulated(search_schedule(3, chunks, 5, costs, chunks), costs)
    assert max(made.peak_memory) == chunks


def test_where_the_stages_are_can_be_given() -> None:
    loop, zigzag = (0, 1, 2, 3) * 2, (0, 1, 2, 3, 3, 2, 1, 0)
    costs = StageCosts.uniform(8, latency=0.3)
    for placement in (loop, zigzag):
        assert search_schedule(4, 2, 8, costs, placement=placement).placement == placement


def test_costs_of_another_pipeline_are_refused() -> None:
    with pytest.raises(ScheduleError, match="'forward' for 3 stages, and the schedule has 4"):
        search_schedule(2, 2, 4, StageCosts.uniform(3))
