"""A folder of checkpoints ``iter_0000100``: list them, find the newest valid one, and delete old ones.

:mod:`megatron.checkpoint.fencing` makes sure that one start at a time writes to it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

from megatron.checkpoint.errors import CheckpointError, DamagedCheckpointError, strip_folder
from megatron.checkpoint.format import MANIFEST, MARKER, Manifest
from megatron.checkpoint.lease import Lease, staging_folder_of
from megatron.checkpoint.object_store import Location, RemotePath, local_path
from megatron.checkpoint.publish import (
    REPLACED_SUFFIX,
    STAGED_NAME,
    STAGED_SUFFIX,
    delete_checkpoint,
    is_complete,
    recover,
    staged_entries,
    stale_uploads,
)

CHECKPOINT_NAME = re.compile(rf"iter_(\d+)({re.escape(STAGED_SUFFIX)}|{re.escape(REPLACED_SUFFIX)})?")
AGE_ORDER = (REPLACED_SUFFIX, "", STAGED_SUFFIX)
"""Age order within an iteration: a staged complete checkpoint is newer than the published one, a replaced one older."""


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
        """Return iteration and path of all folders named like checkpoints, newest first, without opening them.

        Raises:
            OSError: if the disk or the store fails.
        """
        found = [(int(match[1]), path) for path in self._folders() if (match := CHECKPOINT_NAME.fullmatch(path.name))]
        return sorted(found, key=lambda item: (item[0], AGE_ORDER.index(item[1].suffix)), reverse=True)

    def _folders(self) -> list[Location]:
        """Return all folders inside, including those in staging folders."""
        if isinstance(self.folder, RemotePath):
            return [path for path in self.folder.folders() if path.suffix not in (STAGED_SUFFIX, REPLACED_SUFFIX)]
        if not self.folder.is_dir():
            return []
        return [path for path in (*self.folder.iterdir(), *staged_entries(self.folder)) if path.is_dir()]

    def scan(self) -> Iterator[FoundCheckpoint]:
        """Yield the folders named like checkpoints, newest first, opening each on demand.

        Checks the marker, the manifest's checksum and the sizes of all files; tensors are verified when they are read.
        """
        for iteration, path in self.named():
            try:
                yield FoundCheckpoint(iteration, path, Manifest.open(path), None)
            except CheckpointError as error:
                yield FoundCheckpoint(iteration, path, None, strip_folder(path, error))

    def candidates(self) -> list[FoundCheckpoint]:
        """Return the list of :meth:`scan`."""
        return list(self.scan())

    def newest(self, step: int | None = None) -> tuple[Manifest, list[FoundCheckpoint]]:
        """Return the newest valid checkpoint, and the newer invalid ones that were skipped.

        If ``folder`` is itself a checkpoint, it is returned.

        Args:
            step: consider only checkpoints of this step.

        Raises:
            CheckpointError: if there is none; lists the invalid ones.
            DamagedCheckpointError: if ``folder`` is itself a checkpoint, and damaged.
            NewerVersionError: if a checkpoint has a newer format version; it is not damaged, so no older one is used.
        """
        if self.is_checkpoint:
            return self._itself(step), []
        passed_over: list[FoundCheckpoint] = []
        for iteration, path in self.named():
            if step not in (None, iteration):
                continue
            try:
                return Manifest.open(path), passed_over
            except DamagedCheckpointError as error:
                passed_over.append(FoundCheckpoint(iteration, path, None, strip_folder(path, error)))
        which = "a checkpoint" if step is None else f"a checkpoint of step {step}"
        reasons = "".join(f"\n  {found.path.name}: {found.problem}" for found in passed_over)
        raise CheckpointError(
            f"{self.folder} does not hold {which}" + (f" that can be used:{reasons}" if reasons else "")
        )

    def resume_folder(self) -> Location | None:
        """Return the folder if it contains a valid checkpoint that is not being written, else None."""
        with suppress(OSError, CheckpointError):  # called after a disk error
            if any(found.manifest for found in self.scan() if found.path.suffix != STAGED_SUFFIX):
                return self.folder
        return None

    def _itself(self, step: int | None) -> Manifest:
        manifest = Manifest.open(self.folder)
        found = manifest.state.get("iteration")
        if step not in (None, found):
            raise CheckpointError(
                f"{self.folder} is the checkpoint of step {found}, not {step}", f"--ckpt-step {found}"
            )
        return manifest

    @property
    def leftovers(self) -> list[Location]:
        """Remainders of interrupted saves and deletions."""
        if isinstance(self.folder, RemotePath):
            places = [path for _, path in self.named() if isinstance(path, RemotePath)]
            return [path for place in places for path in stale_uploads(place)]
        found = [(STAGED_NAME.fullmatch(path.name), path) for path in self._folders()]
        return sorted((path for match, path in found if match and any(match.groups())), reverse=True)

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
        staging = staging_folder_of(lease)
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
                kept += self._is_valid(path)
            elif is_complete(path) and not (keep_every and iteration % keep_every == 0):
                self._remove(path, lease)
                deleted.append(path)
        return deleted

    def _remove(self, path: Location, lease: Lease | None) -> None:
        """Delete a checkpoint or a leftover; in a store, check the lease immediately before."""
        if isinstance(path, RemotePath) and lease is not None:
            lease.check()
        delete_checkpoint(path, staging_folder_of(lease))

    def _is_valid(self, path: Location) -> bool:
        try:
            Manifest.open(path)
        except CheckpointError:
            return False
        return True
