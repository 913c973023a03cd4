"""Request a profile from a running job: with SIGUSR2 to any rank, or with a file in the run folder."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from megatron.config.checks.profiling import MOST_STEPS

SIGNAL = signal.SIGUSR2
FILE = "PROFILE"
PIPELINE = "pipeline"
"""In the file, alone or before a number: request a timeline of the pipeline's actions instead of a profile."""

STEPS = 2
"""Default number of steps."""

LOOK_SECONDS = 1.0
"""Interval between checks for the file, which may be slow on cluster file systems."""


class Wish(NamedTuple):
    """Number of following steps to record."""

    profile: int = 0  # steps of a profile
    pipeline: int = 0  # steps of a pipeline timeline


NOTHING = Wish()


class ProfileRequests:
    """Receives profile requests on this rank."""

    def __init__(self, run_dir: str | None, rank: int, warn: Callable[[str], None]) -> None:
        """Install the signal handler.

        Args:
            run_dir: the run folder; None disables profiles.
            rank: this rank; only rank 0 checks for the file.
            warn: prints a warning about a request that cannot be fulfilled.

        """
        self._has_run_dir = run_dir is not None
        self._warn = warn
        self._signalled = False
        self._file = Path(run_dir) / FILE if run_dir is not None and rank == 0 else None
        self._next_check = 0.0
        self._previous = signal.signal(SIGNAL, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._signalled = True

    def take(self) -> Wish:
        """Return the requests since the last call."""
        signalled, self._signalled = self._signalled, False
        if signalled and not self._has_run_dir:
            self._warn(f"{SIGNAL.name} requests a profile, which needs --run-dir; this run has none")
            return NOTHING
        request = self._check_file()
        return request._replace(profile=max(STEPS, request.profile)) if signalled else request

    def _check_file(self) -> Wish:
        """Read and remove the request file, checking at most once per second."""
        if self._file is None or time.monotonic() < self._next_check:
            return NOTHING
        self._next_check = time.monotonic() + LOOK_SECONDS
        if not self._file.exists():
            return NOTHING
        try:
            text = self._file.read_text(errors="replace").strip()
            self._file.unlink()
        except OSError as error:
            self._warn(f"{self._file} is ignored from now on, because it cannot be removed: {error}")
            self._file = None
            return NOTHING
        number = text.removeprefix(PIPELINE).strip()
        if not number or (number.isdecimal() and len(number) < 10 and 0 < int(number) <= MOST_STEPS):
            steps = int(number or STEPS)
            return Wish(pipeline=steps) if text.startswith(PIPELINE) else Wish(profile=steps)
        rule = f"{FILE} may be empty, for {STEPS} steps, or contain a number of steps up to {MOST_STEPS}"
        self._warn(f"no profile: {rule}, alone or after the word '{PIPELINE}'; it contains {text[:40]!r}")
        return NOTHING

    def restore(self) -> None:
        """Restore the previous signal handler."""
        signal.signal(SIGNAL, self._previous)
