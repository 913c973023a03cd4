"""Load from the nodes' local disks: files that a node needs and lacks are copied from a node that has them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from megatron.checkpoint.boxes import BoxIndex
from megatron.checkpoint.chunks import ChunkReader
from megatron.checkpoint.errors import DamagedError, within
from megatron.checkpoint.exchange import Parcel, Tier, exchange, together
from megatron.checkpoint.files import make_folders_inside, sync_folder, write_file
from megatron.checkpoint.folder import Checkpoints
from megatron.checkpoint.local import Copy, LocalCheckpoint, held_in, put_together, sources
from megatron.checkpoint.manifest import MANIFEST, Chunk, Manifest, marker, parse
from megatron.checkpoint.parts import GlobalTensor
from megatron.checkpoint.publish import begin, building, publish, write_marker
from megatron.checkpoint.remote import on_disk
from megatron.parallel import comm


def find(tier: Tier) -> tuple[list[LocalCheckpoint], list[str]]:
    """Return the checkpoints on the nodes, newest first, and notes on invalid ones; collective.

    Raises:
        NewerVersionError: if a checkpoint has a newer format version, on every rank.
        OSError: if a disk fails, on every rank.
    """
    found = together(lambda: held_in(tier.folder, tier.claim) if tier.leads else ([], []), tier.group)
    by_node = [found[tier.nodes.ranks(node)[0]] for node in range(tier.nodes.count)]
    notes = [f"node {node}: {note}" for node, (_, of_node) in enumerate(by_node) for note in of_node]
    return put_together([held for held, _ in by_node]), notes


def manifest_of(tier: Tier, checkpoint: LocalCheckpoint) -> tuple[Manifest, bytes]:
    """Return the manifest of a checkpoint and its text, also on nodes that do not have it; collective.

    Raises:
        DamagedError: if it changed meanwhile, on every rank.
        OSError: if it cannot be read, on every rank.
    """
    final = on_disk(Checkpoints(tier.folder).path(checkpoint.iteration))
    reader = tier.nodes.ranks(min(checkpoint.files))[0]
    texts = together(lambda: (final / MANIFEST).read_bytes() if tier.rank == reader else b"", tier.group)
    if marker(texts[reader]).decode() != checkpoint.mark:
        raise DamagedError(f"{final / MANIFEST} on node {min(checkpoint.files)} has changed")
    return parse(final, texts[reader]), texts[reader]


def bring_together(
    tier: Tier, checkpoint: LocalCheckpoint, tensors: Mapping[str, GlobalTensor]
) -> tuple[Manifest, list[str]]:
    """Copy to this node's folder all files of a checkpoint that its ranks need and it lacks; collective.

    Every copy that is used is first verified by its checksums.

    Args:
        tier: the nodes' folders.
        checkpoint: to load.
        tensors: with the parts that this rank will fill; tensors that the checkpoint lacks are ignored.

    Returns:
        The manifest, of whose files this node may have only some, and notes on damaged copies.

    Raises:
        DamagedError: if no good copy of a file is left, on every rank.
        OSError: if a disk fails, on every rank.
    """
    manifest, content = manifest_of(tier, checkpoint)
    wanted = comm.all_gather_objects(files_needed(manifest, tensors), tier.group)
    needs = {
        node: frozenset().union(*(wanted[rank] for rank in tier.nodes.ranks(node))) for node in range(tier.nodes.count)
    }
    chosen, bad = _choose_verified(tier, checkpoint, manifest, needs)
    notes = [f"node {node}: {text}: another copy is used" for (node, _), text in sorted(bad.items())]
    _fetch(tier, checkpoint, manifest, content, chosen)
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
    tier: Tier, checkpoint: LocalCheckpoint, manifest: Manifest, needs: Mapping[int, frozenset[str]]
) -> tuple[dict[Copy, int], dict[Copy, str]]:
    """Choose a source for each file that a node needs, until all are verified; return them and the damaged copies."""
    verified: set[Copy] = set()
    bad: dict[Copy, str] = {}
    while True:
        chosen = sources(checkpoint, needs, bad)
        unverified = sorted({(source, name) for (_, name), source in chosen.items()} - verified)
        if not unverified:
            return chosen, bad
        node_ranks = tier.nodes.ranks(tier.node)
        on_node = [copy for copy in unverified if copy[0] == tier.node]
        mine = on_node[node_ranks.index(tier.rank) :: len(node_ranks)]
        for problems in comm.all_gather_objects(_problems(manifest, mine), tier.group):
            bad |= problems
        verified |= set(unverified)


def _problems(manifest: Manifest, copies: Iterable[Copy]) -> dict[Copy, str]:
    """Return the damaged ones among this node's copies, and why."""
    copies, found = list(copies), {}
    inside: dict[str, list[tuple[str, Chunk]]] = {file: [] for _, file in copies}
    for name, record in manifest.tensors.items():
        for chunk in record.chunks:
            if chunk.file in inside:
                inside[chunk.file].append((name, chunk))
    reader = ChunkReader(manifest)
    for node, file in copies:
        try:
            reader.prove_head(file)
            for name, chunk in sorted(inside[file], key=lambda item: item[1].offset):
                reader.prove(name, chunk)
        except DamagedError as error:
            found[node, file] = within(manifest.path, error)
    reader.close()
    return found


def _fetch(
    tier: Tier, checkpoint: LocalCheckpoint, manifest: Manifest, content: bytes, chosen: Mapping[Copy, int]
) -> None:
    """Copy the files to the nodes that lack them, and write the manifest on nodes that do not have it."""
    is_new = tier.node not in checkpoint.files
    final = on_disk(Checkpoints(tier.folder).path(checkpoint.iteration))
    folder = building(final, tier.staging) if is_new else final
    moves = [(name, source, node) for (node, name), source in sorted(chosen.items()) if node != source]

    def prepare() -> None:
        if tier.leads and is_new:
            begin(final, tier.staging)
        for name in [name for name, _, node in moves if tier.leads and node == tier.node]:
            make_folders_inside(folder, name)

    def finish() -> None:
        if tier.leads:
            sync_folder(folder)
        if tier.leads and is_new:
            write_file(folder / MANIFEST, content)
            write_marker(folder, content)
            publish(final, tier.staging)

    together(prepare, tier.group)
    together(lambda: _move(tier, manifest, folder, moves), tier.group)
    together(finish, tier.group)


def _move(tier: Tier, manifest: Manifest, folder: Path, moves: list[tuple[str, int, int]]) -> None:
    """Send and receive this rank's share of the ``moves`` (file, from node, to node), in one order on all ranks.

    Raises:
        OSError: if the disk fails.
    """
    errors = []
    for number, (name, source, node) in enumerate(moves):
        senders, receivers = tier.nodes.ranks(source), tier.nodes.ranks(node)
        sender = senders[number % len(senders)]
        receiver = receivers[number % len(receivers)]
        size = manifest.files[name].bytes
        if tier.rank == sender:
            errors.append(exchange(Parcel(folder / name, receiver, size), None, tier.wire))
        elif tier.rank == receiver:
            errors.append(exchange(None, Parcel(folder / name, sender, size, tier.staging), tier.wire))
    for error in errors:
        if error is not None:
            raise error
