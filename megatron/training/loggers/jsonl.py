"""JSONL files: one JSON object per line, written by `JsonLinesLogger` and read back by `read_json_lines`."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from megatron.training.loggers.base import Metrics


class JsonLinesLogger:
    """Appends one JSON object per line. A failing disk causes one warning and never stops the run."""

    def __init__(self, path: Path, warn: Callable[[str], None]) -> None:
        """Open ``path`` for appending."""
        self.path = path
        self._warn = warn
        self._warned = False
        self._file = path.open("a+b", buffering=0)  # unbuffered, so that errors are raised by write
        self._incomplete_line = False  # whether the last line was cut off, by a crash or by a full disk
        if self._file.seek(0, os.SEEK_END):
            self._file.seek(-1, os.SEEK_END)
            self._incomplete_line = self._file.read(1) != b"\n"

    def log(self, step: int, metrics: Metrics) -> None:
        """Append the metrics of a step."""
        self.write({"iteration": step, **metrics})

    def event(self, step: int, kind: str, fields: Metrics) -> None:
        """Append an event."""
        self.write({"event": kind, "iteration": step, **fields})

    def write(self, values: Metrics) -> None:
        """Append a line. NaN and infinity become null, because JSON has neither."""
        finite = {n: None if isinstance(x, float) and not math.isfinite(x) else x for n, x in values.items()}
        data = b"\n" * self._incomplete_line + json.dumps(finite, allow_nan=False).encode() + b"\n"
        try:
            written = self._file.write(data)
        except OSError as error:
            self._warn_once(error.strerror or str(error))
            return
        self._incomplete_line = written != len(data)
        if self._incomplete_line:
            self._warn_once("no space left")

    def _warn_once(self, reason: str) -> None:
        if not self._warned:
            self._warn(f"{self.path} cannot be written ({reason}): training continues, metrics are lost until it can")
        self._warned = True

    def close(self) -> None:
        """Close the file."""
        with contextlib.suppress(OSError):  # nothing is buffered that could be lost
            self._file.close()


def read_json_lines(path: Path) -> Iterator[dict[str, Any] | None]:
    """Yield the object of each line, or None for a line that a crash cut off or damaged.

    Raises:
        OSError: if the file cannot be read.
    """
    with path.open(encoding="utf-8", errors="replace") as file:
        for text in file:
            try:
                line = json.loads(text)
            except ValueError:
                yield None
            else:
                yield line if isinstance(line, dict) else None
