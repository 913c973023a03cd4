"""Processes of tests: whether those that were ended are gone, as the kernel takes a moment; and ports for them."""

from __future__ import annotations

import socket
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


def free_port() -> int:
    """A port that nobody has."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
