"""A checkpoint brought together from the nodes' folders: what a node needs and has not comes from one that has it."""

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
    """What the nodes have, newest first, and notes on what cannot be trusted; collective.

    Raises:
        NewerVersionError: when a newer version of this program wrote one, on every rank.
        OSError: when a disk refuses, on every rank.
    """
    found = together(lambda: held_in(tier.folder, tier.claim) if tier.leads else ([], []), tier.group)
    led = [found[tier.nodes.ranks(node)[0]] for node in range(tier.nodes.count)]
    notes = [f"node {node}: {note}" for node, (_, some) in enumerate(led) for note in some]
    return put_together([held for held, _ in led]), notes


def manifest_of(tier: Tier, checkpoint: LocalCheckpoint) -> tuple[Manifest, bytes]:
    """A checkpoint's manifest, on the nodes too that have none, and its text; collective.

    Raises:
        DamagedError: when it changed meanwhile, on every rank.
        OSError: when it cannot be read, on every rank.
    """
    final = on_disk(Checkpoints(tier.folder).path(checkpoint.iteration))
    reader = tier.nodes.ranks(min(checkpoint.files))[0]
    texts = together(lambda: (final / MANIFEST).read_bytes() if tier.rank == reader else b"", tier.group)
    if marker(texts[reader]).decode() != checkpoint.mark:
        raise DamagedError(f"{final / MANIFEST} on node {min(checkpoint.files)} is not what it was")
    return parse(final, texts[reader]), texts[reader]


def bring_together(
    tier: Tier, checkpoint: LocalCheckpoint, tensors: Mapping[str, GlobalTensor]
) -> tuple[Manifest, list[str]]:
    """Make this node's folder hold all that its ranks need of a checkpoint; collective.

    Every copy that is used is proved by its checksums first.

    Args:
        tier: the nodes' folders.
        checkpoint: which one.
        tensors: with the parts that this rank will fill; those that the checkpoint lacks do not count.

    Returns:
        The checkpoint, whose files are not all here, and notes on copies that did not serve.

    Raises:
        DamagedError: when no good copy is left of a file, on every rank.
        OSError: when a disk refuses, on every rank.
    """
    manifest, content = manifest_of(tier, checkpoint)
    wanted = comm.all_gather_objects(files_needed(manifest, tensors), tier.group)
    needs = {
        node: frozenset().union(*(wanted[rank] for rank in tier.nodes.ranks(node))) for node in range(tier.nodes.count)
    }
    chosen, bad = _proved(tier, checkpoint, manifest, needs)
    notes = [f"node {node}: {text}: another copy is used" for (node, _), text in sorted(bad.items())]
    _fetch(tier, checkpoint, manifest, content, chosen)
    return manifest, notes


def files_needed(manifest: Manifest, tensors: Mapping[str, GlobalTensor]) -> frozenset[str]:
    """Files of a checkpoint from which the parts of a rank are filled, and the small ones that go with it."""
    found = {name for name, record in manifest.files.items() if record.head == record.bytes}
    for name, tensor in tensors.items():
        if name in manifest.tensors:
            chunks = manifest.tensors[name].chunks
            index = BoxIndex(chunk.box for chunk in chunks)
            found |= {chunks[number].file for part in tensor.parts for number, _ in index.shared(part.box)}
    return frozenset(found)


def _proved(
    tier: Tier, checkpoint: LocalCheckpoint, manifest: Manifest, needs: Mapping[int, frozenset[str]]
) -> tuple[dict[Copy, int], dict[Copy, str]]:
    """Where each node takes what it needs from, and the copies that turned out not to be as they were written."""
    proved: set[Copy] = set()
    bad: dict[Copy, str] = {}
    while True:
        chosen = sources(checkpoint, needs, bad)
        open_ = sorted({(source, name) for (_, name), source in chosen.items()} - proved)
        if not open_:
            return chosen, bad
        here = tier.nodes.ranks(tier.node)
        mine = [copy for copy in open_ if copy[0] == tier.node][here.index(tier.rank) :: len(here)]
        for problems in comm.all_gather_objects(_problems(manifest, mine), tier.group):
            bad |= problems
        proved |= set(open_)


def _problems(manifest: Manifest, copies: Iterable[Copy]) -> dict[Copy, str]:
    """Those of this node's copies that are not as they were written, and why."""
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
    """Bring the files to the nodes that take them from others, and the manifest to those that have none."""
    is_new = tier.node not in checkpoint.files
    final = on_disk(Checkpoints(tier.folder).path(checkpoint.iteration))
    folder = building(final, tier.shop) if is_new else final
    moves = [(name, source, node) for (node, name), source in sorted(chosen.items()) if node != source]

    def prepare() -> None:
        if tier.leads and is_new:
            begin(final, tier.shop)
        for name in [name for name, _, node in moves if tier.leads and node == tier.node]:
            make_folders_inside(folder, name)

    def finish() -> None:
        if tier.leads:
            sync_folder(folder)
        if tier.leads and is_new:
            write_file(folder / MANIFEST, content)
            write_marker(folder, content)
            publish(final, tier.shop)

    together(prepare, tier.group)
    together(lambda: _move(tier, manifest, folder, moves), tier.group)
    together(finish, tier.group)


def _move(tier: Tier, manifest: Manifest, folder: Path, moves: list[tuple[str, int, int]]) -> None:
    """Send and take what is this rank's of the ``moves`` (file, from node, to node), in one order on all ranks.

    Raises:
        OSError: when the disk refuses.
    """
    errors = []
    for number, (name, source, node) in enumerate(moves):
        givers, takers = tier.nodes.ranks(source), tier.nodes.ranks(node)
        giver, taker = givers[number % len(givers)], takers[number % len(takers)]
        size = manifest.files[name].bytes
        if tier.rank == giver:
            errors.append(exchange(Parcel(folder / name, taker, size), None, tier.wire))
        elif tier.rank == taker:
            errors.append(exchange(None, Parcel(folder / name, giver, size, tier.shop), tier.wire))
    for error in errors:
        if error is not None:
            raise error
