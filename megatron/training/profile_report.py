"""A Chrome trace as a table: where the time of its steps went, and its memory.

It reads the events of the trace and not the profiler's own averages, which fail on call stacks of some threads.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from megatron.config.memory import shown
from megatron.parallel.ranges import COMMUNICATION

STEP = "step "
"""What the range of a step begins with; its number follows."""

BACKENDS = ("gloo:", "nccl:")
"""What the ranges begin with that torch.distributed makes itself."""

OPERATIONS = 30
"""Rows of a table of operations."""

HOST, RANGE = ("cpu_op", "user_annotation"), "user_annotation"
DEVICE, DEVICE_RANGE = ("kernel", "gpu_memcpy", "gpu_memset"), "gpu_user_annotation"
"""Categories of events: what the host and the device do, and the ranges around it."""

MEMORY_EVENT, MEMORY_TRACK = "[memory]", "allocated since the recording began"

Event = Mapping[str, Any]


@dataclass
class Row:
    """Events of one name: how many, and milliseconds of all, with and without those that they contain."""

    calls: int = 0
    total: float = 0.0
    own: float = 0.0


def report(events: Iterable[Event], steps: int, peak_bytes: int | None = None) -> str:
    """Text: how long the steps took, and their phases, collectives and layers; then the longest operations.

    Args:
        events: of the trace.
        steps: in it.
        peak_bytes: most memory allocated since it began, where that was recorded.

    """
    spans = [event for event in events if event.get("ph") == "X"]
    host, device = tally(e for e in spans if e.get("cat") in HOST), tally(e for e in spans if e.get("cat") in DEVICE)
    ranges = {e["name"] for e in spans if e.get("cat") == RANGE}
    on_device = tally(e for e in spans if e.get("cat") == DEVICE_RANGE)
    whole = sum(row.total for name, row in host.items() if name.startswith(STEP))
    lines = [f"{steps} {'step' if steps == 1 else 'steps'}, {whole / steps:.3f} ms each on the host"]
    for title, names in _sections(ranges).items():
        lines += ["", _line(title, "of steps", "ms a step", "on device" if on_device else "")]
        for name in sorted(names, key=lambda name: -host[name].total):
            there = f"{on_device[name].total / steps:.3f}" if name in on_device else ""
            time = host[name].total
            lines.append(_line(f"  {name}", f"{time / whole:.1%}" if whole else "", f"{time / steps:.3f}", there))
    if peak_bytes is not None:
        lines += ["", f"{MEMORY_TRACK}, at most: {shown(peak_bytes)}"]
    operations = {name: row for name, row in host.items() if name not in ranges}
    lines += _operations("operations on the host, without those that they call", operations, steps)
    if device:
        lines += _operations("operations on the device", device, steps)
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


def tally(events: Iterable[Event]) -> dict[str, Row]:
    """Complete events by name. Those of a thread lie within each other or apart."""
    threads: dict[tuple[Any, Any], list[Event]] = defaultdict(list)
    for event in events:
        threads[event["pid"], event["tid"]].append(event)
    rows: dict[str, Row] = defaultdict(Row)
    for of_thread in threads.values():
        around: list[Event] = []
        for event in sorted(of_thread, key=lambda e: (e["ts"], -e["dur"])):
            while around and around[-1]["ts"] + around[-1]["dur"] <= event["ts"]:
                around.pop()
            milliseconds = event["dur"] / 1e3
            if around:
                rows[around[-1]["name"]].own -= milliseconds
            around.append(event)
            row = rows[event["name"]]
            row.calls, row.total, row.own = row.calls + 1, row.total + milliseconds, row.own + milliseconds
    return dict(rows)


def _sections(ranges: Iterable[str]) -> dict[str, list[str]]:
    """Names of ranges by what they are; those of the steps themselves left out."""
    phases, waits, layers, backends = [], [], [], []
    for name in ranges:
        if name.startswith(COMMUNICATION):
            waits.append(name)
        elif name.startswith(BACKENDS):
            backends.append(name)
        elif name.rpartition(".")[2].isdecimal():
            layers.append(name)
        elif not name.startswith(STEP):
            phases.append(name)
    found = {
        "phases": phases,
        "waits for other ranks, by axes": waits,
        "collectives of all axes, as their threads see them": backends,
        "forward passes of layers": layers,
    }
    return {title: names for title, names in found.items() if names}


def add_memory_track(events: list[dict[str, Any]]) -> int:
    """Make the allocations in a Chrome trace a curve of bytes, which viewers draw; returns its highest point."""
    totals = [(e, e["args"].get("Total Allocated")) for e in events if e.get("name") == MEMORY_EVENT]
    known = [(e, total) for e, total in totals if total is not None]
    for event, total in known:
        place = {name: event[name] for name in ("pid", "ts")}
        events.append({"ph": "C", "name": MEMORY_TRACK, **place, "args": {"bytes": total}})
    return max((total for _, total in known), default=0)
