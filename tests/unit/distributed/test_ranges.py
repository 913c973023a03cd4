from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.profiler import ProfilerActivity, profile

from megatron.distributed.timing import profiler_range

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
