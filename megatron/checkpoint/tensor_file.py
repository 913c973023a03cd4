"""Safetensors files: write one tensor at a time, and map a file as tensors.

The ``safetensors`` package only checks headers here: it writes tensors that are all in memory at once (511 MiB for
512 MiB of computed tensors, 63 MiB here) and without checksums, and cannot map a file larger than memory.
``GlobalTensor`` and ``TensorPart`` describe the boxes that a rank writes or reads.
"""

from __future__ import annotations

import json
import mmap
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron.checkpoint.durable_files import BLOCK, NewFile, checksum
from megatron.checkpoint.errors import DamagedCheckpointError
from megatron.checkpoint.format import FileRecord
from megatron.checkpoint.location import Location
from megatron.config.files import open_regular
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
"""MAP_NORESERVE, which Python 3.11 does not define. torch requires writable memory, hence a private map, and without
this flag Linux refuses a private map of a file larger than memory."""

ALIGNMENT = 64

MAX_HEADER_BYTES, MAX_TENSORS = 100_000_000, 100_000
"""Limits of a safetensors file: of the package, and of what is read in about a second. Every tensor of a header takes
one brace."""


def tensor_bytes(tensor: Tensor) -> memoryview:
    """Return the elements in row-major order; a view of the tensor if it is contiguous and on the CPU."""
    return tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8).numpy().data


TILE_COLUMNS = 64
"""Columns of a transposed matrix that are copied at a time."""


def copy_tiled(target: Tensor, source: Tensor) -> None:
    """Copy a tensor of the same shape, of any strides and types.

    Where rows of one are columns of the other, tiles stay in the cache: up to 4 times as fast as one copy.
    """
    dims = [dim for dim in range(target.dim()) if target.shape[dim] > 1]
    along = min(dims, key=target.stride, default=0)  # neighbours in memory
    if not dims or source.stride(along) == 1:
        target.copy_(source)
        return
    for part, tile in zip(target.split(TILE_COLUMNS, along), source.split(TILE_COLUMNS, along), strict=True):
        part.copy_(tile)


class TensorFileWriter:
    """Writes a new safetensors file; tensors come in the order of ``entries``.

    Use as a context manager: the content is flushed to disk when the block ends without an exception.
    """

    def __init__(
        self, path: Location, entries: Sequence[TensorEntry], metadata: Mapping[str, str] | None = None
    ) -> None:
        """Create the file, which must not exist, and write its header: all shapes are known in advance.

        Args:
            path: on a disk or in an object store.
            entries: of all tensors.
            metadata: free text.
        """
        self._left = list(reversed(entries))
        ends = [*accumulate((prod(shape) * dtype.itemsize for _, dtype, shape in entries), initial=0)]
        table: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
        for (key, dtype, shape), start, end in zip(entries, ends, ends[1:]):
            if key in table:
                raise ValueError(f"{key} occurs twice among the entries")
            table[key] = {"dtype": DTYPE_NAMES[dtype], "shape": shape, "data_offsets": [start, end]}
        text = json.dumps(table, separators=(",", ":")).encode()
        text += b" " * (-(8 + len(text)) % ALIGNMENT)
        header = len(text).to_bytes(8, "little") + text
        self._offset = len(header)  # of the next tensor
        # length of the file and checksum of the header, for the manifest
        self.record = FileRecord(len(header) + ends[-1], len(header), checksum(header))
        self._file = NewFile(path) if isinstance(path, Path) else path.writer()
        try:
            self._file.write(header)
        except OSError as error:
            self._file.__exit__(type(error), error, None)
            raise

    def write(self, key: str, tensor: Tensor) -> tuple[int, int, str]:
        """Append the next of ``entries``, of any strides and device; return its offset, its size and a checksum."""
        seen = key, tensor.dtype, tuple(tensor.shape)
        if seen != self._left[-1]:
            raise ValueError(f"{seen} is not the next entry, {self._left[-1]}")
        content, digest = tensor_bytes(tensor), xxhash.xxh3_64()
        for start in range(0, len(content), BLOCK):
            digest.update(content[start : start + BLOCK])
            self._file.write(content[start : start + BLOCK])
        self._left.pop()
        self._offset += len(content)
        return self._offset - len(content), len(content), digest.hexdigest()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.__exit__(kind, error, trace)
        if kind is None and self._left:
            raise ValueError(f"{len(self._left)} entries were not written")


class TensorFile:
    """A memory-mapped safetensors file; its tensors are views of the map."""

    def __init__(self, path: Path) -> None:
        """Map a file and check its header.

        Raises:
            DamagedCheckpointError: if it cannot be read or its header is invalid.
        """
        self._table: dict[str, tuple[torch.dtype, tuple[int, ...], int]] = {}  # type, shape and first byte by key
        try:
            with open_regular(path) as file:
                self._map = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE | NO_RESERVE)
            start = 8 + int.from_bytes(self._map[:8], "little")
            if start <= 8 + MAX_HEADER_BYTES and self._map[8:start].count(b"{") > MAX_TENSORS:
                raise SafetensorError(f"its header has more than {MAX_TENSORS:,} tensors")
            with safe_open(path, "numpy") as header:
                for key in header.offset_keys():  # a valid file has no gaps between its tensors
                    entry = header.get_slice(key)
                    dtype, shape = DTYPES[entry.get_dtype()], tuple(entry.get_shape())
                    self._table[key] = dtype, shape, start
                    size = prod(shape)
                    if not size and prod(n or 1 for n in shape) >= 2**63:
                        raise SafetensorError(f"no tensor has the shape {list(shape)}")
                    start += size * dtype.itemsize
        except OSError as error:
            raise DamagedCheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
        except (SafetensorError, KeyError, ValueError) as error:  # ValueError: an empty file cannot be mapped
            raise DamagedCheckpointError(f"{path} is not a safetensors file, or is damaged: {error}") from error
        self.keys = tuple(self._table)  # of all tensors

    def dtype(self, key: str) -> torch.dtype:
        """Return the type of a tensor."""
        return self._table[key][0]

    def shape(self, key: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return self._table[key][1]

    def tensor(self, key: str) -> Tensor:
        """Return a tensor backed by the map; only the pages that are accessed are read."""
        dtype, shape, start = self._table[key]
        if not prod(shape):
            return torch.empty(shape, dtype=dtype)
        flat = torch.frombuffer(self._map, dtype=torch.uint8, count=prod(shape) * dtype.itemsize, offset=start)
        if start % dtype.itemsize:
            flat = flat.clone()  # elements in files of other programs may be unaligned
        return flat.view(dtype).reshape(shape)


@dataclass(frozen=True)
class TensorPart:
    """A box of a global tensor that this rank writes or fills."""

    box: Box  # position in the tensor's view
    # Shape ``box.size``, any strides and device; or a function that computes it, called only when it is needed so that
    # computed tensors need not exist all at once. When loading, the function returns the memory to fill.
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
