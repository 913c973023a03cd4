"""Chunks of a checkpoint, read from the disk and proved by their checksums."""

from __future__ import annotations

import os
from io import FileIO
from pathlib import Path

import torch
import xxhash
from torch import Tensor

from megatron.checkpoint.errors import DamagedError
from megatron.checkpoint.files import BLOCK
from megatron.checkpoint.manifest import Chunk, Manifest
from megatron.checkpoint.tensorfile import DTYPES


class ChunkReader:
    """Reads chunks one after the other. Plain reads, not a map: a disk that fails raises an error, no signal."""

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest
        self._open: tuple[str, FileIO] | None = None
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

    def _file(self, name: str) -> FileIO:
        if self._open is None or self._open[0] != name:
            self.close()
            try:
                self._open = name, FileIO(str(self._path(name)))
            except OSError as error:
                raise DamagedError(f"{self._path(name)} is missing or cannot be read: {error.strerror}") from error
            if hasattr(os, "posix_fadvise"):  # the system reads further ahead, while the checksum is taken
                os.posix_fadvise(self._open[1].fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
        return self._open[1]

    def _read(self, file: str, offset: int, length: int, buffer: memoryview | None, expected: str, what: str) -> None:
        """Prove ``length`` bytes of a file, and keep them if there is a ``buffer`` for them."""
        source, digest, done = self._file(file), xxhash.xxh3_64(), 0
        scratch = memoryview(bytearray(min(length, BLOCK) if buffer is None else 0))
        while done < length:
            block = scratch[: length - done] if buffer is None else buffer[done : done + BLOCK]
            try:
                source.seek(offset + done)
                count = source.readinto(block) or 0
            except OSError as error:
                raise DamagedError(f"{self._path(file)} cannot be read: {error.strerror} ({what})") from error
            if not count:
                raise DamagedError(f"{self._path(file)} is truncated ({what})")
            digest.update(block[:count])
            done += count
        if digest.hexdigest() != expected:
            raise DamagedError(f"{self._path(file)} has flipped bytes ({what})")

    def _path(self, file: str) -> Path:
        return self._manifest.path / file
