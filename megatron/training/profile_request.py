"""A profile asked from a running job: by SIGUSR2 to any rank, or by a file in the run's folder."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from megatron.config.checks.profiling import MOST_STEPS

SIGNAL = signal.SIGUSR2
FILE = "PROFILE"
STEPS = 2
"""Steps of a profile where nobody says how many."""

LOOK_SECONDS = 1.0
"""Between looks for the file: a look may be slow on the file systems of clusters."""


class ProfileRequests:
    """What this rank was asked for since :meth:`take` was called last."""

    def __init__(self, run_dir: str | None, rank: int, warn: Callable[[str], None]) -> None:
        """Listen from now on.

        Args:
            run_dir: the run's folder, where profiles are kept; None where there is none, and so no profiles.
            rank: only rank 0 looks for the file.
            warn: told why nothing will come of a request.

        """
        self._kept, self._warn, self._signalled = run_dir is not None, warn, False
        self._file = Path(run_dir) / FILE if run_dir is not None and rank == 0 else None
        self._next_look = 0.0
        self._previous = signal.signal(SIGNAL, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._signalled = True

    def take(self) -> int:
        """Steps to record, 0 for none. Each request is told once."""
        signalled, self._signalled = self._signalled, False
        if signalled and not self._kept:
            self._warn(f"{SIGNAL.name} asks for a profile, which is kept in --run-dir; this run has none")
            return 0
        return max(STEPS if signalled else 0, self._look())

    def _look(self) -> int:
        """Steps that the file asks for, which is removed; at most one look a second."""
        if self._file is None or time.monotonic() < self._next_look:
            return 0
        self._next_look = time.monotonic() + LOOK_SECONDS
        if not self._file.exists():
            return 0
        try:
            text = self._file.read_text(errors="replace").strip()
            self._file.unlink()
        except OSError as error:
            self._warn(f"{self._file} is not looked at any more, because it cannot be removed: {error}")
            self._file = None
            return 0
        return self._steps(text)

    def _steps(self, text: str) -> int:
        if not text:
            return STEPS
        if text.isdecimal() and len(text) < 10 and 0 < int(text) <= MOST_STEPS:
            return int(text)
        rule = f"{FILE} may be empty, for {STEPS} steps, or hold a number of steps up to {MOST_STEPS}"
        self._warn(f"no profile: {rule}; it held {text[:40]!r}")
        return 0

    def restore(self) -> None:
        """Give the signal back to whoever had it."""
        signal.signal(SIGNAL, self._previous)
