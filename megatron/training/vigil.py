"""Ends a rank that was told to end while it waits for one that is gone, which no signal handler of Python's can.

When a rank dies, its launcher tells the others on its machine to end (SIGTERM), and torchrun starts nobody again before
they have. A rank that waits in a collective for the dead one may wait long: gloo notices within milliseconds, NCCL
after ``--distributed-timeout-minutes``; and a handler of Python's runs only once the collective returns. The
launcher would kill it in the end (torchrun after 30 s). So a thread of its own sees the signal, and looks whether the
others are still there: if so, the step can be finished and saved, as SIGTERM asks for elsewhere.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from megatron.parallel.comm import Group
from megatron.parallel.mesh import first_to_fail, has_anyone_failed
from megatron.training.failure import LOST_CONTACT

LOOK_EVERY = 0.25
"""Seconds between two looks for a rank that is gone."""

PATIENCE = 2.0
"""Seconds for a rank to notice by itself, and to say what it knows, before it is ended."""

PROCESSES = Path("/proc")
OWN = PROCESSES / "self"

STATUS = 128 + signal.SIGTERM


@contextmanager
def vigil(world: Group, gone: Callable[[], bool] | None = None) -> Iterator[None]:
    """Inside, SIGTERM ends this process within seconds where a rank of ``world`` is gone; for the main thread.

    Args:
        world: all ranks; one alone waits for nobody.
        gone: whether one is; None to look for its process on this machine, and for its last words elsewhere.
    """
    if world.size == 1:
        yield
        return
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    before, over = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False), threading.Event()
    arguments = (ours, over, world.rank, gone or Peers().gone)
    threading.Thread(target=_watch, args=arguments, name="vigil", daemon=True).start()
    try:
        yield
    finally:
        over.set()
        signal.set_wakeup_fd(before)
        theirs.close()


def _watch(signals: socket.socket, over: threading.Event, rank: int, gone: Callable[[], bool]) -> None:
    """Wait for SIGTERM, then until a rank is gone, then end the process; until it is ``over``."""
    with signals:
        while signal.SIGTERM not in (got := signals.recv(1)):
            if not got:
                return
    while not gone():
        if over.wait(LOOK_EVERY):
            return
    if over.wait(PATIENCE):
        return
    if first_to_fail():
        print(f"error on rank {rank}: {LOST_CONTACT}", file=sys.stderr, flush=True)
    os._exit(STATUS)


class Peers:
    """The processes that were started beside this one on its machine, and the ranks elsewhere."""

    def __init__(self) -> None:
        """Note who is there, which all are."""
        self._beside = _beside()

    def gone(self) -> bool:
        """Whether one has ended, or says that it fails, or cannot be asked."""
        return not self._beside <= _beside() or has_anyone_failed()


def _beside() -> set[int]:
    """Numbers of the running processes with this one's parent and command line; none where the system does not tell."""
    found = set()
    for path in PROCESSES.glob("[0-9]*"):
        with suppress(OSError):  # it has just ended
            parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == os.getppid() and _command(path) == _command(OWN):
                found.add(int(path.name))
    return found


def _command(process: Path) -> bytes:
    """Its command line; empty of one that has ended and was not waited for."""
    return (process / "cmdline").read_bytes()
