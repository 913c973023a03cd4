"""What is logged, and how a logger receives it.

``TrainRecord`` and ``EvaluationRecord`` name the metrics. Console, JSONL, TensorBoard and W&B implement one protocol;
``Background`` runs a slow one in its own thread.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import queue
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from megatron.data.dataset import SPLIT_LABELS, split_kind, validation_set_name

MetricValues = Mapping[str, object]
"""Metrics or event fields by name."""

LOGGER_TIMEOUT_SECONDS = 30.0  # that flush and close wait for a logger
QUEUE_CAPACITY = 10_000  # queued calls per logger, a few megabytes


class MetricLogger(Protocol):
    """Receives the metrics and events of a run. Methods may raise: `LoggerCollection` handles errors."""

    def record(self, values: MetricValues) -> None:
        """Log metrics of training or evaluation; ``iteration`` is one of them."""

    def event(self, values: MetricValues) -> None:
        """Log an event of the kind ``event``: a start, a warning, an error. ``iteration`` is given too."""

    def flush(self) -> None:
        """Make everything logged so far durable."""

    def close(self, failed: bool) -> None:
        """Finish; ``failed`` if the run ended with an error."""


class LoggerStalledError(Exception):
    """A logger cannot keep up, or did not finish in time."""


class LoggerOpenError(Exception):
    """A logger could not be opened."""


class LoggerCollection:
    """Forwards metrics and events to many loggers. A logger that raises is removed with a warning."""

    def __init__(self, warn: Callable[[str], None], may_write: Callable[[], bool] = lambda: True) -> None:
        """Start without loggers.

        Args:
            warn: called when a logger fails; it may log to this collection.
            may_write: called before every use. Once it returns False, all loggers are dropped without closing them.

        """
        self._warn = warn
        self._may_write = may_write
        self._sinks: dict[str, MetricLogger] = {}

    def add(self, name: str, make: Callable[[], MetricLogger]) -> None:
        """Add the logger that ``make`` returns; warn if it raises."""
        try:
            self._sinks[name] = make()
        except Exception as error:  # no logger is worth the run
            self._remove(name, LoggerOpenError(error_summary(error)))

    def record(self, values: MetricValues) -> None:
        """Log metrics to every logger."""
        self._for_each(lambda sink: sink.record(values))

    def event(self, values: MetricValues) -> None:
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

    def _for_each(self, call: Callable[[MetricLogger], None]) -> None:
        for name in list(self._sinks):
            self._call(name, call)

    def _call(self, name: str, call: Callable[[MetricLogger], None]) -> None:
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
        what = "no data" if isinstance(error, LoggerOpenError) else "no further data"
        self._warn(f"{name} receives {what} from this run: {error_summary(error)}; training continues")


def error_summary(error: BaseException) -> str:
    """Return the error's message in one line, or its type if there is none."""
    return " ".join(str(error).split()).rstrip(".") or f"it raised {type(error).__name__}"


