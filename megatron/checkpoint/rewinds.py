"""Rewinds of a run: steps that do not count, and the samples that it has left out since. No torch.

``SAVE/rewinds.json`` lists them, oldest first, and each checkpoint those that it was written after. The file is written
before the run goes back, so it decides: from then on a checkpoint of a later step that does not know the rewind is
passed over (:func:`later_rewinds`), and each start leaves out the samples of all rewinds. After a crash at any time the
run is either before the rewind, or after it. A corruption that was found is an entry, too, and leaves out no sample.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron.checkpoint.durable_files import publish_file, write_file
from megatron.checkpoint.errors import CheckpointError
from megatron.checkpoint.location import Location
from megatron.config.files import parse_json, read_small
from megatron.config.text import counted

REWINDS_FILE = "rewinds.json"

CORRUPTION = "corruption"

REWIND_TYPES: Mapping[str, Any] = {
    "id": str,
    "kind": str,
    "step": int,
    "steps": int,
    "begin": int,
    "end": int,
    "phase": str,
}
"""Types of the fields of a rewind, as of ``odd_values``."""


@dataclass(frozen=True)
class Rewind:
    """One time that a run went back; JSON."""

    # Random, so that checkpoints can name it.
    id: str
    # Kind of the incident: spike, nonfinite or corruption.
    kind: str
    # Number of the step after which the run went back, from 1, or in which a corruption was found.
    step: int
    # Steps that are undone, that one included; their samples are left out, except after a corruption.
    steps: int
    # Places of the samples that are left out in the order of the data of the phase, from begin to end - 1.
    begin: int
    end: int
    # Name of the phase; empty for a run without phases.
    phase: str = ""

    @property
    def limit(self) -> int:
        """Steps taken in the newest checkpoint to which the run may go back."""
        return self.step - self.steps

    @property
    def words(self) -> str:
        """The samples that are left out, as ``--skip-samples`` takes them."""
        return f"{self.phase}/{self.begin}:{self.end}" if self.phase else f"{self.begin}:{self.end}"

    @property
    def why(self) -> str:
        """Why a checkpoint is passed over that it has undone."""
        if self.kind == CORRUPTION:
            return f"corruption was found in step {self.step}, and step {self.limit} is the last one known to be clean"
        return f"the run has gone back from step {self.step} to step {self.limit} or earlier since"

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON."""
        return asdict(self)


def later_rewinds(step: int, known: Iterable[str], rewinds: Sequence[Rewind]) -> list[Rewind]:
    """Return the rewinds that have undone the last steps of a checkpoint.

    Args:
        step: steps taken in the checkpoint.
        known: ids of the rewinds that it was written after.
        rewinds: of the run.
    """
    ids = {*known}
    return [rewind for rewind in rewinds if rewind.id not in ids and step > rewind.limit]


def rewinds_of(state: Mapping[str, Any]) -> list[Rewind]:
    """Return the rewinds that a checkpoint was written after, from the state in its manifest."""
    return [Rewind(**entry) for entry in state.get("rewinds", {}).get("list", ())]


def without_corruption(rewinds: Iterable[Rewind]) -> list[Rewind]:
    """Return the rewinds after which the run went back by itself."""
    return [rewind for rewind in rewinds if rewind.kind != CORRUPTION]


def notes_on(rewinds: Sequence[Rewind]) -> list[str]:
    """Return the log line on the samples that a run leaves out because it went back."""
    rewinds = without_corruption(rewinds)
    words = " ".join(rewind.words for rewind in rewinds)
    return [f"has gone back {counted(len(rewinds), 'time')}: leaves out the samples {words}"] if rewinds else []


def read_rewinds(folder: Location) -> list[Rewind]:
    """Return the rewinds of the run that saves into a folder, oldest first.

    Raises:
        CheckpointError: if the file cannot be understood.
        OSError: if the disk fails, or the store does not answer.
    """
    path = folder / REWINDS_FILE
    try:
        content = read_small(path) if isinstance(path, Path) else path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return []
    try:
        return [Rewind(**entry) for entry in parse_json(content)]
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def add_rewinds(folder: Location, rewinds: Sequence[Rewind]) -> None:
    """Append to the list of the rewinds of a run what it does not have yet, durably.

    Raises:
        CheckpointError: if the file cannot be understood.
        OSError: if it cannot be read or written.
    """
    known = read_rewinds(folder)
    write_rewinds(folder, [*known, *(rewind for rewind in rewinds if rewind not in known)])


def record_corruption(folder: Location, clean: int, found: int) -> None:
    """Record that the checkpoints after step ``clean`` that exist now are suspect; errors as :func:`add_rewinds`."""
    add_rewinds(folder, [Rewind(secrets.token_hex(8), CORRUPTION, found, found - clean, 0, 0)])


def write_rewinds(folder: Location, rewinds: Sequence[Rewind]) -> None:
    """Replace the list of the rewinds of a run, durably.

    Raises:
        OSError: if it cannot be written.
    """
    content = (json.dumps([rewind.to_json() for rewind in rewinds], indent=1) + "\n").encode()
    path = folder / REWINDS_FILE
    if isinstance(path, Path):
        publish_file(path, content)
    else:
        write_file(path, content)
