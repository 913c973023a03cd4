"""Timers by name, and named ranges in profiles.

On CPUs timers use the host clock, on GPUs CUDA events, without synchronisation inside a step.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import profiler
from torch.profiler import record_function

from megatron.distributed.places import PHASE, PLACE, STEP

NO_SPAN: AbstractContextManager[None] = nullcontext()
"""A span that is not measured."""

Clock = Callable[[str], AbstractContextManager[object]]
"""Returns a context manager that measures its body under a name."""

MAX_UNREAD_SPANS = 256
"""Number of unread CUDA spans after which completed ones are read."""


def no_clock(_: object) -> AbstractContextManager[object]:
    """Measure nothing: the :data:`Clock` for callers without timers."""
    return NO_SPAN


class Stopwatch:
    """Accumulates time spans by name, until :meth:`pop`.

    A GPU span lies between two events on the current stream: it is the time the *device* spent, whatever the host did.
    Events are reused, and completed ones are read on the way, so a window of any length holds few of them. A stream
    under capture is not measured, because captured events would not time the replays.
    """

    def __init__(self, names: Iterable[str] = ()) -> None:
        """Start at zero for each of ``names``; other names appear with their first span."""
        self._seconds = dict.fromkeys(names, 0.0)
        self._running = True
        self._spans: deque[tuple[str, torch.cuda.Event, torch.cuda.Event]] = deque()
        self._free: list[torch.cuda.Event] = []

    @property
    def names(self) -> tuple[str, ...]:
        """All names seen so far."""
        return tuple(self._seconds)

    def span(self, name: str, cuda: bool) -> AbstractContextManager[None]:
        """Measure the body under ``name``; ``cuda`` if the current GPU does the work."""
        if not self._running or (cuda and torch.cuda.is_current_stream_capturing()):
            return NO_SPAN
        return _Span(self, name, cuda)

    def add(self, name: str, seconds: float) -> None:
        """Add ``seconds`` that were measured elsewhere."""
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Do not measure spans that begin inside."""
        was_running = self._running
        self._running = False
        try:
            yield
        finally:
            self._running = was_running

    def pop(self) -> dict[str, float]:
        """Return seconds by name since the last call. Synchronises with the GPU if spans are still running there."""
        self._settle(wait=True)
        taken, self._seconds = self._seconds, dict.fromkeys(self._seconds, 0.0)
        return taken

    def mark(self) -> torch.cuda.Event:
        """Record an event on the current stream."""
        event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def ended(self, name: str, start: torch.cuda.Event) -> None:
        """Record the end of the span that began at ``start``."""
        self._spans.append((name, start, self.mark()))
        if len(self._spans) > MAX_UNREAD_SPANS:
            self._settle(wait=False)

    def _settle(self, wait: bool) -> None:
        """Read completed spans, oldest first; with ``wait``, all of them."""
        while self._spans and (wait or self._spans[0][2].query()):
            name, start, end = self._spans.popleft()
            if wait:
                end.synchronize()
            self.add(name, start.elapsed_time(end) / 1e3)
            self._free += (start, end)


class _Span(AbstractContextManager[None]):
    __slots__ = ("_cuda", "_name", "_start", "_watch")

    def __init__(self, watch: Stopwatch, name: str, cuda: bool) -> None:
        self._watch, self._name, self._cuda = watch, name, cuda

    def __enter__(self) -> None:
        self._start: Any = self._watch.mark() if self._cuda else time.perf_counter()

    def __exit__(self, *_: object) -> None:
        if self._cuda:
            self._watch.ended(self._name, self._start)
        else:
            self._watch.add(self._name, time.perf_counter() - self._start)


COMMUNICATION_PREFIX = "communication "
"""Prefix of the ranges of collectives; the axes of the group follow."""


def profiler_range(name: str, inner: AbstractContextManager[None] = NO_SPAN) -> AbstractContextManager[None]:
    """Return ``inner``, inside a range named ``name`` while a profile is recorded; costs about 1 us otherwise."""
    return _in_range(name, inner) if profiler._is_profiler_enabled else inner


@contextmanager
def _in_range(name: str, inner: AbstractContextManager[None]) -> Iterator[None]:
    with record_function(name), inner:
        yield


@dataclass(frozen=True)
class TimedPhase:
    """A timed part of a step."""

    level: int  # lowest --timing-log-level at which it is timed
    meaning: str


PHASES: dict[str, TimedPhase] = {
    "batch-generator": TimedPhase(0, "getting the micro-batches of the step"),
    "forward-backward": TimedPhase(
        1, "all forward and backward passes of the step, and in a pipeline the waiting for neighbours"
    ),
    "all-grads-sync": TimedPhase(1, "waiting for the gradients of all replicas"),
    "layernorm-grads-all-reduce": TimedPhase(
        1,
        "summing gradients of weights that tensor-parallel ranks share, and of the embedding that the first and the "
        "last stage share",
    ),
    "optimizer": TimedPhase(1, "the whole update"),
    "optimizer-clip-main-grad": TimedPhase(1, "the gradient norm and clipping"),
    "optimizer-inner-step": TimedPhase(1, "the update rule"),
    "optimizer-copy-main-to-model-params": TimedPhase(1, "rounding weights into the compute dtype"),
    "forward-compute": TimedPhase(2, "the forward passes of the micro-batches"),
    "backward-compute": TimedPhase(2, "the backward passes of the micro-batches"),
}
"""All timers; add new ones here. They are the same on every rank, so that ranks can be compared."""

CUDA_GRAPH_PHASES: dict[str, tuple[str, ...]] = {
    "none": (),
    "optimizer": ("optimizer-clip-main-grad", "optimizer-inner-step", "optimizer-copy-main-to-model-params"),
    "step": tuple(name for name in PHASES if name != "batch-generator"),
}
"""Phases inside the replayed graph, by ``--cuda-graph``. They are not logged: times of the few eager steps mislead."""


class Timers:
    """Times the phases of a step up to a level; phases above it cost one dictionary lookup.

    Use ``with timers("optimizer"): ...``. Times are device times (see :class:`Stopwatch`). Phases may nest, and may run
    several times per step.
    """

    def __init__(self, level: int, device: torch.device) -> None:
        """Time the phases up to ``level`` on ``device``."""
        self.watch = Stopwatch(name for name, phase in PHASES.items() if phase.level <= level)
        self.level, self._cuda = level, device.type == "cuda"
        self._texts: dict[str, int] = {}  # of phases, in the place of this process

    def __call__(self, name: str) -> AbstractContextManager[None]:
        """Time the context as the phase ``name`` of `PHASES`; in a profile it is a range at every level.

        It is also the place of this process until the next phase begins.
        """
        self.enter(name)
        return profiler_range(name, NO_SPAN if PHASES[name].level > self.level else self.watch.span(name, self._cuda))

    def enter(self, phase: str, step: int | None = None) -> None:
        """Begin a phase that is not timed: any text, for the place of this process; with a number also a ``step``."""
        offset = self._texts.get(phase)
        if offset is None:
            offset = self._texts[phase] = PLACE.text(phase)
        PLACE.slots[PHASE] = offset
        if step is not None:
            PLACE.slots[STEP] = step

    def read(self, steps: int) -> dict[str, float]:
        """Return seconds per step of each timed phase over the ``steps`` since the last call. Waits for the GPU."""
        return {name: seconds / steps for name, seconds in self.watch.pop().items()}
