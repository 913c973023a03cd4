"""Progress of the data tools: one line, redrawn in place on a terminal, written from time to time to a file."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TextIO

from megatron.config.errors import format_bytes

BAR_COLUMNS = 24  # width of the progress bar in columns
TERMINAL_INTERVAL, FILE_INTERVAL = 0.2, 10.0  # seconds between lines


class ProgressLine:
    """A line about work in progress."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._terminal = stream.isatty()
        self._interval = TERMINAL_INTERVAL if self._terminal else FILE_INTERVAL
        self._start = self._last = time.monotonic()
        self._shown = False

    def message(self, text: str) -> None:
        """Print a message."""
        self.close()
        print(text, file=self._stream, flush=True)

    def close(self) -> None:
        """Erase the line on a terminal."""
        if self._shown:
            self._stream.write("\r\x1b[K")
            self._stream.flush()
            self._shown = False

    def _is_due(self, now: float) -> bool:
        return now - self._last >= self._interval

    def _show(self, line: str, now: float) -> None:
        self._last = now
        self._shown = self._terminal
        self._stream.write(f"\r{line}\x1b[K" if self._terminal else f"{line}\n")
        self._stream.flush()


class ByteProgress(ProgressLine):
    """Show the bytes done, the rate and the time left."""

    def __init__(self, stream: TextIO, total: int) -> None:
        super().__init__(stream)
        self._total = total
        self._done = 0

    def add(self, num_bytes: int) -> None:
        """Count ``num_bytes`` as done."""
        self._done += num_bytes
        now = time.monotonic()
        if not self._is_due(now):
            return
        rate = self._done / (now - self._start)
        left = (self._total - self._done) / rate
        done, total = format_bytes(self._done), format_bytes(self._total)
        self._show(f"{done} of {total}, {format_bytes(rate)}/s, {left:,.0f} s left", now)


class StageProgress(ProgressLine):
    """Show the current stage of a long task and its duration."""

    _stage = "starting"

    def set_stage(self, stage: str) -> None:
        """Set the current stage."""
        self._stage = stage
        self.tick()

    def tick(self) -> None:
        """Show the stage, if a line is due."""
        now = time.monotonic()
        if self._is_due(now):
            self._show(f"{self._stage}, {format_duration(now - self._start)}", now)


@dataclass
class PreprocessTotals:
    """Counts of preprocessing so far."""

    stored_bytes: int = 0  # of the input files, compressed if they are
    documents: int = 0  # written under every key
    empty: int = 0  # texts of all keys without ids
    text_bytes: int = 0  # UTF-8 bytes of the texts of all keys
    tokens: int = 0  # of all keys
    bad: int = 0  # documents skipped, and files not readable to their end


class PreprocessProgress(ProgressLine):
    """Show `PreprocessTotals`."""

    def __init__(self, stream: TextIO, input_bytes: int, interval: int | None = None) -> None:
        """Write to ``stream``.

        Args:
            stream: a terminal, or a file.
            input_bytes: final value of `PreprocessTotals.stored_bytes`.
            interval: documents between lines in a file; by default a line is written every `FILE_INTERVAL`. 0 for none.
        """
        super().__init__(stream)
        self._input_bytes = max(1, input_bytes)
        self._documents_interval = interval
        self._last_documents = 0

    def update(self, totals: PreprocessTotals) -> None:
        """Show the progress, if a line is due."""
        now, every = time.monotonic(), self._documents_interval
        if every == 0:
            return
        if every is None or self._terminal:
            due = self._is_due(now)
        else:
            due = totals.documents // every > self._last_documents // every
        if due:
            self._last_documents = totals.documents
            self._show(progress_line(totals, self._input_bytes, now - self._start), now)


def progress_line(totals: PreprocessTotals, input_bytes: int, seconds: float) -> str:
    """Return the progress after ``seconds`` as one line."""
    seconds = max(seconds, 1e-9)
    fraction = min(1.0, totals.stored_bytes / input_bytes)
    bar = "#" * int(BAR_COLUMNS * fraction)
    left = f"{format_duration(seconds / fraction - seconds)} left" if fraction else "? left"
    return (
        f"[{bar:.<{BAR_COLUMNS}}] {100 * fraction:5.1f}% | {totals.documents:,} documents, "
        f"{format_count(totals.tokens)} tokens | "
        f"{format_bytes(totals.text_bytes / seconds)}/s, {format_count(totals.tokens / seconds)} tokens/s | {left}"
    )


def format_count(number: float) -> str:
    """Format a count in at most five columns: ``512``, ``8.13k``, ``16.3M``, ``300B``."""
    for unit in ("", "k", "M", "B"):
        if number < 999.5:
            return f"{number:.3g}{unit}" if unit else f"{number:.0f}"
        number /= 1000
    return f"{number:.3g}T"


def format_duration(seconds: float) -> str:
    """Format a time in its two largest units: ``8s``, ``3m05s``, ``2h10m``, ``1d04h``."""
    whole = round(seconds)
    for unit, length, next_unit, next_length in (("d", 86400, "h", 3600), ("h", 3600, "m", 60), ("m", 60, "s", 1)):
        if whole >= length:
            return f"{whole // length}{unit}{whole % length // next_length:02d}{next_unit}"
    return f"{whole}s"
