"""A profile asked from a running job: by SIGUSR2 to any rank, or by a file in the run's folder."""

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
"""Before the number, or alone, in the file: when the actions of the pipeline ran is wanted, and nothing else."""

STEPS = 2
"""Steps of a profile where nobody says how many."""

LOOK_SECONDS = 1.0
"""Between looks for the file: a look may be slow on the file systems of clusters."""


class Wish(NamedTuple):
    """What is to be recorded, of how many of the next steps: a profile, and when the actions of the pipeline ran."""

    profile: int = 0
    pipeline: int = 0


NOTHING = Wish()


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

    def take(self) -> Wish:
        """What to record. Each request is told once."""
        signalled, self._signalled = self._signalled, False
        if signalled and not self._kept:
            self._warn(f"{SIGNAL.name} asks for a profile, which is kept in --run-dir; this run has none")
            return NOTHING
        wish = self._look()
        return wish._replace(profile=max(STEPS, wish.profile)) if signalled else wish

    def _look(self) -> Wish:
        """What the file asks for, which is removed; at most one look a second."""
        if self._file is None or time.monotonic() < self._next_look:
            return NOTHING
        self._next_look = time.monotonic() + LOOK_SECONDS
        if not self._file.exists():
            return NOTHING
        try:
            text = self._file.read_text(errors="replace").strip()
            self._file.unlink()
        except OSError as error:
            self._warn(f"{self._file} is not looked at any more, because it cannot be removed: {error}")
            self._file = None
            return NOTHING
        return self._read(text)

    def _read(self, text: str) -> Wish:
        number = text.removeprefix(PIPELINE).strip()
        if not number or (number.isdecimal() and len(number) < 10 and 0 < int(number) <= MOST_STEPS):
            steps = int(number or STEPS)
            return Wish(pipeline=steps) if text.startswith(PIPELINE) else Wish(profile=steps)
        rule = f"{FILE} may be empty, for {STEPS} steps, or hold a number of steps up to {MOST_STEPS}"
        self._warn(f"no profile: {rule}, after the word '{PIPELINE}' or alone; it held {text[:40]!r}")
        return NOTHING

    def restore(self) -> None:
        """Give the signal back to whoever had it."""
        signal.signal(SIGNAL, self._previous)
