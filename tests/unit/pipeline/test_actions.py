"""Actions and schedules as text: what is written is read, and what cannot be read is refused with a sentence."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.pipeline.actions import (
    COMMUNICATION_KINDS,
    COMPUTE_KINDS,
    EVALUATION_KINDS,
    Action,
    PipelineSchedule,
    ScheduleError,
    parse_cell,
)

ACTIONS = st.builds(
    Action, st.integers(0, 999), st.sampled_from((*COMPUTE_KINDS, *COMMUNICATION_KINDS)), st.integers(0, 9999)
)


def loaded(path: Path, text: str) -> PipelineSchedule:
    path.write_text(text, encoding="utf-8")
    return PipelineSchedule.load(path)


@settings(derandomize=True, deadline=None)
@given(ACTIONS)
def test_text_parses_back(action: Action) -> None:
    assert Action.parse(str(action)) == action
    assert Action.parse(f" {str(action).lower()} ") == action


def test_text_is_what_pytorch_writes() -> None:
    assert str(Action(2, "F", 0)) == "2F0"
    assert Action.parse("13RECV_B7") == Action(13, "RECV_B", 7)


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


def test_what_a_schedule_says_of_itself() -> None:
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
