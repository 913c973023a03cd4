"""Requests to a running job, by its control file: what they do, what is recorded, and that losses stay as they are."""

from __future__ import annotations

import errno
import json
import os
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron.training import control
from megatron.training.control import COMMANDS, NO_REQUEST, ControlFile, parse_request
from megatron.training.trainer import Trainer
from tests.kit.runs import Outcome, before_step, column, records, saved_steps, start, tiny_run
from tools import control as tool


@pytest.fixture(autouse=True)
def looks_after_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "FILE_CHECK_SECONDS", 0.0)


def asked_in_step(tmp_path: Path, number: int, text: str, flags: str = "") -> tuple[Outcome, list[dict[str, Any]]]:
    """Run with a control file that is written in a step; return the outcome and the events of requests."""

    def ask(trainer: Trainer) -> None:
        (tmp_path / "run" / "control").write_text(text)

    outcome = start(tiny_run(tmp_path / "run", flags.format(tmp_path)), before_step(number, ask))
    assert not (tmp_path / "run" / "control").exists()
    return outcome, [line for line in records(tmp_path / "run", "event") if line["event"] == "control"]


def test_requests_are_carried_out_after_the_step_and_change_no_loss(tmp_path: Path) -> None:
    flags = "--save {0}/saved --eval-iters 2"
    outcome, events = asked_in_step(tmp_path, 3, "save #a1\nevaluate #b2\n", flags)
    assert (outcome.status, outcome.err) == (0, "")
    assert saved_steps(tmp_path / "saved") == [3, 6]
    assert column(tmp_path / "run", "iteration", "lm loss validation") == [3, 6]
    assert [(e["iteration"], e["id"], e["done"], e["request"]) for e in events] == [
        (3, "a1", True, "save"),
        (3, "b2", True, "evaluate"),
    ]
    loss = records(tmp_path / "run", "lm loss validation")[0]["lm loss validation"]
    assert f"): loss after step 3: valid {loss:.6g}" in events[1]["text"]
    incidents = (tmp_path / "run" / "incidents.md").read_text()
    assert re.search(r"step 3: control: save \(asked for by \w+\): step 3 is saved", incidents)
    start(tiny_run(tmp_path / "plain", f"--save {tmp_path}/other --eval-iters 2"))
    for name in ("lm loss", "grad-norm", "samples-digest"):
        assert column(tmp_path / "run", name) == column(tmp_path / "plain", name)


def test_a_save_in_the_background_and_one_that_is_due_are_said_to_be(tmp_path: Path) -> None:
    flags = "--save {0}/saved --async-save --save-interval 4 --eval-iters 0"
    outcome, events = asked_in_step(tmp_path, 2, "save", flags)
    assert outcome.status == 0
    assert 2 in saved_steps(tmp_path / "saved")
    assert "step 2 is being saved in the background" in events[0]["text"]
    outcome, events = asked_in_step(tmp_path / "due", 4, "save", flags)
    assert "step 4 is saved as scheduled" in events[0]["text"]


def test_a_stop_saves_and_ends_with_status_0(tmp_path: Path) -> None:
    outcome, events = asked_in_step(tmp_path, 2, "stop #x\nsave", "--save {0}/saved --eval-iters 0")
    assert (outcome.status, outcome.err, saved_steps(tmp_path / "saved")) == (0, "", [2])
    assert "stopped by a request in the control file after step 2 of 6" in outcome.out
    assert [(event["id"], event["done"]) for event in events] == [("", True), ("x", True)]
    assert events[1]["text"].startswith("stop (asked for by ")
    assert events[1]["text"].endswith("): stopped after step 2 of 6")
    assert json.loads((tmp_path / "run" / "stopped.json").read_text())["iteration"] == 2


def test_log_lines_and_levels_follow_requests(tmp_path: Path) -> None:
    flags = "--log-interval 3 --eval-iters 0"
    outcome, events = asked_in_step(tmp_path, 2, "log-interval 1\nlog-level DEBUG\n", flags)
    assert outcome.status == 0
    assert all(event["done"] for event in events)
    assert len(events) == 2
    assert column(tmp_path / "run", "iteration") == [3, 4, 5, 6]


def test_what_cannot_be_done_gets_a_sentence_and_the_run_goes_on(tmp_path: Path) -> None:
    text = "save\nevaluate\nsvae #z\nprofile 21\nlog-interval\nlog-level loud\nstop now\nlog-interval 0\n\x1b[2J"
    outcome, events = asked_in_step(tmp_path, 2, text, "--eval-iters 0")
    assert (outcome.status, column(tmp_path / "run", "iteration")) == (0, [1, 2, 3, 4, 5, 6])
    assert not any(event["done"] for event in events)
    expected = [
        "this run saves no checkpoints; --save FOLDER lets it",
        "this run evaluates no validation data; the next start does with --eval-iters N",
        "'svae' is no request; there are save, evaluate, stop, profile, pipeline, log-interval, log-level",
        "'profile' is followed by a number from 1 to 20",
        "'log-interval' is followed by a number from 1 to 1000000",
        "'log-level' is followed by one of debug, info, warning, error",
        "'stop' is followed by too much: 'now'",
        "'log-interval' is followed by a number",
        "is no request",
    ]
    assert len(events) == len(expected)
    for event, sentence in zip(events, expected):
        assert sentence in event["text"]
        assert sentence.startswith("this run") or event["text"].startswith("request of ")
        assert "\x1b" not in event["text"]
    assert outcome.err.count("warning: ") == len(expected)


