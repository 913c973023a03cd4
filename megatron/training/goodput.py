"""Goodput: the share of a run's life that went into steps it still has, across restarts."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any


class Goodput:
    """Seconds of steps that are in the run's history, of all that passed since its first start.

    What a crash takes back is not counted, as the state is that of the checkpoint; nor is starting, reading a
    checkpoint, evaluating, saving, and standing still between two starts. Waiting for data or for other ranks within
    a step is part of it.

    Attributes:
        first_start: of the run, in seconds since 1970.
        productive_seconds: in the steps of the run's history.
        starts: of the run, this one included.
    """

    def __init__(self, started: float | None = None) -> None:
        """Of a run that begins.

        Args:
            started: what ``time.monotonic()`` was when the process began; None for now.

        """
        self.first_start = time.time() - (0.0 if started is None else time.monotonic() - started)
        self.productive_seconds, self.starts = 0.0, 1

    def add(self, seconds: float) -> None:
        """Count ``seconds`` that went into steps."""
        self.productive_seconds += seconds

    def run_seconds(self) -> float:
        """Since the run's first start."""
        return time.time() - self.first_start

    def value(self) -> float | None:
        """The share, 0 to 1; None where the machine's clock has been set back behind what was counted."""
        passed = self.run_seconds()
        return self.productive_seconds / passed if passed > 0 and self.productive_seconds <= passed else None

    def state_dict(self) -> dict[str, float | int]:
        """The numbers of a checkpoint."""
        return {
            "first_start": self.first_start,
            "productive_seconds": self.productive_seconds,
            "starts": self.starts,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on as the run that saved ``state``, one start later."""
        self.first_start, self.productive_seconds = float(state["first_start"]), float(state["productive_seconds"])
        self.starts = int(state["starts"]) + 1
