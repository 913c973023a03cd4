"""How far the curve goes that Weights & Biases keeps on this disk."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

FILE_HEADER, HEADER, BLOCK = 7, struct.Struct("<IHB"), 32 * 1024
WHOLE, LAST = 1, 4  # kinds of pieces that end a record; 2 and 3 are its first and its middle ones


def last_step_on_disk(folder: Path, run_id: str) -> int:
    """The last step of the run in the files under ``folder``, of all its starts; -1 where there is none.

    Raises:
        ImportError: when wandb has no description of its records any more.
    """
    from wandb.proto import wandb_internal_pb2

    last = -1
    for path in folder.glob(f"*run-*-{run_id}/run-{run_id}.wandb"):
        for piece in records(path.read_bytes()):
            record = wandb_internal_pb2.Record.FromString(piece)  # type: ignore[attr-defined]
            if record.HasField("history"):
                last = max(last, record.history.step.num)
    return last


def records(data: bytes) -> Iterator[bytes]:
    """The records of a ``.wandb`` file, up to one that a crash cut off.

    The file is a log as LevelDB keeps it, after a header of seven bytes: blocks of 32 KiB, in them pieces of a
    checksum, a length, a kind and the bytes; a record is one piece or several.
    """
    at, parts = FILE_HEADER, b""
    while at + HEADER.size <= len(data):
        room = BLOCK - at % BLOCK
        if room < HEADER.size:  # too little for a header: the rest of the block is empty
            at += room
            continue
        _, length, kind = HEADER.unpack_from(data, at)
        start, at = at + HEADER.size, at + HEADER.size + length
        if kind == 0 or at > len(data):
            return
        parts += data[start:at]
        if kind in (WHOLE, LAST):
            yield parts
            parts = b""
