"""The seam between a run and whatever records its metrics: names, protocol, and error handling.

`METRICS` names every metric of a log line and an evaluation. Console, JSONL, TensorBoard and W&B implement
`MetricLogger`, as may users' plugins. `LoggerCollection` forwards to many loggers and removes one that raises;
`BackgroundLogger` runs a slow one in its own thread.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

LOGGER_TIMEOUT_SECONDS = 30.0  # that flush and close wait for a logger
QUEUE_CAPACITY = 10_000  # queued calls per logger, a few megabytes

Metrics = Mapping[str, Any]
"""Values by metric name, or event fields by name: numbers, texts, lists of numbers, or None if unknown."""


class Metric(NamedTuple):
    """Unit and meaning of a metric."""

    unit: str
    help: str


METRICS = {
    "iteration": Metric("steps", "number of the step, from 1"),
    "consumed-samples": Metric("samples", "samples of all steps so far"),
    "consumed-tokens": Metric("tokens", "tokens of all steps so far"),
    "lm loss": Metric("nats per token", "mean over the steps with a finite loss, skipped updates included"),
    "seq_load_balancing_loss": Metric("", "router loss per sequence, without coefficient, mean over layers"),
    "load_balancing_loss": Metric("", "router loss per micro-batch, without coefficient, mean over layers"),
    "z_loss": Metric("", "squared log-partition of the routers, without coefficient, mean over layers"),
    "grad-norm": Metric("", "global gradient norm of the last step, before clipping"),
    "learning-rate": Metric("", "of the last step"),
    "decoupled-learning-rate": Metric("", "learning rate of embedding and output layer, with --decoupled-lr"),
    "weight-decay": Metric("", "of the last step"),
    "batch-size": Metric("samples", "of the last step"),
    "loss-scale": Metric("", "of the last step"),
    "iteration-time": Metric("seconds per step", "mean wall-clock time"),
    "tokens-per-second": Metric("tokens/s", "of all ranks together"),
    "tokens-per-second-per-gpu": Metric("tokens/s", "of one rank"),
    "throughput": Metric("TFLOP/s", "of one rank, as counted by Megatron-LM"),
    "mfu": Metric("0 to 1", "model FLOPs utilisation by 6N + 12Lhs; None if the peak is unknown"),
    "mfu-causal": Metric("0 to 1", "utilisation that counts unmasked attention scores only"),
    "hfu": Metric("0 to 1", "utilisation including recomputation"),
    "skipped-iterations": Metric("list of steps", "steps whose update was skipped"),
    "skipped-iterations-count": Metric("steps", "their number"),
    "spikes-skipped": Metric("steps", "number of skipped steps whose gradient was finite, but an outlier"),
    "data-wait": Metric("seconds per step", "wait for data, on the rank that waited longest"),
    "communication-AXES": Metric("seconds per step", "wait for other ranks by mesh axes, mean over ranks"),
    "communication-share": Metric("0 to 1", "all of these as a share of the step"),
    "sent-bytes-AXES": Metric("bytes per step", "bytes that a rank sends by mesh axes, mean over ranks"),
    "bubble": Metric("0 to 1", "share of the step spent waiting for other pipeline stages; not in communication"),
    "slowest-rank": Metric("rank", "rank with the largest own time: the step less its waits for other ranks"),
    "slowest-rank-excess": Metric("0 to 1", "excess of that time over the median rank's"),
    "mem-max-allocated-bytes": Metric("bytes", "peak of the fullest rank: GPU memory, or resident set size on CPUs"),
    "mem-max-rank": Metric("rank", "the fullest rank"),
    "goodput": Metric("0 to 1", "share of run-seconds spent in steps that were not lost"),
    "run-seconds": Metric("seconds", "time since the run was first started"),
    "starts": Metric("", "starts of the run so far"),
    "samples-digest": Metric("16 digits", "digest of all samples consumed so far"),
    "TIMER-time": Metric("seconds per step", "longest time of a timer on any rank"),
    "TIMER-time-min": Metric("seconds per step", "shortest, with --timing-log-option minmax"),
    "TIMER-time-by-rank": Metric("list of seconds", "time of each rank, with --timing-log-option all"),
    "world-size": Metric("ranks", "number of ranks"),
    "lm loss validation": Metric("nats per token", "mean over the evaluation batches"),
    "lm loss validation ppl": Metric("", "exp of the loss"),
    "lm loss validation ema": Metric("nats per token", "loss with the moving average of the weights"),
    "validation-set": Metric("name", "which of several validation sets"),
}
"""Every metric of a log line or an evaluation, by Megatron-LM's name where it has the metric.

``AXES`` and ``TIMER`` stand for mesh axes and for the phases of ``distributed.timing.PHASES``; evaluations of test data
have ``test`` in place of ``validation``. A metric that does not apply, such as communication on one rank, is left out.
"""

MEMORY_CAPACITY = "mem-capacity-bytes"
"""Memory of the fullest rank's device: for the console only."""


class MetricLogger(Protocol):
    """Receives the metrics of a run on rank 0. Any method may raise: training continues without the logger.

    Two further methods are optional. ``event(step: int, kind: str, fields: Metrics)`` receives starts, warnings, notes,
    checkpoints and errors; ``flush()`` makes everything logged so far durable before a checkpoint is saved.
    """

    def log(self, step: int, metrics: Metrics) -> None:
        """Record the metrics of training, an evaluation or a health report after ``step`` steps."""

    def close(self) -> None:
        """Finish the record. After an ``error`` event the run has failed."""


