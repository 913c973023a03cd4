"""What a run does about faults: checks, records, and what follows."""

from __future__ import annotations

import os
import re
import shlex
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from megatron.config.errors import Problem
from megatron.config.files import read_small
from megatron.config.option import Need, Run, option
from megatron.config.privacy import redact

ALERTS = Need("alert_command or alert_webhook", "--alert-command or --alert-webhook")

WEBHOOK_BYTES = 4096
"""Limit for the URL of a webhook."""

SECRET_PATH = re.compile(r"[/=](?=[\w-]*\d)(?=[\w-]*[A-Za-z])[\w-]{16,}|/services/T|/api/webhooks/")
"""A part of a URL that looks like a key, and what comes before the keys of Slack and Discord."""


@dataclass(frozen=True)
class ReliabilityConfig:
    """Faults of hardware, data and numbers: how they are found, recorded and survived."""

    rank_logs: bool = option(True, role="start", needs="run_dir")
    """Write warnings, errors and crashes of each rank into RUN_DIR/ranks."""
    alert_command: str | None = option(None, role="start")
    """Program, with arguments, that is run when the run ends, stops or fails, and at incidents."""
    alert_webhook: str | None = option(None, role="start")
    """URL that receives the same alerts as JSON: env:VARIABLE or file:PATH that holds it, or a URL without a key."""
    alert_interval_mins: float = option(10.0, role="start", at_least=0, needs=ALERTS)
    """Minutes between two alerts of one kind."""

    def check_alerts(self, config: Run, world_size: int) -> Iterator[Problem]:
        """Check that the program and the URL of alerts can be found, before they are needed."""
        if self.alert_command is not None:
            try:
                words = shlex.split(self.alert_command)
            except ValueError as error:
                words, reason = [], f"cannot be split into words: {error}"
            else:
                reason = f"there is no program {words[0]!r}" if words else "it is empty"
            if not words or shutil.which(words[0]) is None:
                fixes = ("--alert-command 'PROGRAM ARGUMENT'", "drop --alert-command")
                yield Problem("E710", f"--alert-command: {reason}", fixes)
        if self.alert_webhook is not None:
            yield from self._webhook_problems(self.alert_webhook)

    def _webhook_problems(self, given: str) -> Iterator[Problem]:
        fixes = ("--alert-webhook env:ALERT_WEBHOOK", "--alert-webhook file:PATH", "drop --alert-webhook")
        direct = not given.startswith(("env:", "file:"))
        if direct and (redact(given) != given or SECRET_PATH.search(given)):
            sentence = f"--alert-webhook: the URL at {urlsplit(given).hostname} holds what looks like a key"
            yield Problem("E014", f"{sentence}, and options are recorded in files and logs", fixes[:2])
            return
        try:
            webhook_url(given)
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            shown = "the URL" if direct else given
            yield Problem("E710", f"--alert-webhook: {shown} cannot be used: {reason}", fixes)


def webhook_url(given: str) -> str:
    """Return the URL that ``--alert-webhook`` gives or names.

    Raises:
        OSError: if its file cannot be read.
        ValueError: if the variable is not set, or holds no URL.
    """
    url = given
    if given.startswith("env:"):
        name = given.removeprefix("env:")
        if name not in os.environ:
            raise ValueError("there is no such environment variable")
        url = os.environ[name]
    elif given.startswith("file:"):
        url = read_small(Path(given.removeprefix("file:")), WEBHOOK_BYTES).decode(errors="replace")
    parts = urlsplit(url.strip())
    if parts.scheme not in ("http", "https") or not parts.hostname or not url.strip().isprintable():
        raise ValueError("it begins with http:// or https://, and a host follows")
    return url.strip()
