"""Traces: what is written is read, in the form that viewers expect; what is no timeline is refused."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from megatron.pipeline.actions import Action, ScheduleError
from megatron.pipeline.communication import add_communication
from megatron.pipeline.schedules import SCHEDULES, make_schedule
from megatron.pipeline.simulate import Interval, StageCosts, Timeline, simulate
from megatron.planner.timeline import read_trace, write_trace

MEASURED = Timeline("1f1b", ((Interval(Action(0, "F", 0), 1.5, 1.75), Interval(Action(0, "B", 0), 2.0, 2.5)), ()))
"""Times that do not start at 0, no transfers, a rank of which nothing was noted."""


def numbers(timeline: Timeline) -> list[float]:
    """Every time and size in it."""
    times = [time for rank in timeline.intervals for interval in rank for time in interval[1:]]
    times += [time for transfer in timeline.transfers for time in transfer[3:]]
    return [*times, *timeline.activation, *timeline.weight_memory]


def labels(timeline: Timeline) -> list[object]:
    ranks = [[interval.action for interval in rank] for rank in timeline.intervals]
    return [timeline.name, ranks, [transfer[:3] for transfer in timeline.transfers]]


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_what_is_written_is_read(name: str, tmp_path: Path) -> None:
    stages = 3 * (SCHEDULES[name].chunks or 2)
    costs = StageCosts((0.1,) * stages, (0.3,) * stages, (0.7,) * stages, 1e-6, 1e-5, (2.5,) * stages, (1.5,) * stages)
    made = simulate(add_communication(make_schedule(name, 3, stages // 3, 7)), costs)
    write_trace(made, tmp_path / "trace.json")
    read = read_trace(tmp_path / "trace.json")
    assert labels(read) == labels(made)
    assert numbers(read) == pytest.approx(numbers(made), rel=1e-12)
    assert read.exposed_time == pytest.approx(made.exposed_time, abs=1e-12)
    assert read.peak_memory == made.peak_memory


def test_what_was_measured_is_read(tmp_path: Path) -> None:
    write_trace(MEASURED, tmp_path / "trace.json")
    read = read_trace(tmp_path / "trace.json")
    assert read == MEASURED
    assert (read.start, read.makespan, read.bubble) == (1.5, 1.0, 0.625)


def test_fractions_become_floats(tmp_path: Path) -> None:
    made = simulate(
        add_communication(make_schedule("1f1b", 2, 1, 2)), StageCosts.uniform(2, Fraction(1, 4), Fraction(1, 2), 1)
    )
    write_trace(made, tmp_path / "trace.json")
    assert read_trace(tmp_path / "trace.json").makespan == 5.25 == made.makespan


def test_viewers_find_microseconds_processes_and_colours(tmp_path: Path) -> None:
    """The fields of complete and metadata events in Chrome's Trace Event Format."""
    made = simulate(add_communication(make_schedule("zb-h1", 2, 1, 1)), StageCosts.uniform(2, 2, 3, 1, latency=0.5))
    write_trace(made, tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    complete = {event["name"]: event for event in events if event["ph"] == "X"}
    forward, send = complete["1F0"], complete["0SEND_F0"]
    assert (forward["pid"], forward["tid"], forward["ts"], forward["dur"]) == (1, 0, 2.5e6, 2e6)
    assert (send["pid"], send["tid"], send["ts"], send["dur"]) == (0, 2, 2e6, 0.5e6)
    kinds = {name: event["cname"] for name, event in complete.items()}
    assert len({kinds["0F0"], kinds["0I0"], kinds["0W0"], kinds["0SEND_F0"]}) == 4
    titles = {(event["pid"], event["tid"], event["args"]["name"]) for event in events if event["ph"] == "M"}
    assert {(0, 0, "pipeline rank 0"), (1, 0, "computing"), (0, 2, "to rank 1"), (1, 1, "to rank 0")} <= titles
    assert len(events) == len((tmp_path / "trace.json").read_text().splitlines()) - 4  # one event per line


def written(path: Path, **changes: Any) -> Path:
    """The measured timeline, with fields of its second compute event changed."""
    write_trace(MEASURED, path)
    content = json.loads(path.read_text())
    [event for event in content["traceEvents"] if event["ph"] == "X"][1].update(changes)
    path.write_text(json.dumps(content))
    return path


def test_events_may_stand_in_any_order(tmp_path: Path) -> None:
    path = written(tmp_path / "trace.json")
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content | {"traceEvents": content["traceEvents"][::-1]}))
    assert read_trace(path) == MEASURED


def test_events_of_others_are_left_out(tmp_path: Path) -> None:
    path = written(tmp_path / "trace.json", cat="kernel", name="gemm")
    assert read_trace(path).intervals == (MEASURED.intervals[0][:1], ())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"name": "0X0"}, "'0X0' is not an action"),
        ({"name": "0SEND_F0"}, "0SEND_F0 is computed on rank 0 of 2"),
        ({"pid": 2}, "0B0 is computed on rank 2 of 2"),
        ({"ts": float("nan")}, "0B0 starts at nan and takes"),
        ({"dur": -1}, "0B0 starts at 2000000.0 and takes -1 microseconds"),
        ({"ts": 1.6e6}, "rank 0 starts 0B0 at 1.6 s, before 0F0 is over"),
        ({"ts": "soon"}, "it is not a trace of a pipeline"),
    ],
)
def test_an_event_that_cannot_be_is_refused(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(ScheduleError, match="cannot be read as a timeline") as error:
        read_trace(written(tmp_path / "trace.json", **changes))
    assert words in error.value.sentence


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"otherData": {"ranks": 1}}', '{"otherData": 3}', "null"])
def test_what_is_no_timeline_is_refused_with_the_way_to_make_one(text: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text(text)
    with pytest.raises(ScheduleError, match=r"trace\.json cannot be read as a timeline: ") as error:
        read_trace(path)
    assert "--profile-pipeline" in error.value.fixes[0]


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ScheduleError, match="No such file"):
        read_trace(tmp_path / "none.json")
