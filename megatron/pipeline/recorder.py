"""When each action of a pipeline ran: a timeline as the simulator makes them, of what happened.

On CPUs times are those of the machine's clock, so that ranks on one machine share it, and others are as far apart as
their clocks. On GPUs they lie between events on the stream that computes, and begin at a barrier of the pipeline's
ranks. (The code for GPUs has not been run on one.)
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch

from megatron.parallel import comm
from megatron.parallel.comm import Group
from megatron.parallel.stopwatch import NOTHING, unmeasured
from megatron.pipeline.actions import Action
from megatron.pipeline.runtime import Pipeline
from megatron.pipeline.simulate import Interval, Timeline


class Recorder:
    """Notes the start and the end of this rank's actions; :meth:`timeline` puts the ranks together."""

    def __init__(self, group: Group, device: torch.device) -> None:
        """Begin; collective on GPUs.

        Args:
            group: the ranks of this pipeline, in its order.
            device: where this rank computes.
        """
        self._group, self._cuda = group, device.type == "cuda"
        self._seconds: list[Interval] = []
        self._events: list[tuple[Action, torch.cuda.Event, torch.cuda.Event]] = []
        if self._cuda:
            comm.all_reduce(torch.zeros(1, device=device), group)
            self._origin = _mark()

    def __call__(self, action: Action) -> AbstractContextManager[None]:
        """Note when what is inside runs. A stream that is being captured is not at work, and not noted."""
        if not self._cuda:
            return self._on_host(action)
        return NOTHING if torch.cuda.is_current_stream_capturing() else self._on_device(action)

    @contextmanager
    def _on_host(self, action: Action) -> Iterator[None]:
        start = time.time()
        yield
        self._seconds.append(Interval(action, start, time.time()))

    @contextmanager
    def _on_device(self, action: Action) -> Iterator[None]:
        start = _mark()
        yield
        self._events.append((action, start, _mark()))

    def timeline(self, name: str) -> Timeline:
        """What all ranks of the pipeline have noted, from 0 s on, without transfers; collective.

        Args:
            name: of the schedule.
        """
        ranks = comm.all_gather_objects(self._intervals(), self._group)
        origin = min((interval.start for intervals in ranks for interval in intervals), default=0.0)
        moved = (tuple(Interval(action, a - origin, b - origin) for action, a, b in intervals) for intervals in ranks)
        return Timeline(name, tuple(moved))

    def _intervals(self) -> list[Interval]:
        for action, start, end in self._events:
            end.synchronize()
            since = self._origin.elapsed_time(start) / 1e3
            self._seconds.append(Interval(action, since, since + start.elapsed_time(end) / 1e3))
        self._events.clear()
        return self._seconds


def _mark() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


@contextmanager
def recording(pipeline: Pipeline, group: Group, device: torch.device) -> Iterator[Recorder]:
    """Record what ``pipeline`` runs inside.

    Args:
        pipeline: of this rank.
        group: the ranks of the pipeline, in its order.
        device: where this rank computes.
    """
    recorder = Recorder(group, device)
    pipeline.record = recorder
    try:
        yield recorder
    finally:
        pipeline.record = unmeasured
