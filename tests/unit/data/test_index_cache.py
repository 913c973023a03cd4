"""The folder of tables: one process builds, all read the same, and damaged or outdated tables are not used."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import multiprocessing
import os
import resource
import signal
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from megatron.config.privacy import user_name
from megatron.data import index_cache as cache_module
from megatron.data.index_cache import ABOUT, BUILDING, IndexCache, Tables

FACTS = {"files": "abc", "samples": 100, "sequences": [0, 7]}
SPAWN = multiprocessing.get_context("spawn")


def example() -> Tables:
    return {"a": np.arange(1000, dtype=np.uint32), "b": np.arange(12).reshape(6, 2)}


def refuse() -> Tables:
    raise RuntimeError("built although it is there")


def same(found: Tables, expected: Tables) -> bool:
    return found.keys() == expected.keys() and all(
        found[name].dtype == table.dtype and np.array_equal(found[name], table) for name, table in expected.items()
    )


def is_mapped(table: NDArray[Any]) -> bool:
    return isinstance(table.base, np.memmap)


def fill(folder: Path) -> Path:
    """A folder with the example in it; the path of the entry."""
    cache = IndexCache(folder)
    cache.tables("order", FACTS, example, "corpus")
    assert cache.notes == []
    (entry,) = (path for path in folder.iterdir() if path.is_dir())
    return entry


# --- what is kept ---


def test_built_once_and_mapped_from_then_on(tmp_path: Path) -> None:
    cache = IndexCache(tmp_path / "new" / "folder")
    first = cache.tables("order", FACTS, example, "corpus")
    again = IndexCache(tmp_path / "new" / "folder").tables("order", FACTS, refuse, "elsewhere/corpus")
    for found in (first, again):
        assert same(found, example())
        assert all(is_mapped(table) and not table.flags.writeable for table in found.values())
    assert cache.notes == []
    (entry,) = (path for path in (tmp_path / "new" / "folder").iterdir() if path.is_dir())
    assert entry.name.startswith("order-")
    assert sorted(path.name for path in entry.iterdir()) == ["a.npy", "about.json", "b.npy", "verified.json"]
    about = json.loads((entry / ABOUT).read_text())
    assert (about["facts"], about["source"]) == (FACTS, "corpus")


# --- damage ---


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) * 2 // 3] ^= 4
    path.write_bytes(content)


def empty(path: Path) -> None:
    os.truncate(path, 0)


@pytest.mark.parametrize("name", ["a.npy", ABOUT])
@pytest.mark.parametrize("damage", [cut, flip, empty, Path.unlink])
def test_damage_is_found_reported_and_repaired(tmp_path: Path, name: str, damage: Callable[[Path], None]) -> None:
    entry = fill(tmp_path)
    damage(entry / name)
    cache = IndexCache(tmp_path)
    assert same(cache.tables("order", FACTS, example), example())
    (note,) = cache.notes
    assert f"the tables in {entry} are damaged and not used: " in note
    assert same(IndexCache(tmp_path).tables("order", FACTS, refuse), example())


def test_an_entry_of_other_facts_is_not_used(tmp_path: Path) -> None:
    """As if two lists of facts had the same fingerprint."""
    entry = fill(tmp_path)
    about = json.loads((entry / ABOUT).read_text())
    about["facts"]["samples"] += 1
    (entry / ABOUT).write_text(json.dumps(about))
    cache = IndexCache(tmp_path)
    assert same(cache.tables("order", FACTS, lambda: {"c": np.ones(1)}), {"c": np.ones(1)})
    assert "describes other tables" in cache.notes[0]


def test_the_mapped_file_is_the_verified_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = fill(tmp_path)
    proving = hashlib.file_digest

    def replaced(file: Any, *args: Any) -> Any:
        found = proving(file, *args)
        np.save(tmp_path / "other.npy", np.zeros(1000, dtype=np.uint32))
        os.replace(tmp_path / "other.npy", entry / "a.npy")
        return found

    monkeypatch.setattr(hashlib, "file_digest", replaced)
    assert same({"a": IndexCache(tmp_path).tables("order", FACTS, refuse)["a"]}, {"a": example()["a"]})


@pytest.mark.parametrize("table", [np.arange(6).reshape(2, 3).T, np.array([[7]], dtype=">i2")])
def test_tables_of_every_layout_are_mapped(tmp_path: Path, table: NDArray[Any]) -> None:
    found = IndexCache(tmp_path).tables("order", FACTS, lambda: {"c": table})["c"]
    assert is_mapped(found)
    assert same({"c": found}, {"c": table})


def test_names_are_on_the_disk_before_and_after_the_entry_gets_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power cut leaves an entry whole or not at all."""
    events: list[tuple[str, str]] = []
    syncing, renaming = os.fsync, os.rename

    def fsync(descriptor: int) -> None:
        events.append(("sync", os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}"))))
        syncing(descriptor)

    def rename(source: Path, target: Path) -> None:
        events.append(("rename", source.name))
        renaming(source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "rename", rename)
    fill(tmp_path)
    half = next(name for event, name in events if event == "rename")
    files = [("sync", name) for name in ("a.npy", "b.npy", ABOUT)]
    assert events == [*files, ("sync", half), ("rename", half), ("sync", tmp_path.name)]


# --- folders that take nothing ---


def unwritable(monkeypatch: pytest.MonkeyPatch, name: str, error: int) -> None:
    """Let a function of `os` fail as the file system would (permissions do not bind a superuser)."""

    def fail(*args: object, **kwargs: object) -> None:
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(f"os.{name}", fail)


@pytest.mark.parametrize(("call", "error"), [("mkdir", errno.EROFS), ("rename", errno.EIO)])
def test_a_folder_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, error: int
) -> None:
    unwritable(monkeypatch, call, error)
    cache = IndexCache(tmp_path)
    assert same(cache.tables("order", FACTS, example), example())
    assert cache.notes == [f"{tmp_path} cannot be used ({os.strerror(error)}): tables are built in memory"]
    assert [path for path in tmp_path.iterdir() if path.is_dir()] == [], "nothing half-written is left"
    monkeypatch.undo()
    assert is_mapped(IndexCache(tmp_path).tables("order", FACTS, example)["a"])


