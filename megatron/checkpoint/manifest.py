"""The manifest of a checkpoint: what is in it, where, and the checksum of every byte; see docs/formats.md.

No torch here: a folder of checkpoints can be listed in milliseconds.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import PurePosixPath
from typing import Any

from megatron.checkpoint.boxes import is_inside, partition_problem
from megatron.checkpoint.errors import DamagedError, NewerVersionError, unreadable
from megatron.checkpoint.files import checksum
from megatron.checkpoint.remote import Location, RemotePath, location, on_disk
from megatron.parallel.shard import Box

FORMAT = "megatron-pretrain"
VERSION = 1
MANIFEST = "manifest.json"
MARKER = "COMPLETE"

ITEM_BYTES = (
    dict.fromkeys(("F64", "I64", "U64"), 8)
    | dict.fromkeys(("F32", "I32", "U32"), 4)
    | dict.fromkeys(("F16", "BF16", "I16", "U16"), 2)
    | dict.fromkeys(("F8_E4M3", "F8_E5M2", "I8", "U8", "BOOL"), 1)
)
"""Bytes of an element, by the names that safetensors gives to types."""

JSON = dict[str, Any]


@dataclass(frozen=True)
class Chunk:
    """A box of a tensor in a file: its elements row by row, little-endian.

    Attributes:
        box: where it lies in the tensor's view.
        file: name inside the checkpoint.
        offset: first byte, from the start of the file.
        bytes: length.
        xxh3: checksum of those bytes.
    """

    box: Box
    file: str
    offset: int
    bytes: int
    xxh3: str


@dataclass(frozen=True)
class TensorRecord:
    """A tensor: its type by safetensors' name, its stored shape, the view that boxes refer to, and its chunks."""

    dtype: str
    shape: tuple[int, ...]
    view: tuple[int, ...]
    chunks: tuple[Chunk, ...]

    @property
    def bytes(self) -> int:
        """Size of all elements."""
        return prod(self.view) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class FileRecord:
    """A file: its length, and the checksum of its first ``head`` bytes: all that belongs to no chunk."""

    bytes: int
    head: int
    xxh3: str


@dataclass(frozen=True)
class Manifest:
    """What a whole checkpoint says of itself.

    Attributes:
        path: the checkpoint's folder, or its place in an object store.
        version: of the format.
        tensors: by global name.
        files: every file but the manifest and the marker, by name.
        state: plain numbers of the run: counters, positions, digests.
        config: the options of the run that wrote it, by group.
        inside: where in ``path`` its files are. An object store cannot rename what was uploaded, so there every attempt
            to save has a place of its own, and the marker names the one that was finished.
    """

    path: Location
    version: int
    tensors: dict[str, TensorRecord]
    files: dict[str, FileRecord]
    state: JSON
    config: JSON
    inside: str = ""

    @classmethod
    def open(cls, path: Location) -> Manifest:
        """Read a checkpoint's manifest, prove it by the marker, and check that all files are there in full length.

        Raises:
            DamagedError: when the marker, the manifest or a file is missing, cut short or changed.
            NewerVersionError: when a newer version of this program wrote it.
            UnreachableError: when an object store does not answer.
        """
        manifest = cls.described(path)
        sizes = _listed(manifest.folder) if isinstance(manifest.folder, RemotePath) else None
        for name in manifest.files:
            if sizes is None:
                manifest.check_file(name)
            else:
                manifest._check_size(name, sizes.get(name))
        return manifest

    @classmethod
    def described(cls, path: Location) -> Manifest:
        """Read a checkpoint's manifest and prove it by the marker; of the files, some may be elsewhere.

        Raises:
            DamagedError: when the marker or the manifest is missing, cut short or changed.
            NewerVersionError: when a newer version of this program wrote it.
            UnreachableError: when an object store does not answer.
        """
        path = location(path)
        mark = _read(path, MARKER)
        inside = named_by(mark)
        content = _read(path / inside if inside else path, MANIFEST)
        if mark != marker(content, inside):
            raise DamagedError(
                f"{path / MARKER} does not fit {MANIFEST}: one of them has flipped bytes or is truncated"
            )
        return replace(parse(path, content), inside=inside)

    @property
    def folder(self) -> Location:
        """Where its files are."""
        return self.path / self.inside if self.inside else self.path

    @property
    def total_bytes(self) -> int:
        """Size of all files but the manifest and the marker."""
        return sum(file.bytes for file in self.files.values())

    def read_file(self, name: str) -> bytes:
        """Content of a small file such as ``tokenizer/tokenizer.json``.

        Raises:
            DamagedError: when it is missing or changed.
            KeyError: when the checkpoint never had it.
        """
        record, content = self.files[name], _read(self.folder, name)
        if checksum(content) != record.xxh3:
            how = "is truncated" if len(content) < record.bytes else "has flipped bytes"
            raise DamagedError(f"{self.folder / name} {how} (content)")
        return content

    def prove(self, name: str) -> None:
        """Check that the chunks of a tensor are disjoint and make it up.

        Raises:
            DamagedError: when they are not.
        """
        record = self.tensors[name]
        problem = partition_problem(record.view, [chunk.box for chunk in record.chunks])
        if problem:
            raise DamagedError(f"{self.path}: the chunks of {name} do not make it up: {problem}")

    def check_file(self, name: str) -> None:
        """Check that a file on a disk is there in full length.

        Raises:
            DamagedError: when it is not.
        """
        path = on_disk(self.folder / name)
        try:
            seen = path.stat().st_size
        except OSError as error:
            raise DamagedError(f"{path} is missing ({error.strerror})") from error
        self._check_size(name, seen)

    def _check_size(self, name: str, seen: int | None) -> None:
        """Check the length of a file, None where there is no such file."""
        expected = self.files[name].bytes
        if seen is None:
            raise DamagedError(f"{self.folder / name} is missing")
        if seen != expected:
            how = "truncated" if seen < expected else "too long"
            raise DamagedError(f"{self.folder / name} is {how}: {seen} bytes, not {expected}")


