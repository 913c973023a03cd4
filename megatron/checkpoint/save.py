"""Save through torch.distributed.checkpoint, with a planner and a storage writer of our own.

The library gathers every rank's plan on rank 0, where the parts are checked to partition every tensor, sends the
plans back, gathers the results and lets rank 0 finish. An error on any rank is raised on all of them. Each rank
writes one safetensors file; rank 0 adds the manifest and the marker, and publishes. For asynchronous saves the
tensors are first copied to host memory and written in a thread. Free disk space is checked before a save.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Thread
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint import metadata as dcp_metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future as TorchFuture

from megatron.checkpoint.durable_files import checksum, make_folder, sync_folder, write_file
from megatron.checkpoint.errors import StorageError, describe_os_error, is_disk_full
from megatron.checkpoint.folder import CheckpointFolder
from megatron.checkpoint.format import (
    FileRecord,
    TensorChunk,
    TensorRecord,
    encode_manifest,
    match_view_dims,
    partition_problem,
    relative_box,
    split_box,
)
from megatron.checkpoint.lease import Lease, raise_if_superseded
from megatron.checkpoint.load import call_collectively
from megatron.checkpoint.location import Location
from megatron.checkpoint.publish import Attempt, save_elsewhere_flags
from megatron.checkpoint.tensor_file import DTYPE_NAMES, GlobalTensor, TensorEntry, TensorFileWriter, TensorPart
from megatron.config.errors import Problem
from megatron.config.text import format_bytes
from megatron.distributed.comm import Group
from megatron.distributed.param_layout import round_up
from megatron.distributed.sharding import Box

CHUNK_BYTES = 64 << 20
"""Maximum bytes of a chunk, the unit of reading: larger chunks need more memory and waste more on small boxes."""

T = TypeVar("T")

TensorKinds = dict[str, tuple[tuple[int, ...], tuple[int, ...], torch.dtype]]
"""Shape, view and type of tensors, by name."""


def save_sharded(
    folder: Location,
    tensors: Mapping[str, GlobalTensor],
    state: Mapping[str, Any],
    config: dict[str, Any],
    group: Group,
    files: Mapping[str, Path | bytes] | None = None,
    lease: Lease | None = None,
) -> None:
    """Write a checkpoint; when the call returns it is published and on disk.

    Collective; errors are raised on every rank, and then nothing is published. An existing checkpoint of that name is
    replaced only when the new one is complete.

    Args:
        folder: of the checkpoint, such as ``save/iter_0000100``.
        tensors: with the parts this rank writes; tensors without parts on this rank may be omitted.
        state: plain numbers, as JSON; rank 0's is written.
        config: options, as JSON; rank 0's is written.
        group: the ranks that write.
        files: small files by name inside the checkpoint, as content or as a path to copy; rank 0's are written.
        lease: lease of this start on the folder that contains the checkpoint.

    Raises:
        StorageError: if the disk fails on any rank.
        SupersededError: if a later start holds the folder.
        TypeError, ValueError: if the parts are not a partition of the tensors, or state or config is not JSON.
    """
    planner = PartsSavePlanner(tensors)
    writer = CheckpointWriter(folder, CheckpointExtras(state, config, files or {}), group.rank, lease)
    call_collectively(save, group, writer.abandon, state_dict=dict(tensors), storage_writer=writer, planner=planner)


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
        items = []
        for name, tensor in self._tensors.items():
            properties = dcp_metadata.TensorProperties(tensor.dtype)
            for number, part in enumerate(tensor.parts):
                for box in split_box(part.box, CHUNK_BYTES // tensor.dtype.itemsize):
                    chunk = dcp_metadata.ChunkStorageMetadata(torch.Size(box.start), torch.Size(box.size))
                    data = TensorWriteData(chunk, properties, torch.Size(tensor.view))
                    index = dcp_metadata.MetadataIndex(name, box.start, number)
                    items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
        return SavePlan(items, planner_data=kinds)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], dcp_metadata.Metadata]:
        """Raise ValueError if ranks disagree about a tensor or their parts do not partition it; lists all of these."""
        kinds: TensorKinds = {}
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
            if match_view_dims(shape, view) is None:
                problems.append(f"{name}: {list(view)} is not a view of {list(shape)}")
            elif problem := partition_problem(view, boxes[name]):
                problems.append(f"{name}: {problem}")
        if problems:
            raise ValueError("the parts of all ranks do not partition the tensors:\n" + "\n".join(problems))
        plans = [SavePlan(plan.items) for plan in all_plans]
        return plans, dcp_metadata.Metadata({}, planner_data=kinds)

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
        return self._resolved[1][relative_box(_box(write_item), part.box).slices]


def _box(item: WriteItem) -> Box:
    chunk = cast(TensorWriteData, item.tensor_data).chunk
    return Box(tuple(chunk.offsets), tuple(chunk.sizes))


@dataclass
class CheckpointExtras:
    """Content of a checkpoint besides tensors."""

    state: Mapping[str, Any]  # plain numbers, as JSON
    config: dict[str, Any]  # options, as JSON
    files: Mapping[str, Path | bytes]  # small files by name, as content or as a path to copy


class CheckpointWriter(StorageWriter):
    """Writes one safetensors file per rank, then the manifest and the marker on rank 0."""

    def __init__(self, final: Location, extra: CheckpointExtras, rank: int, lease: Lease | None = None) -> None:
        self._final, self._extra, self._rank, self._lease = final, extra, rank, lease
        self._attempt: Attempt | None = None  # on rank 0

    def abandon(self) -> None:
        """Remove the files of a failed save, as far as possible; does nothing on ranks other than 0."""
        if self._attempt is not None:
            self._attempt.discard()

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Do nothing: each writer writes one checkpoint."""

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return False: writers are not created from a path."""
        return False

    def set_up_storage_writer(self, is_coordinator: bool) -> None:
        """Reject state and config that are not JSON before anything is written."""
        encode_manifest({}, {}, self._extra.state, self._extra.config)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Create the folder of the attempt on rank 0 and send its path to all ranks in their plans."""
        with storage_errors(self._final, self._rank, self._lease):
            if self._lease is not None:
                self._lease.ready()
            attempt = Attempt(self._final, self._lease.staging if self._lease else None)
            attempt.start()
        self._attempt = attempt
        return [replace(plan, storage_data=attempt.folder) for plan in plans]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> TorchFuture[list[WriteResult]]:
        """Write this rank's file, chunk by chunk."""
        folder: Location = plan.storage_data
        results: list[WriteResult] = []
        if plan.items:
            with storage_errors(self._final, self._rank, self._lease):
                if isinstance(folder, Path):
                    results = write_tensors(folder, self._rank, plan, planner)
                else:  # a failed multipart upload must restart from the beginning
                    results = folder.retry(lambda: write_tensors(folder, self._rank, plan, planner))
        future: TorchFuture[list[WriteResult]] = TorchFuture()
        future.set_result(results)
        return future

    def finish(self, metadata: dcp_metadata.Metadata, results: list[list[WriteResult]]) -> None:
        """Write small files, manifest and marker, and publish the checkpoint."""
        if self._attempt is None:
            raise ValueError("finish() was called before prepare_global_plan()")
        folder = self._attempt.folder
        flat = [result for of_rank in results for result in of_rank]
        with storage_errors(self._final, self._rank, self._lease):
            small = write_small_files(folder, self._extra.files)
            content, files = build_manifest(metadata.planner_data, flat, small, self._extra)
            self._attempt.write_manifest(content)
            _check_lengths(folder, files)
            if self._lease is not None and not isinstance(folder, Path):  # on disk, staging fences this start off
                self._lease.check()
            self._attempt.publish(content)


