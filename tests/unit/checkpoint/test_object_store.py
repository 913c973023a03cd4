"""Checkpoints in an object store on this machine, with everything that goes wrong on the way there.

A request fails once or for good, is answered with half of what was asked for or with other bytes; a save and a
removal are cut off at every request they make.
"""

from __future__ import annotations

import errno
import json
import random
import re
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any

import fsspec.config
import pytest
import s3fs
import torch

from megatron.checkpoint import object_store
from megatron.checkpoint import save as save_module
from megatron.checkpoint.errors import (
    CheckpointError,
    DamagedCheckpointError,
    StorageError,
    SupersededError,
    UnreachableError,
)
from megatron.checkpoint.folder import CheckpointFolder
from megatron.checkpoint.format import MARKER, Manifest, marker_content, marker_folder, whole_box
from megatron.checkpoint.lease import acquire_lease
from megatron.checkpoint.load import CheckpointReader, load_sharded
from megatron.checkpoint.location import local_path, parse_location
from megatron.checkpoint.object_store import RemoteFileWriter, RemotePath
from megatron.checkpoint.publish import delete_checkpoint, leftovers
from megatron.checkpoint.save import save_sharded, storage_error
from megatron.checkpoint.verify import list_damage
from tests.unit.checkpoint.s3_server import Fault, Request, Store, serving, settings
from tests.unit.checkpoint.samples import ALONE, Sample, all_of, partition, same, samples, save, small
from tests.unit.checkpoint.test_faults import content, is_whole

RUN = RemotePath("s3://bucket/runs/a")


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[str, Store]]:
    """Serve a store, and configure s3fs to use no other."""
    s3fs.S3FileSystem.clear_instance_cache()
    with serving() as both, pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        patch.setitem(fsspec.config.conf, "s3", settings(both[0]))
        yield both


@pytest.fixture
def store(server: tuple[str, Store], monkeypatch: pytest.MonkeyPatch) -> Store:
    """Return an empty store, with short delays between retries."""
    found = server[1]
    found.objects.clear()
    found.uploads.clear()
    found.requests.clear()
    found.largest, found.fault = 0, lambda request: None
    monkeypatch.setattr(object_store, "FIRST_WAIT", 0.001)
    return found


@contextmanager
def failing(store: Store, fault: Fault) -> Iterator[None]:
    store.fault = fault
    try:
        yield
    finally:
        store.fault = lambda request: None


def times(fault: str, number: int, kinds: str = "") -> Fault:
    """The first requests of each of these kinds (all, if none is named) go wrong."""
    seen: dict[str, int] = {}

    def one(request: Request) -> str | None:
        if kinds and request.kind not in kinds.split():
            return None
        seen[request.kind] = seen.get(request.kind, 0) + 1
        return fault if seen[request.kind] <= number else None

    return one


# Places


@pytest.mark.parametrize("text", ["runs/a", "/runs/a", "s3:/bucket/x", "a b://c", "x:y"])
def test_paths_stay_paths(text: str) -> None:
    assert parse_location(text) == Path(text)
    assert local_path(parse_location(text)) == Path(text)
    assert parse_location(Path(text)) == Path(text)


def test_uris_are_places_in_stores() -> None:
    path = parse_location("S3://bucket/runs/a/")
    assert path == RUN
    assert str(path / "iter_0000001") == "s3://bucket/runs/a/iter_0000001"
    assert (path.name, path.parent) == ("a", RemotePath("s3://bucket/runs"))
    assert isinstance(path, RemotePath)
    assert (path.scheme, path.bucket, path.resolve()) == ("s3", "bucket", path)
    bucket = RemotePath("s3://bucket")
    assert (bucket.name, bucket.parent, (bucket / "x").parent) == ("", bucket, bucket)
    assert parse_location("file:///runs/a%20b") == Path("/runs/a b")
    with pytest.raises(TypeError, match="not on a disk"):
        local_path(path)


def test_a_library_that_is_missing_is_named() -> None:
    assert RUN.missing_library() is None
    assert RemotePath("memory://a").missing_library() is None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(object_store, "find_spec", lambda name: None)
        assert RemotePath("gs://b/x").missing_library() == (
            "gs://b/x needs a library that is not installed: gcsfs",
            "pip install gcsfs",
        )
        with pytest.raises(OSError, match="not installed: adlfs; pip install adlfs"):
            RemotePath("az://b/x").exists()
    missing = RemotePath("zz://b/x").missing_library()
    assert "zz:// is not a known kind of store" in missing[0]


