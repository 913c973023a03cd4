from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def quickstart(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = ["bash", str(ROOT / "examples" / "quickstart.sh"), *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--steps"], "--steps needs a value"),
        (["--steps", "0"], "--steps must be a whole number above 0, not '0'"),
        (["--steps", "1e3"], "not '1e3'"),
        (["--input-dir", "missing"], "there is no folder 'missing'"),
        (["--out", "file/below"], "the folder 'file/below' cannot be made"),
        (["--size", "7"], "unknown argument: --size"),
    ],
)
def test_mistakes_are_told_before_anything_is_installed(tmp_path: Path, arguments: list[str], sentence: str) -> None:
    (tmp_path / "file").write_text("")
    done = quickstart(*arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert sentence in done.stderr
    assert done.stdout == ""


def test_help(tmp_path: Path) -> None:
    done = quickstart("--help", cwd=tmp_path)
    assert done.returncode == 0
    assert "--input-dir DIR" in done.stdout


@pytest.mark.slow  # makes the project's .venv where there is none
def test_text_becomes_a_falling_loss_and_a_picture(tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    for number in range(12):
        (tmp_path / "text" / f"{number}.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 200)
    for _ in range(2):  # the second run finds what the first one left
        done = quickstart("--input-dir", "text", "--steps", "30", "--out", "run", "--", "--seed", "7", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").open()]
    losses = [line["lm loss"] for line in lines if "lm loss" in line]
    assert len(losses) == 6
    assert losses[:3] == losses[3:]
    assert losses[2] < losses[0] - 1
    assert any("lm loss validation" in line for line in lines)
    assert f"loss curve: {tmp_path / 'run' / 'loss.png'}" in done.stdout
    assert (tmp_path / "run" / "loss.png").exists()
