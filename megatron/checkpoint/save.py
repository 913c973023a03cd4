"""Save a checkpoint, collectively.

Rank 0 creates the folder of the save. Every rank writes its parts to one safetensors file and sends the places and
checksums of the chunks to rank 0. That checks that the parts of all ranks partition every tensor, adds the manifest
and the marker, and publishes. An error on any rank is raised on all of them. For asynchronous saves the tensors are
first copied to host memory and written in a thread. Free disk space is checked before a save.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any, Self, TypeVar

import torch

from megatron.checkpoint.durable_files import checksum, make_folder, sync_folder, write_file
from megatron.checkpoint.errors import DamagedCheckpointError, StorageError, describe_os_error, is_disk_full
from megatron.checkpoint.folder import CheckpointFolder
from megatron.checkpoint.format import (
    JSON,
    FileRecord,
    Manifest,
    TensorChunk,
    TensorRecord,
    encode_manifest,
    encode_records,
    match_view_dims,
    parse_records,
    partition_problem,
    relative_box,
    split_box,
)
from megatron.checkpoint.lease import Lease, acquire_lease, raise_if_superseded
from megatron.checkpoint.location import Location
from megatron.checkpoint.publish import Attempt, save_elsewhere_flags
from megatron.checkpoint.tensor_file import (
    ALIGNMENT,
    DTYPE_NAMES,
    GlobalTensor,
    TensorEntry,
    TensorFileWriter,
    TensorPart,
)
from megatron.config.errors import Problem
from megatron.config.launch import JobStart
from megatron.config.text import format_bytes
from megatron.distributed import comm
from megatron.distributed.comm import Group
from megatron.distributed.host_memory import page_lock
from megatron.distributed.launch import call_safely, gather_results, is_peer_lost, raise_first_error, run_on_rank0
from megatron.distributed.param_layout import round_up
from megatron.distributed.sharding import Box

CHUNK_BYTES = 64 << 20
"""Maximum bytes of a chunk, the unit of reading: larger chunks need more memory and waste more on small boxes."""

T = TypeVar("T")


@dataclass(frozen=True)
class CheckpointExtras:
    """Content of a checkpoint besides tensors."""

    state: Mapping[str, Any]  # plain numbers, as JSON
    config: dict[str, Any]  # options, as JSON
    files: Mapping[str, Path | bytes]  # small files by name, as content or as a path to copy


@contextmanager
def share_lease(folder: Location, group: Group, leader: int = 0, flag: str = "--save") -> Iterator[Lease]:
    """Let the rank ``leader`` acquire the lease on ``folder``; all ranks that name it get the lease. Collective.

    Raises:
        CheckpointError: on every rank of the group, as :func:`acquire_lease`.
    """
    with ExitStack() as stack:

        def acquire() -> list[Any]:
            if group.rank != leader:
                return []
            return stack.enter_context(acquire_lease(folder, flag, JobStart.read(os.environ))).to_json()

        yield Lease.from_json(folder, gather_results(acquire, group)[leader])


def save_sharded(
    folder: Location,
    tensors: Mapping[str, GlobalTensor],
    state: Mapping[str, Any],
    config: dict[str, Any],
    group: Group,
    files: Mapping[str, Path | bytes] | None = None,
    lease: Lease | None = None,
) -> int:
    """Write a checkpoint; when the call returns it is published and on disk. Return the bytes of its tensors.

    Collective; errors are raised on every rank, and then nothing is published. An existing checkpoint of that name is
    replaced only when the new one is complete.

    Args:
        folder: of the checkpoint, such as ``save/iter_0000100``.
        tensors: with the parts this rank writes; tensors without parts on this rank may be omitted.
        state: plain numbers, as JSON; rank 0's is written.
        config: options, as JSON; rank 0's is written.
        group: the ranks that write.
        files: small files by name inside the checkpoint, as content or as a path to copy; rank 0's are written.
        lease: lease of this start on the folder that contains the checkpoint; then free space is checked before.

    Raises:
        StorageError: if the disk fails on any rank, or has too little space.
        SupersededError: if a later start holds the folder.
        TypeError, ValueError: if the parts are not a partition of the tensors, or state or config is not JSON.
    """
    attempt = Attempt(folder, lease.staging if lease else None)
    return CheckpointSave(attempt, tensors, CheckpointExtras(state, config, files or {}), group, lease).run()


@dataclass
class CheckpointSave:
    """One rank's part in a save, whose phases follow one another on all ranks. Those that lead publish: here rank 0."""

    attempt: Attempt
    tensors: Mapping[str, GlobalTensor]
    extra: CheckpointExtras
    group: Group
    lease: Lease | None

    local = False  # to the nodes' own disks

    def __post_init__(self) -> None:
        self.leads, self.started = self.group.rank == 0, False
        self.written: dict[str, FileRecord] = {}  # as far as this rank knows
        self.manifest = ""  # on ranks that lead

    def run(self) -> int:
        """Save, and return the bytes of the tensors; collective. After an error delete what was written."""
        self.sizes = gather_results(lambda: local_bytes(self.tensors), self.group)  # of all ranks
        try:
            start = self._safely(self.start)
            name = gather_results(start, self.group)[0] if self.local else run_on_rank0(start, self.group)
            self.attempt = replace(self.attempt, name=name)
            outcome, own_error = call_safely(self._safely(self.write))
            outcomes = comm.gather_objects(outcome, self.group)
            self.conclude(lambda: raise_first_error(outcomes, own_error))
        except Exception as error:
            if self.started and not is_peer_lost(error):  # then others may still be writing
                self.attempt.discard()
            raise
        return sum(self.sizes)

    def _safely(self, act: Callable[[], T]) -> Callable[[], T]:
        def call() -> T:
            with storage_errors(self.attempt.final, self.group.rank, self.lease, self.local):
                return act()

        return call

    def start(self) -> str:
        """Create the folder; return its name, of which rank 0's is used."""
        if self.leads:
            encode_manifest({}, {}, self.extra.state, self.extra.config)  # raises before anything is written
            self.check_space()
            if self.lease is not None:
                self.lease.ready()
            self.attempt.start()
            self.started = True
        return self.attempt.name

    def check_space(self) -> None:
        """Raise StorageError if the disk is too small; a program without a lease may not delete leftovers for it."""
        if self.lease is None:
            return
        if problem := disk_space_problem(self.lease.folder, sum(self.sizes), self.lease):
            raise StorageError(str(problem))

    def write(self) -> JSON:
        """Write this rank's file, and on a rank that leads the small files; return the former."""
        place = self.attempt.folder
        if self.leads:
            self.written |= write_small_files(place, self.extra.files)
        write = partial(write_rank_file, place, self.group.rank, self.tensors)
        if isinstance(place, Path):
            return write().to_json()
        return (place / rank_file_name(self.group.rank)).retry(write).to_json()  # a failed upload begins again

    def conclude(self, files: Callable[[], list[JSON]]) -> None:
        """Write manifest and marker; ``files`` returns on rank 0 what the ranks have written, or raises their error."""

        def act() -> None:
            self.build(files())
            self.complete()
            self.publish()

        run_on_rank0(self._safely(act), self.group)

    def build(self, files: Sequence[JSON]) -> str:
        """Build the manifest, on rank 0, and return it."""
        ranks = [RankFile.from_json(data) for data in files]
        self.manifest = build_manifest(ranks, self.written, self.extra).decode()
        for rank in ranks:
            self.written |= rank.files
        return self.manifest

    def complete(self) -> None:
        """Write the manifest."""
        if self.leads:
            self.attempt.write_manifest(self.manifest.encode())

    def publish(self) -> None:
        """Write the marker."""
        if self.leads:
            if not self.local:
                _check_visible(self.attempt.folder, self.written)
            if self.lease is not None and not isinstance(self.attempt.final, Path):  # on disk, staging fences it off
                self.lease.check()
            self.attempt.publish(self.manifest.encode())