def test_objects_and_what_is_around_them(store: Store) -> None:
    for name in ("iter_1/x", "iter_1/deep/y", "iter_2/x", "alone"):
        (RUN / name).write_bytes(name.encode())
    (RUN.parent / "ab").write_bytes(b"beside")
    assert RUN.folders() == [RUN / "iter_1", RUN / "iter_2"]
    assert RUN.files() == {name: len(name) for name in ("iter_1/x", "iter_1/deep/y", "iter_2/x", "alone")}
    assert (RUN / "alone").modified() > 1.7e9
    assert [(RUN / name).exists() for name in ("iter_1", "alone", "al")] == [True, True, False]
    (RUN / "alone").remove()
    (RUN / "alone").remove()
    (RUN / "iter_1").remove_all()
    (RUN / "iter_1").remove_all()
    assert [*store.objects] == ["bucket/runs/a/iter_2/x", "bucket/runs/ab"]
    assert RemotePath("s3://bucket/other").files() == {}
    assert RemotePath("s3://bucket/other").folders() == []


# What libraries raise


@pytest.mark.parametrize(
    ("error", "number"),
    [
        (FileNotFoundError("x"), errno.ENOENT),
        (PermissionError("x"), errno.EACCES),
        (type("NoCredentialsError", (Exception,), {})("x"), errno.EACCES),
        (TimeoutError(), errno.EIO),
        (OSError(errno.EBUSY, "slow down"), errno.EIO),
        (type("EndpointConnectionError", (Exception,), {})("x"), errno.EIO),
        (ValueError("x"), errno.EIO),
    ],
)
def test_every_error_becomes_one_of_the_system(error: Exception, number: int) -> None:
    with pytest.raises(OSError, match=str(RUN)) as caught, object_store.translate_errors(RUN):
        raise error
    assert (caught.value.errno, caught.value.filename) == (number, str(RUN))
    assert type(caught.value) is type(OSError(number, ""))


