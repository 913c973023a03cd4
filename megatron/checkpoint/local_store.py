"""Checkpoints on node-local disks: save, find and load, with a copy of every file on another node.

A node has the files of its own ranks, copies of those of the previous node, and the manifest of the whole checkpoint,
so any single node may be lost. At a save every rank writes its own file and sends it to the next node. At a load the
nodes compare what they have, verify the copies to be used, and send files to nodes that lack them. Files are sent
between ranks block by block; an I/O error on one rank does not stop the others, but is raised on all of them at the
end. Collective functions raise the error of a disk, or SupersededError if a later start holds a node's folder, on
every rank.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor
from torch.distributed.checkpoint.storage import WriteResult

from megatron.checkpoint.durable_files import NewFile, make_folder, sync_folder, write_file
from megatron.checkpoint.errors import DamagedCheckpointError, StorageError, strip_folder
from megatron.checkpoint.folder import CheckpointFolder, LocalCheckpoint
from megatron.checkpoint.format import (
    MANIFEST,
    MARKER,
    BoxIndex,
    FileRecord,
    Manifest,
    marker_content,
    parse_manifest,
)
from megatron.checkpoint.lease import Lease, raise_if_superseded
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
    PartsSavePlanner,
    build_manifest,
    disk_space_message,
    local_bytes,
    storage_errors,
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
class NodeMap:
    """Assignment of ranks to nodes."""

    node_of: tuple[int, ...]  # node of every rank, counted from 0

    @classmethod
    def from_launcher(cls, numbers: Sequence[int]) -> NodeMap:
        """Create from the launcher's node number of every rank, which may have gaps."""
        known = sorted(set(numbers))
        return cls(tuple(known.index(number) for number in numbers))

    @property
    def count(self) -> int:
        """Number of nodes."""
        return max(self.node_of) + 1

    @property
    def are_even(self) -> bool:
        """True if all nodes have equally many ranks."""
        return len({len(self.ranks(node)) for node in range(self.count)}) == 1

    def ranks(self, node: int) -> list[int]:
        """Return the ranks on a node; the first one is its leader."""
        return [rank for rank, number in enumerate(self.node_of) if number == node]

    def neighbour(self, rank: int, step: int) -> int:
        """Return the rank at the same position ``step`` nodes further in the ring of nodes."""
        node = self.node_of[rank]
        return self.ranks((node + step) % self.count)[self.ranks(node).index(rank)]


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
        return self.lease.staging if self.lease else None

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
        return self.nodes.ranks(self.node)[0] == self.rank


def gather_results(act: Callable[[], T], group: Group) -> list[T]:
    """Run ``act`` on all ranks and return their results; raise the error of the lowest failed rank on every rank."""
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
    errors: list[OSError] = []
    blocks = _exchange_blocks(sent, received, group, errors)
    if received is not None:
        part = (received.staging or received.path.parent) / (received.path.name + PARTIAL_SUFFIX)
        try:
            with suppress(OSError):
                os.unlink(part)
            with NewFile(part) as file:
                for block in blocks:
                    file.write(block.numpy().data)
            os.rename(part, received.path)
        except OSError as error:
            errors.append(error)
    for _ in blocks:  # the peers expect all messages, even if nothing can be written here
        pass
    return errors[0] if errors else None


def _exchange_blocks(
    sent: FileTransfer | None, received: FileTransfer | None, group: Group, errors: list[OSError]
) -> Iterator[Tensor]:
    """Send the blocks of a file while receiving those of another, and yield the latter."""
    me, blocks = group.ranks[group.rank], _read_blocks(sent, errors) if sent is not None else ()
    for size, block in zip_longest(received.blocks() if received is not None else (), blocks):
        messages: list[Pending] = []
        if received is not None and size is not None:
            incoming = Channel(group.ranks[received.peer], me, group.handle)
            messages.append(comm.start_receive(torch.empty(size, dtype=torch.uint8), incoming))
        if sent is not None and block is not None:
            messages.append(comm.start_send(block, Channel(me, group.ranks[sent.peer], group.handle)))
        for message in messages:
            message.wait()
        if size is not None:
            yield messages[0].result


def _read_blocks(transfer: FileTransfer, errors: list[OSError]) -> Iterator[Tensor]:
    """Yield the blocks of a file; after an I/O error zeros, because the receiver expects them all."""
    sizes = transfer.blocks()
    try:
        with transfer.path.open("rb") as file:
            while sizes:
                block = torch.empty(sizes[0], dtype=torch.uint8)
                if file.readinto(block.numpy().data) < len(block):
                    raise OSError(errno.EIO, "is shorter than when it was written", str(transfer.path))
                yield block
                del sizes[0]
    except OSError as error:
        errors.append(error)
    for size in sizes:
        yield torch.zeros(size, dtype=torch.uint8)


def save_local(store: LocalStore, iteration: int, tensors: Mapping[str, GlobalTensor], extra: CheckpointExtras) -> Path:
    """Write a checkpoint to the nodes' folders; collective over the store's group.

    It is published on a node only when all files and copies are on the disks of all nodes. Older checkpoints are kept:
    see :func:`delete_other_local_checkpoints`.

    Returns:
        Its folder on this node.

    Raises:
        StorageError: if a disk fails; the older checkpoint is then unchanged.
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
    """

    def delete() -> None:
        for other, path in CheckpointFolder(store.folder).named() if store.is_leader else ():
            if other != iteration or path.suffix:
                delete_checkpoint(path, store.staging)

    try:
        gather_results(delete, store.group)
    except OSError as error:
        raise_if_superseded(store.lease)
        return f"older local checkpoints are not deleted: {error}"
    return None


