"""Checkpoints on node-local disks: save, find and load, with a copy of every file on another node.

A node has the files of its own ranks, copies of those of the previous node, and the manifest of the whole checkpoint,
so any single node may be lost. At a save every rank writes its own file and sends it to the next node. At a load the
nodes compare what they have, verify the copies to be used, and send files to nodes that lack them. Files are sent
between ranks block by block; an I/O error on one rank does not stop the others, but is raised on all of them at the
end.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor
from torch.distributed.checkpoint.storage import WriteResult

from megatron.checkpoint.durable_files import NewFile, make_parent_folders, sync_folder, write_file
from megatron.checkpoint.errors import DamagedCheckpointError, StorageError, storage_error, strip_folder
from megatron.checkpoint.folder import CheckpointFolder
from megatron.checkpoint.format import (
    MANIFEST,
    BoxIndex,
    Manifest,
    marker_content,
    parse_manifest,
)
from megatron.checkpoint.lease import Lease, raise_if_superseded, staging_folder_of
from megatron.checkpoint.local_folder import (
    FileCopy,
    LocalCheckpoint,
    NodeMap,
    choose_sources,
    list_node_checkpoints,
    merge_node_checkpoints,
)
from megatron.checkpoint.object_store import local_path
from megatron.checkpoint.publish import (
    create_staged,
    delete_checkpoint,
    discard_staged,
    publish_staged,
    staged_path,
    write_marker,
)
from megatron.checkpoint.save import (
    CheckpointExtras,
    FileResult,
    PartsSavePlanner,
    as_storage_errors,
    build_manifest,
    disk_space_message,
    local_bytes,
    write_small_files,
    write_tensors,
)
from megatron.checkpoint.tensor_file import ChunkReader, GlobalTensor
from megatron.checkpoint.verify import chunks_by_file, list_file_damage
from megatron.distributed import comm
from megatron.distributed.comm import Channel, Group, Pending

BLOCK_BYTES = 16 << 20
"""Bytes of a message; a rank holds two."""

PARTIAL_SUFFIX = ".part"
"""Suffix of a file that is still being received."""

T = TypeVar("T")


@dataclass(frozen=True)
class LocalStore:
    """The nodes' folders of checkpoints, as seen by one rank."""

    folder: Path  # of this rank's node
    nodes: NodeMap  # which ranks are on which node
    group: Group  # all ranks, for collectives
    file_group: Group  # all ranks with a separate communicator, for files: point-to-point calls differ between ranks
    lease: Lease | None = None  # lease on the node's folder, the same for all ranks of the node

    @property
    def staging(self) -> Path | None:
        """Staging folder of the node's folder; None without a lease."""
        return staging_folder_of(self.lease)

    @property
    def rank(self) -> int:
        """This rank."""
        return self.group.rank

    @property
    def node(self) -> int:
        """Node of this rank."""
        return self.nodes.node_of[self.rank]

    @property
    def is_leader(self) -> bool:
        """True if this rank is the leader of its node."""
        return self.nodes.is_leader(self.rank)


def gather_results(act: Callable[[], T], group: Group) -> list[T]:
    """Run ``act`` on all ranks and return their results; collective.

    Raises:
        Exception: that of the lowest rank that failed, on every rank.
    """
    outcome: tuple[T | None, Exception | None]
    try:
        outcome = act(), None
    except Exception as error:
        outcome = None, error
    outcomes = comm.all_gather_objects(outcome, group)
    for _, problem in outcomes:
        if problem is not None:
            raise problem
    return [value for value, _ in outcomes]  # type: ignore[misc]


@dataclass(frozen=True)
class FileTransfer:
    """A file sent to, or received from, the rank ``peer``; ``staging`` is the folder for partly received files."""

    path: Path
    peer: int
    bytes: int
    staging: Path | None = None

    def blocks(self) -> list[int]:
        """Return the lengths of its blocks."""
        return [min(BLOCK_BYTES, self.bytes - start) for start in range(0, self.bytes, BLOCK_BYTES)]


def send_and_receive(sent: FileTransfer | None, received: FileTransfer | None, group: Group) -> OSError | None:
    """Send a file to one rank of a group while receiving one from another; the peers must make the matching calls.

    When the call returns, the received file is on disk and has replaced a previous one of that name.

    Returns:
        The first I/O error of this rank; None if there was none.
    """
    source = _FileSender(sent.path) if sent is not None else None
    target = _FileReceiver(received) if received is not None else None
    send_sizes = sent.blocks() if sent is not None else []
    receive_sizes = received.blocks() if received is not None else []
    for number in range(max(len(send_sizes), len(receive_sizes))):
        receive: Pending | None = None
        pending = []
        if received is not None and number < len(receive_sizes):
            buffer = torch.empty(receive_sizes[number], dtype=torch.uint8)
            channel = Channel(group.ranks[received.peer], group.ranks[group.rank], group.handle)
            receive = comm.start_receive(buffer, channel)
            pending.append(receive)
        if sent is not None and source is not None and number < len(send_sizes):
            block = source.read(send_sizes[number])
            channel = Channel(group.ranks[group.rank], group.ranks[sent.peer], group.handle)
            pending.append(comm.start_send(block, channel))
        for transfer in pending:
            transfer.wait()
        if receive is not None and target is not None:
            target.write(receive.result)
    errors = [end.close() for end in (source, target) if end is not None]
    return next((error for error in errors if error is not None), None)


