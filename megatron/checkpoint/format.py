"""The checkpoint format: manifest, tensors, and arithmetic of boxes; see docs/formats.md.

A checkpoint stores global tensors, independent of the layout that wrote them. The manifest lists every tensor with
its stored shape, the view that boxes refer to, and its chunks: boxes of the view with their place in a file and a
checksum. Boxes can be intersected, split, and checked to partition a tensor.
"""

from __future__ import annotations

import json
import os
import re
import reprlib
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice, product
from math import prod
from operator import mul
from pathlib import Path, PurePosixPath
from stat import S_ISREG
from typing import Any

from megatron.checkpoint.durable_files import checksum
from megatron.checkpoint.errors import DamagedCheckpointError, NewerVersionError, read_error
from megatron.checkpoint.location import Location, local_path, parse_location
from megatron.config.files import raise_if_deep, read_small
from megatron.config.schemes import MEGATRON_PREFIX
from megatron.distributed.sharding import Box

View = tuple[int, ...]


def whole_box(view: View) -> Box:
    """Return the box that covers a tensor of shape ``view``."""
    return Box((0,) * len(view), view)


def box_end(box: Box) -> tuple[int, ...]:
    """Return the exclusive end index of the box, per dimension."""
    return tuple(start + size for start, size in zip(box.start, box.size))


def is_inside(box: Box, view: View) -> bool:
    """Return True if the box is valid for a tensor of shape ``view``."""
    return len(box.start) == len(box.size) == len(view) and all(
        start >= 0 <= size <= limit - start for start, size, limit in zip(box.start, box.size, view)
    )


def intersect(a: Box, b: Box) -> Box | None:
    """Return the intersection of two boxes; None if it is empty."""
    start = tuple(map(max, a.start, b.start))
    size = tuple(min(end_a, end_b) - first for end_a, end_b, first in zip(box_end(a), box_end(b), start))
    return Box(start, size) if all(n > 0 for n in size) else None


class BoxIndex:
    """An index over boxes of a tensor that finds those intersecting a given box without comparing all pairs.

    Boxes are sorted by their start along the first dimension, along which tensors are split first.
    """

    def __init__(self, boxes: Iterable[Box]) -> None:
        self._sorted = sorted(enumerate(boxes), key=lambda item: _rows(item[1])[0])
        rows = [_rows(box) for _, box in self._sorted]
        self._starts = [start for start, _ in rows]
        self._longest = max((end - start for start, end in rows), default=0)

    def shared(self, box: Box) -> Iterator[tuple[int, Box]]:
        """Yield the position (in the order given) of each box that intersects ``box``, and the intersection."""
        start, end = _rows(box)
        candidates = slice(bisect_right(self._starts, start - self._longest), bisect_left(self._starts, end))
        for number, other in self._sorted[candidates]:
            found = intersect(other, box)
            if found is not None:
                yield number, found


def _rows(box: Box) -> tuple[int, int]:
    """Return start and end along the first dimension; a scalar counts as one row."""
    return (box.start[0], box.start[0] + box.size[0]) if box.start else (0, 1)


def relative_box(box: Box, outer: Box) -> Box:
    """Return ``box`` in coordinates relative to the start of ``outer``."""
    return Box(tuple(a - b for a, b in zip(box.start, outer.start)), box.size)


