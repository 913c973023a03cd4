"""An old start goes on while a new one has the folder: whatever it does, the folder stays as the new one has made it.

The old start is stopped before each of its calls to the system in turn. There the new one begins: it takes the folder,
looks at what is there, and saves. Then the old one goes on to its end, and not a byte may be other than before.

| the old start is stopped before ...       | what the new start finds           | what comes of the old one |
|-------------------------------------------|------------------------------------|---------------------------|
| taking the folder                         | nothing of it                      | refused: a later start    |
| the rename that makes its staging folder  | a draft, which counts for nothing  | refused: a later start    |
| any step of taking over from a third      | its folder, and the third's folder | ENOENT at its next rename |
| making staging/X                          | an empty staging folder            | ENOENT                    |
| a write, sync or close in X (any rank)    | X without a marker: removed        | writes to a removed file  |
| the rename of the staged marker           | likewise                           | ENOENT                    |
| staging/X/attempt -> X/attempt            | X with a marker: published         | ENOENT, X is the new's    |
| staging/X/COMPLETE -> X/COMPLETE          | X with a marker: published         | ENOENT, X is the new's    |
| the sync after it                         | X                                  | an error, or done         |
| removing the older attempt                | X, and the older attempt: removed  | ENOENT, or done           |
| retention: W -> staging/W.gone            | W                                  | ENOENT, W is there        |
| retention: inside of W.gone               | W.gone: removed                    | ENOENT, or done           |
| abandoning: X/attempt -> staging/X        | X as it was                        | ENOENT                    |
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import socket
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from megatron.checkpoint import lease as module
from megatron.checkpoint.errors import CheckpointError, SupersededError
from megatron.checkpoint.folder import CheckpointFolder
from megatron.checkpoint.lease import Lease, acquire_lease
from megatron.checkpoint.publish import Attempt
from megatron.checkpoint.save import CheckpointExtras, save_sharded, write_small_files
from megatron.config.launch import JobStart
from megatron.training.local_checkpoints import NodeCheckpoints
from tests.unit.checkpoint.samples import ALONE, all_of, save
from tests.unit.checkpoint.test_faults import content, is_whole, watched
from tests.unit.checkpoint.test_folder import make

AT_IT: list[bool] = []
"""Not empty while the new start is at it, whose disk is not full."""

OLD, NEW = JobStart(job="17"), JobStart(job="17", restart=1)


def save_as(lease: Lease, iteration: int, value: float) -> None:
    """A checkpoint by the start that has the folder."""
    path = CheckpointFolder(lease.folder).path(iteration)
    save_sharded(path, all_of(content(value)), {"iteration": iteration}, {}, ALONE, {"tokenizer/t.json": b"{}"}, lease)


def again(lease: Lease) -> None:
    """A step that is there is saved once more, another for the first time, and older ones are removed."""
    save_as(lease, 2, 20)
    save_as(lease, 3, 30)
    CheckpointFolder(lease.folder).retain(1, lease=lease)


def on_a_node(lease: Lease) -> None:
    """A checkpoint on a node's own disk, and the removal of the ones before."""
    nodes = NodeCheckpoints(Path(str(lease.folder)), (0,), ALONE, ALONE, lease)
    nodes.save(2, all_of(content(20)), CheckpointExtras({"iteration": 2}, {}, {"tokenizer/t.json": b"{}"}))
    assert nodes.delete_others(2) is None


def refused(lease: Lease) -> None:
    """The disk is full when the attempt has its name, and the marker has not: it is taken back."""
    real, seen = os.rename, list[str]()

    def rename(source: Any, target: Any) -> None:
        real(source, target)
        seen[:] = [Path(target).name] if lease.staging in Path(source).parents else []

    def fsync(file: int) -> None:
        if seen and seen[0].startswith("attempt-") and not AT_IT:
            seen.clear()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "rename", rename)
        patch.setattr(os, "fsync", fsync)
        save_as(lease, 2, 20)


def old_start(folder: Path, scenario: Callable[[Lease], None]) -> Exception | None:
    """Run a start of the scenario, and return its error."""
    try:
        with acquire_lease(folder, start=OLD) as lease:
            try:
                scenario(lease)
            except OSError:
                lease.check()
                raise
    except Exception as error:
        return error
    return None


def new_start(lease: Lease, saves: bool) -> list[int]:
    """Start as a run does: prove each checkpoint that is found to be whole, return their steps; then it may save."""
    runs = CheckpointFolder(lease.folder)
    found = [(found.iteration, found.manifest) for found in runs.candidates()]
    for iteration, manifest in found:
        assert manifest is not None
        assert any(is_whole(manifest, value) for value in (iteration, 10 * iteration))
    if saves:
        save_as(lease, 2, 200)
        save_as(lease, 4, 40)
        runs.retain(2, lease=lease)
    return [iteration for iteration, _ in found]


