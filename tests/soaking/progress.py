"""Progress of a run, from its ``metrics.jsonl`` while it grows."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class Progress:
    """Reads a run's records as they come.

    Attributes:
        file: where they are; need not be there yet.
        records: all so far.
    """

    file: Path
    records: list[dict[str, Any]] = field(default_factory=list)
    _offset: int = 0

    def read(self) -> None:
        """Take in what has come since; half a line is left for the next time."""
        if not self.file.exists():
            return
        with self.file.open("rb") as file:
            file.seek(self._offset)
            new = file.read()
        whole = new[: new.rfind(b"\n") + 1]
        self._offset += len(whole)
        self.records += [json.loads(line) for line in whole.splitlines() if line.strip()]

    @property
    def step(self) -> int:
        """The step that was recorded last; 0 before the first."""
        return next((record["iteration"] for record in reversed(self.records) if is_step(record)), 0)

    def reported_since(self, moment: float) -> bool:
        """Return True if the run has reported a start, a stop or a fault since then."""
        return any(record.get("event") in ("start", "stop", "error", "warning") for record in self.since(moment))

    def since(self, moment: float) -> list[dict[str, Any]]:
        """Records that were made after ``moment``, in seconds of ``time.time()``."""
        return [record for record in self.records if record["time"] > moment]

    def again(self, moment: float) -> float | None:
        """When the first step was recorded of a start that began after ``moment``; None when there is none."""
        after = self.since(moment)
        began = next((number for number, record in enumerate(after) if record.get("event") == "start"), len(after))
        return next((record["time"] for record in after[began:] if is_step(record)), None)

    def saved_again(self, moment: float) -> float | None:
        """When the first checkpoint was complete after ``moment``; None when there is none."""
        return next((r["time"] for r in self.since(moment) if r.get("event") == "checkpoint"), None)


def is_step(record: dict[str, Any]) -> bool:
    """Return True if a record is of a training step."""
    return "lm loss" in record and "event" not in record


def complaints(records: list[dict[str, Any]], steps: int, expected: dict[int, dict[str, Any]]) -> list[str]:
    """Return the faults in the records of a run that has ended: gaps in its curve, and numbers other than expected.

    Args:
        records: of the run.
        steps: it has.
        expected: of the undisturbed run, by step: the numbers that a record of it must have.
    """
    runs = {record["run-id"] for record in records if record.get("event") == "start"}
    found = [f"{len(runs)} run ids: {sorted(runs)}"] if len(runs) != 1 else []
    found += taken_up_too_early(records)
    last = 0
    for record in records:
        if record.get("event") == "start":
            if record["iteration"] > last:
                found.append(f"a start at step {record['iteration']}, where {last} are recorded")
            last = record["iteration"]
        elif is_step(record):
            step = record["iteration"]
            if step != last + 1:
                found.append(f"step {step} follows on {last}")
            apart = [name for name, value in expected.get(step, {}).items() if record.get(name, value) != value]
            found += [f"step {step}: {name} is {record[name]}, not {expected[step][name]}" for name in apart]
            last = step
    return found if last == steps else [*found, f"the last record is of step {last}, not {steps}"]


def taken_up_too_early(records: list[dict[str, Any]]) -> list[str]:
    """Starts that did again what was saved: the newest checkpoint may be damaged, and then the one before has to do.

    Without this, a run that never resumes would end as the undisturbed one does, which begins at the same seed.
    """
    found, saved = list[str](), list[int]()
    for record in records:
        if record.get("event") == "checkpoint":
            saved.append(int(record["path"].rpartition("_")[2]))
        elif record.get("event") == "start":
            begun = record["iteration"]
            least = max(sorted(set(saved))[-2:-1], default=0)
            if begun < least:
                found.append(f"a start at step {begun}, where checkpoints of {sorted(set(saved))} were complete")
            saved = [step for step in saved if step <= begun]
    return found