class _TransferEnd:
    """One end of a file transfer; after the first I/O error no more calls are made."""

    def __init__(self) -> None:
        self.error: OSError | None = None

    def attempt(self, act: Callable[[], T]) -> T | None:
        if self.error is None:
            try:
                return act()
            except OSError as error:
                self.error = error
        return None


class _FileSender(_TransferEnd):
    """A file being sent; after an error zeros are sent, and the transfer fails at the end."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path
        self._file = self.attempt(lambda: FileIO(str(path)))

    def read(self, size: int) -> Tensor:
        block = torch.zeros(size, dtype=torch.uint8)
        self.attempt(lambda: self._fill(block.numpy().data))
        return block

    def _fill(self, view: memoryview) -> None:
        while view and self._file is not None:
            count = self._file.readinto(view) or 0
            if not count:
                raise OSError(errno.EIO, "is shorter than when it was written", str(self._path))
            view = view[count:]

    def close(self) -> OSError | None:
        if self._file is not None:
            self._file.close()
        return self.error


class _FileReceiver(_TransferEnd):
    """A file being received, under a temporary name until it is complete."""

    def __init__(self, transfer: FileTransfer) -> None:
        super().__init__()
        self._path = transfer.path
        self._part = (transfer.staging or transfer.path.parent) / (transfer.path.name + PARTIAL_SUFFIX)
        with suppress(OSError):
            os.unlink(self._part)
        self._file = self.attempt(lambda: NewFile(self._part))

    def write(self, block: Tensor) -> None:
        if self._file is not None:
            file = self._file
            self.attempt(lambda: file.write(block.numpy().data))

    def close(self) -> OSError | None:
        if self._file is not None:
            write_error = self.error
            try:
                self._file.__exit__(None if write_error is None else type(write_error), write_error, None)
            except OSError as close_error:
                self.error = close_error
        self.attempt(lambda: os.rename(self._part, self._path))
        return self.error


def save_local(store: LocalStore, iteration: int, tensors: Mapping[str, GlobalTensor], extra: CheckpointExtras) -> Path:
    """Write a checkpoint to the nodes' folders; collective over the store's group.

    It is published on a node only when all files and copies are on the disks of all nodes. Older checkpoints are kept:
    see :func:`delete_other_local_checkpoints`.

    Returns:
        Its folder on this node.

    Raises:
        StorageError: if a disk fails, on every rank; the older checkpoint is then unchanged.
        SupersededError: if a later start holds a node's folder, on every rank.
        ValueError: if the parts of all ranks do not partition the tensors.
    """
    final = local_path(CheckpointFolder(store.folder).path(iteration))
    try:
        _write(store, final, tensors, extra)
    except Exception:
        if store.is_leader:
            discard_staged(final, store.staging)
        raise
    return final


def delete_other_local_checkpoints(store: LocalStore, iteration: int) -> str | None:
    """Delete all other checkpoints from the nodes' folders; collective.

    Returns:
        The error of a disk, the same on every rank; None if there was none.

    Raises:
        SupersededError: if a later start holds the node's folder.
    """
    try:
        gather_results(lambda: _remove_others(store, iteration) if store.is_leader else None, store.group)
    except OSError as error:
        raise_if_superseded(store.lease)
        return f"older local checkpoints are not deleted: {error}"
    return None


def _remove_others(store: LocalStore, iteration: int) -> None:
    for other, path in CheckpointFolder(store.folder).named():
        if other != iteration or path.suffix:
            delete_checkpoint(path, store.staging)


def _write(store: LocalStore, final: Path, tensors: Mapping[str, GlobalTensor], extra: CheckpointExtras) -> None:
    folder, planner, leads = staged_path(final, store.staging), PartsSavePlanner(tensors), store.is_leader

    def on_all_ranks(action: Callable[[], T]) -> list[T]:
        def guarded() -> T:
            with as_storage_errors(store.lease, lambda error: storage_error(error, final, store.rank, local=True)):
                return action()

        return gather_results(guarded, store.group)

    def on_leaders(action: Callable[[], object]) -> None:
        on_all_ranks(lambda: action() if leads else None)

    sizes = on_all_ranks(lambda: local_bytes(tensors))
    on_leaders(lambda: _create_staged_folder(store, final, sizes))
    plans = on_all_ranks(planner.create_local_plan)
    on_all_ranks(lambda: planner.create_global_plan(plans) if store.rank == 0 else None)
    small = on_all_ranks(lambda: write_small_files(folder, extra.files) if leads else {})
    own_plan = plans[store.rank]
    results = on_all_ranks(lambda: write_tensors(folder, store.rank, own_plan, planner) if own_plan.items else [])
    on_all_ranks(lambda: _copy_to_next_node(store, folder, results))
    kinds = {name: kind for plan in plans for name, kind in plan.planner_data.items()}
    flat = [result for of_rank in results for result in of_rank]
    content = on_all_ranks(lambda: build_manifest(kinds, flat, small[0], extra)[0] if store.rank == 0 else b"")[0]
    on_leaders(lambda: _write_manifest(folder, content))
    on_leaders(lambda: _publish_local(store, final, content))


def _create_staged_folder(store: LocalStore, final: Path, sizes: Sequence[int]) -> None:
    """Create the staging path if the disk has space for this node's files and the copies of the previous node's."""
    kept = {store.node, (store.node - 1) % store.nodes.count}
    size = sum(sizes[rank] for node in kept for rank in store.nodes.ranks(node))
    if message := disk_space_message(store.folder, size, store.lease):
        sentence = f"{message} (rank {store.rank}); no local checkpoint was written"
        raise StorageError(sentence, "free some space", "--local-save ELSEWHERE")
    if store.lease is not None:
        store.lease.ready()
    create_staged(final, store.staging)


def _write_manifest(folder: Path, content: bytes) -> None:
    write_file(folder / MANIFEST, content)
    sync_folder(folder)


def _publish_local(store: LocalStore, final: Path, content: bytes) -> None:
    write_marker(staged_path(final, store.staging), content)
    publish_staged(final, store.staging)


def _copy_to_next_node(store: LocalStore, folder: Path, results: list[list[WriteResult]]) -> None:
    """Send this rank's file to the next node, and receive one from the previous node."""
    if store.nodes.count == 1:
        return
    target, source = store.nodes.neighbour(store.rank, 1), store.nodes.neighbour(store.rank, -1)
    sent, received = _transfer_of(folder, results[store.rank], target), _transfer_of(folder, results[source], source)
    error = send_and_receive(sent, received, store.file_group)
    if error is not None:
        raise error


