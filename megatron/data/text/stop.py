"""Signals that ask a process to end, told where that is safe."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from megatron.data.command_line import StoppedError


class Stop:
    """Whether a signal has asked this process to end."""

    def __init__(self) -> None:
        self._number: int | None = None
        self._waits = False

    def note(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal: end what goes on, or only remember it.

        Raises:
            StoppedError: unless it is to wait for `check`.
        """
        self._number = number
        if not self._waits:
            raise StoppedError(number)

    def wait_for_checks(self) -> None:
        """From now on only `check` tells: what is raised inside a library may be lost there, or taken for its failure.

        Raises:
            StoppedError: when a signal came before, and was lost.
        """
        self._waits = True
        self.check()

    def check(self) -> None:
        """Tell.

        Raises:
            StoppedError: when a signal came.
        """
        if self._number is not None:
            raise StoppedError(self._number)


@contextmanager
def signals_noted() -> Iterator[Stop]:
    """In here SIGTERM and SIGINT end this process as `Stop` says."""
    stop = Stop()
    before = {number: signal.signal(number, stop.note) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