def marker(manifest: bytes, inside: str = "") -> bytes:
    """Content of the marker that goes with a manifest, and says where in the checkpoint that and the files are."""
    return f"{checksum(manifest)} {inside}".strip().encode() + b"\n"


def named_by(mark: bytes) -> str:
    """Where in a checkpoint the files are, by its marker; nothing for a marker that does not say, or is damaged."""
    text = mark.decode(errors="replace").strip()
    try:
        return _safe(text.partition(" ")[2]) if " " in text else ""
    except ValueError:
        return ""


def encode(
    tensors: Mapping[str, TensorRecord], files: Mapping[str, FileRecord], state: Mapping[str, Any], config: JSON
) -> bytes:
    """The text of manifest.json.

    Raises:
        TypeError, ValueError: when state or config is no JSON; NaN and infinity are none.
    """
    content = {
        "format": FORMAT,
        "version": VERSION,
        "files": {name: vars(record) for name, record in sorted(files.items())},
        "tensors": {name: _tensor_json(record) for name, record in sorted(tensors.items())},
        "state": state,
        "config": config,
    }
    return json.dumps(content, allow_nan=False, separators=(",", ":")).encode()


def _tensor_json(record: TensorRecord) -> JSON:
    return vars(record) | {"chunks": [_chunk_json(chunk) for chunk in record.chunks]}


def _chunk_json(chunk: Chunk) -> JSON:
    place = {"start": chunk.box.start, "size": chunk.box.size}
    return place | {key: value for key, value in vars(chunk).items() if key != "box"}


def _listed(folder: RemotePath) -> dict[str, int]:
    """Bytes of the objects in a place of a store, in one listing, as there may be thousands."""
    try:
        return folder.files()
    except OSError as error:
        raise unreadable(folder, error) from error


def _read(folder: Location, name: str) -> bytes:
    try:
        return (folder / name).read_bytes()
    except (FileNotFoundError, NotADirectoryError) as error:
        if name == MARKER:
            raise DamagedError(f"{folder} has no {MARKER}: it is no checkpoint, or its save was cut off") from error
        raise DamagedError(f"{folder / name} is missing") from error
    except OSError as error:
        raise unreadable(folder / name, error) from error


def parse(path: Location, content: bytes) -> Manifest:
    """The manifest from its text, with every number checked against the others."""
    try:
        data = json.loads(content)
        if data["format"] != FORMAT:
            raise DamagedError(f"{path / MANIFEST} is of the format {data['format']!r}, not {FORMAT!r}")
        if data["version"] > VERSION:
            raise NewerVersionError(
                f"{path} was written by a newer version: its format has the number {data['version']}, "
                f"this program knows up to {VERSION}",
                "update this program",
            )
        files = {_safe(name): _file(record) for name, record in data["files"].items()}
        tensors = {name: _tensor(record, files) for name, record in data["tensors"].items()}
        return Manifest(path, data["version"], tensors, files, _values(data["state"]), _values(data["config"]))
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise DamagedError(f"{path / MANIFEST} is not what its version says: {error!r}") from error


def dims(numbers: Iterable[int]) -> tuple[int, ...]:
    """A shape, place or length as it comes from a file.

    Raises:
        ValueError: when it is not made of whole numbers from 0 on.
    """
    found = tuple(numbers)
    if not all(isinstance(n, int) and n >= 0 for n in found):
        raise ValueError(f"{found} are not all whole numbers from 0 on")
    return found


def _safe(name: str) -> str:
    """A file's name, if it is spelled plainly and stays inside whatever folder it is put into."""
    path = PurePosixPath(name)
    if not path.parts or path.is_absolute() or ".." in path.parts or str(path) != name or b"\0" in os.fsencode(name):
        raise ValueError(f"{name!r} is no name of a file in a checkpoint")
    return name


def _file(data: JSON) -> FileRecord:
    record = FileRecord(**data)
    dims((record.bytes, record.head))
    return record


def _values(data: JSON) -> JSON:
    if not isinstance(data, dict):
        raise ValueError(f"{data!r} where values are named")
    return data


def _tensor(data: JSON, files: Mapping[str, FileRecord]) -> TensorRecord:
    record = TensorRecord(data["dtype"], dims(data["shape"]), dims(data["view"]), tuple(_chunks(data["chunks"])))
    if prod(record.shape) != prod(record.view):
        raise ValueError(f"{record.view} is not a view of {record.shape}")
    for chunk in record.chunks:
        in_file = files[chunk.file].head <= chunk.offset <= files[chunk.file].bytes - chunk.bytes
        if chunk.bytes != chunk.box.numel * ITEM_BYTES[record.dtype] or not in_file:
            raise ValueError(f"{chunk} has a wrong length or lies outside its file")
        if not is_inside(chunk.box, record.view):
            raise ValueError(f"{chunk} is not inside {record.view}")
    return record


def _chunks(data: Iterable[JSON]) -> Iterable[Chunk]:
    for item in data:
        box = Box(dims(item["start"]), dims(item["size"]))
        offset, size = dims((item["offset"], item["bytes"]))
        yield Chunk(box, item["file"], offset, size, item["xxh3"])