def everything(folder: Path) -> dict[str, bytes | None]:
    """All names in a folder, and the bytes of files; drafts of claims do not count."""
    paths = [path for path in folder.rglob("*") if "." not in path.relative_to(folder).parts[0][1:].removesuffix(".")]
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in paths}


def interleaved(folder: Path, at: int, scenario: Callable[[Lease], None], saves: bool) -> tuple[list[str], Any]:
    """Begin the new start before call ``at`` of the old one; the calls of that, and how it ended.

    Raises:
        AssertionError: when the new start does not find whole checkpoints, or the folder is not as it has left it.
    """
    calls: list[str] = []
    left: dict[str, bytes | None] = {}

    def before(name: str, number: int, args: tuple[Any, ...]) -> None:
        if left:
            return
        if len(calls) == at:
            calls.append("new")
            AT_IT.append(True)
            lease = stack.enter_context(acquire_lease(folder, start=NEW))
            assert new_start(lease, saves)[0] >= 2, "a whole checkpoint is lost"
            AT_IT.clear()
            left.update(everything(folder))
        elif "new" not in calls:
            calls.append(name)

    with ExitStack() as stack, watched(before):
        outcome = old_start(folder, scenario)
    if left:
        found = everything(folder)
        assert found.keys() == left.keys(), sorted(found.keys() ^ left.keys())
        assert found == left
    return calls, outcome


def calls_of(template: Path, scenario: Callable[[Lease], None]) -> list[str]:
    """The old start's calls when nothing disturbs it."""
    folder = template.with_name("undisturbed")
    shutil.copytree(template, folder)
    return interleaved(folder, -1, scenario, saves=False)[0]


def interleave(template: Path, scenario: Callable[[Lease], None], saves: bool, points: Iterable[int]) -> None:
    """Try each of these points."""
    for at in points:
        folder = template.with_name(f"at-{at}")
        shutil.copytree(template, folder)
        calls, outcome = interleaved(folder, at, scenario, saves)
        assert calls[at] == "new"
        if outcome is not None:
            printed = isinstance(outcome, SupersededError) or "in use by a later start" in str(outcome)
            assert printed or (scenario is refused and "the disk is full" in str(outcome)), repr(outcome)
        shutil.rmtree(folder)


@pytest.fixture
def template(tmp_path: Path) -> Path:
    """Two checkpoints, leftovers of earlier starts, and files without a lease."""
    folder = tmp_path / "template"
    for iteration in (1, 2):
        save(folder / f"iter_{iteration:07d}", content(iteration))
    shop = folder / ".epoch-3"
    (shop / ".epoch-2").mkdir(parents=True)
    (shop / "claim.json").write_text("{}")
    make(shop / "iter_0000009", complete=False)
    make(shop / "iter_0000001.gone")
    save(shop / ".epoch-2" / "iter_0000002", content(2))
    make(folder / "iter_0000008.tmp", complete=False)
    return folder


SCENARIOS = pytest.mark.parametrize("scenario", [again, on_a_node, refused], ids=lambda s: s.__name__)


@pytest.mark.parametrize("saves", [True, False])
def test_before_every_rename(template: Path, saves: bool) -> None:
    calls = calls_of(template, again)
    renames = [at for at, name in enumerate(calls) if name == "rename"]
    assert len(renames) > 12
    interleave(template, again, saves, renames)


@SCENARIOS
@pytest.mark.parametrize("saves", [True, False])
def test_before_some_calls(template: Path, scenario: Callable[[Lease], None], saves: bool) -> None:
    interleave(template, scenario, saves, range(5, len(calls_of(template, scenario)), 37))


@pytest.mark.slow
@SCENARIOS
@pytest.mark.parametrize("saves", [True, False])
def test_before_every_call(template: Path, scenario: Callable[[Lease], None], saves: bool) -> None:
    interleave(template, scenario, saves, range(len(calls_of(template, scenario))))


