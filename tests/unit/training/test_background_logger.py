from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch

from megatron.config.model import ModelConfig
from megatron.config.run import RunConfig, TrainingConfig
from megatron.training.loggers.base import LoggerFailedError, Metrics, error_summary, scalar_metrics
from megatron.training.loggers.run_logger import BackgroundLogger, RunLogger


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


def run_log() -> RunLogger:
    """A run without loggers of its own, after its first step."""
    config = RunConfig(model=ModelConfig(vocab_size=64), training=TrainingConfig(seq_length=8, train_iters=1))
    log = RunLogger(config, world_size=1, device=torch.device("cpu"))
    log.stepped(1, 1)
    return log


def use(log: RunLogger) -> None:
    log.log({})
    log.note("")
    log.flush()
    log.stepped(2, 2)
    log.log({})
    log.close()


def warnings(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [line.removeprefix("warning: ") for line in capsys.readouterr().err.splitlines()]


EVERYTHING = [
    ("log", 1),
    ("event", "note"),
    ("flush", None),
    ("log", 2),
    ("close", None),
]


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("at", ["make", "log", "event", "flush", "close"])
def test_a_sink_that_fails_is_warned_of_once_and_the_others_get_everything(
    at: str, background: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    good = Kept()

    def bad() -> Kept:
        if at == "make":
            raise OSError("make does not work")
        return Kept(at)

    log = run_log()
    log.add("good", lambda: good)
    log.add("bad", (lambda: BackgroundLogger(bad)) if background else bad)
    use(log)
    what = "no data" if at == "make" else "no further data"
    assert warnings(capsys) == [f"bad receives {what} from this run: {at} does not work; training continues"]
    assert [call for call in good.calls if call != ("event", "warning")] == EVERYTHING
    assert len(good.calls) == len(EVERYTHING) + 1  # the warning goes to the loggers that are left


def test_a_warning_may_go_to_the_sinks_that_are_left() -> None:
    good, log = Kept(), run_log()
    log.add("good", lambda: good)
    log.add("bad", lambda: Kept("close"))
    log.add("worse", lambda: Kept("log"))
    log.log({})
    log.close()
    assert [name for name, _ in good.calls] == ["log", "event", "event", "close"]


def test_a_sink_that_fails_at_the_warning_of_another_is_warned_of_once_too(capsys: pytest.CaptureFixture[str]) -> None:
    log = run_log()
    for number, at in enumerate(("event", "log", "event", "close", "event")):
        log.add(f"{number}:{at}", lambda at=at: Kept(at))  # type: ignore[misc]
    log.log({})
    log.close()
    printed = [text.split()[0] for text in warnings(capsys)]
    assert sorted(printed) == ["0:event", "1:log", "2:event", "3:close", "4:event"]


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
def test_events_and_flushes_are_optional(background: bool, capsys: pytest.CaptureFixture[str]) -> None:
    least, log = Least(), run_log()
    log.add("least", (lambda: BackgroundLogger(lambda: least)) if background else (lambda: least))
    use(log)
    assert (least.steps, least.closed, warnings(capsys)) == ([1, 2], True, [])


def test_a_thread_hands_on_everything_in_order() -> None:
    kept, log = Kept(), run_log()
    log.add("kept", lambda: BackgroundLogger(lambda: kept))
    use(log)
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
    with pytest.raises(LoggerFailedError, match=r"did not finish within 0 s"):
        sink.close()
    assert time.monotonic() - began < 2.0
    gate.set()


def test_a_library_that_exits_ends_its_thread_only(capsys: pytest.CaptureFixture[str]) -> None:
    def leave() -> Kept:
        raise SystemExit

    log = run_log()
    log.add("x", lambda: BackgroundLogger(leave))
    log.close()
    assert warnings(capsys) == ["x receives no data from this run: it raised SystemExit; training continues"]


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
    with pytest.raises(LoggerFailedError, match="is 5 records behind"):
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
