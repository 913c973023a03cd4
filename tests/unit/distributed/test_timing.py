"""Stopwatches, timers of phases, and ranges in profiles."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from megatron.distributed import timing
from megatron.distributed.timing import NO_SPAN, PHASES, Stopwatch, Timers, profiler_range

CPU = torch.device("cpu")


def test_spans_of_the_host_add_up_by_name() -> None:
    watch = Stopwatch(["tp", "dp"])
    for _ in range(3):
        with watch.span("tp", cuda=False):
            time.sleep(0.002)
    taken = watch.pop()
    assert 0.006 <= taken["tp"] < 0.1
    assert taken["dp"] == 0.0
    assert watch.pop() == {"tp": 0.0, "dp": 0.0}


def test_pauses_count_nothing_and_nest() -> None:
    watch = Stopwatch(["tp"])
    with watch.paused():
        with watch.paused():
            assert watch.span("tp", cuda=False) is NO_SPAN
        assert watch.span("tp", cuda=True) is NO_SPAN
    with watch.span("tp", cuda=False):
        pass
    assert watch.pop()["tp"] > 0


def test_a_span_that_ends_in_an_error_is_counted() -> None:
    watch = Stopwatch()
    with pytest.raises(KeyError), watch.span("tp", cuda=False):
        raise KeyError
    assert watch.names == ("tp",)
    assert watch.pop()["tp"] > 0


@dataclass
class Gpu:
    """A stream that is some milliseconds long; the device has worked it off up to ``done``."""

    length: float = 0.0
    done: float = 0.0
    capturing: bool = False
    events: list[Event] = field(default_factory=list)
    waits: int = 0


class Event:
    """Stands in for torch.cuda.Event."""

    gpu: Gpu

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        self.gpu.events.append(self)

    def record(self) -> None:
        self.at = self.gpu.length

    def query(self) -> bool:
        return self.at <= self.gpu.done

    def synchronize(self) -> None:
        self.gpu.waits += 1
        self.gpu.done = max(self.gpu.done, self.at)

    def elapsed_time(self, end: Event) -> float:
        assert end.query(), "torch raises when an event has not happened"
        return end.at - self.at


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    gpu = Gpu()
    monkeypatch.setattr(Event, "gpu", gpu, raising=False)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: gpu.capturing)
    return gpu


def test_spans_of_a_gpu_match_its_stream(gpu: Gpu) -> None:
    """However fast the host is: what counts is what lies between the events."""
    watch = Stopwatch()
    for name, milliseconds in (("tp", 3.0), ("dp", 5.0), ("tp", 4.0)):
        gpu.length += 10.0  # other work
        with watch.span(name, cuda=True):
            gpu.length += milliseconds
    assert gpu.waits == 0
    assert watch.pop() == pytest.approx({"tp": 0.007, "dp": 0.005})


def test_a_long_window_needs_few_events_and_never_waits(gpu: Gpu) -> None:
    """The device is 50 ms behind the host throughout."""
    watch = Stopwatch()
    for _ in range(20 * timing.MAX_UNREAD_SPANS):
        with watch.span("tp", cuda=True):
            gpu.length += 1.0
        gpu.done = gpu.length - 50.0
    assert gpu.waits == 0
    assert len(gpu.events) <= 2 * timing.MAX_UNREAD_SPANS + 4
    assert watch.pop()["tp"] == pytest.approx(20 * timing.MAX_UNREAD_SPANS / 1e3)


def test_a_stream_that_is_captured_is_left_alone(gpu: Gpu) -> None:
    watch, gpu.capturing = Stopwatch(), True
    with watch.span("tp", cuda=True):
        pass
    assert (gpu.events, watch.pop()) == ([], {})


@pytest.mark.parametrize("level", [0, 1, 2])
def test_a_level_times_its_phases_and_lower_levels(level: int) -> None:
    timers = Timers(level, CPU)
    for name in PHASES:
        with timers(name):
            pass
    assert {name for name, seconds in timers.read(1).items() if seconds > 0} == {
        name for name, phase in PHASES.items() if phase.level <= level
    }


def test_untimed_spans_share_one_context() -> None:
    assert Timers(0, CPU)("optimizer") is NO_SPAN
    with pytest.raises(KeyError):
        Timers(2, CPU)("optimiser")


def test_phases_nest_and_are_reported_per_step() -> None:
    timers = Timers(1, CPU)
    for _ in range(4):
        with timers("optimizer"):
            with timers("optimizer-inner-step"):
                time.sleep(0.002)
            time.sleep(0.001)
    read = timers.read(steps=2)
    assert 0.004 <= read["optimizer-inner-step"] < 0.05
    assert read["optimizer"] - read["optimizer-inner-step"] >= 0.002
    assert set(timers.read(steps=1).values()) == {0.0}


entered: list[str] = []


@contextmanager
def noted(name: str) -> Iterator[None]:
    entered.append(name)
    yield


def test_a_span_is_a_range_while_a_profile_is_recorded() -> None:
    with (
        profile(activities=[ProfilerActivity.CPU]) as trace,
        profiler_range("outer", noted("clock")),
        profiler_range("inner"),
    ):
        torch.ones(1)
    with profiler_range("later", noted("other clock")):
        torch.ones(1)
    found = {event.name for event in trace.events()}
    assert {"outer", "inner"} <= found
    assert "later" not in found
    assert entered == ["clock", "other clock"]
