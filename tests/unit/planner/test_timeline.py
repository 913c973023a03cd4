"""Timelines as pictures, as text and as traces."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from megatron.pipeline.actions import Action, ScheduleError
from megatron.pipeline.communication import add_communication
from megatron.pipeline.schedules import SCHEDULES, make_schedule
from megatron.pipeline.simulate import Interval, StageCosts, Timeline, simulate
from megatron.planner import timeline as timeline_module
from megatron.planner.timeline import action_color, draw_figure, draw_text, figure_size, read_trace, write_trace
from megatron.training.loggers.plots import open_figure as saved

ROOT = Path(__file__).parents[3]


def timeline(name: str, ranks: int, chunks: int, microbatches: int, latency: float = 0) -> Timeline:
    stages = ranks * chunks
    program = add_communication(make_schedule(name, ranks, chunks, microbatches))
    return simulate(program, StageCosts.uniform(stages, 1 / chunks, 1 / chunks, 1 / chunks, latency))


def drawn(panels: Mapping[str, Timeline], **more: float) -> Figure:
    figure = Figure(figsize=figure_size(panels), layout="constrained")
    draw_figure(figure, panels, **more)
    return figure


def bars(figure: Figure, panel: int = 0) -> list[tuple[tuple[float, ...], float, float, float]]:
    """Colour, middle, left and right of each coloured bar."""
    found = []
    for collection in figure.axes[2 * panel].collections:
        face = tuple(collection.get_facecolor()[0][:3]) if len(collection.get_facecolor()) else ()
        if (
            isinstance(collection, PolyCollection)
            and not collection.get_hatch()
            and face != to_rgb(timeline_module.IDLE_COLOR)
        ):
            for path in collection.get_paths():
                box = path.get_extents()
                found.append((face, (box.y0 + box.y1) / 2, box.x0, box.x1))
    return found


def test_every_action_is_a_bar_in_its_place_with_its_micro_batch() -> None:
    made = timeline("zb-v", 3, 2, 7, latency=0.25)
    figure = drawn({"zb-v": made})
    wanted = [
        (*action_color(action.kind, int(action.stage >= 3), 2), rank, start, end, str(action.microbatch))
        for rank, intervals in enumerate(made.intervals)
        for action, start, end in intervals
    ]
    numbers = {(round(x, 6), round(y, 6)): t.get_text() for t in figure.axes[0].texts for x, y in [t.get_position()]}
    found = [
        (*face, middle, left, right, numbers[round((left + right) / 2, 6), round(middle, 6)])
        for face, middle, left, right in bars(figure)
    ]
    assert len(figure.axes[0].texts) == len(wanted)
    for a, b in zip(sorted(found), sorted(wanted)):
        assert a[:-1] == pytest.approx(b[:-1])
        assert a[-1] == b[-1]


def test_waiting_for_a_transfer_is_hatched_and_nothing_else() -> None:
    def hatched(figure: Figure) -> float:
        found = [c for c in figure.axes[0].collections if c.get_hatch()]
        return sum(path.get_extents().width for collection in found for path in collection.get_paths())

    made = timeline("1f1b", 4, 1, 6, latency=0.5)
    assert (
        hatched(drawn({"": made}))
        == pytest.approx(sum(end - start for waits in made.exposed for start, end in waits))
        != 0
    )
    assert hatched(drawn({"": timeline("1f1b", 4, 1, 6)})) == 0
    labels = [[text.get_text() for text in drawn({"": t}).legends[0].texts] for t in (made, timeline("1f1b", 4, 1, 6))]
    assert ["waits for a transfer" in texts for texts in labels] == [True, False]


def test_memory_is_drawn_below_the_timeline() -> None:
    made = timeline("1f1b", 4, 1, 8)
    figure = drawn({"": made}, limit=6.0)
    memory = figure.axes[1]
    held = [line.get_ydata() for line in memory.lines[:4]]
    assert [max(values) for values in held] == [4, 3, 2, 1]
    assert [values[-1] for values in held] == [0, 0, 0, 0]
    assert list(memory.get_yticks()) == [0, 4]
    assert list(memory.lines[-1].get_ydata()) == [6, 6]
    assert figure.legends[0].texts[-1].get_text() == "limit of memory: 6"
    at = np.searchsorted(memory.lines[0].get_xdata(), 10.0, side="right") - 1
    assert held[0][at] == 4  # all of warm-up, and no backward yet


@pytest.mark.parametrize("name", ["a.png", "a.svg"])
def test_whatever_a_run_may_leave_is_drawn(tmp_path: Path, name: str) -> None:
    one = Timeline("one", ((Interval(Action(0, "F", 0), 1, 1),), ()))
    panels = {"one": one, "none": Timeline("none", ((), ())), "real": timeline("dualpipe-v", 2, 2, 3)}
    with saved(tmp_path / name, *figure_size(panels), grid=False) as figure:
        draw_figure(figure, panels, unit="seconds", limit=3)
    assert (tmp_path / name).stat().st_size > 5000


def test_nothing_is_loaded_before_something_is_drawn() -> None:
    program = (
        "import sys, megatron.planner.timeline as p; sys.exit(bool({'matplotlib', 'numpy', 'torch'} & {*sys.modules}))"
    )
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT).returncode == 0


def timeline_of_terminal(name: str, ranks: int, chunks: int, microbatches: int, latency: float = 0) -> Timeline:
    return simulate(
        add_communication(make_schedule(name, ranks, chunks, microbatches)),
        StageCosts.uniform(ranks * chunks, latency=latency),
    )


def test_a_small_pipeline_by_hand() -> None:
    lines = draw_text(timeline_of_terminal("1f1b", 2, 1, 2), width=7 + 3 * 9).splitlines()
    assert lines == [
        "rank 0 F0-F1-      B0----   B1----",
        "rank 1    F0-B0----F1-B1----",
    ]


def test_a_transfer_that_is_waited_for() -> None:
    lines = draw_text(timeline_of_terminal("1f1b", 2, 1, 1, latency=1), width=7 + 2 * 8).splitlines()
    assert lines == ["rank 0 F0        ~~B0--", "rank 1   ~~F0B0--"]


@settings(derandomize=True, max_examples=60, deadline=None)
@given(
    name=st.sampled_from(sorted(SCHEDULES)),
    ranks=st.integers(1, 6),
    microbatches=st.integers(1, 12),
    room=st.sampled_from([1, 3, 5]),
)
def test_with_room_for_every_action_the_order_reads_back(name: str, ranks: int, microbatches: int, room: int) -> None:
    made = timeline_of_terminal(name, ranks, SCHEDULES[name].chunks or 2, microbatches)
    clock = max(13, int(made.makespan))
    lines = draw_text(made, width=7 + room * clock, clock=clock).splitlines()
    for intervals, line in zip(made.intervals, lines, strict=True):
        if room > 2:
            assert re.findall(r"[FBIW]\d+", line[7:].upper()) == [f"{a.kind}{a.microbatch}" for a, _, _ in intervals]
        for action, start, _ in intervals:  # each begins in the column of its time
            assert line[7 + room * int(start)].upper() == action.kind


def test_two_drawings_on_one_clock() -> None:
    short, long = timeline_of_terminal("zb-h1", 2, 1, 4), timeline_of_terminal("1f1b", 2, 1, 4)
    (whole, *_), (part, *_) = (draw_text(t, 7 + 60, clock=15).splitlines() for t in (long, short))
    assert len(whole) == 7 + 60
    assert len(part) == 7 + 4 * 13


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
def test_a_simulated_trace_survives_a_round_trip(name: str, tmp_path: Path) -> None:
    stages = 3 * (SCHEDULES[name].chunks or 2)
    costs = StageCosts((0.1,) * stages, (0.3,) * stages, (0.7,) * stages, 1e-6, 1e-5, (2.5,) * stages, (1.5,) * stages)
    made = simulate(add_communication(make_schedule(name, 3, stages // 3, 7)), costs)
    write_trace(made, tmp_path / "trace.json")
    read = read_trace(tmp_path / "trace.json")
    assert labels(read) == labels(made)
    assert numbers(read) == pytest.approx(numbers(made), rel=1e-12)
    for found, expected in zip(read.exposed, made.exposed, strict=True):
        assert sum(found, ()) == pytest.approx(sum(expected, ()), abs=1e-12)
    assert read.peak_memory == made.peak_memory


def test_a_measured_trace_survives_a_round_trip(tmp_path: Path) -> None:
    write_trace(MEASURED, tmp_path / "trace.json")
    read = read_trace(tmp_path / "trace.json")
    assert read == MEASURED
    assert (read.start, read.makespan, read.bubble) == (1.5, 1.0, 0.625)


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
def test_files_that_are_no_timeline_are_refused_with_a_fix(text: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text(text)
    with pytest.raises(ScheduleError, match=r"trace\.json cannot be read as a timeline: ") as error:
        read_trace(path)
    assert "--profile-pipeline" in error.value.fixes[0]
