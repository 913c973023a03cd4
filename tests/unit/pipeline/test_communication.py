"""Sends and receives of a schedule: those that are needed, where the model of communication wants them."""

from __future__ import annotations

from collections import defaultdict

import pytest
from hypothesis import given, settings

from megatron.pipeline.actions import (
    COMMUNICATION_KINDS,
    COMPUTE_KINDS,
    FORWARD,
    RECV_B,
    RECV_F,
    SEND_B,
    SEND_F,
    WEIGHT,
    Action,
    PipelineSchedule,
    ScheduleError,
)
from megatron.pipeline.communication import add_communication, channel_of, channels, peer_action
from megatron.pipeline.schedules import make_schedule
from tests.unit.pipeline.test_validate import program, schedules

Edge = tuple[int, int]


def lines(found: PipelineSchedule) -> list[str]:
    """The text of each rank."""
    return [" ".join(map(str, actions)) for actions in found.ranks]


def partner(action: Action) -> Action:
    """By its name: what the rank at the other end of a channel does with the same tensor."""
    stage, kind, microbatch = action
    forward = kind.endswith("F")
    step = 1 if (kind.startswith("SEND") == forward) else -1
    kinds = (SEND_F, RECV_F) if forward else (SEND_B, RECV_B)
    return Action(stage + step, kinds[kind in (SEND_F, SEND_B)], microbatch)


def taker(receive: Action, rank: tuple[Action, ...]) -> int:
    """Where the computing action stands that takes a tensor, in a schedule."""
    stage, kind, microbatch = receive
    kinds = (FORWARD,) if kind == RECV_F else ("B", "I")
    return next(i for i, a in enumerate(rank) if (a.stage, a.microbatch) == (stage, microbatch) and a.kind in kinds)


def slots(rank: tuple[Action, ...]) -> list[tuple[int, Action]]:
    """The receives of a program, each with the number of computing actions before it."""
    before, found = 0, []
    for action in rank:
        if action.kind in COMPUTE_KINDS:
            before += 1
        elif action.kind in (RECV_F, RECV_B):
            found.append((before, action))
    return found


@settings(max_examples=80, derandomize=True, deadline=None)
@given(schedules(ranks=6, chunks=3, microbatches=10))
def test_what_crosses_ranks_is_sent_once_and_received_once_in_the_same_order(schedule: PipelineSchedule) -> None:
    placement = schedule.placement
    found = add_communication(schedule)
    assert found.only(COMPUTE_KINDS).ranks == schedule.ranks
    crossing = {
        Action(stage, SEND_F if step > 0 else SEND_B, microbatch)
        for step in (1, -1)
        for stage, rank in enumerate(placement)
        for microbatch in range(schedule.microbatches)
        if 0 <= stage + step < len(placement) and placement[stage + step] != rank
    }
    sent: dict[Edge, list[Action]] = defaultdict(list)
    received: dict[Edge, list[Action]] = defaultdict(list)
    for rank, actions in enumerate(found.ranks):
        for action in actions:
            if action.kind in (SEND_F, SEND_B):
                sent[rank, placement[partner(action).stage]].append(action)
            elif action.kind in COMMUNICATION_KINDS:
                received[placement[partner(action).stage], rank].append(action)
    every = [action for order in sent.values() for action in order]
    assert sorted(every) == sorted(crossing)
    assert {edge: [partner(action) for action in order] for edge, order in sent.items()} == received
    assert set(sent) <= set(channels(placement))


@settings(max_examples=80, derandomize=True, deadline=None)
@given(schedules(ranks=6, chunks=3, microbatches=10))
def test_sends_follow_at_once_and_receives_come_as_late_as_they_may(schedule: PipelineSchedule) -> None:
    placement = schedule.placement
    found = add_communication(schedule)
    for rank, actions in enumerate(found.ranks):
        for before, action in zip(actions, actions[1:]):
            if action.kind in (SEND_F, SEND_B):
                assert (before.stage, before.microbatch) == (action.stage, action.microbatch)
                assert before.kind in ((FORWARD,) if action.kind == SEND_F else ("B", "I"))
        posted: dict[Edge, list[tuple[int, int]]] = defaultdict(list)
        for slot, receive in slots(actions):
            posted[channel_of(receive, placement)].append((slot, taker(receive, schedule.ranks[rank])))
        for order in posted.values():
            for number, (slot, _) in enumerate(order):
                assert slot == min(max(later - 1, 0) for _, later in order[number:])


