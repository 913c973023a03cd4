"""Seconds added up by name: of the host's clock on CPUs, of the device's own on GPUs, which nothing here waits for."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import TracebackType

import torch

NOTHING: AbstractContextManager[None] = nullcontext()
"""A span that nobody measures."""

Clock = Callable[[str], AbstractContextManager[object]]
"""Measures what runs inside, under a name."""

UNSETTLED = 256
"""Spans of a GPU that may wait for their end before the oldest are asked whether they have come to it."""


def unmeasured(_: object) -> AbstractContextManager[object]:
    """The clock of those who want no times."""
    return NOTHING


class Stopwatch:
    """Adds up spans of time under names, until :meth:`take`.

    A GPU's span lies between two events on its current stream: how long the *device* was at it, or stood still for it,
    whatever the host did meanwhile. Events are used again, and those that have happened are settled on the way, so
    that a window of any length holds few of them. A stream that is being captured is not measured: the captured
    events would not tell when its replays ran.
    """

    def __init__(self, names: Iterable[str] = ()) -> None:
        """Begin at nothing for each of ``names``; others appear with their first span."""
        self._seconds = dict.fromkeys(names, 0.0)
        self._running = True
        self._spans: deque[tuple[str, torch.cuda.Event, torch.cuda.Event]] = deque()
        self._free: list[torch.cuda.Event] = []

    @property
    def names(self) -> tuple[str, ...]:
        """All names so far."""
        return tuple(self._seconds)

    def span(self, name: str, cuda: bool) -> AbstractContextManager[None]:
        """Count what is inside under ``name``; ``cuda`` says whether the current GPU does it."""
        if not self._running:
            return NOTHING
        if not cuda:
            return _HostSpan(self, name)
        return NOTHING if torch.cuda.is_current_stream_capturing() else _DeviceSpan(self, name)

    def add(self, name: str, seconds: float) -> None:
        """Count ``seconds`` that were measured elsewhere."""
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Nothing that begins inside is counted."""
        before, self._running = self._running, False
        try:
            yield
        finally:
            self._running = before

    def take(self) -> dict[str, float]:
        """Seconds by name since the last call. Waits for the GPU, where it has spans that have not ended."""
        self._settle(wait=True)
        taken, self._seconds = self._seconds, dict.fromkeys(self._seconds, 0.0)
        return taken

    def mark(self) -> torch.cuda.Event:
        """This moment of the current stream."""
        event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def ended(self, name: str, began: torch.cuda.Event) -> None:
        """Note that a span has reached its end in the stream."""
        self._spans.append((name, began, self.mark()))
        if len(self._spans) > UNSETTLED:
            self._settle(wait=False)

    def _settle(self, wait: bool) -> None:
        """Add up the spans that are over: all of them when told to ``wait``, else up to the first that is not."""
        while self._spans and (wait or self._spans[0][2].query()):
            name, began, end = self._spans.popleft()
            if wait:
                end.synchronize()
            self.add(name, began.elapsed_time(end) / 1e3)
            self._free += (began, end)


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
