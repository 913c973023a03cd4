"""What a file system need not be able to do, and what it must."""

from __future__ import annotations

import errno
import os
import re
import stat
from pathlib import Path

import pytest

from megatron.checkpoint.errors import StorageError
from megatron.checkpoint.fencing import acquire_lease
from megatron.checkpoint.format import Manifest
from megatron.checkpoint.lease import LEASE_FILE
from megatron.checkpoint.verify import list_damage
from tests.unit.checkpoint.samples import save, small


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


def refuse_renames(patch: pytest.MonkeyPatch, name: str) -> None:
    """Let the disk be full whenever something is to be called ``name``."""
    real = os.rename

    def rename(source: Path, target: Path) -> None:
        if Path(target).name == name:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(target))
        real(source, target)

    patch.setattr(os, "rename", rename)


@pytest.mark.parametrize("moment", ["COMPLETE", "iter_0000002"])  # the second has the marker, and goes nevertheless
@pytest.mark.parametrize("older", [True, False])
def test_a_save_elsewhere_goes_on_from_the_older_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str, older: bool
) -> None:
    if older:
        save(tmp_path / "iter_0000001", small())
    refuse_renames(monkeypatch, moment)
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
    assert str(caught.value).endswith(
        f"no checkpoint can be written to {tmp_path}\n  fix: {load}--save A_FOLDER_ELSEWHERE"
    )