@pytest.mark.parametrize(
    ("content", "reason"), [("save\n" * 21, "up to 20 requests"), (" " * 5000, "4,096 bytes"), ("x" * 5000, "bytes")]
)
def test_a_file_that_is_too_long_is_ignored(tmp_path: Path, content: str, reason: str) -> None:
    file = ControlFile(tmp_path)
    assert file.read() == NO_REQUEST
    file.open()
    file.path.write_text(content)
    for _ in range(2):  # an empty one gets a second look
        assert file.read() == NO_REQUEST
    assert reason in file.pending[0].problem
    assert not file.path.exists()


def as_folder(path: Path) -> None:
    path.mkdir()


def as_pipe(path: Path) -> None:
    os.mkfifo(path)


@pytest.mark.parametrize("make", [as_folder, as_pipe])
def test_what_cannot_be_read_is_reported_once(tmp_path: Path, make: Callable[[Path], None]) -> None:
    file = ControlFile(tmp_path)
    make(file.path)
    file.open()
    assert file.read() == NO_REQUEST
    assert "is ignored from now on" in file.pending[0].problem
    file.pending = []
    file.open()
    file.read()
    assert file.pending == []


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files of others")
@pytest.mark.parametrize(("folder", "allowed"), [(0, False), (4711, True)])
def test_a_file_of_another_user_is_refused_unless_a_container_has_his_folder(
    tmp_path: Path, folder: int, allowed: bool
) -> None:
    file = ControlFile(tmp_path)
    file.open()
    file.path.write_text("stop")
    os.chown(tmp_path, folder, -1)
    os.chown(file.path, 4711, -1)
    file.read()
    assert (file.stops, file.path.exists()) == (allowed, False)
    assert file.pending[0].problem == ("" if allowed else f"{file.path} belongs to user 4711, and is ignored")


def test_profiles_are_asked_for_like_by_the_file_of_their_own(tmp_path: Path) -> None:
    file = ControlFile(tmp_path)
    file.open()
    file.path.write_text("profile\npipeline 5\n")
    assert file.read() == NO_REQUEST._replace(profile=2, pipeline=5)


@pytest.mark.parametrize("word", COMMANDS)
def test_the_usage_of_each_request_is_one(word: str) -> None:
    assert f"\n  {tool.usage(word)}  " in tool.build_parser().format_help()
    usage = tool.usage(word).split("|")[0].replace("[", "").replace("]", "").partition("=")[0]
    assert parse_request(usage.replace(" N", " 1"))[0] == COMMANDS[word].field


def test_a_request_is_put_and_withdrawn_where_there_are_no_hard_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "control"

    def link(source: Path, target: Path) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", link)
    assert tool.write_request(file, "save #a1\n", time.monotonic() + 5.0)
    assert not tool.write_request(file, "stop #b2\n", time.monotonic() + 0.1)
    assert not tool.withdraw(file, "b2")
    assert file.read_text() == "save #a1\n"
    assert tool.withdraw(file, "a1")
    assert [*tmp_path.iterdir()] == []


def test_the_tool_prints_the_answer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    statuses: list[int] = []
    threads: list[threading.Thread] = []

    def ask(*argv: str) -> Callable[[Trainer], None]:
        def begin(trainer: Trainer) -> None:
            thread = threading.Thread(target=lambda: statuses.append(tool.main([str(tmp_path / "run"), *argv])))
            thread.start()
            threads.append(thread)
            while not (tmp_path / "run" / "control").exists():
                assert thread.is_alive()

        return begin

    with before_step(3, ask("stop")):
        outcome = start(tiny_run(tmp_path / "run", "--eval-iters 0"))
    threads[0].join(10.0)
    assert (outcome.status, statuses) == (0, [tool.CARRIED_OUT])
    assert "): stopped after step 3 of 6\n" in outcome.out + capsys.readouterr().out
    assert tool.main([str(tmp_path / "run"), "save", "--timeout", "0.3"]) == tool.UNANSWERED
    assert "the run has ended in good order, and reads no requests" in capsys.readouterr().err
    journal = tmp_path / "run" / "incidents.md"
    journal.write_text(journal.read_text().replace("ended in good order", "incident: killed"))
    assert tool.main([str(tmp_path / "run"), "save", "--timeout", "0.3"]) == tool.UNANSWERED
    assert "has not read the request, which is withdrawn" in capsys.readouterr().err
    assert sorted(path.name for path in (tmp_path / "run").glob("control*")) == []
    (tmp_path / "run" / "control").write_text("save")
    assert tool.main([str(tmp_path / "run"), "save", "--timeout", "0.3"]) == tool.UNANSWERED
    assert "holds another request" in capsys.readouterr().err


@pytest.mark.parametrize(("argv", "sentence"), [(["profil"], "no request"), (["save"], "not the --run-dir of a run")])
def test_the_tool_refuses_what_is_no_request_or_no_run(
    tmp_path: Path, argv: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        tool.main([str(tmp_path), *argv])
    assert caught.value.code == tool.INVALID
    assert sentence in capsys.readouterr().err
