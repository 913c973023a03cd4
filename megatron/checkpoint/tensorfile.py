"""Write and read safetensors files one tensor at a time.

A file is the length of its header (uint64), the header (JSON: type, shape and byte range by key), and the elements.
All shapes are known in advance, so the header is written first and tensors are streamed.
"""

from __future__ import annotations

import json
import mmap
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
import xxhash
from torch import Tensor

from megatron.checkpoint.errors import DamagedError
from megatron.checkpoint.files import BLOCK, checksum, new_file
from megatron.checkpoint.manifest import ITEM_BYTES, FileRecord, dims
from megatron.checkpoint.remote import Location

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

NAMES = {dtype: name for name, dtype in DTYPES.items()}

Entry = tuple[str, torch.dtype, tuple[int, ...]]
"""Key, type and shape of a tensor."""

NO_RESERVE = 0x4000 if sys.platform == "linux" else 0
"""MAP_NORESERVE, which Python 3.11 does not define.

torch requires writable memory, hence a private map, though nothing is written to it. Without this flag Linux refuses
a private map of a file larger than memory."""

ALIGNMENT = 64
MAX_HEADER = 100_000_000


@dataclass(frozen=True)
class Written:
    """Byte range of a tensor in its file, and the checksum of those bytes."""

    offset: int
    bytes: int
    xxh3: str


def as_bytes(tensor: Tensor) -> memoryview:
    """Return the elements in row-major order; a view of the tensor if it is contiguous and on the CPU."""
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


class TensorFileWriter:
    """Writes a new safetensors file; tensors come in the order of ``entries``.

    Use as a context manager: the content is flushed to disk when the block ends without an exception.
    """

    def __init__(self, path: Location, entries: Sequence[Entry], metadata: Mapping[str, str] | None = None) -> None:
        """Create the file and write its header.

        Args:
            path: must not exist.
            entries: of all tensors.
            metadata: free text.

        Raises:
            OSError: if the file cannot be created or written.
        """
        header, self._offsets, end = _header(entries, metadata or {})
        self._entries = list(entries)
        self._next = 0
        # length of the file and checksum of the header, for the manifest
        self.record = FileRecord(end, len(header), checksum(header))
        self._file = new_file(path)
        try:
            self._file.write(header)
        except OSError as error:
            self._file.__exit__(type(error), error, None)
            raise

    def write(self, key: str, tensor: Tensor) -> Written:
        """Append the next tensor, of any strides and device.

        Raises:
            OSError: if the disk fails.
            ValueError: if it is not the next one of ``entries``.
        """
        if (key, tensor.dtype, tuple(tensor.shape)) != self._entries[self._next]:
            seen = f"{key}, {tensor.dtype} {list(tensor.shape)}"
            raise ValueError(f"{seen} is not the next entry, {self._entries[self._next]}")
        content, digest = as_bytes(tensor), xxhash.xxh3_64()
        for start in range(0, len(content), BLOCK):
            digest.update(content[start : start + BLOCK])
            self._file.write(content[start : start + BLOCK])
        self._next += 1
        return Written(self._offsets[self._next - 1], len(content), digest.hexdigest())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.__exit__(kind, error, trace)
        if kind is None and self._next != len(self._entries):
            raise ValueError(f"{len(self._entries) - self._next} of {len(self._entries)} entries were not written")


def _header(entries: Sequence[Entry], metadata: Mapping[str, str]) -> tuple[bytes, list[int], int]:
    """Return the bytes of the header, the offset of each tensor, and the length of the file."""
    table: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    starts, end = [], 0
    for key, dtype, shape in entries:
        if key in table:
            raise ValueError(f"{key} occurs twice among the entries")
        starts.append(end)
        end += prod(shape) * dtype.itemsize
        table[key] = {"dtype": NAMES[dtype], "shape": shape, "data_offsets": [starts[-1], end]}
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    header = len(text).to_bytes(8, "little") + text
    return header, [len(header) + start for start in starts], len(header) + end


class TensorFile:
    """A memory-mapped safetensors file; its tensors are views of the map."""

    def __init__(self, path: Path) -> None:
        """Map a file and check its header.

        Raises:
            DamagedError: if it cannot be read or its header is invalid.
        """
        self.path = Path(path)
        try:
            with self.path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE | NO_RESERVE)
        except (OSError, ValueError) as error:  # ValueError: an empty file
            raise DamagedError(f"{path} cannot be read: {error}") from error
        try:
            self.metadata, self._table = _parse_header(self._map)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise DamagedError(f"{path} is not a safetensors file, or is damaged: {error}") from error
        self.keys = tuple(self._table)  # of all tensors, in the order of the header

    def dtype(self, key: str) -> torch.dtype:
        """Return the type of a tensor."""
        return DTYPES[self._table[key][0]]

    def shape(self, key: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return self._table[key][1]

    def tensor(self, key: str) -> Tensor:
        """Return a tensor backed by the map; only the pages that are accessed are read.

        Raises:
            KeyError: if the file has no such tensor.
        """
        name, shape, start, end = self._table[key]
        if start == end:
            return torch.empty(shape, dtype=DTYPES[name])
        flat = torch.frombuffer(self._map, dtype=torch.uint8, count=end - start, offset=start)
        if start % ITEM_BYTES[name]:
            flat = flat.clone()  # elements in files of other programs may be unaligned
        return flat.view(DTYPES[name]).reshape(shape)


Table = dict[str, tuple[str, tuple[int, ...], int, int]]


def _parse_header(content: mmap.mmap) -> tuple[dict[str, str], Table]:
    """Return the metadata, and type, shape, first byte and end byte by key."""
    size = int.from_bytes(content[:8], "little")
    if len(content) < 8 or size > min(len(content) - 8, MAX_HEADER):
        raise ValueError(f"a header of {size} bytes in a file of {len(content)}")
    header = json.loads(content[8 : 8 + size])
    metadata = header.pop("__metadata__", {})
    table: Table = {}
    for key, entry in header.items():
        name, shape, (start, end) = entry["dtype"], dims(entry["shape"]), entry["data_offsets"]
        if not 0 <= start <= end <= len(content) - 8 - size or end - start != prod(shape) * ITEM_BYTES[name]:
            raise ValueError(f"{key}, {name} {list(shape)}, does not fit its bytes {start}..{end}")
        table[key] = (name, shape, 8 + size + start, 8 + size + end)
    return metadata, table
