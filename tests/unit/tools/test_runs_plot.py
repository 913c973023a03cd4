from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from megatron.training.loggers.run_folder import EvaluationPoint, RunHistory, TrainPoint
from tools.lib import plots as lib_plots
from tools.lib.plots import draw_runs, run_styles, short_names
from tools.plot_run import main


def history(points: int = 40, loss: float = 3.0, evaluated: str = "validation") -> RunHistory:
    train = [TrainPoint(i, 100 * i, 100.0 * i - 100, loss - i / 100, 1e-3, 4, ()) for i in range(1, points + 1)]
    return RunHistory(train, [EvaluationPoint(evaluated, points, 100 * points, 2.5)])


@pytest.fixture
def axes() -> Axes:
    return Figure().subplots()


def test_every_run_is_named_in_the_picture(tmp_path: Path) -> None:
    """SVG keeps texts apart, so the legend can be read back."""
    with rc_context({"svg.fonttype": "none"}):
        draw_runs({"first": history(5), "second": history(5, loss=2.0)}, tmp_path / "a.svg")
    text = (tmp_path / "a.svg").read_text()
    for words in ("first: 2.95", "second: 1.95", ">2 runs<", "; hollow marks: validation", "learning rate", "tokens"):
        assert words in text
    assert [path.name for path in tmp_path.iterdir()] == ["a.svg"]


@pytest.mark.parametrize(("points", "dots"), [(29, "o"), (30, "")])
def test_raw_is_faint_and_smoothed_is_bold(axes: Axes, points: int, dots: str) -> None:
    lib_plots._draw_loss(axes, "run", history(points), next(run_styles()))
    faint, bold, validation = axes.lines
    assert faint.get_marker() == dots
    assert (faint.get_alpha() or 1) < 0.5 < faint.get_linewidth() < bold.get_linewidth()
    assert list(bold.get_xdata()) == [100 * i for i in range(1, points + 1)]
    assert {line.get_color() for line in axes.lines} == {"#2563eb"}
    assert (validation.get_marker(), list(validation.get_ydata())) == ("s", [2.5])


def test_a_run_without_a_finite_loss_is_named_too(axes: Axes) -> None:
    lib_plots._draw_loss(axes, "lost", history(3, loss=float("nan")), next(run_styles()))
    assert [line.get_label() for line in axes.lines] == ["lost: no finite loss"]


def test_several_validation_sets_are_left_to_pictures_of_one_run(axes: Axes) -> None:
    lib_plots._draw_loss(axes, "run", history(3, evaluated="validation wiki"), next(run_styles()))
    assert [line.get_label() for line in axes.lines][1:] == ["run: 2.970"]


def spiky(points: int) -> RunHistory:
    """A loss of 3 but for the last step's."""
    made = history(points, loss=3.0)
    return RunHistory([replace(p, loss=9.0 if p is made.train[-1] else 3.0) for p in made.train], made.evaluations)


@pytest.mark.parametrize("points", [5, 29, 30, 300])
def test_the_number_beside_a_run_is_smoothed_however_short_the_run(axes: Axes, points: int) -> None:
    lib_plots._draw_loss(axes, "run", spiky(points), next(run_styles()))
    number = float(str(axes.lines[1].get_label()).removeprefix("run: "))
    assert 3.0 < number < 8.0
    assert number == pytest.approx(np.asarray(axes.lines[1].get_ydata())[-1], abs=1e-3)


def test_the_legend_says_what_its_numbers_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    titles = list[str]()
    monkeypatch.setattr(
        Figure, "savefig", lambda figure, *_, **__: titles.extend(x.get_title().get_text() for x in figure.legends)
    )
    draw_runs({"a": history(5), "b": history(300)}, tmp_path / "a.png")
    assert titles == ["training loss at the end, smoothed"]


def test_equal_points_of_several_runs_are_all_seen(axes: Axes) -> None:
    """What is drawn later leaves the outlines of what is below it: hollow, and smaller or of another shape."""
    for look, name in zip(run_styles(), "abcd"):
        lib_plots._draw_loss(axes, name, history(5), look)
    points = axes.lines[2::3]
    assert {line.get_fillstyle() for line in points} == {"none"}
    sizes = [line.get_markersize() for line in points]
    assert sizes == sorted(set(sizes), reverse=True)
    assert len({line.get_marker() for line in points}) == 4
    widths = [line.get_linewidth() for line in axes.lines[1::3]]
    assert widths == sorted(set(widths), reverse=True)


def test_many_runs_look_different() -> None:
    found = [look for look, _ in zip(run_styles(), range(33))]
    assert len({(look.color, look.dashes) for look in found}) == 32
    assert found[32] == found[0]


@pytest.mark.parametrize(
    ("folders", "names"),
    [
        (["a/run", "b"], ["run", "b"]),
        (["a/run", "b/run"], ["a/run", "b/run"]),
        (["a/x/run", "b/x/run", "b/x/other"], ["a/x/run", "b/x/run", "other"]),
        (["a", "b/a"], ["{}/a", "b/a"]),
    ],
)
def test_names_are_as_short_as_they_tell_apart(tmp_path: Path, folders: list[str], names: list[str]) -> None:
    expected = [name.format(tmp_path.name) for name in names]
    assert short_names([tmp_path / folder for folder in folders]) == expected


def write(folder: Path, extra: str = "") -> Path:
    folder.mkdir(parents=True)
    line = {"consumed-samples": 1, "lm loss": 3.0, "learning-rate": 0.1, "batch-size": 1, "skipped-iterations": []}
    lines = [json.dumps({"iteration": i, "consumed-tokens": 10 * i, **line}) + "\n" for i in (1, 2, 3)]
    (folder / "metrics.jsonl").write_text("".join(lines) + extra)
    return folder


def test_the_tool_draws_several(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([str(write(tmp_path / "a")), str(write(tmp_path / "b", extra='{"it'))]) == 0
    printed = capsys.readouterr()
    assert printed.out == "runs.png\n"
    assert f"{tmp_path / 'b' / 'metrics.jsonl'}: 4" in printed.err
    assert Path("runs.png").read_bytes().startswith(b"\x89PNG")
    assert main(["a", "b", "--out", "c.svg"]) == 0
    assert Path("c.svg").exists()


def test_the_tool_says_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write(tmp_path / "a")
    assert main([str(folder), str(tmp_path / "a")]) == 1
    assert "is given twice: give each run once" in capsys.readouterr().err
    assert main([str(folder), str(tmp_path / "none")]) == 1
    assert "does not exist" in capsys.readouterr().err