@dataclass(frozen=True)
class RankFile:
    """Chunks and file that one rank has written of a checkpoint."""

    tensors: dict[str, TensorRecord]  # all of the rank, with the chunks that it has written
    files: dict[str, FileRecord]  # the rank's file; none if it had no elements to write

    def to_json(self) -> JSON:
        """Return it as JSON, for other ranks."""
        return encode_records(self.tensors, self.files)

    @classmethod
    def from_json(cls, data: JSON) -> Self:
        """Read what :meth:`to_json` has returned on another rank."""
        return cls(*parse_records(data))


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


def rank_file_name(rank: int) -> str:
    """Return the name of the file that a rank writes."""
    return f"tensors_{rank:05d}.safetensors"


def write_rank_file(folder: Location, rank: int, tensors: Mapping[str, GlobalTensor]) -> RankFile:
    """Write the parts of a rank to its file, chunk by chunk; each part is computed when it is written, then freed."""
    name = rank_file_name(rank)
    parts, entries = list[tuple[str, TensorPart, list[Box]]](), list[TensorEntry]()
    for key, tensor in tensors.items():
        for part in tensor.parts:
            boxes = list(split_box(part.box, CHUNK_BYTES // tensor.dtype.itemsize))
            parts.append((key, part, boxes))
            entries += [(f"{key}@{','.join(map(str, box.start))}", tensor.dtype, box.size) for box in boxes]
    chunks = defaultdict[str, list[TensorChunk]](list)
    files = {}
    if entries:
        keys = iter(key for key, _, _ in entries)
        with TensorFileWriter(folder / name, entries) as file:
            for key, part, boxes in parts:
                content = part.resolve()
                for box in boxes:
                    written = file.write(next(keys), content[relative_box(box, part.box).slices])
                    chunks[key].append(TensorChunk(box, name, *written))
                del content  # before the next part is computed
        files[name] = file.record
    records = {
        key: TensorRecord(DTYPE_NAMES[tensor.dtype], tensor.shape, tensor.view, tuple(chunks[key]))
        for key, tensor in tensors.items()
    }
    return RankFile(records, files)


def build_manifest(ranks: Sequence[RankFile], small: Mapping[str, FileRecord], extra: CheckpointExtras) -> bytes:
    """Build the manifest from what all ranks have written and the small files.

    Raises ValueError, with all problems, if ranks disagree about a tensor or their chunks do not partition it.
    """
    tensors: dict[str, TensorRecord] = {}
    chunks = defaultdict[str, list[TensorChunk]](list)
    files, problems = dict(small), []
    for number, rank in enumerate(ranks):
        files |= rank.files
        for name, record in rank.tensors.items():
            kind = replace(record, chunks=())
            if tensors.setdefault(name, kind) != kind:
                problems.append(f"{name}: {kind} on rank {number}, {tensors[name]} on another rank")
            chunks[name] += record.chunks
    for name, record in tensors.items():
        if match_view_dims(record.shape, record.view) is None:
            problems.append(f"{name}: {list(record.view)} is not a view of {list(record.shape)}")
        elif problem := partition_problem(record.view, [chunk.box for chunk in chunks[name]]):
            problems.append(f"{name}: {problem}")
        tensors[name] = replace(record, chunks=tuple(sorted(chunks[name], key=lambda chunk: chunk.box.start)))
    if problems:
        raise ValueError("the parts of all ranks do not partition the tensors:\n" + "\n".join(problems))
    return encode_manifest(tensors, files, extra.state, extra.config)


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


def _check_visible(folder: Location, files: Mapping[str, FileRecord]) -> None:
    """Check that all files are in the folder that this rank sees: others may have written to another one."""
    seen, sizes = Manifest(folder, 0, {}, dict(files), {}, {}), None if isinstance(folder, Path) else folder.files()
    try:
        for name in files:
            seen.check_file(name, sizes)
    except DamagedCheckpointError as error:
        why = f"another process writes to {folder.parent}, or not all ranks see the same folder"
        fix = "--save A_FOLDER_OF_ITS_OWN"
        raise StorageError(f"{error}: {why}; no checkpoint was written", fix) from error


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
        if pinned and size:
            page_lock(self._memory)

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
