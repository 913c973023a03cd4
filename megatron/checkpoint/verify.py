"""Verify every byte of a checkpoint, and summarise or compare its tensors.

All functions work chunk by chunk, so the layouts that wrote the checkpoints do not matter and little memory is
needed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch

from megatron.checkpoint.errors import DamagedCheckpointError
from megatron.checkpoint.format import Manifest, TensorChunk, split_box
from megatron.checkpoint.load import CheckpointReader
from megatron.distributed.sharding import Box


def list_damage(manifest: Manifest) -> Iterator[str]:
    """Yield one message per damaged place of a checkpoint; reads all of it, one block at a time."""
    for name in manifest.tensors:
        try:
            manifest.check_partition(name)
        except DamagedCheckpointError as error:
            yield str(error)
    for file, chunks in chunks_by_file(manifest).items():
        end = manifest.files[file].head
        bounds = [*((chunk.offset, chunk.bytes) for _, chunk in chunks), (manifest.files[file].bytes, 0)]
        for start, size in bounds if end else ():  # files of another program have no head, and hold more than chunks
            if end != start:
                yield f"{manifest.folder / file}: bytes {end} to {start} have no checksum, or two"
            end = start + size
        yield from list_file_damage(manifest, file, chunks)


NamedChunks = list[tuple[str, TensorChunk]]
"""Chunks, each with the name of its tensor."""


def chunks_by_file(manifest: Manifest) -> dict[str, NamedChunks]:
    """Return the chunks in every file, in the order of their bytes."""
    chunks: dict[str, NamedChunks] = {file: [] for file in manifest.files}
    for name, record in manifest.tensors.items():
        for chunk in record.chunks:
            chunks[chunk.file].append((name, chunk))
    return {file: sorted(inside, key=lambda item: item[1].offset) for file, inside in chunks.items()}


def list_file_damage(manifest: Manifest, file: str, chunks: NamedChunks) -> Iterator[str]:
    """Yield one message per checksum of a file that differs: that of its head, then those of its ``chunks``."""
    reader = CheckpointReader(manifest)
    for check in (partial(reader.verify_head, file), *(partial(reader.verify, *chunk) for chunk in chunks)):
        try:
            check()
        except DamagedCheckpointError as error:
            yield str(error)


COMPARE_ELEMENTS = 1 << 20
"""Elements computed with at a time, in addition to the chunk in memory."""


def summarize_tensor(reader: CheckpointReader, name: str) -> tuple[float, float, float]:
    """Return minimum, maximum and root mean square of a tensor of at least one element; NaN if any element is."""
    minimum, maximum = torch.tensor(math.inf).double(), torch.tensor(-math.inf).double()
    squares, count = 0.0, 0
    for box in _small_boxes(reader, name):
        values = reader.read(name, box).double()
        low, high = values.aminmax()
        minimum, maximum = torch.minimum(minimum, low), torch.maximum(maximum, high)  # these propagate NaN
        squares, count = squares + float(values.square().sum()), count + values.numel()
    return float(minimum), float(maximum), math.sqrt(squares / count) if count else 0.0


@dataclass(frozen=True)
class TensorDifference:
    """Difference between two tensors."""

    identical: bool  # same type and bitwise equal
    largest: float  # maximum absolute difference of two elements
    relative: float  # norm of the difference over the norm of the first tensor


def compare_tensors(a: CheckpointReader, b: CheckpointReader, name: str) -> TensorDifference:
    """Compare a tensor that has the same shape and view in both checkpoints."""
    identical, squares, reference = a.dtype(name) == b.dtype(name), 0.0, 0.0
    largest = torch.tensor(0.0).double()
    for box in _small_boxes(a, name):
        x, y = a.read(name, box), b.read(name, box)
        reference += float(x.double().square().sum())
        if x.dtype == y.dtype and torch.equal(x.reshape(-1).view(torch.uint8), y.reshape(-1).view(torch.uint8)):
            continue
        identical = False
        delta = x.double() - y.double()
        largest = torch.maximum(largest, delta.abs().max())
        squares += float(delta.square().sum())
    relative = math.sqrt(squares / reference) if reference else math.sqrt(squares)
    return TensorDifference(identical, float(largest), relative)


def _small_boxes(reader: CheckpointReader, name: str) -> Iterator[Box]:
    """Yield boxes that partition a tensor, grouped by chunk so that each chunk is read once."""
    for chunk in reader.manifest.tensors[name].chunks:
        yield from split_box(chunk.box, COMPARE_ELEMENTS)
