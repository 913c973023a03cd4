from __future__ import annotations

import gzip
import io
import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from megatron.training.callbacks import profile_report
from megatron.training.callbacks.profile_report import MemoryCurve, TraceSummary, compress_trace, read_events

EVENTS: list[dict[str, Any]] = [
    {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": "a ] b } \u00e9"}},
    {"ph": "X", "cat": "cpu_op", "name": "x" * 50, "pid": 1, "tid": 1, "ts": 10.5, "dur": 2.25},
    {"ph": "i", "name": "[memory]", "pid": 1, "ts": 1.0, "args": {"Total Allocated": 400, "Bytes": 400}},
    {"ph": "i", "name": "[memory]", "pid": 1, "ts": 2.5, "args": {"Total Allocated": 100, "Bytes": -300}},
    {"ph": "i", "name": "[memory]", "pid": 1, "ts": 3.0, "args": {"Bytes": 1}},
]
HEAD = {"schemaVersion": 1, "deviceProperties": [{"name": "a"}]}


def written(path: Path, events: list[dict[str, Any]], indent: int | None = None) -> Path:
    path.write_text(json.dumps({**HEAD, "traceEvents": events, "traceName": str(path)}, indent=indent))
    return path


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("block", [1, 7, 64, 1 << 20])
@pytest.mark.parametrize("count", [0, 1, len(EVENTS)])
def test_events_are_those_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, indent: int | None, block: int, count: int
) -> None:
    monkeypatch.setattr(profile_report, "READ_BYTES", block)
    assert list(read_events(written(tmp_path / "trace", EVENTS[:count], indent))) == EVENTS[:count]


def test_no_beginning_of_a_trace_passes_for_a_whole_one(tmp_path: Path) -> None:
    whole = written(tmp_path / "trace", EVENTS).read_bytes()
    for size in range(1, len(whole)):
        (tmp_path / "cut").write_bytes(whole[:size])
        with pytest.raises(ValueError, match=r"."):
            list(read_events(tmp_path / "cut"))
    assert list(read_events(tmp_path / "trace")) == EVENTS


def test_what_is_no_event_is_not_looked_for_in_all_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile_report, "READ_BYTES", 16)
    monkeypatch.setattr(profile_report, "MAX_EVENT_LENGTH", 64)
    path = tmp_path / "trace"
    path.write_text('{"traceEvents": [{"name": broken' + " " * 10_000)
    read: list[int] = []
    original = io.TextIOWrapper.read

    class Counting(io.TextIOWrapper):
        def read(self, size: int | None = -1, /) -> str:
            read.append(size or 0)
            return original(self, size)

    monkeypatch.setattr(io, "TextIOWrapper", Counting)
    with pytest.raises(ValueError, match="Expecting value"):
        list(read_events(path))
    assert len(read) < 10


def test_allocations_become_a_curve_in_the_packed_trace(tmp_path: Path) -> None:
    path, curve = written(tmp_path / "trace", EVENTS), MemoryCurve()
    assert list(curve.along(read_events(path))) == EVENTS
    compress_trace(path, tmp_path / "packed", curve)
    found = json.loads(gzip.decompress((tmp_path / "packed").read_bytes()))
    events = found.pop("traceEvents")
    assert found == {**HEAD, "traceName": str(path)}
    assert [event for event in events if event["ph"] != "C"] == EVENTS
    assert [(e["ts"], e["args"]) for e in events if e["ph"] == "C"] == [(1.0, {"bytes": 400}), (2.5, {"bytes": 100})]
    assert curve.peak == 400


def test_a_trace_larger_than_what_may_be_held_is_read_and_packed(tmp_path: Path) -> None:
    """24 MiB of events, each of which costs 20 bytes of memory."""
    path = tmp_path / "trace"
    line = json.dumps({**EVENTS[1], "args": {"shapes": "8" * 400}})
    with path.open("w") as file:
        file.write('{"traceEvents": [' + ",\n".join([line] * 2000))
        for _ in range(20):
            file.write(",\n" + ",\n".join([line] * 2000))
        file.write("]}")
    tracemalloc.start()
    try:
        TraceSummary(read_events(path)).table(1)
        compress_trace(path, tmp_path / "packed", MemoryCurve())
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert path.stat().st_size > 20 * 2**20
    assert peak < 9 * 2**20
