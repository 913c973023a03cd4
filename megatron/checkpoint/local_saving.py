"""Save to the nodes' local disks: every rank writes its own file and a copy of one from the previous node."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult

from megatron.checkpoint.claims import blame
from megatron.checkpoint.errors import StorageError
from megatron.checkpoint.exchange import Parcel, Tier, exchange, together
from megatron.checkpoint.files import in_words, is_full, sync_folder, write_file
from megatron.checkpoint.folder import Checkpoints
from megatron.checkpoint.manifest import MANIFEST, FileRecord
from megatron.checkpoint.parts import GlobalTensor
from megatron.checkpoint.publish import abandon, begin, building, publish, remove, write_marker
from megatron.checkpoint.remote import on_disk
from megatron.checkpoint.room import bytes_of, lacking
from megatron.checkpoint.saving import (
    Extra,
    FileResult,
    PartsSavePlanner,
    describe_all,
    write_small,
    write_tensors,
)

FULL = "free some space", "--local-save ELSEWHERE"
"""Fixes for a full disk."""

T = TypeVar("T")


def write_local(tier: Tier, iteration: int, tensors: Mapping[str, GlobalTensor], extra: Extra) -> Path:
    """Write a checkpoint to the nodes' folders; collective over the tier's group.

    It is published on a node only when all files and copies are on the disks of all nodes. Older checkpoints are kept:
    see :func:`delete_other_local_checkpoints`.

    Returns:
        Its folder on this node.

    Raises:
        StorageError: if a disk fails, on every rank; the older checkpoint is then unchanged.
        SupersededError: if a later start holds a node's folder, on every rank.
        ValueError: if the parts of all ranks do not partition the tensors.
    """
    final = on_disk(Checkpoints(tier.folder).path(iteration))
    try:
        _write(tier, final, tensors, extra)
    except Exception:
        if tier.leads:
            abandon(final, tier.staging)
        raise
    return final


def keep_only(tier: Tier, iteration: int) -> str | None:
    """Delete all other checkpoints from the nodes' folders; collective.

    Returns:
        The error of a disk, the same on every rank; None if there was none.

    Raises:
        SupersededError: if a later start holds the node's folder.
    """
    try:
        together(lambda: _remove_others(tier, iteration) if tier.leads else None, tier.group)
    except OSError as error:
        blame(tier.claim)
        return f"older local checkpoints are not deleted: {error}"
    return None


def _remove_others(tier: Tier, iteration: int) -> None:
    for other, path in Checkpoints(tier.folder).named():
        if other != iteration or path.suffix:
            remove(path, tier.staging)


def _write(tier: Tier, final: Path, tensors: Mapping[str, GlobalTensor], extra: Extra) -> None:
    folder, planner, leads = building(final, tier.staging), PartsSavePlanner(tensors), tier.leads

    def on_all_ranks(action: Callable[[], T]) -> list[T]:
        return together(lambda: _with_storage_errors(action, final, tier), tier.group)

    def on_leaders(action: Callable[[], object]) -> None:
        on_all_ranks(lambda: action() if leads else None)

    sizes = on_all_ranks(lambda: bytes_of(tensors))
    on_leaders(lambda: _create_staged_folder(tier, final, sizes))
    plans = on_all_ranks(planner.create_local_plan)
    on_all_ranks(lambda: planner.create_global_plan(plans) if tier.rank == 0 else None)
    small = on_all_ranks(lambda: write_small(folder, extra.files) if leads else {})
    own_plan = plans[tier.rank]
    results = on_all_ranks(lambda: write_tensors(folder, tier.rank, own_plan, planner) if own_plan.items else [])
    on_all_ranks(lambda: _copy_to_next_node(tier, folder, results))
    content = on_all_ranks(lambda: _manifest_text(plans, results, small[0], extra) if tier.rank == 0 else b"")[0]
    on_leaders(lambda: _write_manifest(folder, content))
    on_leaders(lambda: _publish_local(tier, final, content))


def _create_staged_folder(tier: Tier, final: Path, sizes: Sequence[int]) -> None:
    """Create the staging path if the disk has space for this node's files and the copies of the previous node's."""
    kept = {tier.node, (tier.node - 1) % tier.nodes.count}
    size = sum(sizes[rank] for node in kept for rank in tier.nodes.ranks(node))
    if message := lacking(tier.folder, size, tier.claim):
        raise StorageError(f"{message} (rank {tier.rank}); no local checkpoint was written", *FULL)
    if tier.claim is not None:
        tier.claim.ready()
    begin(final, tier.staging)


def _manifest_text(
    plans: list[SavePlan], results: list[list[WriteResult]], small: Mapping[str, FileRecord], extra: Extra
) -> bytes:
    """Return the text of the manifest of the whole checkpoint."""
    kinds = {name: kind for plan in plans for name, kind in plan.planner_data.items()}
    content, _ = describe_all(kinds, [result for of_rank in results for result in of_rank], small, extra)
    return content


def _write_manifest(folder: Path, content: bytes) -> None:
    write_file(folder / MANIFEST, content)
    sync_folder(folder)


def _publish_local(tier: Tier, final: Path, content: bytes) -> None:
    write_marker(building(final, tier.staging), content)
    publish(final, tier.staging)


def _copy_to_next_node(tier: Tier, folder: Path, results: list[list[WriteResult]]) -> None:
    """Send this rank's file to the next node, and receive one from the previous node."""
    if tier.nodes.count == 1:
        return
    target, source = tier.nodes.neighbour(tier.rank, 1), tier.nodes.neighbour(tier.rank, -1)
    sent, received = _parcel(folder, results[tier.rank], target), _parcel(folder, results[source], source)
    error = exchange(sent, received, tier.wire)
    if error is not None:
        raise error


def _parcel(folder: Path, results: list[WriteResult], peer: int) -> Parcel | None:
    """Return the transfer of the file that a rank has written; None if it had nothing to write."""
    files = [r.storage_data for r in results if isinstance(r.storage_data, FileResult)]
    return Parcel(folder / files[0].name, peer, files[0].record.bytes) if files else None


def _with_storage_errors(action: Callable[[], T], final: Path, tier: Tier) -> T:
    """Run ``action``; convert disk errors to StorageError, or SupersededError if a later start holds the folder."""
    try:
        return action()
    except OSError as error:
        blame(tier.claim)
        message = f"{error.filename or final}: {in_words(error)} (rank {tier.rank}); no local checkpoint was written"
        raise StorageError(message, *(FULL if is_full(error) else FULL[1:])) from error
