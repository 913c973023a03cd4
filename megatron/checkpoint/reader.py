"""A checkpoint read by one process: for conversion, inspection and generation."""

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
    """Tensors of a checkpoint by name; holds no more than what is asked for and one chunk.

    Attributes:
        manifest: of the checkpoint.
    """

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest
        self._chunks = ChunkReader(manifest)
        self._indices: dict[str, BoxIndex] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """All tensors."""
        return tuple(self.manifest.tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """Stored shape of a tensor."""
        return self.manifest.tensors[name].shape

    def view(self, name: str) -> tuple[int, ...]:
        """The shape that boxes refer to: the same elements, row by row."""
        return self.manifest.tensors[name].view

    def dtype(self, name: str) -> torch.dtype:
        """Stored type of a tensor."""
        return DTYPES[self.manifest.tensors[name].dtype]

    def read(self, name: str, box: Box | None = None) -> Tensor:
        """A box of a tensor (default: all of it), of shape ``box.size``, in its stored type, on the CPU.

        Raises:
            CheckpointError: when the checkpoint has no such tensor, or the box is not inside it.
            DamagedError: when what is read does not match its checksum, or is not there.
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
