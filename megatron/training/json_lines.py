"""JSON Lines files that stay readable after a crash or a full disk."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path


class JsonLines:
    """Appends one JSON object per line. A failing disk causes one warning and never stops the run."""

    def __init__(self, path: Path, warn: Callable[[str], None]) -> None:
        """Open ``path`` for appending."""
        self.path = path
        self._warn = warn
        self._warned = False
        self._incomplete_line = _ends_within_a_line(path)
        self._file = path.open("ab", buffering=0)  # unbuffered, so that errors are raised by write

    def write(self, values: Mapping[str, object]) -> None:
        """Append a line. NaN and infinity become null, because JSON has neither."""
        line = json.dumps({name: _json_number(value) for name, value in values.items()}, allow_nan=False)
        data = (b"\n" if self._incomplete_line else b"") + line.encode() + b"\n"
        try:
            written = self._file.write(data)
        except OSError as error:
            self._warn_once(error.strerror or str(error))
            return
        self._incomplete_line = written != len(data)
        if self._incomplete_line:
            self._warn_once("no space left")

    record = event = write

    def flush(self) -> None:
        """Do nothing: lines are not buffered."""

    def _warn_once(self, reason: str) -> None:
        if not self._warned:
            self._warn(f"{self.path} cannot be written ({reason}): training continues, metrics are lost until it can")
        self._warned = True

    def close(self, failed: bool = False) -> None:
        """Close the file."""
        with contextlib.suppress(OSError):  # nothing is buffered that could be lost
            self._file.close()


def _ends_within_a_line(path: Path) -> bool:
    """Return True if the last line is incomplete after a crash."""
    if not path.exists() or path.stat().st_size == 0:
        return False
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"


def _json_number(value: object) -> object:
    return None if isinstance(value, float) and not math.isfinite(value) else value
