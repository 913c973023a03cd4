"""Checkpoints on the nodes' own disks (``--local-save``), with a copy of every file on another node.

A node has the files of its own ranks, copies of those of the previous node, and the manifest of the whole checkpoint,
so any single node may be lost. At a save every rank writes its own file and sends it to the next node. At a start the
nodes compare what they have, verify the copies to be used, and send files to nodes that lack them. Files are sent
between ranks block by block; an I/O error on one rank does not stop the others, but is raised on all of them at the
end. Methods are collective unless they return a property of this rank; they raise the error of a disk, or
SupersededError if a later start holds a node's folder, on every rank.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from megatron.arguments.sources import to_dict
from megatron.checkpoint.durable_files import NewFile, make_folder, sync_folder
from megatron.checkpoint.errors import CheckpointError, DamagedCheckpointError, StorageError, strip_folder
from megatron.checkpoint.folder import NODE_PLACEHOLDER, CheckpointFolder, node_folder
from megatron.checkpoint.format import (
    JSON,
    MANIFEST,
    MARKER,
    BoxIndex,
    Manifest,
    marker_content,
    marker_folder,
    parse_manifest,
)
from megatron.checkpoint.lease import Lease, raise_if_superseded
from megatron.checkpoint.location import Location, local_path, parse_location
from megatron.checkpoint.publish import Attempt, delete_checkpoint
from megatron.checkpoint.rewinds import Rewind, later_rewinds, read_rewinds, rewinds_of
from megatron.checkpoint.save import CheckpointExtras, CheckpointSave, disk_space_message, rank_file_name, share_lease
from megatron.checkpoint.tensor_file import GlobalTensor
from megatron.checkpoint.verify import chunks_by_file, list_file_damage
from megatron.config.checkpoint import CheckpointConfig
from megatron.config.errors import Problem, UserError
from megatron.config.launch import Launch
from megatron.distributed import comm
from megatron.distributed.comm import Channel, Group, Pending
from megatron.distributed.launch import gather_results, run_on_rank0
from megatron.training.callbacks.base import Callback
from megatron.training.checkpoint_contents import (
    CheckpointContents,
    further_tensors_to_load,
    local_tensors,
    tensors_to_load,
)
from megatron.training.resume_source import (
    ResumeSource,
    applies_to_own_checkpoints,
    is_own_checkpoint,
    passed_over_note,
    step_of,
)
from megatron.training.trainer import Trainer

BLOCK_BYTES = 16 << 20
"""Bytes of a message; a rank holds two."""

FileCopy = tuple[int, str]
"""A node, and the name of a file that it has or needs."""


@dataclass(frozen=True)
class LocalCheckpoint:
    """A checkpoint on the nodes' disks, as far as it is on one of them or on all."""

    iteration: int  # steps taken when it was saved
    mark: str  # content of the marker; equal on nodes that took part in the same save
    run: str | None  # the ``--save`` folder of the run that wrote it
    # by node, the files that are present with their full size; only nodes that have the manifest
    files: dict[int, frozenset[str]]
    names: tuple[str, ...] = ()  # of all files of the checkpoint
    rewinds: tuple[str, ...] = ()  # ids of those that it was written after

    @property
    def missing(self) -> list[str]:
        """Files that no node has."""
        present = frozenset().union(*self.files.values())
        return [name for name in self.names if name not in present]


