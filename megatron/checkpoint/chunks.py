"""Chunks of a checkpoint, read from the disk and proved by their checksums."""

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
"""How often what comes from an object store is asked for until it is what was written: the way may have changed it."""


class Source(Protocol):
    """A file that is open: where blocks of it come from, and how large they should be."""

    block: int

    def read(self, offset: int, buffer: memoryview) -> int:
        """Fill ``buffer``, or its beginning, from ``offset`` on; returns how many bytes, 0 at the end of the file."""

    def close(self) -> None:
        """Give it back."""


class DiskFile:
    """A file on a disk."""

    block = BLOCK

    def __init__(self, path: str) -> None:
        self._file = FileIO(path)
        if hasattr(os, "posix_fadvise"):  # the system reads further ahead, while the checksum is taken
            os.posix_fadvise(self._file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)

    def read(self, offset: int, buffer: memoryview) -> int:
        """A block of it."""
        self._file.seek(offset)
        return self._file.readinto(buffer) or 0

    def close(self) -> None:
        """Close it."""
        self._file.close()


class RemoteObject:
    """An object in a store. Small chunks, which lie one after the other, come many in one request."""

    block = RANGE * RANGES

    def __init__(self, path: RemotePath, size: int) -> None:
        self._path, self._size = path, size
        self._ahead, self._start = memoryview(b""), 0

    def read(self, offset: int, buffer: memoryview) -> int:
        """A block of it, all of what was asked for."""
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
        """Nothing: every request stands alone."""


class ChunkReader:
    """Reads chunks one after the other. Plain reads, not a map: a disk that fails raises an error, no signal."""

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest
        self._open: tuple[str, Source] | None = None
        self._proved: set[str] = set()
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._held: Chunk | None = None

    def dtype(self, name: str) -> torch.dtype:
        """Stored type of a tensor."""
        return DTYPES[self._manifest.tensors[name].dtype]

    def load(self, name: str, chunk: Chunk) -> Tensor:
        """A chunk of tensor ``name``, of shape ``chunk.box.size``; its memory is used again for the next one.

        Raises:
            DamagedError: when it cannot be read or does not match its checksum.
            UnreachableError: when an object store does not answer.
        """
        if len(self._memory) < chunk.bytes:
            self._memory = torch.empty(0, dtype=torch.uint8)  # the old one goes first
            self._memory = torch.empty(chunk.bytes, dtype=torch.uint8)
        tensor = self._memory[: chunk.bytes].view(self.dtype(name)).view(chunk.box.size)
        if self._held is not chunk:
            self._held = None
            self.load_into(name, chunk, tensor)
            self._held = chunk
        return tensor

    def load_into(self, name: str, chunk: Chunk, out: Tensor) -> None:
        """Read a chunk into a contiguous tensor of the same type and size on the CPU.

        Raises:
            DamagedError: when it cannot be read or does not match its checksum; ``out`` may hold anything then.
        """
        buffer = out.detach().reshape(-1).view(torch.uint8).numpy().data
        self._read(chunk.file, chunk.offset, chunk.bytes, buffer, chunk.xxh3, f"tensor {name}")

    def prove(self, name: str, chunk: Chunk) -> None:
        """Check a chunk of tensor ``name`` against its checksum, a block at a time.

        Raises:
            DamagedError: when it cannot be read or does not match.
        """
        self._read(chunk.file, chunk.offset, chunk.bytes, None, chunk.xxh3, f"tensor {name}")

    def prove_head(self, file: str) -> None:
        """Check the bytes of a file that belong to no chunk; once.

        Raises:
            DamagedError: when they are not those that were written.
        """
        if file not in self._proved:
            record = self._manifest.files[file]
            self._read(file, 0, record.head, None, record.xxh3, "header" if record.head < record.bytes else "content")
            self._proved.add(file)

    def close(self) -> None:
        """Close the file that is open; done too when nobody needs the reader any more."""
        if self._open is not None:
            self._open[1].close()
        self._open = None

    __del__ = close

    def _file(self, name: str) -> Source:
        if self._open is None or self._open[0] != name:
            self.close()
            path = self._path(name)
            try:
                self._open = name, self._source(path, self._manifest.files[name].bytes)
            except OSError as error:
                raise DamagedError(f"{path} is missing or cannot be read: {error.strerror}") from error
        return self._open[1]

    def _source(self, path: Location, size: int) -> Source:
        return RemoteObject(path, size) if isinstance(path, RemotePath) else DiskFile(str(path))

    def _read(self, file: str, offset: int, length: int, buffer: memoryview | None, expected: str, what: str) -> None:
        """Prove ``length`` bytes of a file, and keep them if there is a ``buffer`` for them."""
        path = self._path(file)
        for proof in range(1, (PROOFS if isinstance(path, RemotePath) else 1) + 1):
            if self._digest(file, offset, length, buffer, what) == expected:
                return
            self.close()  # with what was read ahead
            if proof < PROOFS and isinstance(path, RemotePath):
                tell(f"{path}: {what} came with flipped bytes; it is asked for again, time {proof + 1} of {PROOFS}")
        raise DamagedError(f"{path} has flipped bytes ({what})")

    def _digest(self, file: str, offset: int, length: int, buffer: memoryview | None, what: str) -> str:
        """Checksum of ``length`` bytes of a file, which go to ``buffer`` if there is one."""
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
