"""Timing on a GPU: the times of the events, and no synchronization."""

from __future__ import annotations

import os
import time

import pytest
import torch

from megatron.distributed import timing
from megatron.distributed.comm import Group
from megatron.distributed.timing import Timers

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif("PYTEST_XDIST_WORKER" in os.environ, reason="measures time, and others are at the GPU"),
]


def busy(milliseconds: float) -> None:
    """Keep the stream at work for at least that long, at any clock up to 2 GHz; the host goes on at once."""
    torch.cuda._sleep(int(milliseconds * 2e6))


def test_a_timer_reports_how_long_the_device_was_at_it(gpu: torch.device) -> None:
    timers = Timers(1, gpu)
    busy(1)  # the first kernel of a process takes the host longer
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(3):
        busy(20)
        with timers("optimizer"):
            busy(50)
    issued = time.perf_counter() - began
    seconds = timers.read(steps=3)["optimizer"]
    assert issued < 0.05, "the host was kept waiting"
    assert 0.05 <= seconds < 0.15


def test_a_stream_that_waits_for_another_stands_still(gpu: torch.device) -> None:
    """As it does for a collective: 50 ms of which 30 are hidden behind other work are 20."""
    group, other = Group((0, 1), 0, None, "tp"), torch.cuda.Stream()
    x = torch.zeros(1, device=gpu)
    for hidden, exposed in ((0, 50), (30, 20), (80, 0)):
        torch.cuda.synchronize()
        with torch.cuda.stream(other):
            busy(50)
        if hidden:
            busy(hidden)
        with group.blocked(x):
            torch.cuda.current_stream().wait_stream(other)
        waited = group.meter.pop()["tp"] * 1e3
        assert exposed * 0.9 - 1 <= waited <= exposed * 1.5 + 2


def test_thousands_of_spans_need_no_wait_and_few_events(gpu: torch.device) -> None:
    watch = timing.Stopwatch()
    x = torch.zeros(1, device=gpu)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(20 * timing.MAX_UNREAD_SPANS):
            with watch.span("tp", cuda=True):
                x += 1
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert 0 < watch.pop()["tp"] < 10


def test_a_captured_stream_is_not_measured(gpu: torch.device) -> None:
    watch, graph, x = timing.Stopwatch(), torch.cuda.CUDAGraph(), torch.zeros(1, device=gpu)
    x += 0
    with torch.cuda.graph(graph), watch.span("tp", cuda=True):
        x += 1
    graph.replay()
    assert (x.item(), watch.pop()) == (1.0, {})
