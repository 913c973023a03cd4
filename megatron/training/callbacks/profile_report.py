"""Summarise a Chrome trace: time by phase, layer, communication and operation, and memory over time.

Traces may be larger than memory, so events are read one by one and compressed in a streaming way. The table uses the
events instead of the profiler's own averages, which fail on the call stacks of some threads.
"""

from __future__ import annotations

import gzip
import io
import json
import mmap
import re
import shutil
from array import array
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron.config.errors import format_bytes
from megatron.distributed.timing import COMMUNICATION_PREFIX
from megatron.pipeline.actions import Action, ScheduleError

READ_BYTES = 1 << 20
"""Bytes or characters read at a time."""

MAX_EVENT_LENGTH = 16 * READ_BYTES
"""An event that is incomplete at this length is treated as an error."""

OPENING = re.compile(rb'"traceEvents"\s*:\s*\[')
MEMORY_EVENT, MEMORY_TRACK = "[memory]", "allocated since the recording began"

TraceEvent = Mapping[str, Any]


def read_events(path: Path) -> Iterator[dict[str, Any]]:
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
                block = file.read(READ_BYTES)
                if not block or len(text) - at > MAX_EVENT_LENGTH:
                    raise
                text = text[at:] + block
                at = 0
            else:
                yield event
        for block in iter(lambda: file.read(READ_BYTES), ""):
            text = (text[at:] + block)[-READ_BYTES:]
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


def compress_trace(trace: Path, packed: Path, curve: MemoryCurve) -> None:
    """Compress a trace with gzip, and add the memory curve to its events."""
    offset = _events_offset(trace)
    with trace.open("rb") as source, gzip.open(packed, "wb", compresslevel=3) as target:
        target.write(source.read(offset))
        for event in curve.events():  # other events follow, so the trailing comma is valid
            target.write(json.dumps(event).encode() + b",\n")
        shutil.copyfileobj(source, target, READ_BYTES)


STEP_PREFIX = "step "
"""Prefix of a step's range; the step number follows."""

STAGE_PREFIX = "stage "
"""Prefix of a stage's actions in the table; stage number and action type follow."""

BACKEND_PREFIXES = ("gloo:", "nccl:")
"""Prefixes of the ranges that torch.distributed creates."""

PHASES = "phases"
ACTIONS = "actions of the pipeline"
WAITS = "waits for other ranks, by axes"
BACKENDS = "collectives of all axes, on the backend's threads"
LAYERS = "forward passes of layers"
SECTIONS = (PHASES, ACTIONS, WAITS, BACKENDS, LAYERS)
"""Sections of the table, each of ranges."""

MAX_OPERATION_ROWS = 30
"""Maximum number of rows in a table of operations."""

HOST, RANGE = ("cpu_op", "user_annotation"), "user_annotation"
DEVICE, DEVICE_RANGE = ("kernel", "gpu_memcpy", "gpu_memset"), "gpu_user_annotation"
"""Event categories: operations and ranges on the host and on the device."""


@dataclass
class EventTotals:
    """Sums over all events of one name."""

    calls: int = 0
    total: float = 0.0  # milliseconds
    own: float = 0.0  # milliseconds without nested events


