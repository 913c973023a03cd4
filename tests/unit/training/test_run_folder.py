"""The run folder: the files to run again, the metrics line by line, and their history."""

from __future__ import annotations

import errno
import importlib.metadata
import json
import math
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron.data.indexed_writer import IndexedDatasetWriter
from megatron.training.loggers import run_folder
from megatron.training.loggers.run_folder import (
    IncidentLogger,
    JsonLinesLogger,
    RunHistory,
    git_state,
    read_history,
    read_json_lines,
    restart_command,
    write_run_folder,
)
from tests.kit.runs import start, tiny_run


def test_the_folder_holds_everything_to_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py", "--lr", "1e-3"])
    monkeypatch.setattr(run_folder, "PACKAGES", (*run_folder.PACKAGES, "no-such-package"))
    folder = tmp_path / "runs" / "a"
    write_run_folder(folder, "model:\n  num_layers: 2\n", "cpu", world_size=1)
    assert (folder / "config.yaml").read_text() == "model:\n  num_layers: 2\n"
    assert "pretrain_gpt.py --lr 1e-3" in (folder / "command.sh").read_text()
    facts = json.loads((folder / "environment.json").read_text())
    assert facts["python"] == sys.version.split()[0]
    assert facts["packages"]["torch"] == importlib.metadata.version("torch")
    assert "no-such-package" not in facts["packages"]
    assert (facts["device"], facts["world_size"]) == ("cpu", 1)


@pytest.fixture
def git_states(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str | None, str]]:
    """The answers of git, one for each start."""
    answers: list[tuple[str | None, str]] = []
    monkeypatch.setattr(run_folder, "git_state", lambda source: answers.pop(0))
    return answers


def test_a_second_start_keeps_the_files_of_the_first(tmp_path: Path, git_states: list[tuple[str | None, str]]) -> None:
    git_states += [("f00", "")] * 4
    kept = [write_run_folder(tmp_path, config, "cpu", world_size=1) for config in ("a", "b", "b", "c")]
    assert kept == [[], [tmp_path / "config.1.yaml"], [], [tmp_path / "config.2.yaml"]]
    assert (tmp_path / "config.yaml").read_text() == "c"
    assert (tmp_path / "config.1.yaml").read_text() == "a"
    assert (tmp_path / "config.2.yaml").read_text() == "b"
    assert not (tmp_path / "config.3.yaml").exists()


def test_files_of_one_start_are_kept_under_one_number(tmp_path: Path, git_states: list[tuple[str | None, str]]) -> None:
    git_states += [("f00", "+dirty"), ("f00", "+dirty"), ("f00", "")]
    for config in ("a", "b", "b"):
        kept = write_run_folder(tmp_path, config, "cpu", world_size=1)
    assert [path.name for path in kept] == ["environment.2.json", "uncommitted.2.diff"]
    assert json.loads((tmp_path / "environment.2.json").read_text())["git_uncommitted_changes"]
    assert (tmp_path / "uncommitted.2.diff").read_text() == "+dirty"
    assert not (tmp_path / "uncommitted.diff").exists()  # or this start would seem to have changes too


def test_the_command_can_be_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "echo.py").write_text("import sys; print(sys.argv[1:])")
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{run_folder.os.environ['PATH']}")
    script = tmp_path / "command.sh"
    script.write_text(restart_command({}, ["echo.py", "--split", "969, 30, 1"], 1))
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


def test_the_folder_records_the_data_of_the_run(tmp_path: Path) -> None:
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


def test_a_file_that_is_no_text_is_set_aside_as_it_is(tmp_path: Path) -> None:
    (tmp_path / run_folder.COMMAND_FILE).write_bytes(b"# caf\xe9\n")
    (kept,) = write_run_folder(tmp_path, "a: 1\n", "cpu", 1)
    assert (kept.name, kept.read_bytes()) == ("command.1.sh", b"# caf\xe9\n")


def read_lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON")) for line in path.open()]


class FailingDisk:
    """Takes ``room`` bytes, then raises; ``room`` can be given back."""

    def __init__(self, path: Path, room: int) -> None:
        self.file, self.room = path.open("ab", buffering=0), room

    def write(self, data: bytes) -> int:
        if self.room == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = self.file.write(data[: self.room])
        self.room -= written
        return written

    def close(self) -> None:
        self.file.close()


