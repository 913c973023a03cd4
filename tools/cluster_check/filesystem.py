"""Test the shared file system for what checkpoints rely on, on all ranks at once.

Ranks communicate only through files in the folder under test, so it also works where collectives fail.
"""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.checkpoint.durable_files import LockState, NewFile, publish_file, try_lock
from megatron.config.privacy import PRIVATE_FILE
from tools.cluster_check.report import WARNING, CheckSection

PAGE_BYTES, REPLACEMENTS = 20_000, 100
POLL = 0.02


@dataclass(frozen=True)
class FileSystemProbe:
    """One rank's part of the test."""

    folder: Path  # shared by all ranks, used for this test only
    rank: int
    size: int
    host: str  # name of this machine
    first: bool  # whether this is the first rank of its machine; only these run all tests
    seconds: float  # time limit of waiting for the others

    def probe(self, megabytes: int) -> dict[str, Any]:
        """Run all tests and return what this rank saw. A rank that does not see all others tests nothing more."""
        start = time.monotonic()
        self.put("here", {"first": self.first})
        ranks = self.wait_for("here", self.size)
        results: dict[str, Any] = {"missing": sorted(set(range(self.size)) - ranks.keys())}
        results["visible_after"] = time.monotonic() - start
        nodes = sum(entry["first"] for entry in ranks.values())
        if results["missing"] or not self.first:
            return results
        results["lock"] = self._lock(nodes)
        results["torn"] = self._rename(nodes)
        results["write_mb_per_s"] = self._write(megabytes)
        return results

    def put(self, topic: str, value: object) -> None:
        """Write a value for the others."""
        publish_file(self.folder / f"{topic}.{self.rank}", json.dumps(value).encode())

    def wait_for(self, topic: str, count: int) -> dict[int, Any]:
        """Wait for the values of ``count`` ranks and return them by rank; fewer after the time limit."""
        deadline = time.monotonic() + self.seconds
        while True:
            names = [name for name in os.listdir(self.folder) if name.startswith(f"{topic}.") and name[-1].isdigit()]
            if len(names) >= count or time.monotonic() > deadline:
                return {int(name.rpartition(".")[2]): json.loads((self.folder / name).read_text()) for name in names}
            time.sleep(POLL)

    def _lock(self, nodes: int) -> str:
        """Rank 0 holds a lock; return the value of the `LockState` in which this rank sees it."""
        file = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT, PRIVATE_FILE)
        try:
            if self.rank == 0:
                state = try_lock(file)
                self.put("locked", state.value)
                self.wait_for("tried", nodes - 1)
                return (state if state is LockState.UNSUPPORTED else LockState.HELD).value
            self.wait_for("locked", 1)
            state = try_lock(file)
            self.put("tried", state.value)
            return state.value
        finally:
            os.close(file)

    def _rename(self, nodes: int) -> int:
        """Rank 0 replaces a file repeatedly; return how often this rank found it torn or missing."""
        path = self.folder / "page"
        if self.rank == 0:
            for number in range(REPLACEMENTS):
                new = path.with_suffix(".new")
                new.write_bytes(bytes([number]) * PAGE_BYTES)
                new.replace(path)
                if number == 0:
                    self.put("page-begun", None)
            self.put("page-done", None)
            self.wait_for("page-read", nodes - 1)
            return 0
        self.wait_for("page-begun", 1)
        torn, done = 0, False
        while not done:
            done = (self.folder / "page-done.0").exists()  # before the read, so that the last page is read too
            torn += is_torn(path)
        self.put("page-read", torn)
        return torn

    def _write(self, megabytes: int) -> float:
        """Return MB (2^20 bytes) per second written and synced by this machine while the others write too."""
        path, block = self.folder / f"data.{self.rank}.bin", os.urandom(2**20)
        start = time.monotonic()
        with NewFile(path) as file:
            for _ in range(megabytes):
                file.write(block)
        rate = megabytes / (time.monotonic() - start)
        path.unlink()
        return rate


def is_torn(path: Path) -> bool:
    """Return True if a file that is being replaced was read incomplete or missing."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return True
    except OSError as error:
        if error.errno != errno.ESTALE:  # stale handle of a file that was just replaced: not torn
            raise
        return False
    return len(content) != PAGE_BYTES or len(set(content)) != 1


def file_system_type(folder: Path, mounts: Callable[[], str] = Path("/proc/self/mounts").read_text) -> str:
    """Return the type of a folder's file system, such as ``nfs4`` or ``lustre``; empty if unknown."""
    try:
        entries = [line.split() for line in mounts().splitlines()]
    except OSError:
        return ""
    path = folder.resolve()
    mounts_above = [(len(entry[1]), entry[2]) for entry in entries if path.is_relative_to(entry[1])]
    return max(mounts_above, default=(0, ""))[1]


def check_file_system(part: CheckSection, results: Mapping[int, Mapping[str, Any]], hosts: Mapping[int, str]) -> None:
    """Judge what the ranks saw, and record the checks in ``part``."""
    missing_by_host = {hosts[rank]: entry["missing"] for rank, entry in results.items() if entry["missing"]}
    if missing_by_host:
        host, missing = next(iter(missing_by_host.items()))
        ranks = ", ".join(map(str, missing))
        sentence = f"{host} does not see files written by ranks {ranks}: give a folder that all nodes share"
        part.add("folder shared by all ranks", False, sentence)
        return
    latest = max(entry["visible_after"] for entry in results.values())
    part.add("folder shared by all ranks", True, f"files of all ranks are visible to all after {latest:.1f} s")
    torn = sum(entry.get("torn", 0) for entry in results.values())
    found = f"{torn} reads found a file torn or missing while it was replaced" if torn else "no read found a torn file"
    part.add("rename replaces a file at once", torn == 0, found)
    locks = {hosts[rank]: entry["lock"] for rank, entry in results.items() if "lock" in entry}
    free = [host for host, lock in locks.items() if lock == LockState.ACQUIRED.value]
    unsupported = LockState.UNSUPPORTED.value in locks.values()
    if unsupported:
        sentence = "the file system has no locks: only the run folder's epochs keep two runs in one folder apart"
    elif free:
        sentence = f"a lock that rank 0 holds does not reach {', '.join(free)}: mount with locks (flock, local_lock)"
    else:
        sentence = "a lock held by one node excludes the others" if len(locks) > 1 else "locks are supported"
    part.add("locks", not unsupported and not free, sentence, otherwise=WARNING)
