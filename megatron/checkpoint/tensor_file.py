"""Write and read safetensors files one tensor at a time, and verify the chunks of checkpoints.

A file is the length of its header (uint64), the header (JSON: type, shape and byte range by key), and the elements.
All shapes are known in advance, so the header is written first and tensors are streamed. ``ChunkReader`` reads chunks
from a disk or an object store and verifies their checksums. ``GlobalTensor`` and ``TensorPart`` describe which boxes
of a tensor a rank writes or reads.
"""

from __future__ import annotations

import json
import mmap
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from io import FileIO
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
import xxhash
from torch import Tensor

from megatron.checkpoint.durable_files import BLOCK, NewFile, checksum
from megatron.checkpoint.errors import DamagedCheckpointError, read_error
from megatron.checkpoint.format import ITEM_BYTES, FileRecord, Manifest, TensorChunk, to_dims
from megatron.checkpoint.object_store import RANGE, RANGES, Location, RemoteFileWriter, RemotePath, print_warning
from megatron.distributed.sharding import Box

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""Types by their names in safetensors."""

DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}

TensorEntry = tuple[str, torch.dtype, tuple[int, ...]]
"""Key, type and shape of a tensor."""

NO_RESERVE = 0x4000 if sys.platform == "linux" else 0
"""MAP_NORESERVE, which Python 3.11 does not define.