def test_lines_are_on_disk_at_once_and_nonfinite_numbers_are_null(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    for iteration, value in enumerate((2.5, math.nan, math.inf, -math.inf)):
        lines = JsonLinesLogger(path, warn=pytest.fail)
        lines.log(iteration, {"lm loss": value, "skipped-iterations": [3]})
        last = {"iteration": iteration, "lm loss": 2.5 if value == 2.5 else None, "skipped-iterations": [3]}
        assert read_lines(path)[iteration:] == [last]
        lines.close()


def test_a_line_cut_off_by_a_crash_does_not_swallow_the_next(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text('{"iteration": 1}\n{"iterat')
    lines = JsonLinesLogger(path, warn=pytest.fail)
    lines.write({"iteration": 2})
    lines.close()
    assert path.read_text() == '{"iteration": 1}\n{"iterat\n{"iteration": 2}\n'
    assert list(read_json_lines(path)) == [{"iteration": 1}, None, {"iteration": 2}]
    path.write_bytes(b'\xc3\x00\n[1]\n{}\n\n{"a": 1')
    assert list(read_json_lines(path)) == [None, None, {}, None, None]


@pytest.mark.parametrize("room", [0, 5])
def test_a_full_disk_warns_once_and_is_used_again_when_it_can(tmp_path: Path, room: int) -> None:
    path, warnings = tmp_path / "m.jsonl", list[str]()
    lines = JsonLinesLogger(path, warn=warnings.append)
    lines.close()
    disk = FailingDisk(path, room)
    lines._file = disk  # type: ignore[assignment]
    for iteration in range(3):
        lines.write({"iteration": iteration})
    disk.room = 10**6
    lines.write({"iteration": 3})
    lines.close()
    assert len(warnings) == 1
    assert "m.jsonl" in warnings[0]
    assert "no space left" in warnings[0].lower()
    assert path.read_text().splitlines()[-1] == '{"iteration": 3}'
    assert len(path.read_text().splitlines()) == (2 if room else 1)


def test_incidents_are_listed_with_their_times(tmp_path: Path) -> None:
    path = tmp_path / "incidents.md"
    at = {"time": 86400.0}
    first = IncidentLogger(path)
    first.event(0, "start", {"run-id": "abcd1234", "world-size": 8, **at})
    first.log(5, {"skipped-iterations": [3, 5], **at})
    first.log(6, {"skipped-iterations": [], **at})
    first.event(6, "note", {"text": "not an incident", **at})
    first.event(6, "warning", {"text": "the disk\nis full", **at})
    first.event(7, "error", {"text": "NonFiniteError: loss", **at})
    first.close()
    second = IncidentLogger(path)
    job = {"epoch": 3, "slurm-job": "17", "slurm-restart": 2, "nodes": "n[1-3]"}
    second.event(4, "start", {"run-id": "", "world-size": 1, **job, **at})
    second.event(5, "stop", {"text": "stopped by signal 15", **at})
    second.close()
    lines = path.read_text().splitlines()
    ended = [lines.pop(4), lines.pop()]
    assert lines == [
        "- 1970-01-02 00:00:00 step 0: started on 8 ranks, run abcd1234",
        "- 1970-01-02 00:00:00 step 5: skipped the updates of steps 3, 5",
        "- 1970-01-02 00:00:00 step 6: warning: the disk is full",
        "- 1970-01-02 00:00:00 step 7: error: NonFiniteError: loss",
        "- 1970-01-02 00:00:00 step 4: started again on 1 rank, Slurm job 17 restart 2, on n[1-3]",
        "- 1970-01-02 00:00:00 step 5: stopped by signal 15",
    ]
    assert [line.partition(" step ")[2] for line in ended] == ["7: ended by an error", "5: ended in good order"]


def train(iteration: int, loss: float | None = 2.0, **more: Any) -> dict[str, Any]:
    return {
        "iteration": iteration,
        "consumed-samples": 4 * iteration,
        "consumed-tokens": 40 * iteration,
        "lm loss": loss,
        "learning-rate": 1e-3,
        "batch-size": 4,
        "skipped-iterations": [],
        **more,
    }


def started(iteration: int) -> dict[str, Any]:
    return {"event": "start", "iteration": iteration, "consumed-tokens": 40 * iteration}


def validation(iteration: int, loss: float = 3.0) -> dict[str, Any]:
    return {"iteration": iteration, "consumed-tokens": 40 * iteration, "lm loss validation": loss}


def evaluation(iteration: int, kind: str, name: str = "", loss: float = 3.0) -> dict[str, Any]:
    of = {"validation-set": name} if name else {}
    return {"iteration": iteration, "consumed-tokens": 40 * iteration, f"lm loss {kind}": loss, **of}


def read(path: Path, *lines: dict[str, Any] | str) -> RunHistory:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return read_history(path)


def test_reads_the_output_of_a_run(tmp_path: Path) -> None:
    history = read(
        tmp_path / "m.jsonl",
        started(0),
        train(10),
        train(20, loss=None, **{"skipped-iterations": [18]}),
        validation(20),
        {"event": "note", "iteration": 20, "text": "hello"},
        {"iteration": 20, "health/grad-norm/head": 1.0},
    )
    assert [point.iteration for point in history.train] == [10, 20]
    assert math.isnan(history.train[1].loss)
    assert (history.train[0].tokens, history.train[0].tokens_per_step) == (400, 40)
    assert [(point.tokens, point.loss) for point in history.evaluations] == [(800, 3.0)]
    assert [point.iteration for point in history.health] == [20]
    assert (history.restarts, history.unreadable) == ([], [])


def test_a_restart_throws_later_steps_away(tmp_path: Path) -> None:
    history = read(
        tmp_path / "m.jsonl",
        *(started(0), train(10), validation(10), train(20), validation(20), train(30)),
        *(started(20), train(25), started(10), train(20, loss=1.5)),
    )
    assert [(point.iteration, point.loss) for point in history.train] == [(10, 2.0), (20, 1.5)]
    assert [point.iteration for point in history.evaluations] == [10]
    assert history.restarts == [400]
    fresh = read(tmp_path / "m.jsonl", started(0), train(10), started(0), train(5))  # a fresh run in the same folder
    assert ([point.iteration for point in fresh.train], fresh.restarts) == ([5], [])


def test_evaluations_on_several_sets(tmp_path: Path) -> None:
    """Also where a run was killed between two of them after a step that was saved, and does both again."""
    first = (started(0), train(10), evaluation(10, "validation", "wiki", 3.5))
    again = (started(10), evaluation(10, "validation", "wiki"), evaluation(10, "validation", "code"))
    history = read(tmp_path / "m.jsonl", *first, *again, evaluation(10, "test", loss=4.0), evaluation(20, "validation"))
    assert [(point.name, point.iteration, point.loss) for point in history.evaluations] == [
        ("validation wiki", 10, 3.0),
        ("validation code", 10, 3.0),
        ("test", 10, 4.0),
        ("validation", 20, 3.0),
    ]


def test_errors_after_a_restart_are_thrown_away(tmp_path: Path) -> None:
    def error(iteration: int) -> dict[str, Any]:
        return {"event": "error", "iteration": iteration, "consumed-tokens": 40 * iteration, "text": "E: x"}

    failed = (started(0), train(10), error(10), started(10), train(20), error(20), started(15), train(20), error(25))
    history = read(tmp_path / "m.jsonl", *failed)
    assert (history.errors, history.restarts, history.unreadable) == ([400, 1000], [400, 600], [])


def test_lines_that_make_no_sense_are_counted(tmp_path: Path) -> None:
    bad = ['{"iterat', "[1]", "7", "", '{"lm loss": 1}', '{"event": "start"}', "\ufffd"]
    history = read(tmp_path / "m.jsonl", train(10), *bad, train(20))
    assert [point.iteration for point in history.train] == [10, 20]
    assert history.unreadable == list(range(2, 2 + len(bad)))


def test_nothing_to_draw(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    with pytest.raises(ValueError, match=r"m\.jsonl does not exist"):
        read_history(path)
    path.write_text(json.dumps(started(0)) + "\nnot\njson\n")
    with pytest.raises(ValueError, match=r"holds no log line .*2 lines could not be read"):
        read_history(path)
