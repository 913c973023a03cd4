"""Checkpoints of a folder, their removal, and leftovers of interrupted saves and removals."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from megatron.checkpoint.errors import CheckpointError, DamagedCheckpointError, StorageError
from megatron.checkpoint.folder import CheckpointFolder
from megatron.checkpoint.format import MANIFEST, MARKER, encode_manifest, marker_content
from megatron.checkpoint.publish import Attempt


def make(path: Path, value: int = 0, complete: bool = True, iteration: int = 0) -> Path:
    path.mkdir(parents=True)
    content = encode_manifest({}, {}, {"value": value, "iteration": iteration}, {})
    (path / MANIFEST).write_bytes(content)
    if complete:
        (path / MARKER).write_bytes(marker_content(content))
    return path


def save_value(final: Path, value: int) -> None:
    """A save of nothing but a number."""
    attempt, content = Attempt(final), encode_manifest({}, {}, {"value": value}, {})
    attempt.start()
    attempt.write_manifest(content)
    attempt.publish(content)


def values(folder: Path) -> list[int]:
    """State of all that can be loaded, newest first."""
    return [found.manifest.state["value"] for found in CheckpointFolder(folder).candidates() if found.manifest]


def test_newest_first_with_reasons(tmp_path: Path) -> None:
    runs = CheckpointFolder(tmp_path)
    for iteration in (5, 20, 10_000_000):
        make(runs.path(iteration), iteration)
    make(tmp_path / "iter_0000030", complete=False)
    make(tmp_path / "iter_0000040.tmp")
    for name in ("iter_x", "latest", "iter_0000050.txt", "iter_0000060.tmp.replaced"):
        (tmp_path / name).mkdir()
    (tmp_path / "iter_0000070").write_text("a file")
    found = runs.candidates()
    assert [f.iteration for f in found] == [10_000_000, 30, 20, 5]
    assert [bool(f.manifest) for f in found] == [not f.problem for f in found] == [True, False, True, True]
    assert "has no COMPLETE" in str(found[1].problem)
    assert runs.leftovers == [tmp_path / "iter_0000040.tmp"]
    assert CheckpointFolder(tmp_path / "none").candidates() == []


def test_the_newest_that_can_be_trusted(tmp_path: Path) -> None:
    runs = CheckpointFolder(tmp_path)
    for iteration in (10, 20, 30):
        make(runs.path(iteration), iteration)
    manifest, passed_over = runs.newest()
    assert (manifest.path, passed_over) == (runs.path(30), [])
    (runs.path(30) / MANIFEST).write_text("damaged")
    make(runs.path(40), complete=False)
    manifest, passed_over = runs.newest()
    assert manifest.path == runs.path(20)
    assert [found.path.name for found in passed_over] == ["iter_0000040", "iter_0000030"]
    assert "does not match" in str(passed_over[1].problem)
    assert [runs.newest(step)[0].path for step in (20, 10)] == [runs.path(20), runs.path(10)]
    assert runs.newest(10)[1] == []  # other steps were not requested


def test_no_newest(tmp_path: Path) -> None:
    runs = CheckpointFolder(tmp_path)
    with pytest.raises(CheckpointError, match=r"does not hold a checkpoint$"):
        runs.newest()
    make(runs.path(10), complete=False)
    with pytest.raises(CheckpointError, match=r"a checkpoint that can be used:\n  iter_0000010: has no COMPLETE"):
        runs.newest()
    with pytest.raises(CheckpointError, match=r"does not hold a checkpoint of step 3$"):
        runs.newest(3)


def test_one_checkpoint_by_its_own_folder(tmp_path: Path) -> None:
    path = make(tmp_path / "best", iteration=7)
    assert CheckpointFolder(path).newest()[0].path == CheckpointFolder(path).newest(7)[0].path == path
    with pytest.raises(CheckpointError, match="of step 7, not 8"):
        CheckpointFolder(path).newest(8)
    (path / MARKER).unlink()
    with pytest.raises(DamagedCheckpointError, match="has no COMPLETE"):
        CheckpointFolder(path).newest()


@pytest.mark.parametrize(
    ("keep_last", "keep_every", "kept"),
    [
        (None, None, [70, 60, 50, 40, 30, 20, 10]),
        (2, None, [70, 60]),
        (1, 30, [70, 60, 30]),
        (3, 20, [70, 60, 50, 40, 20]),
        (99, None, [70, 60, 50, 40, 30, 20, 10]),
    ],
)
def test_retain(tmp_path: Path, keep_last: int | None, keep_every: int | None, kept: list[int]) -> None:
    runs = CheckpointFolder(tmp_path)
    for iteration in range(10, 80, 10):
        make(runs.path(iteration))
    gone = runs.retain(keep_last, keep_every)
    assert [found.iteration for found in runs.candidates()] == kept
    assert gone == [runs.path(i) for i in range(70, 0, -10) if i not in kept]


def test_a_damaged_one_does_not_count_as_kept(tmp_path: Path) -> None:
    runs = CheckpointFolder(tmp_path)
    for iteration in (10, 20, 30, 40):
        make(runs.path(iteration))
    (runs.path(40) / MANIFEST).write_text("damaged")
    (runs.path(10) / MANIFEST).write_text("damaged")
    assert runs.retain(1) == [runs.path(20), runs.path(10)]
    assert [(f.iteration, bool(f.manifest)) for f in runs.candidates()] == [(40, False), (30, True)]


def test_later_ones_that_were_passed_over_do_not_count(tmp_path: Path) -> None:
    runs = CheckpointFolder(tmp_path)
    for iteration in (10, 20, 30, 40):
        make(runs.path(iteration))
    assert runs.retain(1, newest=30) == [runs.path(20), runs.path(10)]
    assert [found.iteration for found in runs.candidates()] == [40, 30]


def test_retain_removes_leftovers_and_publishes_complete_attempts(tmp_path: Path) -> None:
    make(tmp_path / "iter_0000001.tmp", complete=False)
    make(tmp_path / "iter_0000002.tmp", 2)
    make(tmp_path / "iter_0000003", 3)
    make(tmp_path / "iter_0000003.replaced", 33)
    make(tmp_path / "iter_0000004.gone", 4)
    assert values(tmp_path) == [3]
    assert len(CheckpointFolder(tmp_path).leftovers) == 4
    assert CheckpointFolder(tmp_path).retain(None) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["iter_0000002", "iter_0000003"]
    assert values(tmp_path) == [3, 2]


def test_every_state_that_an_earlier_version_left_is_settled_without_loss(tmp_path: Path) -> None:
    """All combinations of .tmp, plain and .replaced being absent, cut off or complete: a complete one survives."""
    for tmp in (None, False, True):
        for plain in (None, False, True):
            for old in (None, False, True):
                folder = tmp_path / f"{tmp}-{plain}-{old}"
                folder.mkdir()
                for suffix, state, value in ((".tmp", tmp, 3), ("", plain, 2), (".replaced", old, 1)):
                    if state is not None:
                        make(folder / f"iter_0000007{suffix}", value, state)
                expected = [value for state, value in ((plain, 2), (tmp, 3), (old, 1)) if state][:1]
                CheckpointFolder(folder).retain(None)
                assert values(folder) == expected
                assert [path.name for path in folder.iterdir()] == ["iter_0000007"] * (bool(expected) or plain is False)
                save_value(folder / "iter_0000007", 9)
                assert values(folder) == [9]
                names = sorted(path.name for path in (folder / "iter_0000007").iterdir() if path.suffix == "")
                assert [names[0], len(names)] == [MARKER, 2]


@pytest.mark.parametrize("before", ["nothing", "flat", "attempt", "link", "dangling"])
@pytest.mark.parametrize("crash", range(12))
def test_a_publication_that_is_cut_off_is_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before: str, crash: int
) -> None:
    """At any rename or mkdir: afterwards the old or the new one counts, and no other file is left."""
    final, other = tmp_path / "run" / "iter_0000007", tmp_path / "other"
    final.parent.mkdir()
    if before == "flat":
        make(final, 1)
    elif before == "attempt":
        save_value(final, 1)
    elif before != "nothing":
        final.symlink_to(other)
    if before == "link":
        make(other, 1)
    calls = iter(range(100))

    def cut(real: Callable[..., None]) -> Callable[..., None]:
        def call(*args: object, **kwargs: object) -> None:
            if next(calls) >= crash:
                raise KeyboardInterrupt
            real(*args, **kwargs)

        return call

    with monkeypatch.context() as patch, suppress(KeyboardInterrupt):
        for name in ("rename", "mkdir", "unlink", "rmdir"):
            patch.setattr(os, name, cut(getattr(os, name)))
        save_value(final, 2)
    CheckpointFolder(final.parent).retain(None)
    left = values(final.parent)
    assert left in ([2], [1] if before in ("flat", "attempt", "link") else [])
    empty = ["iter_0000007"] if before == "dangling" else []  # the link itself
    assert [path.name for path in final.parent.iterdir()] == (["iter_0000007"] if left else empty)
    if values(final.parent) == [2]:
        assert sorted(path.name for path in final.iterdir())[0] == MARKER
        assert len([*final.iterdir()]) == 2
    assert values(tmp_path) == []
    assert before != "link" or (other / MARKER).exists()


def test_foreign_folders_are_not_replaced(tmp_path: Path) -> None:
    final = tmp_path / "iter_0000001"
    final.mkdir()
    (final / "mp_rank_00").mkdir()
    with pytest.raises(StorageError, match="not a checkpoint of this program"):
        Attempt(final).start()
    CheckpointFolder(tmp_path).retain(1)
    assert (final / "mp_rank_00").exists()
