"""Links are taken away, never what they lead to; and a save that fails leaves the best there was."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from megatron.checkpoint import publish as module
from megatron.checkpoint.folder import CheckpointFolder
from megatron.checkpoint.publish import delete_checkpoint, discard_staged, is_complete, publish_staged, recover
from tests.unit.checkpoint.samples import save, small
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
def test_saving_replaces_a_link_and_not_what_it_leads_to(
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
    recover(other.path(1))
    assert [path.name for path in other.folder.iterdir()] == ["iter_0000001"]
    assert values(other.folder) == [1 if complete and suffix == ".tmp" else 2]
    assert is_complete(elsewhere) is complete
    assert (elsewhere / module.MANIFEST).exists()


def test_a_failed_save_leaves_the_best_there_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where crashes have left an older one too, it is not that which survives."""
    final = tmp_path / "iter_0000007"
    for suffix, value in ((".tmp", 3), ("", 2), (".replaced", 1)):
        make(tmp_path / f"iter_0000007{suffix}", value)

    def sync(path: Path) -> None:
        if path == tmp_path:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(module, "sync_folder", sync)
    with pytest.raises(OSError, match="Input/output error"):
        publish_staged(final)
    assert values(tmp_path) == [3, 2]
    discard_staged(final)
    assert values(tmp_path) == [2]
