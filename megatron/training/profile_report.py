"""A profile as a table: where the time of its steps went, and its memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch._C._autograd import DeviceType
from torch.autograd.profiler_util import EventList, FunctionEventAvg
from torch.profiler import profile

from megatron.config.memory import shown
from megatron.parallel.ranges import COMMUNICATION

STEP = "step "
"""What the range of a step begins with; its number follows."""

OPERATIONS = 30
"""Rows of the table of operations."""

MEMORY_EVENT, MEMORY_TRACK = "[memory]", "allocated since the recording began"


def report(trace: profile, steps: int, device: str, peak_bytes: int | None = None) -> str:
    """Text: how long the steps took, and their phases, collectives and layers; then the longest operations.

    Args:
        trace: stopped.
        steps: in it.
        device: ``cpu`` or ``cuda``.
        peak_bytes: most memory allocated since it began, where that was recorded.

    """
    averages: EventList = trace.key_averages()
    ranges = [e for e in averages if e.is_user_annotation or e.key.startswith((STEP, COMMUNICATION))]
    host = _milliseconds((e for e in ranges if e.device_type == DeviceType.CPU), steps, "cpu_time_total")
    on_device = _milliseconds((e for e in ranges if e.device_type == DeviceType.CUDA), steps, "device_time_total")
    whole = sum(time for name, time in host.items() if name.startswith(STEP))
    lines = [f"{steps} {'step' if steps == 1 else 'steps'}, {whole:.3f} ms each; below, times are those of one step"]
    for title, rows in _sections(host).items():
        lines += ["", f"{title:40} {'host ms':>10} {'of step':>8}" + (f" {'device ms':>10}" if on_device else "")]
        for name, time in sorted(rows.items(), key=lambda row: -row[1]):
            last = f" {on_device.get(name, 0.0):10.3f}" if on_device else ""
            lines.append(f"  {name:38} {time:10.3f} {time / whole:8.1%}{last}")
    if peak_bytes is not None:
        lines += ["", f"{MEMORY_TRACK}, at most: {shown(peak_bytes)}"]
    tables = [f"self_{device}_time_total"] + (["self_cpu_memory_usage"] if peak_bytes is not None else [])
    for order in (name.replace("cuda", "device") for name in tables):
        lines += ["", f"operations, by {order}", averages.table(sort_by=order, row_limit=OPERATIONS)]
    return "\n".join(lines)


def _milliseconds(ranges: Iterable[FunctionEventAvg], steps: int, time: str) -> dict[str, float]:
    """Per step, by the name of the range; torch counts microseconds of all."""
    return {str(e.key): getattr(e, time) / steps / 1e3 for e in ranges}


def _sections(times: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """Ranges by what they are; those of the steps themselves left out."""
    phases: dict[str, float] = {}
    waits: dict[str, float] = {}
    layers: dict[str, float] = {}
    for name, time in times.items():
        if name.startswith(COMMUNICATION):
            waits[name.removeprefix(COMMUNICATION)] = time
        elif name.rpartition(".")[2].isdecimal():
            layers[name] = time
        elif not name.startswith(STEP):
            phases[name] = time
    found = {"phases": phases, "waiting for other ranks, by axes": waits, "forward passes of layers": layers}
    return {title: rows for title, rows in found.items() if rows}


def add_memory_track(trace: dict[str, Any]) -> int:
    """Make the allocations in a Chrome trace a curve of bytes, which viewers draw; returns its highest point."""
    totals = [(e, e["args"].get("Total Allocated")) for e in trace["traceEvents"] if e["name"] == MEMORY_EVENT]
    known = [(e, total) for e, total in totals if total is not None]
    for event, total in known:
        place = {name: event[name] for name in ("pid", "ts")}
        trace["traceEvents"].append({"ph": "C", "name": MEMORY_TRACK, **place, "args": {"bytes": total}})
    return max((total for _, total in known), default=0)