def test_1f1b_on_two_ranks() -> None:
    assert lines(add_communication(make_schedule("1f1b", 2, 1, 2))) == [
        "0F0 0SEND_F0 0RECV_B0 0F1 0SEND_F1 0RECV_B1 0B0 0B1",
        "1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 1SEND_B1",
    ]


def test_neighbours_on_one_rank_hand_over_and_outputs_and_gradients_share_a_channel() -> None:
    """A V over two ranks: stages 1 and 2 are both on rank 1."""
    v = program("0F0 3F0 3B0 0F1 3F1 3B1 0B0 0B1", "1F0 2F0 2B0 1B0 1F1 2F1 2B1 1B1")
    assert lines(add_communication(v)) == [
        "3RECV_F0 0F0 0SEND_F0 3F0 3B0 3SEND_B0 0RECV_B0 3RECV_F1 0F1 0SEND_F1 3F1 3B1 3SEND_B1 0RECV_B1 0B0 0B1",
        "1RECV_F0 1F0 2RECV_B0 2F0 2SEND_F0 2B0 1RECV_F1 1B0 1SEND_B0 1F1 2RECV_B1 2F1 2SEND_F1 2B1 1B1 1SEND_B1",
    ]


def test_a_receive_comes_early_where_the_order_of_the_sends_demands_it() -> None:
    """Rank 1 wants micro-batch 1 last; rank 0 sends it first."""
    found = add_communication(program("0F1 0F0 0F2", "1F0 1F2 1F1"))
    assert lines(found)[1] == "1RECV_F1 1RECV_F0 1RECV_F2 1F0 1F2 1F1"


def test_communication_that_a_schedule_brings_along_stays() -> None:
    found = program("0F0 0SEND_F0", "1RECV_F0 1F0")
    assert add_communication(found) is found


def test_what_nobody_makes_or_takes_is_not_moved() -> None:
    assert lines(add_communication(program("0F0 0F1", "1F0 1F2"))) == ["0F0 0SEND_F0 0F1", "1RECV_F0 1F0 1F2"]


def test_gradients_of_weights_move_nothing() -> None:
    found = add_communication(make_schedule("zb-h1", 2, 1, 2))
    for before, action in zip(found.ranks[1], found.ranks[1][1:]):
        assert not (before.kind == WEIGHT and action.kind in (SEND_F, SEND_B))


def test_channels_of_a_loop_and_of_a_v() -> None:
    assert channels((0, 1, 2)) == ((0, 1), (1, 0), (1, 2), (2, 1))
    assert channels((0, 1, 2, 0, 1, 2)) == ((0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1))
    assert channels((0, 1, 1, 0)) == ((0, 1), (1, 0))
    assert channels((0, 0)) == ()


def test_both_ends_name_the_same_channel() -> None:
    placement = (0, 1, 2, 2, 1, 0)
    for text, edge in {"0SEND_F0": (0, 1), "3SEND_F0": (2, 1), "4SEND_B7": (1, 2), "1SEND_B7": (1, 0)}.items():
        action = Action.parse(text)
        assert channel_of(action, placement) == channel_of(peer_action(action), placement) == edge
        assert peer_action(action) == partner(action)
        assert peer_action(peer_action(action)) == action


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("0F0", "0F0 computes: only SEND_F, RECV_F, SEND_B, RECV_B go through a channel"),
        ("0RECV_F0", "0RECV_F0 has no other end: the stages are 0 to 2"),
        ("2SEND_F0", "2SEND_F0 has no other end: the stages are 0 to 2"),
        ("3RECV_F0", "3RECV_F0 has no other end: the stages are 0 to 2"),
        ("1SEND_F3", "1SEND_F3 has no channel: stages 1 and 2 are both on rank 1"),
    ],
)
def test_what_has_no_channel(text: str, sentence: str) -> None:
    with pytest.raises(ScheduleError) as error:
        channel_of(Action.parse(text), (0, 1, 1))
    assert error.value.sentence == sentence
