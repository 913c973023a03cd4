"""A folder of checkpoints ``iter_0000100``: list them, find the newest valid one, and delete old ones.

The folder of a run is on a shared disk or in an object store; those of ``--local-save`` are on the nodes' own disks.

:mod:`megatron.checkpoint.lease` makes sure that one start at a time writes to it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from megatron.checkpoint.errors import CheckpointError, DamagedCheckpointError, strip_folder
from megatron.checkpoint.format import MANIFEST, MARKER, Manifest
from megatron.checkpoint.lease import Lease
from megatron.checkpoint.object_store import Location, RemotePath, local_path
from megatron.checkpoint.publish import (
    LEFTOVER_NAME,
    checkpoint_folder_of,
    delete_checkpoint,
    find_checkpoints,
    is_complete,
    list_folders,
    recover,
    stale_uploads,
)


@dataclass(frozen=True)
class FoundCheckpoint:
    """A folder that is named like a checkpoint."""

    iteration: int  # steps taken when it was saved
    path: Location
    manifest: Manifest | None  # None if it is not valid
    problem: str | None  # why it is not valid, without the path of the folder


@dataclass(frozen=True)
class CheckpointFolder:
    """The checkpoints of a run, in its ``--save`` folder."""

    folder: Location  # on disk or in an object store; need not exist; for :meth:`newest` it may be a single checkpoint

    def path(self, iteration: int) -> Location:
        """Return the path of the checkpoint of an iteration."""
        return self.folder / f"iter_{iteration:07d}"

    @property
    def is_checkpoint(self) -> bool:
        """True if the folder is itself a checkpoint, valid or damaged."""
        return any((self.folder / name).exists() for name in (MARKER, MANIFEST))

    def named(self) -> list[tuple[int, Location]]:
        """Return iteration and path of all folders named like checkpoints, newest first, without opening them."""
        return find_checkpoints(self.folder)

    def candidates(self) -> list[FoundCheckpoint]:
        """Open all folders named like checkpoints, newest first.

        Checks the marker, the manifest's checksum and the sizes of all files; tensors are verified when they are read.
        """
        found = []
        for iteration, path in self.named():
            try:
                found.append(FoundCheckpoint(iteration, path, Manifest.open(path), None))
            except CheckpointError as error:
                found.append(FoundCheckpoint(iteration, path, None, strip_folder(path, error)))
        return found

    def newest(self, step: int | None = None) -> tuple[Manifest, list[FoundCheckpoint]]:
        """Return the newest valid checkpoint, and the newer invalid ones that were skipped.

        If ``folder`` is itself a checkpoint, it is returned.

        Args:
            step: consider only checkpoints of this step.

        Raises:
            CheckpointError: if there is none; lists the invalid ones.
            DamagedCheckpointError: if ``folder`` is itself a checkpoint, and damaged.
            NewerVersionError: if a checkpoint has a newer format version; no older one is used.
        """
        if self.is_checkpoint:
            manifest = Manifest.open(self.folder)
            found = manifest.state.get("iteration")
            if step not in (None, found):
                message = f"{self.folder} is the checkpoint of step {found}, not {step}"
                raise CheckpointError(message, f"--ckpt-step {found}")
            return manifest, []
        passed_over: list[FoundCheckpoint] = []
        for iteration, path in self.named():
            if step not in (None, iteration):
                continue
            try:
                return Manifest.open(path), passed_over
            except DamagedCheckpointError as error:
                passed_over.append(FoundCheckpoint(iteration, path, None, strip_folder(path, error)))
        which = "a checkpoint" if step is None else f"a checkpoint of step {step}"
        reasons = "".join(f"\n  {skipped.path.name}: {skipped.problem}" for skipped in passed_over)
        usable = f" that can be used:{reasons}" if reasons else ""
        raise CheckpointError(f"{self.folder} does not hold {which}{usable}")

    @property
    def leftovers(self) -> list[Location]:
        """Remainders of interrupted saves and deletions."""
        if isinstance(self.folder, RemotePath):
            places = [path for _, path in self.named() if isinstance(path, RemotePath)]
            return [path for place in places for path in stale_uploads(place)]
        return sorted((path for path in list_folders(self.folder) if LEFTOVER_NAME.fullmatch(path.name)), reverse=True)

    def retain(
        self,
        keep_last: int | None,
        keep_every: int | None = None,
        newest: int | None = None,
        lease: Lease | None = None,
    ) -> list[Location]:
        """Delete old checkpoints and leftovers; must not run during a save.

        Args:
            keep_last: number of newest valid checkpoints to keep; None: all.
            keep_every: iterations that are a multiple of it are kept permanently.
            newest: the iteration just saved. Later ones, which the run skipped as invalid, are kept and not counted.
            lease: lease on the folder. Without one, staging folders are not touched.

        Returns:
            The deleted checkpoints. Damaged ones newer than the kept ones are not deleted, for inspection.

        Raises:
            OSError: if the disk fails, or the staging folder is gone.
            SupersededError: if a later start holds the folder, in an object store.
        """
        staging = lease.staging if lease else None
        for path in self.leftovers:
            if isinstance(path, RemotePath):
                self._remove(path, lease)
            elif path.parent == (staging or self.folder):
                recover(local_path(self.folder / path.name.partition(".")[0]), staging)
        if keep_last is None:
            return []
        deleted: list[Location] = []
        kept = 0
        for iteration, path in self.named():
            if newest is not None and iteration > newest:
                continue
            if kept < keep_last:
                with suppress(CheckpointError):
                    Manifest.open(path)
                    kept += 1
            elif is_complete(path) and not (keep_every and iteration % keep_every == 0):
                self._remove(path, lease)
                deleted.append(path)
        return deleted

    def _remove(self, path: Location, lease: Lease | None) -> None:
        """Delete a checkpoint or a leftover; in a store, check the lease immediately before."""
        if isinstance(path, RemotePath) and lease is not None:
            lease.check()
        delete_checkpoint(path, lease.staging if lease else None)


NODE_PLACEHOLDER = "{node}"
"""Placeholder for the number of a node in a folder name."""


def node_folder(pattern: str, node: int) -> Path:
    """Return the folder of a node."""
    return Path(pattern.replace(NODE_PLACEHOLDER, str(node)))


def is_local_checkpoint(path: Path, pattern: str) -> bool:
    """Return True if a checkpoint lies in the local folder of any node."""
    any_node = r"\d+".join(re.escape(part) for part in str(Path(pattern)).split(NODE_PLACEHOLDER))
    return re.fullmatch(any_node, str(checkpoint_folder_of(path))) is not None


@dataclass(frozen=True)
class LocalCheckpoint:
    """A checkpoint on the nodes' disks, as far as it is on one of them or on all."""

    iteration: int  # steps taken when it was saved
    mark: str  # content of the marker; equal on nodes that took part in the same save
    run: str | None  # the ``--save`` folder of the run that wrote it
    # by node, the files that are present with their full size; only nodes that have the manifest
    files: Mapping[int, frozenset[str]]

    def missing(self, names: Sequence[str]) -> list[str]:
        """Return the files in ``names`` that no node has."""
        present = frozenset().union(*self.files.values())
        return [name for name in names if name not in present]
