"""Checks of the command and the webhook that alerts go to. A webhook's URL is its key, so it is named, not given."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from megatron.config.errors import Problem
from megatron.config.files import read_small
from megatron.config.privacy import redact

WEBHOOK_BYTES = 4096
"""Limit for the URL of a webhook."""

SECRET_PATH = re.compile(r"[/=](?=[\w-]*\d)(?=[\w-]*[A-Za-z])[\w-]{16,}|/services/T|/api/webhooks/")
"""A part of a URL that looks like a key, and what comes before the keys of Slack and Discord."""


def command_problems(command: str) -> Iterator[Problem]:
    """Yield a problem if a command is not one, or its program cannot be found."""
    import shutil  # takes milliseconds, and is seldom needed

    try:
        words = shlex.split(command)
    except ValueError as error:
        words, reason = [], f"cannot be split into words: {error}"
    else:
        reason = f"there is no program {words[0]!r}" if words else "it is empty"
    if not words or shutil.which(words[0]) is None:
        fixes = ("--alert-command 'PROGRAM ARGUMENT'", "drop --alert-command")
        yield Problem("E710", f"--alert-command: {reason}", fixes)


def webhook_problems(given: str) -> Iterator[Problem]:
    """Yield a problem if a webhook's URL is missing or invalid, or would be recorded with its key."""
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
