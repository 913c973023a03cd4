"""Schedules as text and files, and the sends and receives that make them programs."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.pipeline.actions import (
    COMMUNICATION_KINDS,
    COMPUTE_KINDS,
    EVALUATION_KINDS,
    FORWARD,
    RECV_B,
    RECV_F,
    SEND_B,
    SEND_F,
    Action,
    PipelineSchedule,
    ScheduleError,
    parse_cell,
)
from megatron.pipeline.communication import add_communication, channel_of, channels, peer_action
from tests.unit.pipeline.test_validate import program, schedules

ACTIONS = st.builds(
    Action, st.integers(0, 999), st.sampled_from((*COMPUTE_KINDS, *COMMUNICATION_KINDS)), st.integers(0, 9999)
)


def loaded(path: Path, text: str) -> PipelineSchedule:
    path.write_text(text, encoding="utf-8")
    return PipelineSchedule.load(path)


@pytest.mark.parametrize("text", ["", "F0", "2F", "2X0", "2F0 3F0", "-1F0", "2F0x", "2.0F1", "9" * 5000 + "F0", "²F0"])
def test_text_that_is_no_action_is_quoted(text: str) -> None:
    with pytest.raises(ScheduleError, match="is not an action") as error:
        Action.parse(text)
    assert f"'{text}'" in error.value.sentence


@pytest.mark.parametrize(
    ("cell", "actions"),
    [
        ("", []),
        (" ", []),
        ("None", []),
        ("none", []),
        ("2f0", ["2F0"]),
        ("3recv_b0", ["3RECV_B0"]),
        (" 2I10 ", ["2I10"]),
        ("(0F3;3B1)OVERLAP_F_B", ["0F3", "3B1"]),
        ("0F0; 0F1;", ["0F0", "0F1"]),
    ],
)
def test_cells(cell: str, actions: list[str]) -> None:
    assert [str(action) for action in parse_cell(cell)] == actions


@pytest.mark.parametrize("cell", ["0UNSHARD", "3RESHARD", "1REDUCE_GRAD7"])
def test_actions_of_fsdp_are_refused_by_name(cell: str) -> None:
    with pytest.raises(ScheduleError, match=rf"'{cell}' .*PyTorch.*\(FSDP\)") as error:
        parse_cell(cell)
    assert "compute_only" in error.value.fixes[0]


@settings(derandomize=True, deadline=None, max_examples=30)
@given(st.lists(st.lists(ACTIONS, min_size=1).map(tuple), min_size=1).map(tuple))
def test_schedules_are_read_as_they_were_written(
    tmp_path_factory: pytest.TempPathFactory, ranks: tuple[tuple[Action, ...], ...]
) -> None:
    path = tmp_path_factory.getbasetemp() / "mine.csv"
    PipelineSchedule("mine.csv", ranks).save(path)
    assert PipelineSchedule.load(path) == PipelineSchedule("mine.csv", ranks)


def test_a_file_as_people_and_spreadsheets_write_it(tmp_path: Path) -> None:
    text = '\ufeff0F0,0F1,,, 0b0,0B1\r\n,1F0,1B0,"1F1",1B1,None\r\n\r\n , \r\n'
    schedule = loaded(tmp_path / "mine.csv", text)
    assert [" ".join(map(str, actions)) for actions in schedule.ranks] == ["0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"]
    assert schedule.name == "mine.csv"


def test_errors_name_the_line_and_the_cell(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    with pytest.raises(ScheduleError, match=r"mine\.csv, line 2: '1Q0' is not an action"):
        loaded(path, "0F0,0B0\n1F0,1Q0\n")
    with pytest.raises(ScheduleError, match="line 2: '0UNSHARD' is not an action here") as error:
        loaded(path, "0F0,0B0\n0UNSHARD,1F0\n")
    assert error.value.fixes
    with pytest.raises(ScheduleError, match="line 2 has no action; line 2 lists the actions of rank 1"):
        loaded(path, "0F0,0B0\n,,\n1F0,1B0\n")


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ScheduleError, match=r"^there is no file \S+/missing\.csv$"):
        PipelineSchedule.load(tmp_path / "missing.csv")
    with pytest.raises(ScheduleError, match=r"cannot be read: Is a directory$"):
        PipelineSchedule.load(tmp_path)
    (tmp_path / "image.csv").write_bytes(b"\x89PNG\xff\xfe")
    with pytest.raises(ScheduleError, match="cannot be read as a schedule"):
        PipelineSchedule.load(tmp_path / "image.csv")
    (tmp_path / "long.csv").write_text("x" * 200_000)
    with pytest.raises(ScheduleError, match="cannot be read as a schedule: field larger"):
        PipelineSchedule.load(tmp_path / "long.csv")
    (tmp_path / "empty.csv").write_text("\n,\n")
    with pytest.raises(ScheduleError, match=r"empty\.csv has no action; each line lists the actions of a rank"):
        PipelineSchedule.load(tmp_path / "empty.csv")


def test_properties_of_a_schedule() -> None:
    schedule = PipelineSchedule(
        "v", (tuple(map(Action.parse, ("0F0", "3F0", "3SEND_B0", "0B0"))), (Action(1, "I", 4), Action(2, "F", 2)))
    )
    assert schedule.placement == (0, 1, 1, 0)
    assert (schedule.stages, schedule.microbatches) == (4, 5)
    assert [str(action) for action in schedule.only(EVALUATION_KINDS).ranks[0]] == ["0F0", "3F0"]


def test_stages_have_one_rank_each() -> None:
    with pytest.raises(ScheduleError, match="stage 1 is on rank 0 and on rank 1"):
        _ = PipelineSchedule("x", ((Action(0, "F", 0), Action(1, "F", 0)), (Action(1, "F", 1),))).placement
    with pytest.raises(ScheduleError, match="no rank has stage 1"):
        _ = PipelineSchedule("x", ((Action(0, "F", 0), Action(999_999_999, "F", 0)),)).placement
    with pytest.raises(ScheduleError, match="no rank has stage 0"):
        _ = PipelineSchedule("x", ()).placement


Edge = tuple[int, int]


def lines(found: PipelineSchedule) -> list[str]:
    """The text of each rank."""
    return [" ".join(map(str, actions)) for actions in found.ranks]


def taker(receive: Action, rank: tuple[Action, ...]) -> int:
    """Return the position in a schedule of the compute action that takes a tensor."""
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


@settings(max_examples=40, derandomize=True, deadline=None)
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


def test_tensors_without_producer_or_consumer_are_not_sent() -> None:
    assert lines(add_communication(program("0F0 0F1", "1F0 1F2"))) == ["0F0 0SEND_F0 0F1", "1RECV_F0 1F0 1F2"]


def test_channels_of_a_loop_and_of_a_v() -> None:
    assert channels((0, 1, 2)) == ((0, 1), (1, 0), (1, 2), (2, 1))
    assert channels((0, 1, 2, 0, 1, 2)) == ((0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1))
    assert channels((0, 1, 1, 0)) == ((0, 1), (1, 0))
    assert channels((0, 0)) == ()


def test_both_ends_name_the_same_channel() -> None:
    placement = (0, 1, 2, 2, 1, 0)
    ends = {"0SEND_F0 1RECV_F0": (0, 1), "3SEND_F0 4RECV_F0": (2, 1), "4SEND_B7 3RECV_B7": (1, 2)}
    for text, edge in ends.items():
        sent, received = map(Action.parse, text.split())
        assert channel_of(sent, placement) == channel_of(received, placement) == edge
        assert (peer_action(sent), peer_action(received)) == (received, sent)


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
def test_actions_without_a_channel_are_refused(text: str, sentence: str) -> None:
    with pytest.raises(ScheduleError) as error:
        channel_of(Action.parse(text), (0, 1, 1))
    assert error.value.sentence == sentence
