"""Exit on SIGTERM even while blocked in a collective with a dead peer.

When a rank dies, its launcher sends SIGTERM to the other ranks of the machine, and torchrun restarts none of them
before all have exited. A rank blocked in a collective may stay blocked: gloo notices a dead peer within milliseconds,
NCCL only after ``--distributed-timeout-minutes``, and Python runs signal handlers only once the collective returns.
The launcher would finally kill the rank (torchrun after 30 s). A separate thread therefore receives the signal and
checks whether all peers are alive; if so, the run finishes its step and saves, as usual after SIGTERM.
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
"""Seconds between two checks for a dead peer."""

PATIENCE = 2.0
"""Seconds that a rank gets to report the lost peer itself before it is ended."""

PROCESSES = Path("/proc")
OWN = PROCESSES / "self"

STATUS = 128 + signal.SIGTERM


@contextmanager
def vigil(world: Group, gone: Callable[[], bool] | None = None) -> Iterator[None]:
    """End this process within seconds of SIGTERM if a peer is dead. Use in the main thread.

    Args:
        world: all ranks; with a single rank nothing is watched.
        gone: returns True if a peer is dead; None checks the processes of this machine and the failure messages of
            the other ranks.
    """
    if world.size == 1:
        yield
        return
    receiver, sender = socket.socketpair()
    sender.setblocking(False)
    previous = signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)
    stopped = threading.Event()
    arguments = (receiver, stopped, world.rank, gone or Peers().gone)
    threading.Thread(target=_watch, args=arguments, name="peer watchdog", daemon=True).start()
    try:
        yield
    finally:
        stopped.set()
        signal.set_wakeup_fd(previous)
        sender.close()


def _watch(signals: socket.socket, stopped: threading.Event, rank: int, gone: Callable[[], bool]) -> None:
    """Wait for SIGTERM, then for a dead peer, then end the process; return early once ``stopped`` is set."""
    with signals:
        while signal.SIGTERM not in (received := signals.recv(1)):
            if not received:
                return
    while not gone():
        if stopped.wait(LOOK_EVERY):
            return
    if stopped.wait(PATIENCE):
        return
    if first_to_fail():
        print(f"error on rank {rank}: {LOST_CONTACT}", file=sys.stderr, flush=True)
    os._exit(STATUS)


class Peers:
    """The other ranks: those of this machine by their processes, all of them by the failures they publish."""

    def __init__(self) -> None:
        """Record the peers on this machine; all of them must be running."""
        self._local = _local_peers()

    def gone(self) -> bool:
        """Return True if a local peer has exited, a rank has published a failure, or the store does not answer."""
        return not self._local <= _local_peers() or has_anyone_failed()


def _local_peers() -> set[int]:
    """Return the ids of running processes with this one's parent and command line; empty without ``/proc``."""
    found = set()
    for path in PROCESSES.glob("[0-9]*"):
        with suppress(OSError):  # the process has just ended
            parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == os.getppid() and _command_line(path) == _command_line(OWN):
                found.add(int(path.name))
    return found


def _command_line(process: Path) -> bytes:
    """Return the command line; empty for a zombie."""
    return (process / "cmdline").read_bytes()
