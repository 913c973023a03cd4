from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from megatron.training.history import History, TrainPoint, ValidationPoint
from megatron.training.plot import draw_history, smooth
from tools.plot_run import main

ROOT = Path(__file__).parents[3]


def history(points: int = 40, loss: float | None = None) -> History:
    train = [
        TrainPoint(i, 100 * i, 2 + 8 / i if loss is None else loss, 1e-3, 4, (100.0 * i,) if i == 7 else ())
        for i in range(1, points + 1)
    ]
    return History(train, [ValidationPoint(points, 100 * points, 2.5)], [1500])


def test_smoothing_keeps_straight_lines_and_calms_noise() -> None:
    noise = np.random.default_rng(0).normal(size=3000)
    line = np.linspace(5, 2, 3000)
    calm = smooth(line + noise)
    assert calm.shape == (3000,)
    assert np.abs(smooth(line) - line)[:2800].max() < 1e-9
    assert np.abs(calm - line)[1000:].max() < 0.4
    assert calm[0] == line[0] + noise[0]


@pytest.mark.parametrize("n", [1, 2, 3, 10])
def test_short_runs_are_shown_as_they_are(n: int) -> None:
    values = np.arange(n) ** 2.0
    assert smooth(values) == pytest.approx(values)


@pytest.mark.parametrize(
    ("made", "name"),
    [
        (history(), "a.png"),
        (history(1), "a.svg"),
        (history(3, loss=float("nan")), "a.pdf"),
        (History(history().train), "a.png"),
    ],
)
def test_draws_whatever_a_run_may_leave(tmp_path: Path, made: History, name: str) -> None:
    out = tmp_path / name
    draw_history(made, "run", out)
    assert out.stat().st_size > 2000
    assert list(tmp_path.iterdir()) == [out]


def test_an_unknown_kind_of_picture(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not supported"):
        draw_history(history(), "run", tmp_path / "a.docx")
    assert list(tmp_path.iterdir()) == []


def test_what_is_drawn(tmp_path: Path) -> None:
    """SVG keeps texts apart, so the legend can be read back."""
    from matplotlib import rc_context

    with rc_context({"svg.fonttype": "none"}):
        draw_history(history(), "my run", tmp_path / "a.svg")
    text = (tmp_path / "a.svg").read_text()
    legend = ("training 2.2", "validation 2.500", "1 skipped update<", "1 restart<")
    for words in (*legend, "my run", "40 steps, 4.00K tokens", "learning rate", "batch size"):
        assert words in text


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


def test_the_tool_says_what_it_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(run_dir(tmp_path / "run", extra='{"iter'))]) == 0
    assert "line 4 of metrics.jsonl" in capsys.readouterr().err


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


def test_the_tool_answers_at_once_and_without_torch() -> None:
    code = "import sys, tools.plot_run; sys.exit('torch' in sys.modules or 'matplotlib' in sys.modules)"
    start = time.monotonic()
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
    assert time.monotonic() - start < 5
