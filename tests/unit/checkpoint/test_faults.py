"""Faults of a checkpoint while it is written, and afterwards: the run resumes from a complete one.

A save is cut off by SIGKILL before each call it makes to the system, and in the middle of each write; every call is
made to fail; every file is truncated, changed and removed.
"""

from __future__ import annotations

import errno
import itertools
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.checkpoint import publish
from megatron.checkpoint.errors import CheckpointError, DamagedCheckpointError, StorageError, strip_folder
from megatron.checkpoint.folder import CheckpointFolder
from megatron.checkpoint.format import MANIFEST, MARKER, Manifest, marker_content, whole_box
from megatron.checkpoint.load import CheckpointReader, load_sharded
from megatron.checkpoint.verify import list_damage
from tests.kit.watched_calls import watched_calls
from tests.unit.checkpoint.samples import ALONE, Sample, attempt, same, save, small

FILES = ["tensors_00000.safetensors", "tokenizer/tokenizer.json", MANIFEST, MARKER]


def file_of(path: Path, name: str) -> Path:
    """A file of a checkpoint."""
    return path / name if name == MARKER else attempt(path) / name


def content(value: float) -> dict[str, Sample]:
    """Return tensors whose values identify the save that wrote them."""
    return {name: Sample(sample.tensor + value, sample.view) for name, sample in small().items()}


def is_whole(manifest: Manifest, value: float) -> bool:
    reader = CheckpointReader(manifest)
    return not list(list_damage(manifest)) and all(
        same(reader.read(name), sample.tensor.view(sample.view)) for name, sample in content(value).items()
    )


def watched(before: Callable[[str, int, tuple[Any, ...]], None]) -> AbstractContextManager[None]:
    """Ask ``before(name, number, arguments)`` before each call to the file system, counted from 0."""
    numbers = itertools.count()
    return watched_calls(lambda path: True, lambda name, path, args: before(name, next(numbers), args))


def again(runs: CheckpointFolder) -> None:
    """Act as a run that went back: save an existing iteration once more, and remove an older one."""
    save(runs.path(2), content(20))
    runs.retain(1)


def onward(runs: CheckpointFolder) -> None:
    """Save as a run does first of all: into a folder that does not exist yet."""
    save(CheckpointFolder(runs.folder / "new").path(3), content(30))


SCENARIOS = [again, onward]


@pytest.fixture
def template(tmp_path: Path) -> Path:
    """A folder with two checkpoints."""
    runs = CheckpointFolder(tmp_path / "template")
    for iteration in (1, 2):
        save(runs.path(iteration), content(iteration))
    return runs.folder


def recorded(template: Path, scenario: Callable[[CheckpointFolder], None]) -> list[tuple[str, tuple[Any, ...]]]:
    """The calls of a scenario that nothing disturbs."""
    calls: list[tuple[str, tuple[Any, ...]]] = []
    shutil.copytree(template, template.with_name("recorded"))
    with watched(lambda name, _, args: calls.append((name, args))):
        scenario(CheckpointFolder(template.with_name("recorded")))
    return calls


