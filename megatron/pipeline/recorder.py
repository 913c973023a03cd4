"""Measure when each action of a pipeline ran, as a timeline in the simulator's form.

On CPUs times are from the machine's clock, so ranks on different machines differ by their clocks' offset. On GPUs they
are from events on the compute stream, relative to a barrier of the pipeline's ranks. (The GPU code has not been run.)
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from megatron.distributed import comm
from megatron.distributed.comm import Group
from megatron.distributed.timing import NO_SPAN, no_clock
from megatron.pipeline.actions import Action
from megatron.pipeline.runtime import Pipeline
from megatron.pipeline.simulate import Interval, Timeline


class PipelineRecorder:
    """Records start and end of this rank's actions; :meth:`timeline` gathers all ranks."""

    def __init__(self, group: Group, device: torch.device) -> None:
        """Start recording; collective on GPUs.

        Args:
            group: the ranks of this pipeline, in its order.
            device: of this rank.
        """
        self._group, self._cuda = group, device.type == "cuda"
        self._seconds: list[Interval] = []
        self._events: list[tuple[Action, torch.cuda.Event, torch.cuda.Event]] = []
        if self._cuda:
            comm.all_reduce(torch.zeros(1, device=device), group)
            self._origin = _record_event()

    def __call__(self, action: Action) -> AbstractContextManager[None]:
        """Return a context that records when its body runs; a stream in capture is not recorded."""
        return NO_SPAN if self._cuda and torch.cuda.is_current_stream_capturing() else self._measured(action)

    @contextmanager
    def _measured(self, action: Action) -> Iterator[None]:
        if self._cuda:
            start = _record_event()
            yield
            self._events.append((action, start, _record_event()))
        else:
            began = time.time()
            yield
            self._seconds.append(Interval(action, began, time.time()))

    def timeline(self, name: str) -> Timeline:
        """Return the records of all ranks, starting at 0 s, without transfers; collective; ``name`` names it."""
        for action, start, end in self._events:
            end.synchronize()
            since = self._origin.elapsed_time(start) / 1e3
            self._seconds.append(Interval(action, since, since + start.elapsed_time(end) / 1e3))
        self._events.clear()
        mine: list[list[Any]] = [[*action, start, end] for action, start, end in self._seconds]
        ranks = comm.all_gather_objects(mine, self._group)
        origin = min((start for intervals in ranks for *_, start, _ in intervals), default=0.0)
        moved = (
            tuple(Interval(Action(*action), start - origin, end - origin) for *action, start, end in intervals)
            for intervals in ranks
        )
        return Timeline(name, tuple(moved))


def _record_event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


@contextmanager
def record_timeline(pipeline: Pipeline, group: Group, device: torch.device) -> Iterator[PipelineRecorder]:
    """Record the actions that ``pipeline`` runs inside the context; arguments as for :class:`PipelineRecorder`."""
    recorder = PipelineRecorder(group, device)
    pipeline.record = recorder
    try:
        yield recorder
    finally:
        pipeline.record = no_clock
