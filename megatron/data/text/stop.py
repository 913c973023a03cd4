"""Handle SIGTERM and SIGINT at safe points."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from megatron.data.command_line import StoppedError


class Stop:
    """State of the signals that ask this process to end."""

    def __init__(self) -> None:
        self._number: int | None = None
        self._only_record = False

    def note(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal: raise StoppedError, or, after `wait_for_checks`, only record it."""
        self._number = number
        if not self._only_record:
            raise StoppedError(number)

    def wait_for_checks(self) -> None:
        """Raise only from `check` from now on. Inside a library, an exception may be lost or treated as its failure.

        Raises:
            StoppedError: if a signal has been received already.
        """
        self._only_record = True
        self.check()

    def check(self) -> None:
        """Raise StoppedError if a signal has been received."""
        if self._number is not None:
            raise StoppedError(self._number)


@contextmanager
def signals_noted() -> Iterator[Stop]:
    """Handle SIGTERM and SIGINT with a `StopSignal` inside the context."""
    stop = Stop()
    before = {number: signal.signal(number, stop.note) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