class TraceSummary:
    """Sums over the events of a trace, read one by one because a whole trace may not fit into memory."""

    def __init__(self, events: Iterable[TraceEvent]) -> None:
        """Sum up the events in one pass."""
        host, device, on_device, self._ranges = EventTable(), EventTable(), EventTable(), set[str]()
        tallies = dict.fromkeys(HOST, host) | dict.fromkeys(DEVICE, device) | {DEVICE_RANGE: on_device}
        for event in events:
            category = event.get("cat")
            if event.get("ph") == "X" and category in tallies:
                if category in (RANGE, DEVICE_RANGE):
                    event = {**event, "name": strip_micro_batch(event["name"])}
                tallies[category].add(event)
                if category == RANGE:
                    self._ranges.add(event["name"])
        self._host, self._device, self._on_device = host.rows(), device.rows(), on_device.rows()

    def table(self, steps: int, peak_bytes: int | None = None) -> str:
        """Return a text table of steps, phases, collectives and layers, and of the longest operations.

        Args:
            steps: number of steps in the trace.
            peak_bytes: peak memory allocated since the recording began, if recorded.

        """
        whole = sum(row.total for name, row in self._host.items() if name.startswith(STEP_PREFIX))
        lines = [f"{steps} {'step' if steps == 1 else 'steps'}, {whole / steps:.3f} ms each on the host"]
        for section in SECTIONS:
            names = [name for name in self._ranges if section_of(name) == section]
            if names:
                lines += ["", _line(section, "of steps", "ms a step", "on device" if self._on_device else "")]
            for name in sorted(names, key=lambda name: -self._host[name].total):
                on_device = f"{self._on_device[name].total / steps:.3f}" if name in self._on_device else ""
                time = self._host[name].total
                share = f"{time / whole:.1%}" if whole else ""
                lines.append(_line(f"  {name}", share, f"{time / steps:.3f}", on_device))
        if peak_bytes is not None:
            lines += ["", f"{MEMORY_TRACK}, at most: {format_bytes(peak_bytes)}"]
        operations = {name: row for name, row in self._host.items() if name not in self._ranges}
        lines += _operations("operations on the host, without nested operations", operations, steps)
        if self._device:
            lines += _operations("operations on the device", self._device, steps)
        return "\n".join(lines) + "\n"


def _operations(title: str, rows: Mapping[str, EventTotals], steps: int) -> list[str]:
    """Return a table of the longest operations."""
    lines = ["", _line(title, "calls", "ms a step")]
    for name, row in sorted(rows.items(), key=lambda item: -item[1].own)[:MAX_OPERATION_ROWS]:
        lines.append(_line(f"  {name}", f"{row.calls:,}", f"{row.own / steps:.3f}"))
    if len(rows) > MAX_OPERATION_ROWS:
        lines.append(f"  and {len(rows) - MAX_OPERATION_ROWS} more")
    return lines


def _line(name: str, *columns: str) -> str:
    return f"{name[:70]:70}{''.join(f'{column:>12}' for column in columns)}".rstrip()


Columns = tuple["array[float]", "array[float]", "array[int]"]
"""Events of one thread, 20 bytes each: begin and duration in microseconds, and index of the name."""


class EventTable:
    """Complete events by name. Events of one thread are nested or disjoint."""

    def __init__(self) -> None:
        self._names: dict[str, int] = {}
        self._threads: dict[tuple[Any, Any], Columns] = defaultdict(lambda: (array("d"), array("d"), array("I")))

    def add(self, event: TraceEvent) -> None:
        """Add an event."""
        begins, durations, names = self._threads[event["pid"], event["tid"]]
        begins.append(event["ts"])
        durations.append(event["dur"])
        names.append(self._names.setdefault(event["name"], len(self._names)))

    def rows(self) -> dict[str, EventTotals]:
        """Return the sums by name."""
        rows = [EventTotals() for _ in self._names]
        for begins, durations, names in self._threads.values():
            enclosing: list[tuple[float, EventTotals]] = []  # stack of open events: end time and row
            for index in np.lexsort((-np.array(durations), np.array(begins))):
                begin, duration, row = begins[index], durations[index], rows[names[index]]
                while enclosing and enclosing[-1][0] <= begin:
                    enclosing.pop()
                milliseconds = duration / 1e3
                if enclosing:
                    enclosing[-1][1].own -= milliseconds
                enclosing.append((begin + duration, row))
                row.calls += 1
                row.total += milliseconds
                row.own += milliseconds
        return dict(zip(self._names, rows))


def strip_micro_batch(name: str) -> str:
    """Return ``stage 2 F`` for the pipeline action ``2F0``, so that all micro-batches share one row."""
    try:
        stage, kind, _ = Action.parse(name)
    except ScheduleError:
        return name
    return f"{STAGE_PREFIX}{stage} {kind}"


def is_layer(name: str) -> bool:
    """Return True for the name of a numbered module or its range, such as ``layers.3``."""
    return name.rpartition(".")[2].isdecimal()


def section_of(name: str) -> str | None:
    """Return the section of the table to which a range belongs; None for the range of a step."""
    if name.startswith(COMMUNICATION_PREFIX):
        return WAITS
    if name.startswith(BACKEND_PREFIXES):
        return BACKENDS
    if is_layer(name):
        return LAYERS
    if name.startswith(STAGE_PREFIX):
        return ACTIONS
    return None if name.startswith(STEP_PREFIX) else PHASES
