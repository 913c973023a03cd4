"""One first cause for the failures of many ranks: who reports, how many follow, and how a rank died that cannot.

Ranks agree on the first failure through the store of torch.distributed; when that is gone with its host, through a file
beside the logs of the ranks. The others write their error into their own log, and are counted in one line.
"""

from __future__ import annotations

import os
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from megatron.checkpoint.errors import SupersededError
from megatron.config.launch import Launch
from megatron.config.privacy import redact
from megatron.config.text import counted
from megatron.distributed.launch import MissingRanksError, add_to_count, is_peer_lost, register_failure
from megatron.training.rank_log import claim_first_failure, crashed_ranks, write_text

LOST_COUNT, OTHER_COUNT = "failures: lost contact", "failures: errors of their own"
"""Keys of the store, which count the ranks that failed after the first one."""

QUIET_SECONDS, COUNT_SECONDS = 1.0, 3.0
"""Seconds without a further failure after which the first rank stops to count, and seconds that it counts at most."""

DISK_SECONDS = 5.0
"""Seconds that a failing rank waits for a disk."""

T = TypeVar("T")

VMSTAT = Path("/proc/vmstat")


def oom_kills() -> int:
    """Return how many processes the kernel has killed on this machine, since it started, for want of memory."""
    with suppress(OSError, ValueError, StopIteration):
        return next(int(line.split()[1]) for line in VMSTAT.read_text().splitlines() if line.startswith("oom_kill "))
    return 0


_oom_kills_before = oom_kills()
"""When this process began."""


def within(seconds: float, act: Callable[[], T], default: T) -> T:
    """Return the result of an act on a disk, or ``default`` if it hangs, so that the launcher sees the failure."""
    answers: list[T] = []
    thread = threading.Thread(target=lambda: answers.append(act()), daemon=True)
    try:
        thread.start()
    except RuntimeError:  # no memory for a thread
        return default
    thread.join(seconds)
    return answers[0] if answers else default


def is_first_failure(error: BaseException) -> bool:
    """Register a failure of this rank; return True if it is the first of all ranks, as far as that can be known."""
    if not register_failure():
        return False
    if isinstance(error, MissingRanksError):  # all name the same ranks, and have no store: one of each machine reports
        launch = Launch.read(os.environ)
        return launch.local_rank == 0 or launch.rank - launch.local_rank in error.ranks
    if isinstance(error, SupersededError):  # the folder belongs to a later start
        return True
    claimed = within(DISK_SECONDS, claim_first_failure, True)
    return claimed or not is_peer_lost(error)


def count_consequence(error: BaseException, agreed: bool) -> None:
    """Count a failure after the first one, unless all ranks have ``agreed`` on it; write it into this rank's log."""
    if not agreed:
        add_to_count(LOST_COUNT if is_peer_lost(error) else OTHER_COUNT)
    text = f"this rank failed after another one:\n{''.join(traceback.format_exception(error))}"
    within(DISK_SECONDS, lambda: write_text(text), None)


def consequences(error: BaseException, world_size: int, host: str) -> str:
    """Return lines on what the first failure does not show: failures after it, and ranks that could not report theirs.

    Waits a moment for other ranks, which fail at about the same time if they have the same reason.
    """
    at, lines = time.strftime("%Y-%m-%d %H:%M:%S %z"), list[str]()
    if is_peer_lost(error):
        lines += within(DISK_SECONDS, lambda: crashed_ranks(world_size), [])
        if killed := oom_kills() - _oom_kills_before:
            lines.append(f"processes that the kernel of {host} has killed since the start for want of memory: {killed}")
    lost, others = _count(world_size)
    phrases = [f"{counted(lost, 'rank')} lost contact after it"] * bool(lost)
    phrases += [f"{counted(others, 'rank')} failed with errors of their own after it (in their logs)"] * bool(others)
    if phrases:
        lines.append(f"this failure is the first, at {at} on {host}: {', '.join(phrases)}")
    return redact("\n".join(lines))


def _count(world_size: int) -> tuple[int, int]:
    """Return how many ranks have failed by losing contact, and otherwise, once no more do."""
    end = time.monotonic() + COUNT_SECONDS
    found, since = (0, 0), time.monotonic()
    while time.monotonic() < min(end, since + QUIET_SECONDS) and sum(found) + 1 < world_size:
        now = add_to_count(LOST_COUNT, 0), add_to_count(OTHER_COUNT, 0)
        if now != found:
            found, since = now, time.monotonic()
        time.sleep(0.05)
    return found
