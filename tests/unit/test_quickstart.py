from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.config.arguments import parse
from megatron.data.preprocess import output_prefix
from tools.preprocess_data import build_parser

ROOT = Path(__file__).parents[2]


def quickstart(*arguments: str, cwd: Path, root: Path = ROOT) -> subprocess.CompletedProcess[str]:
    command = ["bash", str(root / "examples" / "quickstart.sh"), *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True)


def write_text(folder: Path) -> None:
    folder.mkdir()
    for number in range(12):
        (folder / f"{number}.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 200)


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """This checkout with the environment of these tests in the place of the one that the set-up would make."""
    root = tmp_path / "checkout"
    for name in ("examples/quickstart.sh", "pretrain_gpt.py", "tools/preprocess_data.py", "megatron"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).symlink_to(ROOT / name)
    binaries = shlex.quote(str(Path(sys.executable).parent))
    (root / "tools" / "setup_env.sh").write_text(f"export PATH={binaries}:$PATH PYTHONPATH=$PWD\n")
    return root


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


def test_a_few_steps_on_two_processes(tmp_path: Path, checkout: Path) -> None:
    write_text(tmp_path / "text")
    flags = ["--", "--log-interval", "5", "--eval-interval", "5", "--eval-iters", "1", "--seq-length", "64"]
    done = quickstart("--input-dir", "text", "--steps", "10", "--out", "run", *flags, cwd=tmp_path, root=checkout)
    assert done.returncode == 0, done.stderr
    assert "ranks      2 = DP 1 (copies of the model) x TP 2 (tensor and sequence parallel)" in done.stdout
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").open()]
    losses = [line["lm loss"] for line in lines if "lm loss" in line]
    assert len(losses) == 2
    assert losses[1] < losses[0]
    assert [line["iteration"] for line in lines if "lm loss validation" in line] == [5, 10]
    assert (tmp_path / "run" / "loss.png").stat().st_size > 0
    told = done.stdout.split("\nnext: ")[1].replace("\\\n", "")
    commands_can_be_pasted(told, tmp_path / "run" / "data" / "corpus_text_document")


def commands_can_be_pasted(text: str, dataset: Path) -> None:
    """The programs take the flags that they are told to be started with; ``dataset`` stands in for what they make."""
    commands = [shlex.split(line, comments=True) for line in text.splitlines() if ".py" in line]
    (_, preprocess, *how), (*_, plot, folder) = commands[0], commands[2]
    assert (preprocess, plot) == ("tools/preprocess_data.py", "tools/plot_run.py")
    made = output_prefix(build_parser().parse_args(how).output_prefix, "text")
    flags = commands[1][commands[1].index("pretrain_gpt.py") + 1 :]
    flags[flags.index(made)] = str(dataset)
    assert parse([*flags, "--check-config", "--world-size", "2"], environ={}).config.logging.run_dir == folder


def test_text_under_another_key(tmp_path: Path, checkout: Path) -> None:
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.jsonl").write_text('{"body": "the quick brown fox"}\n' * 200)
    flags = ["--input-dir", "text", "--steps", "1", "--out", "run"]
    refused = quickstart(*flags, cwd=tmp_path, root=checkout)
    assert refused.returncode == 1
    assert "a.jsonl:1 has no key 'text'; its keys: body\n  fix: --json-keys KEY" in refused.stderr
    done = quickstart(*flags, "--json-keys", "body", "--", "--check-config", cwd=tmp_path, root=checkout)
    assert (tmp_path / "run" / "data" / "corpus_body_document.idx").exists()
    assert done.returncode == 0, done.stderr


@pytest.mark.slow  # makes the project's .venv where there is none
def test_text_becomes_a_falling_loss_and_a_picture(tmp_path: Path) -> None:
    write_text(tmp_path / "text")
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
