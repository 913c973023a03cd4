"""Tensors in pieces: each piece is a box in memory that is mapped from a file, and is read only when it is needed.

An `AssembledTensor` has the methods of a :class:`megatron.checkpoint.tensor_file.TensorFile`, so that
:class:`megatron.convert.huggingface.weights.HuggingFaceWeights` reads the checkpoints of other programs, too.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from megatron.checkpoint.errors import DamagedCheckpointError
from megatron.checkpoint.format import intersect, partition_problem, relative_box
from megatron.checkpoint.tensor_file import DTYPES, NO_RESERVE
from megatron.config.files import open_regular
from megatron.config.text import clipped
from megatron.convert.megatron_lm.pickles import StoredTensor
from megatron.distributed.sharding import Box


class PartialTensor(Protocol):
    """A tensor of which some rows can be read, with the methods of a `TensorFile`."""

    def dtype(self, key: str) -> torch.dtype:
        """Return the type of the tensor."""

    def shape(self, key: str) -> tuple[int, ...]:
        """Return the shape of the tensor."""

    def tensor(self, key: str, rows: range | None = None) -> Tensor:
        """Return the tensor; of its first dimension only ``rows`` are set, and use memory."""


class TensorPiece(NamedTuple):
    """A box of a tensor, and what returns its elements."""

    box: Box
    read: Callable[[], Tensor]


@dataclass(frozen=True)
class AssembledTensor:
    """A tensor that consists of pieces."""

    stored_dtype: torch.dtype
    stored_shape: tuple[int, ...]
    pieces: tuple[TensorPiece, ...]

    def dtype(self, key: str) -> torch.dtype:
        """Return the type of the tensor."""
        return self.stored_dtype

    def shape(self, key: str) -> tuple[int, ...]:
        """Return the shape of the tensor."""
        return self.stored_shape

    def tensor(self, key: str, rows: range | None = None) -> Tensor:
        """Return the tensor; of its first dimension only ``rows`` are set, and use memory."""
        if len(self.pieces) == 1:
            return self.pieces[0].read()
        rows = rows or range(self.stored_shape[0])
        wanted = Box((rows.start, *(0 for _ in self.stored_shape[1:])), (len(rows), *self.stored_shape[1:]))
        out = torch.empty(self.stored_shape, dtype=self.stored_dtype)
        for piece in self.pieces:
            part = intersect(piece.box, wanted)
            if part is not None:
                out[part.slices] = piece.read()[relative_box(part, piece.box).slices]
        return out

    def check(self, key: str, folder: Path) -> None:
        """Raise DamagedCheckpointError unless the pieces fill the tensor, each element once."""
        if problem := partition_problem(self.stored_shape, [piece.box for piece in self.pieces]):
            raise DamagedCheckpointError(f"{folder} does not hold all of {clipped(key)}: {problem}")


@dataclass(frozen=True)
class RowsOf:
    """Rows of another tensor, from ``start``: a part of a fused weight."""

    base: PartialTensor
    start: int
    count: int

    def dtype(self, key: str) -> torch.dtype:
        """Return the type of the tensor."""
        return self.base.dtype(key)

    def shape(self, key: str) -> tuple[int, ...]:
        """Return the shape of the tensor; that of the stored rows if there are fewer."""
        rows, *others = self.base.shape(key)
        return max(0, min(self.count, rows - self.start)), *others

    def tensor(self, key: str, rows: range | None = None) -> Tensor:
        """Return the tensor; of its first dimension only ``rows`` are set, and use memory."""
        rows = rows or range(self.count)
        read = self.base.tensor(key, range(self.start + rows.start, self.start + rows.stop))
        return read[self.start : self.start + self.count]


@dataclass(frozen=True)
class ElementOf:
    """One element of the first dimension of another tensor: an expert."""

    base: PartialTensor
    index: int

    def dtype(self, key: str) -> torch.dtype:
        """Return the type of the tensor."""
        return self.base.dtype(key)

    def shape(self, key: str) -> tuple[int, ...]:
        """Return the shape of the tensor."""
        return self.base.shape(key)[1:]

    def tensor(self, key: str, rows: range | None = None) -> Tensor:
        """Return the tensor."""
        return self.base.tensor(key, range(self.index, self.index + 1))[self.index]


@dataclass(frozen=True)
class RotaryHalves:
    """Rows of queries or keys whose rotary pairs are neighbours, as halves of each head, as in transformers.

    Rotary embeddings that multiply complex numbers, as in Llama's original code, rotate the channels ``2 i`` and
    ``2 i + 1`` of a head; those of transformers ``i`` and ``i + d / 2``.
    """

    base: PartialTensor
    head_dim: int

    def dtype(self, key: str) -> torch.dtype:
        """Return the type of the tensor."""
        return self.base.dtype(key)

    def shape(self, key: str) -> tuple[int, ...]:
        """Return the shape of the tensor."""
        return self.base.shape(key)

    def tensor(self, key: str, rows: range | None = None) -> Tensor:
        """Return the tensor; only heads with ``rows`` are set."""
        size = self.head_dim
        shape = self.base.shape(key)
        if shape[0] % size:
            raise DamagedCheckpointError(f"{key} {list(shape)} has no heads of {size} channels")
        rows = rows or range(shape[0])
        whole = range(rows.start // size * size, -(-rows.stop // size) * size)
        out = torch.empty(shape, dtype=self.dtype(key))
        part = self.base.tensor(key, whole)[whole.start : whole.stop]
        pairs = part.reshape(-1, size // 2, 2, *shape[1:])
        out[whole.start : whole.stop] = pairs.transpose(1, 2).reshape(part.shape)
        return out


class MappedFiles:
    """Tensors in files of ``torch.save``, which are mapped when they are first read."""

    def __init__(self) -> None:
        self._maps: dict[Path, Tensor] = {}

    def tensor(self, place: StoredTensor) -> Tensor:
        """Return a tensor backed by its file, of any strides; it must not be modified.

        Raises:
            DamagedCheckpointError: if the file is gone, or shorter than before.
        """
        dtype = DTYPES[place.dtype]
        if 0 in place.shape:
            return torch.empty(place.shape, dtype=dtype)
        last = sum((size - 1) * stride for size, stride in zip(place.shape, place.strides))
        content = self._content(place.path)
        end = place.offset + (last + 1) * dtype.itemsize
        if end > len(content):
            raise DamagedCheckpointError(f"{place.path} is truncated")
        elements = content[place.offset : end]
        if place.offset % dtype.itemsize:
            elements = elements.clone()  # elements of what lies in a larger file may be unaligned
        return elements.view(dtype).as_strided(place.shape, place.strides)

    def _content(self, path: Path) -> Tensor:
        if path not in self._maps:
            try:
                with open_regular(path) as file:
                    mapped = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE | NO_RESERVE)
            except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
                raise DamagedCheckpointError(f"{path} cannot be read: {error}") from error
            self._maps[path] = torch.frombuffer(mapped, dtype=torch.uint8)
        return self._maps[path]


PartialTensors = Mapping[str, PartialTensor]
"""Tensors by their names."""
