"""Links are removed, never their targets; and a failed save keeps the previous checkpoint."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest

from megatron.checkpoint.errors import StorageError
from megatron.checkpoint.folder import CheckpointFolder
from megatron.checkpoint.format import MANIFEST, MARKER, Manifest, encode_manifest
from megatron.checkpoint.location import Location, local_path
from megatron.checkpoint.publish import Attempt, delete_checkpoint, is_complete
from megatron.config.checkpoint import CheckpointConfig
from megatron.training.resume_source import find_resume_source
from tests.unit.checkpoint.samples import refuse_renames, save, small
from tests.unit.checkpoint.test_folder import make, values


@pytest.fixture
def forked(tmp_path: Path) -> tuple[CheckpointFolder, CheckpointFolder]:
    """A run, and another whose folder links to its checkpoints."""
    one, other = CheckpointFolder(tmp_path / "one"), CheckpointFolder(tmp_path / "other")
    other.folder.mkdir()
    for iteration in (1, 2):
        make(one.path(iteration), iteration)
        other.path(iteration).symlink_to(one.path(iteration))
    return one, other


def test_retention_removes_links_only(forked: tuple[CheckpointFolder, CheckpointFolder]) -> None:
    one, other = forked
    make(other.path(3), 3)
    assert other.retain(1) == [other.path(2), other.path(1)]
    assert [path.name for path in other.folder.iterdir()] == ["iter_0000003"]
    assert values(one.folder) == [2, 1]


def test_a_link_counts_as_a_checkpoint(forked: tuple[CheckpointFolder, CheckpointFolder]) -> None:
    one, other = forked
    assert other.retain(1) == [other.path(1)]
    assert values(other.folder) == [2]
    assert values(one.folder) == [2, 1]


@pytest.mark.parametrize("dangling", [False, True])
def test_saving_replaces_a_link_and_not_its_target(
    forked: tuple[CheckpointFolder, CheckpointFolder], dangling: bool
) -> None:
    one, other = forked
    if dangling:
        delete_checkpoint(one.path(2))
    save(other.path(2), small(), value=22)
    assert not other.path(2).is_symlink()
    assert values(other.folder) == [22, 1]
    assert values(one.folder) == ([1] if dangling else [2, 1])
    assert not other.leftovers


@pytest.mark.parametrize("suffix", [".tmp", ".replaced"])
@pytest.mark.parametrize("complete", [False, True])
def test_leftovers_that_are_links(tmp_path: Path, suffix: str, complete: bool) -> None:
    elsewhere = make(tmp_path / "one" / "iter_0000001", 1, complete)
    other = CheckpointFolder(tmp_path / "other")
    make(other.path(1), 2)
    (other.folder / f"iter_0000001{suffix}").symlink_to(elsewhere)
    other.retain(None)
    assert [path.name for path in other.folder.iterdir()] == ["iter_0000001"]
    assert values(other.folder) == [2]
    assert is_complete(elsewhere) is complete
    assert (elsewhere / MANIFEST).exists()


def test_a_failed_save_puts_the_link_back(
    forked: tuple[CheckpointFolder, CheckpointFolder], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = forked
    refuse_renames(monkeypatch, lambda target: target.name.startswith("attempt-"))
    with pytest.raises(StorageError, match="Input/output error"):
        save(other.path(2), small(), value=22)
    assert other.path(2).is_symlink()
    assert values(other.folder) == values(one.folder) == [2, 1]
    assert not other.leftovers


def test_files_that_a_failed_save_cannot_delete_are_not_published_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The marker is staged, the disk refuses the next rename, and then the deletion in the middle."""
    runs = CheckpointFolder(tmp_path)

    def rmtree(path: Path) -> None:
        next(Path(path).rglob(MANIFEST)).unlink()
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        refuse_renames(patch, lambda target: target.parent == runs.path(2))
        patch.setattr(shutil, "rmtree", rmtree)
        with pytest.raises(StorageError):
            save(tmp_path / "iter_0000002", small(), value=2)
    runs.retain(None)
    assert [*tmp_path.iterdir()] == []


