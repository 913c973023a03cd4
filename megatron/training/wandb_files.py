"""Read the last logged step from the files of the Weights & Biases client."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

FILE_HEADER, HEADER, BLOCK = 7, struct.Struct("<IHB"), 32 * 1024
WHOLE, LAST = 1, 4  # types of fragments that end a record; 2 is the first and 3 a middle fragment


def last_step_on_disk(folder: Path, run_id: str) -> int:
    """Return the last step of all starts of the run in the files under ``folder``; -1 if there is none."""
    from wandb.proto import wandb_internal_pb2

    last = -1
    for path in folder.glob(f"*run-*-{run_id}/run-{run_id}.wandb"):
        for data in records(path.read_bytes()):
            record = wandb_internal_pb2.Record.FromString(data)  # type: ignore[attr-defined]
            if record.HasField("history"):
                last = max(last, record.history.step.num)
    return last


def records(data: bytes) -> Iterator[bytes]:
    """Yield the records of a ``.wandb`` file, up to one cut off by a crash.

    The file has a header of seven bytes and then the LevelDB log format: blocks of 32 KiB of fragments, each with
    checksum, length, type and data. A record is one or more fragments.
    """
    position = FILE_HEADER
    record = b""
    while position + HEADER.size <= len(data):
        left_in_block = BLOCK - position % BLOCK
        if left_in_block < HEADER.size:  # padding at the end of a block
            position += left_in_block
            continue
        _, length, kind = HEADER.unpack_from(data, position)
        start = position + HEADER.size
        position = start + length
        if kind == 0 or position > len(data):
            return
        record += data[start:position]
        if kind in (WHOLE, LAST):
            yield record
            record = b""