def test_without_the_fence_it_would_be_seen(template: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checked before each step and not fenced: what is stopped between the two does its harm."""
    monkeypatch.setattr(module, "take_over_staging", lambda folder, epoch: None)
    with pytest.raises(AssertionError):
        test_before_every_rename(template, saves=True)


def test_files_of_other_ranks_make_no_folder(tmp_path: Path) -> None:
    with acquire_lease(tmp_path, start=OLD) as old:
        attempt = Attempt(tmp_path / "iter_0000005", old.staging)
        attempt.start()
        with acquire_lease(tmp_path, start=NEW):
            for name in ("tensors_00003.safetensors", "tokenizer/tokenizer.json"):
                with pytest.raises(FileNotFoundError):
                    write_small_files(attempt.folder, {name: b"late"})
            assert [path.name for path in tmp_path.rglob("*")] == [".epoch-2", "claim.json"]
            with pytest.raises(SupersededError, match=r"E817 start 1 of .* is superseded by start 2, of process \d"):
                old.check()


@pytest.mark.parametrize("what", [".epoch-1", "."])
def test_a_removed_staging_folder_is_made_again(tmp_path: Path, what: str) -> None:
    folder = tmp_path / "saved"
    with acquire_lease(folder, start=OLD) as lease:
        save_as(lease, 1, 1)
        shutil.rmtree(folder / what)
        save_as(lease, 2, 2)
        assert CheckpointFolder(folder).newest()[0].state["iteration"] == 2
        with pytest.raises(CheckpointError, match="in use by process"), acquire_lease(folder, start=JobStart(job="18")):
            pass
        with acquire_lease(folder, start=NEW), pytest.raises(SupersededError):
            save_as(lease, 3, 3)


@pytest.mark.parametrize("what", [".epoch-1", "."])
def test_a_number_that_is_given_again_is_not_the_old_starts(tmp_path: Path, what: str) -> None:
    """A new start takes an emptied folder while an earlier start lives."""
    folder = tmp_path / "saved"
    with acquire_lease(folder, start=OLD) as old:
        shutil.rmtree(folder / what)
        with acquire_lease(folder, start=JobStart(job="18")) as new:
            assert new.epoch == old.epoch
            attempt = Attempt(folder / "iter_0000002", new.staging)
            attempt.start()
            with pytest.raises(SupersededError):
                save_as(old, 2, 2)
            assert Path(str(attempt.folder)).is_dir()
            save_as(new, 2, 20)


def test_no_locks_and_the_newest_has_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever it is."""

    def flock(file: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)
    with acquire_lease(tmp_path) as first, acquire_lease(tmp_path) as second:
        save_as(second, 2, 2)
        with pytest.raises(SupersededError):
            save_as(first, 1, 1)
        assert [path.name for _, path in CheckpointFolder(tmp_path).named()] == ["iter_0000002"]


@pytest.mark.parametrize(
    ("start", "taken"),
    [
        (NEW, True),
        (JobStart(job="17", step=3), True),
        (OLD, False),
        (JobStart(job="18", restart=1), False),
        (JobStart(), False),
    ],
    ids=str,
)
def test_a_later_start_supersedes_and_any_other_is_refused(tmp_path: Path, start: JobStart, taken: bool) -> None:
    with acquire_lease(tmp_path, start=OLD) as old:
        if taken:
            with acquire_lease(tmp_path, start=start) as new:
                assert new.epoch == 2
                with pytest.raises(SupersededError):
                    old.check()
            return
        sentence = r"in use by process \d+ on .* \(Slurm job 17, restart 0\) since 2.* UTC\n  fix: --save ANOTHER"
        with pytest.raises(CheckpointError, match=sentence), acquire_lease(tmp_path, start=start):
            pass
        old.check()


def test_a_lock_of_a_lost_machine_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with acquire_lease(tmp_path):
        monkeypatch.setattr(socket, "gethostname", lambda: "another")
        with (
            pytest.raises(CheckpointError, match=r"if that machine is gone, its lock expires"),
            acquire_lease(tmp_path),
        ):
            pass


def test_a_file_open_in_a_hanging_process_blocks_no_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On NFS, a file removed while a process of the same machine has it open keeps another name until it is closed."""
    real = os.unlink

    def unlink(path: Any, *, dir_fd: int | None = None) -> None:
        if Path(path).name == "open":
            os.rename(path, ".nfs1", src_dir_fd=dir_fd, dst_dir_fd=dir_fd)
        elif Path(path).name != ".nfs1":
            real(path, dir_fd=dir_fd)

    with acquire_lease(tmp_path, start=OLD) as old:
        save_as(old, 1, 1)
        for name in ("iter_0000002", "iter_0000003.gone"):
            (tmp_path / ".epoch-1" / name).mkdir()
            (tmp_path / ".epoch-1" / name / "open").touch()
        (tmp_path / "iter_0000001").rename(tmp_path / ".epoch-1/iter_0000001")
        monkeypatch.setattr(os, "unlink", unlink)
        for restart in (1, 2):
            with acquire_lease(tmp_path, start=JobStart(job="17", restart=restart)) as new:
                assert new_start(new, saves=restart == 2)[-1] == 1
        monkeypatch.setattr(os, "unlink", real)
    with acquire_lease(tmp_path):
        assert [path.name for path in tmp_path.glob(".epoch*/*")] == ["claim.json"]


def test_one_that_is_too_late_to_begin_is_refused(tmp_path: Path) -> None:
    with (
        acquire_lease(tmp_path, start=NEW),
        pytest.raises(CheckpointError, match="in use by a later start of this job"),
    ):
        ExitStack().enter_context(acquire_lease(tmp_path, start=OLD))
