"""Where the time of a start goes, from the process' own beginning to the end of the first step; without torch.

Phases lie inside each other, as data are opened while a checkpoint is read: each has what none inside it has, so that
their sum is the whole.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Self

PHASES: dict[str, str] = {
    "python": "the interpreter, and what `pretrain_gpt.py` imports before it reads a flag",
    "flags": "reading and checking flags, looking for checkpoints and tokenizer",
    "imports": "PyTorch and the rest of the program",
    "joining": "finding the device and the other ranks: waiting for the one that comes last",
    "groups": "opening process groups and channels",
    "kernels": "choosing and proving kernels",
    "model": "building the model",
    "optimizer": "its gradients' and optimizer's memory",
    "data": "opening the data, building or reading tables of samples",
    "checkpoint": "claiming the folder, choosing a checkpoint and reading it",
    "first step": "the first step, with all that is compiled, tuned and connected in it",
    "other": "the rest: opening the places that the run reports to, an evaluation that is made up for",
}
"""Every phase there is, in the order in which they begin, and what happens in it."""

SHORTEST = 0.05
"""Seconds from which on a phase is named in the line on the console."""

MUCH_LONGER = 1.0
"""Seconds that another rank must take more than the one that tells to be named."""


class StartUp:
    """A watch that always counts for some phase: ``with startup("data"): ...``, else ``other``.

    Attributes:
        began: what ``time.monotonic()`` was when the process began.
        seconds: of every phase that was.
        running: until the first step is taken.
    """

    def __init__(self, began: float | None = None, phase: str = "other") -> None:
        """Begin to count.

        Args:
            began: what ``time.monotonic()`` was then; None for now.
            phase: the first.

        """
        self.began = time.monotonic() if began is None else began
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self.running, self._phase, self._since = True, phase, self.began

    @classmethod
    def of_process(cls) -> Self:
        """Of this process, which has been in its phase ``python`` since it began."""
        return cls(process_began(), "python")

    def enter(self, phase: str) -> None:
        """What follows is ``phase``."""
        now = time.monotonic()
        self.seconds[self._phase] += now - self._since
        self._phase, self._since = phase, now

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Inside is ``phase``, afterwards what was before."""
        before = self._phase
        self.enter(phase)
        try:
            yield
        finally:
            self.enter(before)

    def stop(self) -> None:
        """The first step is taken."""
        self.enter("other")
        self.running = False


def process_began() -> float:
    """What ``time.monotonic()`` was when this process began, to 10 ms; now, where the system does not say."""
    now = time.monotonic()
    try:
        words = Path("/proc/self/stat").read_text().rpartition(")")[2].split()  # proc_pid_stat(5), from field 3 on
        since_boot = int(words[19]) / os.sysconf("SC_CLK_TCK")
        return min(now, now - (time.clock_gettime(time.CLOCK_BOOTTIME) - since_boot))
    except (OSError, ValueError, IndexError, AttributeError):  # not Linux
        return now


def start_up_line(mine: Mapping[str, float], longest: Mapping[str, float]) -> str:
    """A line on this rank's seconds by phase, and on the phases that took another rank much longer."""
    late = {name: seconds for name, seconds in longest.items() if seconds > mine[name] + MUCH_LONGER}
    others = f"; longest on any rank: {_shown(late)}" if late else ""
    return f"start-up {sum(mine.values()):.1f}s: {_shown(mine)}{others}"


def _shown(phases: Mapping[str, float]) -> str:
    return " ".join(f"{name} {seconds:.1f}" for name, seconds in phases.items() if seconds >= SHORTEST)
