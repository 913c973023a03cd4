"""A manifest is read as written, verified by the marker, or refused."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron.checkpoint.errors import CheckpointError, DamagedCheckpointError, NewerVersionError
from megatron.checkpoint.format import (
    MANIFEST,
    MARKER,
    VERSION,
    FileRecord,
    Manifest,
    TensorChunk,
    TensorRecord,
    encode_manifest,
    marker_content,
    marker_folder,
)
from megatron.distributed.sharding import Box

CHUNK = TensorChunk(Box((0, 0), (2, 3)), "tensors_00000.safetensors", 16, 24, "0123456789abcdef")
TENSOR = TensorRecord("F32", (6,), (2, 3), (CHUNK,))
FILES = {"tensors_00000.safetensors": FileRecord(40, 16, "f" * 16), "tokenizer/t.json": FileRecord(2, 2, "e" * 16)}


def make(folder: Path, change: Callable[[dict[str, Any]], object] = lambda data: None) -> Path:
    """Write a checkpoint with a changed manifest and a valid marker."""
    data = json.loads(encode_manifest({"w": TENSOR}, FILES, {"iteration": 3, "loss": 0.1}, {"model": {}}))
    change(data)
    content = json.dumps(data).encode()
    (folder / "tokenizer").mkdir()
    (folder / "tokenizer" / "t.json").write_bytes(bytes(2))
    (folder / "tensors_00000.safetensors").write_bytes(bytes(40))
    (folder / MANIFEST).write_bytes(content)
    (folder / MARKER).write_bytes(marker_content(content))
    return folder


def test_open_returns_the_written_content(tmp_path: Path) -> None:
    manifest = Manifest.open(make(tmp_path))
    assert manifest == Manifest(tmp_path, VERSION, {"w": TENSOR}, FILES, {"iteration": 3, "loss": 0.1}, {"model": {}})
    assert manifest.total_bytes == 42


def chunk_of(data: dict[str, Any]) -> dict[str, Any]:
    return data["tensors"]["w"]["chunks"][0]


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data.pop("state"),
        lambda data: data.update(format="other"),
        lambda data: data.update(tensors=[]),
        lambda data: data.update(config="x"),
        lambda data: data["tensors"]["w"].update(dtype="F3"),
        lambda data: data["tensors"]["w"].update(shape=[7]),
        lambda data: data["tensors"]["w"].update(view=[2, -3]),
        lambda data: chunk_of(data).update(start=[1, 0]),
        lambda data: chunk_of(data).update(size=[2, 2]),
        lambda data: chunk_of(data).update(offset=17),
        lambda data: chunk_of(data).update(offset=15),
        lambda data: chunk_of(data).update(bytes=24.0),
        lambda data: chunk_of(data).update(file="other"),
        lambda data: data["files"]["tokenizer/t.json"].update(head=-1),
        lambda data: data.update(version=None),
        lambda data: data["tensors"]["w"].update(dtype="F3", chunks=[]),
        # shapes that no tensor can have, even without elements
        lambda data: data["tensors"]["w"].update(shape=[0, 2**62, 2**62], view=[0], chunks=[]),
        lambda data: data["tensors"]["w"].update(shape=[0, 2**63], view=[0], chunks=[]),
        lambda data: data["tensors"]["w"].update(shape=[0], view=[0, 2**62, 2**62], chunks=[]),
        lambda data: data["tensors"]["w"].update(view=[2, 3] + [1] * 7),
        lambda data: data["state"].update(deep=json.loads("[" * 40 + "]" * 40)),
        # a checkpoint of unknown origin may not choose where its files are copied to
        *(
            lambda data, name=name: data["files"].update({name: data["files"]["tokenizer/t.json"]})
            for name in ("../x", "/x", "tokenizer/x/..", "./x", "", "x\0")
        ),
    ],
)
def test_a_manifest_that_contradicts_itself(tmp_path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    with pytest.raises(DamagedCheckpointError, match=r"manifest\.json (is|has)"):
        Manifest.open(make(tmp_path, change))


def test_a_manifest_that_is_too_deep(tmp_path: Path) -> None:
    content = b"[" * 100_000
    (tmp_path / MANIFEST).write_bytes(content)
    (tmp_path / MARKER).write_bytes(marker_content(content))
    with pytest.raises(DamagedCheckpointError, match=r"manifest\.json is not valid for its version"):
        Manifest.open(tmp_path)


def test_a_newer_version_is_named(tmp_path: Path) -> None:
    with pytest.raises(NewerVersionError, match="written by a newer version: its format version is 2") as caught:
        Manifest.open(make(tmp_path, lambda data: data.update(version=VERSION + 1, tensors="in another way")))
    assert not isinstance(caught.value, DamagedCheckpointError)


def pipe(name: str) -> Callable[[Path], object]:
    """Replace a file by a pipe, which a reader that opens it waits for without end."""
    return lambda folder: ((folder / name).unlink(), os.mkfifo(folder / name))


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        (lambda folder: (folder / MARKER).unlink(), "has no COMPLETE"),
        (lambda folder: (folder / MARKER).write_text("0" * 16 + "\n"), "does not match manifest.json"),
        (lambda folder: (folder / MANIFEST).unlink(), "manifest.json is missing"),
        (lambda folder: (folder / "tokenizer" / "t.json").unlink(), "t.json is missing"),
        (lambda folder: (folder / "tokenizer" / "t.json").write_bytes(b"1"), "t.json is truncated: 1 bytes, not 2"),
        (lambda folder: (folder / "tokenizer" / "t.json").write_bytes(b"123"), "t.json is too long"),
        (pipe("tensors_00000.safetensors"), "tensors_00000.safetensors is not a regular file"),
        (pipe(MANIFEST), "manifest.json cannot be read: Not a regular file"),
        (pipe(MARKER), "COMPLETE cannot be read: Not a regular file"),
        (lambda folder: os.truncate(folder / MANIFEST, 2**33), "manifest.json cannot be read: Larger than 512.00 MiB"),
    ],
)
def test_missing_or_cut_files_are_reported(tmp_path: Path, fault: Callable[[Path], object], sentence: str) -> None:
    make(tmp_path)
    fault(tmp_path)
    with pytest.raises(DamagedCheckpointError, match=sentence):
        Manifest.open(tmp_path)


def test_a_small_file_is_proved_when_it_is_read(tmp_path: Path) -> None:
    manifest = Manifest.open(make(tmp_path))
    with pytest.raises(DamagedCheckpointError, match="flipped bytes"):
        manifest.read_file("tokenizer/t.json")
    with pytest.raises(KeyError):
        manifest.read_file("vocab.json")


def test_chunks_that_leave_a_hole(tmp_path: Path) -> None:
    manifest = Manifest.open(make(tmp_path, lambda data: data["tensors"]["w"].update(chunks=[])))
    with pytest.raises(
        DamagedCheckpointError, match=r"chunks of w are not a partition of it: element \[0, 0\] is not covered"
    ):
        manifest.check_partition("w")


@pytest.mark.parametrize("state", [{"loss": float("nan")}, {"loss": float("inf")}, {"x": {1, 2}}])
def test_state_is_json(state: dict[str, Any]) -> None:
    with pytest.raises((TypeError, ValueError)):
        encode_manifest({}, {}, state, {})


def test_an_error_ends_with_its_fixes() -> None:
    assert str(CheckpointError("a", "b", "c")) == "a\n  fix: b | c"


@pytest.mark.parametrize("inside", ["../other", "/etc", "a/../../b", "./a", ""])
def test_a_marker_names_no_folder_elsewhere(inside: str) -> None:
    assert marker_folder(f"{16 * '0'} {inside}\n".encode()) == ""