def test_a_repaired_attempt_replaces_the_damaged_one_of_its_name(tmp_path: Path) -> None:
    """As a node does that fetches a checkpoint whose copy on its disk is damaged."""
    final = make(tmp_path / "iter_0000001", 1)
    good = Manifest.read(final)
    manifest = (good.folder / MANIFEST).read_bytes()
    (good.folder / MANIFEST).write_bytes(b"damaged")
    attempt = Attempt(final, None, good.inside)
    attempt.start()
    for name in good.files:
        shutil.copy(good.folder / name, local_path(attempt.folder) / name)
    attempt.write_manifest(manifest)
    attempt.publish(manifest)
    assert values(tmp_path) == [1]
    assert not CheckpointFolder(tmp_path).leftovers


def test_a_copy_without_an_attempt_folder_replaces_another_save_of_its_step(tmp_path: Path) -> None:
    """A checkpoint of version 1.0, which has its files beside the marker."""
    final = make(tmp_path / "iter_0000001", 1)
    manifest = encode_manifest({}, {}, {"value": 2, "iteration": 1}, {})
    copy = Attempt(final, None, name="")
    copy.start()
    copy.write_manifest(manifest)
    copy.publish(manifest)
    assert values(tmp_path) == [2]


@pytest.mark.parametrize("linked", [False, True])
def test_an_attempt_that_could_not_be_withdrawn_is_garbage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, linked: bool
) -> None:
    """The disk refuses all renames from the one on that would publish the marker; then the program starts again."""
    runs, elsewhere = CheckpointFolder(tmp_path / "run"), make(tmp_path / "other", 1)
    runs.folder.mkdir()
    if linked:
        runs.path(2).symlink_to(elsewhere)
    targets: list[Path] = []
    with monkeypatch.context() as patch:
        refuse_renames(patch, lambda target: targets.append(target) or runs.path(2) / MARKER in targets)
        with pytest.raises(StorageError):
            save(runs.path(2), small(), value=2)
    assert find_resume_source(CheckpointConfig(save=str(runs.folder))).fresh, "no start refuses because of it"
    runs.retain(None)
    assert values(runs.folder) == ([1] if linked else [])
    assert runs.path(2).is_symlink() == linked
    assert len([*runs.folder.iterdir()]) == linked


def test_a_reader_passes_over_a_first_save_that_is_being_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(tmp_path / "iter_0000001", 1)
    seen = list[Location]()

    def look(target: Path) -> bool:
        if target == tmp_path / "iter_0000002" / MARKER:
            seen.extend(find_resume_source(CheckpointConfig(load=str(tmp_path))).paths)
        return False

    refuse_renames(monkeypatch, look)
    save(tmp_path / "iter_0000002", small(), value=2)
    assert tmp_path / "iter_0000001" in seen
    assert values(tmp_path) == [2, 1]


def test_a_complete_save_whose_name_is_taken_is_kept(tmp_path: Path) -> None:
    staged = make(tmp_path / "iter_0000001", 1)
    staged.rename(tmp_path / "iter_0000001.tmp")
    (tmp_path / "iter_0000001").mkdir()
    (tmp_path / "iter_0000001" / "mp_rank_00").touch()
    with pytest.raises(StorageError, match="exists and is not a checkpoint of this program"):
        CheckpointFolder(tmp_path).retain(None)
    assert is_complete(tmp_path / "iter_0000001.tmp")


def test_both_attempts_are_kept_if_the_new_marker_is_not_flushed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power failure may bring the old marker back."""
    final = tmp_path / "iter_0000001"
    save(final, small(), value=1)
    marker, real = (final / MARKER).read_bytes(), os.fsync

    def fsync(file: int) -> None:
        if (final / MARKER).read_bytes() != marker and os.readlink(f"/proc/self/fd/{file}") == str(final):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(file)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        with pytest.raises(StorageError):
            save(final, small(), value=2)
    assert values(tmp_path) == [2]
    (final / MARKER).write_bytes(marker)
    assert values(tmp_path) == [1]
