from __future__ import annotations

import importlib.metadata
import json
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from megatron.data.indexed_writer import IndexedDatasetWriter
from megatron.training.loggers import run_folder
from megatron.training.loggers.run_folder import git_state, restart_command, write_run_folder
from tests.runs import start, tiny_run


def test_the_folder_holds_what_is_needed_to_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py", "--lr", "1e-3"])
    folder = tmp_path / "runs" / "a"
    write_run_folder(folder, "model:\n  num_layers: 2\n", "cpu", world_size=1)
    assert (folder / "config.yaml").read_text() == "model:\n  num_layers: 2\n"
    assert "pretrain_gpt.py --lr 1e-3" in (folder / "command.sh").read_text()
    facts = json.loads((folder / "environment.json").read_text())
    assert facts["python"] == sys.version.split()[0]
    assert facts["packages"]["torch"]
    assert (facts["device"], facts["world_size"]) == ("cpu", 1)


@pytest.fixture
def git_says(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str | None, str]]:
    """The answers of git, one for each start."""
    answers: list[tuple[str | None, str]] = []
    monkeypatch.setattr(run_folder, "git_state", lambda source: answers.pop(0))
    return answers


def test_a_second_start_keeps_what_the_first_one_wrote(tmp_path: Path, git_says: list[tuple[str | None, str]]) -> None:
    git_says += [("f00", "")] * 4
    kept = [write_run_folder(tmp_path, config, "cpu", world_size=1) for config in ("a", "b", "b", "c")]
    assert kept == [[], [tmp_path / "config.1.yaml"], [], [tmp_path / "config.2.yaml"]]
    assert (tmp_path / "config.yaml").read_text() == "c"
    assert (tmp_path / "config.1.yaml").read_text() == "a"
    assert (tmp_path / "config.2.yaml").read_text() == "b"
    assert not (tmp_path / "config.3.yaml").exists()


def test_files_of_one_start_are_kept_under_one_number(tmp_path: Path, git_says: list[tuple[str | None, str]]) -> None:
    git_says += [("f00", "+dirty"), ("f00", "+dirty"), ("f00", "")]
    for config in ("a", "b", "b"):
        kept = write_run_folder(tmp_path, config, "cpu", world_size=1)
    assert [path.name for path in kept] == ["environment.2.json", "uncommitted.2.diff"]
    assert json.loads((tmp_path / "environment.2.json").read_text())["git_uncommitted_changes"]
    assert (tmp_path / "uncommitted.2.diff").read_text() == "+dirty"
    assert not (tmp_path / "uncommitted.diff").exists()  # which would say that this start had changes too


def test_the_command_can_be_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "say.py").write_text("import sys; print(sys.argv[1:])")
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{run_folder.os.environ['PATH']}")
    script = tmp_path / "command.sh"
    script.write_text(restart_command({}, ["say.py", "--split", "969, 30, 1"], 1))
    done = subprocess.run(["sh", str(script)], cwd="..", capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['--split', '969, 30, 1']"


def test_the_command_starts_as_many_processes() -> None:
    one_node = restart_command({"LOCAL_WORLD_SIZE": "4", "PYTHONPATH": "a b"}, ["train.py"], 4)
    assert one_node.splitlines()[-1].endswith(
        "&& env 'PYTHONPATH=a b' torchrun --standalone --nproc-per-node 4 train.py"
    )
    many = restart_command({"LOCAL_WORLD_SIZE": "4"}, ["train.py"], 8)
    assert many.splitlines()[1].startswith("# on 8 processes")
    assert many.splitlines()[-1].endswith(f"&& {shlex.quote(Path(sys.executable).name)} train.py")


def test_git_state(tmp_path: Path) -> None:
    assert git_state(tmp_path) == (None, "")

    def git(*arguments: str) -> str:
        identity = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
        command = ["git", "-C", str(tmp_path), *identity, *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    git("init", "-q")
    (tmp_path / "f").write_text("one\n")
    git("add", "f")
    git("commit", "-qm", "first")
    assert git_state(tmp_path) == (git("rev-parse", "HEAD").strip(), "")
    (tmp_path / "f").write_text("two\n")
    commit, diff = git_state(tmp_path)
    assert commit == git("rev-parse", "HEAD").strip()
    assert "+two" in diff


def test_the_folder_tells_what_the_run_reads(tmp_path: Path) -> None:
    prefixes = [tmp_path / "a", tmp_path / "b"]
    for prefix in prefixes:
        with IndexedDatasetWriter(prefix, np.uint16) as writer:
            for _ in range(40):
                writer.add_document([1] * 9)
    blend = f"--set data.mock_data=false --data-path 1 {prefixes[0]} 3 {prefixes[1]} --split 1,0,0"
    assert start(tiny_run(tmp_path / "run", blend)).status == 0
    assert start(tiny_run(tmp_path / "mock")).status == 0
    data, mock = (json.loads((tmp_path / name / "data.json").read_text()) for name in ("run", "mock"))
    train = data["train"]
    assert (train["samples"], train["tokens"], data.keys()) == (24, 192, {"train"})
    read = {source["source"]: source["tokens"] for source in train["sources"]}
    assert read == {str(prefixes[0]): 6 * 8, str(prefixes[1]): 18 * 8}
    assert [source["epochs"] for source in train["sources"]] == [tokens / (40 * 9) for tokens in read.values()]
    assert len(train["fingerprint"]) == 16
    assert mock["train"]["sources"] == [{"source": "192 generated tokens over 31 ids"}]
    assert mock["train"]["fingerprint"] != train["fingerprint"]


def test_the_environment_names_what_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_folder, "PACKAGES", (*run_folder.PACKAGES, "no-such-package"))
    write_run_folder(tmp_path, "", "cpu", 1)
    packages = json.loads((tmp_path / "environment.json").read_text())["packages"]
    assert packages["torch"] == importlib.metadata.version("torch")
    assert packages["wandb"] == importlib.metadata.version("wandb")
    assert "no-such-package" not in packages


def test_a_file_that_is_no_text_is_set_aside_as_it_is(tmp_path: Path) -> None:
    (tmp_path / run_folder.COMMAND_FILE).write_bytes(b"# caf\xe9\n")
    (kept,) = write_run_folder(tmp_path, "a: 1\n", "cpu", 1)
    assert (kept.name, kept.read_bytes()) == ("command.1.sh", b"# caf\xe9\n")