def _write(store: LocalStore, final: Path, tensors: Mapping[str, GlobalTensor], extra: CheckpointExtras) -> None:
    folder, planner, leads = staged_path(final, store.staging), PartsSavePlanner(tensors), store.is_leader

    def on_all_ranks(action: Callable[[], T]) -> list[T]:
        def guarded() -> T:
            with storage_errors(final, store.rank, store.lease, local=True):
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
    on_leaders(lambda: _publish(store, final, content))


def _create_staged_folder(store: LocalStore, final: Path, sizes: Sequence[int]) -> None:
    """Create the staging path if the disk has space for this node's files and the copies of the previous node's."""
    kept = {store.node, (store.node - 1) % store.nodes.count}
    size = sum(sizes[rank] for node in kept for rank in store.nodes.ranks(node))
    message = disk_space_message(store.folder, size, store.lease)
    if message is not None:
        sentence = f"{message} (rank {store.rank}); no local checkpoint was written"
        raise StorageError(sentence, "free some space", "--local-save ELSEWHERE")
    if store.lease is not None:
        store.lease.ready()
    create_staged(final, store.staging)


def _write_manifest(folder: Path, content: bytes) -> None:
    write_file(folder / MANIFEST, content)
    sync_folder(folder)


def _publish(store: LocalStore, final: Path, content: bytes) -> None:
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
    files = [(r.index.fqn, r.storage_data.bytes) for r in results if isinstance(r.storage_data, FileRecord)]
    return FileTransfer(folder / files[0][0], peer, files[0][1]) if files else None


def find_local_checkpoints(store: LocalStore) -> tuple[list[LocalCheckpoint], list[str]]:
    """Return the checkpoints on the nodes, newest first, and notes on invalid ones; collective."""
    found = gather_results(
        lambda: list_node_checkpoints(store.folder, store.node, store.lease) if store.is_leader else ([], []),
        store.group,
    )
    notes = [f"node {store.nodes.node_of[rank]}: {note}" for rank, (_, of_node) in enumerate(found) for note in of_node]
    return merge_node_checkpoints(part for parts, _ in found for part in parts), notes


def list_node_checkpoints(
    folder: Path, node: int, lease: Lease | None = None
) -> tuple[list[LocalCheckpoint], list[str]]:
    """Recover a node's folder from interrupted saves; return what it holds, and notes on invalid checkpoints."""
    checkpoints = CheckpointFolder(folder)
    checkpoints.retain(None, lease=lease)  # deletes leftovers only
    held, notes = [], []
    for iteration, path in checkpoints.named():
        try:
            manifest = Manifest.read(path)
        except DamagedCheckpointError as error:
            notes.append(f"passed over {path}: {strip_folder(path, error)}")
            continue
        files = set()
        for name in manifest.files:
            with suppress(DamagedCheckpointError):
                manifest.check_file(name)
                files.add(name)
        mark = local_path(path / MARKER).read_text()
        run = manifest.config.get("checkpoint", {}).get("save")
        held.append(LocalCheckpoint(iteration, mark, run, {node: frozenset(files)}))
    return held, notes


def merge_node_checkpoints(parts: Iterable[LocalCheckpoint]) -> list[LocalCheckpoint]:
    """Merge what each node has into checkpoints, newest first; of one iteration, those on more nodes first."""
    merged: dict[tuple[int, str], LocalCheckpoint] = {}
    for part in parts:
        same_save = merged.get((part.iteration, part.mark), part)
        merged[part.iteration, part.mark] = replace(same_save, files={**same_save.files, **part.files})
    return sorted(merged.values(), key=lambda found: (found.iteration, len(found.files), found.mark), reverse=True)


def read_local_manifest(store: LocalStore, checkpoint: LocalCheckpoint) -> tuple[Manifest, bytes]:
    """Return the manifest of a checkpoint and its text, also on nodes that do not have it; collective."""
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
        DamagedCheckpointError: if no good copy of a file is left.
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


FileCopy = tuple[int, str]
"""A node, and the name of a file that it has or needs."""


def choose_sources(
    checkpoint: LocalCheckpoint, needs: Mapping[int, frozenset[str]], bad: Mapping[FileCopy, str]
) -> dict[FileCopy, int]:
    """Choose, for each file that a node needs, the node to read it from: itself, else the nearest following one.

    Raises DamagedCheckpointError if all copies of a file are ``bad``, for the reasons given there.
    """
    chosen, count = {}, max([*needs, *checkpoint.files]) + 1
    for node, names in needs.items():
        for name in sorted(names):
            holders = [n for n, files in checkpoint.files.items() if name in files and (n, name) not in bad]
            if not holders:
                why = "; ".join(f"node {n}: {text}" for (n, other), text in sorted(bad.items()) if other == name)
                raise DamagedCheckpointError(f"no node has {name}" + (f" as it was written ({why})" if why else ""))
            chosen[node, name] = min(holders, key=lambda n: (n - node) % count)
    return chosen


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
            make_folder((folder / name).parent, folder)

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
    """Send and receive this rank's share of the ``moves`` (file, from node, to node), in one order on all ranks."""
    errors = []
    for number, (name, source, node) in enumerate(moves):
        senders, receivers = store.nodes.ranks(source), store.nodes.ranks(node)
        sender = senders[number % len(senders)]
        receiver = receivers[number % len(receivers)]
        size = manifest.files[name].bytes
        sent = FileTransfer(folder / name, receiver, size) if store.rank == sender else None
        received = FileTransfer(folder / name, sender, size, store.staging) if store.rank == receiver else None
        errors.append(send_and_receive(sent, received, store.file_group))
    for error in errors:
        if error is not None:
            raise error
