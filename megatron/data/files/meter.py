"""Progress of copying or reading a known number of bytes."""

from __future__ import annotations

import time
from typing import TextIO

from megatron.config.numbers import format_bytes

TERMINAL_SECONDS, FILE_SECONDS = 0.2, 10.0  # between two lines


class Meter:
    """Prints the bytes done, the rate and the time left: in place on a terminal, line by line in a file."""

    def __init__(self, stream: TextIO, total: int) -> None:
        self._stream = stream
        self._total = total
        self._done = 0
        self._terminal = stream.isatty()
        self._seconds = TERMINAL_SECONDS if self._terminal else FILE_SECONDS
        self._start = self._reported = time.monotonic()

    def add(self, num_bytes: int) -> None:
        """Count ``num_bytes`` as done."""
        self._done += num_bytes
        now = time.monotonic()
        if now - self._reported < self._seconds:
            return
        self._reported = now
        rate = self._done / (now - self._start)
        left = (self._total - self._done) / rate
        done, total = format_bytes(self._done), format_bytes(self._total)
        line = f"{done} of {total}, {format_bytes(rate)}/s, {left:,.0f} s left"
        self._stream.write(f"\r{line}\x1b[K" if self._terminal else f"{line}\n")
        self._stream.flush()

    def close(self) -> None:
        """Clear the progress line of a terminal."""
        if self._terminal:
            self._stream.write("\r\x1b[K")
            self._stream.flush()
