"""How far the copying or reading of a known number of bytes is."""

from __future__ import annotations

import time
from typing import TextIO

from megatron.config.numbers import format_bytes

TERMINAL_SECONDS, FILE_SECONDS = 0.2, 10.0  # between two lines


class Meter:
    """Prints now and then how many of a number of bytes are done: over itself on a terminal, line by line in a file."""

    def __init__(self, stream: TextIO, total: int) -> None:
        self._stream = stream
        self._total = total
        self._done = 0
        self._terminal = stream.isatty()
        self._seconds = TERMINAL_SECONDS if self._terminal else FILE_SECONDS
        self._start = self._said = time.monotonic()

    def add(self, num_bytes: int) -> None:
        """Count bytes that are done."""
        self._done += num_bytes
        now = time.monotonic()
        if now - self._said < self._seconds:
            return
        self._said = now
        rate = self._done / (now - self._start)
        left = (self._total - self._done) / rate
        done, total = format_bytes(self._done), format_bytes(self._total)
        line = f"{done} of {total}, {format_bytes(rate)}/s, {left:,.0f} s left"
        self._stream.write(f"\r{line}\x1b[K" if self._terminal else f"{line}\n")
        self._stream.flush()

    def close(self) -> None:
        """Take the line that is written over away."""
        if self._terminal:
            self._stream.write("\r\x1b[K")
            self._stream.flush()
