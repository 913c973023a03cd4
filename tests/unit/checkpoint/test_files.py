"""What a file system need not be able to do, and what it must."""

from __future__ import annotations

import errno
import os
import re
import stat
from pathlib import Path

import pytest

from megatron.checkpoint.errors import StorageError
from megatron.checkpoint.manifest import Manifest
from megatron.checkpoint.verify import damage
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
    assert list(damage(Manifest.open(tmp_path / "runs" / "iter_0000001"))) == []


@pytest.mark.parametrize(("code", "folders"), [(errno.EINVAL, False), (errno.ENOTSUP, False), (errno.EIO, True)])
def test_every_other_sync_must_succeed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, folders: bool
) -> None:
    refuse_sync(monkeypatch, code, folders)
    with pytest.raises(StorageError, match=re.escape(os.strerror(code))):
        save(tmp_path / "runs" / "iter_0000001", small())
