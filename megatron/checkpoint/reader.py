"""Read tensors of a checkpoint in a single process, for conversion, inspection and generation."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron.checkpoint.boxes import BoxIndex, describe, is_inside, relative, whole
from megatron.checkpoint.chunks import ChunkReader
from megatron.checkpoint.errors import CheckpointError
from megatron.checkpoint.manifest import Manifest
from megatron.checkpoint.tensorfile import DTYPES
from megatron.parallel.shard import Box


class CheckpointReader:
    """Reads tensors by name; holds at most the requested box and one chunk in memory."""

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest
        self._chunks = ChunkReader(manifest)
        self._indices: dict[str, BoxIndex] = {}

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
            DamagedError: if a file is missing or a checksum differs.
        """
        if name not in self.manifest.tensors:
            raise CheckpointError(f"{self.manifest.path} has no tensor {name}")
        record = self.manifest.tensors[name]
        box = box or whole(record.view)
        if not is_inside(box, record.view):
            raise CheckpointError(f"{describe(box)} is not inside {name}, which is {list(record.view)}")
        if name not in self._indices:
            self.manifest.prove(name)
            self._indices[name] = BoxIndex(chunk.box for chunk in record.chunks)
        out = torch.empty(box.size, dtype=self.dtype(name))
        for number, shared in self._indices[name].shared(box):
            chunk = record.chunks[number]
            self._chunks.prove_head(chunk.file)
            target = out[relative(shared, box).slices]
            if shared == chunk.box and target.is_contiguous():
                self._chunks.load_into(name, chunk, target)
            else:
                target.copy_(self._chunks.load(name, chunk)[relative(shared, chunk.box).slices])
        return out
