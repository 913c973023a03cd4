"""The table of a checkpoint of torch.distributed.checkpoint: which file holds which box of a tensor.

``.metadata`` is a pickle with the boxes of every tensor, and the file, first byte and length of each. At that place is
what ``torch.save`` wrote.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import NamedTuple

from megatron.checkpoint.errors import DamagedCheckpointError
from megatron.checkpoint.format import format_box, is_inside, to_dims
from megatron.config.text import clipped, format_bytes
from megatron.convert.megatron_lm.pickles import Record, StoredTensor, read_pickle_file, read_torch_file
from megatron.distributed.sharding import Box

METADATA = ".metadata"


class StoredPlace(NamedTuple):
    """Bytes in a file of the folder."""

    file: str
    start: int
    length: int


Places = dict[tuple[str, str], StoredPlace]
"""Place of each stored box, by key and first element; "" for objects. The hash of a text cannot be foreseen, unlike
that of numbers."""


def read_table(path: Path) -> tuple[Mapping[str, Record], Places]:
    """Return the records of tensors and objects by key, and the place of each box.

    Raises:
        DamagedCheckpointError: if the table cannot be read, or files are shorter than it claims.
    """
    metadata = read_pickle_file(path / METADATA)
    entries, places = (metadata.state[name] for name in ("state_dict_metadata", "storage_data"))
    stored: Places = {}
    for index, info in places.items():
        where = StoredPlace(info.state["relative_path"], *to_dims((info.state["offset"], info.state["length"])))
        offset = index.state.get("offset")
        stored[index.state["fqn"], "" if offset is None else str(to_dims(offset))] = where
    _check_places(path, stored)
    return entries, stored


def _check_places(path: Path, stored: Places) -> None:
    """Raise DamagedCheckpointError if the stored boxes and objects have more bytes than their files."""
    claimed: Counter[str] = Counter()
    for name, _, length in stored.values():
        claimed[name] += length
    for name, length in claimed.items():
        file = place_in(path, name)
        if file.exists() and length > file.stat().st_size:
            seen = f"{path / METADATA} puts {format_bytes(length)} into {name}"
            raise DamagedCheckpointError(f"{seen}, which has {format_bytes(file.stat().st_size)}")


def place_in(path: Path, name: str) -> Path:
    """Return a file of the folder; DamagedCheckpointError if the name leads out of it."""
    if not re.fullmatch(r"[\w.-]+", name) or name in (".", ".."):
        raise DamagedCheckpointError(f"{path / METADATA} names {clipped(repr(name))}, which is no file in its folder")
    return path / name


def stored_boxes(path: Path, key: str, entry: Record, stored: Places) -> Iterator[tuple[Box, str, StoredPlace]]:
    """Yield the boxes of a global tensor, each with its type and its place, which is removed from ``stored``.

    A rank without elements, of a tensor with fewer rows than ranks, writes an empty box, which is left out.
    """
    size = to_dims(entry.state["size"])
    for chunk in entry.state["chunks"]:
        box = Box(to_dims(chunk.state["offsets"]), to_dims(chunk.state["sizes"]))
        if not is_inside(box, size):
            seen = f"{path / METADATA}: {clipped(key)} {format_box(box)}"
            raise DamagedCheckpointError(f"{seen} is not inside {list(size)}")
        if not prod(box.size):
            continue
        yield box, entry.state["properties"].state[0], stored.pop((key, str(box.start)))  # each is read once


def read_box(path: Path, key: str, box: Box, dtype: str, place: StoredPlace) -> StoredTensor:
    """Return the place of the elements of a box in its file."""
    tensor = read_torch_file(place_in(path, place.file), place.start, place.length)
    if not isinstance(tensor, StoredTensor) or tensor.shape != box.size:
        raise DamagedCheckpointError(f"{path / place.file}: {clipped(key)} {format_box(box)} has another shape")
    if dtype != tensor.dtype:
        seen = f"{path / place.file}: {clipped(key)} is {tensor.dtype}"
        raise DamagedCheckpointError(f"{seen}, unlike in {METADATA}")
    return tensor