torch requires writable memory, hence a private map, though nothing is written to it. Without this flag Linux refuses
a private map of a file larger than memory."""

ALIGNMENT = 64
MAX_HEADER = 100_000_000


def tensor_bytes(tensor: Tensor) -> memoryview:
    """Return the elements in row-major order; a view of the tensor if it is contiguous and on the CPU."""
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


class TensorFileWriter:
    """Writes a new safetensors file; tensors come in the order of ``entries``.

    Use as a context manager: the content is flushed to disk when the block ends without an exception.
    """

    def __init__(
        self, path: Location, entries: Sequence[TensorEntry], metadata: Mapping[str, str] | None = None
    ) -> None:
        """Create the file, which must not exist, and write its header.

        Args:
            path: on a disk or in an object store.
            entries: of all tensors.
            metadata: free text.
        """
        table: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
        starts, end = [], 0
        for key, dtype, shape in entries:
            if key in table:
                raise ValueError(f"{key} occurs twice among the entries")
            starts.append(end)
            end += prod(shape) * dtype.itemsize
            table[key] = {"dtype": DTYPE_NAMES[dtype], "shape": shape, "data_offsets": [starts[-1], end]}
        text = json.dumps(table, separators=(",", ":")).encode()
        text += b" " * (-(8 + len(text)) % ALIGNMENT)
        header = len(text).to_bytes(8, "little") + text
        self._entries = list(entries)
        self._offsets = [len(header) + start for start in starts]
        self._next = 0
        # length of the file and checksum of the header, for the manifest
        self.record = FileRecord(len(header) + end, len(header), checksum(header))
        self._file = RemoteFileWriter(path) if isinstance(path, RemotePath) else NewFile(path)
        try:
            self._file.write(header)
        except OSError as error:
            self._file.__exit__(type(error), error, None)
            raise

    def write(self, key: str, tensor: Tensor) -> tuple[int, int, str]:
        """Append the next of ``entries``, of any strides and device; return its offset, its size and a checksum."""
        if (key, tensor.dtype, tuple(tensor.shape)) != self._entries[self._next]:
            seen = f"{key}, {tensor.dtype} {list(tensor.shape)}"
            raise ValueError(f"{seen} is not the next entry, {self._entries[self._next]}")
        content, digest = tensor_bytes(tensor), xxhash.xxh3_64()
        for start in range(0, len(content), BLOCK):
            digest.update(content[start : start + BLOCK])
            self._file.write(content[start : start + BLOCK])
        self._next += 1
        return self._offsets[self._next - 1], len(content), digest.hexdigest()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.__exit__(kind, error, trace)
        if kind is None and self._next != len(self._entries):
            raise ValueError(f"{len(self._entries) - self._next} of {len(self._entries)} entries were not written")


class TensorFile:
    """A memory-mapped safetensors file; its tensors are views of the map."""

    def __init__(self, path: Path) -> None:
        """Map a file and check its header.

        Raises:
            DamagedCheckpointError: if it cannot be read or its header is invalid.
        """
        self.path = Path(path)
        try:
            with self.path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE | NO_RESERVE)
        except (OSError, ValueError) as error:  # ValueError: an empty file
            raise DamagedCheckpointError(f"{path} cannot be read: {error}") from error
        # type, shape, first byte and end byte by key
        self._table: dict[str, tuple[str, tuple[int, ...], int, int]] = {}
        try:
            size = int.from_bytes(self._map[:8], "little")
            if len(self._map) < 8 or size > min(len(self._map) - 8, MAX_HEADER):
                raise ValueError(f"a header of {size} bytes in a file of {len(self._map)}")
            header = json.loads(self._map[8 : 8 + size])
            self.metadata: dict[str, str] = header.pop("__metadata__", {})
            for key, entry in header.items():
                name, shape, (start, end) = entry["dtype"], to_dims(entry["shape"]), entry["data_offsets"]
                fits = 0 <= start <= end <= len(self._map) - 8 - size
                if not fits or end - start != prod(shape) * ITEM_BYTES[name]:
                    raise ValueError(f"{key}, {name} {list(shape)}, does not fit its bytes {start}..{end}")
                self._table[key] = (name, shape, 8 + size + start, 8 + size + end)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise DamagedCheckpointError(f"{path} is not a safetensors file, or is damaged: {error}") from error
        self.keys = tuple(self._table)  # of all tensors, in the order of the header

    def dtype(self, key: str) -> torch.dtype:
        """Return the type of a tensor."""
        return DTYPES[self._table[key][0]]

    def shape(self, key: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return self._table[key][1]

    def tensor(self, key: str) -> Tensor:
        """Return a tensor backed by the map; only the pages that are accessed are read."""
        name, shape, start, end = self._table[key]
        if start == end:
            return torch.empty(shape, dtype=DTYPES[name])
        flat = torch.frombuffer(self._map, dtype=torch.uint8, count=end - start, offset=start)
        if start % ITEM_BYTES[name]:
            flat = flat.clone()  # elements in files of other programs may be unaligned
        return flat.view(DTYPES[name]).reshape(shape)


READ_ATTEMPTS = 3
"""Reads of a chunk from an object store before a wrong checksum counts as damage: transfers may corrupt data."""


class DiskFile:
    """A file on a disk, read block by block."""

    block = BLOCK  # bytes of a read

    def __init__(self, path: str) -> None:
        self._file = FileIO(path)
        if hasattr(os, "posix_fadvise"):  # larger read-ahead by the kernel
            os.posix_fadvise(self._file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)

    def read(self, offset: int, buffer: memoryview) -> int:
        """Read at most ``len(buffer)`` bytes."""
        self._file.seek(offset)
        return self._file.readinto(buffer) or 0

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class RemoteObject:
    """An object in a store. Small consecutive chunks are fetched together, ahead of their use."""

    block = RANGE * RANGES

    def __init__(self, path: RemotePath, size: int) -> None:
        self._path, self._size = path, size
        self._ahead, self._start = memoryview(b""), 0

    def read(self, offset: int, buffer: memoryview) -> int:
        """Fill ``buffer``."""
        if len(buffer) >= BLOCK:
            self._path.read_into(offset, buffer)
            return len(buffer)
        first = offset - self._start
        if not 0 <= first <= len(self._ahead) - len(buffer):
            ahead = memoryview(bytearray(max(len(buffer), min(BLOCK, self._size - offset))))
            self._path.read_into(offset, ahead)
            self._ahead, self._start, first = ahead, offset, 0
        buffer[:] = self._ahead[first : first + len(buffer)]
        return len(buffer)

    def close(self) -> None:
        """Do nothing: requests are independent."""


class ChunkReader:
    """Reads and verifies chunks one at a time.

    Uses plain reads rather than a memory map: a failing disk raises an OSError instead of a signal. All methods raise
    DamagedCheckpointError if a file cannot be read or a checksum differs, and UnreachableError if an object store does
    not answer.
    """

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest
        self._open: tuple[str, DiskFile | RemoteObject] | None = None
        self._verified_heads: set[str] = set()
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._in_memory: TensorChunk | None = None

    def dtype(self, name: str) -> torch.dtype:
        """Return the stored type of a tensor."""
        return DTYPES[self._manifest.tensors[name].dtype]

    def load(self, name: str, chunk: TensorChunk) -> Tensor:
        """Return a chunk of tensor ``name``, shape ``chunk.box.size``; its memory is reused by the next call."""
        if len(self._memory) < chunk.bytes:
            self._memory = torch.empty(0, dtype=torch.uint8)  # free the old buffer first
            self._memory = torch.empty(chunk.bytes, dtype=torch.uint8)
        tensor = self._memory[: chunk.bytes].view(self.dtype(name)).view(chunk.box.size)
        if self._in_memory is not chunk:
            self._in_memory = None
            self.load_into(name, chunk, tensor)
            self._in_memory = chunk
        return tensor

    def load_into(self, name: str, chunk: TensorChunk, out: Tensor) -> None:
        """Read a chunk into a contiguous CPU tensor of the same type and size; undefined after an error."""
        buffer = out.detach().reshape(-1).view(torch.uint8).numpy().data
        self._read(chunk.file, chunk.offset, chunk.bytes, buffer, chunk.xxh3, f"tensor {name}")

    def verify(self, name: str, chunk: TensorChunk) -> None:
        """Verify the checksum of a chunk of tensor ``name``, one block at a time."""
        self._read(chunk.file, chunk.offset, chunk.bytes, None, chunk.xxh3, f"tensor {name}")

    def verify_head(self, file: str) -> None:
        """Verify, once per file, the bytes that belong to no chunk."""
        if file not in self._verified_heads:
            record = self._manifest.files[file]
            self._read(file, 0, record.head, None, record.xxh3, "header" if record.head < record.bytes else "content")
            self._verified_heads.add(file)

    def close(self) -> None:
        """Close the open file; also called on deletion."""
        if self._open is not None:
            self._open[1].close()
        self._open = None

    __del__ = close

    def _file(self, name: str) -> DiskFile | RemoteObject:
        if self._open is None or self._open[0] != name:
            self.close()
            path = self._path(name)
            try:
                size = self._manifest.files[name].bytes
                self._open = name, RemoteObject(path, size) if isinstance(path, RemotePath) else DiskFile(str(path))
            except OSError as error:
                raise DamagedCheckpointError(f"{path} is missing or cannot be read: {error.strerror}") from error
        return self._open[1]

    def _read(self, file: str, offset: int, length: int, buffer: memoryview | None, expected: str, what: str) -> None:
        """Read ``length`` bytes of a file, into ``buffer`` unless it is None, and verify their checksum."""
        path = self._path(file)
        for attempt in range(1, (READ_ATTEMPTS if isinstance(path, RemotePath) else 1) + 1):
            if self._digest(file, offset, length, buffer, what) == expected:
                return
            self.close()  # discards data read ahead
            if attempt < READ_ATTEMPTS and isinstance(path, RemotePath):
                again = f"reading again, attempt {attempt + 1} of {READ_ATTEMPTS}"
                print_warning(f"{path}: {what} arrived with flipped bytes; {again}")
        raise DamagedCheckpointError(f"{path} has flipped bytes ({what})")

    def _digest(self, file: str, offset: int, length: int, buffer: memoryview | None, what: str) -> str:
        """Return the checksum of ``length`` bytes of a file, read into ``buffer`` unless it is None."""
        source, digest, done = self._file(file), xxhash.xxh3_64(), 0
        scratch = memoryview(bytearray(min(length, source.block) if buffer is None else 0))
        while done < length:
            block = scratch[: length - done] if buffer is None else buffer[done : done + source.block]
            try:
                count = source.read(offset + done, block)
            except OSError as error:
                raise read_error(self._path(file), error, f" ({what})") from error
            if not count:
                raise DamagedCheckpointError(f"{self._path(file)} is truncated ({what})")
            digest.update(block[:count])
            done += count
        return digest.hexdigest()

    def _path(self, file: str) -> Location:
        return self._manifest.folder / file


@dataclass(frozen=True)
class TensorPart:
    """A box of a global tensor that this rank writes or fills."""

    box: Box  # position in the tensor's view
    # Shape ``box.size``, any strides and device; or a function that computes it, called only when it is needed so that
    # computed tensors need not exist all at once. When loading, the function must return the same memory every time.
    tensor: Tensor | Callable[[], Tensor]

    def resolve(self) -> Tensor:
        """Return the tensor, computed if necessary; ValueError if its shape is not that of the box."""
        tensor = self.tensor if isinstance(self.tensor, Tensor) else self.tensor()
        if tuple(tensor.shape) != self.box.size:
            raise ValueError(f"a tensor {list(tensor.shape)} for a box of {list(self.box.size)}")
        return tensor.detach()


@dataclass(frozen=True)
class GlobalTensor:
    """A tensor of the model or optimizer, and this rank's parts of it."""

    shape: tuple[int, ...]  # as stored, usually 1-D or 2-D; independent of layout and padding
    # the same elements in row-major order, in the dimensions that boxes refer to; refines ``shape``
    view: tuple[int, ...]
    dtype: torch.dtype  # as written; when loading, floating-point types may differ
    parts: tuple[TensorPart, ...]  # of this rank; when writing, the parts of all ranks partition the tensor
