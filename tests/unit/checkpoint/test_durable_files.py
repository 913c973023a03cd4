"""Test the abilities that a file system must have, and those that it may lack."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import stat
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from megatron.checkpoint.durable_files import FlushedFile, LockState, publish_file, try_lock
from megatron.checkpoint.errors import StorageError
from megatron.checkpoint.format import Manifest
from megatron.checkpoint.lease import LEASE_FILE, acquire_lease
from megatron.checkpoint.verify import list_damage
from tests.unit.checkpoint.samples import refuse_renames, save, small


def refuse_sync(patch: pytest.MonkeyPatch, code: int, folders: bool) -> None:
    """Let fsync fail, of folders or of files."""
    real = os.fsync

    def fsync(fd: int) -> None:
        if stat.S_ISDIR(os.fstat(fd).st_mode) is folders:
            raise OSError(code, os.strerror(code))
        real(fd)

    patch.setattr(os, "fsync", fsync)


@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOTSUP])
def test_a_file_system_that_does_not_sync_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    refuse_sync(monkeypatch, code, folders=True)
    for _ in range(2):
        save(tmp_path / "runs" / "iter_0000001", small())
    assert list(list_damage(Manifest.open(tmp_path / "runs" / "iter_0000001"))) == []


@pytest.mark.parametrize(("code", "folders"), [(errno.EINVAL, False), (errno.ENOTSUP, False), (errno.EIO, True)])
def test_every_other_sync_must_succeed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, folders: bool
) -> None:
    refuse_sync(monkeypatch, code, folders)
    with pytest.raises(StorageError, match=re.escape(os.strerror(code))):
        save(tmp_path / "runs" / "iter_0000001", small())


def test_a_file_that_is_flushed_while_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of the flush is reported, although the system reports it to that flush alone."""
    monkeypatch.setattr("megatron.checkpoint.durable_files.FLUSH_BYTES", 8)
    with open(tmp_path / "x", "wb") as file:
        flushed = FlushedFile(file)
        for number in range(20):
            flushed.write(memoryview(np.full(3, number, "<i4")))
        flushed.wait()
    assert np.fromfile(tmp_path / "x", "<i4").tolist() == [number for number in range(20) for _ in range(3)]
    refuse_sync(monkeypatch, errno.EIO, folders=False)
    with open(tmp_path / "y", "wb") as file:
        flushed = FlushedFile(file)
        flushed.write(b"seven b")
        flushed.wait()
        flushed.write(b"8")
        with pytest.raises(OSError, match=os.strerror(errno.EIO)) as caught:
            flushed.wait()
        assert caught.value.filename == str(tmp_path / "y")
        monkeypatch.undo()  # later flushes succeed
        with pytest.raises(OSError, match=os.strerror(errno.EIO)):
            flushed.wait()


@pytest.mark.parametrize("moment", ["COMPLETE", "iter_0000002"])  # the second has the marker, and goes nevertheless
@pytest.mark.parametrize("older", [True, False])
def test_a_save_elsewhere_goes_on_from_the_older_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str, older: bool
) -> None:
    if older:
        save(tmp_path / "iter_0000001", small())
    refuse_renames(monkeypatch, lambda target: target.name == moment, errno.ENOSPC)
    with pytest.raises(StorageError) as caught:
        save(tmp_path / "iter_0000002", small())
    load = f"--load {tmp_path} " if older else ""
    assert str(caught.value).endswith(f"written\n  fix: free some space | {load}--save A_FOLDER_ELSEWHERE")
    assert [path.name for path in tmp_path.iterdir()] == ["iter_0000001"] * older


@pytest.mark.parametrize("older", [True, False])
def test_so_does_a_run_that_cannot_lock_its_folder(tmp_path: Path, older: bool) -> None:
    (tmp_path / ".epoch-3" / LEASE_FILE).mkdir(parents=True)
    if older:
        save(tmp_path / "iter_0000001", small())
    with pytest.raises(StorageError) as caught, acquire_lease(tmp_path):
        pass
    load = f"--load {tmp_path} " if older else ""
    assert re.fullmatch(
        rf"no checkpoint can be written to {tmp_path}: .+\n  fix: {load}--save A_FOLDER_ELSEWHERE", str(caught.value)
    )


def test_every_publication_goes_through_one_module() -> None:
    """No other module of the library and the tools flushes to disk or locks files; the doctor times a flush."""
    root = Path(__file__).parents[3]
    calls = re.compile(r"os\.fsync\(|os\.replace\(|fcntl|filelock")
    files = [path for top in ("megatron", "tools") for path in (root / top).rglob("*.py")]
    found = [str(path.relative_to(root)) for path in files if calls.search(path.read_text())]
    assert found == ["megatron/checkpoint/durable_files.py", "tools/lib/disk_health.py"]


@pytest.mark.parametrize("call", ["open", "write", "fsync", "rename"])
def test_a_failed_publication_keeps_the_old_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    path = tmp_path / "status.json"
    publish_file(path, b"old")
    (tmp_path / "status.json.part").write_bytes(b"of a process that was killed")
    with monkeypatch.context() as patch:
        patch.setattr(os, call, refused)
        with pytest.raises(OSError, match="No space left"):
            publish_file(path, b"new")
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == {"status.json": b"old"}
    publish_file(path, b"new")
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == {"status.json": b"new"}


def refused(*arguments: object, **options: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_published_file_is_on_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def recorded(name: str, real: Callable[..., object]) -> Callable[..., object]:
        def call(*arguments: object) -> object:
            is_folder = name == "fsync" and stat.S_ISDIR(os.fstat(arguments[0]).st_mode)  # type: ignore[call-overload]
            calls.append("fsync folder" if is_folder else name)
            return real(*arguments)

        return call

    for name in ("write", "fsync", "rename"):
        monkeypatch.setattr(os, name, recorded(name, getattr(os, name)))
    publish_file(tmp_path / "a", b"content")
    assert calls == ["write", "fsync", "rename", "fsync folder"]


def test_locks(tmp_path: Path) -> None:
    """Two open files of one process exclude each other as two processes do; a lock ends when its file is closed."""
    path = tmp_path / "lock"
    with path.open("wb") as first, path.open("r+b") as second:
        assert [try_lock(first), try_lock(second), try_lock(second, shared=True)] == [
            LockState.ACQUIRED,
            LockState.HELD,
            LockState.HELD,
        ]
        path.rename(tmp_path / "moved")
        first.close()
        assert try_lock(second, shared=True) is LockState.ACQUIRED
        with (tmp_path / "moved").open("rb") as third:
            assert try_lock(third.fileno(), shared=True) is LockState.ACQUIRED
            assert try_lock(third) is LockState.HELD


def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unsupported = errno.ENOSYS, errno.ENOLCK, errno.EINVAL, errno.ENOTSUP
    codes = iter([*unsupported, errno.EIO])

    def flock(file: object, how: int) -> None:
        code = next(codes)
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", flock)
    with (tmp_path / "lock").open("wb") as file:
        for _ in unsupported:
            assert try_lock(file) is LockState.UNSUPPORTED
        with pytest.raises(OSError, match="Input/output error"):
            try_lock(file)
