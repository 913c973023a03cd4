"""What happened to a run, in a file that a person reads: starts, skipped steps, warnings, errors, ends."""

from __future__ import annotations

import time
from pathlib import Path

from megatron.training.sinks import Values
from megatron.training.start_facts import in_words

NAME = "incidents.md"
KINDS = ("warning", "error", "stop")


class Incidents:
    """A line of Markdown for each, with its time (UTC) and the step it came after."""

    def __init__(self, path: Path) -> None:
        """Open ``path`` for appending.

        Raises:
            OSError: when it cannot be opened.
        """
        again = path.exists()
        self._start = "started again" if again else "started"
        self._place = 0
        self._file = path.open("a", encoding="utf-8", buffering=1)  # a line is out as soon as it ends

    def record(self, values: Values) -> None:
        """Tell of skipped steps."""
        self._place = int(str(values["iteration"]))
        skipped = values.get("skipped-iterations")
        if isinstance(skipped, list) and skipped:
            which = "update of step" if len(skipped) == 1 else "updates of steps"
            self._write(values, f"skipped the {which} {', '.join(map(str, skipped))}")

    def event(self, values: Values) -> None:
        """Tell of a start, a warning, an error, a stop."""
        kind = str(values["event"])
        self._place = int(str(values["iteration"]))
        if kind in ("start", "evaluation"):
            began = self._start if kind == "start" else "an evaluation alone"
            ranks = "1 rank" if values["world-size"] == 1 else f"{values['world-size']} ranks"
            run = f", run {values['run-id']}" if values["run-id"] else ""
            which = f", {words}" if (words := in_words(values)) else ""
            self._write(values, f"{began} on {ranks}{run}{which}")
        elif kind in KINDS:
            self._write(values, str(values["text"]) if kind == "stop" else f"{kind}: {values['text']}")

    def flush(self) -> None:
        """Nothing waits to be written."""

    def close(self, failed: bool) -> None:
        """Tell of the end, and close the file."""
        self._write({"time": time.time()}, "ended by an error" if failed else "ended in good order")
        self._file.close()

    def _write(self, values: Values, text: str) -> None:
        at = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(float(str(values["time"]))))
        self._file.write(f"- {at} step {self._place}: {' '.join(text.split())}\n")
