"""Who is missing, from places of ranks: runs are simulated, and the rank that stops in them is known."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from megatron.distributed.places import AWAITED, BACKGROUND, PHASE, STEP, UNTRACKED, ProcessPlace
from megatron.training.stalls import Stall, awaited_call, describe, explain_stall, missing_ranks


def recorded(calls: Sequence[tuple[str, Sequence[int], str, int]], awaited: bool, step: int = 3) -> dict[str, Any]:
    """The place of a rank after calls (axes, ranks, operation, count), the last of which it waits for."""
    place, rows = ProcessPlace(), dict[tuple[str, tuple[int, ...]], int]()
    place.slots[STEP], place.slots[PHASE] = step, place.text("batch-generator")
    for number, (axes, ranks, operation, count) in enumerate(calls):
        key = axes, tuple(ranks)
        row = rows[key] = rows.get(key) or place.new_row(axes, ranks)
        call = place.call(row, operation, axes, "torch.float32", count)
        if awaited and number + 1 == len(calls):
            place.slots[row + AWAITED] = call
    return place.read()


WORLD = [*range(8)]


def simulated(stops: dict[int, int], seed: int) -> dict[int, dict[str, Any]]:
    """Places after a run of random collectives along rows, columns and all of a grid of 2 x 4, in which ranks stop.

    Rank r calls nothing after ``stops[r]`` collectives of the program. All others go on as far as they can.
    """
    draw = random.Random(seed)
    rows, columns = [WORLD[:4], WORLD[4:]], [[i, i + 4] for i in range(4)]
    program = [draw.choice([("tp", rows), ("dp", columns), ("world", [WORLD])]) for _ in range(12)]
    called = dict.fromkeys(WORLD, 0)  # collectives that a rank has called; the last may be incomplete
    waits = dict.fromkeys(WORLD, False)
    moved = True
    while moved:
        moved = False
        for rank in WORLD:
            if waits[rank]:
                groups = program[called[rank] - 1][1]
                members = next(group for group in groups if rank in group)
                waits[rank] = any(called[member] < called[rank] for member in members)
                moved |= not waits[rank]
            if not waits[rank] and called[rank] < min(len(program), stops.get(rank, len(program))):
                called[rank], waits[rank], moved = called[rank] + 1, True, True

    def calls(rank: int) -> list[tuple[str, Sequence[int], str, int]]:
        own = [(axes, next(g for g in groups if rank in g)) for axes, groups in program[: called[rank]]]
        return [(axes, members, "all-reduce", 7) for axes, members in own]

    return {rank: recorded(calls(rank), waits[rank]) for rank in WORLD}


@pytest.mark.parametrize("seed", range(20))
def test_the_rank_that_stops_is_found_among_ranks_that_wait_for_each_other(seed: int) -> None:
    draw = random.Random(100 + seed)
    culprit = draw.randrange(8)
    places = simulated({culprit: draw.randrange(6)}, seed)
    assert missing_ranks(places) == (culprit,)
    found = explain_stall(places, 10.0)
    assert found.culprits == (culprit,)
    assert found.sentence.startswith(f"rank {culprit}: data loader, step 3; ")


def test_two_ranks_that_stop_are_both_found() -> None:
    assert missing_ranks(simulated({1: 2, 6: 2}, 5)) == (1, 6)


def test_a_circle_of_ranks_is_named_as_a_whole() -> None:
    first = recorded([("tp", [0, 1], "all-reduce", 1)], awaited=True)
    second = recorded([("dp", [0, 1], "all-reduce", 1)], awaited=True)
    assert missing_ranks({0: first, 1: second}) == (0, 1)


@pytest.mark.parametrize(
    ("operation", "count", "text"),
    [("broadcast", 7, "broadcast of 7 x float32"), ("all-reduce", 9, "all-reduce of 9 x float32")],
)
def test_the_first_call_that_differs_is_named_with_both_sides(operation: str, count: int, text: str) -> None:
    same = ("world", WORLD, "all-reduce", 7)
    places = {rank: recorded([same] * 5, awaited=True) for rank in WORLD}
    places[3] = recorded([same, same, ("world", WORLD, operation, count), same], awaited=True)
    found = explain_stall(places, 10.0)
    assert (found.culprits, found.differ) == ((3,), True)
    rest = "ranks 0, 1, 2, 4, 5, 6, 7 called all-reduce of 7 x float32"
    assert found.sentence.startswith(f"rank 3 called {text} in world as number 3 of the group; {rest} (rank 3: ")
    places[3] = recorded([("world", WORLD, operation, count), *[same] * 80], awaited=True)
    places[0] = recorded([same] * 81, awaited=True)
    assert explain_stall({0: places[0], 3: places[3]}, 10.0).differ  # long ago


def test_a_process_that_cannot_answer_is_the_cause() -> None:
    places = simulated({2: 3}, 1)
    for rank, place in places.items():
        place["state"] = "T" if rank == 5 else "S"
    assert explain_stall(places, 10.0).culprits == (5,)
    assert "rank 5: stopped (process state T), " in explain_stall(places, 10.0).sentence
    places[5] |= {"state": "S", "silent": 6.0}
    assert "rank 5: in native code that holds Python's lock, " in explain_stall(places, 10.0).sentence
    assert explain_stall(places, 20.0).culprits == (2,)
    places[7]["state"] = ""
    lost = explain_stall(places, 10.0)
    assert (lost.culprits, lost.lost) == ((7,), True)
    places[7]["left"] = True  # it was done
    assert explain_stall(places, 20.0).culprits == (2,)


def test_ranks_that_have_all_called_are_not_blamed() -> None:
    places = {rank: recorded([("world", WORLD, "all-reduce", 1)], awaited=True) for rank in WORLD}
    assert explain_stall(places, 10.0) == Stall("ranks 0, 1, 2, 3, 4, 5, 6, 7: all-reduce world, step 3", places=places)


def test_what_background_threads_wait_for_comes_last() -> None:
    place, world = ProcessPlace(), [0, 1]
    for axes in (BACKGROUND, "dp"):
        row = place.new_row(axes, world)
        place.slots[row + AWAITED] = place.call(row, "all-gather", axes, "torch.int64", 4)
    found = awaited_call(place.read())
    assert found is not None
    assert found["axes"] == "dp"
    assert describe(place.read(), 1.0) == "all-gather dp"


def test_groups_of_the_same_ranks_are_told_apart() -> None:
    place = ProcessPlace()
    rows = [place.new_row("tp", range(100, 4, -3)) for _ in range(2)]
    place.call(rows[1], "broadcast", "tp", "torch.float32", 1)
    first, second = place.read()["groups"]
    assert (first["use"], first["calls"], second["use"], second["calls"]) == (0, 0, 1, 1)
    assert first["ranks"] == [*range(100, 4, -3)]


def test_groups_without_room_for_their_text_are_not_compared() -> None:
    place = ProcessPlace()
    ranks = [n * n for n in range(1000)]  # no even steps
    rows = [place.new_row(f"axes {number}", ranks) for number in range(40)]
    assert UNTRACKED in rows
    for number, row in enumerate(rows):
        place.call(row, "all-reduce", "dp", "torch.float32", number)
    assert all(group["axes"] for group in place.read()["groups"])