def split_box(box: Box, limit: int) -> Iterator[Box]:
    """Split ``box`` into boxes of at most ``limit`` elements (at least one each), in row-major order."""
    if box.numel <= limit:
        if box.numel:
            yield box
        return
    dim = next(i for i, n in enumerate(box.size) if n > 1)
    step = max(1, limit // prod(box.size[dim + 1 :]))
    for first in range(0, box.size[dim], step):
        start = (*box.start[:dim], box.start[dim] + first, *box.start[dim + 1 :])
        size = (*box.size[:dim], min(step, box.size[dim] - first), *box.size[dim + 1 :])
        yield from split_box(Box(start, size), limit)


def partition_problem(view: View, boxes: Sequence[Box]) -> str | None:
    """Return why ``boxes`` are not a partition of a tensor of shape ``view``; None if they are. Linear in their number.

    The function that is 1 in a box is a sum, with alternating signs, over the corners of the box: each corner stands
    for the function that is 1 there and beyond. Functions of different corners are linearly independent. So boxes
    partition the tensor if and only if the corners of all boxes, minus those of the tensor, cancel out. Corners at the
    end of the tensor stand for nothing.
    """
    strides = row_major_strides(view)
    signs = {0: -1} if prod(view) else {}  # by the row-major index of the corner
    for box in boxes:
        if not is_inside(box, view):
            return f"{format_box(box)} is not inside {list(view)}"
        if 0 in box.size:
            continue
        corners = [(sum(map(mul, box.start, strides)), 1)]
        for start, size, limit, stride in zip(box.start, box.size, view, strides):
            if start + size != limit:
                corners += [(at + size * stride, -sign) for at, sign in corners]
        for at, sign in corners:
            signs[at] = signs.get(at, 0) + sign
    at = min((at for at, sign in signs.items() if sign), default=None)
    if at is None:
        return None
    element = Box(tuple(at // stride % n for stride, n in zip(strides, view)), (1,) * len(view))
    there = [box for box in boxes if intersect(box, element)]  # their number less one is the sign: no corner is before
    if not there:
        return f"element {list(element.start)} is not covered"
    return f"{format_box(there[0])} and {format_box(there[1])} overlap"


def row_major_strides(view: View) -> list[int]:
    """Return the elements between neighbours along each dimension."""
    return [*accumulate(reversed(view[1:]), lambda a, b: a * b, initial=1)][::-1][: len(view)]


def format_box(box: Box) -> str:
    """Format a box as an index expression: ``[0:4, 2:3]``."""
    return "[" + ", ".join(f"{start}:{end}" for start, end in zip(box.start, box_end(box))) + "]"


def match_view_dims(shape: View, view: View) -> tuple[slice, ...] | None:
    """Return the dimensions of ``view`` that make up each dimension of ``shape``; None if it does not refine ``shape``.

    >>> match_view_dims((12, 5), (2, 6, 5))
    (slice(0, 2, None), slice(2, 3, None))
    """
    found, first = [], 0
    for i, n in enumerate(shape):
        last = first
        while last < len(view) and (last == first or prod(view[first:last]) < n or i == len(shape) - 1):
            last += 1
        if prod(view[first:last]) != n or last == first:
            return None
        found.append(slice(first, last))
        first = last
    return tuple(found) if first == len(view) else None


def boxes_in_shape(box: Box, shape: View, view: View) -> Iterator[tuple[Box, Box]]:
    """Yield the boxes of the stored shape that make up a box of the view: (part of ``box``, box in ``shape``)."""
    groups = match_view_dims(shape, view)
    if groups is None:
        raise ValueError(f"{list(view)} is not a view of {list(shape)}")
    for runs in product(*(list(contiguous_runs(box.start[g], box.size[g], view[g])) for g in groups)):
        inner = Box(sum((r[0].start for r in runs), ()), sum((r[0].size for r in runs), ()))
        yield inner, Box(tuple(r[1] for r in runs), tuple(r[0].numel for r in runs))


def contiguous_runs(start: View, size: View, view: View) -> Iterator[tuple[Box, int]]:
    """Yield the contiguous runs of elements in a box, each with the row-major index of its first element."""
    strides = row_major_strides(view)
    inner = len(view) - 1
    while inner and size[inner] == view[inner]:
        inner -= 1
    for outer in product(*(range(a, a + n) for a, n in zip(start[:inner], size[:inner]))):
        first = (*outer, *start[inner:])
        yield Box(first, (*(1 for _ in outer), *size[inner:])), sum(a * b for a, b in zip(first, strides))


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

MANIFEST_BYTES = 1 << 29
"""Limit for a manifest, which takes about 200 bytes for each chunk, and for the other small files."""

MAX_DIMS = 8
"""Dimensions of a tensor and of its view; those of a model have at most 4."""

JSON = dict[str, Any]


@dataclass(frozen=True)
class TensorChunk:
    """A box of a tensor in a file: elements in row-major order, little-endian."""

    box: Box  # position in the tensor's view
    file: str  # name inside the checkpoint
    offset: int  # first byte, from the start of the file
    bytes: int
    xxh3: str  # checksum of those bytes; in files of another program ``crc32:`` and theirs, or empty


@dataclass(frozen=True)
class TensorRecord:
    """A tensor in the manifest."""

    dtype: str  # name of the type in safetensors
    shape: tuple[int, ...]  # as stored
    view: tuple[int, ...]  # the shape that the chunks' boxes refer to
    chunks: tuple[TensorChunk, ...]


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
    # folder of the files, relative to ``path``: each save has one, and the marker names the complete one
    inside: str = ""

    @classmethod
    def open(cls, path: Location) -> Manifest:
        """Read a manifest, verify it against the marker, and check the presence and size of all files.

        Raises:
            DamagedCheckpointError: if the marker, the manifest or a file is missing, truncated or corrupted.
            NewerVersionError: if a newer version of this program wrote it.
            UnreachableError: if an object store does not answer.
        """
        manifest = cls.read(path)
        manifest.check_files()
        return manifest

    @classmethod
    def read(cls, path: Location) -> Manifest:
        """As `open`, without checking the files; some may be on other nodes."""
        path = parse_location(path)
        return parse_manifest(path, *read_manifest(path))

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
            DamagedCheckpointError: if the file is missing or corrupted.
        """
        record, content = self.files[name], _read(self.folder, name)
        if checksum(content) != record.xxh3:
            how = "is truncated" if len(content) < record.bytes else "has flipped bytes"
            raise DamagedCheckpointError(f"{self.folder / name} {how} (content)")
        return content

    def check_partition(self, name: str) -> None:
        """Raise DamagedCheckpointError if the chunks of a tensor do not partition it."""
        record = self.tensors[name]
        problem = partition_problem(record.view, [chunk.box for chunk in record.chunks])
        if problem:
            raise DamagedCheckpointError(f"{self.path}: the chunks of {name} are not a partition of it: {problem}")

    def check_files(self) -> None:
        """Raise DamagedCheckpointError if a file is missing or has another size; as `open` if a store fails."""
        sizes = None
        if not isinstance(self.folder, Path):
            try:
                sizes = self.folder.files()  # a single request: there may be thousands of objects
            except OSError as error:
                raise read_error(self.folder, error) from error
        for name in self.files:
            self.check_file(name, sizes)

    def check_file(self, name: str, sizes: Mapping[str, int] | None = None) -> None:
        """Raise DamagedCheckpointError if a file is missing or has another size; ``sizes`` are those in a store."""
        path, expected = self.folder / name, self.files[name].bytes
        try:
            if sizes is not None:
                seen = sizes[name]
            else:
                found = local_path(path).stat()
                seen = found.st_size
                if not S_ISREG(found.st_mode):
                    raise DamagedCheckpointError(f"{path} is not a regular file")
        except (OSError, KeyError) as error:
            why = f" ({error.strerror})" if isinstance(error, OSError) else ""
            raise DamagedCheckpointError(f"{path} is missing{why}") from error
        if seen != expected:
            how = "truncated" if seen < expected else "too long"
            raise DamagedCheckpointError(f"{path} is {how}: {seen} bytes, not {expected}")


def marker_content(manifest: bytes, inside: str = "") -> bytes:
    """Return the content of the marker for a manifest; ``inside`` as in :class:`Manifest`."""
    return f"{checksum(manifest)} {inside}".strip().encode() + b"\n"


def marker_folder(mark: bytes) -> str:
    """Return the folder of the files that a marker names; "" if it names none or is damaged."""
    text = mark.decode(errors="replace").strip()
    try:
        return _checked_name(text.partition(" ")[2]) if " " in text else ""
    except ValueError:
        return ""


def encode_manifest(
    tensors: Mapping[str, TensorRecord], files: Mapping[str, FileRecord], state: Mapping[str, Any], config: JSON
) -> bytes:
    """Return the content of manifest.json; TypeError or ValueError if state or config is not JSON, as NaN is not."""
    content = {"format": FORMAT, "version": VERSION, **encode_records(tensors, files), "state": state, "config": config}
    return json.dumps(content, allow_nan=False, separators=(",", ":")).encode()


def encode_records(tensors: Mapping[str, TensorRecord], files: Mapping[str, FileRecord]) -> JSON:
    """Return the records as in a manifest, as JSON."""

    def chunk_entry(chunk: TensorChunk) -> JSON:
        place = {"start": [*chunk.box.start], "size": [*chunk.box.size], "file": chunk.file, "offset": chunk.offset}
        return place | {"bytes": chunk.bytes, "xxh3": chunk.xxh3}

    tensor_entries = {
        name: {
            "dtype": record.dtype,
            "shape": [*record.shape],
            "view": [*record.view],
            "chunks": [*map(chunk_entry, record.chunks)],
        }
        for name, record in sorted(tensors.items())
    }
    return {"files": {name: vars(record) for name, record in sorted(files.items())}, "tensors": tensor_entries}


def _read(folder: Location, name: str) -> bytes:
    path = folder / name
    try:
        return read_small(path, MANIFEST_BYTES) if isinstance(path, Path) else path.read_bytes()
    except (FileNotFoundError, NotADirectoryError) as error:
        if name == MARKER:
            message = f"{folder} has no {MARKER}: it is not a checkpoint, or its save was interrupted"
            raise DamagedCheckpointError(message) from error
        why = f", or {MARKER} has flipped bytes or is truncated" if name == MANIFEST else ""
        raise DamagedCheckpointError(f"{path} is missing{why}") from error
    except OSError as error:
        raise read_error(path, error) from error


MEGATRON_LM_NEWEST = "latest_checkpointed_iteration.txt"
"""The file that marks a folder of Megatron-LM's checkpoints, with the iteration of the newest."""

FOREIGN_READERS: dict[str, Callable[[Path], Manifest]] = {}
"""Functions that make the manifest of another program's checkpoint, by scheme: filled by `megatron.convert.sources`."""

MEGATRON_LM_RANK = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?(?:_(\d{3,}))?")
"""The folder of a rank in a checkpoint of Megatron-LM."""


def is_megatron_lm(path: Location) -> bool:
    """Return True if a folder is one checkpoint of Megatron-LM."""
    try:
        names = {*os.listdir(path)} if isinstance(path, Path) else set()
    except OSError:  # reported when its marker is read
        return False
    found = {"metadata.json", ".metadata"} <= names or any(map(MEGATRON_LM_RANK.fullmatch, names))
    return found and MARKER not in names


def read_manifest(path: Location) -> tuple[bytes, str]:
    """Return a manifest's content, verified against the marker, and the folder of the files; as `Manifest.read`.

    A checkpoint of Megatron-LM has none: its manifest is made from its files.
    """
    if isinstance(path, Path) and is_megatron_lm(path):
        made = FOREIGN_READERS[MEGATRON_PREFIX](path)
        return encode_manifest(made.tensors, made.files, made.state, made.config), made.inside
    mark = _read(path, MARKER)
    inside = marker_folder(mark)
    content = _read(path / inside if inside else path, MANIFEST)
    if mark != marker_content(content, inside):
        raise DamagedCheckpointError(
            f"{path / MARKER} does not match {MANIFEST}: one of them has flipped bytes or is truncated"
        )
    return content, inside


def parse_manifest(path: Location, content: bytes, inside: str = "") -> Manifest:
    """Parse a manifest and check that its numbers are consistent; ``inside`` as in :class:`Manifest`."""
    try:
        data = json.loads(content)
        if data["format"] != FORMAT:
            raise DamagedCheckpointError(f"{path / MANIFEST} has format {data['format']!r}, not {FORMAT!r}")
        if data["version"] > VERSION:
            raise NewerVersionError(
                f"{path} was written by a newer version: its format version is {data['version']}, "
                f"this program supports up to {VERSION}",
                "update this program",
            )
        to_dims((data["version"],))
        tensors, files = parse_records(data)
        for part in ("state", "config"):
            if not isinstance(raise_if_deep(data[part]), dict):
                raise ValueError(f"{data[part]!r} is not an object of named values")
        return Manifest(path, data["version"], tensors, files, data["state"], data["config"], inside)
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        reason = error if type(error) is ValueError else repr(error)
        raise DamagedCheckpointError(f"{path / MANIFEST} is not valid for its version: {reason}") from error


def parse_records(data: JSON) -> tuple[dict[str, TensorRecord], dict[str, FileRecord]]:
    """Read what :func:`encode_records` has returned; KeyError, TypeError, ValueError or AttributeError if it is odd."""
    files = {_checked_name(name): FileRecord(**record) for name, record in data["files"].items()}
    for record in files.values():
        _checked_digest(record.xxh3)
        to_dims((record.bytes, record.head))
    return {name: _tensor(record, files) for name, record in data["tensors"].items()}, files


def to_dims(numbers: Iterable[int]) -> tuple[int, ...]:
    """Return a shape, offset or length read from a file as a tuple.

    Raises:
        ValueError: if it is not made of integers of 63 bits, or has more than `MAX_DIMS`.
    """
    found = tuple(islice(numbers, MAX_DIMS + 1))
    if len(found) > MAX_DIMS:
        raise ValueError(f"a tensor has more than {MAX_DIMS} dimensions")
    if not all(isinstance(n, int) and 0 <= n < 2**63 for n in found):
        raise ValueError(f"{reprlib.repr(found)} are not all integers from 0 to 2**63 - 1")
    return found


def _checked_name(name: str) -> str:
    """Return a file name if it is normalised and stays inside the folder it is put into."""
    path = PurePosixPath(name)
    if not path.parts or path.is_absolute() or ".." in path.parts or str(path) != name or b"\0" in os.fsencode(name):
        raise ValueError(f"{name!r} is not a valid file name in a checkpoint")
    return name


def _checked_digest(text: str) -> str:
    """Return a checksum if it is a text."""
    if not isinstance(text, str):
        raise ValueError(f"{text!r} is not a checksum")
    return text


def _tensor(data: JSON, files: Mapping[str, FileRecord]) -> TensorRecord:
    chunks = []
    for item in data["chunks"]:
        box = Box(to_dims(item["start"]), to_dims(item["size"]))
        offset, size = to_dims((item["offset"], item["bytes"]))
        chunks.append(TensorChunk(box, item["file"], offset, size, _checked_digest(item["xxh3"])))
    record = TensorRecord(data["dtype"], to_dims(data["shape"]), to_dims(data["view"]), tuple(chunks))
    size, shapes = prod(record.shape), (record.shape, record.view)
    if size != prod(record.view):
        raise ValueError(f"{record.view} is not a view of {record.shape}")
    impossible = not 0 < size < 2**63 and any(prod(n or 1 for n in shape) >= 2**63 for shape in shapes)
    if impossible:
        raise ValueError(f"no tensor has the shape {record.shape}, viewed as {record.view}")
    item_bytes = ITEM_BYTES[record.dtype]
    for chunk in chunks:
        in_file = files[chunk.file].head <= chunk.offset <= files[chunk.file].bytes - chunk.bytes
        if chunk.bytes != chunk.box.numel * item_bytes or not in_file:
            where = f"{format_box(chunk.box)} in {chunk.file}"
            raise ValueError(f"{where} has a wrong length or lies outside of the file")
        if not is_inside(chunk.box, record.view):
            raise ValueError(f"{format_box(chunk.box)} is not inside {list(record.view)}")
    return record
