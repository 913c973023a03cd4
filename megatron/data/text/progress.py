"""Show progress: one line redrawn on a terminal, or a line from time to time in a log file."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TextIO

from megatron.config.numbers import format_bytes

BAR = 24  # width of the progress bar in columns
TERMINAL_SECONDS = 0.2
FILE_SECONDS = 10.0


@dataclass
class Totals:
    """Counts of preprocessing so far."""

    stored_bytes: int = 0  # of the input files, compressed if they are
    documents: int = 0  # written under every key
    empty: int = 0  # texts of all keys without ids
    text_bytes: int = 0  # UTF-8 bytes of the texts of all keys
    tokens: int = 0  # of all keys
    bad: int = 0  # documents skipped, and files not readable to their end


class Progress:
    """Show `PreprocessTotals` and messages."""

    def __init__(self, stream: TextIO, input_bytes: int, interval: int | None = None) -> None:
        """Write to ``stream``.

        Args:
            stream: a terminal, or a file.
            input_bytes: final value of `PreprocessTotals.stored_bytes`.
            interval: documents between lines in a file; by default a line is written every `FILE_INTERVAL`. 0 for none.
        """
        self._stream = stream
        self._input_bytes = max(1, input_bytes)
        self._interval = interval
        self._terminal = stream.isatty()
        self._start = self._last = time.monotonic()
        self._last_documents = 0
        self._shown = False

    def update(self, totals: Totals) -> None:
        """Show the progress, if a line is due."""
        now = time.monotonic()
        if not self._is_due(now, totals):
            return
        line = describe(totals, self._input_bytes, now - self._start)
        self._last, self._last_documents = now, totals.documents
        self._shown = self._terminal
        self._stream.write(f"\r{line}\x1b[K" if self._terminal else f"{line}\n")
        self._stream.flush()

    def _is_due(self, now: float, totals: Totals) -> bool:
        if self._interval == 0:
            return False
        if self._terminal:
            return now - self._last >= TERMINAL_SECONDS
        if self._interval is None:
            return now - self._last >= FILE_SECONDS
        return totals.documents // self._interval > self._last_documents // self._interval

    def message(self, text: str) -> None:
        """Print a message."""
        self.close()
        print(text, file=self._stream, flush=True)

    def close(self) -> None:
        """Erase the progress line."""
        if self._shown:
            self._stream.write("\r\x1b[K")
            self._stream.flush()
            self._shown = False


class Stages:
    """Show the current stage of a long task and its duration."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._terminal = stream.isatty()
        self._start = self._last = time.monotonic()
        self._stage = "starting"

    def set_stage(self, stage: str) -> None:
        """Set the current stage."""
        self._stage = stage
        self.tick()

    def tick(self) -> None:
        """Show the stage, if a line is due."""
        now = time.monotonic()
        if now - self._last < (TERMINAL_SECONDS if self._terminal else FILE_SECONDS):
            return
        self._last = now
        line = f"{self._stage}, {duration(now - self._start)}"
        self._stream.write(f"\r{line}\x1b[K" if self._terminal else f"{line}\n")
        self._stream.flush()

    def message(self, text: str) -> None:
        """Print a message."""
        self.close()
        print(text, file=self._stream, flush=True)

    def close(self) -> None:
        """Erase the progress line."""
        if self._terminal:
            self._stream.write("\r\x1b[K")
            self._stream.flush()


def describe(totals: Totals, input_bytes: int, seconds: float) -> str:
    """Return the progress after ``seconds`` as one line."""
    seconds = max(seconds, 1e-9)
    fraction = min(1.0, totals.stored_bytes / input_bytes)
    bar = "#" * int(BAR * fraction)
    left = f"{duration(seconds / fraction - seconds)} left" if fraction else "? left"
    return (
        f"[{bar:.<{BAR}}] {100 * fraction:5.1f}% | {totals.documents:,} documents, {short(totals.tokens)} tokens | "
        f"{format_bytes(totals.text_bytes / seconds)}/s, {short(totals.tokens / seconds)} tokens/s | {left}"
    )


def short(number: float) -> str:
    """Format a count in at most five columns: ``512``, ``8.13k``, ``16.3M``, ``300B``."""
    for unit in ("", "k", "M", "B"):
        if number < 999.5:
            return f"{number:.3g}{unit}" if unit else f"{number:.0f}"
        number /= 1000
    return f"{number:.3g}T"


def duration(seconds: float) -> str:
    """Format a time in its two largest units: ``8s``, ``3m05s``, ``2h10m``, ``1d04h``."""
    whole = round(seconds)
    for unit, length, next_unit, next_length in (("d", 86400, "h", 3600), ("h", 3600, "m", 60), ("m", 60, "s", 1)):
        if whole >= length:
            return f"{whole // length}{unit}{whole % length // next_length:02d}{next_unit}"
    return f"{whole}s"
