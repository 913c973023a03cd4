"""Summarise a Chrome trace as a table: time by phase, layer, communication and operation, and peak memory.

It uses the events of the trace, because the profiler's own averages fail on the call stacks of some threads.
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from megatron.config.memory import shown
from megatron.parallel.ranges import COMMUNICATION
from megatron.pipeline.actions import Action, ScheduleError
from megatron.training.trace_file import MEMORY_TRACK, Event

STEP = "step "
"""Prefix of a step's range; the step number follows."""

STAGE = "stage "
"""Prefix of a stage's actions in the table; stage number and action type follow."""

BACKENDS = ("gloo:", "nccl:")
"""Prefixes of the ranges that torch.distributed creates."""

OPERATIONS = 30
"""Maximum number of rows in a table of operations."""

HOST, RANGE = ("cpu_op", "user_annotation"), "user_annotation"
DEVICE, DEVICE_RANGE = ("kernel", "gpu_memcpy", "gpu_memset"), "gpu_user_annotation"
"""Event categories: operations and ranges on the host and on the device."""


@dataclass
class Row:
    """Sums over all events of one name."""

    calls: int = 0
    total: float = 0.0  # milliseconds
    own: float = 0.0  # milliseconds without nested events


class Account:
    """Sums over the events of a trace, read one by one because a whole trace may not fit into memory."""

    def __init__(self, events: Iterable[Event]) -> None:
        """Sum up the events in one pass."""
        host, device, on_device, self._ranges = Tally(), Tally(), Tally(), set[str]()
        tallies = dict.fromkeys(HOST, host) | dict.fromkeys(DEVICE, device) | {DEVICE_RANGE: on_device}
        for event in events:
            category = event.get("cat")
            if event.get("ph") == "X" and category in tallies:
                if category in (RANGE, DEVICE_RANGE):
                    event = {**event, "name": without_micro_batch(event["name"])}
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
        whole = sum(row.total for name, row in self._host.items() if name.startswith(STEP))
        lines = [f"{steps} {'step' if steps == 1 else 'steps'}, {whole / steps:.3f} ms each on the host"]
        for title, names in _sections(self._ranges).items():
            lines += ["", _line(title, "of steps", "ms a step", "on device" if self._on_device else "")]
            for name in sorted(names, key=lambda name: -self._host[name].total):
                on_device = f"{self._on_device[name].total / steps:.3f}" if name in self._on_device else ""
                time = self._host[name].total
                share = f"{time / whole:.1%}" if whole else ""
                lines.append(_line(f"  {name}", share, f"{time / steps:.3f}", on_device))
        if peak_bytes is not None:
            lines += ["", f"{MEMORY_TRACK}, at most: {shown(peak_bytes)}"]
        operations = {name: row for name, row in self._host.items() if name not in self._ranges}
        lines += _operations("operations on the host, without nested operations", operations, steps)
        if self._device:
            lines += _operations("operations on the device", self._device, steps)
        return "\n".join(lines) + "\n"


def _operations(title: str, rows: Mapping[str, Row], steps: int) -> list[str]:
    """Return a table of the longest operations."""
    lines = ["", _line(title, "calls", "ms a step")]
    for name, row in sorted(rows.items(), key=lambda item: -item[1].own)[:OPERATIONS]:
        lines.append(_line(f"  {name}", f"{row.calls:,}", f"{row.own / steps:.3f}"))
    if len(rows) > OPERATIONS:
        lines.append(f"  and {len(rows) - OPERATIONS} more")
    return lines


def _line(name: str, *columns: str) -> str:
    return f"{name[:70]:70}{''.join(f'{column:>12}' for column in columns)}".rstrip()


@dataclass
class Thread:
    """Complete events of one thread, 20 bytes each."""

    begin: array[float] = field(default_factory=lambda: array("d"))  # microseconds
    duration: array[float] = field(default_factory=lambda: array("d"))  # microseconds
    name: array[int] = field(default_factory=lambda: array("I"))  # index into the table's names


class Tally:
    """Complete events by name. Events of one thread are nested or disjoint."""

    def __init__(self) -> None:
        self._names: dict[str, int] = {}
        self._threads: dict[tuple[Any, Any], Thread] = defaultdict(Thread)

    def add(self, event: Event) -> None:
        """Add an event."""
        thread = self._threads[event["pid"], event["tid"]]
        thread.begin.append(event["ts"])
        thread.duration.append(event["dur"])
        thread.name.append(self._names.setdefault(event["name"], len(self._names)))

    def rows(self) -> dict[str, Row]:
        """Return the sums by name."""
        rows = [Row() for _ in self._names]
        for thread in self._threads.values():
            enclosing: list[tuple[float, Row]] = []  # stack of open events: end time and row
            for index in np.lexsort((-np.array(thread.duration), np.array(thread.begin))):
                begin, duration = thread.begin[index], thread.duration[index]
                row = rows[thread.name[index]]
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


def without_micro_batch(name: str) -> str:
    """Return ``stage 2 F`` for the pipeline action ``2F0``, so that all micro-batches share one row."""
    try:
        stage, kind, _ = Action.parse(name)
    except ScheduleError:
        return name
    return f"{STAGE}{stage} {kind}"


def is_layer(name: str) -> bool:
    """Return True for the name of a numbered module or its range, such as ``layers.3``."""
    return name.rpartition(".")[2].isdecimal()


def _sections(ranges: Iterable[str]) -> dict[str, list[str]]:
    """Return the names of the ranges by section, without the ranges of the steps."""
    phases, actions, waits, layers, backends = [], [], [], [], []
    for name in ranges:
        if name.startswith(COMMUNICATION):
            waits.append(name)
        elif name.startswith(BACKENDS):
            backends.append(name)
        elif is_layer(name):
            layers.append(name)
        elif name.startswith(STAGE):
            actions.append(name)
        elif not name.startswith(STEP):
            phases.append(name)
    sections = {
        "phases": phases,
        "actions of the pipeline": actions,
        "waits for other ranks, by axes": waits,
        "collectives of all axes, on the backend's threads": backends,
        "forward passes of layers": layers,
    }
    return {title: names for title, names in sections.items() if names}
