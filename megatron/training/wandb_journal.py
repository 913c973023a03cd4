"""Journal of all rows for Weights & Biases, kept on disk in case the client or its server fails."""

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
    """Content of the journal before this start."""

    starts: int = 0  # number of earlier starts
    rows: dict[int, Row] = field(default_factory=dict)  # by step, from the latest start that took the step


class Journal:
    """Writes one line of JSON per record. The client's own file lacks the rows that it had not written at a crash."""

    def __init__(self, path: Path, iteration: int, warn: Callable[[str], None]) -> None:
        """Read the existing journal and append a start after ``iteration`` steps."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self.past = read_past(path)
            self._file = JsonLines(path, warn)
        except OSError as error:
            reason = f"{path} cannot be written ({error.strerror}), and logging requires it"
            raise OSError(f"{reason}: --wandb-save-dir ANOTHER_FOLDER") from error
        self._file.write({"start": iteration})

    def record(self, values: Values) -> None:
        """Append the metrics."""
        self._file.write(scalars(values))

    def event(self, values: Values) -> None:
        """Do nothing: events are not part of the curves."""

    def flush(self) -> None:
        """Do nothing: lines are not buffered."""

    def close(self, failed: bool) -> None:
        """Close the file."""
        self._file.close()


def read_past(path: Path) -> Past:
    """Read the journal."""
    past = Past()
    first_step = 0
    start_of_row: dict[int, int] = {}
    for line in _lines(path):
        if "start" in line:
            past.starts += 1
            first_step = int(line["start"])
            continue
        step = int(line["iteration"])
        row = row_of(line)
        # an evaluation before a start's first step belongs to the last step of the previous start
        if start_of_row.get(step) == past.starts or step == first_step:
            row = past.rows.get(step, {}) | row
        past.rows[step] = row
        start_of_row[step] = past.starts
    return past


def row_of(numbers: dict[str, Any]) -> Row:
    """Return the metrics that are sent to W&B."""
    return {name: number for name, number in numbers.items() if number is not None and name not in ROW_HAS_ANYWAY}


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    if not path.exists():
        return
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
        with suppress(ValueError):  # a line cut off by a crash
            line = json.loads(text)
            if isinstance(line, dict) and {"start", "iteration"} & line.keys():
                yield line