@dataclass
class NodeCheckpoints:
    """The nodes' folders of checkpoints, as seen by one rank."""

    folder: Path  # of this rank's node
    node_of: tuple[int, ...]  # node of every rank, counted from 0; all have equally many ranks
    group: Group  # all ranks, for collectives
    file_group: Group  # all ranks with a communicator of its own, for files: point-to-point calls differ between ranks
    lease: Lease | None = None  # on the node's folder, the same for all ranks of the node
    options: CheckpointConfig = field(default_factory=CheckpointConfig)
    # candidates of this start, newest first, by path on this node
    usable: dict[Location, list[LocalCheckpoint]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rank = self.group.rank
        self.node = self.node_of[self.rank]  # of this rank
        self.count = max(self.node_of) + 1  # of nodes
        self.is_leader = self.ranks(self.node)[0] == self.rank  # the first rank of its node

    @classmethod
    def join(cls, options: CheckpointConfig, world: Group) -> Self:
        """Use the folders of ``local_save``; UserError if the nodes have different numbers of ranks."""
        numbers = comm.all_gather_objects(Launch.read(os.environ).node, world)  # the launcher's, with gaps
        known = sorted(set(numbers))
        if len({numbers.count(number) for number in known}) > 1:
            counts = ", ".join(str(numbers.count(number)) for number in known)
            rule = "all need the same number, because they copy in pairs"
            raise UserError(
                [Problem("E804", f"--local-save: the nodes have {counts} ranks; {rule}", ("drop --local-save",))]
            )
        node_of = tuple(known.index(number) for number in numbers)
        return cls(node_folder(str(options.local_save), node_of[world.rank]), node_of, world, world, options=options)

    @classmethod
    @contextmanager
    def hold(cls, options: CheckpointConfig, world: Group) -> Iterator[Self]:
        """Create the nodes' folders and hold their leases for this run.

        Raises:
            CheckpointError: if another run or node holds a lease, or a folder cannot be written.
            UserError: if the nodes have different numbers of ranks.
        """
        nodes = cls.join(options, world)
        pattern = str(options.local_save)
        with ExitStack() as stack:
            try:
                leader = nodes.ranks(nodes.node)[0]
                nodes.lease = stack.enter_context(share_lease(nodes.folder, world, leader, "--local-save"))
            except CheckpointError as error:
                if type(error) is not CheckpointError or nodes.count == 1 or NODE_PLACEHOLDER in pattern:
                    raise
                shared = f"where nodes share a disk: --local-save {Path(pattern) / NODE_PLACEHOLDER}"
                raise CheckpointError(f"{error} | {shared}") from error
            yield nodes

    @property
    def staging(self) -> Path | None:
        """Staging folder of the node's folder; None without a lease."""
        return self.lease.staging if self.lease else None

    def ranks(self, node: int) -> list[int]:
        """Return the ranks on a node."""
        return [rank for rank, number in enumerate(self.node_of) if number == node]

    def neighbour(self, step: int) -> int:
        """Return the rank at the same position ``step`` nodes further in the ring of nodes."""
        return self.ranks((self.node + step) % self.count)[self.ranks(self.node).index(self.rank)]

    def path(self, iteration: int) -> Path:
        """Return this node's folder of a checkpoint."""
        return local_path(CheckpointFolder(self.folder).path(iteration))

    # ---- A start

    def add_to(self, source: ResumeSource | UserError) -> ResumeSource:
        """Add the nodes' checkpoints to the ones to try, ordered by step.

        Older local checkpoints stay candidates too, because a durable one may turn out to be damaged.

        Args:
            source: what the run starts from without local checkpoints, or the error if there is nothing.

        Raises:
            UserError: if ``source`` is an error and the nodes have no usable checkpoint, or if they have one of another
                run, or one newer than the requested step.
            NewerVersionError: if a newer version of this program wrote one.
            OSError: if a disk cannot be read.
        """
        options, folder = self.options, self.options.local_save
        found, notes = self.find()
        save = parse_location(str(options.save)).resolve()
        for checkpoint in found:
            if checkpoint.run is None or parse_location(checkpoint.run).resolve() != save:
                sentence = (
                    f"--local-save {folder} holds the checkpoint of step {checkpoint.iteration} of another "
                    f"run, which saves to {checkpoint.run}"
                )
                raise UserError([Problem("E804", sentence, (f"--local-save {folder}-new",))])
        own = applies_to_own_checkpoints(options)
        step, mode = (options.ckpt_step, options.resume_mode) if own else (None, "exact")
        rewinds = source.rewinds if isinstance(source, ResumeSource) else self._read_rewinds()
        self.usable.clear()  # of an earlier phase of this start
        for checkpoint in found:
            path = self.path(checkpoint.iteration)
            if problem := self._problem(checkpoint, step, rewinds):
                notes.append(passed_over_note(path, problem))
            else:
                self.usable.setdefault(path, []).append(checkpoint)
        paths = tuple[Location, ...](self.usable)
        if isinstance(source, UserError):
            if not paths:
                raise source
            reasons = (problem.sentence for problem in source.problems)
            return ResumeSource(paths, mode=mode, notes=(*reasons, *notes), rewinds=rewinds)
        if not paths:
            return replace(source, notes=(*source.notes, *notes))
        durable = next((step_of(path) for path in source.paths if is_own_checkpoint(path, options)), -1)
        newest = step_of(paths[0])
        if newest > durable:
            other = f"the newest is of step {durable}" if durable >= 0 else "there is none"
            notes.append(f"the nodes have a checkpoint of step {newest}; {other} in --save")
        if durable < 0:  # what ``source`` found is not the run's own
            return ResumeSource(paths, mode=mode, notes=tuple(notes), rewinds=rewinds)
        paths = tuple(sorted((*source.paths, *paths), key=step_of, reverse=True))  # of one step the durable one first
        return ResumeSource(paths, mode=mode, notes=(*source.notes, *notes), rewinds=rewinds)

    def _read_rewinds(self) -> tuple[Rewind, ...]:
        """Return the rewinds of the run; collective."""
        save = parse_location(str(self.options.save))
        entries = run_on_rank0(lambda: [rewind.to_json() for rewind in read_rewinds(save)], self.group)
        return tuple(Rewind(**entry) for entry in entries)

    def _problem(self, checkpoint: LocalCheckpoint, step: int | None, rewinds: Sequence[Rewind]) -> str | None:
        """Return why a local checkpoint cannot be used, or None.

        Raises:
            UserError: if it is complete and newer than ``step``, so that the next start would resume from it.
        """
        if later := later_rewinds(checkpoint.iteration, checkpoint.rewinds, rewinds):
            return later[-1].why
        if step is not None and checkpoint.iteration < step:
            return f"step {step} is requested"
        if missing := checkpoint.missing:
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            return f"no node has {missing[0]}{more}; {len(checkpoint.files)} of {self.count} nodes have some of it"
        if step is not None and checkpoint.iteration > step:
            sentence = (
                f"the nodes hold a newer checkpoint than step {step}, of step {checkpoint.iteration}: "
                "the next start would resume from it"
            )
            raise UserError([Problem("E813", sentence, (f"--load RUN --ckpt-step {step} --save ANOTHER",))])
        return None

    def find(self) -> tuple[list[LocalCheckpoint], list[str]]:
        """Return the checkpoints on the nodes, newest first, and notes on invalid ones."""

        def read() -> list[Any]:
            return [*list_node_checkpoints(self.folder, self.lease)] if self.is_leader else [[], []]

        held, notes = list[tuple[int, list[Any]]](), list[str]()
        for node, (of_node, problems) in zip(self.node_of, gather_results(read, self.group)):
            held += [(node, entry) for entry in of_node]
            notes += [f"node {node}: {note}" for note in problems]
        return merge_node_checkpoints(held), notes

    def connect(self, trainer: Trainer) -> list[str]:
        """Open communicators of the trainer's ranks, to load and save; return notes."""
        self.group, self.file_group = trainer.mesh.background_group(), trainer.mesh.background_group()
        notes = [] if self.lease is None else [*self.lease.notes]
        if self.count == 1:
            notes.append("--local-save on one node: no other has a copy, so a lost node loses the checkpoints on it")
        return notes

    def open(self, trainer: Trainer, path: Location) -> tuple[Manifest, list[str]] | None:
        """Fetch the files of a checkpoint that this node lacks; return its manifest, and notes on damaged copies.

        Returns None if the checkpoint is not one of the nodes'.

        Raises:
            DamagedCheckpointError: if it cannot be used.
        """
        if path not in self.usable:
            return None
        checkpoint, *others = self.usable[path]  # of one step, those of another save that some nodes still have
        try:
            wanted = tensors_to_load(trainer, local_tensors(trainer))
            return self.fetch(checkpoint, wanted, partial(further_tensors_to_load, trainer))
        except (OSError, StorageError, DamagedCheckpointError) as error:
            if others:
                self.usable[path] = others
                return self.open(trainer, path)
            if isinstance(error, DamagedCheckpointError):
                raise
            raise DamagedCheckpointError(f"its files cannot be collected from the nodes: {error}") from error

    def callbacks(self, trainer: Trainer) -> list[Callback]:
        """Return the callback that saves, if ``local_save_interval`` is set."""
        interval = self.options.local_save_interval
        return [] if interval is None else [LocalSave(trainer, self, interval)]

    # ---- Loading

    def fetch(
        self,
        checkpoint: LocalCheckpoint,
        tensors: Mapping[str, GlobalTensor],
        more: Callable[[Manifest], Mapping[str, GlobalTensor]] = lambda manifest: {},
    ) -> tuple[Manifest, list[str]]:
        """Copy to this node's folder all files of a checkpoint that its ranks need and it lacks.

        Every copy that is used is first verified by its checksums.

        Args:
            checkpoint: to load.
            tensors: with the parts that this rank will fill; tensors that the checkpoint lacks are ignored.
            more: returns further tensors, which depend on the checkpoint.

        Returns:
            The manifest, of whose files this node may have only some, and notes on damaged copies.

        Raises:
            DamagedCheckpointError: if no good copy of a file is left.
        """
        final, holder = self.path(checkpoint.iteration), min(checkpoint.files)
        reader = self.ranks(holder)[0]
        inside = marker_folder(checkpoint.mark.encode())
        path = final / inside / MANIFEST
        text = gather_results(lambda: path.read_text("latin1") if self.rank == reader else "", self.group)[reader]
        content = text.encode("latin1")
        if marker_content(content, inside).decode() != checkpoint.mark:
            raise DamagedCheckpointError(f"{path} on node {holder} has changed")
        manifest = parse_manifest(final, content, inside)
        needed = files_needed(manifest, {**tensors, **more(manifest)})
        wanted = comm.all_gather_objects(sorted(needed), self.group)
        needs = {n: frozenset().union(*(wanted[rank] for rank in self.ranks(n))) for n in range(self.count)}
        chosen, bad = self._choose_verified(checkpoint, manifest, needs)
        notes = [f"node {node}: {text}: another copy is used" for (node, _), text in sorted(bad.items())]
        moves = [(name, source, node) for (node, name), source in sorted(chosen.items()) if node != source]
        is_new = self.node not in checkpoint.files
        attempt = Attempt(final, self.staging, inside)
        folder = local_path(attempt.folder if is_new else manifest.folder)

        def prepare() -> None:
            if self.is_leader and is_new:
                attempt.start()
            for name in [name for name, _, node in moves if self.is_leader and node == self.node]:
                make_folder((folder / name).parent, folder)

        def finish() -> None:
            if self.is_leader:
                sync_folder(folder)
            if self.is_leader and is_new:
                attempt.write_manifest(content)
                attempt.publish(content)

        gather_results(prepare, self.group)
        gather_results(lambda: self._move(manifest, folder, moves), self.group)
        gather_results(finish, self.group)
        return manifest, notes

    def _choose_verified(
        self, checkpoint: LocalCheckpoint, manifest: Manifest, needs: Mapping[int, frozenset[str]]
    ) -> tuple[dict[FileCopy, int], dict[FileCopy, str]]:
        """Choose a source for each file that a node needs, until all are verified; return them and damaged copies."""
        verified: set[FileCopy] = set()
        bad: dict[FileCopy, str] = {}
        chunks, ranks = chunks_by_file(manifest), self.ranks(self.node)
        while True:
            chosen = choose_sources(checkpoint, needs, bad)
            unverified = sorted({(source, name) for (_, name), source in chosen.items()} - verified)
            if not unverified:
                return chosen, bad
            on_node = [name for node, name in unverified if node == self.node]
            found = list[list[Any]]()
            for name in on_node[ranks.index(self.rank) :: len(ranks)]:
                problem = next(list_file_damage(manifest, name, chunks[name]), None)
                if problem is not None:
                    found.append([self.node, name, strip_folder(manifest.folder, problem)])
            for problems in comm.all_gather_objects(found, self.group):
                bad |= {(node, name): problem for node, name, problem in problems}
            verified |= set(unverified)

    def _move(self, manifest: Manifest, folder: Path, moves: list[tuple[str, int, int]]) -> None:
        """Send and receive this rank's share of the ``moves`` (file, from node, to node), in one order on all ranks."""
        errors = []
        for number, (name, source, node) in enumerate(moves):
            senders, receivers = self.ranks(source), self.ranks(node)
            sender, receiver = senders[number % len(senders)], receivers[number % len(receivers)]
            sent, received = (
                FileTransfer(folder / name, peer, manifest.files[name].bytes) for peer in (receiver, sender)
            )
            errors.append(
                send_and_receive(
                    sent if self.rank == sender else None,
                    received if self.rank == receiver else None,
                    self.file_group,
                    self.staging,
                )
            )
        for error in filter(None, errors):
            raise error

    # ---- Saving

    def save(self, iteration: int, tensors: Mapping[str, GlobalTensor], extra: CheckpointExtras) -> int:
        """Write a checkpoint to the nodes' folders; return the bytes of its tensors.

        Older checkpoints are kept: see :meth:`delete_others`.

        Raises:
            StorageError: if a disk fails; the older checkpoint is then unchanged.
            ValueError: if the parts of all ranks do not partition the tensors.
        """
        final = self.path(iteration)
        name = run_on_rank0(lambda: Attempt(final).name, self.group)  # the same on all nodes
        return NodeSave(Attempt(final, self.staging, name), tensors, extra, self.group, self.lease, self).run()

    def delete_others(self, iteration: int) -> str | None:
        """Delete all other checkpoints from the nodes' folders; return the error of a disk, or None."""

        def delete() -> None:
            for other, path in CheckpointFolder(self.folder).named() if self.is_leader else ():
                if other != iteration:
                    delete_checkpoint(path, self.staging)

        try:
            gather_results(delete, self.group)
        except OSError as error:
            raise_if_superseded(self.lease)
            return f"older local checkpoints are not deleted: {error}"
        return None


@dataclass
class NodeSave(CheckpointSave):
    """A save to the nodes' disks, published on a node only when all files and copies are on the disks of all nodes."""

    nodes: NodeCheckpoints

    local = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self.leads = self.nodes.is_leader

    def check_space(self) -> None:
        """Raise StorageError unless the disk has space for this node's files, and copies of the previous one's."""
        nodes = self.nodes
        kept = {nodes.node, (nodes.node - 1) % nodes.count}
        size = sum(self.sizes[rank] for node in kept for rank in nodes.ranks(node))
        message = disk_space_message(nodes.folder, size, self.lease)
        if message is not None:
            sentence = f"{message} (rank {nodes.rank}); no local checkpoint was written"
            raise StorageError(sentence, "free some space", "--local-save ELSEWHERE")

    def conclude(self, files: Callable[[], list[JSON]]) -> None:
        """Write manifest and marker on every node, each when all ranks are done with what comes before it."""
        self.manifest = run_on_rank0(lambda: self.build(files()), self.group)
        gather_results(self._safely(self.complete), self.group)
        gather_results(self._safely(self.publish), self.group)

    def complete(self) -> None:
        """Send this rank's file, if it has written one, to the next node, and receive one from the previous node."""
        nodes, folder = self.nodes, local_path(self.attempt.folder)
        mine = folder / rank_file_name(nodes.rank)
        sizes = gather_results(lambda: mine.stat().st_size if mine.exists() else None, self.group)

        def transfer(writer: int, peer: int) -> FileTransfer | None:
            size = sizes[writer]
            return None if size is None else FileTransfer(folder / rank_file_name(writer), peer, size)

        if nodes.count > 1:
            following, previous = nodes.neighbour(1), nodes.neighbour(-1)
            sent, received = transfer(nodes.rank, following), transfer(previous, previous)
            if (error := send_and_receive(sent, received, nodes.file_group)) is not None:
                raise error
        super().complete()


def list_node_checkpoints(folder: Path, lease: Lease | None = None) -> tuple[list[list[Any]], list[str]]:
    """Recover a node's folder from interrupted saves; return what it holds, as JSON, and notes on invalid checkpoints.

    Of a checkpoint, these are iteration, marker, run, the files that are present, the names of all files, and the ids
    of the rewinds that it was written after.
    """
    checkpoints = CheckpointFolder(folder)
    checkpoints.retain(None, lease=lease)  # deletes leftovers only
    held, notes = list[list[Any]](), []
    for iteration, path in checkpoints.named():
        try:
            manifest = Manifest.read(path)
        except DamagedCheckpointError as error:
            notes.append(passed_over_note(path, error))
            continue
        files = []
        for name in manifest.files:
            with suppress(DamagedCheckpointError):
                manifest.check_file(name)
                files.append(name)
        run = manifest.config.get("checkpoint", {}).get("save")
        rewinds = [rewind.id for rewind in rewinds_of(manifest.state)]
        held.append([iteration, local_path(path / MARKER).read_text(), run, files, [*manifest.files], *rewinds])
    return held, notes


def merge_node_checkpoints(held: Iterable[tuple[int, Sequence[Any]]]) -> list[LocalCheckpoint]:
    """Merge what each node has into checkpoints, newest first; of one iteration, those on more nodes first."""
    merged: dict[tuple[int, str], LocalCheckpoint] = {}
    for node, (iteration, mark, run, files, names, *rewinds) in held:
        new = LocalCheckpoint(iteration, mark, run, {}, tuple(names), tuple(rewinds))
        found = merged.setdefault((iteration, mark), new)
        found.files[node] = frozenset(files)
    return sorted(merged.values(), key=lambda found: (found.iteration, len(found.files), found.mark), reverse=True)


def files_needed(manifest: Manifest, tensors: Mapping[str, GlobalTensor]) -> frozenset[str]:
    """Return the files that contain the parts of a rank, and the small files of the checkpoint."""
    found = {name for name, record in manifest.files.items() if record.head == record.bytes}
    for name, tensor in tensors.items():
        if name in manifest.tensors:
            chunks = manifest.tensors[name].chunks
            index = BoxIndex(chunk.box for chunk in chunks)
            found |= {chunks[number].file for part in tensor.parts for number, _ in index.shared(part.box)}
    return frozenset(found)


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


@dataclass(frozen=True)
class FileTransfer:
    """A file sent to, or received from, the rank ``peer``."""

    path: Path
    peer: int
    bytes: int

    def blocks(self) -> list[int]:
        """Return the lengths of its blocks."""
        return [min(BLOCK_BYTES, self.bytes - start) for start in range(0, self.bytes, BLOCK_BYTES)]


def send_and_receive(
    sent: FileTransfer | None, received: FileTransfer | None, group: Group, staging: Path | None = None
) -> OSError | None:
    """Send a file to one rank of a group while receiving one from another; return this rank's first I/O error.

    The peers make the matching calls. The received file is on disk at the end, and has replaced one of its name; while
    it is incomplete it is in ``staging``, by default in the folder of its own.
    """
    errors: list[OSError] = []
    blocks = _exchange_blocks(sent, received, group, errors)
    if received is not None:
        part = (staging or received.path.parent) / f"{received.path.name}.part"
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


class LocalSave(Callback):
    """Write a checkpoint into the nodes' folders every ``--local-save-interval`` steps; delete the previous one.

    The last act of an iteration: a start that finds the final step on the nodes has nothing left to save. If a disk
    fails there is a warning, and the run continues with the existing checkpoints.
    """

    def __init__(self, trainer: Trainer, nodes: NodeCheckpoints, interval: int) -> None:
        """Save to ``nodes`` every ``interval`` steps."""
        super().__init__(trainer)
        self.interval = interval
        self._nodes = nodes

    def on_iteration_end(self) -> None:
        """Save; collective."""
        self.log.flush()  # a run that resumes from this checkpoint must still have all records before it
        try:
            self._save()
        except StorageError as error:
            self.log.warning(f"step {self.trainer.iteration} is not saved on the nodes: {error}")

    def _save(self) -> None:
        trainer, contents = self.trainer, CheckpointContents.of(self.trainer)
        config = to_dict(trainer.config)
        save = parse_location(str(trainer.config.checkpoint.save))
        if isinstance(save, Path):  # absolute, because the next start may have another working directory
            config["checkpoint"]["save"] = str(save.absolute())
        extras = CheckpointExtras(contents.state, config, trainer.files)
        size = self._nodes.save(trainer.iteration, contents.tensors, extras)
        warning = self._nodes.delete_others(trainer.iteration)
        self.log.checkpoint(self._nodes.path(trainer.iteration), size, time.monotonic() - contents.started)
        if warning:
            self.log.warning(warning)
