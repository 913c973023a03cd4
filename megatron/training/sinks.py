"""Interface of metric loggers, and wrappers that keep a failing or slow logger from stopping the run."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping
from typing import Protocol

Values = Mapping[str, object]
"""Metrics or event fields by name."""

PATIENCE_SECONDS = 30.0  # that flush and close wait for a logger
CAPACITY = 10_000  # queued calls per logger, a few megabytes


class Sink(Protocol):
    """Receives the metrics and events of a run. Methods may raise: `LoggerCollection` handles errors."""

    def record(self, values: Values) -> None:
        """Log metrics of training or evaluation; ``iteration`` is one of them."""

    def event(self, values: Values) -> None:
        """Log an event of the kind ``event``: a start, a warning, an error. ``iteration`` is given too."""

    def flush(self) -> None:
        """Make everything logged so far durable."""

    def close(self, failed: bool) -> None:
        """Finish; ``failed`` if the run ended with an error."""


class BehindError(Exception):
    """A logger cannot keep up, or did not finish in time."""


class NotOpenedError(Exception):
    """A logger could not be opened."""


class Sinks:
    """Forwards metrics and events to many loggers. A logger that raises is removed with a warning."""

    def __init__(self, warn: Callable[[str], None], may_write: Callable[[], bool] = lambda: True) -> None:
        """Start without loggers.

        Args:
            warn: called when a logger fails; it may log to this collection.
            may_write: called before every use. Once it returns False, all loggers are dropped without closing them.

        """
        self._warn = warn
        self._may_write = may_write
        self._sinks: dict[str, Sink] = {}

    def add(self, name: str, make: Callable[[], Sink]) -> None:
        """Add the logger that ``make`` returns; warn if it raises."""
        try:
            self._sinks[name] = make()
        except Exception as error:  # no logger is worth the run
            self._remove(name, NotOpenedError(said(error)))

    def record(self, values: Values) -> None:
        """Log metrics to every logger."""
        self._for_each(lambda sink: sink.record(values))

    def event(self, values: Values) -> None:
        """Log an event to every logger."""
        self._for_each(lambda sink: sink.event(values))

    def flush(self) -> None:
        """Flush every logger."""
        self._for_each(lambda sink: sink.flush())

    def close(self, failed: bool) -> None:
        """Close every logger, the last one first, so that the first still receives warnings."""
        for name in reversed(list(self._sinks)):
            self._call(name, lambda sink: sink.close(failed))
        self._sinks.clear()

    def _for_each(self, call: Callable[[Sink], None]) -> None:
        for name in list(self._sinks):
            self._call(name, call)

    def _call(self, name: str, call: Callable[[Sink], None]) -> None:
        if name in self._sinks and not self._may_write():
            self._sinks.clear()
        if name not in self._sinks:  # the warning about another logger may have removed this one
            return
        try:
            call(self._sinks[name])
        except Exception as error:  # no logger is worth the run
            self._remove(name, error)

    def _remove(self, name: str, error: Exception) -> None:
        self._sinks.pop(name, None)
        what = "no data" if isinstance(error, NotOpenedError) else "no further data"
        self._warn(f"{name} receives {what} from this run: {said(error)}; training continues")


def said(error: BaseException) -> str:
    """Return the error's message in one line, or its type if there is none."""
    return " ".join(str(error).split()).rstrip(".") or f"it raised {type(error).__name__}"


class Background:
    """Runs a logger in its own thread, so that a network or disk that hangs does not delay training."""

    def __init__(
        self,
        make: Callable[[], Sink],
        flushes: bool = True,
        patience: float = PATIENCE_SECONDS,
        capacity: int = CAPACITY,
    ) -> None:
        """Start the thread, which opens the logger.

        Args:
            make: opens the logger; called in the thread, may raise.
            flushes: whether `flush` waits; False if the data is also kept elsewhere.
            patience: seconds that `flush` and `close` wait.
            capacity: maximum number of queued calls.

        """
        self._flushes = flushes
        self._timeout = patience
        self._queue: queue.Queue[Callable[[Sink], None] | None] = queue.Queue(capacity)
        self._error: Exception | None = None
        self._flush_timed_out = False
        self._thread = threading.Thread(target=self._work, args=(make,), daemon=True)
        self._thread.start()

    def record(self, values: Values) -> None:
        """Queue the metrics. Raises the error of an earlier call, or `LoggerStalledError` if the queue is full."""
        self._put(lambda sink: sink.record(values))

    def event(self, values: Values) -> None:
        """Queue the event; raises as `record`."""
        self._put(lambda sink: sink.event(values))

    def flush(self) -> None:
        """Flush the logger and wait for it. After a timeout, do not wait again until it has caught up."""
        done = threading.Event()

        def flush_sink(sink: Sink) -> None:
            sink.flush()
            done.set()
            self._flush_timed_out = False

        self._put(flush_sink)
        if self._flushes and not self._flush_timed_out and self._thread.is_alive():
            self._flush_timed_out = not self._wait(done)
        self._raise_error()

    def close(self, failed: bool) -> None:
        """Close the logger and wait for it. Raises as `record`, and `LoggerStalledError` after the timeout."""
        self._put(lambda sink: sink.close(failed))
        self._put(None)
        self._thread.join(self._timeout)
        self._raise_error()
        if self._thread.is_alive():
            raise BehindError(f"it did not finish within {self._timeout:.0f} s")

    def _wait(self, done: threading.Event) -> bool:
        """Wait until ``done`` is set or the thread has ended; return False on timeout."""
        waited, step = 0.0, 0.05
        while not done.wait(step) and self._thread.is_alive():
            waited += step
            if waited >= self._timeout:
                return False
        return True

    def _put(self, job: Callable[[Sink], None] | None) -> None:
        self._raise_error()
        try:
            self._queue.put_nowait(job)
        except queue.Full:
            raise BehindError(f"it is {self._queue.maxsize:,} records behind") from None

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _work(self, make: Callable[[], Sink]) -> None:
        try:
            sink = make()
        except BaseException as error:  # raised at the next call; a library's sys.exit must not end the run
            self._error = NotOpenedError(said(error))
            return
        try:
            while (job := self._queue.get()) is not None:
                job(sink)
        except BaseException as error:  # as above
            self._error = error if isinstance(error, Exception) else BehindError(said(error))


def scalars(values: Values) -> dict[str, float]:
    """Return the numeric values, without text and lists.

    The name of a validation set is inserted into its metric names after ``validation``, as in Megatron-LM.
    """
    validation_set = values.get("validation-set")
    numbers: dict[str, float] = {}
    for name, value in values.items():
        if isinstance(value, int | float) and not isinstance(value, bool):
            numbers[name.replace("validation", f"validation-{validation_set}") if validation_set else name] = value
    return numbers
