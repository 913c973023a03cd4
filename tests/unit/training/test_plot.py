from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from megatron.training.loggers import plots
from megatron.training.loggers.plots import draw_loss_curve, running_mean
from megatron.training.loggers.run_folder import EvaluationPoint, RunHistory, TrainPoint
from tools.plot_run import main

ROOT = Path(__file__).parents[3]


def history(points: int = 40, loss: float | None = None) -> RunHistory:
    train = [
        TrainPoint(
            *(i, 100 * i, 100 * i - 100, 2 + 8 / i if loss is None else loss),
            *(1e-3, 4 if i < 5 else 8, (100.0 * i,) if i == 7 else ()),
        )
        for i in range(1, points + 1)
    ]
    return RunHistory(train, [EvaluationPoint("validation", points, 100 * points, 2.5)], [1500], [2500])


def test_smoothing_keeps_straight_lines_and_calms_noise() -> None:
    noise = np.random.default_rng(0).normal(size=3000)
    line = np.linspace(5, 2, 3000)
    calm = running_mean(line + noise)
    assert calm.shape == (3000,)
    assert np.abs(running_mean(line) - line)[:2800].max() < 1e-9
    assert np.abs(calm - line)[1000:].max() < 0.4
    assert calm[0] == line[0] + noise[0]


@pytest.mark.parametrize("n", [1, 2, 3, 10])
def test_short_runs_are_shown_as_they_are(n: int) -> None:
    values = np.arange(n) ** 2.0
    assert running_mean(values) == pytest.approx(values)


@pytest.mark.parametrize(
    ("made", "name"),
    [
        (history(), "a.png"),
        (history(1), "a.svg"),
        (history(3, loss=float("nan")), "a.pdf"),
        (RunHistory(history().train), "a.png"),
    ],
)
def test_draws_whatever_a_run_may_leave(tmp_path: Path, made: RunHistory, name: str) -> None:
    out = tmp_path / name
    draw_loss_curve(made, "run", out)
    assert out.stat().st_size > 2000
    assert list(tmp_path.iterdir()) == [out]


