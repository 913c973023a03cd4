"""Report a run to the console, its run folder, TensorBoard, Weights & Biases and users' own loggers.

`RunLogger` is the only interface that the training loop uses: it forwards metrics and events to a console and to
`MetricLogger`s. A logger that raises is removed with a warning and never stops the run. Those that use a network, and
those of plugins, run in a thread of their own. After a later start has taken over the run, nothing but the console is
written.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from megatron.arguments.sources import to_yaml
from megatron.checkpoint.errors import SupersededError
from megatron.checkpoint.location import Location
from megatron.config.batch import WHOLE_RUN, Origin
from megatron.config.errors import Problem, UserError
from megatron.config.plugins import registered
from megatron.config.privacy import redact
from megatron.config.run import RunConfig
from megatron.training.failure_report import describe_error
from megatron.training.first_cause import within
from megatron.training.loggers.alerts import alert_logger
from megatron.training.loggers.base import WENT_BACK, MetricLogger, Metrics, error_summary
from megatron.training.loggers.console import CONSOLE_PREFIX, ENDS_RUN, ConsoleLogger, print_line, print_warning
from megatron.training.loggers.plots import LAYER_PLOTS, draw_runs
from megatron.training.loggers.run_folder import (
    INCIDENTS_FILE,
    LOSS_CURVE_FILE,
    METRICS_FILE,
    IncidentLogger,
    JsonLinesLogger,
    read_history,
    write_run_folder,
)
from megatron.training.loggers.terminal import open_console
from megatron.training.loggers.trackers import TensorBoardLogger, WandbLogger, hyperparameters
from megatron.training.metrics import ThroughputModel, device_name
from megatron.training.startup import StartFacts

SUPERSEDED_CHECK_SECONDS = 5.0
"""Interval between checks whether a later start has taken over the run; each is a call to the file system."""

LOGGER_TIMEOUT_SECONDS = 30.0  # that closing waits for a logger
QUEUE_CAPACITY = 10_000  # queued calls per logger, a few megabytes


class RunLogger:
    """Reports metrics and events of a run. Create one on every rank; only the enabled one reports."""

    def __init__(
        self,
        config: RunConfig,
        *,
        world_size: int,
        device: torch.device,
        enabled: bool = True,
        iteration: int = 0,
        consumed_samples: int = 0,
        origin: Origin = WHOLE_RUN,
        later: tuple[int, int] = (0, 0),
        run_id: str = "",
        data: Mapping[str, object] | None = None,
        facts: StartFacts | None = None,
        before: str | None = "an earlier start",
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """Open the run folder and the loggers that ``config`` enables.

        Args:
            config: resolved configuration; a copy is written to the folder.
            world_size: number of ranks.
            device: of this rank.
            enabled: whether this rank reports; usually ``rank == 0``.
            iteration: steps taken before this start.
            consumed_samples: samples used in these steps.
            origin: of the current phase.
            later: steps and tokens of the phases after it.
            run_id: identifies the run across restarts.
            data: summary of the training data, written to the folder.
            facts: job and start numbers.
            before: what an existing folder holds; None for this start, which went back: then its files are replaced.
            check: raises SupersededError once a later start has taken over the run; called at most every
                `SUPERSEDED_CHECK_SECONDS`, and at the end. Nothing is written after that.

        Raises:
            UserError: when the folder cannot be created or written.
        """
        self.enabled = enabled
        self.interval = config.logging.log_interval  # steps between log lines; may change between steps, on all ranks
        self.folder = Path(config.logging.run_dir) if enabled and config.logging.run_dir else None
        self._check_superseded = check
        self._superseded: SupersededError | None = None
        self._next_check = time.monotonic() + SUPERSEDED_CHECK_SECONDS
        self._loggers: dict[str, Callable[..., None]] = {}  # call a method of a logger; by its name in warnings
        self._seq_length, self._origin = config.training.seq_length, origin
        self._phase = {"phase": config.training.phase_name} if config.training.phase_name else {}
        self._world_size = world_size
        self._has_loss_curve = False
        self._console = ConsoleLogger()
        self.stepped(iteration, consumed_samples)
        if not enabled:
            return
        name = device_name(device)
        self._throughput_model = ThroughputModel.from_config(
            config, world_size, name, iteration, consumed_samples, origin, later
        )
        self._console = open_console(iteration, self._throughput_model.total_iterations)
        reuse_note = None
        if self.folder is not None:
            reuse_note = self._open_folder(self.folder, to_yaml(config), name, data or {}, before)
        self._open_trackers(config, run_id, name)
        if (alerts := alert_logger(last_phase=not later[0])) is not None:
            self.add("alerts", lambda: alerts)
        kind = "evaluation" if config.training.skip_train else "start"  # an evaluation does not restart the loss curve
        layout = {"world-size": world_size, "threads": torch.get_num_threads()}  # on which the bits of a CPU depend
        went_back = {WENT_BACK: True} if before is None else {}
        self._event(kind, {"run-id": run_id, **layout, **self._phase, **went_back, **(facts or {})})
        if reuse_note is not None:
            self._has_loss_curve = not config.training.skip_train
        if reuse_note:
            self.note(reuse_note)

    def _open_folder(
        self, folder: Path, resolved_config: str, device: str, data: Mapping[str, object], held: str | None
    ) -> str | None:
        """Open the run folder; return None if it is new, or else a note on what is ``held``."""
        metrics, warnings = folder / METRICS_FILE, list[str]()
        try:
            used_before = metrics.exists()
            facts = resolved_config, device, self._world_size, data
            renamed = write_run_folder(folder, *facts, warnings.append, keep=held is not None)
            self._loggers[metrics.name] = partial(call_method, JsonLinesLogger(metrics, warn=print_warning))
        except OSError as error:
            message = f"the run folder {folder} cannot be written: {error.strerror}"
            raise UserError([Problem("E701", message, ("--run-dir ANOTHER_FOLDER",))]) from error
        self.add(INCIDENTS_FILE, partial(IncidentLogger, folder / INCIDENTS_FILE), background=False)
        for text in warnings:
            self.warning(text)
        if not used_before or held is None:
            return "" if used_before else None
        names = ", ".join(path.name for path in renamed)
        changed = f"; changed files were renamed to {names}" if renamed else ""
        return f"{folder} holds {held}: {metrics.name} is appended to{changed}"

    def _open_trackers(self, config: RunConfig, run_id: str, device: str) -> None:
        """Open TensorBoard, Weights & Biases and the loggers of plugins."""
        options = config.logging
        used = options.tensorboard_dir is not None or options.wandb_project is not None
        hparams = hyperparameters(config, device, self._world_size) if used else {}
        iteration, samples = self._progress["iteration"], self._progress["consumed-samples"]
        if options.tensorboard_dir is not None:
            place = Path(options.tensorboard_dir), to_yaml(config), iteration, samples
            self.add("TensorBoard", partial(TensorBoardLogger, *place, hparams))
        if options.wandb_project is not None and os.environ.get("WANDB_MODE") == "disabled":
            print_line("Weights & Biases is turned off by WANDB_MODE=disabled")
        elif options.wandb_project is not None:
            before = iteration - config.training.skip_train  # --skip-train writes a row at the step of the checkpoint
            self.add("Weights & Biases", partial(WandbLogger, options, hparams, run_id, before, print_line))
        for name, make_logger in registered("metric_logger").items():
            self.add(name, partial(make_logger, config))

    def add(self, name: str, make: Callable[[], MetricLogger], background: bool = True) -> None:
        """Add the logger that ``make`` returns, in a thread of its own with ``background``; warn if it raises."""
        try:
            self._loggers[name] = BackgroundLogger(make).call if background else partial(call_method, make())
        except Exception as error:  # no logger is worth the run
            self._turn_off(name, error)

    def _call_each(self, method: str, *arguments: object) -> None:
        """Call a method of every logger that has it. Closes the last one first: the first still receives warnings."""
        names = list(self._loggers)
        for name in reversed(names) if method == "close" else names:
            if name not in self._loggers:  # the warning about another logger has removed this one
                continue
            try:
                self._loggers[name](method, *arguments)
            except Exception as error:  # as in add
                self._turn_off(name, error)

    def _turn_off(self, name: str, error: Exception) -> None:
        self._loggers.pop(name, None)
        self.warning(f"{name} failed and receives no more data: {error_summary(error)}; training continues")

    def stepped(self, iteration: int, consumed_samples: int, read: Callable[[], Metrics] | None = None) -> None:
        """Update the progress after a step; ``read`` returns the metrics to log if the run fails before its line."""
        tokens = self._origin.tokens + (consumed_samples - self._origin.samples) * self._seq_length
        self._progress = {"iteration": iteration, "consumed-samples": consumed_samples, "consumed-tokens": tokens}
        self._read_pending = read
        self._console.stepped(iteration)

    def train(self, metrics: Metrics) -> None:
        """Report the steps since the last log line, as returned by ``MetricsWindow.read``.

        Raises:
            SupersededError: when a later start has taken over the run.
        """
        self._read_pending = None
        self._has_loss_curve = True
        if not self.enabled:
            return
        self._owns_run()
        if self._superseded is not None:
            raise self._superseded
        throughput = self._throughput_model.metrics(metrics)
        self.log({**metrics, **throughput, **self._phase, "world-size": self._world_size})

    def log(self, metrics: Metrics) -> None:
        """Report any metrics of the current step. Their names should not clash with those of `METRICS`."""
        self._report("log", {**self._progress, **metrics})

    def _event(self, kind: str, fields: Metrics) -> None:
        texts = {name: redact(value) for name, value in fields.items() if isinstance(value, str)}
        self._report("event", {**self._progress, **fields, **texts}, kind)

    def _report(self, method: str, values: dict[str, Any], *kind: str) -> None:
        """Call a method of the console, and of all loggers unless a later start has taken over the run."""
        if not self.enabled:
            return
        step = values.pop("iteration")
        values["time"] = time.time()
        call_method(self._console, method, step, *kind, values)
        if self._owns_run():
            public = {name: value for name, value in values.items() if not name.startswith(CONSOLE_PREFIX)}
            self._call_each(method, step, *kind, public)

    def checkpoint(self, path: Location, size: int, seconds: float, blocking: float | None = None) -> None:
        """Report a checkpoint of ``size`` bytes; training was blocked for ``blocking`` of the seconds (None: all)."""
        times = {"seconds": seconds, "blocking-seconds": seconds if blocking is None else blocking}
        self._event("checkpoint", {"path": str(path), "bytes": size, **times})

    def start_up(self, seconds: Mapping[str, float], longest: Mapping[str, float]) -> None:
        """Report the seconds of each start-up phase, on this rank and the longest of any rank."""
        phases, slowest = ({name: round(x, 3) for name, x in each.items()} for each in (seconds, longest))
        self._event("start-up", {"seconds": round(sum(seconds.values()), 3), "phases": phases, "slowest": slowest})

    def warning(self, text: str, kind: str | None = None, alert: bool = False) -> None:
        """Report a problem that does not end the run; one of a ``kind`` may be an alert."""
        self._event("warning", {"text": text} | ({} if kind is None else {"kind": kind, "alert": alert}))

    def incident(self, kind: str, text: str, folder: Path | None = None, ends: bool = False) -> None:
        """Report an incident of a kind of ``incidents.KINDS``, and its folder; ``ends``: as the error of the run."""
        where = None if folder is None else str(folder)
        self._event("incident", {"kind": kind, "text": text, "folder": where, ENDS_RUN: ends})

    def rewound(self, text: str) -> None:
        """Report the steps since the last log line, and that the run goes back from them."""
        if self._read_pending is not None:
            self.train(self._read_pending())
        self._has_loss_curve = False  # it is drawn at the end
        self._event("rewind", {"text": text})

    def control(self, text: str, done: bool, **fields: str) -> None:
        """Report a request to the running job: by whom, what was asked for, and what followed."""
        self._event("control", {"text": text, "done": done, **fields})

    def stopped(self, why: str) -> None:
        """Report why the run ends before its last step."""
        self._event("stop", {"text": why})

    def samples(self, continuations: Sequence[tuple[str, str]]) -> None:
        """Report generated texts: prompts with their continuations."""
        text = "\n\n".join(f"sample: {prompt} >>> {continuation}" for prompt, continuation in continuations)
        self._event("samples", {"text": text, "continuations": [list(pair) for pair in continuations]})

    def note(self, text: str) -> None:
        """Report a message."""
        self._event("note", {"text": text})

    def _owns_run(self, at_once: bool = False) -> bool:
        """Return False once a later start has taken over the run.

        Asks the file system at most every `SUPERSEDED_CHECK_SECONDS`, unless ``at_once``. Saves check on their own.
        """
        if self._superseded is None and (at_once or time.monotonic() >= self._next_check):
            self._next_check = time.monotonic() + SUPERSEDED_CHECK_SECONDS
            try:
                with suppress(OSError):  # a file system that does not answer must not end the run
                    self._check_superseded()
            except SupersededError as error:
                self._superseded = error
                self._loggers.clear()
        return self._superseded is None

    def flush(self) -> None:
        """Let loggers write what they buffer, before a checkpoint from which training may resume."""
        self._call_each("flush")

    def close(self) -> None:
        """Close all loggers and draw the plots into the run folder; never raises."""
        self._console.close()
        owner = self.enabled and self._owns_run(at_once=True)
        self._call_each("close")
        self._loggers.clear()
        if owner and self.folder is not None and self._has_loss_curve:
            draw_plots(self.folder)

    def __enter__(self) -> RunLogger:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, SupersededError):
            self._superseded = error
            self._loggers.clear()
        if error is None:
            self.close()
        else:
            # a dead disk must not keep a failed run from its end
            within(LOGGER_TIMEOUT_SECONDS, partial(self._close_after, error), None)

    def _close_after(self, error: BaseException) -> None:
        """Record an error, and close."""
        if self.enabled and self._superseded is None and self._owns_run(at_once=True):
            if self._read_pending is not None:
                try:
                    self.train(self._read_pending())
                except Exception as read_error:  # the device may have failed
                    print_warning(f"the steps since the last log line are lost: {read_error}")
            self._event("error", {"text": describe_error(error)})
        self.close()


def draw_plots(folder: Path) -> None:
    """Draw the loss curve, and the health if it was reported, into a run folder; a failure is a warning."""
    title = folder.resolve().name
    try:
        history = read_history(folder / METRICS_FILE)
        draw_runs({title: history}, folder / LOSS_CURVE_FILE)
        print_line(f"loss curve: {folder / LOSS_CURVE_FILE}")
        for name, (what, draw) in LAYER_PLOTS.items():
            if draw(history, title, folder / name):
                print_line(f"{what}: {folder / name}")
    except Exception as error:  # a failed plot must not change the run's exit status
        print_warning(f"no plot was drawn: {error}")


class BackgroundLogger:
    """Runs a logger in its own thread, so that a network or disk that hangs does not delay training."""

    def __init__(
        self, make: Callable[[], MetricLogger], timeout: float = LOGGER_TIMEOUT_SECONDS, capacity: int = QUEUE_CAPACITY
    ) -> None:
        """Start the thread, which opens the logger with ``make``; closing waits ``timeout`` seconds for it."""
        self._timeout = timeout
        self._queue: queue.Queue[tuple[str, tuple[object, ...]]] = queue.Queue(capacity)
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._work, args=(make,), daemon=True)
        self._thread.start()

    def call(self, method: str, *arguments: object) -> None:
        """Queue a call of the logger; ``close`` also waits for it. Raises what an earlier call has raised."""
        if self._error is None:
            try:
                self._queue.put_nowait((method, arguments))
            except queue.Full:
                raise TimeoutError(f"it is {self._queue.maxsize:,} records behind") from None
            if method == "close":
                self._thread.join(self._timeout)
        if self._error is not None:
            raise self._error
        if method == "close" and self._thread.is_alive():
            raise TimeoutError(f"it did not finish within {self._timeout:.0f} s")

    def _work(self, make: Callable[[], MetricLogger]) -> None:
        method = ""
        try:
            logger = make()
            while method != "close":
                method, arguments = self._queue.get()
                call_method(logger, method, *arguments)
        except BaseException as error:  # a library's sys.exit must not end the run
            self._error = error if isinstance(error, Exception) else RuntimeError(error_summary(error))


def call_method(logger: object, method: str, *arguments: object) -> None:
    """Call a method of a logger; do nothing if it is optional and missing."""
    if (bound := getattr(logger, method, None)) is not None:
        bound(*arguments)
