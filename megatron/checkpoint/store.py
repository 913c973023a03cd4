"""Write and read checkpoints, collectively over a group of ranks or in a single process.

torch.distributed.checkpoint is imported on first use because the import takes about a second.
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
    """Write a checkpoint; when the call returns it is published and on disk.

    Collective; errors are raised on every rank, and then nothing is published. An existing checkpoint of that name is
    replaced only when the new one is complete.

    Args:
        folder: of the checkpoint, such as ``save/iter_0000100``.
        tensors: with the parts this rank writes; tensors without parts on this rank may be omitted.
        state: plain numbers, as JSON; rank 0's is written.
        config: options, as JSON; rank 0's is written.
        group: the ranks that write.
        files: small files by name inside the checkpoint, as content or as a path to copy; rank 0's are written.
        claim: lease of this start on the folder that contains the checkpoint.

    Raises:
        StorageError: if the disk fails on any rank.
        SupersededError: if a later start holds the folder.
        TypeError, ValueError: if the parts are not a partition of the tensors, or state or config is not JSON.
    """
    from torch.distributed.checkpoint.state_dict_saver import save

    from megatron.checkpoint.saving import CheckpointWriter, Extra, PartsSavePlanner

    planner = PartsSavePlanner(tensors)
    writer = CheckpointWriter(folder, Extra(state, config, files or {}), group.rank, claim)

    _run_collectively(
        lambda: save(dict(tensors), storage_writer=writer, planner=planner, **_ranks(group)),
        undo=writer.abandon,
    )


def read(manifest: Manifest, tensors: Mapping[str, GlobalTensor], group: Group) -> None:
    """Fill this rank's parts in place from a checkpoint written with any layout.

    Collective; errors are raised on every rank, and then the content of the parts is undefined.

    Args:
        manifest: of the checkpoint, the same on every rank.
        tensors: with the parts to fill; floating-point types are converted.
        group: the ranks that read.

    Raises:
        CheckpointError: if the checkpoint lacks a tensor or has it in another shape.
        DamagedError: if a file is missing or a checksum differs.
        UnreachableError: if an object store does not answer.
    """
    from torch.distributed.checkpoint.state_dict_loader import load

    from megatron.checkpoint.loading import CheckpointStorageReader, PartsLoadPlanner

    planner, reader = PartsLoadPlanner(tensors, manifest), CheckpointStorageReader(manifest)
    _run_collectively(lambda: load(dict(tensors), storage_reader=reader, planner=planner, **_ranks(group)))


def _ranks(group: Group) -> dict[str, Any]:
    return {"no_dist": True} if group.size == 1 else {"process_group": group.handle}


def _run_collectively(action: Callable[[], Any], undo: Callable[[], None] = lambda: None) -> None:
    """Run a collective action; raise the error of the lowest failed rank on every rank.

    ``undo`` is not called when a rank has died: the others then lose contact and cannot act collectively.
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
