"""A Chrome trace as a table: where the time of its steps went, and its memory.

It reads the events of the trace and not the profiler's own averages, which fail on call stacks of some threads.
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
"""What the range of a step begins with; its number follows."""

STAGE = "stage "
"""What the actions of a stage begin with in a table; its number and the kind of the action follow."""

BACKENDS = ("gloo:", "nccl:")
"""What the ranges begin with that torch.distributed makes itself."""

OPERATIONS = 30
"""Rows of a table of operations."""

HOST, RANGE = ("cpu_op", "user_annotation"), "user_annotation"
DEVICE, DEVICE_RANGE = ("kernel", "gpu_memcpy", "gpu_memset"), "gpu_user_annotation"
"""Categories of events: what the host and the device do, and the ranges around it."""


@dataclass
class Row:
    """Events of one name: how many, and milliseconds of all, with and without those that they contain."""

    calls: int = 0
    total: float = 0.0
    own: float = 0.0


class Account:
    """What a trace tells, gathered event by event: a whole trace may not fit into memory."""

    def __init__(self, events: Iterable[Event]) -> None:
        """Go through the events once."""
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
        """Text: how long the steps took, and their phases, collectives and layers; then the longest operations.

        Args:
            steps: in the trace.
            peak_bytes: most memory allocated since it began, where that was recorded.

        """
        whole = sum(row.total for name, row in self._host.items() if name.startswith(STEP))
        lines = [f"{steps} {'step' if steps == 1 else 'steps'}, {whole / steps:.3f} ms each on the host"]
        for title, names in _sections(self._ranges).items():
            lines += ["", _line(title, "of steps", "ms a step", "on device" if self._on_device else "")]
            for name in sorted(names, key=lambda name: -self._host[name].total):
                there = f"{self._on_device[name].total / steps:.3f}" if name in self._on_device else ""
                time = self._host[name].total
                lines.append(_line(f"  {name}", f"{time / whole:.1%}" if whole else "", f"{time / steps:.3f}", there))
        if peak_bytes is not None:
            lines += ["", f"{MEMORY_TRACK}, at most: {shown(peak_bytes)}"]
        operations = {name: row for name, row in self._host.items() if name not in self._ranges}
        lines += _operations("operations on the host, without those that they call", operations, steps)
        if self._device:
            lines += _operations("operations on the device", self._device, steps)
        return "\n".join(lines) + "\n"


def _operations(title: str, rows: Mapping[str, Row], steps: int) -> list[str]:
    """The longest of them."""
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
    """Complete events of a thread, 20 bytes for each: microseconds, and the place of the name in a list."""

    begin: array[float] = field(default_factory=lambda: array("d"))
    duration: array[float] = field(default_factory=lambda: array("d"))
    name: array[int] = field(default_factory=lambda: array("I"))


class Tally:
    """Complete events by name. Those of a thread lie within each other or apart."""

    def __init__(self) -> None:
        self._names: dict[str, int] = {}
        self._threads: dict[tuple[Any, Any], Thread] = defaultdict(Thread)

    def add(self, event: Event) -> None:
        """Note one."""
        thread = self._threads[event["pid"], event["tid"]]
        thread.begin.append(event["ts"])
        thread.duration.append(event["dur"])
        thread.name.append(self._names.setdefault(event["name"], len(self._names)))

    def rows(self) -> dict[str, Row]:
        """What they add up to."""
        rows = [Row() for _ in self._names]
        for thread in self._threads.values():
            around: list[tuple[float, Row]] = []  # the end of each, and its row
            for index in np.lexsort((-np.array(thread.duration), np.array(thread.begin))):
                begin, duration, row = thread.begin[index], thread.duration[index], rows[thread.name[index]]
                while around and around[-1][0] <= begin:
                    around.pop()
                milliseconds = duration / 1e3
                if around:
                    around[-1][1].own -= milliseconds
                around.append((begin + duration, row))
                row.calls, row.total, row.own = row.calls + 1, row.total + milliseconds, row.own + milliseconds
        return dict(zip(self._names, rows))


def without_micro_batch(name: str) -> str:
    """``stage 2 F`` for ``2F0``, an action of the pipeline: those of all micro-batches have one row."""
    try:
        stage, kind, _ = Action.parse(name)
    except ScheduleError:
        return name
    return f"{STAGE}{stage} {kind}"


def is_layer(name: str) -> bool:
    """Whether a module, or the range around its forward pass, is one of a numbered list: ``layers.3``."""
    return name.rpartition(".")[2].isdecimal()


def _sections(ranges: Iterable[str]) -> dict[str, list[str]]:
    """Names of ranges by what they are; those of the steps themselves left out."""
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
    found = {
        "phases": phases,
        "actions of the pipeline": actions,
        "waits for other ranks, by axes": waits,
        "collectives of all axes, as their threads see them": backends,
        "forward passes of layers": layers,
    }
    return {title: names for title, names in found.items() if names}
