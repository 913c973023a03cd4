"""A folder of checkpoints ``iter_0000100``: which there are, which can be trusted, which may go."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

from megatron.checkpoint import attempts
from megatron.checkpoint.claims import Claim, shop_of
from megatron.checkpoint.errors import CheckpointError, DamagedError, within
from megatron.checkpoint.manifest import MANIFEST, MARKER, Manifest
from megatron.checkpoint.publish import BUILDING, OLD, is_complete, remove, settle
from megatron.checkpoint.remote import Location, RemotePath, on_disk
from megatron.checkpoint.workshops import BESIDE, inside

NAME = re.compile(rf"iter_(\d+)({re.escape(BUILDING)}|{re.escape(OLD)})?")
OLDEST_FIRST = (OLD, "", BUILDING)
"""Of the same iteration: a complete one that only lacks its name is newer, one that was set aside is older."""


@dataclass(frozen=True)
class Found:
    """A folder that is called like a checkpoint.

    Attributes:
        iteration: steps taken when it was saved.
        path: of the folder.
        manifest: its content; None when it cannot be trusted.
        problem: why it cannot be trusted; names files without the folder.
    """

    iteration: int
    path: Location
    manifest: Manifest | None
    problem: str | None


@dataclass(frozen=True)
class Checkpoints:
    """The checkpoints of a run, in its ``--save`` folder.

    Attributes:
        folder: which need not exist, or a place in an object store. For :meth:`newest` it may be one checkpoint.
    """

    folder: Location

    def path(self, iteration: int) -> Location:
        """Where the checkpoint of an iteration is saved."""
        return self.folder / f"iter_{iteration:07d}"

    @property
    def is_checkpoint(self) -> bool:
        """Whether the folder is a checkpoint itself, be it a damaged one."""
        return any((self.folder / name).exists() for name in (MARKER, MANIFEST))

    def named(self) -> list[tuple[int, Location]]:
        """Iteration and path of folders called like checkpoints, newest first; none is looked into.

        Raises:
            OSError: when the disk or the store does not say.
        """
        found = [(int(match[1]), path) for path in self._folders() if (match := NAME.fullmatch(path.name))]
        return sorted(found, key=lambda item: (item[0], OLDEST_FIRST.index(item[1].suffix)), reverse=True)

    def _folders(self) -> list[Location]:
        """All folders inside, and in the workshops of starts, where there are any."""
        if isinstance(self.folder, RemotePath):
            return [path for path in self.folder.folders() if path.suffix not in (BUILDING, OLD)]
        if not self.folder.is_dir():
            return []
        return [path for path in (*self.folder.iterdir(), *inside(self.folder)) if path.is_dir()]

    def scan(self) -> Iterator[Found]:
        """Folders called like checkpoints, newest first, each opened when its turn comes.

        Looks at the marker, the manifest's checksum and the sizes of all files; the content of large files is proved
        when it is read.
        """
        for iteration, path in self.named():
            try:
                yield Found(iteration, path, Manifest.open(path), None)
            except CheckpointError as error:
                yield Found(iteration, path, None, within(path, error))

    def candidates(self) -> list[Found]:
        """All of :meth:`scan`."""
        return list(self.scan())

    def newest(self, step: int | None = None) -> tuple[Manifest, list[Found]]:
        """The newest checkpoint that can be trusted, and newer ones that were passed over.

        ``folder`` may also be a checkpoint itself: then that one, and nothing is passed over.

        Args:
            step: only checkpoints of that step.

        Raises:
            CheckpointError: when there is none; names those that cannot be trusted.
            DamagedError: when ``folder`` is a checkpoint itself, and damaged.
            NewerVersionError: when a newer version wrote it: it is not damaged, so older ones are no substitute.
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
        """The folder, where a run could go on from it: it holds a complete checkpoint that no save is building."""
        with suppress(OSError, CheckpointError):  # asked of disks that have just refused something
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
        """What saves and removals that were cut off have left."""
        if isinstance(self.folder, RemotePath):
            places = [path for _, path in self.named() if isinstance(path, RemotePath)]
            return [path for place in places for path in attempts.leftovers(place)]
        found = [(BESIDE.fullmatch(path.name), path) for path in self._folders()]
        return sorted((path for match, path in found if match and any(match.groups())), reverse=True)

    def retain(
        self,
        keep_last: int | None,
        keep_every: int | None = None,
        newest: int | None = None,
        claim: Claim | None = None,
    ) -> list[Location]:
        """Remove checkpoints that are no longer wanted, and leftovers; not while one is being saved.

        Args:
            keep_last: how many of the newest valid ones stay; None: all.
            keep_every: iterations that are a multiple of it stay for good.
            newest: the iteration just saved. Later ones, which the run has passed over because they could not be read,
                stay and do not count.
            claim: of the start that holds the folder. Without one, what lies in workshops is left to whose they are.

        Returns:
            the removed ones. Damaged ones newer than the kept ones stay, to be looked at.

        Raises:
            OSError: when the disk refuses, or the workshop is gone.
            SupersededError: when an object store says that a later start has the folder.
        """
        shop = shop_of(claim)
        for path in self.leftovers:
            if isinstance(path, RemotePath):
                self._remove(path, claim)
            elif path.parent == (shop or self.folder):
                settle(on_disk(self.folder / path.name.partition(".")[0]), shop)
        if keep_last is None:
            return []
        gone: list[Location] = []
        kept = 0
        for iteration, path in self.named():
            if newest is not None and iteration > newest:
                continue
            if kept < keep_last:
                kept += self._is_valid(path)
            elif is_complete(path) and not (keep_every and iteration % keep_every == 0):
                self._remove(path, claim)
                gone.append(path)
        return gone

    def _remove(self, path: Location, claim: Claim | None) -> None:
        """Remove a checkpoint or a leftover; in a store only just after it has said that the folder is still ours."""
        if isinstance(path, RemotePath) and claim is not None:
            claim.check()
        remove(path, shop_of(claim))

    def _is_valid(self, path: Location) -> bool:
        try:
            Manifest.open(path)
        except CheckpointError:
            return False
        return True
