"""Whether the file system of the run's folder does what checkpoints rely on, tried by all ranks at once.

The ranks speak to each other through the folder alone: what is tried is the very thing by which they do, and it works
where no collective does.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HELD, FREE, NONE = "held", "free", "none"
"""What a rank sees of a lock that another has: it works, it ends at the machine, or there are no locks."""

NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL)
"""What a file system answers that has none."""

PAGE_BYTES, REPLACEMENTS = 20_000, 100
POLL = 0.02


@dataclass(frozen=True)
class Prober:
    """One rank's part of the trial.

    Attributes:
        folder: shared, for this trial alone.
        rank: of ``size``.
        size: ranks.
        host: name of the machine.
        first: whether this is the first rank of its machine; only those try more than being seen.
        seconds: it waits for the others.
    """

    folder: Path
    rank: int
    size: int
    host: str
    first: bool
    seconds: float

    def probe(self, megabytes: int) -> dict[str, Any]:
        """Try everything; what this rank saw, as data. A rank that does not see the others tries nothing."""
        begun = time.monotonic()
        self.put("here", {"first": self.first})
        seen = self.wait_for("here", self.size)
        told: dict[str, Any] = {"missing": sorted(set(range(self.size)) - seen.keys())}
        told["visible_after"] = time.monotonic() - begun
        nodes = sum(entry["first"] for entry in seen.values())
        if told["missing"] or not self.first:
            return told
        told["lock"] = self._lock(nodes)
        told["torn"] = self._rename(nodes)
        told["write_mb_per_s"] = self._write(megabytes)
        return told

    def put(self, topic: str, value: object) -> None:
        """Leave a value for the others."""
        write_whole(self.folder / f"{topic}.{self.rank}", json.dumps(value))

    def wait_for(self, topic: str, count: int) -> dict[int, Any]:
        """What ``count`` ranks have left, by rank; of fewer where the time is over."""
        deadline = time.monotonic() + self.seconds
        while True:
            names = [name for name in os.listdir(self.folder) if name.startswith(f"{topic}.") and name[-1].isdigit()]
            if len(names) >= count or time.monotonic() > deadline:
                return {int(name.rpartition(".")[2]): json.loads((self.folder / name).read_text()) for name in names}
            time.sleep(POLL)

    def _lock(self, nodes: int) -> str:
        """Rank 0 holds a lock; what the others find."""
        file = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT, 0o666)
        try:
            if self.rank == 0:
                found = take(file)
                self.put("locked", found)
                self.wait_for("tried", nodes - 1)
                return NONE if found == NONE else HELD
            self.wait_for("locked", 1)
            found = take(file)
            self.put("tried", found)
            return found
        finally:
            os.close(file)

    def _rename(self, nodes: int) -> int:
        """Rank 0 replaces a file again and again; how often another found it torn or gone."""
        path = self.folder / "page"
        if self.rank == 0:
            for number in range(REPLACEMENTS):
                fresh = path.with_suffix(".new")
                fresh.write_bytes(bytes([number]) * PAGE_BYTES)
                fresh.replace(path)
                if number == 0:
                    self.put("page-begun", None)
            self.put("page-done", None)
            self.wait_for("page-read", nodes - 1)
            return 0
        self.wait_for("page-begun", 1)
        torn, over = 0, False
        while not over:
            over = bool(self._now("page-done"))  # looked at first: so the last page is read too
            torn += is_torn(path)
        self.put("page-read", torn)
        return torn

    def _now(self, topic: str) -> bool:
        return (self.folder / f"{topic}.0").exists()

    def _write(self, megabytes: int) -> float:
        """MB (2^20 bytes) a second that this machine writes while the others do, until it is on the disk."""
        path, block = self.folder / f"data.{self.rank}.bin", os.urandom(2**20)
        begun = time.monotonic()
        with path.open("wb") as file:
            for _ in range(megabytes):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
        rate = megabytes / (time.monotonic() - begun)
        path.unlink()
        return rate


def write_whole(path: Path, text: str) -> None:
    """Write a file that others may read at any time: they find all of it or none."""
    new = path.with_suffix(path.suffix + ".new")
    new.write_text(text, encoding="utf-8")
    new.replace(path)


def take(file: int) -> str:
    """Try to lock an open file: ``FREE`` when it could be had."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return HELD
    except OSError as error:
        if error.errno in NO_LOCKS:
            return NONE
        raise
    return FREE


def is_torn(path: Path) -> bool:
    """Whether a page that is replaced all the time is not whole when it is read."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return True
    except OSError as error:
        if error.errno != errno.ESTALE:  # a network file system may say so of a file that was replaced: then again
            raise
        return False
    return len(content) != PAGE_BYTES or len(set(content)) != 1


def kind(folder: Path, mounts: Callable[[], str] = Path("/proc/self/mounts").read_text) -> str:
    """Type of the file system that a folder lies on, such as ``nfs4`` or ``lustre``; empty where nobody says."""
    try:
        entries = [line.split() for line in mounts().splitlines()]
    except OSError:
        return ""
    place = folder.resolve()
    around = [(len(entry[1]), entry[2]) for entry in entries if place.is_relative_to(entry[1])]
    return max(around, default=(0, ""))[1]


def verdicts(told: Mapping[int, Mapping[str, Any]], hosts: Mapping[int, str]) -> list[tuple[str, bool, str]]:
    """What is to be said of what the ranks saw: what, whether it is well, and a sentence."""
    blind = {hosts[rank]: entry["missing"] for rank, entry in told.items() if entry["missing"]}
    if blind:
        host, missing = next(iter(blind.items()))
        sentence = f"{host} does not see what ranks {', '.join(map(str, missing))} write: give a folder all nodes share"
        return [("folder shared by all ranks", False, sentence)]
    latest = max(entry["visible_after"] for entry in told.values())
    out = [("folder shared by all ranks", True, f"all see each other's files within {latest:.1f} s of their start")]
    torn = sum(entry.get("torn", 0) for entry in told.values())
    sentence = f"{torn} reads found a file torn or gone while it was replaced" if torn else "no read found a torn file"
    out.append(("rename replaces a file at once", torn == 0, sentence))
    return out


def lock_sentence(told: Mapping[int, Mapping[str, Any]], hosts: Mapping[int, str]) -> tuple[bool, str]:
    """Whether locks reach from node to node, in a sentence."""
    found = {hosts[rank]: entry["lock"] for rank, entry in told.items() if "lock" in entry}
    if NONE in found.values():
        return False, "the file system has no locks: nothing but their epochs keeps two runs apart in one folder"
    if free := [host for host, lock in found.items() if lock == FREE]:
        return False, f"a lock that rank 0 holds does not reach {', '.join(free)}: mount with locks (flock, local_lock)"
    return True, "a lock that one node holds is held for the others" if len(found) > 1 else "there are locks"
