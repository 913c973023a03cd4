"""The checks of the rehearsal on synthetic traces: each passes a right one and finds the fault in a wrong one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.nullgpu import checks
from tests.nullgpu.trace import Event, Trace

COMPUTE, NCCL, SIDE = 0, 1, 2
"""Streams."""


class Script:
    """Write the trace of one rank."""

    def __init__(self, rank: int = 0) -> None:
        self.rank, self.trace = rank, Trace()

    def add(self, kind: str, name: str, stream: int = COMPUTE, a: int = 0, b: int = 0, capture: int = 0) -> Script:
        self.trace.append(Event(kind, name, a, b, stream, 1, float(len(self.trace)), capture))
        return self

    def kernel(self, stream: int = COMPUTE, capture: int = 0) -> Script:
        return self.add("kernel", "add", stream, 8, 128, capture)

    def order(self, before: int, after: int, event: int = 77) -> Script:
        """Make the work of ``after`` wait for the work of ``before``."""
        return self.add("event", "eventRecord", before, event).add("wait", "streamWaitEvent", after, event, before)

    def collective(self, comm: str, stream: int = COMPUTE, op: str = "allReduce", count: int = 4) -> Script:
        return self.add("nccl", f"{op} comm{comm}/2 dt7 x0 g0", stream, count, self.rank)

    def message(self, op: str, peer: int, comm: str = "c", stream: int = COMPUTE, group: int = 0) -> Script:
        return self.add("nccl", f"{op} comm{comm}/2 dt9 x{peer} g{group}", stream, 16, self.rank)


def ranks() -> tuple[Script, Script]:
    return Script(0), Script(1)


def test_a_trace_survives_a_file(tmp_path: Path) -> None:
    trace = Script().kernel().collective("a").add("memcpy", "H2D async pageable", SIDE, 64).trace
    trace.dump(tmp_path / "trace")
    assert Trace.load(tmp_path / "trace") == trace
    assert [len(part) for part in (trace.launches(), trace.collectives(), trace.pageable_copies())] == [3, 1, 1]


def test_synchronisations_and_pageable_copies() -> None:
    right = Script().kernel().add("memcpy", "H2D async pinned").trace
    assert checks.host_waits(right) == checks.pageable_copies(right) == []
    for name in ("streamSynchronize", "eventSynchronize", "deviceSynchronize"):
        assert checks.host_waits(Script().kernel().add("sync", name).trace)
    for name in ("D2H sync", "D2H async pageable"):
        assert checks.host_waits(Script().kernel().add("memcpy", name).trace)
    assert checks.host_waits(Script().add("sync", "streamSynchronize").trace, allowed=1) == []
    assert checks.pageable_copies(Script().add("memcpy", "H2D async pageable").trace)


def test_kernels_outside_the_compute_streams() -> None:
    assert checks.stray_kernels(Script().kernel().add("graph", "beginCapture", SIDE).kernel(SIDE).trace) == []
    assert checks.stray_kernels(Script().kernel().kernel(SIDE).trace)
    assert checks.stray_kernels(Script().kernel().kernel(SIDE).trace, others=1) == []


@pytest.mark.parametrize("fault", ["", "legacy", "sync", "malloc"])
def test_captures(fault: str) -> None:
    script = Script().kernel().add("graph", "beginCapture", SIDE).kernel(SIDE, capture=1)
    script.add("malloc", "cudaMalloc", a=512, b=int(fault == "malloc"))
    if fault == "legacy":
        script.kernel()
    if fault == "sync":
        script.add("sync", "streamSynchronize", a=1)
    assert bool(checks.capture_leaks(script.add("graph", "endCapture", SIDE).kernel().trace)) == bool(fault)


def test_code_loaded_after_the_warm_up() -> None:
    steps = [Script().add("module", "loadModule").trace, Script().kernel().trace]
    assert checks.late_modules(steps, warm_up=1) == []
    assert checks.late_modules(steps[::-1], warm_up=1)


def test_a_collective_begins_after_the_computation_before_it() -> None:
    assert checks.unordered_collectives(Script().kernel().order(COMPUTE, NCCL).collective("a", NCCL).trace) == []
    assert checks.unordered_collectives(Script().kernel().collective("a").trace) == []
    assert checks.unordered_collectives(Script().kernel().collective("a", NCCL).trace)
    stale = Script().kernel().order(COMPUTE, NCCL).kernel().collective("a", NCCL).trace
    assert checks.unordered_collectives(stale)
    through_host = Script().kernel().add("sync", "streamSynchronize").collective("a", NCCL).trace
    assert checks.unordered_collectives(through_host) == []
    through_third = Script().kernel().order(COMPUTE, SIDE).order(SIDE, NCCL, 78).collective("a", NCCL).trace
    assert checks.unordered_collectives(through_third) == []


def test_computation_that_hides_a_collective() -> None:
    script = Script().collective("a", NCCL).kernel().kernel().order(NCCL, COMPUTE).kernel()
    script.collective("a", NCCL).order(NCCL, COMPUTE).kernel()
    assert [launches for _, launches in checks.hidden_work(script.trace)] == [2, 0]


def traces(*scripts: Script) -> Sequence[Trace]:
    return [script.trace for script in scripts]


def test_collectives_differ_between_ranks() -> None:
    first, second = ranks()
    first.collective("a").collective("b").collective("a", op="allGather")
    second.collective("a").collective("a", op="allGather").collective("b")
    assert checks.differing_collectives(traces(first, second)) == []  # per communicator
    for op, count in (("allGather", 4), ("allReduce", 5)):
        other = Script(1).collective("a", op=op, count=count)
        assert checks.differing_collectives(traces(Script(0).collective("a"), other))
    assert checks.differing_collectives(traces(Script(0).collective("a"), Script(1)))


def test_messages_need_a_partner() -> None:
    assert checks.differing_collectives(traces(Script(0).message("send", 1), Script(1).message("recv", 0))) == []
    assert checks.differing_collectives(traces(Script(0).message("send", 1), Script(1)))
    assert checks.deadlocks(traces(Script(0), Script(1).message("recv", 0)))


def test_two_communicators_in_different_orders() -> None:
    first, second = ranks()
    for script in (first, second):
        script.collective("a", op="allGather").collective("b")
    first.collective("a").collective("b")
    second.collective("b").collective("a")
    assert len(checks.deadlocks(traces(first, second))) == 2
    assert checks.deadlocks(traces(*(Script(r).collective("a").collective("b") for r in (0, 1)))) == []
    # on streams of their own they may still not fit on the GPU together
    first, second = Script(0).collective("a", 1).collective("b", 2), Script(1).collective("b", 2).collective("a", 1)
    assert checks.deadlocks(traces(first, second))


def test_messages_in_both_directions() -> None:
    """A blocking send on either side is a deadlock; on two streams, or in one group, it is none."""
    first, second = Script(0).message("send", 1, "c"), Script(1).message("send", 0, "d")
    first.message("recv", 1, "d")
    second.message("recv", 0, "c")
    assert checks.deadlocks(traces(first, second))
    first, second = Script(0).message("send", 1, "c", 1), Script(1).message("send", 0, "d", 2)
    first.message("recv", 1, "d", 2)
    second.message("recv", 0, "c", 1)
    assert checks.deadlocks(traces(first, second)) == []
    assert checks.deadlocks(traces(first, second), one_queue=True)
    grouped = [Script(r).message("send", 1 - r, group=5).message("recv", 1 - r, group=5) for r in (0, 1)]
    assert checks.deadlocks(traces(*grouped)) == []
    # but a stream that waits for the message it needs first
    first, second = Script(0).message("send", 1, "c", 1), Script(1).message("send", 0, "d", 2).order(2, 1)
    first.order(1, 2).message("recv", 1, "d", 2)
    second.message("recv", 0, "c", 1)
    assert checks.deadlocks(traces(first, second))


def test_a_host_that_waits_before_it_sends() -> None:
    first = Script(0).message("recv", 1, "d", 1).add("sync", "streamSynchronize", 1).message("send", 1, "c", 2)
    second = Script(1).message("recv", 0, "c", 2).add("sync", "streamSynchronize", 2).message("send", 0, "d", 1)
    assert checks.deadlocks(traces(first, second))
    second = Script(1).message("send", 0, "d", 1).message("recv", 0, "c", 2)
    assert checks.deadlocks(traces(first, second)) == []
