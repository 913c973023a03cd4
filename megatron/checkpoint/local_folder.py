"""Checkpoints on node-local disks: what each node has, and which nodes together have a complete checkpoint.

A node has the files of its own ranks, copies of those of the previous node, and the manifest of the whole checkpoint,
so any single node may be lost. No torch and no communication here: see `local_store`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from megatron.checkpoint.errors import DamagedCheckpointError, strip_folder
from megatron.checkpoint.folder import CheckpointFolder
from megatron.checkpoint.format import MARKER, Manifest
from megatron.checkpoint.lease import Lease
from megatron.checkpoint.object_store import local_path
from megatron.checkpoint.publish import checkpoint_folder_of

NODE_PLACEHOLDER = "{node}"
"""Placeholder for the number of a node in a folder name."""


def node_folder(pattern: str, node: int) -> Path:
    """Return the folder of a node."""
    return Path(pattern.replace(NODE_PLACEHOLDER, str(node)))


def is_local_checkpoint(path: Path, pattern: str) -> bool:
    """Return True if a checkpoint lies in the local folder of any node."""
    return bool(
        re.fullmatch(
            r"\d+".join(map(re.escape, str(Path(pattern)).split(NODE_PLACEHOLDER))), str(checkpoint_folder_of(path))
        )
    )


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

    def is_leader(self, rank: int) -> bool:
        """Return True if a rank is the leader of its node."""
        return self.ranks(self.node_of[rank])[0] == rank

    def neighbour(self, rank: int, step: int) -> int:
        """Return the rank at the same position ``step`` nodes further in the ring of nodes."""
        node = self.node_of[rank]
        return self.ranks((node + step) % self.count)[self.ranks(node).index(rank)]


@dataclass(frozen=True)
class LocalCheckpoint:
    """A checkpoint on the nodes' disks, as far as it is on one of them or on all."""

    iteration: int  # steps taken when it was saved
    mark: str  # content of the marker; equal on nodes that took part in the same save
    run: str | None  # the ``--save`` folder of the run that wrote it
    files: Mapping[
        int, frozenset[str]
    ]  # files that are present with their full size, by node; only nodes that have the manifest

    def missing(self, names: Sequence[str]) -> list[str]:
        """Return the files in ``names`` that no node has."""
        present = frozenset().union(*self.files.values())
        return [name for name in names if name not in present]


def list_node_checkpoints(
    folder: Path, node: int, lease: Lease | None = None
) -> tuple[list[LocalCheckpoint], list[str]]:
    """Recover a node's folder from interrupted saves; return what it holds, and notes on invalid checkpoints.

    Raises:
        NewerVersionError: if a checkpoint has a newer format version.
        OSError: if the disk fails.
    """
    checkpoints = CheckpointFolder(folder)
    checkpoints.retain(None, lease=lease)  # deletes leftovers only
    held, notes = [], []
    for iteration, path in checkpoints.named():
        try:
            manifest = Manifest.read(path)
        except DamagedCheckpointError as error:
            notes.append(f"passed over {path}: {strip_folder(path, error)}")
            continue
        mark = local_path(path / MARKER).read_text()
        run = manifest.config.get("checkpoint", {}).get("save")
        files = frozenset(name for name in manifest.files if _has_file(manifest, name))
        held.append(LocalCheckpoint(iteration, mark, run, {node: files}))
    return held, notes


def _has_file(manifest: Manifest, name: str) -> bool:
    try:
        manifest.check_file(name)
    except DamagedCheckpointError:
        return False
    return True


def merge_node_checkpoints(parts: Iterable[LocalCheckpoint]) -> list[LocalCheckpoint]:
    """Merge what each node has into checkpoints, newest first; of one iteration, those on more nodes first."""
    merged: dict[tuple[int, str], LocalCheckpoint] = {}
    for part in parts:
        same_save = merged.get((part.iteration, part.mark), part)
        merged[part.iteration, part.mark] = replace(same_save, files={**same_save.files, **part.files})
    return sorted(merged.values(), key=lambda found: (found.iteration, len(found.files), found.mark), reverse=True)


FileCopy = tuple[int, str]
"""A node, and the name of a file that it has or needs."""


def choose_sources(
    checkpoint: LocalCheckpoint, needs: Mapping[int, frozenset[str]], bad: Mapping[FileCopy, str]
) -> dict[FileCopy, int]:
    """Choose, for each file that a node needs, the node to read it from: itself, else the nearest following one.

    Args:
        checkpoint: the files of each node.
        needs: the files that each node needs.
        bad: damaged copies, and why.

    Raises:
        DamagedCheckpointError: if no good copy of a file is left.
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
