from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from megatron.training.loggers.base import (
    BackgroundLogger,
    LoggerCollection,
    LoggerStalledError,
    Metrics,
    error_summary,
    scalar_metrics,
)


class Kept:
    """Keeps what it gets; raises, or waits for ``gate``, in the method called ``at``."""

    def __init__(self, at: str = "", gate: threading.Event | None = None) -> None:
        self.at, self.gate = at, gate
        self.calls: list[Any] = []

    def _called(self, name: str, value: object) -> None:
        if name == self.at:
            if self.gate is None:
                raise OSError(f"{name} does not work")
            self.gate.wait(10)
        self.calls.append((name, value))

    def log(self, step: int, metrics: Metrics) -> None:
        self._called("log", step)

    def event(self, step: int, kind: str, fields: Metrics) -> None:
        self._called("event", kind)

    def flush(self) -> None:
        self._called("flush", None)

    def close(self) -> None:
        self._called("close", None)


def use(sinks: LoggerCollection | BackgroundLogger) -> None:
    sinks.log(1, {})
    sinks.event(1, "note", {})
    sinks.flush()
    sinks.log(2, {})
    sinks.close()


EVERYTHING = [
    ("log", 1),
    ("event", "note"),
    ("flush", None),
    ("log", 2),
    ("close", None),
]


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("at", ["make", "log", "event", "flush", "close"])
def test_a_sink_that_fails_is_warned_of_once_and_the_others_get_everything(at: str, background: bool) -> None:
    good, warnings = Kept(), list[str]()

    def bad() -> Kept:
        if at == "make":
            raise OSError("make does not work")
        return Kept(at)

    sinks = LoggerCollection(warnings.append)
    sinks.add("bad", (lambda: BackgroundLogger(bad)) if background else bad)
    sinks.add("good", lambda: good)
    use(sinks)
    what = "no data" if at == "make" else "no further data"
    assert warnings == [f"bad receives {what} from this run: {at} does not work; training continues"]
    assert good.calls == EVERYTHING


def test_a_warning_may_go_to_the_sinks_that_are_left() -> None:
    good = Kept()
    sinks = LoggerCollection(lambda text: sinks.event(1, "warning", {"text": text}))
    sinks.add("good", lambda: good)
    sinks.add("bad", lambda: Kept("close"))
    sinks.add("worse", lambda: Kept("log"))
    sinks.log(1, {})
    sinks.close()
    assert [name for name, _ in good.calls] == ["log", "event", "event", "close"]


def test_a_sink_that_fails_at_the_warning_of_another_is_warned_of_once_too() -> None:
    told: list[str] = []

    def warn(text: str) -> None:
        told.append(text.split()[0])
        sinks.event(1, "warning", {})

    sinks = LoggerCollection(warn)
    for number, at in enumerate(("event", "log", "event", "close", "event")):
        sinks.add(f"{number}:{at}", lambda at=at: Kept(at))  # type: ignore[misc]
    sinks.log(1, {})
    sinks.close()
    assert sorted(told) == ["0:event", "1:log", "2:event", "3:close", "4:event"]


class Least:
    """A logger with the two methods that every logger has."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.closed = False

    def log(self, step: int, metrics: Metrics) -> None:
        self.steps.append(step)

    def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize("background", [False, True])
def test_events_and_flushes_are_optional(background: bool) -> None:
    least, warnings = Least(), list[str]()
    loggers = LoggerCollection(warnings.append)
    loggers.add("least", (lambda: BackgroundLogger(lambda: least)) if background else (lambda: least))
    use(loggers)
    assert (least.steps, least.closed, warnings) == ([1, 2], True, [])


def test_a_thread_hands_on_everything_in_order() -> None:
    kept = Kept()
    use(BackgroundLogger(lambda: kept))
    assert kept.calls == EVERYTHING


def test_a_sink_that_hangs_holds_up_one_flush_and_the_end_for_no_longer_than_its_patience() -> None:
    gate = threading.Event()
    kept = Kept("log", gate)
    sink = BackgroundLogger(lambda: kept, timeout=0.2)
    began = time.monotonic()
    for _ in range(100):
        sink.log(1, {})
        sink.flush()
    assert 0.2 <= time.monotonic() - began < 1.0  # once, not a hundred times
    with pytest.raises(LoggerStalledError, match=r"did not finish within 0 s"):
        sink.close()
    assert time.monotonic() - began < 2.0
    gate.set()


def test_a_library_that_exits_ends_its_thread_only() -> None:
    def leave() -> Kept:
        raise SystemExit

    warnings = list[str]()
    sinks = LoggerCollection(warnings.append)
    sinks.add("x", lambda: BackgroundLogger(leave))
    sinks.close()
    assert warnings == ["x receives no data from this run: it raised SystemExit; training continues"]


def test_a_sink_that_caught_up_is_waited_for_again() -> None:
    gate = threading.Event()
    kept = Kept("log", gate)
    sink = BackgroundLogger(lambda: kept, timeout=0.1)
    sink.log(1, {})
    sink.flush()
    gate.set()
    deadline = time.monotonic() + 5
    while len(kept.calls) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    sink._timeout = 10
    sink.log(2, {})
    sink.flush()
    assert kept.calls[-2:] == [("log", 2), ("flush", None)]
    sink.close()


def test_records_do_not_pile_up_before_a_sink_that_hangs() -> None:
    gate = threading.Event()
    sink = BackgroundLogger(lambda: Kept("log", gate), timeout=0.1, capacity=5)
    for _ in range(5):
        sink.log(1, {})
    time.sleep(0.1)  # the first of them is taken, and hangs
    sink.log(1, {})
    with pytest.raises(LoggerStalledError, match="is 5 records behind"):
        sink.log(1, {})
    gate.set()


def test_numbers_are_told_from_words_and_sets_by_name() -> None:
    values = {
        "iteration": 3,
        "lm loss": 2.5,
        "mfu": None,
        "text": "x",
        "skipped-iterations": [1, 2],
        "skipped-iterations-count": 2,
        "flag": True,
        "x-time-by-rank": [0.5],
    }
    assert scalar_metrics(values) == {"iteration": 3, "lm loss": 2.5, "skipped-iterations-count": 2}
    of_one = {"validation-set": "wiki", "lm loss validation": 2.0, "lm loss validation ppl": 7.4, "iteration": 3}
    assert scalar_metrics(of_one) == {
        "lm loss validation-wiki": 2.0,
        "lm loss validation-wiki ppl": 7.4,
        "iteration": 3,
    }


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (OSError(28, "No space left on device"), "[Errno 28] No space left on device"),
        (ValueError("two\n  lines.\n"), "two lines"),
        (KeyboardInterrupt(), "it raised KeyboardInterrupt"),
    ],
)
def test_what_an_error_says_fits_into_a_sentence(error: BaseException, told: str) -> None:
    assert error_summary(error) == told
