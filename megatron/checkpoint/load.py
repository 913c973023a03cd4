"""Load a checkpoint, collectively or in a single process, whatever layout wrote it.

``load_sharded`` fills the parts of every rank through torch.distributed.checkpoint; ``CheckpointStorageReader`` also
serves any other program that uses that library. ``CheckpointReader`` reads tensors by name in a single process, for
conversion, inspection and generation. Everything that is read is verified by its checksum.
"""

from __future__ import annotations

import os
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from megatron.checkpoint.errors import CheckpointError
from megatron.checkpoint.format import (
    BoxIndex,
    Manifest,
    TensorChunk,
    TensorRecord,
    boxes_in_shape,
    format_box,
    is_inside,
    relative_box,
    whole_box,
)
from megatron.checkpoint.tensor_file import DTYPES, ChunkReader, GlobalTensor
from megatron.distributed.comm import Group
from megatron.distributed.sharding import Box


class PartsLoadPlanner(DefaultLoadPlanner):
    """Plans the reads of this rank's parts after checking that the checkpoint has all of every requested tensor.

    The inherited methods return plans unchanged.
    """

    def __init__(self, tensors: Mapping[str, GlobalTensor], manifest: Manifest) -> None:
        super().__init__()
        self._tensors, self._manifest = tensors, manifest

    def set_up_planner(self, state_dict: Any, metadata: Any = None, is_coordinator: bool = False) -> None:
        """Do nothing: the constructor has the tensors and the manifest."""

    def create_local_plan(self) -> LoadPlan:
        """Return one item per part and chunk that intersect."""
        problems = [text for name, tensor in self._tensors.items() for text in self._problems(name, tensor)]
        if problems:
            more = f"\nand {len(problems) - 10} more" if len(problems) > 10 else ""
            raise CheckpointError(f"{self._manifest.path} does not match:\n" + "\n".join(problems[:10]) + more)
        for name, tensor in self._tensors.items():
            if tensor.parts:
                self._manifest.check_partition(name)
        return LoadPlan([item for name in self._tensors for item in self._items(name)])

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        """Raise: checkpoints hold no pickled objects."""
        raise ValueError(f"{read_item.dest_index.fqn} is not a tensor")

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        """Return the elements to fill, a view of the part."""
        index = read_item.dest_index
        target = self._tensors[index.fqn].parts[index.index or 0].resolve()
        return target[Box(tuple(read_item.dest_offsets), tuple(read_item.lengths)).slices]

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
                yield f"{format_box(part.box)} is not inside {name}, which is {list(tensor.view)}"

    def _items(self, name: str) -> Iterator[ReadItem]:
        boxes = [chunk.box for chunk in self._manifest.tensors[name].chunks]
        index = BoxIndex(boxes)
        for number, part in enumerate(self._tensors[name].parts):
            for chunk, shared in index.shared(part.box):
                yield ReadItem(
                    LoadItemType.TENSOR,
                    dcp_metadata.MetadataIndex(name, part.box.start, number),
                    torch.Size(relative_box(shared, part.box).start),
                    dcp_metadata.MetadataIndex(name, boxes[chunk].start),
                    torch.Size(relative_box(shared, boxes[chunk]).start),
                    torch.Size(shared.size),
                )


@dataclass(frozen=True)
class _Piece:
    """A box of a chunk, and the shape in which the planner addresses it."""

    chunk: TensorChunk
    box: Box  # relative to the start of the chunk
    size: tuple[int, ...]


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
        tensors: dict[str, dcp_metadata.STORAGE_TYPES] = {}
        for name, record in self._manifest.tensors.items():
            outer = [box for c in record.chunks for _, box in boxes_in_shape(c.box, record.shape, record.view)]
            chunks = [dcp_metadata.ChunkStorageMetadata(torch.Size(box.start), torch.Size(box.size)) for box in outer]
            properties = dcp_metadata.TensorProperties(DTYPES[record.dtype])
            tensors[name] = dcp_metadata.TensorStorageMetadata(properties, torch.Size(record.shape), chunks)
        return dcp_metadata.Metadata(tensors)

    def set_up_storage_reader(self, metadata: dcp_metadata.Metadata, is_coordinator: bool) -> None:
        """Do nothing: the manifest suffices."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans unchanged."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read and verify chunks in file order, and fill all items from each."""
        wanted: dict[TensorChunk, list[tuple[ReadItem, _Piece]]] = defaultdict(list)
        for item in plan.items:
            name, offset = item.storage_index.fqn, tuple(item.storage_index.offset or ())
            if name not in self._pieces:
                self._pieces[name] = dict(_pieces(self._manifest.tensors[name]))
            piece = self._pieces[name][offset]
            wanted[piece.chunk].append((item, piece))
        reader = ChunkReader(self._manifest)
        for chunk in sorted(wanted, key=lambda chunk: (chunk.file, chunk.offset)):
            reader.verify_head(chunk.file)
            _fill(reader, chunk, wanted[chunk], planner)
        reader.close()
        future: Future[None] = Future()
        future.set_result(None)
        return future


def _pieces(record: TensorRecord) -> Iterator[tuple[tuple[int, ...], _Piece]]:
    """Yield the pieces of a tensor by start index: boxes of the stored shape, then whole chunks if the view differs."""
    for chunk in record.chunks:
        for inner, outer in boxes_in_shape(chunk.box, record.shape, record.view):
            yield outer.start, _Piece(chunk, relative_box(inner, chunk.box), outer.size)
        if record.shape != record.view:
            yield chunk.box.start, _Piece(chunk, relative_box(chunk.box, chunk.box), chunk.box.size)


def _fill(
    reader: ChunkReader, chunk: TensorChunk, wanted: Sequence[tuple[ReadItem, _Piece]], planner: LoadPlanner
) -> None:
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
    planner, reader = PartsLoadPlanner(tensors, manifest), CheckpointStorageReader(manifest)
    call_collectively(load, group, state_dict=dict(tensors), storage_reader=reader, planner=planner)


def call_collectively(
    act: Callable[..., Any], group: Group, undo: Callable[[], None] = lambda: None, **arguments: Any
) -> None:
    """Call a function of torch.distributed.checkpoint; raise the error of the lowest failed rank on every rank.

    ``undo`` is not called when a rank has died: the others then lose contact and cannot act collectively.
    """
    ranks: dict[str, Any] = {"no_dist": True} if group.size == 1 else {"process_group": group.handle}
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            act(**arguments, **ranks)
    except CheckpointException as error:
        undo()
        cause = error.failures[min(error.failures)][0]
        raise cause from None if isinstance(cause, CheckpointError) else error


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
            DamagedCheckpointError: if a file is missing or a checksum differs.
        """
        if name not in self.manifest.tensors:
            raise CheckpointError(f"{self.manifest.path} has no tensor {name}")
        record = self.manifest.tensors[name]
        box = box or whole_box(record.view)
        if not is_inside(box, record.view):
            raise CheckpointError(f"{format_box(box)} is not inside {name}, which is {list(record.view)}")
        if name not in self._indices:
            self.manifest.check_partition(name)
            self._indices[name] = BoxIndex(chunk.box for chunk in record.chunks)
        out = torch.empty(box.size, dtype=self.dtype(name))
        for number, shared in self._indices[name].shared(box):
            chunk = record.chunks[number]
            self._chunks.verify_head(chunk.file)
            target = out[relative_box(shared, box).slices]
            if shared == chunk.box and target.is_contiguous():
                self._chunks.load_into(name, chunk, target)
            else:
                target.copy_(self._chunks.load(name, chunk)[relative_box(shared, chunk.box).slices])
        return out
