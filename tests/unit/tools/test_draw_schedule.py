"""The command line of the tool: its output, its files and its refusals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import pytest

from megatron.pipeline.actions import PipelineSchedule
from megatron.pipeline.schedules import make_schedule
from megatron.pipeline.simulate import Interval, Timeline
from megatron.planner.timeline import read_trace, write_trace
from tools import draw_schedule
from tools.draw_schedule import main

ROOT = Path(__file__).parents[3]
SMALL = ["--pipeline", "2", "--microbatches", "4"]


@pytest.fixture(autouse=True)
def narrow(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.chdir(tmp_path)


def table(text: str) -> dict[str, list[str]]:
    rows = [line.split() for line in text.split("\n\n")[0].splitlines() if line]
    return {row[0]: row[1:] for row in rows}


def test_the_bubbles_match_the_formulas(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--compare", "1f1b", "interleaved", "gpipe", "--virtual", "3", "--pipeline", "4", "--microbatches", "8"]
    assert main([*argv, "--f", "2", "--i", "3", "--w", "1"]) == 0
    rows = table(capsys.readouterr().out)
    for name, chunks in (("1f1b", 1), ("interleaved", 3), ("gpipe", 1)):
        bubble = Fraction(3, 8 * chunks + 3)  # (p - 1) / (m v + p - 1)
        assert rows[name][0] == str(chunks)
        assert float(rows[name][1]) == pytest.approx(48 + 18 / chunks)
        assert rows[name][3] == f"{float(bubble):.1%}"
    assert [rows[name][5] for name in ("1f1b", "gpipe")] == ["4", "8"]


def test_several_are_drawn_in_one_picture(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["--compare", "1f1b", "zb-h1", "--pipeline", "2", "--microbatches", "2", "--out", "a.svg"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "a.svg"
    assert (tmp_path / "a.svg").read_text().startswith("<?xml")


def test_a_schedule_goes_through_a_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    argv = ["--schedule", "zb-v", *SMALL, "--csv", "mine.csv", "--trace", "t.json"]
    assert main(argv) == 0
    printed = capsys.readouterr().out
    assert printed.splitlines()[-2:] == ["mine.csv", "t.json"]
    assert PipelineSchedule.load(tmp_path / "mine.csv").ranks == make_schedule("zb-v", 2, 2, 4).ranks
    assert main(["--schedule", "mine.csv"]) == 0
    again = capsys.readouterr().out
    assert table(again)["mine.csv"] == table(printed)["zb-v"]
    assert again.splitlines()[-3:] == printed.splitlines()[-5:-2]


def test_memory_bounds_the_searched_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["--schedule", "searched", "--pipeline", "3", "--microbatches", "6", "--memory", "2", "--f", "1.5"]) == 0
    )
    row = next(row for name, row in table(capsys.readouterr().out).items() if name == "searched")
    assert float(row[-3]) <= 2


def measured_file(path: Path, segment: float, late: float) -> Timeline:
    """A trace of zb-h1 in which everything takes ``segment``, and rank 0 stops ``late`` seconds before the last W."""
    main(["--schedule", "zb-h1", "--pipeline", "3", "--microbatches", "5", "--latency", "0.5", "--trace", str(path)])
    ranks = [
        [Interval(action, 7 + start * segment, 7 + end * segment) for action, start, end in rank]
        for rank in read_trace(path).intervals
    ]
    action, start, end = ranks[0][-1]
    ranks[0][-1] = Interval(action, start + late, end + late)
    made = Timeline("zb-h1", tuple(map(tuple, ranks)))
    write_trace(made, path)
    return made


def test_measured_times_are_printed_below_simulated_ones(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    measured = measured_file(tmp_path / "m.json", 0.25, late=3.0)
    capsys.readouterr()
    assert main(["--measured", "m.json"]) == 0
    out = capsys.readouterr().out
    first, second = (line.split() for line in out.splitlines()[1:3])
    assert (first[1], second[1]) == ("simulated", "measured")
    assert float(second[3]) == pytest.approx(measured.makespan, rel=1e-3)
    assert float(first[3]) == pytest.approx(0.25 * (15 + 2), rel=1e-3)  # m (f + i + w) + (p - 1)(f + i - w)
    drawings = out.split("\n\n")[1].splitlines()
    assert [line for line in drawings if "zb-h1" in line] == ["zb-h1, simulated", "zb-h1, measured"]
    assert len(drawings[1]) < len(drawings[5]) == 100  # one clock


def test_memory_of_a_measured_step_is_in_micro_batches_of_a_rank(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    main(["--schedule", "zb-v", *SMALL, "--trace", "m.json"])
    row = table(capsys.readouterr().out)["zb-v"]
    write_trace(Timeline("zb-v", read_trace(tmp_path / "m.json").intervals), tmp_path / "m.json")
    main(["--measured", "m.json"])
    lines = capsys.readouterr().out.splitlines()[1:3]
    assert [line.split()[2:] for line in lines] == [row, row]


def test_a_measured_step_that_is_not_whole_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    made = measured_file(tmp_path / "m.json", 1.0, late=0.0)
    write_trace(Timeline("x", (made.intervals[0][:-1], *made.intervals[1:])), tmp_path / "m.json")
    assert main(["--measured", "m.json"]) == 1
    assert "0W4" in capsys.readouterr().err


def test_costs_of_a_measured_step_are_medians_by_stage_and_kind() -> None:
    schedule = make_schedule("dualpipe-v", 2, 2, 16)
    seconds = {"F": 1.0, "B": 5.0, "I": 2.0, "W": 3.0}
    ranks = []
    for actions in schedule.ranks:
        now, made = 0.0, []
        for action in actions:
            long = seconds[action.kind] * (1 + action.stage) + 100 * (action.microbatch == 5)  # one is disturbed
            made.append(Interval(action, now, now + long))
            now += long
        ranks.append(tuple(made))
    costs = draw_schedule.median_costs(Timeline("", tuple(ranks)), 4)
    assert costs.forward == (1.0, 2.0, 3.0, 4.0)
    assert [costs.seconds(stage, "B") for stage in range(4)] == [5.0, 10.0, 15.0, 20.0]


@pytest.mark.parametrize(
    ("argv", "reported"),
    [
        ([], "nothing to draw: use one of --schedule, --compare, --measured"),
        (["--schedule", "1f1b", "--measured", "x.json"], "--schedule and --measured to draw"),
        (["--schedule", "1f1b"], "the size of 1f1b is not specified: add --pipeline and --microbatches"),
        (["--schedule", "mine.txt"], "there is no schedule mine.txt: one is gpipe, 1f1b,"),
        (["--schedule", "zbv", *SMALL], "there is no schedule zbv: did you mean zb-v?"),
        (
            ["--schedule", "best", *SMALL],
            "there is no schedule best: one is gpipe, 1f1b, interleaved, zb-h1,",
        ),
        (["--compare", "1f1b", "Searchd", *SMALL], "there is no schedule Searchd: did you mean searched?"),
        (["--schedule", "a.csv", "--pipeline", "2"], "--pipeline has no effect here: the file defines its size"),
        (["--measured", "x.json", "--f", "2"], "--f has no effect here"),
        (["--compare", "all", *SMALL, "--csv", "a.csv"], "--csv has no effect here: it applies to one schedule"),
        (["--compare", "1f1b", "zb-v", *SMALL, "--virtual", "2"], "--virtual has no effect here"),
        (["--schedule", "zb-v", *SMALL, "--group", "2"], "--group has no effect here: it applies to interleaved"),
        (["--schedule", "zb-v", *SMALL, "--memory", "2"], "--memory has no effect here: it applies to searched"),
        (["--schedule", "zb-v", *SMALL, "--w", "0"], "--w 0: must be above 0"),
        (["--schedule", "zb-v", "--pipeline", "0"], "0 is less than 1"),
        (["--schedule", "zb-v", "--f", "inf"], "inf is not a finite number >= 0"),
        (["--shedule", "zb-v"], "there is no --shedule (did you mean --schedule?)"),
    ],
)
def test_flags_that_do_not_go_together(argv: list[str], reported: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(argv)
    assert f"draw_schedule: {reported}" in capsys.readouterr().err.replace(
        "argument --pipeline/--pipeline-model-parallel-size: ", ""
    ).replace("argument --f: ", "")


@pytest.mark.parametrize(
    ("argv", "reported"),
    [
        (["--schedule", "zb-v", *SMALL, "--virtual", "3"], "fix: --num-virtual-stages-per-pipeline-rank 2"),
        (["--schedule", "absent.csv"], "there is no file absent.csv"),
        (["--compare", "absent.csv"], "none of these schedules can be drawn"),
        (["--measured", "absent.json"], "fix: write one with --profile-pipeline"),
        (["--schedule", "1f1b", *SMALL, "--out", "a.bmpp"], "draw_schedule: "),
        (["--schedule", "1f1b", *SMALL, "--csv", "no/a.csv"], "No such file or directory"),
    ],
)
def test_invalid_arguments_are_refused(argv: list[str], reported: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 1
    assert reported in capsys.readouterr().err


def test_a_closed_pipe_ends_it_quietly() -> None:
    read, write_end = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "tools.draw_schedule", "--schedule", "1f1b", *SMALL]
    done = subprocess.run(command, cwd=ROOT, stdout=write_end, stderr=subprocess.PIPE, text=True)
    os.close(write_end)
    assert (done.returncode, done.stderr) == (-signal.SIGPIPE, "")


def test_the_trace_is_one_that_perfetto_reads(tmp_path: Path) -> None:
    main(["--schedule", "1f1b", *SMALL, "--trace", "t.json"])
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert {event["name"] for event in events if event.get("cat") == "compute"} >= {"0F0", "1B3"}
