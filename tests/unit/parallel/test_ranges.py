from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.profiler import ProfilerActivity, profile

from megatron.parallel.ranges import span

entered: list[str] = []


@contextmanager
def noted(name: str) -> Iterator[None]:
    entered.append(name)
    yield


def test_a_span_is_a_range_while_a_profile_is_recorded() -> None:
    with profile(activities=[ProfilerActivity.CPU]) as trace, span("outer", noted("clock")), span("inner"):
        torch.ones(1)
    with span("later", noted("other clock")):
        torch.ones(1)
    found = {event.name for event in trace.events()}
    assert {"outer", "inner"} <= found
    assert "later" not in found
    assert entered == ["clock", "other clock"]
