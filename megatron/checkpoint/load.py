"""Load a checkpoint, collectively or in a single process, whatever layout wrote it.

``CheckpointReader`` reads boxes of tensors by name and verifies everything that it reads by its checksum.
``load_sharded`` fills the parts of every rank with it. Other programs can read checkpoints with
torch.distributed.checkpoint (see :mod:`megatron.checkpoint.dcp_reader`).
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import xxhash
from torch import Tensor

from megatron.checkpoint.durable_files import BLOCK, Crc32
from megatron.checkpoint.errors import CheckpointError, DamagedCheckpointError, read_error
from megatron.checkpoint.format import (
    BoxIndex,
    Manifest,
    TensorChunk,
    format_box,
    is_inside,
    parse_manifest,
    read_manifest,
    relative_box,
    whole_box,
)
from megatron.checkpoint.location import Location
from megatron.checkpoint.tensor_file import DTYPES, GlobalTensor, copy_tiled
from megatron.distributed.comm import Group
from megatron.distributed.launch import gather_results, run_on_rank0
from megatron.distributed.sharding import Box

if TYPE_CHECKING:
    from megatron.checkpoint.object_store import RemoteReader

READ_ATTEMPTS = 3
"""Reads of a chunk from an object store before a wrong checksum counts as damage: transfers may corrupt data."""


class DiskFile:
    """A file on a disk, read block by block."""

    block = BLOCK  # bytes of a read

    def __init__(self, path: Path) -> None:
        self._file = FileIO(path)
        if hasattr(os, "posix_fadvise"):  # larger read-ahead by the kernel
            os.posix_fadvise(self._file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
        self.close = self._file.close

    def read(self, offset: int, buffer: memoryview) -> int:
        """Read at most ``len(buffer)`` bytes."""
        self._file.seek(offset)
        return self._file.readinto(buffer) or 0


class CheckpointReader:
    """Reads and verifies tensors; holds at most the requested boxes and one chunk in memory.

    Uses plain reads rather than a memory map: a failing disk raises an OSError instead of a signal. Methods that read
    raise DamagedCheckpointError if a file cannot be read or a checksum differs, and UnreachableError if an object store
    does not answer.
    """

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest
        self._open: tuple[str, DiskFile | RemoteReader] | None = None
        self._verified_heads: set[str] = set()
        self._indices: dict[str, BoxIndex] = {}  # of chunks, by tensor
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._in_memory: TensorChunk | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all tensors."""
        return tuple(self.manifest.tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the stored shape of a tensor."""
        return self.manifest.tensors[name].shape

    def view(self, name: str) -> tuple[int, ...]:
        """Return the shape that boxes refer to: the same elements in row-major order."""
        return self.manifest.tensors[name].view

    def dtype(self, name: str) -> torch.dtype:
        """Return the stored type of a tensor."""
        return DTYPES[self.manifest.tensors[name].dtype]

    def read(self, name: str, box: Box | None = None) -> Tensor:
        """Return a box of a tensor (default: all of it), shape ``box.size``, in its stored type, on the CPU.

        Raises:
            CheckpointError: if the checkpoint has no such tensor, or the box is not inside it.
        """
        if name not in self.manifest.tensors:
            raise CheckpointError(f"{self.manifest.path} has no tensor {name}")
        box = box or whole_box(self.view(name))
        if not is_inside(box, self.view(name)):
            raise CheckpointError(f"{format_box(box)} is not inside {name}, which is {list(self.view(name))}")
        out = torch.empty(box.size, dtype=self.dtype(name))
        self.fill([(name, box, out)])
        return out

    def fill(self, parts: Iterable[tuple[str, Box, Tensor]]) -> None:
        """Fill tensors, of any type, strides and device, with boxes. Every chunk is read once, in file order."""
        wanted: dict[tuple[str, int, str, int], list[tuple[Box, Tensor]]] = defaultdict(list)
        for name, box, out in parts:
            chunks = self.manifest.tensors[name].chunks
            if name not in self._indices:
                self.manifest.check_partition(name)
                self._indices[name] = BoxIndex(chunk.box for chunk in chunks)
            for number, shared in self._indices[name].shared(box):
                target = relative_box(shared, chunks[number].box), out[relative_box(shared, box).slices]
                wanted[chunks[number].file, chunks[number].offset, name, number].append(target)
        for file, offset, name, number in sorted(wanted):
            self.verify_head(file)
            self._fill_from_chunk(name, number, wanted[file, offset, name, number])

    def _fill_from_chunk(self, name: str, number: int, targets: list[tuple[Box, Tensor]]) -> None:
        """Read a chunk and copy its boxes; read in place if a single contiguous target takes all of it."""
        chunk, dtype = self.manifest.tensors[name].chunks[number], self.dtype(name)
        box, target = targets[0]
        whole = len(targets) == 1 and box.size == chunk.box.size
        if whole and target.is_contiguous() and target.is_cpu and target.dtype == dtype:
            self.verify(name, chunk, target)
            return
        if len(self._memory) < chunk.bytes:
            self._memory = torch.empty(0, dtype=torch.uint8)  # free the old buffer first
            self._memory = torch.empty(chunk.bytes, dtype=torch.uint8)
        content = self._memory[: chunk.bytes].view(dtype).view(chunk.box.size)
        if self._in_memory is not chunk:
            self._in_memory = None
            self.verify(name, chunk, content)
            self._in_memory = chunk
        for box, target in targets:
            copy_tiled(target, content[box.slices])

    def verify(self, name: str, chunk: TensorChunk, out: Tensor | None = None) -> None:
        """Verify the checksum of a chunk; read it into ``out``, contiguous, of its type and on the CPU, if given."""
        buffer = None if out is None else out.detach().reshape(-1).view(torch.uint8).numpy().data
        self._read(chunk.file, chunk.offset, chunk.bytes, buffer, chunk.xxh3, f"tensor {name}")

    def verify_head(self, file: str) -> None:
        """Verify, once per file, the bytes that belong to no chunk."""
        if file not in self._verified_heads:
            record = self.manifest.files[file]
            self._read(file, 0, record.head, None, record.xxh3, "header" if record.head < record.bytes else "content")
            self._verified_heads.add(file)

    def close(self) -> None:
        """Close the open file; also called on deletion."""
        if self._open is not None:
            self._open[1].close()
        self._open = None

    __del__ = close

    def _read(self, file: str, offset: int, length: int, buffer: memoryview | None, expected: str, what: str) -> None:
        """Read ``length`` bytes of a file, into ``buffer`` unless it is None, and verify their checksum."""
        path = self.manifest.folder / file
        for attempt in range(1, (1 if isinstance(path, Path) else READ_ATTEMPTS) + 1):
            if attempt > 1 and not isinstance(path, Path):
                again = f"reading again, attempt {attempt} of {READ_ATTEMPTS}"
                path.warn(f"{what} arrived with flipped bytes; {again}")
            if self._digest(file, offset, length, buffer, expected, what) == expected or not expected:
                return
            self.close()  # discards data read ahead
        raise DamagedCheckpointError(f"{path} has flipped bytes ({what})")

    def _digest(self, file: str, offset: int, length: int, buffer: memoryview | None, expected: str, what: str) -> str:
        """Return the checksum of ``length`` bytes of a file, read into ``buffer`` unless it is None."""
        path, done = self.manifest.folder / file, 0
        digest = Crc32() if expected.startswith(Crc32.prefix) else xxhash.xxh3_64()
        if self._open is None or self._open[0] != file:
            self.close()
            try:
                size = self.manifest.files[file].bytes
                self._open = file, DiskFile(path) if isinstance(path, Path) else path.reader(size)
            except OSError as error:
                raise DamagedCheckpointError(f"{path} is missing or cannot be read: {error.strerror}") from error
        source = self._open[1]
        scratch = memoryview(bytearray(min(length, source.block) if buffer is None else 0))
        while done < length:
            block = scratch[: length - done] if buffer is None else buffer[done : done + source.block]
            try:
                count = source.read(offset + done, block)
            except OSError as error:
                raise read_error(path, error, f" ({what})") from error
            if not count:
                raise DamagedCheckpointError(f"{path} is truncated ({what})")
            digest.update(block[:count])
            done += count
        return digest.hexdigest()


def open_manifest(path: Location, group: Group) -> Manifest:
    """Open a manifest on the first rank, and return it on every rank; collective. Raises as :meth:`Manifest.open`."""

    def read() -> list[str]:
        content, inside = read_manifest(path)
        parse_manifest(path, content, inside).check_files()
        return [content.decode("latin1"), inside]

    content, inside = run_on_rank0(read, group)
    return parse_manifest(path, content.encode("latin1"), inside)


def load_sharded(manifest: Manifest, tensors: Mapping[str, GlobalTensor], group: Group) -> None:
    """Fill this rank's parts in place from a checkpoint written with any layout.

    Collective; errors are raised on every rank, and then the content of the parts is undefined.

    Args:
        manifest: of the checkpoint, the same on every rank.
        tensors: with the parts to fill; floating-point types are converted.
        group: the ranks that read.

    Raises:
        CheckpointError: if the checkpoint lacks a tensor or has it in another shape.
        DamagedCheckpointError: if a file is missing or a checksum differs.
        UnreachableError: if an object store does not answer.
    """

    def read() -> None:
        problems = [text for name, tensor in tensors.items() for text in _problems(manifest, name, tensor)]
        if problems:
            more = f"\nand {len(problems) - 10} more" if len(problems) > 10 else ""
            raise CheckpointError(f"{manifest.path} does not match:\n" + "\n".join(problems[:10]) + more)
        parts = ((name, part.box, part.resolve()) for name, tensor in tensors.items() for part in tensor.parts)
        CheckpointReader(manifest).fill(parts)

    gather_results(read, group)


def _problems(manifest: Manifest, name: str, tensor: GlobalTensor) -> Iterator[str]:
    """Yield why a tensor cannot be filled from a checkpoint."""
    if name not in manifest.tensors:
        yield f"{name} is missing from the checkpoint"
        return
    record = manifest.tensors[name]
    if (record.shape, record.view) != (tensor.shape, tensor.view):
        stored, wanted = (f"{list(t.shape)} viewed as {list(t.view)}" for t in (record, tensor))
        yield f"{name} is {stored} in the checkpoint, {wanted} here"
    elif DTYPES[record.dtype] != tensor.dtype and not (
        DTYPES[record.dtype].is_floating_point and tensor.dtype.is_floating_point
    ):
        yield f"{name} is {record.dtype} in the checkpoint, {tensor.dtype} here"
    for part in tensor.parts:
        if not is_inside(part.box, tensor.view):
            yield f"{format_box(part.box)} is not inside {name}, which is {list(tensor.view)}"
