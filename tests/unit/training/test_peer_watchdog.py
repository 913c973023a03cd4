"""On SIGTERM a rank that waits for a dead peer exits, and a rank that can finish its step does so."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from unittest.mock import patch

import pytest

from megatron.distributed.comm import Group
from megatron.training import failure_report as module
from megatron.training.failure_report import EXIT_SIGTERM, PeerWatchdog, running_peers

WORLD = Group((0, 1))


class Ended(threading.Event):
    """Set instead of ending this process."""

    status = 0

    def leave(self, status: int) -> None:
        self.status = status
        self.set()


@pytest.fixture
def ended() -> Iterator[Ended]:
    """With a handler, as in a run that finishes its step; all waiting times are a tenth."""
    found, before = Ended(), signal.signal(signal.SIGTERM, lambda number, frame: None)
    with (
        patch.object(module.os, "_exit", found.leave),
        patch.multiple(module, PEER_POLL_SECONDS=0.02, PEER_GRACE_SECONDS=0.2),
    ):
        yield found
    signal.signal(signal.SIGTERM, before)


def watchdog(gone: bool, world: Group = WORLD) -> PeerWatchdog:
    """Return a watchdog that finds a peer gone, or all there."""
    watchdog = PeerWatchdog(world)
    watchdog.is_peer_gone = lambda: gone  # type: ignore[method-assign]
    return watchdog


def told(ended: Ended, gone: bool, world: Group = WORLD, seconds: float = 0.6) -> bool:
    """Return True if a process that got SIGTERM has ended after ``seconds``."""
    with watchdog(gone, world):
        signal.raise_signal(signal.SIGTERM)
        return ended.wait(seconds)


def test_it_ends_where_another_rank_is_gone(ended: Ended, capsys: pytest.CaptureFixture[str]) -> None:
    assert told(ended, True)
    assert ended.status == EXIT_SIGTERM == 143
    assert "error on rank 0: lost contact with another rank" in capsys.readouterr().err


def test_it_may_finish_its_step_where_all_are_there(ended: Ended) -> None:
    assert not told(ended, False)


def test_a_single_rank_has_no_watchdog(ended: Ended) -> None:
    assert not told(ended, True, Group())


def test_one_that_fails_by_itself_is_left_to_it(ended: Ended) -> None:
    assert not told(ended, True, seconds=0.05)
    assert not ended.wait(0.4)


def test_nothing_happens_without_the_signal(ended: Ended) -> None:
    before = signal.signal(signal.SIGUSR1, lambda number, frame: None)
    with watchdog(True):
        signal.raise_signal(signal.SIGUSR1)
        assert not ended.wait(0.4)
    signal.signal(signal.SIGUSR1, before)


def test_the_signal_is_seen_where_no_handler_runs(ended: Ended) -> None:
    """As inside a collective: the interpreter runs neither when the signal comes nor when the process ends."""
    handled: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: handled.append(number))
    seen_before_the_end: list[list[int]] = []
    leave = ended.leave
    with (
        watchdog(True),
        patch.object(module.os, "_exit", lambda status: (seen_before_the_end.append([*handled]), leave(status))),
    ):
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM)).start()
        until = time.monotonic() + 20
        while not ended.is_set() and time.monotonic() < until and not handled:
            hashlib.pbkdf2_hmac("sha256", b"", b"", 3_000_000)  # seconds without the interpreter
    assert seen_before_the_end == [[]]


SLEEPS = [sys.executable, "-c", "import time; time.sleep(60)"]


def test_peers_are_the_processes_that_were_started_alike() -> None:
    """Two children of this process are ranks, as another one sees them; then one is killed."""
    ranks, other = [subprocess.Popen(SLEEPS) for _ in range(2)], subprocess.Popen(["sleep", "60"])
    try:
        with (
            patch.object(module.os, "getppid", os.getpid),
            patch.object(module, "PROC_SELF", module.PROC / str(ranks[0].pid)),
        ):
            _wait_for(lambda: running_peers() == {rank.pid for rank in ranks})
            with PeerWatchdog(WORLD) as watching:
                assert not watching.is_peer_gone()
                other.kill()
                other.wait()
                assert not watching.is_peer_gone()
                ranks[1].kill()
                _wait_for(watching.is_peer_gone)
                ranks[1].wait()
                assert watching.is_peer_gone()
    finally:
        for process in (*ranks, other):
            process.kill()
            process.wait()


def test_failures_published_by_other_machines_are_seen() -> None:
    with PeerWatchdog(WORLD) as watching:
        assert not watching.is_peer_gone()
        with patch.object(module, "has_any_rank_failed", lambda: True):
            assert watching.is_peer_gone()


def _wait_for(true: Callable[[], bool]) -> None:
    until = time.monotonic() + 20
    while not true():
        assert time.monotonic() < until
        time.sleep(0.01)
