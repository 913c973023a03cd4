"""Progress of the data tools: one line, redrawn in place on a terminal, written from time to time to a file."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, TextIO

from tqdm import tqdm  # type: ignore[import-untyped]

from megatron.config.text import echo, format_bytes

TERMINAL_INTERVAL, FILE_INTERVAL = 0.2, 10.0  # seconds between lines
BYTES = {"unit": "B", "unit_scale": True, "unit_divisor": 1024}


class _WholeLines:
    """Stream that turns the updates of a progress line into lines of a file."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> None:
        if text.strip():
            self._stream.write(f"{text.strip()}\n")

    def flush(self) -> None:
        self._stream.flush()


class ProgressLine:
    """A line about work in progress, in a format of tqdm."""

    def __init__(self, stream: TextIO, line: str, **options: Any) -> None:
        self._stream = stream
        self._terminal = stream.isatty()
        interval = TERMINAL_INTERVAL if self._terminal else FILE_INTERVAL
        self._bar: tqdm[Any] = tqdm(
            bar_format=line,
            ascii=".#",
            file=stream if self._terminal else _WholeLines(stream),
            mininterval=interval,
            miniters=0,
            delay=interval,
            smoothing=0,  # rates are averages from the start
            leave=False,
            **options,
        )

    def message(self, text: str) -> None:
        """Print a message."""
        if self._terminal:
            self._bar.clear()
        echo(text, file=self._stream, flush=True)

    def close(self) -> None:
        """Erase the line on a terminal."""
        self._bar.close()


class ByteProgress(ProgressLine):
    """Show the bytes done, the rate and the time left."""

    def __init__(self, stream: TextIO, total: int) -> None:
        super().__init__(stream, "{n_fmt} of {total_fmt}, {rate_fmt}, {remaining} left", total=total, **BYTES)

    def add(self, num_bytes: int) -> None:
        """Count ``num_bytes`` as done."""
        self._bar.update(num_bytes)


class StageProgress(ProgressLine):
    """Show the current stage of a long task and its duration."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream, "{desc}, {elapsed}")

    def set_stage(self, stage: str) -> None:
        """Set the current stage."""
        self._bar.set_description_str(stage, refresh=False)
        self.tick()

    def tick(self) -> None:
        """Show the stage, if a line is due."""
        self._bar.update(0)


@dataclass
class PreprocessTotals:
    """Counts of preprocessing so far."""

    stored_bytes: int = 0  # of the input files, compressed if they are
    documents: int = 0  # written under every key
    empty: int = 0  # texts of all keys without ids
    text_bytes: int = 0  # UTF-8 bytes of the texts of all keys
    tokens: int = 0  # of all keys
    bad: int = 0  # documents skipped, and files not readable to their end
    dropped: dict[str, int] = field(default_factory=dict)  # documents left out, by reason
    before: PreprocessTotals | None = field(default=None, compare=False)  # of the interrupted run that is continued

    def rates(self, seconds: float) -> str:
        """Format the speed after ``seconds``."""
        before = self.before or PreprocessTotals()
        text_rate, token_rate = (self.text_bytes - before.text_bytes) / seconds, (self.tokens - before.tokens) / seconds
        return f"{format_bytes(text_rate)}/s, {tqdm.format_sizeof(token_rate)} tokens/s"


class PreprocessProgress(ProgressLine):
    """Show `PreprocessTotals`."""

    def __init__(self, stream: TextIO, input_bytes: int, interval: int | None = None) -> None:
        """Show the part of ``input_bytes`` that is read.

        A file gets a line every ``interval`` documents, by default every `FILE_INTERVAL`; 0 for none.
        """
        line = "[{bar:24}] {percentage:5.1f}% | {desc} | {remaining} left"
        super().__init__(stream, line, total=max(1, input_bytes), disable=interval == 0)
        self._documents_interval = None if self._terminal else interval
        self._documents = 0
        self._start = time.monotonic()

    def update(self, totals: PreprocessTotals) -> None:
        """Show the progress, if a line is due."""
        self._bar.initial = totals.before.stored_bytes if totals.before else 0
        rates = totals.rates(time.monotonic() - self._start)
        counts = f"{totals.documents:,} documents, {tqdm.format_sizeof(totals.tokens)} tokens"
        self._bar.set_description_str(f"{counts} | {rates}", refresh=False)
        every, before = self._documents_interval, self._documents
        self._documents = totals.documents
        if not every:
            self._bar.update(totals.stored_bytes - self._bar.n)
            return
        self._bar.n = totals.stored_bytes
        if totals.documents // every > before // every:
            self._bar.refresh()
