"""Where the numbers of a run go besides the console, and what keeps a place that fails from stopping the run."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping
from typing import Protocol

Values = Mapping[str, object]
"""Numbers and words by name, as the records give them."""

PATIENCE_SECONDS = 30.0
CAPACITY = 10_000  # records that wait for a sink; some megabytes


class Sink(Protocol):
    """A place that keeps the numbers of a run. All methods may raise; `Sinks` and `Background` see to that."""

    def record(self, values: Values) -> None:
        """Keep numbers of training or evaluation; ``iteration`` is among them."""

    def event(self, values: Values) -> None:
        """Keep what happened, named by ``event``: a start, a warning, an error; ``iteration`` is among them too."""

    def flush(self) -> None:
        """Bring what was recorded to where it outlives this process."""

    def close(self, failed: bool) -> None:
        """Finish; ``failed`` says that the run ended by an error."""


class BehindError(Exception):
    """A sink does not take what it is given."""


class NotOpenedError(Exception):
    """A sink could not be made; the words are those of the error that kept it from it."""


def always() -> bool:
    """Nothing speaks against writing."""
    return True


class Sinks:
    """Many sinks as one. One that raises is warned of and gets no more until the run is started again."""

    def __init__(self, warn: Callable[[str], None], may_write: Callable[[], bool] = always) -> None:
        """Begin without any.

        Args:
            warn: is told of those that fail, and may itself report to this one.
            may_write: asked each time; from the first no on, nothing is handed on, and no sink is closed.
        """
        self._warn, self._may_write = warn, may_write
        self._sinks: dict[str, Sink] = {}

    def add(self, name: str, make: Callable[[], Sink]) -> None:
        """Take in the sink that ``make`` makes, or warn where that raises."""
        try:
            self._sinks[name] = make()
        except Exception as error:  # whatever it is, the run can do without
            self._lost(name, NotOpenedError(said(error)))

    def record(self, values: Values) -> None:
        """Hand numbers to every sink."""
        self._each(lambda sink: sink.record(values))

    def event(self, values: Values) -> None:
        """Hand an event to every sink."""
        self._each(lambda sink: sink.event(values))

    def flush(self) -> None:
        """Have every sink write out what it holds."""
        self._each(lambda sink: sink.flush())

    def close(self, failed: bool) -> None:
        """Close every sink, in the opposite order of their opening, so that the first can still take warnings."""
        for name in reversed(list(self._sinks)):
            self._use(name, lambda sink: sink.close(failed))
        self._sinks.clear()

    def _each(self, act: Callable[[Sink], None]) -> None:
        for name in list(self._sinks):
            self._use(name, act)

    def _use(self, name: str, act: Callable[[Sink], None]) -> None:
        """Do something with a sink, unless it was lost meanwhile, by the warning of another one's loss."""
        if name in self._sinks and not self._may_write():
            self._sinks.clear()
        if name not in self._sinks:
            return
        try:
            act(self._sinks[name])
        except Exception as error:  # as above
            self._lost(name, error)

    def _lost(self, name: str, error: Exception) -> None:
        self._sinks.pop(name, None)
        what = "nothing" if isinstance(error, NotOpenedError) else "no more"
        self._warn(f"{name} gets {what} of this run: {said(error)}; training goes on")


def said(error: BaseException) -> str:
    """The error's own words in one line, or its kind where it has none."""
    return " ".join(str(error).split()).rstrip(".") or f"it ended by {type(error).__name__}"


class Background:
    """A sink that works in a thread of its own, so that a network or a disk that hangs does not hold up a step."""

    def __init__(
        self,
        make: Callable[[], Sink],
        flushes: bool = True,
        patience: float = PATIENCE_SECONDS,
        capacity: int = CAPACITY,
    ) -> None:
        """Begin to make the sink.

        Args:
            make: called in the thread; may raise.
            flushes: whether a flush is waited for; not where something else has all that the sink is given.
            patience: seconds that `flush` and `close` wait for the thread.
            capacity: calls that may wait for it.
        """
        self._flushes, self._patience = flushes, patience
        self._jobs: queue.Queue[Callable[[Sink], None] | None] = queue.Queue(capacity)
        self._error: Exception | None = None
        self._late = False
        self._thread = threading.Thread(target=self._work, args=(make,), daemon=True)
        self._thread.start()

    def record(self, values: Values) -> None:
        """Hand on. Raises what the sink raised at an earlier call, or `BehindError` when too much waits."""
        self._hand_on(lambda sink: sink.record(values))

    def event(self, values: Values) -> None:
        """Hand on, as `record`."""
        self._hand_on(lambda sink: sink.event(values))

    def flush(self) -> None:
        """Have it written out, and wait for that; not again for a sink that is late, until it has caught up."""
        done = threading.Event()

        def write_out(sink: Sink) -> None:
            sink.flush()
            done.set()
            self._late = False

        self._hand_on(write_out)
        if self._flushes and not self._late and self._thread.is_alive():
            self._late = not self._wait(done)
        self._check()

    def close(self, failed: bool) -> None:
        """Have it closed, and wait for that. Raises as `record`, and `BehindError` when it takes too long."""
        self._hand_on(lambda sink: sink.close(failed))
        self._hand_on(None)
        self._thread.join(self._patience)
        self._check()
        if self._thread.is_alive():
            raise BehindError(f"it did not finish within {self._patience:.0f} s")

    def _wait(self, done: threading.Event) -> bool:
        """Whether ``done`` is set, or the thread has ended, in time."""
        waited, step = 0.0, 0.05
        while not done.wait(step) and self._thread.is_alive():
            waited += step
            if waited >= self._patience:
                return False
        return True

    def _hand_on(self, job: Callable[[Sink], None] | None) -> None:
        self._check()
        try:
            self._jobs.put_nowait(job)
        except queue.Full:
            raise BehindError(f"it has not taken the last {self._jobs.maxsize:,} records") from None

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    def _work(self, make: Callable[[], Sink]) -> None:
        try:
            sink = make()
        except BaseException as error:  # told to the run at its next call, which no library shall end by sys.exit
            self._error = NotOpenedError(said(error))
            return
        try:
            while (job := self._jobs.get()) is not None:
                job(sink)
        except BaseException as error:  # as above
            self._error = error if isinstance(error, Exception) else BehindError(said(error))


def scalars(values: Values) -> dict[str, float]:
    """The numbers among ``values``, as one curve each.

    Words and lists are left out. The name of one of several validation sets goes into the names of its values, after
    ``validation``, as in Megatron-LM.
    """
    of = values.get("validation-set")
    found: dict[str, float] = {}
    for name, value in values.items():
        if isinstance(value, int | float) and not isinstance(value, bool):
            found[name.replace("validation", f"validation-{of}") if of else name] = value
    return found
