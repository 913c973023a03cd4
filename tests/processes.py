"""Whether processes that a test has had ended are gone: the kernel takes a moment after the signal."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path


def is_alive(process: int) -> bool:
    """Whether there is a process of this number that has not ended; a zombie has."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until_gone(processes: Iterable[int], seconds: float = 10.0) -> None:
    """Wait for the end of processes that somebody else has to reap.

    Raises:
        AssertionError: when one of them is alive for longer than ``seconds``.
    """
    left, until = set(processes), time.monotonic() + seconds
    while left := {process for process in left if is_alive(process)}:
        assert time.monotonic() < until, f"processes {sorted(left)} are still there"
        time.sleep(0.02)
