"""Layers of stages against every possible split, and layouts against their letters written out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.pipeline.actions import ScheduleError
from megatron.pipeline.partition import (
    LayerCosts,
    StageLayers,
    expand_layout,
    format_layout,
    parse_layout,
    split_by_cost,
    split_by_rank,
    split_equally,
    stages_from_counts,
)


def counts(stages: Sequence[StageLayers]) -> list[int]:
    return [len(stage.layers) for stage in stages]


def check(stages: Sequence[StageLayers], layers: int) -> None:
    """Every layer once and in order; the embedding in front, the output layer behind, and nothing empty between."""
    assert [layer for stage in stages for layer in stage.layers] == list(range(layers))
    assert [stage.first for stage in stages] == [True] + [False] * (len(stages) - 1)
    assert [stage.last for stage in stages] == [False] * (len(stages) - 1) + [True]
    assert all(counts(stages)[1:-1])


def every_split(layers: int, stages: int) -> list[tuple[StageLayers, ...]]:
    sizes = (sizes for sizes in product(range(layers + 1), repeat=stages) if sum(sizes) == layers and all(sizes[1:-1]))
    return [stages_from_counts(found) for found in sizes]


LOOP, V = (0, 1, 2, 0, 1, 2), (0, 1, 2, 2, 1, 0)
PLACEMENTS = [(0,), (0, 1), (0, 1, 2, 3), (0, 0, 0), (0, 1, 0, 1), (0, 1, 1, 0), (0, 1, 2, 2, 1, 0), (0, 1, 0, 1, 0, 1)]


@settings(max_examples=80, derandomize=True, deadline=None)
@given(st.integers(1, 7), st.sampled_from(PLACEMENTS), st.integers(1, 4), st.integers(0, 9), st.integers(0, 9))
def test_no_split_is_better_balanced(
    layers: int, placement: tuple[int, ...], layer: int, embedding: int, output: int
) -> None:
    costs, stages = LayerCosts(layer, embedding, output), len(placement)
    if stages > layers + 2:
        with pytest.raises(ScheduleError, match="do not fill"):
            split_by_cost(layers, placement, costs)
        return
    found = split_by_cost(layers, placement, costs)
    check(found, layers)

    def unevenness(split: Sequence[StageLayers]) -> tuple[float, ...]:
        each = [costs.of(stage) for stage in split]
        ranks = [sum(c for c, on in zip(each, placement) if on == rank) for rank in set(placement)]
        return max(ranks), sum(cost**2 for cost in ranks), sum(cost**2 for cost in each)

    assert unevenness(found) == min(map(unevenness, every_split(layers, stages)))


def test_of_equally_good_splits_the_first_stage_has_fewer_layers() -> None:
    assert counts(split_by_cost(10, range(4), LayerCosts(1))) == [2, 2, 3, 3]
    assert counts(split_by_cost(10, range(4), LayerCosts(1, 0, 0.3))) == [2, 3, 3, 2]


def test_a_large_output_layer_stands_alone() -> None:
    assert counts(split_by_cost(6, range(4), LayerCosts(1, 0, 5))) == [2, 2, 2, 0]
    assert counts(split_by_cost(2, range(4), LayerCosts(1))) == [0, 1, 1, 0]


def test_what_its_other_stage_does_counts_on_a_rank() -> None:
    assert counts(split_by_cost(12, V, LayerCosts(1, 0, 3))) == [2, 2, 2, 3, 3, 0]  # 5 on each rank


@pytest.mark.parametrize(("embedding", "output"), [*product((False, True), repeat=2)])
def test_equal_stages_count_what_is_said_to_count(embedding: bool, output: bool) -> None:
    for layers, stages in product(range(1, 20), range(1, 7)):
        found = split_equally(layers, stages, embedding, output)
        total = layers + embedding + output
        assert (found is None) == bool(total % stages)
        if found is not None:
            check(found, layers)
            sizes = counts(found)
            sizes[0] += embedding
            sizes[-1] += output
            assert set(sizes) == {total // stages}


@pytest.mark.parametrize("placement", [(0,), (0, 1), (0, 1, 2), LOOP, V], ids=str)
@pytest.mark.parametrize("said", [*product((None, 2, 3, 4), repeat=2)][1:], ids=str)
def test_ranks_have_the_layers_that_were_said(placement: tuple[int, ...], said: tuple[int | None, int | None]) -> None:
    ranks = max(placement) + 1
    for layers in range(1, 20):
        try:
            found = split_by_rank(layers, placement, *said)
        except ScheduleError:
            continue
        check(found, layers)
        on_rank = [sum(n for n, r in zip(counts(found), placement) if r == rank) for rank in range(ranks)]
        assert said[0] in (None, on_rank[0])
        assert said[1] in (None, on_rank[-1])
        free = [
            n for rank, n in enumerate(on_rank) if not (said[0] and rank == 0) and not (said[1] and rank == ranks - 1)
        ]
        assert len(set(free)) <= 1
        for rank in range(ranks):
            assert len({n for n, r in zip(counts(found), placement) if r == rank}) == 1


def test_what_ranks_cannot_share_is_refused_with_the_numbers_beside_it() -> None:
    with pytest.raises(ScheduleError, match="10 layers do not fill PP4 x VPP1 equally") as caught:
        split_by_rank(10, range(4), 3, None)
    assert [fix.split()[1] for fix in caught.value.fixes[:2]] == ["1", "4"]
    with pytest.raises(ScheduleError) as caught:
        split_by_rank(10, LOOP, None, 3)
    assert [fix.split()[1] for fix in caught.value.fixes[:2]] == ["2", "6"]
    with pytest.raises(ScheduleError):
        split_by_rank(3, range(3), 2, 1)  # which leaves nothing for the rank between them


WRITTEN_OUT = {
    "Et*3|(tt|)*29L": "Ettt|" + "tt|" * 29 + "L",
    "Ettt | (tt|)*2, tL": "Ettt|tt|tt|tL",
    "E | t * 4 | L": "E|tttt|L",
    "((Et|)*1(t|)*2)tL": "Et|t|t|tL",
    "Et*2(|t)*3L": "Ett|t|t|tL",
    "E(t(|t)*2)*2L": "Et|t|tt|t|tL",
}


@pytest.mark.parametrize("layout", WRITTEN_OUT)
def test_layouts_mean_their_letters(layout: str) -> None:
    letters = WRITTEN_OUT[layout]
    assert expand_layout(layout) == letters
    found = parse_layout(layout, letters.count("t"))
    check(found, letters.count("t"))
    assert counts(found) == [stage.count("t") for stage in letters.split("|")]


@settings(max_examples=100, derandomize=True, deadline=None)
@given(st.lists(st.integers(1, 5), max_size=8), st.integers(0, 4), st.integers(0, 4))
def test_a_split_reads_back_from_its_layout(middle: list[int], first: int, last: int) -> None:
    for split in (stages_from_counts([first, *middle, last]), stages_from_counts([first])):
        assert parse_layout(format_layout(split), sum(counts(split))) == split


def test_the_layout_of_a_regular_split_is_short() -> None:
    assert format_layout(stages_from_counts([3] + [2] * 29 + [0])) == "Et*3|(tt|)*29L"
    assert format_layout(stages_from_counts([4])) == "Et*4L"


REFUSED = {
    "E|t|m|L": "'m' at character 5 is multi-token prediction",
    "[['embedding'], ['decoder', 'loss']]": "'[' at character 1 is not part of a layout: lists of names",
    "Et||tL": "stage 1 is empty",
    "EttL|": "stage 1 is empty",
    "ttL": "does not begin with E: a layout is",
    "EtE|tL": "has more than one E, at character 1 and 3",
    "E*2ttL": "has more than one E, at character 1:",
    "Ett": "does not end with L: a layout is",
    "EtL|tL": "has more than one L, at character 3 and 6",
    "Et|L": "has 1 layer, and the model 2",
    "Et|t|tL": "has 3 layers, and the model 2",
    "Et, |(tL": "'(' at character 6 is never closed",
    "Et|t)L": "')' at character 5 has no opening parenthesis",
    "E*|ttL": "'*' at character 2 has no number after it",
    "E2t|L": "'2' at character 2 has no * before it",
    "Et|*2tL": "'*' at character 4 has no letter or parenthesis before it",
    "Et(*2)tL": "'*' at character 4 has no letter or parenthesis before it",
    "Et|xL": "'x' at character 4 is not part",
    "": "stage 0 is empty",
    "Et *2 *3|L": "'*' at character 7 follows another",
    "E(t|)*2*1L": "'*' at character 8 follows another",
    "Et*1000000L": "repeats more than any model",
    "E((t*999)*999)*999L": "repeats more than any model",
    f"Et*{'9' * 5000}L": "repeats more than any model",
    "Et*\u0662L": "'\u0662' at character 4 is not part",
}


@pytest.mark.parametrize("layout", REFUSED, ids=lambda layout: layout[:12])
def test_what_is_no_layout_of_the_model_is_refused(layout: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        parse_layout(layout, 2)
    assert REFUSED[layout] in caught.value.sentence


MEANT = {
    "t|t": "Et|tL",
    "Ett": "EttL",
    "tt|L": "Ett|L",
    "et|tl": "Et|tL",
    "ET*2|L": "Et*2|L",
    "E(t|*2L": "E(t|)*2L",
    "Et|(tL": "Et|(t)L",
    "e(t|*2": "E(t|)*2L",
}


@pytest.mark.parametrize("layout", MEANT)
def test_the_spelling_that_was_meant_is_offered(layout: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        parse_layout(layout, 2)
    assert caught.value.fixes[0] == f"--pipeline-model-parallel-layout '{MEANT[layout]}'"
    parse_layout(MEANT[layout], 2)


@pytest.mark.parametrize("layout", ["Et|t", "E(t(t|*2L", "Et|(t|*2", "Et|t)L", "Et||tL", "Et|mL"])
def test_no_spelling_is_offered_where_it_is_not_plain(layout: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        parse_layout(layout, 4)
    assert not any("'" in fix for fix in caught.value.fixes)


@settings(max_examples=300, derandomize=True, deadline=None)
@given(st.text("Et|L()*12 ", max_size=12))
def test_whatever_is_written_is_spelled_out_or_refused(layout: str) -> None:
    with suppress(ScheduleError):
        assert set(expand_layout(layout)) <= set("Et|L")


def test_one_layer_is_told_as_one() -> None:
    with pytest.raises(ScheduleError, match=r"^1 layer does not fill PP3 x VPP1 equally"):
        split_by_rank(1, range(3), 2, None)


@pytest.mark.parametrize(
    "make", [stages_from_counts, lambda sizes: parse_layout("E|" + "|".join("t" * n for n in sizes) + "|L", 3)]
)
def test_only_ends_may_be_without_layers(make: Callable[[list[int]], object]) -> None:
    with pytest.raises(ScheduleError, match=r"stage \d (would have no layers|is empty)"):
        make([1, 0, 2])
