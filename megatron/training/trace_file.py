"""Read and compress Chrome trace files in a streaming way, because a trace may be larger than memory."""

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
"""Bytes or characters read at a time."""

LONGEST_EVENT = 16 * BLOCK
"""An event that is incomplete at this length is treated as an error."""

OPENING = re.compile(rb'"traceEvents"\s*:\s*\[')
MEMORY_EVENT, MEMORY_TRACK = "[memory]", "allocated since the recording began"

Event = Mapping[str, Any]


def events_of(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the events of a trace. Raise ValueError if the file is not a trace or is truncated."""
    decoder = json.JSONDecoder()
    text = ""
    at = 0
    with path.open("rb") as binary:
        binary.seek(_events_offset(path))
        file = io.TextIOWrapper(binary, encoding="utf-8", errors="replace")
        while True:
            while text[at : at + 1] in (",", " ", "\n", "\r", "\t"):
                at += 1
            try:
                event, at = decoder.raw_decode(text, at)
            except json.JSONDecodeError:  # an incomplete event, or the end of the list
                if text[at : at + 1] == "]":
                    break
                block = file.read(BLOCK)
                if not block or len(text) - at > LONGEST_EVENT:
                    raise
                text = text[at:] + block
                at = 0
            else:
                yield event
        for block in iter(lambda: file.read(BLOCK), ""):
            text = (text[at:] + block)[-BLOCK:]
            at = 0
        if not text[at:].rstrip().endswith("}"):
            raise ValueError(f"{path} is truncated")


def _events_offset(path: Path) -> int:
    """Return the byte offset after the bracket that opens the list of events."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        found = OPENING.search(content)
        if found is None:
            raise ValueError(f"{path} is not a Chrome trace")
        return found.end()


class MemoryCurve:
    """Allocated memory over time, as a counter track for trace viewers; 24 bytes of memory per allocation."""

    def __init__(self) -> None:
        self._pids = array("q")
        self._bytes = array("q")
        self._times = array("d")

    def along(self, events: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """Yield the events unchanged, and collect the allocations among them."""
        for event in events:
            if event.get("name") == MEMORY_EVENT and (total := event["args"].get("Total Allocated")) is not None:
                self._pids.append(event["pid"])
                self._times.append(event["ts"])
                self._bytes.append(total)
            yield event

    @property
    def peak(self) -> int:
        """Peak in bytes."""
        return max(self._bytes, default=0)

    def events(self) -> Iterator[dict[str, Any]]:
        """Yield the counter events of the track."""
        for pid, ts, total in zip(self._pids, self._times, self._bytes):
            yield {"ph": "C", "name": MEMORY_TRACK, "pid": pid, "ts": ts, "args": {"bytes": total}}


def pack(trace: Path, packed: Path, curve: MemoryCurve) -> None:
    """Compress a trace with gzip, and add the memory curve to its events."""
    offset = _events_offset(trace)
    with trace.open("rb") as source, gzip.open(packed, "wb", compresslevel=3) as target:
        target.write(source.read(offset))
        for event in curve.events():  # other events follow, so the trailing comma is valid
            target.write(json.dumps(event).encode() + b",\n")
        shutil.copyfileobj(source, target, BLOCK)