def _transfer_of(folder: Path, results: list[WriteResult], peer: int) -> FileTransfer | None:
    """Return the transfer of the file that a rank has written; None if it had nothing to write."""
    files = [r.storage_data for r in results if isinstance(r.storage_data, FileResult)]
    return FileTransfer(folder / files[0].name, peer, files[0].record.bytes) if files else None


def find_local_checkpoints(store: LocalStore) -> tuple[list[LocalCheckpoint], list[str]]:
    """Return the checkpoints on the nodes, newest first, and notes on invalid ones; collective.

    Raises:
        NewerVersionError: if a checkpoint has a newer format version, on every rank.
        OSError: if a disk fails, on every rank.
    """
    found = gather_results(
        lambda: list_node_checkpoints(store.folder, store.node, store.lease) if store.is_leader else ([], []),
        store.group,
    )
    notes = [f"node {store.nodes.node_of[rank]}: {note}" for rank, (_, of_node) in enumerate(found) for note in of_node]
    return merge_node_checkpoints(part for parts, _ in found for part in parts), notes


def read_local_manifest(store: LocalStore, checkpoint: LocalCheckpoint) -> tuple[Manifest, bytes]:
    """Return the manifest of a checkpoint and its text, also on nodes that do not have it; collective.

    Raises:
        DamagedCheckpointError: if it changed meanwhile, on every rank.
        OSError: if it cannot be read, on every rank.
    """
    final = local_path(CheckpointFolder(store.folder).path(checkpoint.iteration))
    reader = store.nodes.ranks(min(checkpoint.files))[0]
    texts = gather_results(lambda: (final / MANIFEST).read_bytes() if store.rank == reader else b"", store.group)
    if marker_content(texts[reader]).decode() != checkpoint.mark:
        raise DamagedCheckpointError(f"{final / MANIFEST} on node {min(checkpoint.files)} has changed")
    return parse_manifest(final, texts[reader]), texts[reader]