def test_an_unknown_kind_of_picture(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not supported"):
        draw_loss_curve(history(), "run", tmp_path / "a.docx")
    assert list(tmp_path.iterdir()) == []


def test_what_is_drawn(tmp_path: Path) -> None:
    """SVG keeps texts apart, so the legend can be read back."""
    from matplotlib import rc_context

    with rc_context({"svg.fonttype": "none"}):
        draw_loss_curve(history(), "my run", tmp_path / "a.svg")
    text = (tmp_path / "a.svg").read_text()
    legend = ("training, smoothed: 2.2", "(last raw value 2.200)", "validation: 2.500")
    verticals = ("1 skipped update<", "1 restart<", "1 error<")
    for words in (*legend, *verticals, "my run", "40 steps, 4.00K tokens", "learning rate", "batch size"):
        assert words in text


def test_evaluations_are_drawn_apart(axes: Axes) -> None:
    names = [f"validation {n}" for n in range(7)] + ["test"]
    made = [EvaluationPoint(name, at, 100 * at, 2.0 + n) for n, name in enumerate(names) for at in (1, 2)]
    plots._draw_loss(axes, RunHistory([], made))
    labelled = [line for line in axes.lines if not str(line.get_label()).startswith("_")]
    assert [line.get_label() for line in labelled] == [f"{name}: {2 + n:.3f}" for n, name in enumerate(names)]
    assert [list(line.get_xdata()) for line in labelled] == [[100, 200]] * len(names)
    assert len({(line.get_color(), line.get_marker()) for line in labelled}) == len(names)


@pytest.fixture
def axes() -> Axes:
    return Figure().subplots()


@pytest.mark.parametrize(("low", "high"), [(0.02, 0.11), (1.9, 5.8), (2.3, 10.8), (0.01, 11.0), (4.0, 13.0), (1, 5e6)])
def test_a_logarithmic_axis_has_ticks_over_the_data(axes: Axes, low: float, high: float) -> None:
    plots.scale_loss_axis(axes, [low, high])
    assert axes.get_yscale() == "log"
    seen = [tick for tick in axes.get_yticks() if low / 1.05 <= tick <= high * 1.05]
    assert 3 <= len(seen) <= 12
    labels = [plain.get_text() for plain in axes.yaxis.get_majorticklabels()]
    assert f"{seen[0]:g}" in labels


def test_losses_close_together_are_on_a_linear_axis(axes: Axes) -> None:
    plots.scale_loss_axis(axes, [2.0, 5.9])
    assert axes.get_yscale() == "linear"


@pytest.mark.parametrize(("points", "marker"), [(2, "o"), (29, "o"), (30, "")])
def test_few_points_are_marked(axes: Axes, points: int, marker: str) -> None:
    plots._draw_loss(axes, history(points))
    (bold,) = [line for line in axes.lines if str(line.get_label()).startswith("training")]
    assert bold.get_marker() == marker
    assert str(bold.get_label()).startswith("training, smoothed" if marker == "" else "training: ")


def test_lines_without_a_loss_are_marked(axes: Axes) -> None:
    lost = history(3, loss=float("nan")).train
    plots._draw_loss(axes, RunHistory([*history(2).train, lost[2]]))
    (crosses,) = [line for line in axes.lines if line.get_marker() == "x"]
    assert list(crosses.get_xdata()) == [300]
    assert crosses.get_label() == "1 log line without a finite loss"


def test_the_batch_size_changes_where_its_first_step_begins(axes: Axes) -> None:
    plots._draw_rate(axes, history(10))
    (line,) = axes.figure.axes[1].lines
    assert line.get_drawstyle() == "steps-post"
    assert dict(zip(line.get_xdata(), line.get_ydata()))[400] == 8  # step 5
    assert dict(zip(line.get_xdata(), line.get_ydata()))[300] == 4
    assert line.get_xdata()[-1] == 1000


def test_the_legend_is_beside_the_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    overlaps = []
    savefig = Figure.savefig

    def look(figure: Figure, *arguments: Any, **options: Any) -> None:
        savefig(figure, *arguments, **options)
        (legend,) = figure.legends
        overlaps.extend(legend.get_window_extent().overlaps(axes.get_window_extent()) for axes in figure.axes)

    monkeypatch.setattr(Figure, "savefig", look)
    draw_loss_curve(history(), "run", tmp_path / "a.png")
    assert overlaps == [False] * 3


def run_dir(folder: Path, *, extra: str = "") -> Path:
    line = (
        '{"iteration": %d, "consumed-samples": %d, "consumed-tokens": %d, "lm loss": 3.0, "learning-rate": 0.1, '
        '"batch-size": 1, "skipped-iterations": []}\n'
    )
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("".join(line % (i, i, i * 10) for i in (1, 2, 3)) + extra)
    return folder


def test_the_tool_draws_into_the_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = run_dir(tmp_path / "run")
    assert main([str(folder)]) == 0
    assert capsys.readouterr().out == f"{folder / 'loss.png'}\n"
    assert main([str(folder), "--out", str(tmp_path / "b.png")]) == 0
    assert (tmp_path / "b.png").exists()


def test_the_tool_draws_the_health_of_a_run_into_its_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = '{"iteration": 3, "health/grad-norm/layers.0": 0.5, "health/grad-norm/layers.1": 0.25}\n'
    folder = run_dir(tmp_path / "run", extra=report)
    assert main([str(folder), "--out", str(tmp_path / "b.png")]) == 0
    assert not (folder / "health.png").exists()
    assert main([str(folder)]) == 0
    assert capsys.readouterr().out.splitlines()[1:] == [str(folder / "loss.png"), str(folder / "health.png")]
    assert (folder / "health.png").read_bytes().startswith(b"\x89PNG")


def test_the_tool_says_what_it_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(run_dir(tmp_path / "run", extra='{"iter'))]) == 0
    assert f"{tmp_path / 'run' / 'metrics.jsonl'}: 4" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "sentence"), [(None, "does not exist"), ("", "no log line"), ("junk\n", "1 line could not be read")]
)
def test_the_tool_fails_with_a_sentence(
    tmp_path: Path, text: str | None, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if text is not None:
        (tmp_path / "metrics.jsonl").write_text(text)
    assert main([str(tmp_path)]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert sentence in captured.err
    assert len(captured.err.splitlines()) == 1


@pytest.mark.parametrize("out", ["none/x.png", "file/x.png", "folder", "x", "x.foo"])
def test_what_cannot_be_written_is_told_by_the_name_that_was_given(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], out: str
) -> None:
    folder = run_dir(tmp_path / "run")
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    assert main([str(folder), "--out", str(tmp_path / out)]) == 1
    (printed,) = capsys.readouterr().err.splitlines()
    assert "partial" not in printed
    assert str(tmp_path / out) in printed or "Format 'foo' is not supported" in printed
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["file", "folder", "metrics.jsonl", "run"]


def test_the_tool_answers_at_once_and_without_torch() -> None:
    code = "import sys, tools.plot_run; sys.exit('torch' in sys.modules or 'matplotlib' in sys.modules)"
    start = time.monotonic()
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
    assert time.monotonic() - start < 5