def killing(target: int, torn: bool = True) -> Callable[[str, int, tuple[Any, ...]], None]:
    """Kill this process before a call; in the middle of it, if that is a write and shall be ``torn``."""

    def before(name: str, number: int, args: tuple[Any, ...]) -> None:
        if number == target:
            if torn and name == "write":
                os.pwrite(args[0], memoryview(args[1])[: len(args[1]) // 2], os.lseek(args[0], 0, os.SEEK_CUR))
            os.kill(os.getpid(), signal.SIGKILL)

    return before


def killed_at(target: int, act: Callable[[], None], torn: bool = True) -> int:
    """Act in a forked process that kills itself at a call; returns how it ended."""
    child = os.fork()
    if not child:
        with watched(killing(target, torn)):
            act()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def check_survivors(runs: CheckpointFolder) -> None:
    """Check that the newest candidate is complete, the others have a reason, and saving and removing still work."""
    for folder in (runs, CheckpointFolder(runs.folder / "new")):
        found = folder.candidates()
        assert all(f.manifest or "has no COMPLETE" in str(f.problem) for f in found)
        for f in found:
            if f.manifest:
                assert any(is_whole(f.manifest, value) for value in (f.iteration, 10 * f.iteration))
    assert any(f.manifest and f.iteration == 2 for f in runs.candidates())
    save(runs.path(2), content(22))
    runs.retain(1)
    assert [path.name for path in runs.folder.iterdir() if path.name != "new"] == ["iter_0000002"]
    assert is_whole(Manifest.open(runs.path(2)), 22)


def kill(template: Path, scenario: Callable[[CheckpointFolder], None], targets: list[int], torn: bool) -> None:
    for target in targets:
        folder = template.with_name(f"kill{target}")
        shutil.copytree(template, folder)
        assert killed_at(target, partial(scenario, CheckpointFolder(folder)), torn) == -signal.SIGKILL
        check_survivors(CheckpointFolder(folder))
        shutil.rmtree(folder)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda s: s.__name__)
def test_killed_at_one_call_of_each_kind(template: Path, scenario: Callable[[CheckpointFolder], None]) -> None:
    calls, draw = recorded(template, scenario), random.Random(5)
    kinds = {name for name, _ in calls}
    assert kinds >= {"open", "write", "fsync", "close", "mkdir", "rename"}
    kill(template, scenario, [draw.choice([i for i, c in enumerate(calls) if c[0] == kind]) for kind in kinds], True)


@pytest.mark.slow
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda s: s.__name__)
@pytest.mark.parametrize("torn", [False, True])
def test_killed_at_every_call(template: Path, scenario: Callable[[CheckpointFolder], None], torn: bool) -> None:
    calls = recorded(template, scenario)
    kill(template, scenario, [i for i, call in enumerate(calls) if not torn or call[0] == "write"], torn)


def test_the_marker_is_made_when_all_else_is_on_the_disk(template: Path) -> None:
    """Since a power cut cannot be tried: files are synced after their last write, then folders, then the marker."""
    events: list[tuple[str, str]] = []
    with watched_calls(lambda path: True, lambda name, path, args: events.append((name, path))):
        save(CheckpointFolder(template / "new").path(3), content(3))
    done = [(name, Path(path).name) for name, path in events if name in ("write", "fsync", "rename")]
    names = ["tensors_00000.safetensors", "tokenizer.json", MANIFEST, f"{MARKER}.part"]
    for name in names:
        syncs = [i for i, event in enumerate(done) if event == ("fsync", name)]
        assert syncs[-1] > max(i for i, event in enumerate(done) if event == ("write", name))
    files = [done.index(("fsync", name)) for name in names[:3]]
    (inner,) = {name for _, name in done if name.startswith("attempt-")}
    moved = done.index(("rename", inner))
    synced = max(i for i, event in enumerate(done) if event == ("fsync", inner))
    assert ("fsync", "tokenizer") in done[:synced]
    assert max(files) < synced < moved
    assert done.index(("fsync", f"{MARKER}.part")) < moved
    assert done[moved:] == [("rename", inner), ("fsync", "iter_0000003"), ("rename", MARKER), ("fsync", "iter_0000003")]
    # or a power cut would take the whole --save folder with it
    assert {("fsync", template.name), ("fsync", "new")} <= {*done[:moved]}


def failing(target: int, code: int, once: bool) -> Callable[[str, int, tuple[Any, ...]], None]:
    def before(name: str, number: int, args: tuple[Any, ...]) -> None:
        if number == target or (number > target and not once and name == "write"):
            raise OSError(code, os.strerror(code))

    return before


