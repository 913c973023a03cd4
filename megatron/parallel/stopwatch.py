"""Timers by name: host clock on CPUs, CUDA events on GPUs, without synchronisation inside a step."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import TracebackType

import torch

NOTHING: AbstractContextManager[None] = nullcontext()
"""A span that is not measured."""

Clock = Callable[[str], AbstractContextManager[object]]
"""Returns a context manager that measures its body under a name."""

UNSETTLED = 256
"""Number of unread CUDA spans after which completed ones are read."""


def unmeasured(_: object) -> AbstractContextManager[object]:
    """Measure nothing: the :data:`Clock` for callers without timers."""
    return NOTHING


class Stopwatch:
    """Accumulates time spans by name, until :meth:`take`.

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
        if not self._running:
            return NOTHING
        if not cuda:
            return _HostSpan(self, name)
        return NOTHING if torch.cuda.is_current_stream_capturing() else _DeviceSpan(self, name)

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

    def take(self) -> dict[str, float]:
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
        if len(self._spans) > UNSETTLED:
            self._settle(wait=False)

    def _settle(self, wait: bool) -> None:
        """Read completed spans, oldest first; with ``wait``, all of them."""
        while self._spans and (wait or self._spans[0][2].query()):
            name, start, end = self._spans.popleft()
            if wait:
                end.synchronize()
            self.add(name, start.elapsed_time(end) / 1e3)
            self._free += (start, end)


class _HostSpan(AbstractContextManager[None]):
    __slots__ = ("_began", "_name", "_watch")

    def __init__(self, watch: Stopwatch, name: str) -> None:
        self._watch, self._name = watch, name

    def __enter__(self) -> None:
        self._began = time.perf_counter()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._watch.add(self._name, time.perf_counter() - self._began)


class _DeviceSpan(AbstractContextManager[None]):
    __slots__ = ("_began", "_name", "_watch")

    def __init__(self, watch: Stopwatch, name: str) -> None:
        self._watch, self._name = watch, name

    def __enter__(self) -> None:
        self._began = self._watch.mark()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._watch.ended(self._name, self._began)
