"""Alert people when a run ends, stops or fails, and at incidents: by a command, by a webhook, or both.

:class:`AlertLogger` receives the events of the run on rank 0, in a thread of its own. Failures come from the rank that
failed first, whichever it is, through :func:`send_alert`. Alerts are recorded in ``RUN_DIR/alerts.jsonl``, by which all
ranks, and later starts, keep the interval between two of one kind. An alert that fails is a warning.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from megatron.config.alerts import webhook_url
from megatron.config.privacy import check_access, redact
from megatron.config.reliability import ReliabilityConfig
from megatron.training.first_cause import within
from megatron.training.loggers.base import Metrics
from megatron.training.loggers.console import print_warning
from megatron.training.loggers.run_folder import JsonLinesLogger, read_json_lines

ALERTS_FILE = "alerts.jsonl"

FINISH, STOP, FAILURE = "finish", "stop", "failure"
"""Kinds of alerts besides those of incidents (:data:`megatron.training.incidents.KINDS`)."""

COMMAND_SECONDS, WEBHOOK_SECONDS = 10.0, 5.0
"""Timeouts of a command, and of an attempt to reach a webhook."""

ATTEMPTS, PAUSE_SECONDS = 3, 1.0
"""Attempts to reach a webhook, and the first pause between two; the next is twice as long."""

DISK_SECONDS = 2.0
"""Seconds after which the records of alerts are given up, because the disk hangs; the alert is sent."""

FAILURE_SECONDS = 15.0
"""Seconds that a failing rank waits for its alert, before the launcher sees its end."""


class Alerts:
    """Sends alerts of one run, from any rank and thread."""

    def __init__(self, options: ReliabilityConfig, run_dir: str | None) -> None:
        """Send to the command and the webhook of ``options``."""
        self._options = options
        self._run_dir = None if run_dir is None else Path(run_dir)
        self._last: dict[str, float] = {}  # seconds since 1970, by kind
        self._held: dict[str, int] = {}  # alerts within the interval, by kind

    def send(self, kind: str, text: str, step: int | None = None) -> None:
        """Send an alert, unless one of its kind was sent less than ``--alert-interval-mins`` ago; never raises."""
        now, interval = time.time(), 60.0 * self._options.alert_interval_mins
        last = self._last.get(kind, 0.0)
        if now - max(last, within(DISK_SECONDS, lambda: self._last_recorded(kind), 0.0)) < interval:
            self._held[kind] = self._held.get(kind, 0) + 1
            return
        self._last[kind] = now
        if held := self._held.pop(kind, 0):
            text = f"{text} ({held} more of this kind since the last alert)"
        run = None if self._run_dir is None else str(self._run_dir.absolute())
        host = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
        record = {"event": kind, "text": redact(text), "run": run, "step": step, "host": host, "time": now}
        within(DISK_SECONDS, lambda: self._record(record), None)
        options, delivered = self._options, list[bool]()
        for flag, given, deliver in (
            ("--alert-command", options.alert_command, run_command),
            ("--alert-webhook", options.alert_webhook, post),
        ):
            if given is None:
                continue
            try:
                deliver(given, record)
                delivered.append(True)
            except Exception as error:  # no alert is worth the run
                print_warning(f"{flag}: the alert {kind!r} was not delivered: {describe(error)}")
        if not delivered:  # the next one of its kind is sent at once
            del self._last[kind]
            self._held[kind] = held + 1
            within(DISK_SECONDS, lambda: self._record({"event": kind, "delivered": False, "time": now}), None)

    def _last_recorded(self, kind: str) -> float:
        """Return when an alert of this kind was sent, by any rank or start, as the run's folder has it; 0 if never."""
        times = [0.0]
        if self._run_dir is not None:
            with suppress(OSError):
                lines = [line for line in read_json_lines(self._run_dir / ALERTS_FILE) if line is not None]
                own = [line for line in lines if line.get("event") == kind]
                lost = [line.get("time") for line in own if line.get("delivered") is False]
                times += [line["time"] for line in own if "time" in line and line["time"] not in lost]
        # a time to come is that of a node whose clock is ahead
        return max(at for at in times if isinstance(at, int | float) and at <= time.time())

    def _record(self, record: Metrics) -> None:
        if self._run_dir is None or not self._run_dir.is_dir():
            return
        with suppress(OSError):
            check_access(self._run_dir, shared=True)
            file = JsonLinesLogger(self._run_dir / ALERTS_FILE, warn=print_warning)
            file.write(record)
            file.close()


def describe(error: Exception) -> str:
    """Return an error without the URL, which may be a secret."""
    if isinstance(error, subprocess.TimeoutExpired | TimeoutError):
        return "it took too long"
    reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or type(error).__name__
    code = f"status {error.code}, " if hasattr(error, "code") else ""
    return str(error) if isinstance(error, CommandError) else f"{code}{reason}"


class CommandError(RuntimeError):
    """The program of an alert has failed."""


