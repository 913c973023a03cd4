"""How far preprocessing is: one line that is written over on a terminal, a line now and then in a file."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TextIO

from megatron.config.numbers import format_bytes

BAR = 24  # columns
TERMINAL_SECONDS = 0.2
FILE_SECONDS = 10.0


@dataclass
class Totals:
    """What was read and written so far.

    Attributes:
        stored_bytes: of the input files, compressed where they are.
        documents: written, under every key.
        empty: texts of all keys without ids.
        text_bytes: of the texts of all keys, in UTF-8.
        tokens: of all keys.
        bad: documents that were passed over, and files that could not be read to their end.
    """

    stored_bytes: int = 0
    documents: int = 0
    empty: int = 0
    text_bytes: int = 0
    tokens: int = 0
    bad: int = 0


class Progress:
    """Prints `Totals` while they grow, and sentences between."""

    def __init__(self, stream: TextIO, input_bytes: int, interval: int | None = None) -> None:
        """Print to ``stream``.

        Args:
            stream: a terminal, or a file.
            input_bytes: what `Totals.stored_bytes` will be in the end.
            interval: documents between lines of a file; by default there is one every `FILE_SECONDS`. 0 for none.
        """
        self._stream = stream
        self._input_bytes = max(1, input_bytes)
        self._interval = interval
        self._terminal = stream.isatty()
        self._start = self._last = time.monotonic()
        self._last_documents = 0
        self._shown = False

    def update(self, totals: Totals) -> None:
        """Show how far it is, if it is time to."""
        now = time.monotonic()
        if not self._is_time(now, totals):
            return
        line = describe(totals, self._input_bytes, now - self._start)
        self._last, self._last_documents = now, totals.documents
        self._shown = self._terminal
        self._stream.write(f"\r{line}\x1b[K" if self._terminal else f"{line}\n")
        self._stream.flush()

    def _is_time(self, now: float, totals: Totals) -> bool:
        if self._interval == 0:
            return False
        if self._terminal:
            return now - self._last >= TERMINAL_SECONDS
        if self._interval is None:
            return now - self._last >= FILE_SECONDS
        return totals.documents // self._interval > self._last_documents // self._interval

    def say(self, sentence: str) -> None:
        """Print a sentence of its own."""
        self.close()
        print(sentence, file=self._stream, flush=True)

    def close(self) -> None:
        """Take the line that is written over away."""
        if self._shown:
            self._stream.write("\r\x1b[K")
            self._stream.flush()
            self._shown = False


class Stages:
    """Prints what a long work is at, and for how long: over itself on a terminal, a line now and then in a file."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._terminal = stream.isatty()
        self._start = self._last = time.monotonic()
        self._stage = "starting"

    def doing(self, stage: str) -> None:
        """Another stage has begun, or more of it is done."""
        self._stage = stage
        self.tick()

    def tick(self) -> None:
        """Print the stage, if it is time to."""
        now = time.monotonic()
        if now - self._last < (TERMINAL_SECONDS if self._terminal else FILE_SECONDS):
            return
        self._last = now
        line = f"{self._stage}, {duration(now - self._start)}"
        self._stream.write(f"\r{line}\x1b[K" if self._terminal else f"{line}\n")
        self._stream.flush()

    def say(self, sentence: str) -> None:
        """Print a sentence of its own."""
        self.close()
        print(sentence, file=self._stream, flush=True)

    def close(self) -> None:
        """Take the line that is written over away."""
        if self._terminal:
            self._stream.write("\r\x1b[K")
            self._stream.flush()


def describe(totals: Totals, input_bytes: int, seconds: float) -> str:
    """How far it is after ``seconds``, on one line."""
    seconds = max(seconds, 1e-9)
    share = min(1.0, totals.stored_bytes / input_bytes)
    bar = "#" * int(BAR * share)
    left = f"{duration(seconds / share - seconds)} left" if share else "? left"
    return (
        f"[{bar:.<{BAR}}] {100 * share:5.1f}% | {totals.documents:,} documents, {short(totals.tokens)} tokens | "
        f"{format_bytes(totals.text_bytes / seconds)}/s, {short(totals.tokens / seconds)} tokens/s | {left}"
    )


def short(number: float) -> str:
    """A count in at most five columns: ``512``, ``8.13k``, ``16.3M``, ``300B``."""
    for unit in ("", "k", "M", "B"):
        if number < 999.5:
            return f"{number:.3g}{unit}" if unit else f"{number:.0f}"
        number /= 1000
    return f"{number:.3g}T"


def duration(seconds: float) -> str:
    """A time in the two largest units that it has: ``8s``, ``3m05s``, ``2h10m``, ``1d04h``."""
    whole = round(seconds)
    for unit, length, next_unit, next_length in (("d", 86400, "h", 3600), ("h", 3600, "m", 60), ("m", 60, "s", 1)):
        if whole >= length:
            return f"{whole // length}{unit}{whole % length // next_length:02d}{next_unit}"
    return f"{whole}s"
