"""Ranks are threads here; a lock of one open file keeps others out as it does between processes."""

from __future__ import annotations

import errno
import fcntl
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from tools.cluster_check import filesystem
from tools.cluster_check.filesystem import (
    PAGE_BYTES,
    FileSystemProbe,
    check_file_system,
    file_system_type,
)
from tools.cluster_check.report import FAILED, OK, WARNING, CheckResult, CheckSection

NODES = 3
HOSTS = {rank: f"node{rank // 2}" for rank in range(2 * NODES)}


def probe(folder: Path, seconds: float = 20.0, lost: int = -1) -> dict[int, dict[str, Any]]:
    """What two ranks on each of ``NODES`` nodes see; rank ``lost`` has a folder of its own."""

    def one(rank: int) -> dict[str, Any]:
        mine = folder / ("own" if rank == lost else "shared")
        mine.mkdir(exist_ok=True)
        return FileSystemProbe(mine, rank, len(HOSTS), HOSTS[rank], rank % 2 == 0, seconds).probe(1)

    with ThreadPoolExecutor(len(HOSTS)) as threads:
        return dict(enumerate(threads.map(one, HOSTS)))


def judged(told: dict[int, dict[str, Any]]) -> dict[str, CheckResult]:
    part = CheckSection("machine")
    check_file_system(part, told, HOSTS)
    return {check.what: check for check in part.checks}


def test_a_good_file_system(tmp_path: Path) -> None:
    printed = probe(tmp_path)
    assert [check.verdict for check in judged(printed).values()] == [OK, OK, OK]
    assert judged(printed)["locks"].detail == "a lock held by one node excludes the others"
    assert [rank for rank, entry in printed.items() if "write_mb_per_s" in entry] == [0, 2, 4]
    assert all(entry["write_mb_per_s"] > 0 for rank, entry in printed.items() if rank % 2 == 0)


def test_a_folder_that_is_not_shared(tmp_path: Path) -> None:
    (shared,) = judged(probe(tmp_path, seconds=0.5, lost=3)).values()
    assert (shared.what, shared.verdict) == ("folder shared by all ranks", FAILED)
    assert "node0 does not see files written by ranks 3" in shared.detail


def test_locks_that_end_at_the_machine(tmp_path: Path) -> None:
    with patch.object(fcntl, "flock", lambda file, how: None):
        printed = probe(tmp_path)
    assert {entry["lock"] for rank, entry in printed.items() if rank in (2, 4)} == {"free"}
    assert judged(printed)["locks"].verdict == WARNING
    assert "does not reach node1, node2" in judged(printed)["locks"].detail


def test_no_locks_at_all(tmp_path: Path) -> None:
    refusal = OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))
    with patch.object(fcntl, "flock", side_effect=refusal):
        printed = probe(tmp_path)
    assert {entry["lock"] for rank, entry in printed.items() if rank % 2 == 0} == {"none"}
    assert judged(printed)["locks"].verdict == WARNING


def test_a_rename_that_is_not_atomic(tmp_path: Path) -> None:
    """Rank 0 leaves the second page empty until another rank has read it, however the threads are scheduled."""
    original_replace, original_is_torn, caught = Path.replace, filesystem.is_torn, threading.Event()

    def replace(self: Path, target: Path) -> Path:
        if target.name != "page":
            return original_replace(self, target)
        is_first = not target.exists()  # nobody reads before the first page is announced
        target.write_bytes(b"")
        if not is_first:
            caught.wait(60.0)
        target.write_bytes(self.read_bytes())
        return target

    def is_torn(path: Path) -> bool:
        torn = original_is_torn(path)
        if torn:
            caught.set()
        return torn

    patches = patch.object(Path, "replace", replace), patch.object(filesystem, "is_torn", is_torn)
    with patches[0], patches[1], patch.object(filesystem, "REPLACEMENTS", 2):
        printed = probe(tmp_path)
    rename = judged(printed)["rename replaces a file at once"]
    assert rename.verdict == FAILED
    assert "reads found a file torn or missing" in rename.detail


def test_what_is_torn(tmp_path: Path) -> None:
    path = tmp_path / "page"
    assert filesystem.is_torn(path)
    for content, torn in ((b"x" * PAGE_BYTES, False), (b"x" * 10, True), (b"x" * (PAGE_BYTES - 1) + b"y", True)):
        path.write_bytes(content)
        assert filesystem.is_torn(path) == torn
    with patch.object(Path, "read_bytes", side_effect=OSError(errno.ESTALE, "stale")):
        assert not filesystem.is_torn(path)
    broken = patch.object(Path, "read_bytes", side_effect=OSError(errno.EIO, "broken"))
    with broken, pytest.raises(OSError, match="broken"):
        filesystem.is_torn(path)


def test_the_kind_of_the_innermost_mount(tmp_path: Path) -> None:
    mounts = f"/dev/vda / ext4 rw 0 0\nserver:/x {tmp_path} nfs4 rw 0 0\nother {tmp_path}x lustre rw 0 0\n"
    assert file_system_type(tmp_path / "run", lambda: mounts) == "nfs4"
    assert file_system_type(Path("/"), lambda: mounts) == "ext4"
    assert file_system_type(tmp_path, lambda: "") == ""
