"""Check free disk space before a checkpoint is written."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from contextlib import suppress

from megatron.checkpoint.claims import Claim
from megatron.checkpoint.files import elsewhere
from megatron.checkpoint.folder import Checkpoints
from megatron.checkpoint.parts import GlobalTensor
from megatron.checkpoint.remote import Location, RemotePath
from megatron.config.memory import shown
from megatron.config.problems import Problem


def bytes_of(tensors: Mapping[str, GlobalTensor]) -> int:
    """Return the bytes of this rank's parts."""
    return sum(part.box.numel * tensor.dtype.itemsize for tensor in tensors.values() for part in tensor.parts)


def shortage(folder: Location, size: int, claim: Claim | None = None) -> Problem | None:
    """Return the problem (E816) if the disk of a ``--save`` folder cannot hold ``size`` more bytes, else None."""
    message = lacking(folder, size, claim)
    if message is None:
        return None
    return Problem("E816", message, ("free some space", elsewhere(Checkpoints(folder).to_go_on_from())))


def lacking(folder: Location, size: int, claim: Claim | None = None) -> str | None:
    """Return a message if the disk of ``folder`` cannot hold ``size`` more bytes, else None.

    Space held by interrupted saves is freed first. If the free space is unknown, the check passes.
    """
    free = _free_bytes(folder)
    if free is None or free >= size:
        return None
    with suppress(OSError):
        Checkpoints(folder).retain(None, claim=claim)
    free = _free_bytes(folder)
    if free is None or free >= size:
        return None
    return f"{folder}: a checkpoint takes {shown(size)}, and its disk has {shown(free)} left"


def _free_bytes(folder: Location) -> int | None:
    """Return the free bytes of the disk that holds or will hold ``folder``; None if unknown."""
    if isinstance(folder, RemotePath):
        return None
    with suppress(OSError):
        existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        return shutil.disk_usage(existing).free
    return None
