"""Chrome traces as files: read event by event and packed piece by piece, because a trace may be larger than memory."""

from __future__ import annotations

import gzip
import io
import json
import mmap
import re
import shutil
from array import array
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

BLOCK = 1 << 20
"""Bytes, or characters, in memory at a time."""

LONGEST_EVENT = 16 * BLOCK
"""What is not whole by then never will be."""

OPENING = re.compile(rb'"traceEvents"\s*:\s*\[')
MEMORY_EVENT, MEMORY_TRACK = "[memory]", "allocated since the recording began"

Event = Mapping[str, Any]


def events_of(path: Path) -> Iterator[dict[str, Any]]:
    """The events of a trace, one after another.

    Raises:
        ValueError: when the file is no trace, or only the beginning of one.
    """
    decoder, text, at = json.JSONDecoder(), "", 0
    with path.open("rb") as binary:
        binary.seek(_opening(path))
        file = io.TextIOWrapper(binary, encoding="utf-8", errors="replace")
        while True:
            at = _next(text, at)
            try:
                event, at = decoder.raw_decode(text, at)
            except json.JSONDecodeError:  # an event is cut off here, or they are at their end
                if text[at : at + 1] == "]":
                    break
                block = file.read(BLOCK)
                if not block or len(text) - at > LONGEST_EVENT:
                    raise
                text, at = text[at:] + block, 0
            else:
                yield event
        for block in iter(lambda: file.read(BLOCK), ""):
            text, at = (text[at:] + block)[-BLOCK:], 0
        if not text[at:].rstrip().endswith("}"):
            raise ValueError(f"{path} ends before its time")


def _next(text: str, at: int) -> int:
    """Where the next event begins, or the list of them ends."""
    while text[at : at + 1] in (",", " ", "\n", "\r", "\t"):
        at += 1
    return at


def _opening(path: Path) -> int:
    """The byte behind the bracket with which the events begin."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        found = OPENING.search(content)
        if found is None:
            raise ValueError(f"{path} is no Chrome trace")
        return found.end()


class MemoryCurve:
    """The allocations in a trace as a curve of bytes, which viewers draw: 24 bytes of memory for each."""

    def __init__(self) -> None:
        self._pids, self._bytes, self._times = array("q"), array("q"), array("d")

    def along(self, events: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """The same events; the allocations among them are noted."""
        for event in events:
            if event.get("name") == MEMORY_EVENT and (total := event["args"].get("Total Allocated")) is not None:
                self._pids.append(event["pid"])
                self._times.append(event["ts"])
                self._bytes.append(total)
            yield event

    @property
    def peak(self) -> int:
        """Its highest point, in bytes."""
        return max(self._bytes, default=0)

    def events(self) -> Iterator[dict[str, Any]]:
        """It, as events of a trace."""
        for pid, ts, total in zip(self._pids, self._times, self._bytes):
            yield {"ph": "C", "name": MEMORY_TRACK, "pid": pid, "ts": ts, "args": {"bytes": total}}


def pack(trace: Path, packed: Path, curve: MemoryCurve) -> None:
    """Compress a trace, with a curve among its events.

    Raises:
        OSError: when the disk refuses.
    """
    opening = _opening(trace)
    with trace.open("rb") as source, gzip.open(packed, "wb", compresslevel=3) as target:
        target.write(source.read(opening))
        for event in curve.events():  # made of other events, so a comma always is followed by one
            target.write(json.dumps(event).encode() + b",\n")
        shutil.copyfileobj(source, target, BLOCK)
