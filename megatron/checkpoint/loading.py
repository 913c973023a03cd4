"""Loading through torch.distributed.checkpoint: our planner, and a storage that any program can load from."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from megatron.checkpoint.boxes import BoxIndex, describe, folded, is_inside, relative
from megatron.checkpoint.chunks import ChunkReader
from megatron.checkpoint.errors import CheckpointError
from megatron.checkpoint.manifest import Chunk, Manifest, TensorRecord
from megatron.checkpoint.parts import GlobalTensor
from megatron.checkpoint.tensorfile import DTYPES
from megatron.parallel.shard import Box


class PartsLoadPlanner(LoadPlanner):
    """Plans to fill this rank's parts, once the checkpoint is proved to hold all of every tensor wanted."""

    def __init__(self, tensors: Mapping[str, GlobalTensor], manifest: Manifest) -> None:
        self._tensors, self._manifest = tensors, manifest

    def set_up_planner(self, state_dict: Any, metadata: Any = None, is_coordinator: bool = False) -> None:
        """Nothing: everything was given to the constructor."""

    def create_local_plan(self) -> LoadPlan:
        """One item per part and chunk that share elements.

        Raises:
            CheckpointError: when the checkpoint lacks a tensor, or has it in another shape or kind of type.
            DamagedError: when its chunks are not a partition.
        """
        problems = [text for name, tensor in self._tensors.items() for text in self._problems(name, tensor)]
        if problems:
            more = f"\nand {len(problems) - 10} more" if len(problems) > 10 else ""
            raise CheckpointError(f"{self._manifest.path} does not fit:\n" + "\n".join(problems[:10]) + more)
        for name, tensor in self._tensors.items():
            if tensor.parts:
                self._manifest.prove(name)
        return LoadPlan([item for name in self._tensors for item in self._items(name)])

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """The plans as they are."""
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        """The plan as it is."""
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        """Never called: a checkpoint holds no pickled objects."""
        raise ValueError(f"{read_item.dest_index.fqn} is no tensor")

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        """The elements to fill, a view of the part."""
        index = read_item.dest_index
        target = self._tensors[index.fqn].parts[index.index or 0].resolve()
        return target[Box(tuple(read_item.dest_offsets), tuple(read_item.lengths)).slices]

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """Nothing: what was resolved is a view."""

    def _problems(self, name: str, tensor: GlobalTensor) -> Iterator[str]:
        if name not in self._manifest.tensors:
            yield f"{name} is not in it"
            return
        record = self._manifest.tensors[name]
        if (record.shape, record.view) != (tensor.shape, tensor.view):
            seen, wanted = (f"{list(t.shape)} viewed as {list(t.view)}" for t in (record, tensor))
            yield f"{name} is {seen} there, {wanted} here"
        elif DTYPES[record.dtype] != tensor.dtype and not (
            DTYPES[record.dtype].is_floating_point and tensor.dtype.is_floating_point
        ):
            yield f"{name} is {record.dtype} there, {tensor.dtype} here"
        for part in tensor.parts:
            if not is_inside(part.box, tensor.view):
                yield f"{describe(part.box)} is not inside {name}, which is {list(tensor.view)}"

    def _items(self, name: str) -> Iterator[ReadItem]:
        boxes = [chunk.box for chunk in self._manifest.tensors[name].chunks]
        index = BoxIndex(boxes)
        for number, part in enumerate(self._tensors[name].parts):
            for chunk, shared in index.shared(part.box):
                yield ReadItem(
                    LoadItemType.TENSOR,
                    dcp_metadata.MetadataIndex(name, part.box.start, number),
                    torch.Size(relative(shared, part.box).start),
                    dcp_metadata.MetadataIndex(name, boxes[chunk].start),
                    torch.Size(relative(shared, boxes[chunk]).start),
                    torch.Size(shared.size),
                )


@dataclass(frozen=True)
class _Piece:
    """A box of a chunk (counted from the chunk's first corner), and the shape in which a planner sees that box."""

    chunk: Chunk
    box: Box
    size: tuple[int, ...]


