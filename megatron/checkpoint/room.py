"""Whether a disk has room for a checkpoint, asked before it is written."""

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
    """Bytes of this rank's parts."""
    return sum(part.box.numel * tensor.dtype.itemsize for tensor in tensors.values() for part in tensor.parts)


def shortage(folder: Location, size: int, claim: Claim | None = None) -> Problem | None:
    """What is wrong where the disk of a ``--save`` folder has no room for a checkpoint of ``size`` bytes of tensors."""
    sentence = lacking(folder, size, claim)
    if sentence is None:
        return None
    return Problem("E816", sentence, ("free some space", elsewhere(Checkpoints(folder).to_go_on_from())))


def lacking(folder: Location, size: int, claim: Claim | None = None) -> str | None:
    """That the disk of a folder of checkpoints has no room for ``size`` bytes more, in words, where that is so.

    Room that saves which were cut off still hold is freed first. What the disk does not tell is no shortage.
    """
    free = _free(folder)
    if free is None or free >= size:
        return None
    with suppress(OSError):
        Checkpoints(folder).retain(None, claim=claim)
    free = _free(folder)
    if free is None or free >= size:
        return None
    return f"{folder}: a checkpoint takes {shown(size)}, and its disk has {shown(free)} left"


def _free(folder: Location) -> int | None:
    """Bytes that may still be written where the folder is, or will be made; None where that is not known."""
    if isinstance(folder, RemotePath):
        return None
    with suppress(OSError):
        there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        return shutil.disk_usage(there).free
    return None