def scalar_metrics(metrics: Metrics) -> dict[str, float]:
    """Return the numeric values, without text and lists.

    The name of a validation set is inserted into its metric names after ``validation``, as in Megatron-LM.
    """
    validation_set = metrics.get("validation-set")
    return {
        name.replace("validation", f"validation-{validation_set}") if validation_set else name: value
        for name, value in metrics.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }


class LoggerStalledError(Exception):
    """A logger cannot keep up, or did not finish in time."""


class LoggerOpenError(Exception):
    """A logger could not be opened."""


class LoggerCollection:
    """Forwards metrics and events to many loggers. A logger that raises is removed with a warning."""

    def __init__(self, warn: Callable[[str], None]) -> None:
        """Start without loggers; ``warn`` is called when a logger fails, and may log to this collection."""
        self._warn = warn
        self._loggers: dict[str, MetricLogger] = {}

    def add(self, name: str, make: Callable[[], MetricLogger]) -> None:
        """Add the logger that ``make`` returns; warn if it raises."""
        try:
            self._loggers[name] = make()
        except Exception as error:  # no logger is worth the run
            self._remove(name, LoggerOpenError(error_summary(error)))

    def log(self, step: int, metrics: Metrics) -> None:
        """Log metrics to every logger."""
        self._call_each("log", step, metrics)

    def event(self, step: int, kind: str, fields: Metrics) -> None:
        """Log an event to every logger that takes events."""
        self._call_each("event", step, kind, fields)

    def flush(self) -> None:
        """Flush every logger."""
        self._call_each("flush")

    def close(self) -> None:
        """Close every logger, the last one first, so that the first still receives warnings."""
        for name in reversed(list(self._loggers)):
            self._call(name, "close")
        self.drop()

    def drop(self) -> None:
        """Remove all loggers without closing them."""
        self._loggers.clear()

    def _call_each(self, method: str, *arguments: object) -> None:
        for name in list(self._loggers):
            self._call(name, method, *arguments)

    def _call(self, name: str, method: str, *arguments: object) -> None:
        if name not in self._loggers:  # the warning about another logger may have removed this one
            return
        try:
            call_method(self._loggers[name], method, *arguments)
        except Exception as error:  # as in add
            self._remove(name, error)

    def _remove(self, name: str, error: Exception) -> None:
        self._loggers.pop(name, None)
        what = "no data" if isinstance(error, LoggerOpenError) else "no further data"
        self._warn(f"{name} receives {what} from this run: {error_summary(error)}; training continues")


def call_method(logger: MetricLogger, method: str, *arguments: object) -> None:
    """Call a method of a logger; do nothing if it is optional and missing."""
    if (bound := getattr(logger, method, None)) is not None:
        bound(*arguments)


def error_summary(error: BaseException) -> str:
    """Return the error's message in one line, or its type if there is none."""
    return " ".join(str(error).split()).rstrip(".") or f"it raised {type(error).__name__}"


class BackgroundLogger:
    """Runs a logger in its own thread, so that a network or disk that hangs does not delay training."""

    def __init__(
        self,
        make: Callable[[], MetricLogger],
        flushes: bool = True,
        timeout: float = LOGGER_TIMEOUT_SECONDS,
        capacity: int = QUEUE_CAPACITY,
    ) -> None:
        """Start the thread, which opens the logger.

        Args:
            make: opens the logger; called in the thread, may raise.
            flushes: whether `flush` waits; False if the data is also kept elsewhere.
            timeout: seconds that `flush` and `close` wait.
            capacity: maximum number of queued calls.

        """
        self._flushes = flushes
        self._timeout = timeout
        self._queue: queue.Queue[Callable[[MetricLogger], None] | None] = queue.Queue(capacity)
        self._error: Exception | None = None
        self._flush_timed_out = False
        self._thread = threading.Thread(target=self._work, args=(make,), daemon=True)
        self._thread.start()

    def log(self, step: int, metrics: Metrics) -> None:
        """Queue the metrics. Raises the error of an earlier call, or `LoggerStalledError` if the queue is full."""
        self._put(lambda logger: logger.log(step, metrics))

    def event(self, step: int, kind: str, fields: Metrics) -> None:
        """Queue the event; raises as `log`."""
        self._put(lambda logger: call_method(logger, "event", step, kind, fields))

    def flush(self) -> None:
        """Flush the logger and wait for it. After a timeout, do not wait again until it has caught up."""
        done = threading.Event()

        def flush_logger(logger: MetricLogger) -> None:
            call_method(logger, "flush")
            done.set()
            self._flush_timed_out = False

        self._put(flush_logger)
        if self._flushes and not self._flush_timed_out and self._thread.is_alive():
            self._flush_timed_out = not self._wait(done)
        self._raise_error()

    def close(self) -> None:
        """Close the logger and wait for it. Raises as `log`, and `LoggerStalledError` after the timeout."""
        self._put(lambda logger: logger.close())
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
            logger = make()
        except BaseException as error:  # raised at the next call; a library's sys.exit must not end the run
            self._error = LoggerOpenError(error_summary(error))
            return
        try:
            while (job := self._queue.get()) is not None:
                job(logger)
        except BaseException as error:  # as above
            self._error = error if isinstance(error, Exception) else LoggerStalledError(error_summary(error))
