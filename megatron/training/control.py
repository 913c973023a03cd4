"""Requests to a running job: acts that all ranks agree on, and the control file that asks for them.

``RUN_DIR/control`` holds a request per line, such as ``save`` or ``profile 5`` (:data:`COMMANDS`). Rank 0 reads and
removes it after a step, and :class:`megatron.training.stop.StopRequest` sends what it asks for to the other ranks with
its own collective. ``tools/control.py`` writes the file, and waits for the answer in ``metrics.jsonl``. No torch.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from megatron.config.files import open_regular
from megatron.config.privacy import user_name
from megatron.config.profiling import MAX_PROFILE_STEPS
from megatron.config.text import clipped, listed, printable

CONTROL_FILE = "control"

STOPPED_FILE = "stopped.json"
"""Written at the end of a start that a request has stopped."""

DEFAULT_PROFILE_STEPS, PROFILE_LIMITS = 2, (1, MAX_PROFILE_STEPS)
"""Steps of a profile whose number is not given, and the smallest and largest number."""

FILE_CHECK_SECONDS = 1.0
"""Interval between checks for a file, which may be slow on cluster file systems."""

MAX_BYTES, MAX_REQUESTS = 4096, 20
"""Limits of the file."""

ID_MARK = "#"
"""Begins the last word of a line with the id that the answer repeats."""


class Requests(NamedTuple):
    """Acts that a running job is asked for; 0 if not. Ranks agree on the largest value of each."""

    profile: int = 0  # steps of a profile
    pipeline: int = 0  # steps of a pipeline timeline
    save: int = 0  # a checkpoint
    evaluate: int = 0  # an evaluation of the validation data
    log_interval: int = 0  # steps between log lines
    log_level: int = 0  # of Python's logging, in the log of each rank


NO_REQUEST = Requests()


class Command(NamedTuple):
    """A word of the control file."""

    # Field of Requests; empty for the request to stop, which is a stop code.
    field: str
    meaning: str
    # Smallest and largest number after the word; None without a number.
    limits: tuple[int, int] | None = None
    # If no number is given; 0 if one is required.
    default: int = 1
    # Words in place of numbers.
    words: Mapping[str, int] = {}


LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40}
"""Names of the levels of Python's logging."""

STOP = "stop"

COMMANDS: Mapping[str, Command] = {
    "save": Command("save", "save a checkpoint"),
    "evaluate": Command("evaluate", "evaluate the validation data"),
    STOP: Command("", "save and stop"),
    "profile": Command("profile", "profile the next N steps", (1, MAX_PROFILE_STEPS), DEFAULT_PROFILE_STEPS),
    "pipeline": Command(
        "pipeline",
        "record a timeline of the pipeline in the next N steps",
        (1, MAX_PROFILE_STEPS),
        DEFAULT_PROFILE_STEPS,
    ),
    "log-interval": Command("log_interval", "write a log line every N steps from now on", (1, 1_000_000), 0),
    "log-level": Command("log_level", "level of Python's logging in the logs of the ranks", words=LEVELS, default=0),
}
"""Requests by word."""


@dataclass(frozen=True)
class ControlRequest:
    """A line of the control file."""

    # The line, without its id.
    text: str
    # Of the program that waits for the answer; empty for a line of a person.
    id: str
    # Owner of the file.
    user: str
    # Field of Requests and its value.
    field: str = ""
    value: int = 0
    # Why it is refused; empty if it is not.
    problem: str = ""


def parse_request(text: str) -> tuple[str, int]:
    """Return the field of :class:`Requests` that a line sets, empty for a stop, and its value.

    Raises:
        ValueError: if it is not a request, with a sentence for people.
    """
    word, *rest = text.split()
    command = COMMANDS.get(word)
    if command is None:
        raise ValueError(f"{clipped(word)!r} is no request; there are {listed([*COMMANDS], len(COMMANDS))}")
    if len(rest) > 1 or (rest and not command.limits and not command.words):
        raise ValueError(f"{word!r} is followed by too much: {clipped(' '.join(rest))!r}")
    if command.words:
        if not rest or rest[0].lower() not in command.words:
            raise ValueError(f"{word!r} is followed by one of {listed([*command.words])}")
        return command.field, command.words[rest[0].lower()]
    if command.limits and (rest or not command.default):
        low, high = command.limits
        number = rest[0] if rest else ""
        if not (number.isascii() and number.isdecimal() and len(number) < 10 and low <= int(number) <= high):
            raise ValueError(f"{word!r} is followed by a number from {low} to {high}")
        return command.field, int(number)
    return command.field, command.default


