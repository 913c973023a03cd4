"""Write and read timelines as trace files for Chrome (chrome://tracing) and Perfetto (ui.perfetto.dev).

Each pipeline rank is a process: its first row is what it computes, further rows are its transfers, by target rank.
Simulated and measured timelines have the same form. Times are in microseconds, as floats.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron.pipeline.actions import BACKWARD, COMPUTE, FORWARD, INPUT, WEIGHT, Action, ScheduleError
from megatron.pipeline.simulate import Interval, Timeline, Transfer

_MICROSECONDS = 1e6

_COLOURS = {FORWARD: "rail_response", BACKWARD: "rail_animation", INPUT: "rail_load", WEIGHT: "rail_idle"}
"""Colour names of Chrome: blue, red, green, orange. Perfetto chooses its own."""

_SENT = "grey"
"""Colour of transfers."""


def write_trace(timeline: Timeline, path: Path) -> None:
    """Write ``timeline``, one event per line."""
    metadata = {
        "schedule": timeline.name,
        "ranks": len(timeline.intervals),
        "activation": [float(size) for size in timeline.activation],
        "weight_memory": [float(size) for size in timeline.weight_memory],
    }
    events = ",\n".join(json.dumps(event) for event in _events(timeline))
    text = f'{{"displayTimeUnit": "ms",\n"otherData": {json.dumps(metadata)},\n"traceEvents": [\n{events}\n]}}\n'
    path.write_text(text, encoding="utf-8")


def _events(timeline: Timeline) -> Iterator[dict[str, Any]]:
    for rank, intervals in enumerate(timeline.intervals):
        yield _title("process_name", rank, 0, f"pipeline rank {rank}")
        yield _title("thread_name", rank, 0, "computing")
        for interval in intervals:
            yield _event(interval, rank, 0, _COLOURS[interval.action.kind]) | {"cat": "compute"}
    for source, target in sorted({(transfer.source, transfer.target) for transfer in timeline.transfers}):
        yield _title("thread_name", source, 1 + target, f"to rank {target}")
    for transfer in timeline.transfers:
        args = {"sent": float(transfer.sent) * _MICROSECONDS, "target": transfer.target}
        yield _event(transfer, transfer.source, 1 + transfer.target, _SENT) | {"cat": "transfer", "args": args}


def _title(what: str, rank: int, row: int, text: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": rank, "tid": row, "args": {"name": text}}


def _event(what: Interval | Transfer, rank: int, row: int, colour: str) -> dict[str, Any]:
    start, duration = float(what.start) * _MICROSECONDS, float(what.end - what.start) * _MICROSECONDS
    name = str(what.action)
    return {"ph": "X", "name": name, "pid": rank, "tid": row, "ts": start, "dur": duration, "cname": colour}


def read_trace(path: Path) -> Timeline:
    """Read a timeline written by :func:`write_trace`; other events in the file are ignored.

    Raises:
        ScheduleError: if the file is unreadable or not such a timeline, or a rank computes two actions at once.
    """
    try:
        return _timeline(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        reason = str(error)
    except (KeyError, TypeError, AttributeError):
        reason = "it is not a trace of a pipeline"
    raise ScheduleError(
        f"{path} cannot be read as a timeline: {reason}",
        "write one with --profile-pipeline or tools/draw_schedule.py --trace",
    )


def _timeline(content: dict[str, Any]) -> Timeline:
    metadata = content["otherData"]
    intervals: list[list[Interval]] = [[] for _ in range(metadata["ranks"])]
    transfers: list[Transfer] = []
    for event in content["traceEvents"]:
        if event.get("cat") == "compute":
            action, start, end = _read(event)
            if action.kind not in COMPUTE or not 0 <= event["pid"] < len(intervals):
                raise ValueError(f"{action} is computed on rank {event['pid']} of {len(intervals)}")
            intervals[event["pid"]].append(Interval(action, start, end))
        elif event.get("cat") == "transfer":
            action, start, end = _read(event)
            sent = event["args"]["sent"] / _MICROSECONDS
            transfers.append(Transfer(action, event["pid"], event["args"]["target"], sent, start, end))
    ordered = tuple(tuple(sorted(rank, key=lambda interval: interval.start)) for rank in intervals)
    for rank, computed in enumerate(ordered):
        _check_apart(rank, computed)
    sizes = (tuple(metadata[name]) for name in ("activation", "weight_memory"))
    return Timeline(metadata["schedule"], ordered, tuple(transfers), *sizes)


def _read(event: dict[str, Any]) -> tuple[Action, float, float]:
    action = Action.parse(event["name"])
    start, duration = event["ts"] / _MICROSECONDS, event["dur"] / _MICROSECONDS
    if not (math.isfinite(start) and 0 <= duration < math.inf):
        raise ValueError(f"{action} starts at {event['ts']} and takes {event['dur']} microseconds")
    return action, start, start + duration


def _check_apart(rank: int, intervals: tuple[Interval, ...]) -> None:
    for before, after in zip(intervals, intervals[1:]):
        if after.start < before.end - 1e-9 * max(1, abs(before.end)):
            raise ValueError(f"rank {rank} starts {after.action} at {after.start} s, before {before.action} is over")