class BackgroundLogger:
    """Runs a logger in its own thread, so that a network or disk that hangs does not delay training."""

    def __init__(
        self,
        make: Callable[[], MetricLogger],
        flushes: bool = True,
        patience: float = LOGGER_TIMEOUT_SECONDS,
        capacity: int = QUEUE_CAPACITY,
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
        self._queue: queue.Queue[Callable[[MetricLogger], None] | None] = queue.Queue(capacity)
        self._error: Exception | None = None
        self._flush_timed_out = False
        self._thread = threading.Thread(target=self._work, args=(make,), daemon=True)
        self._thread.start()

    def record(self, values: MetricValues) -> None:
        """Queue the metrics. Raises the error of an earlier call, or `LoggerStalledError` if the queue is full."""
        self._put(lambda sink: sink.record(values))

    def event(self, values: MetricValues) -> None:
        """Queue the event; raises as `record`."""
        self._put(lambda sink: sink.event(values))

    def flush(self) -> None:
        """Flush the logger and wait for it. After a timeout, do not wait again until it has caught up."""
        done = threading.Event()

        def flush_sink(sink: MetricLogger) -> None:
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
            raise LoggerStalledError(f"it did not finish within {self._timeout:.0f} s")

    def _wait(self, done: threading.Event) -> bool:
        """Wait until ``done`` is set or the thread has ended; return False on timeout."""
        waited, step = 0.0, 0.05
        while not done.wait(step) and self._thread.is_alive():
            waited += step
            if waited >= self._timeout:
                return False
        return True

    def _put(self, job: Callable[[MetricLogger], None] | None) -> None:
        self._raise_error()
        try:
            self._queue.put_nowait(job)
        except queue.Full:
            raise LoggerStalledError(f"it is {self._queue.maxsize:,} records behind") from None

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _work(self, make: Callable[[], MetricLogger]) -> None:
        try:
            sink = make()
        except BaseException as error:  # raised at the next call; a library's sys.exit must not end the run
            self._error = LoggerOpenError(error_summary(error))
            return
        try:
            while (job := self._queue.get()) is not None:
                job(sink)
        except BaseException as error:  # as above
            self._error = error if isinstance(error, Exception) else LoggerStalledError(error_summary(error))


def scalar_metrics(values: MetricValues) -> dict[str, float]:
    """Return the numeric values, without text and lists.

    The name of a validation set is inserted into its metric names after ``validation``, as in Megatron-LM.
    """
    validation_set = values.get("validation-set")
    numbers: dict[str, float] = {}
    for name, value in values.items():
        if isinstance(value, int | float) and not isinstance(value, bool):
            numbers[name.replace("validation", f"validation-{validation_set}") if validation_set else name] = value
    return numbers


class JsonLinesLogger:
    """Appends one JSON object per line. A failing disk causes one warning and never stops the run."""

    def __init__(self, path: Path, warn: Callable[[str], None]) -> None:
        """Open ``path`` for appending."""
        self.path = path
        self._warn = warn
        self._warned = False
        self._incomplete_line = _ends_within_a_line(path)
        self._file = path.open("ab", buffering=0)  # unbuffered, so that errors are raised by write

    def write(self, values: Mapping[str, object]) -> None:
        """Append a line. NaN and infinity become null, because JSON has neither."""
        line = json.dumps({name: _json_number(value) for name, value in values.items()}, allow_nan=False)
        data = (b"\n" if self._incomplete_line else b"") + line.encode() + b"\n"
        try:
            written = self._file.write(data)
        except OSError as error:
            self._warn_once(error.strerror or str(error))
            return
        self._incomplete_line = written != len(data)
        if self._incomplete_line:
            self._warn_once("no space left")

    record = event = write

    def flush(self) -> None:
        """Do nothing: lines are not buffered."""

    def _warn_once(self, reason: str) -> None:
        if not self._warned:
            self._warn(f"{self.path} cannot be written ({reason}): training continues, metrics are lost until it can")
        self._warned = True

    def close(self, failed: bool = False) -> None:
        """Close the file."""
        with contextlib.suppress(OSError):  # nothing is buffered that could be lost
            self._file.close()


def _ends_within_a_line(path: Path) -> bool:
    """Return True if the last line is incomplete after a crash."""
    if not path.exists() or path.stat().st_size == 0:
        return False
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"


def _json_number(value: object) -> object:
    return None if isinstance(value, float) and not math.isfinite(value) else value


@dataclass(frozen=True)
class TimerStats:
    """Time of one timer over all ranks, in seconds per step."""

    longest: float
    shortest: float | None = None  # set for --timing-log-option minmax
    by_rank: tuple[float, ...] | None = None  # set for --timing-log-option all

    def values(self, name: str) -> dict[str, object]:
        """Return the metrics of the timer ``name``."""
        values: dict[str, object] = {f"{name}-time": self.longest}
        if self.shortest is not None:
            values[f"{name}-time-min"] = self.shortest
        if self.by_rank is not None:
            values[f"{name}-time-by-rank"] = list(self.by_rank)
        return values


@dataclass(frozen=True)
class TrainRecord:
    """Metrics of the steps since the previous log line."""

    iteration: int  # of the last step, counted from 1
    consumed_samples: int  # of the whole run so far
    consumed_tokens: int  # of the whole run so far
    loss: float  # mean over the steps with a finite loss, skipped updates included; NaN without any
    grad_norm: float  # of the last step, before clipping
    learning_rate: float  # of the last step
    weight_decay: float  # of the last step
    batch_size: int  # samples in the last step
    loss_scale: float  # of the last step
    seconds_per_step: float  # mean wall-clock time
    tokens_per_second: float  # of all ranks together
    skipped: tuple[int, ...] = ()  # iterations whose update was skipped
    memory_bytes: int | None = None  # peak on the fullest rank: allocated GPU memory; on CPUs the resident set size
    memory_total_bytes: int | None = None  # capacity of that rank's device
    memory_rank: int | None = None  # the fullest rank; None on one rank
    world_size: int = 1
    data_wait: float | None = None  # seconds per step spent waiting for data, on the rank that waited longest
    communication: Mapping[str, float] = field(default_factory=dict)  # waits for other ranks, s/step, by axes
    communication_share: float | None = None  # all communication as a share of the step, 0 to 1
    sent: Mapping[str, float] = field(default_factory=dict)  # bytes per step that a rank sends, by axes
    bubble: float | None = None  # share of the step spent waiting for other pipeline stages; not in communication
    slowest_rank: int | None = None  # rank with the largest own time: the step less its waits for other ranks
    slowest_excess: float | None = None  # how much longer that is than the median rank's, as a share
    timings: Mapping[str, TimerStats] = field(default_factory=dict)  # by timer name
    goodput: float | None = None  # share of the run's lifetime spent in steps that were not lost
    run_seconds: float | None = None  # since the run was first started
    starts: int | None = None  # of the run so far
    spikes: tuple[int, ...] = ()  # those skipped whose gradient was finite, but an outlier
    samples_digest: str | None = None  # hexadecimal digest of all samples consumed so far
    learning_rate_decoupled: float | None = None  # of embedding and output layer, if they have their own
    router_losses: Mapping[str, float] = field(default_factory=dict)  # means without coefficients, by metric name

    def place(self) -> dict[str, int]:
        """Return the progress of the run."""
        return {
            "iteration": self.iteration,
            "consumed-samples": self.consumed_samples,
            "consumed-tokens": self.consumed_tokens,
        }

    def values(self) -> dict[str, object]:
        """Return all metrics by name. Names are Megatron-LM's where it has the metric.

        Metrics that do not apply, such as communication on one rank, are left out.
        """
        return {
            **self.place(),
            "lm loss": self.loss,
            **self.router_losses,
            "grad-norm": self.grad_norm,
            "learning-rate": self.learning_rate,
            "weight-decay": self.weight_decay,
            "batch-size": self.batch_size,
            "loss-scale": self.loss_scale,
            "iteration-time": self.seconds_per_step,
            "tokens-per-second": self.tokens_per_second,
            "tokens-per-second-per-gpu": self.tokens_per_second / self.world_size,
            "skipped-iterations": list(self.skipped),
            "skipped-iterations-count": len(self.skipped),
            "spikes-skipped": len(self.spikes),
            "mem-max-allocated-bytes": self.memory_bytes,
            **self._optional_values(),
        }

    def _optional_values(self) -> dict[str, object]:
        values: dict[str, object] = {
            "decoupled-learning-rate": self.learning_rate_decoupled,
            "mem-max-rank": self.memory_rank,
            "data-wait": self.data_wait,
            **{f"communication-{axes}": seconds for axes, seconds in self.communication.items()},
            "communication-share": self.communication_share,
            **{f"sent-bytes-{axes}": count for axes, count in self.sent.items()},
            "bubble": self.bubble,
            "slowest-rank": self.slowest_rank,
            "slowest-rank-excess": self.slowest_excess,
            "goodput": self.goodput,
            "run-seconds": self.run_seconds,
            "starts": self.starts,
            "samples-digest": self.samples_digest,
        }
        for name, timing in self.timings.items():
            values |= timing.values(name)
        return {name: value for name, value in values.items() if value is not None}


@dataclass(frozen=True)
class EvaluationRecord:
    """Result of one evaluation: the mean loss per token on held-out data."""

    iteration: int  # steps taken before the evaluation
    consumed_samples: int  # in these steps
    consumed_tokens: int  # in these steps
    loss: float  # in nats; NaN if all labels are masked
    split: str = "valid"  # or valid:NAME of one of several validation sets, or test
    average: float | None = None  # loss with the moving average of the weights, if one is kept

    @property
    def kind(self) -> str:
        """Either ``validation`` or ``test``."""
        return SPLIT_LABELS[split_kind(self.split)]

    @property
    def name(self) -> str:
        """Name of the validation set; empty if there is only one."""
        return validation_set_name(self.split)

    @property
    def title(self) -> str:
        """Kind and name, for display."""
        return f"{self.kind} {self.name}".strip()

    @property
    def perplexity(self) -> float:
        """exp(loss); infinite on overflow."""
        try:
            return math.exp(self.loss)
        except OverflowError:
            return math.inf

    def values(self) -> dict[str, object]:
        """Return all metrics by Megatron-LM's names, with ``validation-set`` if there are several sets."""
        return {
            "iteration": self.iteration,
            "consumed-samples": self.consumed_samples,
            "consumed-tokens": self.consumed_tokens,
            **({"validation-set": self.name} if self.name else {}),
            f"lm loss {self.kind}": self.loss,
            f"lm loss {self.kind} ppl": self.perplexity,
            **({} if self.average is None else {f"lm loss {self.kind} ema": self.average}),
        }
