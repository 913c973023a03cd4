"""Whether a disk has room for a checkpoint, asked before it is written."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from contextlib import suppress

from megatron.checkpoint.files import elsewhere
from megatron.checkpoint.folder import Checkpoints
from megatron.checkpoint.parts import GlobalTensor
from megatron.checkpoint.remote import Location, RemotePath
from megatron.config.memory import shown
from megatron.config.problems import Problem


def bytes_of(tensors: Mapping[str, GlobalTensor]) -> int:
    """Bytes of this rank's parts."""
    return sum(part.box.numel * tensor.dtype.itemsize for tensor in tensors.values() for part in tensor.parts)


def shortage(folder: Location, size: int) -> Problem | None:
    """What is wrong where the disk of a ``--save`` folder has no room for a checkpoint of ``size`` bytes of tensors.

    Room that saves which were cut off still hold is freed first. What the disk does not tell is no shortage.
    """
    free = _free(folder)
    if free is None or free >= size:
        return None
    runs = Checkpoints(folder)
    with suppress(OSError):
        runs.retain(None)
    free = _free(folder)
    if free is None or free >= size:
        return None
    sentence = f"{folder}: a checkpoint takes {shown(size)}, and its disk has {shown(free)} left"
    return Problem("E816", sentence, ("free some space", elsewhere(runs.to_go_on_from())))


def _free(folder: Location) -> int | None:
    """Bytes that may still be written where the folder is, or will be made; None where that is not known."""
    if isinstance(folder, RemotePath):
        return None
    with suppress(OSError):
        there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        return shutil.disk_usage(there).free
    return None