@contextmanager
def storage_errors(final: Location, rank: int, lease: Lease | None, local: bool = False) -> Iterator[None]:
    """Raise disk errors while writing ``final`` as StorageError, or SupersededError if a later start holds the folder.

    With ``local``, the checkpoint is on the nodes' own disks.
    """
    try:
        yield
    except (OSError, StorageError) as error:
        raise_if_superseded(lease)
        if isinstance(error, StorageError):
            raise
        raise storage_error(error, final, rank, local) from error


def storage_error(error: OSError, final: Location, rank: int, local: bool = False) -> StorageError:
    """Return the error for a checkpoint that could not be written; arguments as of `storage_errors`."""
    fixes = ["free some space"] if is_disk_full(error) else []
    if local:
        fixes.append("--local-save ELSEWHERE")
    elif not isinstance(final, Path):
        store_fixes = {
            errno.ENOENT: "create the bucket",
            errno.EACCES: "give this process credentials with write access",
        }
        other = "check the store" if error.errno != errno.EIO else "start again when the store answers"
        fixes = [store_fixes.get(error.errno or 0, other), *fixes, save_elsewhere_flags(final.parent)]
    elif error.errno == errno.ENOENT:
        fixes = ["--save A_FOLDER_THAT_ALL_RANKS_SHARE"]
    else:
        fixes.append(save_elsewhere_flags(final.parent))
    what = "local checkpoint" if local else "checkpoint"
    where = f"{error.filename or final}: {describe_os_error(error)} (rank {rank})"
    return StorageError(f"{where}; no {what} was written", *fixes)