@pytest.mark.parametrize("failures", [1, object_store.ATTEMPTS - 1, object_store.ATTEMPTS])
def test_calls_are_repeated_later_and_later(
    failures: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    waits: list[float] = []
    monkeypatch.setattr(time, "sleep", waits.append)
    number = count()

    def act() -> str:
        with object_store.translate_errors(RUN):
            if next(number) < failures:
                raise TimeoutError("no answer")
        return "done"

    if failures < object_store.ATTEMPTS:
        assert RUN.retry(act) == "done"
    else:
        with pytest.raises(OSError, match="no answer"):
            RUN.retry(act)
    printed = capsys.readouterr().err.splitlines()
    assert len(waits) == len(printed) == min(failures, object_store.ATTEMPTS - 1)
    for i, (wait, line) in enumerate(zip(waits, printed)):
        assert 0.5 * 2**i <= wait <= 1.5 * 2**i
        assert re.match(rf"warning: {RUN}: .*no answer; attempt {i + 1} of 5, retrying in ", line)


# Saving and loading


@pytest.mark.parametrize("seed", [0, 2])
def test_any_boxes_to_the_bit(store: Store, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors, draw = samples(seed), random.Random(seed)
    monkeypatch.setattr("megatron.checkpoint.save.CHUNK_BYTES", (64, 400, 1 << 20)[seed])
    monkeypatch.setattr(object_store, "READ_AHEAD", (1, 500, 1 << 20)[seed])  # what is read ahead
    path = CheckpointFolder(RUN).path(seed)
    save_sharded(path, {n: s.entry(partition(s.view, draw, 5)) for n, s in tensors.items()}, {"seed": seed}, {}, ALONE)
    manifest = Manifest.open(path)
    wanted = {n: s.empty(partition(s.view, draw, 3)) for n, s in tensors.items()}
    load_sharded(manifest, wanted, ALONE)
    assert [n for n, filled in wanted.items() if not tensors[n].is_in(filled)] == []
    assert (manifest.state, list(list_damage(manifest))) == ({"seed": seed}, [])


def test_in_the_memory_of_a_process() -> None:
    runs = CheckpointFolder(RemotePath("memory://runs/a"))
    save(runs.path(1), content(1))
    save(runs.path(2), content(2))
    assert is_whole(runs.newest()[0], 2)
    assert runs.retain(1) == [runs.path(1)]
    assert [path for _, path in runs.named()] == [runs.path(2)]


def test_files_have_the_name_of_their_attempt_and_the_marker_comes_last(store: Store) -> None:
    path = CheckpointFolder(RUN).path(1)
    save(path, small())
    puts = [request.key for request in store.requests if request.kind == "PUT"]
    *files, manifest, last = [key.removeprefix("bucket/runs/a/iter_0000001/") for key in puts]
    attempt = manifest.partition("/")[0]
    assert re.fullmatch(r"attempt-[0-9a-f]{12}", attempt)
    assert [manifest, last] == [f"{attempt}/manifest.json", MARKER]
    assert sorted(files) == [f"{attempt}/tensors_00000.safetensors", f"{attempt}/tokenizer/tokenizer.json"]
    assert marker_folder(store.objects[puts[-1]]) == attempt
    save(path, small())
    assert Manifest.open(path).inside != attempt


def test_large_files_go_in_parts_and_come_in_ranges(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_store, "PART", 5 << 20)
    monkeypatch.setattr(object_store, "RANGE", 1 << 20)
    values = torch.arange(3 << 20, dtype=torch.float32)  # 12 MB
    tensors = {"w": Sample(values, (3 << 20,))}
    save(RUN / "iter_0000001", tensors)
    assert store.kinds["UploadPart"] == 3
    assert store.largest <= 6 << 20
    store.requests.clear()
    assert same(CheckpointReader(Manifest.open(RUN / "iter_0000001")).read("w"), values)
    assert store.kinds["GET"] >= 12


def test_a_file_that_fails_leaves_no_parts(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_store, "PART", 5 << 20)
    with suppress(ValueError), RemoteFileWriter(RUN / "x") as file:
        file.write(bytes(6 << 20))
        assert store.uploads
        raise ValueError
    del file
    assert (store.objects, store.uploads) == ({}, {})


# What may go wrong once


@pytest.mark.parametrize("fault", ["503", "500", "reset", "truncated", "slow"])
def test_transient_faults_are_retried(store: Store, fault: str, capsys: pytest.CaptureFixture[str]) -> None:
    runs = CheckpointFolder(RUN)
    kinds = "GET List" if fault == "truncated" else ""
    with failing(store, times(fault, 2, kinds)):
        save(runs.path(1), content(1))
    if fault in ("503", "500"):
        err = capsys.readouterr().err
        assert "attempt 1 of 5" in err
        assert f"{RUN}/iter_0000001" in err
    with failing(store, times(fault, 2, kinds)):
        assert is_whole(runs.newest()[0], 1)
    if fault not in ("slow", "reset"):  # a connection that is gone may be one that the library reopens
        assert "attempt 1 of 5" in capsys.readouterr().err


def test_a_failed_part_restarts_the_file(
    store: Store, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(object_store, "PART", 5 << 20)
    values = torch.arange(3 << 20, dtype=torch.float32)
    number = count()
    with failing(store, lambda r: "503" if r.kind == "UploadPart" and next(number) == 1 else None):
        save(RUN / "iter_0000001", {"w": Sample(values, (3 << 20,))})
    assert "tensors_00000.safetensors: " in capsys.readouterr().err
    assert store.uploads == {}
    assert same(CheckpointReader(Manifest.open(RUN / "iter_0000001")).read("w"), values)


def test_bytes_that_change_on_the_way_are_asked_for_again(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    runs = CheckpointFolder(RUN)
    save(runs.path(1), content(1))
    manifest = Manifest.open(runs.path(1))
    with failing(store, times("corrupt", 1, "GET")):
        reader = CheckpointReader(manifest)
        assert all(same(reader.read(name), s.tensor.view(s.view)) for name, s in content(1).items())
    assert "flipped bytes; reading again, attempt 2 of 3" in capsys.readouterr().err


# What stays wrong


def test_bytes_that_are_other_in_the_store_are_damage(store: Store) -> None:
    runs = CheckpointFolder(RUN)
    for i in (1, 2):
        save(runs.path(i), content(i))
    key = next(key for key in store.objects if "iter_0000002" in key and key.endswith(".safetensors"))
    good = store.objects[key]
    store.objects[key] = good[:-1] + bytes([good[-1] ^ 1])
    problems = list(list_damage(Manifest.open(runs.path(2))))
    assert len(problems) == 1
    assert "has flipped bytes" in problems[0]
    store.objects[key] = good[:-1]
    manifest, passed_over = runs.newest()
    assert is_whole(manifest, 1)
    assert "truncated" in str(passed_over[0].problem)
    del store.objects[key]
    assert "is missing" in str(runs.candidates()[0].problem)


MARKS = b"xyz", b"0123456789abcdef\n", b"0123456789abcdef ../x\n"


@pytest.mark.parametrize("mark", [b"", *(pytest.param(m, marks=pytest.mark.slow) for m in MARKS), b"\xff\xfe \xff\n"])
def test_a_damaged_marker_is_damage_and_removes_nothing(store: Store, mark: bytes) -> None:
    runs = CheckpointFolder(RUN)
    for i in (1, 2):
        save(runs.path(i), content(i))
    store.objects["bucket/runs/a/iter_0000002/COMPLETE"] = mark
    before = dict(store.objects)
    assert is_whole(runs.newest()[0], 1)
    assert runs.leftovers == []
    runs.retain(None)
    assert store.objects == before


@pytest.mark.parametrize(("fault", "fix"), [("503", "when the store answers"), ("403", "credentials")])
@pytest.mark.parametrize("kind", ["PUT", "List"])
def test_a_store_that_refuses_fails_the_save_only(store: Store, fault: str, fix: str, kind: str) -> None:
    runs = CheckpointFolder(RUN)
    save(runs.path(1), content(1))
    before = dict(store.objects)
    with failing(store, lambda r: fault if r.kind == kind else None), pytest.raises(StorageError) as caught:
        save(runs.path(2), content(2))
    assert "no checkpoint was written" in str(caught.value)
    assert fix in str(caught.value)
    assert f"{RUN}/iter_0000002" in str(caught.value)
    assert is_whole(runs.newest()[0], 1)
    if kind == "PUT":
        assert store.objects == before


def test_a_missing_bucket_is_reported(store: Store) -> None:
    with pytest.raises(StorageError, match="no such object or bucket") as caught:
        save(RemotePath("s3://missing/run/iter_0000001"), small())
    assert "create the bucket" in str(caught.value)
    assert "--save A_FOLDER_ELSEWHERE" in str(storage_error(OSError(errno.EIO, "x"), RUN, 0))


@pytest.mark.parametrize("fault", ["503", "403", "reset"])
def test_a_store_that_does_not_answer_is_no_damage(store: Store, fault: str) -> None:
    """Going back to an older checkpoint would lose steps that are safe."""
    runs = CheckpointFolder(RUN)
    for i in (1, 2):
        save(runs.path(i), content(i))
    manifest = Manifest.open(runs.path(2))
    with failing(store, lambda r: fault if "iter_0000002" in r.key else None):
        with pytest.raises(UnreachableError, match="iter_0000002"):
            runs.newest()
        with pytest.raises(UnreachableError):
            load_sharded(manifest, {n: s.empty([whole_box(s.view)]) for n, s in content(2).items()}, ALONE)
    with failing(store, lambda r: fault), pytest.raises(OSError, match="bucket"):
        runs.named()
    with pytest.raises(DamagedCheckpointError):  # but what is not there is not there
        Manifest.open(runs.path(3))


def test_writers_are_recorded_and_refused_without_access(store: Store) -> None:
    with acquire_lease(RUN), acquire_lease(RUN):
        assert json.loads(store.objects["bucket/runs/a/claim.json"])["epoch"] == 2
    assert CheckpointFolder(RUN).named() == []
    with (
        failing(store, lambda r: "403"),
        pytest.raises(StorageError, match="access denied"),
        acquire_lease(RUN),
    ):
        pass


def test_an_old_start_puts_no_marker_and_deletes_nothing(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new start before the old one's save, or in the middle of it."""
    runs, tensors, real = CheckpointFolder(RUN), all_of(small()), save_module.write_rank_file
    with acquire_lease(RUN) as old, ExitStack() as stack:
        save_sharded(runs.path(1), tensors, {}, {}, ALONE, lease=old)
        save_sharded(runs.path(2), tensors, {}, {}, ALONE, lease=old)

        def overtaken(*args: Any) -> Any:
            assert stack.enter_context(acquire_lease(RUN)).epoch == 2
            return real(*args)

        with monkeypatch.context() as patch:
            patch.setattr(save_module, "write_rank_file", overtaken)
            with pytest.raises(SupersededError, match=r"E817 start 1 .* by start 2"):
                save_sharded(runs.path(3), tensors, {}, {}, ALONE, lease=old)
        left = dict(store.objects)
        with pytest.raises(SupersededError):
            save_sharded(runs.path(4), tensors, {}, {}, ALONE, lease=old)
        with pytest.raises(SupersededError):
            runs.retain(1, lease=old)
        assert store.objects == left
        assert [iteration for iteration, path in runs.named() if (path / MARKER).exists()] == [2, 1]


# Cut off at every request


def put(runs: CheckpointFolder, iteration: int, value: int) -> None:
    """Save as a run does that records ``value``."""
    save(runs.path(iteration), content(value), value=value)
    runs.retain(1, newest=iteration)


def went_back(runs: CheckpointFolder) -> None:
    """Act as a run that went back: save an existing step once more, then the next; older ones are removed."""
    put(runs, 2, 20)
    put(runs, 3, 30)


def cut_off(store: Store, template: dict[str, bytes], last: int) -> int:
    """Let the store vanish after ``last`` requests of a run; which values can be gone on with."""
    runs, number = CheckpointFolder(RUN), count()
    store.objects.clear()
    store.objects.update(template)
    with failing(store, lambda r: "503" if next(number) >= last else None), suppress(OSError, CheckpointError):
        went_back(runs)
    problems = [found.problem for found in runs.candidates()]
    assert all(problem is None or problem.startswith(f"has no {MARKER}") for problem in problems)  # none is damaged
    manifest, _ = runs.newest()
    value: int = manifest.state["value"]
    assert is_whole(manifest, value)
    put(runs, 4, 4)
    assert {key.split("/")[3] for key in store.objects} == {"iter_0000004"}
    assert len(store.objects) == 4
    return value


def cut_off_at(store: Store, share: int) -> list[int]:
    """Return the newest step that is left where a run is cut off at every ``share``-th of its requests."""
    runs = CheckpointFolder(RUN)
    for i in (1, 2):
        save(runs.path(i), content(i), value=i)
    template = dict(store.objects)
    store.requests.clear()
    went_back(runs)
    total = len(store.requests)
    assert total > 30
    return [cut_off(store, template, last) for last in range(0, total, share)]


def test_cut_off_at_some_requests(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """At any moment there is a whole checkpoint, never older than the one before; a later save tidies up."""
    monkeypatch.setattr(object_store, "ATTEMPTS", 1)
    found = cut_off_at(store, 10)
    assert found == sorted(found)
    assert set(found) == {2, 20, 30}


@pytest.mark.slow
def test_cut_off_at_every_request(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_store, "ATTEMPTS", 1)
    found = cut_off_at(store, 1)
    assert found == sorted(found)
    assert set(found) == {2, 20, 30}


def test_an_attempt_whose_marker_may_be_there_is_not_removed(store: Store) -> None:
    """The marker was put and the answer lost: the checkpoint is whole, although the save has failed."""
    path = RUN / "iter_0000001"

    def lose(request: Request) -> str | None:
        if request.kind == "PUT" and request.key.endswith(MARKER):
            attempt = next(key for key in store.objects if key.endswith("manifest.json"))
            inside = attempt.split("/")[-2]
            store.objects[request.key] = marker_content(store.objects[attempt], inside)
            return "500"
        return None

    with failing(store, lose), pytest.raises(StorageError):
        save_sharded(path, all_of(content(1)), {}, {}, ALONE)
    assert is_whole(Manifest.open(path), 1)


def test_folders_without_a_marker_are_leftovers(store: Store) -> None:
    path = RUN / "iter_0000001"
    save(path, content(1))
    inside = Manifest.open(path).inside
    (path / "attempt-000000000000" / "x").write_bytes(b"x")
    (path / "notes" / "mine").write_bytes(b"x")
    (RUN / "iter_0000009" / "attempt-1" / "x").write_bytes(b"x")
    assert [*leftovers(path)] == [path / "attempt-000000000000"]
    assert CheckpointFolder(RUN).leftovers == [RUN / "iter_0000009", path / "attempt-000000000000"]
    CheckpointFolder(RUN).retain(None)
    assert {key.split("/")[4] for key in store.objects} == {MARKER, inside, "notes"}


def test_a_removal_that_is_cut_off_leaves_no_checkpoint(store: Store) -> None:
    path = RUN / "iter_0000001"
    save(path, content(1))
    with failing(store, lambda r: "403" if r.kind == "DeleteMany" else None), suppress(OSError):
        delete_checkpoint(path)
    assert f"bucket/runs/a/iter_0000001/{MARKER}" not in store.objects
    assert CheckpointFolder(RUN).leftovers == [path]
