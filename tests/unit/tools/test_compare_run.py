"""``tools/compare_run.py``: a run of a recipe is on its curve, and one with a fault is not."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

import pretrain_gpt
from megatron.arguments.cli import parse
from megatron.arguments.sources import to_yaml
from megatron.training.loggers.run_folder import RunHistory
from tests.expected import PREPARE, ROOT, TEXT
from tools import compare_run, preprocess_data
from tools.lib.expected_curve import compare_losses

EXPECTED = ROOT / "examples" / "expected" / "train_tiny_gpt2.json"
POINTS: list[dict[str, float]] = json.loads(EXPECTED.read_text())["loss"]["points"]
FLAGS = "--config examples/configs/tiny-gpt2.yaml --mock-data --world-size 1"
STEP = 32 * 256
"""Tokens of a step."""


def run_folder(
    folder: Path, losses: Sequence[tuple[int, float]], flags: str = "", data: str = "text", **more: float
) -> Path:
    """Write the folder of a run of ``tiny-gpt2`` with the losses of some steps."""
    folder.mkdir()
    config = parse(f"{FLAGS} --check-config {flags}".split(), {}).config
    (folder / "config.yaml").write_text(to_yaml(config))
    fingerprint = json.loads(EXPECTED.read_text())["loss"]["data"]["fingerprint"] if data == "text" else data
    (folder / "data.json").write_text(json.dumps({"train": {"fingerprint": fingerprint}}))
    (folder / "environment.json").write_text(json.dumps({"world_size": 1, "device": "cpu"}))
    (folder / "command.sh").write_text("python pretrain_gpt.py --config examples/configs/tiny-gpt2.yaml\n")
    lines: list[dict[str, Any]] = [{"event": "start", "iteration": 0, "consumed-tokens": 0, "time": 0.0}]
    for step, loss in losses:
        line = {"iteration": step, "consumed-tokens": step * STEP, "consumed-samples": 32 * step, "time": step}
        written = None if math.isnan(loss) else loss
        lines.append({**line, "lm loss": written, "grad-norm": 1.0, "batch-size": 32, "iteration-time": 0.5, **more})
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return folder


def means(change: Callable[[float], float] = lambda loss: loss) -> list[tuple[int, float]]:
    return [(int(point["tokens"]) // STEP, change(point["mean"])) for point in POINTS]


def status(run: Path, *flags: str) -> int:
    return compare_run.main([str(run), *flags])


@pytest.fixture(autouse=True)
def in_the_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


@pytest.mark.parametrize(
    ("change", "expected", "shown"),
    [
        ("", 0, "options    those of the recipe"),
        pytest.param("--lr 1e-2 --min-lr 1e-4", 1, "--lr: 0.001 | 0.01", marks=pytest.mark.slow),
    ],
)
def test_a_run_of_the_example_is_on_its_curve_and_one_with_another_rate_is_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: str, expected: int, shown: str
) -> None:
    """The commands of the file itself, for the first span; the options alone tell which recipe it is."""
    prefix, run = tmp_path / "shakespeare", tmp_path / "run"
    words = [str(prefix) if word == "runs/shakespeare" else word for word in shlex.split(PREPARE)[2:]]
    assert preprocess_data.main(words) == 0
    flags = f"--config examples/configs/tiny-gpt2.yaml --data-path {prefix}_text_document --exit-interval 10"
    assert pretrain_gpt.main([*flags.split(), *change.split(), "--run-dir", str(run)]) == 0
    capsys.readouterr()
    assert status(run) == expected
    printed = capsys.readouterr().out
    assert "recipe     examples/train_tiny_gpt2.sh" in printed
    assert f"data       those of the band: {TEXT.relative_to(ROOT)}" in printed
    assert shown in printed
    assert ("verdict    below its curve" in printed) == bool(change)


@pytest.mark.parametrize(
    ("change", "verdict"),
    [
        (lambda loss: loss, "on its curve"),
        (lambda loss: loss * 0.9, "below its curve"),
        (lambda loss: loss * 32 / 31, "above its curve"),
        (lambda loss: math.nan, "above its curve"),
    ],
    ids=["mean", "mis-scaled", "one sample not counted", "nan"],
)
def test_a_loss_with_another_scale_is_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: Callable[[float], float], verdict: str
) -> None:
    run = run_folder(tmp_path / "run", means(change))
    assert status(run, "--json") == int(verdict != "on its curve")
    found = json.loads(capsys.readouterr().out)
    assert (found["verdict"], found["script"], found["same_data"]) == (verdict, "examples/train_tiny_gpt2.sh", True)
    assert found["first_step_outside"] == (None if verdict == "on its curve" else 10)
    assert len(found["spans"]) == len(POINTS)


@pytest.mark.parametrize("interval", [1, 5, 20])
def test_other_log_intervals_are_compared_over_common_steps(tmp_path: Path, interval: int) -> None:
    """Losses of every step, the mean of which is that of the band, logged as means over ``interval`` steps."""
    by_step = [loss + 0.01 * (1 - 2 * (step % 2)) for last, loss in means() for step in range(last - 9, last + 1)]
    of_lines = [
        (end, sum(by_step[end - interval : end]) / interval) for end in range(interval, len(by_step) + 1, interval)
    ]
    history = RunHistory()
    for step, loss in of_lines:
        history.add(
            {
                "iteration": step,
                "consumed-tokens": step * STEP,
                "consumed-samples": 32 * step,
                "batch-size": 32,
                "lm loss": loss,
                "time": 0.0,
            }
        )
    spans = compare_losses(history, POINTS)
    assert [span.step for span in spans] == [*range(max(10, interval), len(by_step) + 1, max(10, interval))]
    for span in spans:
        middle = (span.low + span.high) / 2
        assert span.loss == pytest.approx(middle, abs=2e-4)


@pytest.mark.parametrize(
    ("kept", "steps"),
    [(slice(5, None), [70, 80, 90, 100]), (slice(9, None), []), (slice(3), [10, 20, 30])],
    ids=["continues another", "one line", "crashed"],
)
def test_spans_without_their_lines_are_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kept: slice, steps: list[int]
) -> None:
    run = run_folder(tmp_path / "run", means()[kept])
    assert status(run, "--json") == (0 if steps else 2)
    assert [span["step"] for span in json.loads(capsys.readouterr().out)["spans"]] == steps


def test_lines_that_are_lost_in_the_middle_are_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = run_folder(tmp_path / "run", means()[:2] + means()[7:])
    assert status(run, "--json") == 0
    assert [span["step"] for span in json.loads(capsys.readouterr().out)["spans"]] == [10, 20, 90, 100]


def test_what_is_not_judged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = run_folder(tmp_path / "other", means(), data="0" * 16)
    assert status(other) == 2
    assert f"not judged: the band is of {TEXT.relative_to(ROOT)}, the run of other data; fix: {PREPARE}" in (
        capsys.readouterr().out
    )
    assert status(other, "--any-data") == 0
    assert status(run_folder(tmp_path / "short", means()[:0] + [(3, 8.0)])) == 2
    assert "no log line is of one of the" in capsys.readouterr().out
    assert status(run_folder(tmp_path / "model", means(), "--hidden-size 128")) == 2
    assert "no recipe has the model" in capsys.readouterr().err
    assert status(tmp_path / "model", "--expected", str(EXPECTED)) == 2
    assert "not judged: the model of the run is another: --hidden-size: 64 | 128" in capsys.readouterr().out
    assert status(tmp_path / "none") == 2
    assert status(other, "--expected", str(other / "data.json")) == 2
    assert "is no file of expected/" in capsys.readouterr().err


def test_options_that_make_no_other_model_are_listed_and_the_run_is_judged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_folder(tmp_path / "run", means(), "--hidden-dropout 0.1 --z-loss-coeff 1e-4")
    for flags in ((), ("--expected", str(EXPECTED))):
        assert status(run, *flags) == 0
        assert "--hidden-dropout: 0.0 | 0.1" in capsys.readouterr().out


def test_memory_time_and_published_losses_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = ROOT / "examples" / "expected" / "train_gpt2_124m.json"
    content = json.loads(file.read_text())
    memory, seconds = content["memory_per_rank"]["bytes"], content["time_per_step"]["seconds"]
    costs = {"mem-max-allocated-bytes": memory * 1.1, "iteration-time": 2 * seconds}
    run = run_folder(tmp_path / "run", means(), **costs)
    (run / "environment.json").write_text(json.dumps({"world_size": 8, "device": "cuda"}))
    assert status(run, "--expected", str(file)) == 2
    lines = capsys.readouterr().out.splitlines()
    (step,) = [line for line in lines if line.startswith("step ")]
    assert ", 2.00 of it; predicted for 1 ranks, the run has 8" in step
    assert any(line.startswith("memory ") and ", 1.10 of it" in line for line in lines)
    assert any(line.startswith("published  3.2847 at ") for line in lines)


def test_a_published_loss_is_beside_that_of_validation_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expected = EXPECTED.with_name("train_gpt2_124m.json")
    (published,) = json.loads(expected.read_text())["loss"]["published"]
    run = run_folder(tmp_path / "run", means())
    end = {"iteration": 101, "consumed-tokens": published["tokens"], "consumed-samples": 3232, "time": 101.0}
    with (run / "metrics.jsonl").open("a") as file:
        for name, loss in (("validation", 3.3), ("test", 4.0)):
            file.write(json.dumps({**end, f"lm loss {name}": loss}) + "\n")
    assert status(run, "--json", "--expected", str(expected)) == 2
    assert [each["of_run"] for each in json.loads(capsys.readouterr().out)["published"]] == [3.3]
