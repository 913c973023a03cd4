"""Report a run to the console, its run folder, TensorBoard and Weights & Biases.

`RunLogger` is the only interface that the training loop uses: it prints lines and forwards metrics and events to a
`LoggerCollection` of `MetricLogger`s. A logger that raises is removed with a warning and never stops the run. Loggers
that use a network run in their own thread (`BackgroundLogger`). After a later start has taken over the run, nothing
is written.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Protocol

import torch

from megatron.arguments.sources import to_dict, to_yaml
from megatron.checkpoint.errors import SupersededError
from megatron.checkpoint.object_store import Location
from megatron.config.errors import Problem, UserError
from megatron.config.run import RunConfig
from megatron.planner.memory import format_binary
from megatron.training.failure_report import describe_error
from megatron.training.loggers.base import (
    BackgroundLogger,
    EvaluationRecord,
    JsonLinesLogger,
    LoggerCollection,
    MetricLogger,
    TrainRecord,
)
from megatron.training.loggers.console import evaluation_line, progress_line, timing_line
from megatron.training.loggers.plots import draw_health, draw_loss_curve
from megatron.training.loggers.run_folder import (
    HEALTH_FILE,
    LOSS_CURVE_FILE,
    METRICS_FILE,
    IncidentLogger,
    read_history,
    write_run_folder,
)
from megatron.training.loggers.run_folder import (
    INCIDENTS_FILE as INCIDENTS,
)
from megatron.training.loggers.tensorboard import TensorBoardLogger
from megatron.training.loggers.wandb import WandbJournal, WandbLogger, journal_path, wandb_disabled
from megatron.training.metrics import device_name
from megatron.training.startup import StartFacts, startup_line
from megatron.training.throughput import ThroughputModel


class LayerMetrics(Protocol):
    """Per-layer metrics."""

    def values(self) -> Mapping[str, object]:
        """Return metrics by name, with ``iteration``, ``consumed-samples`` and ``consumed-tokens``."""

    def line(self) -> str:
        """Return a summary for the console."""


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
        run_id: str = "",
        data: Mapping[str, object] | None = None,
        facts: StartFacts | None = None,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """Open the run folder and the loggers that ``config`` enables.

        Args:
            config: resolved configuration; a copy is written to the folder.
            world_size: number of ranks.
            device: device of this rank.
            enabled: whether this rank reports; usually ``rank == 0``.
            iteration: steps taken before this start.
            consumed_samples: samples used in these steps.
            run_id: identifies the run across restarts.
            data: summary of the training data, written to the folder.
            facts: job and start numbers.
            check: raises SupersededError once a later start has taken over the run; nothing is written after that.

        Raises:
            UserError: when the folder cannot be created or written.

        """
        self.enabled = enabled
        self.folder = Path(config.logging.run_dir) if enabled and config.logging.run_dir else None
        self._check_superseded = check
        self._sinks = LoggerCollection(self.warning, self._may_write)
        self._read_pending: Callable[[], TrainRecord] | None = None
        self._seq_length = config.training.seq_length
        self._world_size = world_size
        self._progress = self._progress_at(iteration, consumed_samples)
        self._closed = False
        self._has_loss_curve = False
        if not enabled:
            return
        name = device_name(device)
        self.throughput_model = ThroughputModel.from_config(config, world_size, name, iteration, consumed_samples)
        reuse_note = None
        if self.folder is not None:
            reuse_note = self._open_folder(self.folder, to_yaml(config), name, world_size, data or {})
        self._open_trackers(config, run_id)
        kind = "evaluation" if config.training.skip_train else "start"  # an evaluation does not restart the loss curve
        self._event({"event": kind, **self._progress, "run-id": run_id, "world-size": world_size, **(facts or {})})
        if reuse_note:
            self._has_loss_curve = not config.training.skip_train
            self.note(reuse_note)

    def _open_folder(
        self, folder: Path, resolved_config: str, device: str, world_size: int, data: Mapping[str, object]
    ) -> str | None:
        """Open the run folder; return a note if an earlier start has used it."""
        metrics = folder / METRICS_FILE
        used_before = metrics.exists()
        try:
            renamed = write_run_folder(folder, resolved_config, device, world_size, data)
            file = JsonLinesLogger(metrics, warn=print_warning)
        except OSError as error:
            message = f"the run folder {folder} cannot be written: {error.strerror}"
            raise UserError([Problem("E701", message, ("--run-dir ANOTHER_FOLDER",))]) from error
        self._sinks.add(metrics.name, lambda: file)
        self._sinks.add(INCIDENTS, partial(IncidentLogger, folder / INCIDENTS))
        if not used_before:
            return None
        names = ", ".join(path.name for path in renamed)
        changed = f"; changed files were renamed to {names}" if renamed else ""
        return f"{folder} holds an earlier start: {metrics.name} is appended to{changed}"

    def _open_trackers(self, config: RunConfig, run_id: str) -> None:
        """Open TensorBoard and Weights & Biases, each in its own thread."""
        options = config.logging
        iteration, consumed_samples = self._progress["iteration"], self._progress["consumed-samples"]
        if options.tensorboard_dir is not None:
            make = partial(
                TensorBoardLogger, Path(options.tensorboard_dir), to_yaml(config), iteration, consumed_samples
            )
            self._sinks.add("TensorBoard", partial(BackgroundLogger, make))
        before = iteration - config.training.skip_train  # --skip-train writes a row at the step of the checkpoint
        if options.wandb_project is not None and wandb_disabled():
            print_line("Weights & Biases is turned off by WANDB_MODE=disabled")
        elif options.wandb_project is not None:
            self._sinks.add("the journal for Weights & Biases", partial(self._open_wandb, config, run_id, before))

    def _open_wandb(self, config: RunConfig, run_id: str, iteration: int) -> MetricLogger:
        """Open the journal, and the client in a thread; the journal is kept if the client fails."""
        options = config.logging
        journal = WandbJournal(journal_path(options, run_id), iteration, print_warning)
        client = partial(WandbLogger, options, to_dict(config), run_id, iteration, journal.past, print_line)
        self._sinks.add("Weights & Biases", partial(BackgroundLogger, client, flushes=False))
        return journal

    def _progress_at(self, iteration: int, consumed_samples: int) -> dict[str, int]:
        tokens = consumed_samples * self._seq_length
        return {"iteration": iteration, "consumed-samples": consumed_samples, "consumed-tokens": tokens}

    def stepped(self, iteration: int, consumed_samples: int, read: Callable[[], TrainRecord]) -> None:
        """Update the progress after a step.

        Args:
            iteration: steps taken.
            consumed_samples: samples used.
            read: returns the record of the steps since the last log line; called if the run fails before the next.

        """
        self._progress = self._progress_at(iteration, consumed_samples)
        self._read_pending = read

    def train(self, record: TrainRecord) -> None:
        """Report the steps since the last log line.

        Raises:
            SupersededError: when a later start has taken over the run.

        """
        self._read_pending = None
        self._has_loss_curve = True
        if not self.enabled:
            return
        with suppress(OSError):  # a file system that does not answer must not end the run
            self._check_superseded()
        print_line(progress_line(record, self.throughput_model, _width()))
        if (times := timing_line(record)) is not None:
            print_line(times)
        self._record({**record.values(), **self.throughput_model.values(record), "world-size": self._world_size})

    def evaluation(self, record: EvaluationRecord) -> None:
        """Report the result of an evaluation."""
        if self.enabled:
            print_line(evaluation_line(record))
            self._record(record.values())

    def health(self, report: LayerMetrics) -> None:
        """Report per-layer metrics."""
        if self.enabled:
            print_line(report.line())
            self._record(report.values())

    def checkpoint(self, path: Location, size: int, seconds: float, blocking: float | None = None) -> None:
        """Report a saved checkpoint.

        Args:
            path: where it was saved.
            size: in bytes.
            seconds: duration of the save.
            blocking: seconds of it during which training was blocked; None for all.

        """
        if self.enabled:
            blocked = "" if blocking is None else f", training stood still for {blocking:.2f}s"
            print_line(
                f"saved {path}: {format_binary(size)} in {seconds:.1f}s, {format_binary(size / seconds)}/s{blocked}"
            )
            times = {"seconds": seconds, "blocking-seconds": seconds if blocking is None else blocking}
            self._event({"event": "checkpoint", **self._progress, "path": str(path), "bytes": size, **times})

    def start_up(self, seconds: Mapping[str, float], longest: Mapping[str, float]) -> None:
        """Report the seconds of each start-up phase, on this rank and the longest of any rank."""
        if self.enabled:
            print_line(startup_line(seconds, longest))
            phases, slowest = ({k: round(v, 3) for k, v in each.items()} for each in (seconds, longest))
            total = round(sum(seconds.values()), 3)
            self._event({"event": "start-up", **self._progress, "seconds": total, "phases": phases, "slowest": slowest})

    def warning(self, text: str) -> None:
        """Report a problem that does not end the run."""
        if self.enabled:
            print_warning(text)
            self._event({"event": "warning", **self._progress, "text": text})

    def stopped(self, why: str) -> None:
        """Report why the run ends before its last step."""
        if self.enabled:
            print_line(why)
            self._event({"event": "stop", **self._progress, "text": why})

    def note(self, text: str) -> None:
        """Report a message."""
        if self.enabled:
            print_line(text)
            self._event({"event": "note", **self._progress, "text": text})

    def flush(self) -> None:
        """Make all reports durable, so that none is lost if training resumes from the checkpoint saved next."""
        self._sinks.flush()

    def close(self, failed: bool = False) -> None:
        """Close all loggers and draw the plots into the run folder; never raises."""
        if self._closed:
            return
        self._closed = True
        self._sinks.close(failed)
        if self.folder is not None and self._has_loss_curve and self._may_write():
            self._draw_plots(self.folder)

    def _draw_plots(self, folder: Path) -> None:
        metrics = folder / METRICS_FILE
        title = folder.resolve().name
        try:
            draw_loss_curve(read_history(metrics), title, folder / LOSS_CURVE_FILE)
            print_line(f"loss curve: {folder / LOSS_CURVE_FILE}")
            if draw_health(metrics, title, folder / HEALTH_FILE):
                print_line(f"health of every layer: {folder / HEALTH_FILE}")
        except Exception as error:  # a failed plot must not change the run's exit status
            print_warning(f"no plot was drawn: {error}")

    def __enter__(self) -> RunLogger:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and self.enabled and self._may_write():
            if self._read_pending is not None:
                try:
                    self.train(self._read_pending())
                except Exception as read_error:  # the device may have failed
                    print_warning(f"the steps since the last log line are lost: {read_error}")
            self._event({"event": "error", **self._progress, "text": describe_error(error)})
        self.close(failed=error is not None)

    def _may_write(self) -> bool:
        """Return False once a later start has taken over the run."""
        try:
            with suppress(OSError):  # as in train
                self._check_superseded()
        except SupersededError:
            return False
        return True

    def _record(self, values: Mapping[str, object]) -> None:
        self._sinks.record({**values, "time": time.time()})

    def _event(self, values: Mapping[str, object]) -> None:
        self._sinks.event({**values, "time": time.time()})


def print_line(text: str) -> None:
    """Print a line; ignore errors of the console, such as a full disk or a broken pipe."""
    with suppress(OSError):
        print(text, flush=True)


def print_warning(text: str) -> None:
    """Print a warning to stderr, from any rank; ignore errors of the console."""
    with suppress(OSError):
        print(f"warning: {text}", file=sys.stderr, flush=True)


def _width() -> int | None:
    """Return the terminal's width, or None if stdout is not a terminal."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None