def write_tensors(folder: Location, rank: int, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
    """Write a rank's file chunk by chunk; return one result per chunk, then one for the file."""
    name = f"tensors_{rank:05d}.safetensors"
    entries: list[TensorEntry] = []
    for item in plan.items:
        box = _box(item)
        key = f"{item.index.fqn}@{','.join(map(str, box.start))}"
        entries.append((key, cast(TensorWriteData, item.tensor_data).properties.dtype, box.size))
    results = []
    with TensorFileWriter(folder / name, entries) as file:
        for item, entry in zip(plan.items, entries):
            written = file.write(entry[0], cast(Tensor, planner.resolve_data(item)))  # not kept: the tensor is freed
            chunk = TensorChunk(_box(item), name, *written)
            results.append(WriteResult(item.index, chunk.bytes, chunk))
    results.append(WriteResult(dcp_metadata.MetadataIndex(name), 0, file.record))
    return results


def build_manifest(
    kinds: TensorKinds, results: Sequence[WriteResult], small: Mapping[str, FileRecord], extra: CheckpointExtras
) -> tuple[bytes, dict[str, FileRecord]]:
    """Build the manifest from the results of all ranks and the small files; return its text and all files."""
    files = {r.index.fqn: r.storage_data for r in results if isinstance(r.storage_data, FileRecord)}
    files |= small
    chunks: dict[str, list[TensorChunk]] = {name: [] for name in kinds}
    for result in results:
        if isinstance(result.storage_data, TensorChunk):
            chunks[result.index.fqn].append(result.storage_data)
    tensors = {}
    for name, (shape, view, dtype) in kinds.items():
        ordered = sorted(chunks[name], key=lambda chunk: chunk.box.start)
        tensors[name] = TensorRecord(DTYPE_NAMES[dtype], shape, view, tuple(ordered))
    return encode_manifest(tensors, files, extra.state, extra.config), files


def write_small_files(folder: Location, files: Mapping[str, Path | bytes]) -> dict[str, FileRecord]:
    """Write small files, given as content or as a path to copy, by their names in the checkpoint."""
    records = {}
    for name, content in files.items():
        data = content if isinstance(content, bytes) else content.read_bytes()
        if isinstance(folder, Path):
            make_folder((folder / name).parent, folder)
        write_file(folder / name, data)
        sync_folder((folder / name).parent)
        records[name] = FileRecord(len(data), len(data), checksum(data))
    return records


def _check_lengths(folder: Location, files: Mapping[str, FileRecord]) -> None:
    """Check that all files are visible here, not on another disk or removed by another process."""
    if not isinstance(folder, Path):
        lengths = folder.files()
    else:
        lengths = {name: (folder / name).stat().st_size for name in files if (folder / name).exists()}
    for name, record in files.items():
        seen = lengths.get(name)
        if seen != record.bytes:
            found = "is missing" if seen is None else f"has {seen} bytes"
            raise StorageError(
                f"{folder / name} {found} where {record.bytes} bytes were written: another process writes to "
                f"{folder.parent}, or not all ranks see the same folder; no checkpoint was written",
                "--save A_FOLDER_OF_ITS_OWN",
            )


ALIGNMENT = 64
"""Bytes; every part starts at a multiple."""


class HostCopyBuffer:
    """A host buffer, allocated once, that holds a copy of all parts of a rank."""

    def __init__(self, tensors: Mapping[str, GlobalTensor], pinned: bool = False) -> None:
        """Allocate the buffer and touch its pages, so that the first copy is as fast as later ones.

        Args:
            tensors: whose parts have the sizes that will be copied.
            pinned: page-lock the buffer, so that GPUs copy into it directly.
        """
        size = sum(_padded_bytes(part, tensor.dtype) for tensor in tensors.values() for part in tensor.parts)
        self._memory = torch.empty(size, dtype=torch.uint8).fill_(0)
        if pinned and size:  # torch rounds its own pinned allocations up to a power of two
            locked = torch.cuda.cudart().cudaHostRegister(self._memory.data_ptr(), size, 0)
            torch.cuda.check_error(int(locked))

    @property
    def bytes(self) -> int:
        """Size of the buffer: that of all parts, each rounded up to ``ALIGNMENT``."""
        return self._memory.numel()

    @torch.no_grad()
    def copy(self, tensors: Mapping[str, GlobalTensor]) -> dict[str, GlobalTensor]:
        """Return the same tensors with parts copied into the buffer; the copies are valid until the next call."""
        at, copies, on_gpu = 0, {}, False
        for name, tensor in tensors.items():
            parts = []
            for part in tensor.parts:
                padded = _padded_bytes(part, tensor.dtype)
                if at + padded > self.bytes:
                    raise ValueError(f"{name} does not fit into the host buffer")
                source = part.resolve()
                flat = self._memory[at : at + part.box.numel * tensor.dtype.itemsize]
                target = flat.view(tensor.dtype).view(part.box.size)
                target.copy_(source, non_blocking=source.is_cuda)
                on_gpu |= source.is_cuda
                parts.append(TensorPart(part.box, target))
                at += padded
            copies[name] = replace(tensor, parts=tuple(parts))
        if on_gpu:
            torch.cuda.current_stream().synchronize()
        return copies


def _padded_bytes(part: TensorPart, dtype: torch.dtype) -> int:
    return round_up(part.box.numel * dtype.itemsize, ALIGNMENT)


def run_in_background(work: Callable[[], T], name: str) -> Future[T]:
    """Run ``work`` in a daemon thread and return its future.

    The interpreter does not join the thread at exit, because it may be blocked in a collective with a dead rank.
    """
    future: Future[T] = Future()

    def run() -> None:
        try:
            result = work()
        except BaseException as error:  # raised by future.result()
            future.set_exception(error)
        else:
            future.set_result(result)

    Thread(target=run, name=name, daemon=True).start()
    return future


def local_bytes(tensors: Mapping[str, GlobalTensor]) -> int:
    """Return the bytes of this rank's parts."""
    return sum(part.box.numel * tensor.dtype.itemsize for tensor in tensors.values() for part in tensor.parts)


def disk_space_problem(folder: Location, size: int, lease: Lease | None = None) -> Problem | None:
    """Return the problem (E816) if the disk of a ``--save`` folder cannot hold ``size`` more bytes, else None."""
    message = disk_space_message(folder, size, lease)
    if message is None:
        return None
    return Problem("E816", message, ("free some space", save_elsewhere_flags(folder)))


def disk_space_message(folder: Location, size: int, lease: Lease | None = None) -> str | None:
    """Return a message if the disk of ``folder`` cannot hold ``size`` more bytes, else None.

    Space held by interrupted saves is freed first. If the free space is unknown, the check passes.
    """
    free = _free_bytes(folder)
    if free is not None and free < size:
        with suppress(OSError):
            CheckpointFolder(folder).retain(None, lease=lease)
        free = _free_bytes(folder)
    if free is None or free >= size:
        return None
    return f"{folder}: a checkpoint takes {format_bytes(size)}, and its disk has {format_bytes(free)} left"


def _free_bytes(folder: Location) -> int | None:
    """Return the free bytes of the disk that holds or will hold ``folder``; None if unknown."""
    if not isinstance(folder, Path):
        return None
    with suppress(OSError):
        existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        return shutil.disk_usage(existing).free
    return None