Wanted = list[tuple[ReadItem, _Piece]]
"""What is to be filled from a chunk, and from which piece of it."""


class CheckpointStorageReader(StorageReader):
    """Our checkpoints as storage of torch.distributed.checkpoint.

    ``dcp.load(state_dict, storage_reader=CheckpointStorageReader(Manifest.open(path)))`` fills plain tensors and
    DTensors of the stored shapes by name in any program. Chunks are offered both as boxes of the view, to our planner,
    and as the boxes of the stored shape that they consist of, to every other.
    """

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest
        self._pieces: dict[str, dict[tuple[int, ...], _Piece]] = {}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Turn to another checkpoint."""
        if checkpoint_id is not None:
            self._manifest, self._pieces = Manifest.open(Path(checkpoint_id)), {}

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """A reader is never found by a path."""
        return False

    def read_metadata(self) -> dcp_metadata.Metadata:
        """Every tensor in its stored shape."""
        return dcp_metadata.Metadata({name: _metadata(r) for name, r in self._manifest.tensors.items()})

    def set_up_storage_reader(self, metadata: dcp_metadata.Metadata, is_coordinator: bool) -> None:
        """Nothing: the manifest is all."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """The plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """The plans as they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read chunk by chunk in the order of the files, prove each, and fill what wants some of it.

        Raises:
            DamagedError: when a chunk does not match its checksum or is not there.
        """
        wanted: dict[Chunk, Wanted] = defaultdict(list)
        for item in plan.items:
            piece = self._find(item)
            wanted[piece.chunk].append((item, piece))
        reader = ChunkReader(self._manifest)
        for chunk in sorted(wanted, key=lambda chunk: (chunk.file, chunk.offset)):
            reader.prove_head(chunk.file)
            _fill(reader, chunk, wanted[chunk], planner)
        reader.close()
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _find(self, item: ReadItem) -> _Piece:
        """What an item reads some of."""
        name, offset = item.storage_index.fqn, tuple(item.storage_index.offset or ())
        if name not in self._pieces:
            self._pieces[name] = dict(_pieces(self._manifest.tensors[name]))
        return self._pieces[name][offset]


def _pieces(record: TensorRecord) -> Iterator[tuple[tuple[int, ...], _Piece]]:
    """By first corner in the stored shape, the pieces that are boxes of it; by that in the view, whole chunks."""
    for chunk in record.chunks:
        for inner, outer in folded(chunk.box, record.shape, record.view):
            yield outer.start, _Piece(chunk, relative(inner, chunk.box), outer.size)
        if record.shape != record.view:
            yield chunk.box.start, _Piece(chunk, relative(chunk.box, chunk.box), chunk.box.size)


def _metadata(record: TensorRecord) -> dcp_metadata.TensorStorageMetadata:
    boxes = [outer for chunk in record.chunks for _, outer in folded(chunk.box, record.shape, record.view)]
    chunks = [dcp_metadata.ChunkStorageMetadata(torch.Size(box.start), torch.Size(box.size)) for box in boxes]
    properties = dcp_metadata.TensorProperties(DTYPES[record.dtype])
    return dcp_metadata.TensorStorageMetadata(properties, torch.Size(record.shape), chunks)


def _fill(reader: ChunkReader, chunk: Chunk, wanted: Wanted, planner: LoadPlanner) -> None:
    """Read a chunk once and copy what each item wants of it; straight into its place where that is possible."""
    for item, piece in wanted:
        name = item.storage_index.fqn
        target = planner.resolve_tensor(item).detach()
        dtype = reader.dtype(name)
        whole = item.lengths.numel() == chunk.box.numel
        if len(wanted) == 1 and whole and target.is_contiguous() and target.is_cpu and target.dtype == dtype:
            reader.load_into(name, chunk, target)
        else:
            seen = reader.load(name, chunk)[piece.box.slices].reshape(piece.size)
            target.copy_(seen[Box(tuple(item.storage_offsets), tuple(item.lengths)).slices])
        planner.commit_tensor(item, target)
