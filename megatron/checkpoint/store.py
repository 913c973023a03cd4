"""Write and read checkpoints: collective over the ranks of a group, or by one process alone.

Importing torch.distributed.checkpoint takes a second, so it is done when a checkpoint is written or read.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megatron.checkpoint.claims import Claim
from megatron.checkpoint.errors import CheckpointError
from megatron.checkpoint.manifest import Manifest
from megatron.checkpoint.parts import GlobalTensor
from megatron.checkpoint.remote import Location
from megatron.parallel.comm import Group


def write(
    folder: Location,
    tensors: Mapping[str, GlobalTensor],
    state: Mapping[str, Any],
    config: dict[str, Any],
    group: Group,
    files: Mapping[str, Path | bytes] | None = None,
    claim: Claim | None = None,
) -> None:
    """Write a checkpoint; it has its name when the call returns, and all of it is on the disk.

    Collective; whatever is raised is raised on every rank, and then nothing was published. A checkpoint of that name
    stays until the new one is whole.

    Args:
        folder: of the checkpoint, such as ``save/iter_0000100``.
        tensors: with the parts this rank writes. A rank need not name tensors it has no part of.
        state: plain numbers, as JSON; rank 0's is written.
        config: options, as JSON; rank 0's is written.
        group: the ranks that write.
        files: small files by name inside the checkpoint, as content or as what to copy; rank 0's are written.
        claim: of the start that holds the folder which the checkpoint lies in.

    Raises:
        StorageError: when the disk refuses, on any rank.
        SupersededError: when a later start has the folder.
        TypeError, ValueError: when the parts are no partition of the tensors, or state or config is no JSON.
    """
    from torch.distributed.checkpoint.state_dict_saver import save

    from megatron.checkpoint.saving import CheckpointWriter, Extra, PartsSavePlanner

    planner = PartsSavePlanner(tensors)
    writer = CheckpointWriter(folder, Extra(state, config, files or {}), group.rank, claim)

    _together(
        lambda: save(dict(tensors), storage_writer=writer, planner=planner, **_ranks(group)),
        undo=writer.abandon,
    )


def read(manifest: Manifest, tensors: Mapping[str, GlobalTensor], group: Group) -> None:
    """Fill the parts of this rank, in place, from a checkpoint that any layout may have written.

    Collective; whatever is raised is raised on every rank, and then the parts may hold anything.

    Args:
        manifest: of the checkpoint, the same on every rank.
        tensors: with the parts to fill; floating-point types are converted.
        group: the ranks that read.

    Raises:
        CheckpointError: when the checkpoint does not have what is wanted.
        DamagedError: when what was read is not what was written, or is not there.
        UnreachableError: when an object store does not answer.
    """
    from torch.distributed.checkpoint.state_dict_loader import load

    from megatron.checkpoint.loading import CheckpointStorageReader, PartsLoadPlanner

    planner, reader = PartsLoadPlanner(tensors, manifest), CheckpointStorageReader(manifest)
    _together(lambda: load(dict(tensors), storage_reader=reader, planner=planner, **_ranks(group)))


def _ranks(group: Group) -> dict[str, Any]:
    return {"no_dist": True} if group.size == 1 else {"process_group": group.handle}


def _together(action: Callable[[], Any], undo: Callable[[], None] = lambda: None) -> None:
    """Run a collective action; raise the error of the lowest rank that failed, on every rank.

    A rank that is gone is no such error: the others lose contact, and nothing can be undone together.
    """
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            action()
    except CheckpointException as error:
        undo()
        cause = error.failures[min(error.failures)][0]
        if isinstance(cause, CheckpointError):
            raise cause from None
        raise cause from error
