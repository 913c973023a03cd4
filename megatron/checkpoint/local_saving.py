"""A checkpoint into the nodes' folders: every rank its own file, and a copy of one of the node before."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
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
"""What helps against a disk that is full."""

T = TypeVar("T")


def write_local(tier: Tier, iteration: int, tensors: Mapping[str, GlobalTensor], extra: Extra) -> Path:
    """Write a checkpoint into the nodes' folders; collective over the tier's group.

    No node gives it a name before all files and copies are on the disks of all. Older ones stay: see
    :func:`keep_only`.

    Returns:
        Its folder on this node.

    Raises:
        StorageError: when a disk refuses, on every rank; then the older checkpoint is as it was.
        SupersededError: when a later start has a node's folder, on every rank.
        ValueError: when the parts of all ranks are no partition of the tensors.
    """
    final = on_disk(Checkpoints(tier.folder).path(iteration))
    try:
        _write(tier, final, tensors, extra)
    except Exception:
        if tier.leads:
            abandon(final, tier.shop)
        raise
    return final


def keep_only(tier: Tier, iteration: int) -> str | None:
    """Remove all other checkpoints from the nodes' folders; collective.

    Returns:
        What a disk said against it, the same on every rank.

    Raises:
        SupersededError: when a later start has the node's folder.
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
            remove(path, tier.shop)


def _write(tier: Tier, final: Path, tensors: Mapping[str, GlobalTensor], extra: Extra) -> None:
    folder, planner, leads = building(final, tier.shop), PartsSavePlanner(tensors), tier.leads

    def all_do(action: Callable[[], T]) -> list[T]:
        return together(lambda: _telling(action, final, tier), tier.group)

    def leaders_do(action: Callable[[], object]) -> None:
        all_do(lambda: action() if leads else None)

    sizes = all_do(lambda: bytes_of(tensors))
    leaders_do(lambda: _begin(tier, final, sizes))
    plans = all_do(planner.create_local_plan)
    all_do(lambda: planner.create_global_plan(plans) if tier.rank == 0 else None)
    small = all_do(lambda: write_small(folder, extra.files) if leads else {})
    results = all_do(lambda: _write_own(folder, tier.rank, plans[tier.rank], planner))
    all_do(lambda: _copy(tier, folder, results))
    content = all_do(lambda: _described(plans, results, small[0], extra) if tier.rank == 0 else b"")[0]
    leaders_do(lambda: _describe(folder, content))
    leaders_do(lambda: _finish(tier, final, content))


def _begin(tier: Tier, final: Path, sizes: Sequence[int]) -> None:
    """Make the folder to build in, where the node's disk has room for its ranks' bytes and the copies of others."""
    kept = {tier.node, (tier.node - 1) % tier.nodes.count}
    size = sum(sizes[rank] for node in kept for rank in tier.nodes.ranks(node))
    if sentence := lacking(tier.folder, size, tier.claim):
        raise StorageError(f"{sentence} (rank {tier.rank}); no local checkpoint was written", *FULL)
    if tier.claim is not None:
        tier.claim.ready()
    begin(final, tier.shop)


def _write_own(folder: Path, rank: int, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
    return write_tensors(folder, rank, plan, planner) if plan.items else []


def _described(
    plans: list[SavePlan], results: list[list[WriteResult]], small: Mapping[str, FileRecord], extra: Extra
) -> bytes:
    """The text of the manifest of the whole checkpoint."""
    kinds = {name: kind for plan in plans for name, kind in plan.planner_data.items()}
    content, _ = describe_all(kinds, [result for some in results for result in some], small, extra)
    return content


def _describe(folder: Path, content: bytes) -> None:
    write_file(folder / MANIFEST, content)
    sync_folder(folder)


def _finish(tier: Tier, final: Path, content: bytes) -> None:
    write_marker(building(final, tier.shop), content)
    publish(final, tier.shop)


def _copy(tier: Tier, folder: Path, results: list[list[WriteResult]]) -> None:
    """Give this rank's file to the next node, and take one of the node before.

    Raises:
        OSError: when the disk refuses.
    """
    if tier.nodes.count == 1:
        return
    target, source = tier.nodes.neighbour(tier.rank, 1), tier.nodes.neighbour(tier.rank, -1)
    sent, received = _parcel(folder, results[tier.rank], target), _parcel(folder, results[source], source)
    error = exchange(sent, received, tier.wire)
    if error is not None:
        raise error


def _parcel(folder: Path, results: list[WriteResult], peer: int) -> Parcel | None:
    """The file that a rank has written, if it had anything to write."""
    files = [r.storage_data for r in results if isinstance(r.storage_data, FileResult)]
    return Parcel(folder / files[0].name, peer, files[0].record.bytes) if files else None


def _telling(action: Callable[[], T], final: Path, tier: Tier) -> T:
    """The result of ``action``; a disk that refuses is told of as such, unless a later start has the folder."""
    try:
        return action()
    except OSError as error:
        blame(tier.claim)
        sentence = f"{error.filename or final}: {in_words(error)} (rank {tier.rank}); no local checkpoint was written"
        raise StorageError(sentence, *(FULL if is_full(error) else FULL[1:])) from error
