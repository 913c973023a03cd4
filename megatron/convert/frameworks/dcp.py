"""Read the tensors of a checkpoint that torch.distributed.checkpoint wrote, such as those of FSDP2 and torchtitan."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

from torch import Tensor

from megatron.checkpoint.errors import CheckpointError, DamagedCheckpointError
from megatron.checkpoint.format import to_dims
from megatron.checkpoint.tensor_file import DTYPES
from megatron.config.text import clipped
from megatron.convert.dcp_table import place_in, read_box, read_table, stored_boxes
from megatron.convert.frameworks.pieces import AssembledTensor, MappedFiles, PartialTensor, TensorPiece
from megatron.convert.megatron_lm.pickles import StoredTensor

OTHER_STATE = ("optim", "lr_scheduler", "dataloader", "train_state", "scheduler", "ema.")
"""Beginnings of the keys that are not weights."""


def read_dcp(path: Path) -> dict[str, PartialTensor]:
    """Return the tensors of a checkpoint by key, but for those of an optimizer. No tensor is read.

    Args:
        path: folder with ``.metadata``.

    Raises:
        DamagedCheckpointError: if the table or a file is missing, damaged, or does not cover a tensor.
    """
    try:
        return _read(path)
    except (CheckpointError, DamagedCheckpointError):
        raise
    except Exception as error:  # there may be anything in place of what is looked for
        raise DamagedCheckpointError(f"{path} is damaged: {clipped(repr(error))}") from error


def _read(path: Path) -> dict[str, PartialTensor]:
    entries, stored = read_table(path)
    missing = {name for name, _, _ in stored.values() if not place_in(path, name).is_file()}
    if missing:
        raise DamagedCheckpointError(f"{path} lacks {min(missing)}, which its .metadata names")
    files, found = MappedFiles(), dict[str, PartialTensor]()
    for key, entry in entries.items():
        if "size" not in (entry.state or {}) or key.startswith(OTHER_STATE):
            continue

        boxes = [*stored_boxes(path, key, entry, stored)]
        if boxes:
            places = [cache(partial(read_box, path, key, *each)) for each in boxes]
            pieces = (TensorPiece(each[0], partial(_tensor, files, place)) for each, place in zip(boxes, places))
            whole = AssembledTensor(DTYPES[boxes[0][1]], to_dims(entry.state["size"]), tuple(pieces))
            whole.check(key, path)
            found[key] = whole
    return found


def _tensor(files: MappedFiles, place: Callable[[], StoredTensor]) -> Tensor:
    return files.tensor(place())