@pytest.mark.parametrize("once", [True, False])
def test_every_call_fails(template: Path, once: bool) -> None:
    """Nothing is published, nothing is left, and what was there is as it was; or the call was not needed."""

    def overwrite(runs: CheckpointFolder) -> None:
        save(runs.path(2), content(20))

    calls, codes = recorded(template, overwrite), [errno.ENOSPC, errno.EIO, errno.EROFS]
    marked = max(i for i, (name, args) in enumerate(calls) if name == "rename" and Path(args[0]).name == MARKER)
    assert [name for name, _ in calls[marked + 1 : marked + 3]] == ["open", "fsync"]
    for target, (name, _) in enumerate(calls):
        if name == "close" or (name != "write" and not once):
            continue  # files are synced before they are closed
        folder, code = template.with_name(f"fail{target}"), codes[target % 3]
        shutil.copytree(template, folder)
        runs = CheckpointFolder(folder)
        try:
            with watched(failing(target, code, once)):
                overwrite(runs)
            value, text = 20, ""
        except StorageError as error:
            value, text = 2, str(error)
        why = "the disk is full" if code == errno.ENOSPC else os.strerror(code)
        assert value == 20 or re.search(rf"(iter_0000002|fail{target}).*: {why} \(rank 0\)", text)
        newest = next(found.manifest for found in runs.candidates() if found.manifest)
        assert newest.path.name == "iter_0000002"
        # Where only the last flush failed, the marker is in place: the save counts, though it was reported as failed.
        flushed = not (once and marked < target <= marked + 2)
        assert is_whole(newest, value if flushed else 20)
        names = {path.name for path in folder.iterdir()}
        assert {"iter_0000001", "iter_0000002"} <= names
        assert value == 20 or names == {"iter_0000001", "iter_0000002"}
        assert len([*newest.path.iterdir()]) == 2 or value == 20 or not flushed
        runs.retain(None)
        assert len([*newest.path.iterdir()]) == 2
        shutil.rmtree(folder)


