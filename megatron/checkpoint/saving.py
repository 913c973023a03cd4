"""Save through torch.distributed.checkpoint, with a planner and a storage writer of our own.

The library gathers every rank's plan on rank 0, where they are checked, sends the plans back, gathers the results and
lets rank 0 finish. An error on any rank is raised on all of them. This file decides what is written, and how.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from megatron.checkpoint.attempts import discard_upload, new_upload, publish_upload
from megatron.checkpoint.boxes import cut, folding, partition_problem, relative
from megatron.checkpoint.claims import Claim, blame, shop_of
from megatron.checkpoint.errors import StorageError
from megatron.checkpoint.files import checksum, make_folders_inside, refused, sync_folder, write_file
from megatron.checkpoint.folder import Checkpoints
from megatron.checkpoint.manifest import MANIFEST, Chunk, FileRecord, TensorRecord, encode
from megatron.checkpoint.parts import GlobalTensor
from megatron.checkpoint.publish import abandon, begin, publish, write_marker
from megatron.checkpoint.remote import Location, RemotePath, on_disk
from megatron.checkpoint.retries import again
from megatron.checkpoint.tensorfile import NAMES, TensorFileWriter
from megatron.parallel.shard import Box

CHUNK_BYTES = 64 << 20
"""Maximum bytes of a chunk, the unit of reading: larger chunks need more memory and waste more on small boxes."""

T = TypeVar("T")

Kinds = dict[str, tuple[tuple[int, ...], tuple[int, ...], torch.dtype]]
"""Shape, view and type of tensors, by name."""


class PartsSavePlanner(SavePlanner):
    """Plans the writes of all ranks after checking that their parts partition every tensor."""

    def __init__(self, tensors: Mapping[str, GlobalTensor]) -> None:
        self._tensors = tensors
        self._resolved: tuple[tuple[str, int], Tensor] | None = None

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        """Do nothing: the constructor has the tensors."""

    def create_local_plan(self) -> SavePlan:
        """Return one item per chunk of this rank's parts, in the order of the tensors."""
        kinds = {name: (t.shape, t.view, t.dtype) for name, t in self._tensors.items()}
        items = [
            _write_item(name, number, box, tensor)
            for name, tensor in self._tensors.items()
            for number, part in enumerate(tensor.parts)
            for box in cut(part.box, CHUNK_BYTES // tensor.dtype.itemsize)
        ]
        return SavePlan(items, planner_data=kinds)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], dcp_metadata.Metadata]:
        """Check that the parts of all ranks partition every tensor.

        Raises:
            ValueError: if they do not, or if ranks disagree about a tensor; lists all such tensors.
        """
        kinds: Kinds = {}
        problems = []
        for rank, plan in enumerate(all_plans):
            for name, kind in plan.planner_data.items():
                if kinds.setdefault(name, kind) != kind:
                    problems.append(f"{name}: {kind} on rank {rank}, {kinds[name]} on another rank")
        boxes: dict[str, list[Box]] = {name: [] for name in kinds}
        for plan in all_plans:
            for item in plan.items:
                boxes[item.index.fqn].append(_box(item))
        for name, (shape, view, _) in kinds.items():
            if folding(shape, view) is None:
                problems.append(f"{name}: {list(view)} is not a view of {list(shape)}")
            elif problem := partition_problem(view, boxes[name]):
                problems.append(f"{name}: {problem}")
        if problems:
            raise ValueError("the parts of all ranks do not partition the tensors:\n" + "\n".join(problems))
        empty = [SavePlan(plan.items) for plan in all_plans]
        return empty, dcp_metadata.Metadata({}, planner_data=kinds)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Return the plan unchanged."""
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        """Return the elements of an item; the part they belong to is cached until another part is needed."""
        name, number = write_item.index.fqn, write_item.index.index or 0
        part = self._tensors[name].parts[number]
        if self._resolved is None or self._resolved[0] != (name, number):
            self._resolved = None  # free its memory before the next part is computed
            self._resolved = (name, number), part.resolve()
        return self._resolved[1][relative(_box(write_item), part.box).slices]


def _write_item(name: str, part: int, box: Box, tensor: GlobalTensor) -> WriteItem:
    chunk = dcp_metadata.ChunkStorageMetadata(torch.Size(box.start), torch.Size(box.size))
    data = TensorWriteData(chunk, dcp_metadata.TensorProperties(tensor.dtype), torch.Size(tensor.view))
    return WriteItem(dcp_metadata.MetadataIndex(name, box.start, part), WriteItemType.SHARD, tensor_data=data)


def _box(item: WriteItem) -> Box:
    if item.tensor_data is None:
        raise ValueError(f"{item.index.fqn} is not a tensor")
    return Box(tuple(item.tensor_data.chunk.offsets), tuple(item.tensor_data.chunk.sizes))


@dataclass
class Extra:
    """Content of a checkpoint besides tensors."""

    state: Mapping[str, Any]  # plain numbers, as JSON
    config: dict[str, Any]  # options, as JSON
    files: Mapping[str, Path | bytes]  # small files by name, as content or as a path to copy


@dataclass
class FileResult:
    """The file that a rank has written."""

    name: str
    record: FileRecord


class CheckpointWriter(StorageWriter):
    """Writes one safetensors file per rank, then the manifest and the marker on rank 0."""

    def __init__(self, final: Location, extra: Extra, rank: int, claim: Claim | None = None) -> None:
        self._final, self._extra, self._rank, self._claim = final, extra, rank, claim
        self._staging = shop_of(claim)
        self._folder: Location | None = None

    def abandon(self) -> None:
        """Remove the files of a failed save, as far as possible; does nothing on ranks other than 0."""
        if isinstance(self._folder, RemotePath):
            discard_upload(self._folder)
        elif self._folder is not None and isinstance(self._final, Path):
            abandon(self._final, self._staging)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Do nothing: each writer writes one checkpoint."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return False: writers are not created from a path."""
        return False

    def set_up_storage_writer(self, is_coordinator: bool) -> None:
        """Reject state and config that are not JSON before anything is written."""
        encode({}, {}, self._extra.state, self._extra.config)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Create the staging folder on rank 0 and send its path to all ranks in their plans."""
        folder = self._folder = self._storage_errors(self._begin)
        return [replace(plan, storage_data=folder) for plan in plans]

    def _begin(self) -> Location:
        if self._claim is not None:
            self._claim.ready()
        return new_upload(self._final) if isinstance(self._final, RemotePath) else begin(self._final, self._staging)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's file, chunk by chunk."""
        future: Future[list[WriteResult]] = Future()
        future.set_result(self._storage_errors(lambda: self._write(plan, planner)) if plan.items else [])
        return future

    def finish(self, metadata: dcp_metadata.Metadata, results: list[list[WriteResult]]) -> None:
        """Write small files, manifest and marker, and publish the checkpoint."""
        flat = [result for of_rank in results for result in of_rank]
        self._storage_errors(lambda: self._finish(metadata.planner_data, flat))

    def _write(self, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        folder: Location = plan.storage_data
        if isinstance(folder, RemotePath):  # a failed multipart upload must restart from the beginning
            return again(lambda: write_tensors(folder, self._rank, plan, planner))
        return write_tensors(folder, self._rank, plan, planner)

    def _finish(self, kinds: Kinds, results: Sequence[WriteResult]) -> None:
        folder = self._folder
        if folder is None:
            raise ValueError("finish() was called before prepare_global_plan()")
        content, files = describe_all(kinds, results, write_small(folder, self._extra.files), self._extra)
        if isinstance(folder, RemotePath):
            _check_lengths(folder, files, folder.files())
            if self._claim is not None:
                self._claim.check()
            publish_upload(folder, content)
            return
        write_file(folder / MANIFEST, content)
        sync_folder(folder)
        lengths = {name: (folder / name).stat().st_size for name in files if (folder / name).exists()}
        _check_lengths(folder, files, lengths)
        write_marker(folder, content)
        publish(on_disk(self._final), self._staging)

    def _storage_errors(self, action: Callable[[], T]) -> T:
        """Run ``action``; convert disk errors to StorageError, or SupersededError if a later start holds the folder."""
        try:
            return action()
        except (OSError, StorageError) as error:
            blame(self._claim)
            if isinstance(error, StorageError):
                raise
            older = Checkpoints(self._final.parent).to_go_on_from()
            raise refused(error, self._final, self._rank, older) from error


def write_tensors(folder: Location, rank: int, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
    """Write a rank's file chunk by chunk; return one result per chunk, then one for the file.

    Raises:
        OSError: if the disk fails.
    """
    name = f"tensors_{rank:05d}.safetensors"
    entries = [(_key(item), _dtype(item), _box(item).size) for item in plan.items]
    results = []
    with TensorFileWriter(folder / name, entries) as file:
        for item, entry in zip(plan.items, entries):
            written = file.write(entry[0], _resolve(planner, item))  # no local reference: the tensor is freed
            chunk = Chunk(_box(item), name, written.offset, written.bytes, written.xxh3)
            results.append(WriteResult(item.index, written.bytes, chunk))
    results.append(WriteResult(dcp_metadata.MetadataIndex(name), 0, FileResult(name, file.record)))
    return results


def describe_all(
    kinds: Kinds, results: Sequence[WriteResult], small: Mapping[str, FileRecord], extra: Extra
) -> tuple[bytes, dict[str, FileRecord]]:
    """Build the manifest from the results of all ranks and the small files; return its text and all files."""
    files = {r.storage_data.name: r.storage_data.record for r in results if isinstance(r.storage_data, FileResult)}
    files |= small
    chunks: dict[str, list[Chunk]] = {name: [] for name in kinds}
    for result in results:
        if isinstance(result.storage_data, Chunk):
            chunks[result.index.fqn].append(result.storage_data)
    tensors = {}
    for name, (shape, view, dtype) in kinds.items():
        ordered = sorted(chunks[name], key=lambda chunk: chunk.box.start)
        tensors[name] = TensorRecord(NAMES[dtype], shape, view, tuple(ordered))
    return encode(tensors, files, extra.state, extra.config), files


def _resolve(planner: SavePlanner, item: WriteItem) -> Tensor:
    data = planner.resolve_data(item)
    if not isinstance(data, Tensor):
        raise ValueError(f"{item.index.fqn} is not a tensor")
    return data


def write_small(folder: Location, files: Mapping[str, Path | bytes]) -> dict[str, FileRecord]:
    """Write small files, given as content or as a path to copy, by their names in the checkpoint.

    Raises:
        OSError: if the disk fails.
    """
    return {name: _write_small(folder, name, content) for name, content in files.items()}


def _write_small(folder: Location, name: str, content: Path | bytes) -> FileRecord:
    data = content if isinstance(content, bytes) else content.read_bytes()
    parent = (folder / name).parent
    if isinstance(folder, Path):
        make_folders_inside(folder, name)
    write_file(folder / name, data)
    sync_folder(parent)
    return FileRecord(len(data), len(data), checksum(data))


def _check_lengths(folder: Location, files: Mapping[str, FileRecord], lengths: Mapping[str, int]) -> None:
    """Check that all files are visible here, not on another disk or removed by another process."""
    for name, record in files.items():
        seen = lengths.get(name)
        if seen != record.bytes:
            found = "is missing" if seen is None else f"has {seen} bytes"
            raise StorageError(
                f"{folder / name} {found} where {record.bytes} bytes were written: another process writes to "
                f"{folder.parent}, or not all ranks see the same folder; no checkpoint was written",
                "--save A_FOLDER_OF_ITS_OWN",
            )


def _key(item: WriteItem) -> str:
    return f"{item.index.fqn}@{','.join(map(str, _box(item).start))}"


def _dtype(item: WriteItem) -> torch.dtype:
    if item.tensor_data is None:
        raise ValueError(f"{item.index.fqn} is not a tensor")
    return item.tensor_data.properties.dtype
