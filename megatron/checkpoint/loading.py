"""Load through torch.distributed.checkpoint, with our own planner and a storage reader usable from any program."""

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
    """Plans the reads of this rank's parts after checking that the checkpoint has all of every requested tensor."""

    def __init__(self, tensors: Mapping[str, GlobalTensor], manifest: Manifest) -> None:
        self._tensors, self._manifest = tensors, manifest

    def set_up_planner(self, state_dict: Any, metadata: Any = None, is_coordinator: bool = False) -> None:
        """Do nothing: the constructor has the tensors and the manifest."""

    def create_local_plan(self) -> LoadPlan:
        """Return one item per part and chunk that intersect.

        Raises:
            CheckpointError: if a tensor is missing from the checkpoint, or has another shape or kind of type.
            DamagedError: if the chunks of a tensor are not a partition.
        """
        problems = [text for name, tensor in self._tensors.items() for text in self._problems(name, tensor)]
        if problems:
            more = f"\nand {len(problems) - 10} more" if len(problems) > 10 else ""
            raise CheckpointError(f"{self._manifest.path} does not match:\n" + "\n".join(problems[:10]) + more)
        for name, tensor in self._tensors.items():
            if tensor.parts:
                self._manifest.prove(name)
        return LoadPlan([item for name in self._tensors for item in self._items(name)])

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans unchanged."""
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        """Return the plan unchanged."""
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        """Raise: checkpoints hold no pickled objects."""
        raise ValueError(f"{read_item.dest_index.fqn} is not a tensor")

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        """Return the elements to fill, a view of the part."""
        index = read_item.dest_index
        target = self._tensors[index.fqn].parts[index.index or 0].resolve()
        return target[Box(tuple(read_item.dest_offsets), tuple(read_item.lengths)).slices]

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """Do nothing: the resolved tensor is a view of the part."""

    def _problems(self, name: str, tensor: GlobalTensor) -> Iterator[str]:
        if name not in self._manifest.tensors:
            yield f"{name} is missing from the checkpoint"
            return
        record = self._manifest.tensors[name]
        if (record.shape, record.view) != (tensor.shape, tensor.view):
            stored, wanted = (f"{list(t.shape)} viewed as {list(t.view)}" for t in (record, tensor))
            yield f"{name} is {stored} in the checkpoint, {wanted} here"
        elif DTYPES[record.dtype] != tensor.dtype and not (
            DTYPES[record.dtype].is_floating_point and tensor.dtype.is_floating_point
        ):
            yield f"{name} is {record.dtype} in the checkpoint, {tensor.dtype} here"
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
    """A box of a chunk, and the shape in which the planner addresses it."""

    chunk: Chunk
    box: Box  # relative to the start of the chunk
    size: tuple[int, ...]


Wanted = list[tuple[ReadItem, _Piece]]
"""The items to fill from a chunk, each with its piece of the chunk."""


class CheckpointStorageReader(StorageReader):
    """Our checkpoints as a storage reader of torch.distributed.checkpoint.

    ``dcp.load(state_dict, storage_reader=CheckpointStorageReader(Manifest.open(path)))`` fills plain tensors and
    DTensors of the stored shapes by name in any program. Our planner addresses chunks as boxes of the view, others as
    boxes of the stored shape; both are supported.
    """

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest
        self._pieces: dict[str, dict[tuple[int, ...], _Piece]] = {}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Switch to another checkpoint."""
        if checkpoint_id is not None:
            self._manifest, self._pieces = Manifest.open(Path(checkpoint_id)), {}

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return False: readers are not created from a path."""
        return False

    def read_metadata(self) -> dcp_metadata.Metadata:
        """Return the metadata of every tensor in its stored shape."""
        return dcp_metadata.Metadata({name: _metadata(r) for name, r in self._manifest.tensors.items()})

    def set_up_storage_reader(self, metadata: dcp_metadata.Metadata, is_coordinator: bool) -> None:
        """Do nothing: the manifest suffices."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans unchanged."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read and verify chunks in file order, and fill all items from each.

        Raises:
            DamagedError: if a chunk is missing or its checksum differs.
        """
        wanted: dict[Chunk, Wanted] = defaultdict(list)
        for item in plan.items:
            name, offset = item.storage_index.fqn, tuple(item.storage_index.offset or ())
            if name not in self._pieces:
                self._pieces[name] = dict(_pieces(self._manifest.tensors[name]))
            piece = self._pieces[name][offset]
            wanted[piece.chunk].append((item, piece))
        reader = ChunkReader(self._manifest)
        for chunk in sorted(wanted, key=lambda chunk: (chunk.file, chunk.offset)):
            reader.prove_head(chunk.file)
            _fill(reader, chunk, wanted[chunk], planner)
        reader.close()
        future: Future[None] = Future()
        future.set_result(None)
        return future


def _pieces(record: TensorRecord) -> Iterator[tuple[tuple[int, ...], _Piece]]:
    """Yield the pieces of a tensor by start index: boxes of the stored shape, then whole chunks if the view differs."""
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
    """Read a chunk once and copy it into all items; read in place if one contiguous item covers the chunk."""
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
