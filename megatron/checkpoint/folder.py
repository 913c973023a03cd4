"""A folder of checkpoints ``iter_0000100``: list them, find the newest valid one, and delete old ones.

The folder of a run is on a shared disk or in an object store; those of ``--local-save`` are on the nodes' own disks.

:mod:`megatron.checkpoint.lease` makes sure that one start at a time writes to it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from megatron.checkpoint.errors import CheckpointError, DamagedCheckpointError, strip_folder
from megatron.checkpoint.format import MANIFEST, MARKER, Manifest, is_megatron_lm
from megatron.checkpoint.lease import Lease
from megatron.checkpoint.location import Location
from megatron.checkpoint.publish import (
    delete_checkpoint,
    find_checkpoints,
    finish_staged,
    has_attempts,
    is_complete,
    is_interrupted,
    leftovers,
    staged_leftovers,
    staging_folders,
)
from megatron.checkpoint.rewinds import later_rewinds, read_rewinds, rewinds_of


@dataclass(frozen=True)
class FoundCheckpoint:
    """A folder that is named like a checkpoint."""

    iteration: int  # steps taken when it was saved
    path: Location
    manifest: Manifest | None  # None if it is not valid
    problem: str | None  # why it is not valid, without the path of the folder


def _open(iteration: int, path: Location, expected: type[CheckpointError]) -> FoundCheckpoint:
    """Open a checkpoint; ``expected`` errors make it invalid."""
    try:
        return FoundCheckpoint(iteration, path, Manifest.open(path), None)
    except expected as error:
        return FoundCheckpoint(iteration, path, None, strip_folder(path, error))


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
        ours = any((self.folder / name).exists() for name in (MARKER, MANIFEST)) or has_attempts(self.folder)
        return ours or is_megatron_lm(self.folder)

    def named(self) -> list[tuple[int, Location]]:
        """Return iteration and path of all folders named like checkpoints, newest first, without opening them."""
        return find_checkpoints(self.folder)

    def candidates(self) -> list[FoundCheckpoint]:
        """Open all folders named like checkpoints, newest first.

        Checks the marker, the manifest's checksum and the sizes of all files; tensors are verified when they are read.
        """
        return [_open(iteration, path, CheckpointError) for iteration, path in self.named()]

    def newest(self, step: int | None = None) -> tuple[Manifest, list[FoundCheckpoint]]:
        """Return the newest valid checkpoint that no rewind has undone, and the newer ones that were skipped.

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
            taken = manifest.state.get("iteration")
            if step not in (None, taken):
                message = f"{self.folder} is the checkpoint of step {taken}, not {step}"
                raise CheckpointError(message, f"--ckpt-step {taken}")
            return manifest, []
        passed_over: list[FoundCheckpoint] = []
        rewinds = read_rewinds(self.folder) if step is None else []
        for iteration, path in self.named():
            if step not in (None, iteration):
                continue
            found = _open(iteration, path, DamagedCheckpointError)
            if found.manifest is not None:
                known = [rewind.id for rewind in rewinds_of(found.manifest.state)] if rewinds else []
                later = later_rewinds(iteration, known, rewinds)
                if not later:
                    return found.manifest, passed_over
                found = replace(found, manifest=None, problem=later[-1].why)
            passed_over.append(found)
        which = "a checkpoint" if step is None else f"a checkpoint of step {step}"
        reasons = "".join(f"\n  {skipped.path.name}: {skipped.problem}" for skipped in passed_over)
        usable = f" that can be used:{reasons}" if reasons else ""
        raise CheckpointError(f"{self.folder} does not hold {which}{usable}")

    @property
    def leftovers(self) -> list[Location]:
        """Remainders of interrupted saves and deletions."""
        found: list[Location] = []
        if isinstance(self.folder, Path):
            stagings = [self.folder, *_nested_staging(self.folder)]
            found += [path for staging in stagings for path in staged_leftovers(self.folder, staging)]
        return [*found, *self._unpublished()]

    def _unpublished(self) -> Iterator[Location]:
        """Yield attempts that no marker names."""
        for _, path in self.named():
            yield from [path] if is_interrupted(path) else leftovers(path)

    def retain(
        self,
        keep_last: int | None,
        keep_every: int | None = None,
        newest: int | None = None,
        lease: Lease | None = None,
        held: Collection[int] = (),
    ) -> list[Location]:
        """Delete old checkpoints and leftovers; must not run during a save.

        Args:
            keep_last: number of newest valid checkpoints to keep; None: all.
            keep_every: iterations that are a multiple of it are kept permanently.
            newest: the iteration just saved. Later ones, which the run skipped as invalid, are kept and not counted.
            lease: lease on the folder. Without one, staging folders are not touched.
            held: iterations that are in use and kept for now.

        Returns:
            The deleted checkpoints. Damaged ones newer than the kept ones are not deleted, for inspection.

        Raises:
            OSError: if the disk fails, or the staging folder is gone.
            SupersededError: if a later start holds the folder, in an object store.
        """
        staging = lease.staging if lease else None
        if isinstance(self.folder, Path):
            for staged in staged_leftovers(self.folder, staging or self.folder):
                finish_staged(self.folder, staged)
                delete_checkpoint(staged, staging)
        for entry in self._unpublished():
            self._remove(entry, lease)
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
            elif is_complete(path) and iteration not in held and not (keep_every and iteration % keep_every == 0):
                self._remove(path, lease)
                deleted.append(path)
        return deleted

    def _remove(self, path: Location, lease: Lease | None) -> None:
        """Delete a checkpoint or a leftover; in a store, check the lease immediately before."""
        if not isinstance(path, Path) and lease is not None:
            lease.check()
        delete_checkpoint(path, lease.staging if lease else None)


def _nested_staging(folder: Path) -> Iterator[Path]:
    """Yield the staging folders in ``folder``, including nested ones that were taken over."""
    for _, staging in staging_folders(folder):
        yield staging
        yield from _nested_staging(staging)


NODE_PLACEHOLDER = "{node}"
"""Placeholder for the number of a node in a folder name."""


def node_folder(pattern: str, node: int) -> Path:
    """Return the folder of a node."""
    return Path(pattern.replace(NODE_PLACEHOLDER, str(node)))


def is_local_checkpoint(path: Path, pattern: str) -> bool:
    """Return True if a checkpoint lies in the local folder of any node."""
    any_node = r"\d+".join(re.escape(part) for part in str(Path(pattern)).split(NODE_PLACEHOLDER))
    return re.fullmatch(any_node, str(path.parent)) is not None
