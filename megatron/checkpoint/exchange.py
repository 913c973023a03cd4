"""Send files between ranks block by block, and gather results with their errors.

An I/O error on one rank must not stop the others: the blocks are sent to the end, and the error is raised then.
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
"""Bytes of a message; a rank holds two."""

PART = ".part"
"""Suffix of a file that is still being received."""

T = TypeVar("T")


@dataclass(frozen=True)
class Tier:
    """The nodes' folders of checkpoints, as seen by one rank."""

    folder: Path  # of this rank's node
    nodes: Nodes  # which ranks are on which node
    group: Group  # all ranks, for collectives
    wire: Group  # all ranks with a separate communicator, for files: point-to-point calls differ between ranks
    claim: Claim | None = None  # lease on the node's folder, the same for all ranks of the node

    @property
    def staging(self) -> Path | None:
        """Staging folder of the node's folder; None without a lease."""
        return shop_of(self.claim)

    @property
    def rank(self) -> int:
        """This rank."""
        return self.group.rank

    @property
    def node(self) -> int:
        """Node of this rank."""
        return self.nodes.of[self.rank]

    @property
    def leads(self) -> bool:
        """True if this rank is the leader of its node."""
        return self.nodes.leads(self.rank)


def together(act: Callable[[], T], group: Group) -> list[T]:
    """Run ``act`` on all ranks and return their results; collective.

    Raises:
        Exception: that of the lowest rank that failed, on every rank.
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
    """A file sent to, or received from, the rank ``peer``; ``staging`` is the folder for partly received files."""

    path: Path
    peer: int
    bytes: int
    staging: Path | None = None

    def blocks(self) -> list[int]:
        """Return the lengths of its blocks."""
        return [min(BLOCK_BYTES, self.bytes - start) for start in range(0, self.bytes, BLOCK_BYTES)]


def exchange(sent: Parcel | None, received: Parcel | None, group: Group) -> OSError | None:
    """Send a file to one rank of a group while receiving one from another; the peers must make the matching calls.

    When the call returns, the received file is on disk and has replaced a previous one of that name.

    Returns:
        The first I/O error of this rank; None if there was none.
    """
    source = _FileSender(sent.path) if sent is not None else None
    target = _FileReceiver(received) if received is not None else None
    send_sizes = sent.blocks() if sent is not None else []
    receive_sizes = received.blocks() if received is not None else []
    for number in range(max(len(send_sizes), len(receive_sizes))):
        receive: Pending | None = None
        pending = []
        if received is not None and number < len(receive_sizes):
            buffer = torch.empty(receive_sizes[number], dtype=torch.uint8)
            channel = Channel(group.ranks[received.peer], group.ranks[group.rank], group.handle)
            receive = comm.start_receive(buffer, channel)
            pending.append(receive)
        if sent is not None and source is not None and number < len(send_sizes):
            block = source.read(send_sizes[number])
            channel = Channel(group.ranks[group.rank], group.ranks[sent.peer], group.handle)
            pending.append(comm.start_send(block, channel))
        for transfer in pending:
            transfer.wait()
        if receive is not None and target is not None:
            target.write(receive.result)
    errors = [end.close() for end in (source, target) if end is not None]
    return next((error for error in errors if error is not None), None)


class _TransferEnd:
    """One end of a file transfer; after the first I/O error no more calls are made."""

    def __init__(self) -> None:
        self.error: OSError | None = None

    def attempt(self, act: Callable[[], T]) -> T | None:
        if self.error is None:
            try:
                return act()
            except OSError as error:
                self.error = error
        return None


class _FileSender(_TransferEnd):
    """A file being sent; after an error zeros are sent, and the transfer fails at the end."""

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
                raise OSError(errno.EIO, "is shorter than when it was written", str(self._path))
            view = view[count:]

    def close(self) -> OSError | None:
        if self._file is not None:
            self._file.close()
        return self.error


class _FileReceiver(_TransferEnd):
    """A file being received, under a temporary name until it is complete."""

    def __init__(self, parcel: Parcel) -> None:
        super().__init__()
        self._path = parcel.path
        self._part = (parcel.staging or parcel.path.parent) / (parcel.path.name + PART)
        with suppress(OSError):
            os.unlink(self._part)
        self._file = self.attempt(lambda: NewFile(self._part))

    def write(self, block: Tensor) -> None:
        if self._file is not None:
            file = self._file
            self.attempt(lambda: file.write(block.numpy().data))

    def close(self) -> OSError | None:
        if self._file is not None:
            write_error = self.error
            try:
                self._file.__exit__(None if write_error is None else type(write_error), write_error, None)
            except OSError as close_error:
                self.error = close_error
        self.attempt(lambda: os.rename(self._part, self._path))
        return self.error