def run_command(command: str, record: Metrics) -> None:
    """Run a program with the kind and the text of an alert as its last arguments, and as variables; no shell.

    Raises:
        CommandError: if its exit status is not 0.
        OSError: if it cannot be started.
        TimeoutExpired: after ``COMMAND_SECONDS``, when it has been killed with what it has started.
    """
    texts = {key: str(value).replace("\0", "") for key, value in record.items() if value is not None}
    variables = {f"ALERT_{key.upper()}": text for key, text in texts.items()}
    quiet = subprocess.DEVNULL
    with subprocess.Popen(
        [*shlex.split(command), texts["event"], texts["text"]],
        env={**os.environ, **variables},
        stdin=quiet,
        stdout=quiet,
        stderr=subprocess.PIPE,
        start_new_session=True,
    ) as program:
        try:
            _, errors = program.communicate(timeout=COMMAND_SECONDS)
        except BaseException:
            with suppress(ProcessLookupError):
                os.killpg(program.pid, signal.SIGKILL)
            raise
    if program.returncode:
        last = (errors.decode(errors="replace").strip().splitlines() or [""])[-1]
        raise CommandError(f"exit status {program.returncode}{': ' * bool(last)}{redact(last)}")


class NoRedirect(urllib.request.HTTPRedirectHandler):
    """Refuses redirections: the text is for the given address alone."""

    def redirect_request(self, req: Any, fp: IO[bytes], code: int, msg: str, headers: Any, newurl: str) -> None:
        """Return None, so that the answer is an error."""


def post(given: str, record: Metrics) -> None:
    """POST an alert as JSON to a webhook; ``text`` is what Slack and its like show. Errors are tried again.

    Raises:
        OSError: of the last attempt.
        ValueError: if the URL is gone.
    """
    where = "" if record["run"] is None else f"{Path(record['run']).name}: "
    content = json.dumps({**record, "text": f"{where}{record['event']}: {record['text']}"}).encode()
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(webhook_url(given), content, headers, method="POST")
    opener = urllib.request.build_opener(NoRedirect)
    for attempt in range(ATTEMPTS):
        try:
            with opener.open(request, timeout=WEBHOOK_SECONDS) as answer:
                answer.read(1)
            return
        except OSError as error:
            refused = 300 <= getattr(error, "code", 0) < 500 and getattr(error, "code", 0) != 429
            if attempt + 1 == ATTEMPTS or refused:
                raise
            time.sleep(PAUSE_SECONDS * 2**attempt)


class AlertLogger:
    """Receives the events of a run on rank 0, as a `MetricLogger`, and sends those that people wait for."""

    def __init__(self, alerts: Alerts, last_phase: bool) -> None:
        """Send through ``alerts``; the end of a phase before the last one is no alert."""
        self._alerts = alerts
        self._step = 0
        self._ended = not last_phase
        self._what = "the run has taken its last step"

    def log(self, step: int, metrics: Metrics) -> None:
        """Note the step."""
        self._step = step

    def event(self, step: int, kind: str, fields: Metrics) -> None:
        """Alert on stops, incidents, and warnings that ask for it. A failure is sent by the rank that failed first."""
        self._step = step
        self._ended = self._ended or kind in ("stop", "error", "rewind")
        if kind == "stop":
            self._alerts.send(STOP, fields["text"], step)
        elif kind == "evaluation":
            self._what = "the model is evaluated after step"
        elif kind == "incident" or (kind == "warning" and fields.get("alert")):
            self._alerts.send(fields["kind"], fields["text"], step)

    def close(self) -> None:
        """Alert on the end of the run."""
        if not self._ended:
            self._alerts.send(FINISH, f"{self._what}: {self._step}", self._step)


_alerts: Alerts | None = None
"""Of this process: a failure may end it anywhere."""


@contextmanager
def alerts_of(options: ReliabilityConfig, run_dir: str | None) -> Iterator[None]:
    """Send the alerts of this process as ``options`` ask for inside this context."""
    global _alerts
    before = _alerts
    wanted = options.alert_command is not None or options.alert_webhook is not None
    _alerts = Alerts(options, run_dir) if wanted else None
    try:
        yield
    finally:
        _alerts = before


def alert_logger(last_phase: bool) -> AlertLogger | None:
    """Return the logger of this process, or None without alerts."""
    return None if _alerts is None else AlertLogger(_alerts, last_phase)


def start_alert(kind: str, text: str, step: int | None = None) -> threading.Thread | None:
    """Send an alert in a thread, and return it; None without alerts, or memory for a thread."""
    if _alerts is None:
        return None
    sender = threading.Thread(target=_alerts.send, args=(kind, text, step), daemon=True)
    try:
        sender.start()
    except RuntimeError:
        return None
    return sender


def send_alert(kind: str, text: str, seconds: float = FAILURE_SECONDS) -> None:
    """Send an alert from a rank that is about to end, and wait at most ``seconds`` for it; never raises."""
    if (sender := start_alert(kind, text)) is not None:
        sender.join(seconds)
