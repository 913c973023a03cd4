"""Faults of a run and its checkpoints: in a rank, at any of its calls to the file system, or later."""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
import signal
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from tests.kit.watched_calls import REAL, refuse, watched_calls


@dataclass(frozen=True)
class Fault:
    """A fault of one rank of a start."""

    kind: str  # ``kill`` (at a call), ``full disk`` (at a call, and at those that follow), ``kill at a moment``
    rank: int
    call: int = 0  # counted from 0 over those that touch the checkpoints
    calls: int = 1  # that fail, of a full disk
    torn: bool = False  # a write that is the last leaves half of its bytes
    moment: float = 0.0  # seconds from the start
    patient: bool = True  # the other ranks find out by themselves; a launcher would kill them

    def __str__(self) -> str:
        if self.kind == "kill at a moment":
            return f"kill -9 of rank {self.rank} after {self.moment:.1f} s"
        if self.kind == "kill":
            return f"kill -9 of rank {self.rank} at call {self.call}{', half written' * self.torn}"
        return f"full disk for {self.calls} calls of rank {self.rank} from {self.call} on"


class Watch:
    """Counts this process's calls that touch files under some folders, and has a fault happen at one of them."""

    def __init__(self, folders: Sequence[Path], fault: Fault | None, notes: Path) -> None:
        """Begin at 0. The names of the calls go to the file ``notes``, last the one at which the fault happened."""
        self._folders, self._fault = tuple(f"{folder}/" for folder in folders), fault
        self._numbers = itertools.count()
        self._notes = os.open(notes, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def watching(self) -> AbstractContextManager[None]:
        """Inside, calls are watched."""
        return watched_calls(self._touched, self._before)

    def _touched(self, path: str) -> bool:
        return path.startswith(self._folders) and not path.endswith("claim.json")

    def _before(self, name: str, path: str, args: tuple[Any, ...]) -> None:
        number, fault = next(self._numbers), self._fault
        REAL["write"](self._notes, f"{name} {path}\n".encode())
        if fault is None or number < fault.call:
            return
        if fault.kind == "kill":
            if fault.torn and name == "write":
                content = memoryview(args[1])
                REAL["write"](args[0], content[: len(content) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        if fault.kind == "full disk" and number < fault.call + fault.calls:
            refuse(name, path)


# ---- what happens to files afterwards


def truncate(file: Path, chance: random.Random) -> str:
    """Cut a file short."""
    length = chance.randrange(max(1, file.stat().st_size))
    os.truncate(file, length)
    return f"truncated to {length} bytes"


def flip(file: Path, chance: random.Random) -> str:
    """Flip one bit."""
    content = bytearray(file.read_bytes())
    place, bit = chance.randrange(len(content)), chance.randrange(8)
    content[place] ^= 1 << bit
    file.write_bytes(content)
    return f"bit {bit} of byte {place} flipped"


def remove(file: Path, chance: random.Random) -> str:
    """Lose a file."""
    file.unlink()
    return "removed"


DAMAGE = {"truncated file": truncate, "flipped bit": flip, "lost file": remove}


def lose_node(folders: Sequence[Path], chance: random.Random) -> str:
    """Lose all that a node has."""
    folder = chance.choice(folders)
    shutil.rmtree(folder)
    return f"{folder.name} lost"


# ---- which checkpoints are whole, judged without the library


def whole_steps(durable: Path, nodes: Sequence[Path]) -> set[int]:
    """Steps of which there is a whole checkpoint, published or staged: in the durable folder, or over all nodes."""
    alone = [[path] for path in saves(durable)]
    by_save: dict[tuple[int, bytes], list[Path]] = {}
    for path in itertools.chain.from_iterable(map(saves, nodes)):
        if (path / "COMPLETE").exists():
            by_save.setdefault((step_of(path), (path / "COMPLETE").read_bytes()), []).append(path)
    return {step_of(copies[0]) for copies in [*alone, *by_save.values()] if is_whole(copies)}


def checkpoints(folder: Path) -> list[Path]:
    """Folders called like checkpoints; not what is staged or being removed."""
    return sorted(path for path in folder.glob("iter_*") if path.suffix == "")


def saves(folder: Path) -> list[Path]:
    """Checkpoints, and saves of which only renames are left: the next start publishes these."""
    staged = (path.parent for path in folder.glob(".epoch-*/iter_*/COMPLETE"))
    return [*checkpoints(folder), *sorted(path for path in staged if path.suffix == "")]


def step_of(path: Path) -> int:
    """The step in a folder's name."""
    return int(path.name[5:12])


def is_whole(copies: Sequence[Path]) -> bool:
    """Return True if every byte of a checkpoint matches its checksum in one of several copies of each file."""
    described = [path for path in copies if _is_described(path)]
    if not described:
        return False
    manifest = json.loads((inner(described[0]) / "manifest.json").read_bytes())
    return all(any(_is_as_written(inner(path), name, manifest) for path in copies) for name in manifest["files"])


def inner(path: Path) -> Path:
    """The folder that the marker names, beside it or, of a staged save, where the checkpoint will be."""
    name = (path / "COMPLETE").read_text(errors="replace").split()[1:]
    beside = path.joinpath(*name)
    return beside if beside.exists() else path.parents[1].joinpath(path.name, *name)


def _is_described(path: Path) -> bool:
    try:
        mark, manifest = (path / "COMPLETE").read_text(), (inner(path) / "manifest.json").read_bytes()
    except (OSError, ValueError):
        return False
    return mark.split()[:1] == [xxhash.xxh3_64_hexdigest(manifest)] and mark.endswith("\n")


def _is_as_written(path: Path, name: str, manifest: dict[str, Any]) -> bool:
    record = manifest["files"][name]
    try:
        content = (path / name).read_bytes()
    except OSError:
        return False
    spans = [(0, record["head"], record["xxh3"])]
    for tensor in manifest["tensors"].values():
        spans += [(c["offset"], c["bytes"], c["xxh3"]) for c in tensor["chunks"] if c["file"] == name]
    right = all(xxhash.xxh3_64_hexdigest(content[at : at + n]) == mark for at, n, mark in spans)
    return len(content) == record["bytes"] and right