def fetch_missing_files(
    store: LocalStore, checkpoint: LocalCheckpoint, tensors: Mapping[str, GlobalTensor]
) -> tuple[Manifest, list[str]]:
    """Copy to this node's folder all files of a checkpoint that its ranks need and it lacks; collective.

    Every copy that is used is first verified by its checksums.

    Args:
        store: the nodes' folders.
        checkpoint: to load.
        tensors: with the parts that this rank will fill; tensors that the checkpoint lacks are ignored.

    Returns:
        The manifest, of whose files this node may have only some, and notes on damaged copies.

    Raises:
        DamagedCheckpointError: if no good copy of a file is left, on every rank.
        OSError: if a disk fails, on every rank.
    """
    manifest, content = read_local_manifest(store, checkpoint)
    wanted = comm.all_gather_objects(files_needed(manifest, tensors), store.group)
    needs = {
        node: frozenset().union(*(wanted[rank] for rank in store.nodes.ranks(node)))
        for node in range(store.nodes.count)
    }
    chosen, bad = _choose_verified(store, checkpoint, manifest, needs)
    notes = [f"node {node}: {text}: another copy is used" for (node, _), text in sorted(bad.items())]
    _fetch(store, checkpoint, manifest, content, chosen)
    return manifest, notes


def files_needed(manifest: Manifest, tensors: Mapping[str, GlobalTensor]) -> frozenset[str]:
    """Return the files that contain the parts of a rank, and the small files of the checkpoint."""
    found = {name for name, record in manifest.files.items() if record.head == record.bytes}
    for name, tensor in tensors.items():
        if name in manifest.tensors:
            chunks = manifest.tensors[name].chunks
            index = BoxIndex(chunk.box for chunk in chunks)
            found |= {chunks[number].file for part in tensor.parts for number, _ in index.shared(part.box)}
    return frozenset(found)


def _choose_verified(
    store: LocalStore, checkpoint: LocalCheckpoint, manifest: Manifest, needs: Mapping[int, frozenset[str]]
) -> tuple[dict[FileCopy, int], dict[FileCopy, str]]:
    """Choose a source for each file that a node needs, until all are verified; return them and the damaged copies."""
    verified: set[FileCopy] = set()
    bad: dict[FileCopy, str] = {}
    while True:
        chosen = choose_sources(checkpoint, needs, bad)
        unverified = sorted({(source, name) for (_, name), source in chosen.items()} - verified)
        if not unverified:
            return chosen, bad
        node_ranks = store.nodes.ranks(store.node)
        on_node = [copy for copy in unverified if copy[0] == store.node]
        mine = on_node[node_ranks.index(store.rank) :: len(node_ranks)]
        for problems in comm.all_gather_objects(_problems(manifest, mine), store.group):
            bad |= problems
        verified |= set(unverified)


def _problems(manifest: Manifest, copies: Iterable[FileCopy]) -> dict[FileCopy, str]:
    """Return the damaged ones among this node's copies, and why."""
    reader, chunks, found = ChunkReader(manifest), chunks_by_file(manifest), {}
    for node, file in copies:
        problem = next(list_file_damage(reader, file, chunks[file]), None)
        if problem is not None:
            found[node, file] = strip_folder(manifest.path, problem)
    reader.close()
    return found


def _fetch(
    store: LocalStore, checkpoint: LocalCheckpoint, manifest: Manifest, content: bytes, chosen: Mapping[FileCopy, int]
) -> None:
    """Copy the files to the nodes that lack them, and write the manifest on nodes that do not have it."""
    is_new = store.node not in checkpoint.files
    final = local_path(CheckpointFolder(store.folder).path(checkpoint.iteration))
    folder = staged_path(final, store.staging) if is_new else final
    moves = [(name, source, node) for (node, name), source in sorted(chosen.items()) if node != source]

    def prepare() -> None:
        if store.is_leader and is_new:
            create_staged(final, store.staging)
        for name in [name for name, _, node in moves if store.is_leader and node == store.node]:
            make_parent_folders(folder, name)

    def finish() -> None:
        if store.is_leader:
            sync_folder(folder)
        if store.is_leader and is_new:
            write_file(folder / MANIFEST, content)
            write_marker(folder, content)
            publish_staged(final, store.staging)

    gather_results(prepare, store.group)
    gather_results(lambda: _move(store, manifest, folder, moves), store.group)
    gather_results(finish, store.group)


def _move(store: LocalStore, manifest: Manifest, folder: Path, moves: list[tuple[str, int, int]]) -> None:
    """Send and receive this rank's share of the ``moves`` (file, from node, to node), in one order on all ranks.

    Raises:
        OSError: if the disk fails.
    """
    errors = []
    for number, (name, source, node) in enumerate(moves):
        senders, receivers = store.nodes.ranks(source), store.nodes.ranks(node)
        sender = senders[number % len(senders)]
        receiver = receivers[number % len(receivers)]
        size = manifest.files[name].bytes
        if store.rank == sender:
            errors.append(send_and_receive(FileTransfer(folder / name, receiver, size), None, store.file_group))
        elif store.rank == receiver:
            errors.append(
                send_and_receive(None, FileTransfer(folder / name, sender, size, store.staging), store.file_group)
            )
    for error in errors:
        if error is not None:
            raise error
