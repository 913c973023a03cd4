"""Folders of incidents: what went wrong in a step of a run, for people and for tools/replay_step.py.

``RUN_DIR/incidents/step_00000123_spike/incident.json`` holds an :class:`Incident`, and ``step.json`` the record of the
step (:mod:`megatron.training.step_record`), if there is one. Components that find one call
:func:`record_incident` on rank 0, with what they have gathered from the other ranks, and report it to the log of the
run (:meth:`megatron.training.loggers.run_logger.RunLogger.incident`).
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from megatron.checkpoint.durable_files import publish_file
from megatron.config.files import parse_json, read_small

INCIDENTS_FOLDER, INCIDENT_FILE, STEP_FILE = "incidents", "incident.json", "step.json"

KINDS = ("corruption", "hang", "nonfinite", "spike")
"""Kinds of incidents."""


@dataclass(frozen=True)
class Incident:
    """What went wrong in a step."""

    # One of KINDS.
    kind: str
    # Number of the step, from 1.
    step: int
    # What was found, and where, for people.
    sentence: str
    # Further findings, JSON; each kind documents its own.
    facts: Mapping[str, Any] = field(default_factory=dict)
    # Seconds since the epoch.
    time: float = field(default_factory=time.time)


def record_incident(run_dir: str | Path, incident: Incident, record: Mapping[str, Any] | None = None) -> Path:
    """Write an incident, perhaps with the record of its step, into a new folder of the run, and return the folder.

    Raises:
        OSError: if it cannot be written.
    """
    name = f"step_{incident.step:08d}_{incident.kind}"
    for number in range(1, 1000):  # a run that resumes may meet the same step again
        folder = Path(run_dir) / INCIDENTS_FOLDER / (name if number == 1 else f"{name}_{number}")
        with suppress(FileExistsError):
            folder.mkdir(parents=True)
            break
    if record:
        publish_file(folder / STEP_FILE, (json.dumps(record, indent=1) + "\n").encode())
    publish_file(folder / INCIDENT_FILE, (json.dumps(asdict(incident), indent=1) + "\n").encode())
    return folder


def read_incident(folder: Path) -> Incident:
    """Return the incident in a folder.

    Raises:
        OSError: if it cannot be read.
        ValueError: if it is not an incident.
    """
    found = parse_json(read_small(folder / INCIDENT_FILE).decode(errors="replace"))
    try:
        return Incident(**found)
    except TypeError as error:
        raise ValueError(f"{folder / INCIDENT_FILE} is not an incident: {error}") from error


def read_step_record(folder: Path) -> dict[str, Any]:
    """Return the record of the step of an incident; empty if there is none.

    Raises:
        OSError: if it cannot be read.
        ValueError: if it is not a record.
    """
    path = folder / STEP_FILE
    found = parse_json(read_small(path).decode(errors="replace")) if path.exists() else {}
    if not isinstance(found, dict):
        raise ValueError(f"{path} is not the record of a step")
    return found


def read_incidents(run_dir: str | Path) -> Iterator[tuple[Path, Incident]]:
    """Yield the folders of a run's incidents with what they hold, by step; unreadable ones are passed over."""
    for folder in sorted((Path(run_dir) / INCIDENTS_FOLDER).glob("step_*")):
        with suppress(OSError, ValueError):
            yield folder, read_incident(folder)
