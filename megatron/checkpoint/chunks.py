"""Read the chunks of a checkpoint and verify their checksums."""

from __future__ import annotations

import os
from io import FileIO
from typing import Protocol

import torch
import xxhash
from torch import Tensor

from megatron.checkpoint.errors import DamagedError, unreadable
from megatron.checkpoint.files import BLOCK
from megatron.checkpoint.manifest import Chunk, Manifest
from megatron.checkpoint.remote import RANGE, RANGES, Location, RemotePath
from megatron.checkpoint.retries import tell
from megatron.checkpoint.tensorfile import DTYPES

PROOFS = 3
"""Reads of a chunk from an object store before a wrong checksum counts as damage: transfers may corrupt data."""


class Source(Protocol):
    """An open file that is read block by block."""

    block: int  # preferred bytes of a read

    def read(self, offset: int, buffer: memoryview) -> int:
        """Read from ``offset`` into ``buffer`` and return the number of bytes read, 0 at the end of the file."""

    def close(self) -> None:
        """Release the file."""


class DiskFile:
    """A file on a disk."""

    block = BLOCK

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

    Uses plain reads rather than a memory map: a failing disk raises an OSError instead of a signal.
    """

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest
        self._open: tuple[str, Source] | None = None
        self._proved: set[str] = set()
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._held: Chunk | None = None

    def dtype(self, name: str) -> torch.dtype:
        """Return the stored type of a tensor."""
        return DTYPES[self._manifest.tensors[name].dtype]

    def load(self, name: str, chunk: Chunk) -> Tensor:
        """Return a chunk of tensor ``name``, shape ``chunk.box.size``; its memory is reused by the next call.

        Raises:
            DamagedError: if it cannot be read or its checksum differs.
            UnreachableError: if an object store does not answer.
        """
        if len(self._memory) < chunk.bytes:
            self._memory = torch.empty(0, dtype=torch.uint8)  # free the old buffer first
            self._memory = torch.empty(chunk.bytes, dtype=torch.uint8)
        tensor = self._memory[: chunk.bytes].view(self.dtype(name)).view(chunk.box.size)
        if self._held is not chunk:
            self._held = None
            self.load_into(name, chunk, tensor)
            self._held = chunk
        return tensor

    def load_into(self, name: str, chunk: Chunk, out: Tensor) -> None:
        """Read a chunk into a contiguous CPU tensor of the same type and size.

        Raises:
            DamagedError: if it cannot be read or its checksum differs; the content of ``out`` is then undefined.
        """
        buffer = out.detach().reshape(-1).view(torch.uint8).numpy().data
        self._read(chunk.file, chunk.offset, chunk.bytes, buffer, chunk.xxh3, f"tensor {name}")

    def prove(self, name: str, chunk: Chunk) -> None:
        """Verify the checksum of a chunk of tensor ``name``, one block at a time.

        Raises:
            DamagedError: if it cannot be read or its checksum differs.
        """
        self._read(chunk.file, chunk.offset, chunk.bytes, None, chunk.xxh3, f"tensor {name}")

    def prove_head(self, file: str) -> None:
        """Verify, once per file, the bytes that belong to no chunk.

        Raises:
            DamagedError: if their checksum differs.
        """
        if file not in self._proved:
            record = self._manifest.files[file]
            self._read(file, 0, record.head, None, record.xxh3, "header" if record.head < record.bytes else "content")
            self._proved.add(file)

    def close(self) -> None:
        """Close the open file; also called on deletion."""
        if self._open is not None:
            self._open[1].close()
        self._open = None

    __del__ = close

    def _file(self, name: str) -> Source:
        if self._open is None or self._open[0] != name:
            self.close()
            path = self._path(name)
            try:
                size = self._manifest.files[name].bytes
                self._open = name, RemoteObject(path, size) if isinstance(path, RemotePath) else DiskFile(str(path))
            except OSError as error:
                raise DamagedError(f"{path} is missing or cannot be read: {error.strerror}") from error
        return self._open[1]

    def _read(self, file: str, offset: int, length: int, buffer: memoryview | None, expected: str, what: str) -> None:
        """Read ``length`` bytes of a file, into ``buffer`` unless it is None, and verify their checksum."""
        path = self._path(file)
        for attempt in range(1, (PROOFS if isinstance(path, RemotePath) else 1) + 1):
            if self._digest(file, offset, length, buffer, what) == expected:
                return
            self.close()  # discards data read ahead
            if attempt < PROOFS and isinstance(path, RemotePath):
                tell(f"{path}: {what} arrived with flipped bytes; reading it again, attempt {attempt + 1} of {PROOFS}")
        raise DamagedError(f"{path} has flipped bytes ({what})")

    def _digest(self, file: str, offset: int, length: int, buffer: memoryview | None, what: str) -> str:
        """Return the checksum of ``length`` bytes of a file, read into ``buffer`` unless it is None."""
        source, digest, done = self._file(file), xxhash.xxh3_64(), 0
        scratch = memoryview(bytearray(min(length, source.block) if buffer is None else 0))
        while done < length:
            block = scratch[: length - done] if buffer is None else buffer[done : done + source.block]
            try:
                count = source.read(offset + done, block)
            except OSError as error:
                raise unreadable(self._path(file), error, f" ({what})") from error
            if not count:
                raise DamagedError(f"{self._path(file)} is truncated ({what})")
            digest.update(block[:count])
            done += count
        return digest.hexdigest()

    def _path(self, file: str) -> Location:
        return self._manifest.folder / file
