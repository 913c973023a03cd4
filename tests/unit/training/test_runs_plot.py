from __future__ import annotations

import json
from pathlib import Path

import pytest
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from megatron.training import runs_plot
from megatron.training.history import EvaluationPoint, History, TrainPoint
from megatron.training.runs_plot import draw_runs, looks, short_names
from tools.plot_run import main


def history(points: int = 40, loss: float = 3.0, evaluated: str = "validation") -> History:
    train = [TrainPoint(i, 100 * i, 100.0 * i - 100, loss - i / 100, 1e-3, 4, ()) for i in range(1, points + 1)]
    return History(train, [EvaluationPoint(evaluated, points, 100 * points, 2.5)])


@pytest.fixture
def axes() -> Axes:
    return Figure().subplots()


def test_every_run_is_named_in_the_picture(tmp_path: Path) -> None:
    """SVG keeps texts apart, so the legend can be read back."""
    with rc_context({"svg.fonttype": "none"}):
        draw_runs({"first": history(5), "second": history(5, loss=2.0)}, tmp_path / "a.svg")
    text = (tmp_path / "a.svg").read_text()
    for words in ("first: 2.950", "second: 1.950", ">2 runs<", "; squares: validation", "learning rate", "tokens"):
        assert words in text
    assert [path.name for path in tmp_path.iterdir()] == ["a.svg"]


@pytest.mark.parametrize(("points", "raw"), [(29, 0), (30, 1)])
def test_raw_is_faint_and_smoothed_is_bold(axes: Axes, points: int, raw: int) -> None:
    runs_plot._draw_loss(axes, "run", history(points), next(looks()))
    *faint, bold, validation = axes.lines
    assert len(faint) == raw
    assert all((line.get_alpha() or 1) < 0.5 < line.get_linewidth() < bold.get_linewidth() for line in faint)
    assert list(bold.get_xdata()) == [100 * i for i in range(1, points + 1)]
    assert {line.get_color() for line in axes.lines} == {"#2563eb"}
    assert (validation.get_marker(), list(validation.get_ydata())) == ("s", [2.5])


def test_a_run_without_a_finite_loss_is_named_too(axes: Axes) -> None:
    runs_plot._draw_loss(axes, "lost", history(3, loss=float("nan")), next(looks()))
    assert [line.get_label() for line in axes.lines] == ["lost: no finite loss"]


def test_several_validation_sets_are_left_to_pictures_of_one_run(axes: Axes) -> None:
    runs_plot._draw_loss(axes, "run", history(3, evaluated="validation wiki"), next(looks()))
    assert len(axes.lines) == 1


def test_many_runs_look_different() -> None:
    found = [look for look, _ in zip(looks(), range(33))]
    assert len(set(found)) == 32
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
    told = capsys.readouterr()
    assert told.out == "runs.png\n"
    assert f"line 4 of {tmp_path / 'b' / 'metrics.jsonl'}" in told.err
    assert Path("runs.png").read_bytes().startswith(b"\x89PNG")
    assert main(["a", "b", "--out", "c.svg"]) == 0
    assert Path("c.svg").exists()


def test_the_tool_says_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write(tmp_path / "a")
    assert main([str(folder), str(tmp_path / "a")]) == 1
    assert "is given twice: give each run once" in capsys.readouterr().err
    assert main([str(folder), str(tmp_path / "none")]) == 1
    assert "does not exist" in capsys.readouterr().err
