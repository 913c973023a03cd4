"""Saving through torch.distributed.checkpoint: our planner and our storage.

The library gathers every rank's plan on rank 0, lets it check and prepare, sends the plans back, gathers the results
and lets rank 0 finish; an error on any rank is raised on all of them. What is written, and how, is decided here.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from megatron.checkpoint import attempts
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
"""Size at which parts are cut: what a reader holds at a time, and reads too much of when it wants a corner."""

T = TypeVar("T")

Kinds = dict[str, tuple[tuple[int, ...], tuple[int, ...], torch.dtype]]
"""Shape, view and type of tensors, by name."""


class PartsSavePlanner(SavePlanner):
    """Plans to write the parts of all ranks, once they are proved to be a partition of every tensor."""

    def __init__(self, tensors: Mapping[str, GlobalTensor]) -> None:
        self._tensors = tensors
        self._held: tuple[tuple[str, int], Tensor] | None = None

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        """Nothing: the tensors were given to the constructor."""

    def create_local_plan(self) -> SavePlan:
        """One item per chunk of this rank's parts, in the order of the tensors."""
        kinds = {name: (t.shape, t.view, t.dtype) for name, t in self._tensors.items()}
        items = [
            _write_item(name, number, box, tensor)
            for name, tensor in self._tensors.items()
            for number, part in enumerate(tensor.parts)
            for box in cut(part.box, CHUNK_BYTES // tensor.dtype.itemsize)
        ]
        return SavePlan(items, planner_data=kinds)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], dcp_metadata.Metadata]:
        """Prove that the parts of all ranks make up every tensor.

        Raises:
            ValueError: when they do not, or ranks disagree about a tensor; names all such tensors.
        """
        kinds: Kinds = {}
        problems = []
        for rank, plan in enumerate(all_plans):
            for name, kind in plan.planner_data.items():
                if kinds.setdefault(name, kind) != kind:
                    problems.append(f"{name}: rank {rank} says {kind}, another rank {kinds[name]}")
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
            raise ValueError("the parts of all ranks do not make up the tensors:\n" + "\n".join(problems))
        empty = [SavePlan(plan.items) for plan in all_plans]
        return empty, dcp_metadata.Metadata({}, planner_data=kinds)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """The plan as it is."""
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        """The elements of an item; the part they come from is kept until another one is asked for."""
        name, number = write_item.index.fqn, write_item.index.index or 0
        part = self._tensors[name].parts[number]
        if self._held is None or self._held[0] != (name, number):
            self._held = None  # its memory goes before the next one is computed
            self._held = (name, number), part.resolve()
        return self._held[1][relative(_box(write_item), part.box).slices]


def _write_item(name: str, part: int, box: Box, tensor: GlobalTensor) -> WriteItem:
    chunk = dcp_metadata.ChunkStorageMetadata(torch.Size(box.start), torch.Size(box.size))
    data = TensorWriteData(chunk, dcp_metadata.TensorProperties(tensor.dtype), torch.Size(tensor.view))
    return WriteItem(dcp_metadata.MetadataIndex(name, box.start, part), WriteItemType.SHARD, tensor_data=data)


def _box(item: WriteItem) -> Box:
    if item.tensor_data is None:
        raise ValueError(f"{item.index.fqn} is no tensor")
    return Box(tuple(item.tensor_data.chunk.offsets), tuple(item.tensor_data.chunk.sizes))


@dataclass
class Extra:
    """What a checkpoint holds besides tensors: state, config and small files (content, or what to copy)."""

    state: Mapping[str, Any]
    config: dict[str, Any]
    files: Mapping[str, Path | bytes]


@dataclass
class FileResult:
    """What a rank reports of its file."""

    name: str
    record: FileRecord


