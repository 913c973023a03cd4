"""Files that go from rank to rank, block by block, and what ranks tell each other of it.

A disk that refuses one rank stops no other: the blocks go on to the end, and the error is told then.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from megatron.checkpoint.claims import Claim, shop_of
from megatron.checkpoint.files import NewFile
from megatron.checkpoint.local import Nodes
from megatron.parallel import comm
from megatron.parallel.comm import Channel, Group, Pending

BLOCK_BYTES = 16 << 20
"""Sent at a time; a rank holds two such blocks."""

PART = ".part"
"""Ends the name of a file that is still coming."""

T = TypeVar("T")


@dataclass(frozen=True)
class Tier:
    """The nodes' folders of checkpoints, as one rank sees them.

    Attributes:
        folder: of this rank's node.
        nodes: which ranks are on which.
        group: all ranks, for what they tell each other.
        wire: all ranks, with another communicator, for files: not every rank sends as often as it tells.
        claim: of this start on the node's folder; the same one for all ranks of the node.
    """

    folder: Path
    nodes: Nodes
    group: Group
    wire: Group
    claim: Claim | None = None

    @property
    def shop(self) -> Path | None:
        """The workshop of the node's folder, where somebody holds that."""
        return shop_of(self.claim)

    @property
    def rank(self) -> int:
        """This rank."""
        return self.group.rank

    @property
    def node(self) -> int:
        """The node of this rank."""
        return self.nodes.of[self.rank]

    @property
    def leads(self) -> bool:
        """Whether this rank does for its node what one does for all."""
        return self.nodes.leads(self.rank)


def together(act: Callable[[], T], group: Group) -> list[T]:
    """What ``act`` returns on every rank; collective.

    Raises:
        Exception: whatever one rank's raises, on every rank; of several the lowest rank's.
    """
    outcome: tuple[T | None, Exception | None]
    try:
        outcome = act(), None
    except Exception as error:
        outcome = None, error
    outcomes = comm.all_gather_objects(outcome, group)
    for _, problem in outcomes:
        if problem is not None:
            raise problem
    return [value for value, _ in outcomes]  # type: ignore[misc]


@dataclass(frozen=True)
class Parcel:
    """A file of ``bytes`` that goes to, or comes from, the rank ``peer``; while it comes it is in ``shop``, if any."""

    path: Path
    peer: int
    bytes: int
    shop: Path | None = None

    def blocks(self) -> list[int]:
        """Lengths of its blocks."""
        return [min(BLOCK_BYTES, self.bytes - start) for start in range(0, self.bytes, BLOCK_BYTES)]


def exchange(sent: Parcel | None, received: Parcel | None, group: Group) -> OSError | None:
    """Send a file to one rank of a group while another comes from one; the peers must call it for the other ends.

    What comes has its name, and is on the disk, when the call returns; a file that had it is replaced.

    Returns:
        What this rank's disk said against it.
    """
    source = _Source(sent.path) if sent is not None else None
    target = _Target(received) if received is not None else None
    sizes = [parcel.blocks() if parcel is not None else [] for parcel in (sent, received)]
    for number in range(max(map(len, sizes))):
        coming: Pending | None = None
        under_way = []
        if received is not None and number < len(sizes[1]):
            room = torch.empty(sizes[1][number], dtype=torch.uint8)
            coming = comm.start_receive(
                room, Channel(group.ranks[received.peer], group.ranks[group.rank], group.handle)
            )
            under_way.append(coming)
        if sent is not None and source is not None and number < len(sizes[0]):
            block = source.read(sizes[0][number])
            channel = Channel(group.ranks[group.rank], group.ranks[sent.peer], group.handle)
            under_way.append(comm.start_send(block, channel))
        for pending in under_way:
            pending.wait()
        if coming is not None and target is not None:
            target.take(coming.result)
    errors = [end.close() for end in (source, target) if end is not None]
    return next((error for error in errors if error is not None), None)


class _End:
    """Of a file that travels: what the disk said first; it is not asked again."""

    def __init__(self) -> None:
        self.error: OSError | None = None

    def attempt(self, act: Callable[[], T]) -> T | None:
        if self.error is None:
            try:
                return act()
            except OSError as error:
                self.error = error
        return None


class _Source(_End):
    """A file to be sent; after an error, zeros are, which nobody keeps."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path
        self._file = self.attempt(lambda: FileIO(str(path)))

    def read(self, size: int) -> Tensor:
        block = torch.zeros(size, dtype=torch.uint8)
        self.attempt(lambda: self._fill(block.numpy().data))
        return block

    def _fill(self, view: memoryview) -> None:
        while view and self._file is not None:
            count = self._file.readinto(view) or 0
            if not count:
                raise OSError(errno.EIO, "is shorter than it was", str(self._path))
            view = view[count:]

    def close(self) -> OSError | None:
        if self._file is not None:
            self._file.close()
        return self.error


class _Target(_End):
    """A file that comes, under another name until all of it is there."""

    def __init__(self, parcel: Parcel) -> None:
        super().__init__()
        self._path = parcel.path
        self._part = (parcel.shop or parcel.path.parent) / (parcel.path.name + PART)
        with suppress(OSError):
            os.unlink(self._part)
        self._file = self.attempt(lambda: NewFile(self._part))

    def take(self, block: Tensor) -> None:
        if self._file is not None:
            file = self._file
            self.attempt(lambda: file.write(block.numpy().data))

    def close(self) -> OSError | None:
        if self._file is not None:
            early = self.error
            try:
                self._file.__exit__(None if early is None else type(early), early, None)
            except OSError as late:
                self.error = late
        self.attempt(lambda: os.rename(self._part, self._path))
        return self.error