class ControlFile:
    """Reads the control file of a run, on rank 0.

    Requests stay in :attr:`pending` until they are answered; until then the file is not read again.
    """

    def __init__(self, run_dir: Path) -> None:
        """Look for the file from :meth:`open` on."""
        self.path = run_dir / CONTROL_FILE
        self.pending: list[ControlRequest] = []
        self.stops = False  # a stop was requested, in any phase of this start
        self._next_check = 0.0  # on the clock of ``time.monotonic()``
        self._is_open = False
        self._was_empty = False

    def open(self) -> None:
        """Begin to look for the file."""
        self._is_open = True

    def mark_stopped(self, step: int | None) -> None:
        """Write ``stopped.json`` for the batch script, which starts a run again that has not finished; None: remove."""
        path = self.path.with_name(STOPPED_FILE)
        with suppress(OSError):
            if step is None:
                path.unlink(missing_ok=True)
            else:
                path.write_text(json.dumps({"iteration": step, "time": time.time()}) + "\n")

    def read(self) -> Requests:
        """Return the requests since the last call, and set :attr:`stops`, if it is time to look."""
        if not self._is_open or self.pending or time.monotonic() < self._next_check:
            return NO_REQUEST
        self._next_check = time.monotonic() + FILE_CHECK_SECONDS
        try:
            self.pending = self._take()
        except FileNotFoundError:
            return NO_REQUEST
        except OSError as error:
            self._next_check = float("inf")
            reason = f"{self.path} is ignored from now on, because it cannot be read and removed: {error}"
            self.pending = [ControlRequest("", "", "", problem=reason)]
        asked = [each for each in self.pending if not each.problem]
        self.stops = self.stops or any(not each.field for each in asked)
        return NO_REQUEST._replace(**{each.field: each.value for each in asked if each.field})

    def _take(self) -> list[ControlRequest]:
        """Read and remove the file; an empty one may still be written, and is left for a second look."""
        with open_regular(self.path) as file:
            owners = {
                os.fstat(file.fileno()).st_uid,
                os.lstat(self.path).st_uid,
            }  # of what a link leads to, and the link
            content = file.read(MAX_BYTES + 1)
            if not content.strip() and not self._was_empty:
                self._was_empty = True
                return []
            self._was_empty = False
            self.path.unlink()
            content += file.read(MAX_BYTES + 1 - len(content))  # a line that was appended meanwhile
        foreign = [owner for owner in owners if not self._is_allowed(owner)]
        user = user_name((foreign or [*owners])[0])
        if foreign:
            return [ControlRequest("", "", user, problem=f"{self.path} belongs to {user}, and is ignored")]
        lines = [printable(line.strip()) for line in content.decode(errors="replace").splitlines() if line.strip()]
        if len(content) > MAX_BYTES or len(lines) > MAX_REQUESTS or not lines:
            problem = f"it holds up to {MAX_REQUESTS} requests, and {MAX_BYTES:,} bytes; this one has {len(lines)}"
            return [ControlRequest("", "", user, problem=f"{self.path} is ignored: {problem}")]
        return [_read_line(line, user) for line in lines]

    def _is_allowed(self, owner: int) -> bool:
        """Return True for this user and root; if this is root, as in a container, also for the folder's owner."""
        own = os.geteuid()
        return owner in {own, 0} or (own == 0 and owner == self.path.parent.stat().st_uid)


def _read_line(line: str, user: str) -> ControlRequest:
    text, mark, name = line.rpartition(f" {ID_MARK}")
    if not mark:
        text, name = line, ""
    try:
        return ControlRequest(text, name, user, *parse_request(text))
    except ValueError as error:
        return ControlRequest(clipped(text), name, user, problem=str(error))
