"""Files of one JSON object per line, which a crash or a full disk never leaves unreadable."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path


class JsonLines:
    """Appends one JSON object per line. A disk that fails is reported once and never stops the run."""

    def __init__(self, path: Path, warn: Callable[[str], None]) -> None:
        """Open ``path`` for appending.

        Raises:
            OSError: when the file cannot be opened.
        """
        self.path, self._warn, self._warned = path, warn, False
        self._torn = _ends_within_a_line(path)
        self._file = path.open("ab", buffering=0)  # unbuffered: a line is out, or an error is raised here and now

    def write(self, values: Mapping[str, object]) -> None:
        """Append a line. Numbers JSON cannot hold (NaN, infinity) become null."""
        line = json.dumps({name: _json_number(value) for name, value in values.items()}, allow_nan=False)
        data = (b"\n" if self._torn else b"") + line.encode() + b"\n"
        try:
            written = self._file.write(data)
        except OSError as error:
            self._lost(error.strerror or str(error))
            return
        self._torn = written != len(data)
        if self._torn:
            self._lost("no space left")

    record = event = write

    def flush(self) -> None:
        """Nothing waits to be written."""

    def _lost(self, reason: str) -> None:
        if not self._warned:
            self._warn(f"{self.path} cannot be written ({reason}): training goes on, metrics are lost until it can")
        self._warned = True

    def close(self, failed: bool = False) -> None:
        """Close the file."""
        with contextlib.suppress(OSError):  # nothing is buffered, so nothing can be lost here
            self._file.close()


def _ends_within_a_line(path: Path) -> bool:
    """Whether a crash cut the file's last line off."""
    if not path.exists() or path.stat().st_size == 0:
        return False
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"


def _json_number(value: object) -> object:
    return None if isinstance(value, float) and not math.isfinite(value) else value
