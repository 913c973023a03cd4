"""The manifest of a checkpoint: its tensors and files, and the checksum of every byte; see docs/formats.md.

Does not import torch, so that folders of checkpoints can be listed in milliseconds.
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
"""Bytes of an element, by the type names of safetensors."""

JSON = dict[str, Any]


@dataclass(frozen=True)
class Chunk:
    """A box of a tensor in a file: elements in row-major order, little-endian."""

    box: Box  # position in the tensor's view
    file: str  # name inside the checkpoint
    offset: int  # first byte, from the start of the file
    bytes: int
    xxh3: str  # checksum of those bytes


@dataclass(frozen=True)
class TensorRecord:
    """A tensor in the manifest."""

    dtype: str  # name of the type in safetensors
    shape: tuple[int, ...]  # as stored
    view: tuple[int, ...]  # the shape that the chunks' boxes refer to
    chunks: tuple[Chunk, ...]

    @property
    def bytes(self) -> int:
        """Size of all elements."""
        return prod(self.view) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class FileRecord:
    """A file in the manifest; ``xxh3`` covers its first ``head`` bytes, which belong to no chunk."""

    bytes: int
    head: int
    xxh3: str


@dataclass(frozen=True)
class Manifest:
    """The content of a complete checkpoint."""

    path: Location  # the checkpoint's folder, on disk or in an object store
    version: int  # of the format
    tensors: dict[str, TensorRecord]  # by global name
    files: dict[str, FileRecord]  # every file except the manifest and the marker, by name
    state: JSON  # plain numbers of the run: counters, positions, digests
    config: JSON  # options of the run that wrote it, by group
    # Folder of the files, relative to ``path``. Uploads to an object store cannot be renamed, so each save attempt has
    # a folder of its own, and the marker names the one that was completed.
    inside: str = ""

    @classmethod
    def open(cls, path: Location) -> Manifest:
        """Read a manifest, verify it against the marker, and check the presence and size of all files.

        Raises:
            DamagedError: if the marker, the manifest or a file is missing, truncated or corrupted.
            NewerVersionError: if a newer version of this program wrote it.
            UnreachableError: if an object store does not answer.
        """
        manifest = cls.described(path)
        sizes = None
        if isinstance(manifest.folder, RemotePath):
            try:
                sizes = manifest.folder.files()  # a single request: there may be thousands of objects
            except OSError as error:
                raise unreadable(manifest.folder, error) from error
        for name in manifest.files:
            if sizes is None:
                manifest.check_file(name)
            else:
                manifest._check_size(name, sizes.get(name))
        return manifest

    @classmethod
    def described(cls, path: Location) -> Manifest:
        """Read a manifest and verify it against the marker, without checking the files; some may be on other nodes.

        Raises:
            DamagedError: if the marker or the manifest is missing, truncated or corrupted.
            NewerVersionError: if a newer version of this program wrote it.
            UnreachableError: if an object store does not answer.
        """
        path = location(path)
        mark = _read(path, MARKER)
        inside = named_by(mark)
        content = _read(path / inside if inside else path, MANIFEST)
        if mark != marker(content, inside):
            raise DamagedError(
                f"{path / MARKER} does not match {MANIFEST}: one of them has flipped bytes or is truncated"
            )
        return replace(parse(path, content), inside=inside)

    @property
    def folder(self) -> Location:
        """Folder of the files."""
        return self.path / self.inside if self.inside else self.path

    @property
    def total_bytes(self) -> int:
        """Size of all files except the manifest and the marker."""
        return sum(file.bytes for file in self.files.values())

    def read_file(self, name: str) -> bytes:
        """Return the content of a small file such as ``tokenizer/tokenizer.json``, verified by its checksum.

        Raises:
            DamagedError: if the file is missing or corrupted.
            KeyError: if the manifest does not list it.
        """
        record, content = self.files[name], _read(self.folder, name)
        if checksum(content) != record.xxh3:
            how = "is truncated" if len(content) < record.bytes else "has flipped bytes"
            raise DamagedError(f"{self.folder / name} {how} (content)")
        return content

    def prove(self, name: str) -> None:
        """Check that the chunks of a tensor partition it.

        Raises:
            DamagedError: if they do not.
        """
        record = self.tensors[name]
        problem = partition_problem(record.view, [chunk.box for chunk in record.chunks])
        if problem:
            raise DamagedError(f"{self.path}: the chunks of {name} are not a partition of it: {problem}")

    def check_file(self, name: str) -> None:
        """Check the presence and size of a file on disk.

        Raises:
            DamagedError: if it is missing or has another size.
        """
        path = on_disk(self.folder / name)
        try:
            seen = path.stat().st_size
        except OSError as error:
            raise DamagedError(f"{path} is missing ({error.strerror})") from error
        self._check_size(name, seen)

    def _check_size(self, name: str, seen: int | None) -> None:
        """Check the size of a file; ``seen`` is None if it does not exist."""
        expected = self.files[name].bytes
        if seen is None:
            raise DamagedError(f"{self.folder / name} is missing")
        if seen != expected:
            how = "truncated" if seen < expected else "too long"
            raise DamagedError(f"{self.folder / name} is {how}: {seen} bytes, not {expected}")


def marker(manifest: bytes, inside: str = "") -> bytes:
    """Return the content of the marker for a manifest; ``inside`` as in :class:`Manifest`."""
    return f"{checksum(manifest)} {inside}".strip().encode() + b"\n"


def named_by(mark: bytes) -> str:
    """Return the folder of the files that a marker names; "" if it names none or is damaged."""
    text = mark.decode(errors="replace").strip()
    try:
        return _checked_name(text.partition(" ")[2]) if " " in text else ""
    except ValueError:
        return ""


def encode(
    tensors: Mapping[str, TensorRecord], files: Mapping[str, FileRecord], state: Mapping[str, Any], config: JSON
) -> bytes:
    """Return the content of manifest.json.

    Raises:
        TypeError, ValueError: if state or config is not JSON; NaN and infinity are not.
    """
    tensor_entries = {}
    for name, record in sorted(tensors.items()):
        chunks = [
            {
                "start": chunk.box.start,
                "size": chunk.box.size,
                "file": chunk.file,
                "offset": chunk.offset,
                "bytes": chunk.bytes,
                "xxh3": chunk.xxh3,
            }
            for chunk in record.chunks
        ]
        tensor_entries[name] = vars(record) | {"chunks": chunks}
    content = {
        "format": FORMAT,
        "version": VERSION,
        "files": {name: vars(record) for name, record in sorted(files.items())},
        "tensors": tensor_entries,
        "state": state,
        "config": config,
    }
    return json.dumps(content, allow_nan=False, separators=(",", ":")).encode()


def _read(folder: Location, name: str) -> bytes:
    try:
        return (folder / name).read_bytes()
    except (FileNotFoundError, NotADirectoryError) as error:
        if name == MARKER:
            message = f"{folder} has no {MARKER}: it is not a checkpoint, or its save was interrupted"
            raise DamagedError(message) from error
        raise DamagedError(f"{folder / name} is missing") from error
    except OSError as error:
        raise unreadable(folder / name, error) from error


def parse(path: Location, content: bytes) -> Manifest:
    """Parse a manifest and check that its numbers are consistent."""
    try:
        data = json.loads(content)
        if data["format"] != FORMAT:
            raise DamagedError(f"{path / MANIFEST} has format {data['format']!r}, not {FORMAT!r}")
        if data["version"] > VERSION:
            raise NewerVersionError(
                f"{path} was written by a newer version: its format version is {data['version']}, "
                f"this program supports up to {VERSION}",
                "update this program",
            )
        files = {_checked_name(name): _file(record) for name, record in data["files"].items()}
        tensors = {name: _tensor(record, files) for name, record in data["tensors"].items()}
        return Manifest(path, data["version"], tensors, files, _values(data["state"]), _values(data["config"]))
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise DamagedError(f"{path / MANIFEST} is not valid for its version: {error!r}") from error


def dims(numbers: Iterable[int]) -> tuple[int, ...]:
    """Return a shape, offset or length read from a file as a tuple.

    Raises:
        ValueError: if it is not made of integers >= 0.
    """
    found = tuple(numbers)
    if not all(isinstance(n, int) and n >= 0 for n in found):
        raise ValueError(f"{found} are not all integers >= 0")
    return found


def _checked_name(name: str) -> str:
    """Return a file name if it is normalised and stays inside the folder it is put into."""
    path = PurePosixPath(name)
    if not path.parts or path.is_absolute() or ".." in path.parts or str(path) != name or b"\0" in os.fsencode(name):
        raise ValueError(f"{name!r} is not a valid file name in a checkpoint")
    return name


def _file(data: JSON) -> FileRecord:
    record = FileRecord(**data)
    dims((record.bytes, record.head))
    return record


def _values(data: JSON) -> JSON:
    if not isinstance(data, dict):
        raise ValueError(f"{data!r} is not an object of named values")
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
