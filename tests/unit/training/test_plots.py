"""The plots of runs: their content, and the tool that draws them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from megatron.config.text import printable
from megatron.training.loggers import plots
from megatron.training.loggers.plots import draw_experts, draw_health, draw_runs, running_mean
from megatron.training.loggers.run_folder import RunHistory
from tools.plot_run import main, short_names

ROOT = Path(__file__).parents[3]
NAN = float("nan")


def lines(points: int, loss: float | None = None) -> Iterator[dict[str, Any]]:
    """Log lines of every step, of which step 7 is skipped and step 5 is the first of a larger batch."""
    for i in range(1, points + 1):
        tokens = {"iteration": i, "consumed-samples": i, "consumed-tokens": 100 * i}
        skipped = [i] if i == 7 else []
        yield {
            **tokens,
            "lm loss": 2 + 8 / i if loss is None else loss,
            "learning-rate": 1e-3,
            "batch-size": 4 if i < 5 else 8,
            "skipped-iterations": skipped,
        }
    yield {"iteration": points, "consumed-tokens": 100 * points, "lm loss validation": 2.5}


def history(points: int = 40, loss: float | None = None, *more: dict[str, Any]) -> RunHistory:
    made = RunHistory()
    for line in (*lines(points, loss), *more):
        made.add(line)
    return made


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """The figures that were saved."""
    figures: list[Figure] = []
    save = Figure.savefig

    def keep(figure: Figure, *arguments: Any, **options: Any) -> None:
        save(figure, *arguments, **options)
        figures.append(figure)

    monkeypatch.setattr(Figure, "savefig", keep)
    return figures


def test_smoothing_keeps_straight_lines_and_calms_noise() -> None:
    noise = np.random.default_rng(0).normal(size=3000)
    line = np.linspace(5, 2, 3000)
    calm = running_mean(line + noise)
    assert np.abs(running_mean(line) - line)[:2800].max() < 1e-9
    assert np.abs(calm - line)[1000:].max() < 0.4
    assert (calm.shape, calm[0]) == ((3000,), line[0] + noise[0])
    assert running_mean(np.array([7.0])) == [7.0]


def test_a_run_is_drawn_with_all_that_happened_to_it(tmp_path: Path, drawn: list[Figure]) -> None:
    """SVG keeps texts apart, so the legend can be read back."""
    made = history(40)
    made.restarts, made.rewinds, made.errors = [1500], [2000], [2500]
    with rc_context({"svg.fonttype": "none"}):
        draw_runs({"my run": made}, tmp_path / "a.svg")
    text = (tmp_path / "a.svg").read_text()
    legend = ("training, smoothed: 2.2", "(last raw value 2.200)", "validation: 2.500")
    verticals = ("1 skipped update<", "1 restart<", "1 rewind<", "1 error<")
    for words in (*legend, *verticals, "my run", "40 steps, 4.00K tokens", "learning rate", "batch size"):
        assert words in text
    (figure,) = drawn
    loss, rate, batch = figure.axes
    (skipped, restart, rewind, error) = (segments[0][0][0] for c in loss.collections if (segments := c.get_segments()))
    assert (skipped, restart, rewind, error) == (700, 1500, 2000, 2500)
    (line,) = batch.lines
    assert line.get_drawstyle() == "steps-post"
    assert max(line.get_ydata()) == 8
    (legend_box,) = figure.legends
    assert not any(legend_box.get_window_extent().overlaps(axes.get_window_extent()) for axes in (loss, rate))
    assert [path.name for path in tmp_path.iterdir()] == ["a.svg"]


def test_losses_of_further_tokens_have_curves_of_their_own(tmp_path: Path, drawn: list[Figure]) -> None:
    made, of_first = RunHistory(), [5.0, None, 4.0]
    for line, loss in zip(lines(3), of_first):
        made.add({**line, "mtp loss 1": loss, "mtp loss 2": 6.0})
    draw_runs({"a": made}, tmp_path / "a.png")
    labels = [str(each.get_label()) for each in drawn[0].axes[0].lines]
    assert [label for label in labels if label.startswith("mtp")] == [
        "mtp 1, smoothed: 4.000 (last raw value 4.000)",
        "mtp 1: 1 log line without a finite loss",
        "mtp 2, smoothed: 6.000 (last raw value 6.000)",
    ]


def test_a_source_has_one_colour_and_the_legend_fits(tmp_path: Path, drawn: list[Figure]) -> None:
    """Its validation is dashed; other validation sets have colours that no loss has."""
    made, names = RunHistory(), ("web pages of 2024", "code", "mathematics and proofs")
    for line in lines(3):
        made.add({**line, **{f"source loss {name}": 2.0 + n for n, name in enumerate(names)}})
    for name in (*names[:2], "books"):
        made.add({"iteration": 3, "consumed-tokens": 300, "lm loss validation": 2.4, "validation-set": name})
    draw_runs({"a": made}, tmp_path / "a.png")
    (figure,) = drawn
    drawn_lines = {str(each.get_label()).partition(", ")[0].partition(":")[0]: each for each in figure.axes[0].lines}
    for name in names[:2]:
        training, valid = drawn_lines[name], drawn_lines[f"validation {name}"]
        assert training.get_color() == valid.get_color()
        assert (training.get_linestyle(), valid.get_linestyle()) == ("-", "--")
    colors = {drawn_lines[name].get_color() for name in ("training", *names, "validation books")}
    assert len(colors) == 5
    (legend,) = figure.legends
    box, whole = legend.get_window_extent(), figure.bbox
    assert (whole.x0 <= box.x0, box.x1 <= whole.x1, box.y0 >= whole.y0) == (True, True, True)
    assert not box.overlaps(figure.axes[1].get_window_extent())


def test_the_batch_size_changes_where_its_first_step_begins(tmp_path: Path, drawn: list[Figure]) -> None:
    def line(step: int, samples: int, size: int) -> dict[str, Any]:
        progress = {"iteration": step, "consumed-samples": samples, "consumed-tokens": 10 * samples}
        return {**progress, "lm loss": 2.0, "learning-rate": 0.1, "batch-size": size, "skipped-iterations": []}

    made = history(0, None, line(1, 4, 4), line(2, 8, 4), line(3, 16, 8))
    draw_runs({"a": made}, tmp_path / "a.png")
    (steps,) = drawn[0].axes[2].lines
    assert dict(zip(steps.get_xdata(), steps.get_ydata())) == {0: 4, 40: 4, 80: 8, 160: 8}


def test_several_runs_are_distinguished(tmp_path: Path, drawn: list[Figure]) -> None:
    draw_runs({f"run {n}": history(5, 3.0 + n) for n in range(20)} | {"lost": history(3, NAN)}, tmp_path / "a.png")
    bold = [line for line in drawn[0].axes[0].lines if "smoothed" in str(line.get_label())]
    assert [str(line.get_label()).partition(",")[0] for line in bold] == [f"run {n}" for n in range(20)]
    assert len({(line.get_color(), line.get_linestyle()) for line in bold}) == 20
    assert str(bold[1].get_label()) == "run 1, smoothed: 4.000 (last raw value 4.000)"
    assert "lost: 3 log lines without a finite loss" in [line.get_label() for line in drawn[0].axes[0].lines]
    assert len(drawn[0].axes) == 2  # no batch size


def test_every_validation_set_has_a_mark(tmp_path: Path, drawn: list[Figure]) -> None:
    sets = [
        {"iteration": at, "consumed-tokens": 100 * at, "lm loss validation": 2.0 + n, "validation-set": str(n)}
        for n in range(7)
        for at in (1, 2)
    ]
    draw_runs({"a": history(3, 2.0, *sets)}, tmp_path / "a.png")
    marks = [line for line in drawn[0].axes[0].lines if str(line.get_label()).startswith("validation")]
    assert [line.get_label() for line in marks][1:] == [f"validation {n}: {2 + n:.3f}" for n in range(7)]
    assert [list(line.get_xdata()) for line in marks][1:] == [[100, 200]] * 7
    assert len({(line.get_color(), line.get_marker()) for line in marks}) == 8


@pytest.mark.parametrize(
    ("made", "name"),
    [(history(1), "a.svg"), (history(3, NAN), "a.pdf"), (history(0, None, *list(lines(2))[:2]), "a.png")],
)
def test_whatever_a_run_may_leave_is_drawn(tmp_path: Path, made: RunHistory, name: str) -> None:
    draw_runs({"run": made}, tmp_path / name)
    assert (tmp_path / name).stat().st_size > 2000


@pytest.mark.parametrize(("low", "high"), [(0.02, 0.11), (1.9, 5.8), (0.01, 11.0), (1, 5e6)])
def test_a_logarithmic_axis_has_ticks_over_the_data(low: float, high: float) -> None:
    axes: Axes = Figure().subplots()
    plots._scale_loss_axis(axes, [low, high])
    assert axes.get_yscale() == "log"
    seen = [tick for tick in axes.get_yticks() if low / 1.05 <= tick <= high * 1.05]
    assert 3 <= len(seen) <= 12
    assert f"{seen[0]:g}" in [label.get_text() for label in axes.yaxis.get_majorticklabels()]
    plots._scale_loss_axis(linear := Figure().subplots(), [2.0, 5.9])
    assert linear.get_yscale() == "linear"


def report(step: int, **norms: float | None) -> dict[str, Any]:
    named = {f"health/grad-norm/{layer.replace('_', '.')}": x for layer, x in norms.items()}
    return {"iteration": step, "params-norm": 3.0, "health/grad-norm/total": 9.0, **named}


def test_health_is_a_map_of_layers_and_steps_without_discarded_ones(tmp_path: Path, drawn: list[Figure]) -> None:
    made = history(1)
    assert not draw_health(made, "a run", tmp_path / "h.png")
    for step in (2, 4, 6, 8):
        made.add(report(step, embedding=1.0, layers_0=float(step)))
    made.add({"event": "start", "iteration": 4, "consumed-tokens": 400})
    made.add(report(6, embedding=None, layers_0=60.0))
    assert draw_health(made, "a run", tmp_path / "h.png")
    panel = drawn[0].axes[0]
    (mesh,) = panel.collections
    np.testing.assert_array_equal(mesh.get_array().filled(-1), [[1, 1, -1], [2, 4, 60]])
    assert [label.get_text() for label in panel.get_yticklabels()] == ["embedding", "layers.0"]
    assert [label.get_text() for label in panel.get_xticklabels()] == ["2", "4", "6"]


@pytest.mark.parametrize("values", [(1e-6, 1e6), (0.0, 0.0), (None, None)])
def test_health_of_any_range_and_many_layers_is_drawn(
    tmp_path: Path, drawn: list[Figure], values: tuple[float | None, float | None]
) -> None:
    layers = {f"layers_{i}": values[i % 2] for i in range(48)}
    assert draw_health(history(1, None, report(1, **layers)), "a run", tmp_path / "h.png")
    assert len(drawn[0].axes[0].get_yticks()) <= 13


@pytest.mark.parametrize(
    ("folders", "names"),
    [
        (["a/run", "b"], ["run", "b"]),
        (["a/x/run", "b/x/run", "b/x/other"], ["a/x/run", "b/x/run", "other"]),
        (["a", "b/a"], ["{}/a", "b/a"]),
    ],
)
def test_names_are_as_short_as_is_unambiguous(tmp_path: Path, folders: list[str], names: list[str]) -> None:
    expected = [name.format(tmp_path.name) for name in names]
    assert short_names([tmp_path / folder for folder in folders]) == expected


def run_dir(folder: Path, extra: str = "") -> Path:
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines(3)) + extra)
    return folder


def test_the_tool_draws_one_run_into_its_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = run_dir(tmp_path / "run", json.dumps(report(3, layers_0=0.5)) + '\n{"iter')
    assert main([str(folder), "--out", str(tmp_path / "b.png")]) == 0
    assert ((tmp_path / "b.png").exists(), (folder / "health.png").exists()) == (True, False)
    assert main([str(folder)]) == 0
    printed = capsys.readouterr()
    assert printed.out.splitlines()[1:] == [str(folder / "loss.png"), str(folder / "health.png")]
    assert (folder / "health.png").read_bytes().startswith(b"\x89PNG")
    assert f"skipped unreadable lines of {folder / 'metrics.jsonl'}: 6" in printed.err


def test_the_tool_draws_several(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([str(run_dir(tmp_path / "a")), str(run_dir(tmp_path / "b"))]) == 0
    assert capsys.readouterr().out == "runs.png\n"
    assert Path("runs.png").read_bytes().startswith(b"\x89PNG")
    assert main(["a", "../" + tmp_path.name + "/a"]) == 1
    assert "is given twice: give each run once" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["none"], "does not exist"),
        (["empty"], "1 line could not be read"),
        (["run", "--out", "none/x.png"], "none/x.png"),
        (["run", "--out", "file/x.png"], "file/x.png"),
        (["run", "--out", "folder"], "folder cannot be written: it is a folder"),
        (["run", "--out", "x"], "x: the file name needs an extension: .png, .pdf or .svg"),
        (["run", "--out", "x.foo"], "Format 'foo' is not supported"),
    ],
)
def test_the_tool_fails_with_a_sentence_and_leaves_nothing(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    sentence: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    run_dir(Path("run"))
    for folder in ("folder", "empty"):
        Path(folder).mkdir()
    Path("empty/metrics.jsonl").write_text("junk\n")
    Path("file").touch()
    before = sorted(tmp_path.rglob("*"))
    assert main(arguments) == 1
    (printed,) = capsys.readouterr().err.splitlines()
    assert sentence in printed
    assert sorted(tmp_path.rglob("*")) == before


def test_the_tool_answers_without_torch() -> None:
    code = "import sys, tools.plot_run; sys.exit('torch' in sys.modules or 'matplotlib' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


@pytest.mark.parametrize("name", ["a $\\frac$ b", "\x1b]0;t\x07<script>&", "$a_b$", "\\$x$"])
def test_a_name_is_drawn_as_it_is(name: str, tmp_path: Path, drawn: list[Figure]) -> None:
    draw_runs({name: history()}, tmp_path / "run.svg")
    assert drawn[0].axes[0].get_title("left") == printable(name)
    text = (tmp_path / "run.svg").read_text()
    ElementTree.fromstring(text)
    assert "<script" not in text


# ---- Experts


def lines_with_experts(steps: int) -> Iterator[dict[str, Any]]:
    """Of a model of a dense layer and two with four experts, of which the last one starves in the second."""
    for line in lines(steps):
        if "lm loss" in line and "lm loss validation" not in line:
            most, least = [None, 1.5, 4.0], [None, 0.5, 0.0]
            line |= {"expert-load-max-by-layer": most, "expert-load-min-by-layer": least}
            if line["iteration"] % 10 == 0:
                line["expert-loads"] = [None, [100, 150, 100, 50], [400, 0, 0, 0]]
        yield line


def test_the_loads_of_experts_are_drawn(tmp_path: Path, drawn: list[Figure]) -> None:
    made = history(0, None, *lines_with_experts(60))
    assert draw_experts(made, "a run", tmp_path / "a.png")
    (figure,) = drawn
    most, least, *snapshots, bar = figure.axes
    meshes = [axes.collections[0] for axes in (most, least, *snapshots)]
    assert meshes[0].get_array().shape == (2, 60)
    assert {*meshes[0].get_array()[1]} == {4.0}
    assert meshes[1].get_array().mask[1].all(), "no token"
    assert [axes.get_title(loc="left") for axes in snapshots] == [f"until step {n}: 3 dead" for n in (10, 30, 40, 60)]
    assert meshes[2].get_array().filled(0).tolist() == [[1.0, 1.5, 1.0, 0.5], [4.0, 0, 0, 0]]
    assert [label.get_text() for label in most.get_yticklabels()] == ["1", "2"], "layer 0 has no experts"
    assert [label.get_text() for label in bar.get_yticklabels()] == ["1/4", "1/2", "1", "2", "4"]
    assert len({mesh.norm.vmax for mesh in meshes}) == 1, "one scale"
    assert not draw_experts(history(3), "dense", tmp_path / "b.png")
    for point in made.train:
        point.line.update({f"expert-load-{end}-by-layer": [None] * 3 for end in ("max", "min")})
    assert not draw_experts(made, "every step was skipped", tmp_path / "c.png")


def test_a_dead_expert_differs_from_all_others_in_greyscale(tmp_path: Path, drawn: list[Figure]) -> None:
    assert draw_experts(history(0, None, *lines_with_experts(10)), "a run", tmp_path / "a.png")
    axes = drawn[0].axes[2]
    weights = np.array([0.299, 0.587, 0.114])  # of red, green and blue in luminance (ITU-R BT.601)
    of_loads = axes.collections[0].cmap(np.linspace(0, 1, 256))[:, :3] @ weights
    dead = np.array(axes.get_facecolor()[:3]) @ weights
    assert (np.diff(of_loads) <= 0).all(), "darker the larger"
    assert of_loads.min() - dead > 0.25


def test_dropped_choices_and_heads_are_drawn(tmp_path: Path, drawn: list[Figure]) -> None:
    made = history(0, None, *lines_with_experts(10))
    for point in made.train:
        point.line.update({"expert-mtp-layers": 1, "dropped-choices-by-layer": [None, 0.0, 0.25]})
    assert draw_experts(made, "a run", tmp_path / "a.png")
    _, least, dropped, *_ = drawn[0].axes
    assert dropped.get_title("left") == "dropped choices, up to 25.00%"
    assert dropped.collections[0].get_array()[:, -1].tolist() == [0.0, 0.25]
    for axes in (least, dropped):
        assert [label.get_text() for label in axes.get_yticklabels()] == ["1", "MTP1"]


def test_many_log_lines_are_drawn_by_their_extremes(tmp_path: Path, drawn: list[Figure]) -> None:
    made = history(0, None, *lines_with_experts(1000))
    made.train[500].line["expert-load-max-by-layer"] = [None, 3.0, 4.0]
    assert draw_experts(made, "a run", tmp_path / "a.png")
    values = drawn[0].axes[0].collections[0].get_array()
    assert values.shape[1] <= 400
    assert (values[0] == 3.0).sum() == 1


@pytest.mark.parametrize("damage", [{"expert-loads": [[1, "x"]]}, {"expert-load-max-by-layer": ["high"]}])
def test_a_damaged_record_of_experts_is_no_line_of_the_history(damage: dict[str, Any]) -> None:
    first = next(lines(1))
    with pytest.raises((ValueError, TypeError)):
        history(0, None, first | damage)
