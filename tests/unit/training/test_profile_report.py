from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.config.errors import format_bytes
from megatron.training.callbacks.profile_report import EventTable, EventTotals, TraceSummary


def event(name: str, ts: float, dur: float, cat: str = "cpu_op", tid: int = 1) -> dict[str, Any]:
    return {"ph": "X", "name": name, "ts": ts, "dur": dur, "cat": cat, "pid": 1, "tid": tid}


def tally(events: list[dict[str, Any]]) -> dict[str, EventTotals]:
    found = EventTable()
    for one in events:
        found.add(one)
    return found.rows()


def test_time_of_a_call_is_not_that_of_its_caller() -> None:
    rows = tally([event("a", 0, 1000), event("b", 100, 300), event("c", 200, 100), event("b", 500, 200)])
    assert {name: (row.calls, row.total, row.own) for name, row in rows.items()} == {
        "a": (1, pytest.approx(1.0), pytest.approx(0.5)),
        "b": (2, pytest.approx(0.5), pytest.approx(0.4)),
        "c": (1, pytest.approx(0.1), pytest.approx(0.1)),
    }


def test_threads_do_not_contain_each_other() -> None:
    rows = tally([event("a", 0, 1000, tid=1), event("b", 100, 300, tid=2)])
    assert (rows["a"].own, rows["b"].own) == (pytest.approx(1.0), pytest.approx(0.3))


@st.composite
def nested(draw: st.DrawFn, start: int = 0, stop: int = 4096, depth: int = 0) -> list[dict[str, Any]]:
    """Events on a thread, within ``start .. stop``."""
    if depth == 4 or stop - start < 2:
        return []
    cuts = sorted(draw(st.lists(st.integers(start, stop), max_size=6)))
    found = []
    for begin, end in zip(cuts[::2], cuts[1::2]):
        if end > begin:
            found += [event(draw(st.sampled_from("abc")), begin, end - begin), *draw(nested(begin, end, depth + 1))]
    return found


@settings(max_examples=60, derandomize=True, deadline=None)
@given(nested())
def test_own_times_add_up_to_the_time_in_which_anything_runs(events: list[dict[str, Any]]) -> None:
    busy = {microsecond for e in events for microsecond in range(e["ts"], e["ts"] + e["dur"])}
    assert sum(row.own for row in tally(events).values()) == pytest.approx(len(busy) / 1e3)


def test_the_table_has_shares_of_the_steps() -> None:
    text = TraceSummary(
        [
            event("step 7", 0, 10_000, "user_annotation"),
            event("optimizer", 0, 5_000, "user_annotation"),
            event("communication tp", 1_000, 1_000, "user_annotation"),
            event("communication tp", 3_000, 1_500, "user_annotation"),
            event("decoder.layers.3", 6_000, 100, "user_annotation"),
            event("gloo:all_reduce", 6_000, 100, "user_annotation", tid=9),
            event("2F0", 6_000, 300, "user_annotation"),
            event("2F1", 6_300, 400, "user_annotation"),
            event("2SEND_F1", 6_700, 50, "user_annotation"),
            event("aten::mm", 0, 500),
            {"ph": "M", "name": "process_name"},
        ]
    ).table(steps=1, peak_bytes=2_000_000)
    rows = {line.split("  ")[1]: line.split()[-2:] for line in text.splitlines() if line.startswith("  ")}
    assert text.startswith("1 step, 10.000 ms each")
    assert rows == {
        "optimizer": ["50.0%", "5.000"],
        "communication tp": ["25.0%", "2.500"],
        "decoder.layers.3": ["1.0%", "0.100"],
        "gloo:all_reduce": ["1.0%", "0.100"],
        "stage 2 F": ["7.0%", "0.700"],
        "stage 2 SEND_F": ["0.5%", "0.050"],
        "aten::mm": ["1", "0.500"],
    }
    assert "\nactions of the pipeline " in text
    assert f"allocated since the recording began, at most: {format_bytes(2_000_000)}" in text


def test_what_a_gpu_did_is_beside_what_the_host_did() -> None:
    text = TraceSummary(
        [
            event("step 1", 0, 10_000, "user_annotation"),
            event("optimizer", 0, 1_000, "user_annotation"),
            event("optimizer", 500, 8_000, "gpu_user_annotation", tid=7),
            event("gemm", 500, 7_000, "kernel", tid=7),
        ]
    ).table(steps=1)
    assert ["optimizer", "10.0%", "1.000", "8.000"] in [line.split() for line in text.splitlines()]
    assert ["gemm", "1", "7.000"] in [line.split() for line in text.splitlines()]
