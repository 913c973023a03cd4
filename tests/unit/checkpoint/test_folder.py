"""Which checkpoints a folder has, which may go, and what is left when a save or a removal was cut off."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from megatron.checkpoint.errors import CheckpointError, DamagedCheckpointError, NewerVersionError, StorageError
from megatron.checkpoint.folder import CheckpointFolder
from megatron.checkpoint.format import MANIFEST, MARKER, encode_manifest, marker_content
from megatron.checkpoint.publish import create_staged, discard_staged, publish_staged, recover


def make(path: Path, value: int = 0, complete: bool = True, iteration: int = 0) -> Path:
    path.mkdir(parents=True)
    content = encode_manifest({}, {}, {"value": value, "iteration": iteration}, {})
    (path / MANIFEST).write_bytes(content)
    if complete:
        (path / MARKER).write_bytes(marker_content(content))
    return path


def values(folder: Path) -> list[int]:
    """State of all that can be loaded, newest first."""
    return [found.manifest.state["value"] for found in CheckpointFolder(folder).candidates() if found.manifest]


def test_newest_first_with_reasons(tmp_path: Path) -> None:
    runs = CheckpointFolder(tmp_path)
    for iteration in (5, 20, 10_000_000):
        make(runs.path(iteration), iteration)
    make(tmp_path / "iter_0000030", complete=False)
    make(tmp_path / "iter_0000040.tmp", complete=False)
    for name in ("iter_x", "latest", "iter_0000050.txt", "iter_0000060.tmp.replaced"):
        (tmp_path / name).mkdir()
    (tmp_path / "iter_0000070").write_text("a file")
    found = runs.candidates()
    assert [f.iteration for f in found] == [10_000_000, 40, 30, 20, 5]
    assert [f.path.name for f in found][1:3] == ["iter_0000040.tmp", "iter_0000030"]
    assert [bool(f.manifest) for f in found] == [not f.problem for f in found] == [True, False, False, True, True]
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
    make(tmp_path / "iter_0000040.tmp", complete=False)
    manifest, passed_over = runs.newest()
    assert manifest.path == runs.path(20)
    assert [found.path.name for found in passed_over] == ["iter_0000040.tmp", "iter_0000030"]
    assert "does not match" in str(passed_over[1].problem)
    assert [runs.newest(step)[0].path for step in (20, 10)] == [runs.path(20), runs.path(10)]
    assert runs.newest(10)[1] == []  # those of other steps were not asked for


def test_no_newest(tmp_path: Path) -> None:
    runs = CheckpointFolder(tmp_path)
    with pytest.raises(CheckpointError, match=r"does not hold a checkpoint$"):
        runs.newest()
    make(runs.path(10), complete=False)
    with pytest.raises(CheckpointError, match=r"a checkpoint that can be used:\n  iter_0000010: has no COMPLETE"):
        runs.newest()
    with pytest.raises(CheckpointError, match=r"does not hold a checkpoint of step 3$"):
        runs.newest(3)


def test_a_checkpoint_of_a_newer_version_is_not_passed_over(tmp_path: Path) -> None:
    runs = CheckpointFolder(tmp_path)
    make(runs.path(10))
    text = (make(runs.path(20)) / MANIFEST).read_text().replace('"version":1', '"version":2')
    (runs.path(20) / MANIFEST).write_text(text)
    (runs.path(20) / MARKER).write_bytes(marker_content(text.encode()))
    with pytest.raises(NewerVersionError):
        runs.newest()
    assert runs.newest(10)[0].path == runs.path(10)


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


def test_retain_removes_leftovers_and_finishes_what_was_complete(tmp_path: Path) -> None:
    runs = CheckpointFolder(tmp_path)
    make(tmp_path / "iter_0000001.tmp", complete=False)
    make(tmp_path / "iter_0000002.tmp", 2)
    make(tmp_path / "iter_0000003", 3)
    make(tmp_path / "iter_0000003.replaced", 33)
    assert values(tmp_path) == [3, 33, 2]
    assert runs.retain(None) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["iter_0000002", "iter_0000003"]
    assert values(tmp_path) == [3, 2]


def test_every_state_a_crash_can_leave_is_settled_without_loss(tmp_path: Path) -> None:
    """All combinations of .tmp, plain and .replaced being absent, cut off or complete: the best one survives."""
    for tmp in (None, False, True):
        for plain in (None, False, True):
            for old in (None, False, True):
                folder = tmp_path / f"{tmp}-{plain}-{old}"
                folder.mkdir()
                for suffix, state, value in ((".tmp", tmp, 3), ("", plain, 2), (".replaced", old, 1)):
                    if state is not None:
                        make(folder / f"iter_0000007{suffix}", value, state)
                loadable = [value for state, value in ((tmp, 3), (plain, 2), (old, 1)) if state]
                assert values(folder) == loadable
                recover(folder / "iter_0000007")
                assert values(folder)[:1] == loadable[:1]
                make(create_staged(folder / "iter_0000007").joinpath("x")).rename(folder / "x")
                make(folder / "y", 9)
                for path in (folder / "y").iterdir():
                    path.rename(folder / "iter_0000007.tmp" / path.name)
                publish_staged(folder / "iter_0000007")
                assert values(folder)[0] == 9
                recover(folder / "iter_0000007")
                assert values(folder) == [9]


def test_what_is_not_ours_is_not_replaced(tmp_path: Path) -> None:
    final = tmp_path / "iter_0000001"
    final.mkdir()
    (final / "mp_rank_00").mkdir()
    make(tmp_path / "iter_0000001.tmp", 1)
    with pytest.raises(StorageError, match="not a checkpoint of this program"):
        create_staged(final)
    CheckpointFolder(tmp_path).retain(1)
    assert (final / "mp_rank_00").exists()
    assert values(tmp_path) == [1]


def test_abandon_puts_back_what_was_set_aside(tmp_path: Path) -> None:
    make(tmp_path / "iter_0000001.replaced", 1)
    make(tmp_path / "iter_0000001.tmp", 2)
    discard_staged(tmp_path / "iter_0000001")
    assert [path.name for path in tmp_path.iterdir()] == ["iter_0000001"]
    assert values(tmp_path) == [1]


def test_random_saves_and_retains(tmp_path: Path) -> None:
    """Against a list of numbers."""
    draw, expected = random.Random(3), set()
    runs = CheckpointFolder(tmp_path)
    for _ in range(40):
        iteration = draw.randint(1, 12)
        if iteration not in expected:
            make(runs.path(iteration), iteration)
            expected.add(iteration)
        if draw.random() < 0.3:
            last, every = draw.randint(1, 4), draw.choice([None, 3, 5])
            runs.retain(last, every)
            newest = sorted(expected)[-last:]
            expected = {i for i in expected if i in newest or (every and i % every == 0)}
        assert {found.iteration for found in runs.candidates()} == expected
