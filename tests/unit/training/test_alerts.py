"""Alerts by a command and a webhook: what arrives, how often, and that nothing of it harms the run or leaks."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from megatron.arguments.cli import parse
from megatron.config.errors import UserError
from megatron.config.reliability import ReliabilityConfig
from megatron.training.loggers import alerts as module
from megatron.training.loggers.alerts import AlertLogger, Alerts, alerts_of, send_alert
from megatron.training.trainer import Trainer
from tests.kit.processes import free_port, is_alive
from tests.kit.runs import FLAGS, before_step, contents, start, tiny_run

SECRET = "/services/T0AB12CD/B0AB12CD/xYz0123456789abcdefG"


class Hook(ThreadingHTTPServer):
    """Keeps what is posted to it; answers with the next of ``answers``, 0 for none at all, or 200."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Answer)
        self.got: list[dict[str, Any]] = []
        self.answers: list[int] = []
        self.closing = threading.Event()

    @property
    def url(self) -> str:
        """Address, with a secret in its path."""
        return f"http://127.0.0.1:{self.server_address[1]}{SECRET}"


class _Answer(BaseHTTPRequestHandler):
    server: Hook

    def do_POST(self) -> None:
        """Take an alert."""
        content = self.rfile.read(int(self.headers["Content-Length"]))
        status = self.server.answers.pop(0) if self.server.answers else 200
        if status == 0:
            self.server.closing.wait(30.0)
            return
        self.server.got.append({"status": status, "path": self.path, **json.loads(content)})
        self.send_response(status)
        if status == 302:
            self.send_header("Location", f"{self.server.url}/elsewhere")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing."""


@pytest.fixture
def hook(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hook]:
    monkeypatch.setattr(module, "PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(module, "WEBHOOK_SECONDS", 0.3)
    monkeypatch.setattr(module, "COMMAND_SECONDS", 0.5)
    with Hook() as server:
        monkeypatch.setenv("HOOK", server.url)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.closing.set()
        server.shutdown()
        thread.join()


def fail(trainer: Trainer) -> None:
    raise RuntimeError("no more of this")


def stop(trainer: Trainer) -> None:
    Path(str(trainer.config.training.stop_file)).touch()


def test_finish_stop_and_failure_arrive_once_and_the_url_is_nowhere(tmp_path: Path, hook: Hook) -> None:
    run, flags = tmp_path / "run", "--eval-iters 0 --save-interval 50 --alert-webhook env:HOOK"
    flags = f"{flags} --save {tmp_path}/saved --stop-file {tmp_path}/STOP"
    outcomes = [start(tiny_run(run, flags), event) for event in (before_step(3, stop), None)]
    (tmp_path / "STOP").unlink()
    outcomes.append(start(tiny_run(run, flags)))
    outcomes.append(
        start(tiny_run(tmp_path / "failed", "--eval-iters 0 --alert-webhook env:HOOK"), before_step(2, fail))
    )
    assert [outcome.status for outcome in outcomes] == [0, 0, 0, 1]
    # the second stop, before a first step, is within the interval
    assert [(got["event"], got["step"]) for got in hook.got] == [("stop", 3), ("finish", 6), ("failure", None)]
    assert hook.got[0]["text"] == f"run: stop: stopped by --stop-file {tmp_path}/STOP after step 3 of 6"
    assert hook.got[1]["text"] == "run: finish: the run has taken its last step: 6"
    assert hook.got[2]["text"] == "failed: failure: rank 0: RuntimeError: no more of this"
    assert hook.got[0]["path"] == SECRET
    assert hook.got[0]["run"] == str(run)
    for name, content in contents(tmp_path).items():
        assert SECRET.encode() not in content, name
    assert not any(SECRET in outcome.out + outcome.err for outcome in outcomes)


def of(run_dir: Path | None = None, **options: Any) -> Alerts:
    return Alerts(ReliabilityConfig(**options), None if run_dir is None else str(run_dir))


def test_one_of_a_kind_is_sent_in_an_interval_over_ranks_and_starts(tmp_path: Path, hook: Hook) -> None:
    first, other = of(tmp_path, alert_webhook="env:HOOK"), of(tmp_path, alert_webhook="env:HOOK")
    for alerts, kind in ((first, "spike"), (first, "spike"), (other, "spike"), (other, "hang"), (first, "hang")):
        alerts.send(kind, "x", 3)
    assert [got["event"] for got in hook.got] == ["spike", "hang"]
    frequent = of(None, alert_webhook="env:HOOK", alert_interval_mins=0.5 / 60)
    for _ in range(3):
        frequent.send("spike", "x")
    time.sleep(0.55)
    frequent.send("spike", "y")
    assert [got["text"] for got in hook.got[2:]] == ["spike: x", "spike: y (2 more of this kind since the last alert)"]


def test_warnings_are_sent_that_ask_for_it(tmp_path: Path, hook: Hook) -> None:
    logger = AlertLogger(of(tmp_path, alert_webhook="env:HOOK"), last_phase=False)
    logger.event(3, "warning", {"text": "slow"})
    for alert in (False, True):
        logger.event(4, "warning", {"text": "replica 1 left", "kind": "replica-lost", "alert": alert})
    assert [(got["event"], got["step"]) for got in hook.got] == [("replica-lost", 4)]


@pytest.mark.parametrize(
    ("answers", "arrive", "reason"),
    [
        ([500, 429, 200], 3, ""),
        ([500, 500, 503], 3, "status 503, Service Unavailable"),
        ([404], 1, "status 404, Not Found"),
        ([302], 1, "status 302"),
        ([0, 0, 0], 0, "it took too long"),
        ([0, 200], 1, ""),
    ],
)
def test_a_webhook_that_fails_is_tried_again_and_costs_a_warning(
    hook: Hook, capsys: pytest.CaptureFixture[str], answers: list[int], arrive: int, reason: str
) -> None:
    hook.answers = answers
    began = time.monotonic()
    of(alert_webhook="env:HOOK").send("hang", "x")
    assert time.monotonic() - began < 3.0
    printed = capsys.readouterr().err
    assert len(hook.got) == arrive
    assert printed.startswith("warning: --alert-webhook: the alert 'hang' was not delivered: " + reason) == bool(reason)
    assert SECRET not in printed
    assert (printed == "") == (not reason)


def test_a_webhook_that_refuses_connections_costs_a_warning(
    tmp_path: Path, hook: Hook, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "url").write_text(f"http://127.0.0.1:{free_port()}{SECRET}\n")
    of(alert_webhook=f"file:{tmp_path}/url").send("stop", "x")
    assert "was not delivered: [Errno 111] Connection refused" in capsys.readouterr().err


def test_an_alert_that_is_lost_does_not_hold_the_next_one_back(tmp_path: Path, hook: Hook) -> None:
    hook.answers = [404, 200]
    for rank in range(3):  # each is a process of its own
        of(tmp_path, alert_webhook="env:HOOK").send("spike", f"of rank {rank}")
    assert [line["text"].split(": ")[-1] for line in hook.got] == ["of rank 0", "of rank 1"]
    ahead = {"event": "hang", "time": time.time() + 3000.0}  # of a node whose clock is ahead
    with (tmp_path / "alerts.jsonl").open("a") as file:
        file.write(json.dumps(ahead) + "\n")
    of(tmp_path, alert_webhook="env:HOOK").send("hang", "now")
    assert len(hook.got) == 3


WRITE = "import os, sys; open(sys.argv[1], 'w').write(repr(sys.argv[2:]) + os.environ['ALERT_EVENT'])"


def test_a_command_gets_kind_and_text_as_they_are(
    tmp_path: Path, hook: Hook, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "COMMAND_SECONDS", 30.0)
    text = f"$(touch {tmp_path}/injected); `id` 'x' \"y\" --help \n z"
    of(alert_command=f'{sys.executable} -c "{WRITE}" {tmp_path}/got').send("spike", text)
    assert (tmp_path / "got").read_text() == f"{['spike', text]!r}spike"
    assert not (tmp_path / "injected").exists()
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("script", "reason"),
    [("echo no mail >&2; exit 3", "exit status 3: no mail"), ("echo $$ >{0}/pid; sleep 60 & wait", "it took too long")],
)
def test_a_command_that_fails_or_hangs_costs_a_warning(
    tmp_path: Path, hook: Hook, capsys: pytest.CaptureFixture[str], script: str, reason: str
) -> None:
    (tmp_path / "script").write_text(script.format(tmp_path))
    of(alert_command=f"sh {tmp_path}/script").send("hang", "x")
    assert f"--alert-command: the alert 'hang' was not delivered: {reason}" in capsys.readouterr().err
    if (tmp_path / "pid").exists():
        assert not is_alive(int((tmp_path / "pid").read_text()))


def test_a_rank_that_ends_waits_only_so_long_for_its_alert(hook: Hook, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WEBHOOK_SECONDS", 10.0)
    monkeypatch.setattr(module, "ATTEMPTS", 1)
    hook.answers = [0]
    send_alert("failure", "nobody has asked for alerts")
    with alerts_of(ReliabilityConfig(alert_webhook="env:HOOK"), None):
        began = time.monotonic()
        send_alert("failure", "x", seconds=0.2)
    assert 0.2 <= time.monotonic() - began < 2.0
    assert hook.answers == []


@pytest.mark.parametrize(
    ("flags", "code", "sentence"),
    [
        (f"https://hooks.slack.com{SECRET}", "E014", "the URL at hooks.slack.com holds what looks like a key"),
        ("https://example.org/?id=abcdef0123456789", "E014", "the URL at example.org holds what looks like a key"),
        ("env:NOT_SET_ANYWHERE", "E710", "env:NOT_SET_ANYWHERE cannot be used: there is no such environment variable"),
        ("file:missing", "E710", "file:missing cannot be used: No such file or directory"),
        ("ftp://example.org/x", "E710", "the URL cannot be used: it begins with http:// or https://"),
    ],
)
def test_urls_that_hold_a_key_or_cannot_be_used_are_refused(
    tmp_path: Path, flags: str, code: str, sentence: str
) -> None:
    with pytest.raises(UserError) as caught:
        tiny_run(tmp_path, f"--alert-webhook {flags}")
    (problem,) = caught.value.problems
    assert (problem.code, sentence in problem.sentence) == (code, True)
    assert SECRET not in str(caught.value)
    assert "abcdef0123456789" not in str(caught.value)


@pytest.mark.parametrize("command", ["", "no-such-program-anywhere", "'"])
def test_commands_that_cannot_be_run_are_refused(command: str) -> None:
    with pytest.raises(UserError, match="E710 --alert-command"):
        parse([*FLAGS.split(), "--alert-command", command], {"RANK": "0", "WORLD_SIZE": "1"})


def test_a_disk_that_hangs_holds_no_alert_back(hook: Hook, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hangs = threading.Event()
    monkeypatch.setattr(module, "DISK_SECONDS", 0.1)
    monkeypatch.setattr(module, "read_json_lines", lambda path: [] * hangs.wait(30.0))
    monkeypatch.setattr(module, "check_access", lambda *place, **options: hangs.wait(30.0))
    Alerts(ReliabilityConfig(alert_webhook="env:HOOK"), str(tmp_path)).send("failure", "the disk is gone")
    hangs.set()
    assert [got["text"].endswith("failure: the disk is gone") for got in hook.got] == [True]
