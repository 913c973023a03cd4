"""The check of free disk space before a save, with `shutil.disk_usage` patched."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import torch

from megatron.checkpoint.folder import CheckpointFolder
from megatron.checkpoint.format import whole_box
from megatron.checkpoint.save import disk_space_problem, local_bytes
from megatron.checkpoint.tensor_file import GlobalTensor, TensorPart
from tests.unit.checkpoint.samples import save, small


def with_free(free: Callable[[], int], folder: Path, size: int) -> object:
    """Return the problem found where ``free`` returns the number of free bytes."""
    with patch.object(shutil, "disk_usage", lambda path: SimpleNamespace(free=free())):
        return disk_space_problem(folder, size)


def test_the_bytes_of_a_rank() -> None:
    part = TensorPart(whole_box((2, 3)), lambda: torch.zeros(2, 3))
    tensors = {
        "a": GlobalTensor((4, 3), (4, 3), torch.float64, (part, part)),
        "b": GlobalTensor((1,), (1,), torch.int8, ()),
    }
    assert local_bytes(tensors) == 2 * 6 * 8


def test_too_little_room_is_reported_with_both_numbers(tmp_path: Path) -> None:
    assert with_free(lambda: 3 << 20, tmp_path, 3 << 20) is None
    problem = with_free(lambda: 3 << 20, tmp_path / "not/made/yet", 4 << 20)
    assert str(problem) == (
        f"E816 {tmp_path}/not/made/yet: a checkpoint takes 4.00 MiB, and its disk has 3.00 MiB left\n"
        "  fix: free some space | --save A_FOLDER_ELSEWHERE"
    )
    save(tmp_path / "iter_0000002", small())
    assert f"--load {tmp_path} --save A_FOLDER_ELSEWHERE" in str(with_free(lambda: 1, tmp_path, 2))


def test_remains_of_an_interrupted_save_are_deleted_for_space(tmp_path: Path) -> None:
    save(tmp_path / "iter_0000002", small())
    left = tmp_path / "iter_0000004.tmp"
    left.mkdir()
    (left / "tensors_00000.safetensors").write_bytes(bytes(100))
    assert with_free(lambda: 0 if left.exists() else 100, tmp_path, 100) is None
    assert [path for _, path in CheckpointFolder(tmp_path).named()] == [tmp_path / "iter_0000002"]


def test_the_disk_itself_is_asked_and_one_that_does_not_report_has_room(tmp_path: Path) -> None:
    free = os.statvfs(tmp_path)
    assert disk_space_problem(tmp_path, 1) is None
    assert disk_space_problem(tmp_path, 2 * free.f_blocks * free.f_frsize) is not None
    with patch.object(shutil, "disk_usage", side_effect=OSError("not here")):
        assert disk_space_problem(tmp_path, 1 << 60) is None
