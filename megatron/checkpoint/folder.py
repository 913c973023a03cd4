"""A folder of checkpoints ``iter_0000100``: list them, find the newest valid one, delete old ones."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

from megatron.checkpoint.attempts import stale_uploads
from megatron.checkpoint.claims import Claim, shop_of
from megatron.checkpoint.errors import CheckpointError, DamagedError, within
from megatron.checkpoint.manifest import MANIFEST, MARKER, Manifest
from megatron.checkpoint.publish import BUILDING, OLD, is_complete, remove, settle
from megatron.checkpoint.remote import Location, RemotePath, on_disk
from megatron.checkpoint.workshops import BESIDE, inside

NAME = re.compile(rf"iter_(\d+)({re.escape(BUILDING)}|{re.escape(OLD)})?")
OLDEST_FIRST = (OLD, "", BUILDING)
"""Age order within an iteration: a staged complete checkpoint is newer than the published one, a replaced one older."""


@dataclass(frozen=True)
class Found:
    """A folder that is named like a checkpoint."""

    iteration: int  # steps taken when it was saved
    path: Location
    manifest: Manifest | None  # None if it is not valid
    problem: str | None  # why it is not valid, without the path of the folder


@dataclass(frozen=True)
class Checkpoints:
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
        found = [(int(match[1]), path) for path in self._folders() if (match := NAME.fullmatch(path.name))]
        return sorted(found, key=lambda item: (item[0], OLDEST_FIRST.index(item[1].suffix)), reverse=True)

    def _folders(self) -> list[Location]:
        """Return all folders inside, including those in staging folders."""
        if isinstance(self.folder, RemotePath):
            return [path for path in self.folder.folders() if path.suffix not in (BUILDING, OLD)]
        if not self.folder.is_dir():
            return []
        return [path for path in (*self.folder.iterdir(), *inside(self.folder)) if path.is_dir()]

    def scan(self) -> Iterator[Found]:
        """Yield the folders named like checkpoints, newest first, opening each on demand.

        Checks the marker, the manifest's checksum and the sizes of all files; tensors are verified when they are read.
        """
        for iteration, path in self.named():
            try:
                yield Found(iteration, path, Manifest.open(path), None)
            except CheckpointError as error:
                yield Found(iteration, path, None, within(path, error))

    def candidates(self) -> list[Found]:
        """Return the list of :meth:`scan`."""
        return list(self.scan())

    def newest(self, step: int | None = None) -> tuple[Manifest, list[Found]]:
        """Return the newest valid checkpoint, and the newer invalid ones that were skipped.

        If ``folder`` is itself a checkpoint, it is returned.

        Args:
            step: consider only checkpoints of this step.

        Raises:
            CheckpointError: if there is none; lists the invalid ones.
            DamagedError: if ``folder`` is itself a checkpoint, and damaged.
            NewerVersionError: if a checkpoint has a newer format version; it is not damaged, so no older one is used.
        """
        if self.is_checkpoint:
            return self._itself(step), []
        passed_over: list[Found] = []
        for iteration, path in self.named():
            if step not in (None, iteration):
                continue
            try:
                return Manifest.open(path), passed_over
            except DamagedError as error:
                passed_over.append(Found(iteration, path, None, within(path, error)))
        which = "a checkpoint" if step is None else f"a checkpoint of step {step}"
        reasons = "".join(f"\n  {found.path.name}: {found.problem}" for found in passed_over)
        raise CheckpointError(
            f"{self.folder} does not hold {which}" + (f" that can be used:{reasons}" if reasons else "")
        )

    def to_go_on_from(self) -> Location | None:
        """Return the folder if it contains a valid checkpoint that is not being written, else None."""
        with suppress(OSError, CheckpointError):  # called after a disk error
            if any(found.manifest for found in self.scan() if found.path.suffix != BUILDING):
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
        found = [(BESIDE.fullmatch(path.name), path) for path in self._folders()]
        return sorted((path for match, path in found if match and any(match.groups())), reverse=True)

    def retain(
        self,
        keep_last: int | None,
        keep_every: int | None = None,
        newest: int | None = None,
        claim: Claim | None = None,
    ) -> list[Location]:
        """Delete old checkpoints and leftovers; must not run during a save.

        Args:
            keep_last: number of newest valid checkpoints to keep; None: all.
            keep_every: iterations that are a multiple of it are kept permanently.
            newest: the iteration just saved. Later ones, which the run skipped as invalid, are kept and not counted.
            claim: lease on the folder. Without one, staging folders are not touched.

        Returns:
            The deleted checkpoints. Damaged ones newer than the kept ones are not deleted, for inspection.

        Raises:
            OSError: if the disk fails, or the staging folder is gone.
            SupersededError: if a later start holds the folder, in an object store.
        """
        staging = shop_of(claim)
        for path in self.leftovers:
            if isinstance(path, RemotePath):
                self._remove(path, claim)
            elif path.parent == (staging or self.folder):
                settle(on_disk(self.folder / path.name.partition(".")[0]), staging)
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
                self._remove(path, claim)
                deleted.append(path)
        return deleted

    def _remove(self, path: Location, claim: Claim | None) -> None:
        """Delete a checkpoint or a leftover; in a store, check the lease immediately before."""
        if isinstance(path, RemotePath) and claim is not None:
            claim.check()
        remove(path, shop_of(claim))

    def _is_valid(self, path: Location) -> bool:
        try:
            Manifest.open(path)
        except CheckpointError:
            return False
        return True