def test_a_file_that_may_not_grow(template: Path) -> None:
    """Not a made-up error: the system itself ends the write after 300 bytes."""
    runs = CheckpointFolder(template)
    child = os.fork()
    if not child:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (300, 300))
        try:
            save(runs.path(3), content(3))
        except StorageError as error:
            os._exit(0 if os.strerror(errno.EFBIG) in str(error) else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert [(f.iteration, f.problem) for f in runs.candidates()] == [(2, None), (1, None)]


def test_a_disk_that_is_full(tmp_path: Path) -> None:
    """A real one, where the system lets us make it; then one that may only be read."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", disk], capture_output=True, check=False)
    if mount.returncode:
        pytest.skip("a file system may not be mounted here")
    try:
        runs = CheckpointFolder(disk)
        save(runs.path(1), content(1))
        large = {"w": Sample(torch.ones(20_000), (20_000,))}
        with pytest.raises(StorageError, match=r"tensors_00000\.safetensors: the disk is full \(rank 0\)"):
            save(runs.path(2), large)
        subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
        with pytest.raises(StorageError, match="Read-only file system"):
            save(runs.path(3), content(3))
        assert [path.name for path in disk.iterdir()] == ["iter_0000001"]
        assert is_whole(Manifest.open(runs.path(1)), 1)
    finally:
        subprocess.run(["umount", disk], check=True)


def load(runs: CheckpointFolder) -> tuple[int, list[str]]:
    """Start as a run does: return the newest readable checkpoint, and why newer ones were not read."""
    reasons = []
    for found in runs.candidates():
        if found.manifest is None:
            reasons.append(str(found.problem))
            continue
        wanted = {name: sample.empty([whole_box(sample.view)]) for name, sample in small().items()}
        try:
            found.manifest.read_file("tokenizer/tokenizer.json")
            load_sharded(found.manifest, wanted, ALONE)
        except DamagedCheckpointError as error:
            reasons.append(str(error))
            continue
        assert all(content(found.iteration)[name].is_in(entry) for name, entry in wanted.items())
        return found.iteration, reasons
    return 0, reasons


@pytest.mark.parametrize("name", FILES)
def test_truncated(template: Path, name: str) -> None:
    path = file_of(CheckpointFolder(template).path(2), name)
    data = path.read_bytes()
    for length in {n for n in (0, 1, 8, len(data) // 2, len(data) - 1) if n < len(data)}:
        path.write_bytes(data[:length])
        iteration, (reason,) = load(CheckpointFolder(template))
        assert iteration == 1
        assert name in reason
        assert "truncated" in reason


@pytest.mark.parametrize("name", FILES)
def test_removed(template: Path, name: str) -> None:
    (file_of(CheckpointFolder(template).path(2), name)).unlink()
    iteration, (reason,) = load(CheckpointFolder(template))
    assert iteration == 1
    assert name in reason


@pytest.mark.parametrize("name", FILES)
def test_every_byte_is_covered(template: Path, name: str) -> None:
    """Flip a bit of each byte in turn (of some, in a large file): it is noticed, and the file named."""
    folder = CheckpointFolder(template).path(2)
    path = file_of(folder, name)
    data = path.read_bytes()
    draw = random.Random(7)
    for place in range(len(data)) if len(data) < 500 else draw.sample(range(len(data)), 500):
        changed = bytearray(data)
        changed[place] ^= 1 << draw.randrange(8)
        path.write_bytes(changed)
        try:
            found = list(list_damage(Manifest.open(folder)))
        except CheckpointError as error:
            found = [str(error)]
        assert len(found) == 1
        assert name in found[0]
        assert "flipped bytes" in found[0] or "is missing" in found[0]
        if place % 97 == 0:
            iteration, (reason,) = load(CheckpointFolder(template))
            assert iteration == 1
            assert strip_folder(folder, reason) == strip_folder(folder, found[0])
    path.write_bytes(data)
    assert load(CheckpointFolder(template)) == (2, [])


def test_the_damaged_tensor_is_named(template: Path) -> None:
    manifest = Manifest.open(CheckpointFolder(template).path(2))
    chunk = manifest.tensors["optim.exp_avg.a"].chunks[0]
    with (manifest.folder / chunk.file).open("r+b") as file:
        file.seek(chunk.offset)
        file.write(b"flip")
    (reason,) = list_damage(manifest)
    assert reason == f"{manifest.folder / chunk.file} has flipped bytes (tensor optim.exp_avg.a)"


def test_bytes_that_no_checksum_speaks_for_are_found(template: Path) -> None:
    """A manifest that knows nothing of one of the tensors in a file, and whose marker fits."""
    folder = CheckpointFolder(template).path(2)
    inner = attempt(folder)
    data = json.loads((inner / MANIFEST).read_bytes())
    (chunk,) = data["tensors"].pop("a")["chunks"]
    (inner / MANIFEST).write_text(json.dumps(data))
    (folder / MARKER).write_bytes(marker_content((inner / MANIFEST).read_bytes(), inner.name))
    (reason,) = list_damage(Manifest.open(folder))
    start, end = chunk["offset"], chunk["offset"] + chunk["bytes"]
    assert reason == f"{inner / chunk['file']}: bytes {start} to {end} have no checksum, or two"


@pytest.mark.parametrize("name", ["tensors_00000.safetensors", "tokenizer/tokenizer.json"])
@pytest.mark.parametrize(
    ("change", "seen"), [(os.unlink, "is missing"), (lambda path: os.truncate(path, 1), "is truncated")]
)
def test_a_save_disturbed_by_another_process_is_not_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, change: Callable[[Path], None], seen: str
) -> None:
    """Two processes save the same step: one recreates the folder while the other writes."""
    path, real = tmp_path / "iter_0000002", publish.write_file
    save(path, small(), iteration=2)

    def disturbed(file: Path, content: bytes) -> None:
        if file.name == MANIFEST:
            change(file.parent / name)
        real(file, content)

    monkeypatch.setattr(publish, "write_file", disturbed)
    with pytest.raises(StorageError, match=rf"{re.escape(name)} {seen}.*: another process writes to"):
        save(path, small(), iteration=3)
    assert [found.name for found in tmp_path.iterdir()] == [path.name]
    manifest = Manifest.open(path)
    assert manifest.state == {"iteration": 2}
    assert list(list_damage(manifest)) == []
