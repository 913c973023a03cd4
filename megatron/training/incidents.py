"""Log of a run's incidents for people: starts, skipped updates, warnings, errors, ends."""

from __future__ import annotations

import time
from pathlib import Path

from megatron.training.sinks import Values
from megatron.training.start_facts import in_words

NAME = "incidents.md"
KINDS = ("warning", "error", "stop")


class Incidents:
    """Writes one line of Markdown per incident, with its time (UTC) and step."""

    def __init__(self, path: Path) -> None:
        """Open ``path`` for appending."""
        self._start = "started again" if path.exists() else "started"
        self._iteration = 0
        self._file = path.open("a", encoding="utf-8", buffering=1)  # line buffered

    def record(self, values: Values) -> None:
        """Log skipped updates."""
        self._iteration = int(str(values["iteration"]))
        skipped = values.get("skipped-iterations")
        if isinstance(skipped, list) and skipped:
            which = "update of step" if len(skipped) == 1 else "updates of steps"
            self._write(values, f"skipped the {which} {', '.join(map(str, skipped))}")

    def event(self, values: Values) -> None:
        """Log starts, warnings, errors and stops."""
        kind = str(values["event"])
        self._iteration = int(str(values["iteration"]))
        if kind in ("start", "evaluation"):
            began = self._start if kind == "start" else "an evaluation alone"
            ranks = "1 rank" if values["world-size"] == 1 else f"{values['world-size']} ranks"
            run = f", run {values['run-id']}" if values["run-id"] else ""
            which = f", {words}" if (words := in_words(values)) else ""
            self._write(values, f"{began} on {ranks}{run}{which}")
        elif kind in KINDS:
            self._write(values, str(values["text"]) if kind == "stop" else f"{kind}: {values['text']}")

    def flush(self) -> None:
        """Do nothing: the file is line buffered."""

    def close(self, failed: bool) -> None:
        """Log the end, and close the file."""
        self._write({"time": time.time()}, "ended by an error" if failed else "ended in good order")
        self._file.close()

    def _write(self, values: Values, text: str) -> None:
        at = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(float(str(values["time"]))))
        self._file.write(f"- {at} step {self._iteration}: {' '.join(text.split())}\n")