def test_a_folder_that_could_not_be_written_is_only_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(tmp_path)
    cache = IndexCache(tmp_path)
    with monkeypatch.context() as patch:
        unwritable(patch, "fsync", errno.ENOSPC)
        cache.tables("order", FACTS | {"samples": 1}, example)
    assert is_mapped(cache.tables("order", FACTS, refuse)["a"])
    monkeypatch.setattr(IndexCache, "_wait", refuse)
    assert not is_mapped(cache.tables("order", FACTS | {"samples": 2}, example)["a"])
    assert len(cache.notes) == 1


def test_a_folder_that_can_only_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = fill(tmp_path)
    writing = open

    def read_only(file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if set(mode) & set("wax+"):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return writing(file, mode, *args, **kwargs)

    monkeypatch.setattr("builtins.open", read_only)
    cache = IndexCache(tmp_path)
    assert is_mapped(cache.tables("order", FACTS, refuse)["a"])
    assert cache.notes == []
    empty(entry / "a.npy")
    assert same(cache.tables("order", FACTS, example), example())
    assert "damaged" in cache.notes[0]
    assert "Read-only file system" in cache.notes[1]


def test_an_entry_that_cannot_be_read_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failing disk or server is no damage; other runs may have the entry open."""
    entry = fill(tmp_path)

    def fail(path: Path) -> bytes:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(cache_module, "read_small", fail)
    cache = IndexCache(tmp_path)
    assert not is_mapped(cache.tables("order", FACTS, example)["a"])
    assert cache.notes == [f"{tmp_path} cannot be used (Input/output error): tables are built in memory"]
    monkeypatch.undo()
    assert is_mapped(IndexCache(tmp_path).tables("order", FACTS, refuse)["a"])
    assert entry.is_dir()


def test_an_error_of_the_build_is_passed_on_and_leaves_the_turn(tmp_path: Path) -> None:
    for _ in range(2):
        with pytest.raises(RuntimeError, match="built although"):
            IndexCache(tmp_path).tables("order", FACTS, refuse)
    assert is_mapped(IndexCache(tmp_path).tables("order", FACTS, example)["a"])


def test_without_locks_everyone_builds_and_the_first_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(file: object, operation: int) -> None:
        raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    cache, other = IndexCache(tmp_path), IndexCache(tmp_path)

    def build() -> Tables:
        """While this process builds, another one publishes; the same tables, as it happens in another type."""
        other.tables("order", FACTS, lambda: {"a": np.arange(1000)})
        return {"a": np.arange(1000, dtype=np.uint16)}

    assert cache.tables("order", FACTS, build)["a"].dtype == np.int64
    assert cache.notes == other.notes
    assert "has no file locks" in cache.notes[0]
    assert len([path for path in tmp_path.iterdir() if path.is_dir()]) == 1


# --- several processes ---


def ask(folder: Path, log: Path, seconds: float, patience: float = 30.0, release: Path | None = None) -> None:
    """Ask for the example; building takes ``seconds``, or until ``release`` exists; ``log`` gets begin and result."""
    cache_module.WAIT_MESSAGE_SECONDS = patience

    def build() -> Tables:
        note(log, "begin")
        time.sleep(seconds)
        while release is not None and not release.exists():
            time.sleep(0.01)
        return example()

    cache = IndexCache(folder)
    found = cache.tables("order", FACTS, build)
    note(log, f"{same(found, example())} {is_mapped(found['a'])} {len(cache.notes)}")


def note(log: Path, line: str) -> None:
    with open(log, "a") as file:
        file.write(line + "\n")


def start(*args: Any) -> BaseProcess:
    process = SPAWN.Process(target=ask, args=args, daemon=True)  # a failed test does not wait for it
    process.start()
    return process


def wait_for(log: Path, line: str, times: int = 1) -> None:
    end = time.monotonic() + 30
    while not (log.exists() and log.read_text().count(line) >= times):
        assert time.monotonic() < end, "the other process does not come to it"
        time.sleep(0.01)


def test_of_many_processes_one_builds(tmp_path: Path) -> None:
    folder, log = tmp_path / "folder", tmp_path / "log"
    processes = [start(folder, log, 0.5) for _ in range(5)]
    for process in processes:
        process.join(60)
    assert sorted(log.read_text().split("\n")[:-1]) == ["True True 0"] * 5 + ["begin"]
    assert not list(folder.glob(f"*{BUILDING}"))


def test_others_take_over_from_a_killed_process_and_clean_up(tmp_path: Path) -> None:
    folder, log, second = tmp_path / "folder", tmp_path / "log", tmp_path / "second"
    first = start(folder, log, 1000.0)
    wait_for(log, "begin")
    entry = next(folder.glob("*.lock")).with_suffix("")
    half = folder / f"{entry.name}.elsewhere.1{BUILDING}"
    half.mkdir()
    (half / "a.npy").write_bytes(b"half")
    waiting = start(folder, second, 0.0, 0.2)
    time.sleep(1.0)
    assert not second.exists(), "it waits for its turn"
    assert first.pid is not None
    os.kill(first.pid, signal.SIGKILL)
    waiting.join(30)
    first.join(30)
    assert second.read_text().split("\n")[:-1] == ["begin", "True True 0"]
    assert sorted(path.name for path in folder.iterdir()) == [entry.name, f"{entry.name}.lock"]


def test_waiting_is_reported(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder, log, second = tmp_path / "folder", tmp_path / "log", tmp_path / "second"
    release, text, end = tmp_path / "release", "", time.monotonic() + 60
    first = start(folder, log, 0.0, 30.0, release)
    wait_for(log, "begin")
    waiting = start(folder, second, 0.0, 0.3)
    while f"for process {first.pid} of {user_name(os.getuid())} to build {folder}/order-" not in text:
        assert time.monotonic() < end
        text += capfd.readouterr().err
    release.touch()
    waiting.join(30)
    first.join(30)
    assert second.read_text() == "True True 0\n"


def ask_in_vain(folder: Path, log: Path, processes: int) -> None:
    """Ask for the example of a folder whose files cannot grow, where all that waited build at the same time."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (4000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))

    def build() -> Tables:
        first = not (log.exists() and "begin" in log.read_text())
        note(log, "begin")
        wait_for(log, "asks" if first else "begin", processes)
        return example()

    cache = IndexCache(folder)
    note(log, "asks")
    found = cache.tables("order", FACTS, build)
    note(log, f"{same(found, example())} {is_mapped(found['a'])}: {cache.notes[0].rpartition('(')[2]}")


def test_processes_that_wait_for_a_failed_publisher_build_at_once(tmp_path: Path) -> None:
    folder, log = tmp_path / "folder", tmp_path / "log"
    processes = [SPAWN.Process(target=ask_in_vain, args=(folder, log, 5)) for _ in range(5)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    printed = [line for line in log.read_text().splitlines() if "True" in line]
    assert len(printed) == 5
    reasons = {"File too large", "another process could not write to it"}
    assert {*printed} == {f"True False: {reason}): tables are built in memory" for reason in reasons}
    assert list(folder.iterdir()) == []
