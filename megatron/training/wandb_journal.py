"""What a run has to report to Weights & Biases, on this disk, whatever becomes of the client and its server."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron.training.json_lines import JsonLines
from megatron.training.sinks import Values, scalars

ROW_HAS_ANYWAY = ("iteration", "time")

Row = dict[str, float]


@dataclass
class Past:
    """What a journal tells of the starts before.

    Attributes:
        starts: how many there were.
        rows: by step, as the last start that took the step wrote them.
    """

    starts: int = 0
    rows: dict[int, Row] = field(default_factory=dict)


class Journal:
    """A line of JSON for each record. Not the client's own file: that has only what it wrote before it died."""

    def __init__(self, path: Path, iteration: int, warn: Callable[[str], None]) -> None:
        """Read what is there, and go on below it with a start after ``iteration`` steps.

        Raises:
            OSError: when the file cannot be read or written.
        """
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self.past = read_past(path)
            self._file = JsonLines(path, warn)
        except OSError as error:
            reason = f"{path} cannot be written ({error.strerror}), and without it nothing is reported"
            raise OSError(f"{reason}: --wandb-save-dir ANOTHER_FOLDER") from error
        self._file.write({"start": iteration})

    def record(self, values: Values) -> None:
        """Write numbers down."""
        self._file.write(scalars(values))

    def event(self, values: Values) -> None:
        """Events are no part of the curves."""

    def flush(self) -> None:
        """Nothing waits to be written."""

    def close(self, failed: bool) -> None:
        """Close the file."""
        self._file.close()


def read_past(path: Path) -> Past:
    """What the journal says so far."""
    past, begin, written_in = Past(), 0, dict[int, int]()
    for line in _lines(path):
        if "start" in line:
            past.starts, begin = past.starts + 1, int(line["start"])
            continue
        step, row = int(line["iteration"]), row_of(line)
        # an evaluation before a start's first step belongs to the last step of the start before
        if written_in.get(step) == past.starts or step == begin:
            row = past.rows.get(step, {}) | row
        past.rows[step], written_in[step] = row, past.starts
    return past


def row_of(numbers: dict[str, Any]) -> Row:
    """What is reported of a record's numbers."""
    return {name: number for name, number in numbers.items() if number is not None and name not in ROW_HAS_ANYWAY}


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    if not path.exists():
        return
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
        with suppress(ValueError):  # a crash cut it off
            line = json.loads(text)
            if isinstance(line, dict) and {"start", "iteration"} & line.keys():
                yield line