class CheckpointWriter(StorageWriter):
    """Writes one safetensors file per rank, then on rank 0 the manifest and the marker."""

    def __init__(self, final: Location, extra: Extra, rank: int, claim: Claim | None = None) -> None:
        self._final, self._extra, self._rank, self._claim = final, extra, rank, claim
        self._shop = shop_of(claim)
        self._folder: Location | None = None

    def abandon(self) -> None:
        """After a failed save: remove what was written, by the rank that began, as far as that is possible."""
        if isinstance(self._folder, RemotePath):
            attempts.abandon(self._folder)
        elif self._folder is not None and isinstance(self._final, Path):
            abandon(self._final, self._shop)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing: a writer writes one checkpoint."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """A writer is never found by a path."""
        return False

    def set_up_storage_writer(self, is_coordinator: bool) -> None:
        """Refuse state that is no JSON before anything is written."""
        encode({}, {}, self._extra.state, self._extra.config)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """The plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Choose and make the folder that all ranks write into; their plans say which it is."""
        folder = self._folder = self._telling(self._begin)
        return [replace(plan, storage_data=folder) for plan in plans]

    def _begin(self) -> Location:
        if self._claim is not None:
            self._claim.ready()
        return attempts.begin(self._final) if isinstance(self._final, RemotePath) else begin(self._final, self._shop)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's file, chunk by chunk."""
        future: Future[list[WriteResult]] = Future()
        future.set_result(self._telling(lambda: self._write(plan, planner)) if plan.items else [])
        return future

    def finish(self, metadata: dcp_metadata.Metadata, results: list[list[WriteResult]]) -> None:
        """Write small files, manifest and marker, and publish the checkpoint."""
        self._telling(lambda: self._finish(metadata.planner_data, [result for some in results for result in some]))

    def _write(self, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        folder: Location = plan.storage_data
        if isinstance(folder, RemotePath):  # parts of an upload that failed cannot be had again, so it is begun anew
            return again(lambda: write_tensors(folder, self._rank, plan, planner))
        return write_tensors(folder, self._rank, plan, planner)

    def _finish(self, kinds: Kinds, results: Sequence[WriteResult]) -> None:
        folder = self._folder
        if folder is None:
            raise ValueError("a save that was not begun cannot be finished")
        content, files = describe_all(kinds, results, write_small(folder, self._extra.files), self._extra)
        if isinstance(folder, RemotePath):
            _check_lengths(folder, files, folder.files())
            if self._claim is not None:
                self._claim.check()
            attempts.publish(folder, content)
            return
        write_file(folder / MANIFEST, content)
        sync_folder(folder)
        _check_lengths(folder, files, _lengths(folder, files))
        write_marker(folder, content)
        publish(on_disk(self._final), self._shop)

    def _telling(self, action: Callable[[], T]) -> T:
        """The result of ``action``; a disk that refuses is told of as such, unless a later start has the folder."""
        try:
            return action()
        except (OSError, StorageError) as error:
            blame(self._claim)
            if isinstance(error, StorageError):
                raise
            older = Checkpoints(self._final.parent).to_go_on_from()
            raise refused(error, self._final, self._rank, older) from error


def write_tensors(folder: Location, rank: int, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
    """Write a rank's file, chunk by chunk, and report every chunk and the file.

    Raises:
        OSError: when the disk refuses.
    """
    name = f"tensors_{rank:05d}.safetensors"
    entries = [(_key(item), _dtype(item), _box(item).size) for item in plan.items]
    results = []
    with TensorFileWriter(folder / name, entries) as file:
        for item, entry in zip(plan.items, entries):
            written = file.write(entry[0], _resolve(planner, item))  # no name here keeps its memory
            chunk = Chunk(_box(item), name, written.offset, written.bytes, written.xxh3)
            results.append(WriteResult(item.index, written.bytes, chunk))
    results.append(WriteResult(dcp_metadata.MetadataIndex(name), 0, FileResult(name, file.record)))
    return results


def describe_all(
    kinds: Kinds, results: Sequence[WriteResult], small: Mapping[str, FileRecord], extra: Extra
) -> tuple[bytes, dict[str, FileRecord]]:
    """The text of the manifest, and all files, of what the ranks have written and the ``small`` files."""
    files = {r.storage_data.name: r.storage_data.record for r in results if isinstance(r.storage_data, FileResult)}
    files |= small
    tensors = {name: TensorRecord(NAMES[dtype], shape, view, ()) for name, (shape, view, dtype) in kinds.items()}
    chunks: dict[str, list[Chunk]] = {name: [] for name in tensors}
    for result in results:
        if isinstance(result.storage_data, Chunk):
            chunks[result.index.fqn].append(result.storage_data)
    tensors = {name: _with_chunks(record, chunks[name]) for name, record in tensors.items()}
    return encode(tensors, files, extra.state, extra.config), files


def _resolve(planner: SavePlanner, item: WriteItem) -> Tensor:
    data = planner.resolve_data(item)
    if not isinstance(data, Tensor):
        raise ValueError(f"{item.index.fqn} is no tensor")
    return data


def _with_chunks(record: TensorRecord, chunks: Sequence[Chunk]) -> TensorRecord:
    ordered = sorted(chunks, key=lambda chunk: chunk.box.start)
    return TensorRecord(record.dtype, record.shape, record.view, tuple(ordered))


def write_small(folder: Location, files: Mapping[str, Path | bytes]) -> dict[str, FileRecord]:
    """Write small files, given as content or as what to copy, by their names in the checkpoint.

    Raises:
        OSError: when the disk refuses.
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


def _lengths(folder: Path, names: Iterable[str]) -> dict[str, int]:
    """Bytes of those files that are there."""
    return {name: (folder / name).stat().st_size for name in names if (folder / name).exists()}


def _check_lengths(folder: Location, files: Mapping[str, FileRecord], lengths: Mapping[str, int]) -> None:
    """Whether all that the ranks have written is here: not on other disks, nor removed by somebody else."""
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
        raise ValueError(f"{item.index.fqn} is no tensor")
    return item.tensor_data.properties.dtype
