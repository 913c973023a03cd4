"""Goodput: the fraction of a run's lifetime, across restarts, spent on steps that it still has."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any


class Goodput:
    """Productive seconds of a run, divided by all seconds since its first start.

    Steps lost in a crash do not count, because this state is restored from the checkpoint; nor does the time of
    starting, loading, evaluating, saving, and between two starts. Waiting for data or for other ranks within a step
    does count.
    """

    def __init__(self, started: float | None = None) -> None:
        """Start counting for a new run.

        Args:
            started: start of the process on the clock of ``time.monotonic()``; None for now.

        """
        elapsed = 0.0 if started is None else time.monotonic() - started
        self.first_start = time.time() - elapsed  # seconds since 1970
        self.productive_seconds = 0.0
        self.starts = 1  # of the run, this one included

    def add(self, seconds: float) -> None:
        """Add ``seconds`` of training steps."""
        self.productive_seconds += seconds

    def run_seconds(self) -> float:
        """Return the seconds since the run's first start."""
        return time.time() - self.first_start

    def value(self) -> float | None:
        """Return the goodput, 0 to 1; None if the machine's clock was set back so far that it would exceed 1."""
        passed = self.run_seconds()
        return self.productive_seconds / passed if passed > 0 and self.productive_seconds <= passed else None

    def state_dict(self) -> dict[str, float | int]:
        """Return the values to save in a checkpoint."""
        return {
            "first_start": self.first_start,
            "productive_seconds": self.productive_seconds,
            "starts": self.starts,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue the run that saved ``state``, and count this start."""
        self.first_start = float(state["first_start"])
        self.productive_seconds = float(state["productive_seconds"])
        self.starts = int(state["starts"]) + 1
