"""Where a run's records go: the console, its folder (and pictures there at the end), the sinks that are asked for."""

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

from megatron.checkpoint.errors import SupersededError
from megatron.checkpoint.remote import Location
from megatron.config.memory import shown
from megatron.config.problems import Problem, UserError
from megatron.config.run import RunConfig
from megatron.config.sources import to_dict, to_yaml
from megatron.training import incidents, run_folder
from megatron.training.console import evaluation_line, progress_line, timing_line
from megatron.training.failure import sentence
from megatron.training.health_plot import draw_health
from megatron.training.history import read_history
from megatron.training.json_lines import JsonLines
from megatron.training.metrics import device_name
from megatron.training.plot import draw_history
from megatron.training.records import EvaluationRecord, TrainRecord
from megatron.training.sinks import Background, Sink, Sinks
from megatron.training.start_facts import Facts
from megatron.training.startup import start_up_line
from megatron.training.tensorboard import TensorBoard
from megatron.training.throughput import Yardstick
from megatron.training.wandb_journal import Journal
from megatron.training.wandb_mode import turned_off
from megatron.training.wandb_sink import Wandb, journal_of


class LayerReport(Protocol):
    """Numbers of single layers, and how they are told in a line."""

    def values(self) -> Mapping[str, object]:
        """By name, with ``iteration``, ``consumed-samples`` and ``consumed-tokens``."""

    def line(self) -> str:
        """For the console."""


class RunLog:
    """What a run says of itself. Give every rank one and enable one of them; the others do nothing."""

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
        facts: Facts | None = None,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """Prepare ``run_dir``, where there is one, and the other places that are asked for.

        Args:
            config: resolved, so that the copy in the folder shows every number.
            world_size: ranks.
            device: this rank's.
            enabled: whether this rank speaks; usually ``rank == 0``.
            iteration: steps taken before this start.
            consumed_samples: samples they used.
            run_id: name of the run, the same through all its starts.
            data: what it reads, for the folder.
            facts: which start of which job this is.
            check: raises when a later start has the run, whose records this one must not mix with its own.

        Raises:
            UserError: when the folder cannot be made or written.
        """
        self.enabled = enabled
        self.folder = Path(config.logging.run_dir) if enabled and config.logging.run_dir else None
        self._check = check
        self._sinks = Sinks(self.warning, self._may_write)
        self._pending: Callable[[], TrainRecord] | None = None
        self._seq_length, self._world_size = config.training.seq_length, world_size
        self._place = self._place_of(iteration, consumed_samples)
        self._closed, self._has_curve = False, False
        if not enabled:
            return
        name = device_name(device)
        self.yardstick = Yardstick.from_config(config, world_size, name, iteration, consumed_samples)
        used_before = None
        if self.folder is not None:
            used_before = self._open(self.folder, to_yaml(config), name, world_size, data or {})
        self._open_others(config, run_id)
        kind = "evaluation" if config.training.skip_train else "start"  # the former is no restart of the run's curve
        self._event({"event": kind, **self._place, "run-id": run_id, "world-size": world_size, **(facts or {})})
        if used_before:
            self._has_curve = not config.training.skip_train
            self.note(used_before)

    def _open(
        self, folder: Path, resolved_config: str, device: str, world_size: int, data: Mapping[str, object]
    ) -> str | None:
        """Prepare the folder; a sentence where an earlier start has used it."""
        metrics = folder / run_folder.METRICS
        used_before = metrics.exists()
        try:
            kept = run_folder.prepare(folder, resolved_config, device, world_size, data)
            file = JsonLines(metrics, warn=warn)
        except OSError as error:
            refusal = f"the run folder {folder} cannot be written: {error.strerror}"
            raise UserError([Problem("E701", refusal, ("--run-dir ANOTHER_FOLDER",))]) from error
        self._sinks.add(metrics.name, lambda: file)
        self._sinks.add(incidents.NAME, partial(incidents.Incidents, folder / incidents.NAME))
        if not used_before:
            return None
        names = ", ".join(path.name for path in kept)
        old = f", what it wrote otherwise is now {names}" if kept else ""
        return f"{folder} holds an earlier start: {metrics.name} goes on below it{old}"

    def _open_others(self, config: RunConfig, run_id: str) -> None:
        """Open what is asked for besides the folder, each in a thread of its own."""
        options, begin = config.logging, (self._place["iteration"], self._place["consumed-samples"])
        if options.tensorboard_dir is not None:
            make = partial(TensorBoard, Path(options.tensorboard_dir), to_yaml(config), *begin)
            self._sinks.add("TensorBoard", partial(Background, make))
        before = begin[0] - config.training.skip_train  # an evaluation alone has a row of its own
        if options.wandb_project is not None and turned_off():
            say("Weights & Biases is turned off by WANDB_MODE=disabled")
        elif options.wandb_project is not None:
            self._sinks.add("the journal for Weights & Biases", partial(self._open_wandb, config, run_id, before))

    def _open_wandb(self, config: RunConfig, run_id: str, iteration: int) -> Sink:
        """Open the client, and the journal, which goes on where that fails."""
        options = config.logging
        journal = Journal(journal_of(options, run_id), iteration, warn)
        client = partial(Wandb, options, to_dict(config), run_id, iteration, journal.past, say)
        self._sinks.add("Weights & Biases", partial(Background, client, flushes=False))
        return journal

    def _place_of(self, iteration: int, consumed_samples: int) -> dict[str, int]:
        tokens = consumed_samples * self._seq_length
        return {"iteration": iteration, "consumed-samples": consumed_samples, "consumed-tokens": tokens}

    def stepped(self, iteration: int, consumed_samples: int, read: Callable[[], TrainRecord]) -> None:
        """Say how far the run is, and how to ``read`` the steps since the last line, lest it fail before the next."""
        self._place, self._pending = self._place_of(iteration, consumed_samples), read

    def train(self, record: TrainRecord) -> None:
        """Report the steps since the last log line.

        Raises:
            SupersededError: when a later start has the run.
        """
        self._pending, self._has_curve = None, True
        if not self.enabled:
            return
        with suppress(OSError):  # a disk that does not say is no reason to end
            self._check()
        say(progress_line(record, self.yardstick, _width()))
        if (times := timing_line(record)) is not None:
            say(times)
        self._record({**record.values(), **self.yardstick.values(record), "world-size": self._world_size})

    def evaluation(self, record: EvaluationRecord) -> None:
        """Report an evaluation."""
        if self.enabled:
            say(evaluation_line(record))
            self._record(record.values())

    def health(self, report: LayerReport) -> None:
        """Report on single layers."""
        if self.enabled:
            say(report.line())
            self._record(report.values())

    def checkpoint(self, path: Location, size: int, seconds: float, blocking: float | None = None) -> None:
        """Report a checkpoint of ``size`` bytes that took ``seconds``, ``blocking`` of which no step could be taken."""
        if self.enabled:
            stood = "" if blocking is None else f", training stood still for {blocking:.2f}s"
            say(f"saved {path}: {shown(size)} in {seconds:.1f}s, {shown(size / seconds)}/s{stood}")
            times = {"seconds": seconds, "blocking-seconds": seconds if blocking is None else blocking}
            self._event({"event": "checkpoint", **self._place, "path": str(path), "bytes": size, **times})

    def start_up(self, seconds: Mapping[str, float], longest: Mapping[str, float]) -> None:
        """Report where the time of the start went, by phase: on this rank, and on the one that took longest."""
        if self.enabled:
            say(start_up_line(seconds, longest))
            phases, slowest = ({k: round(v, 3) for k, v in each.items()} for each in (seconds, longest))
            total = round(sum(seconds.values()), 3)
            self._event({"event": "start-up", **self._place, "seconds": total, "phases": phases, "slowest": slowest})

    def warning(self, text: str) -> None:
        """Say what went wrong although the run goes on."""
        if self.enabled:
            warn(text)
            self._event({"event": "warning", **self._place, "text": text})

    def stopped(self, why: str) -> None:
        """Say why the run ends before its last step."""
        if self.enabled:
            say(why)
            self._event({"event": "stop", **self._place, "text": why})

    def note(self, text: str) -> None:
        """Say something that is no number."""
        if self.enabled:
            say(text)
            self._event({"event": "note", **self._place, "text": text})

    def flush(self) -> None:
        """Bring what was reported to where it outlives this process: before a checkpoint that goes on after it."""
        self._sinks.flush()

    def close(self, failed: bool = False) -> None:
        """Draw the loss curve into the run's folder and close all places; never raises."""
        if self._closed:
            return
        self._closed = True
        self._sinks.close(failed)
        if self.folder is not None and self._has_curve and self._may_write():
            self._draw(self.folder)

    def _draw(self, folder: Path) -> None:
        """Draw what the run's metrics tell."""
        metrics, title = folder / run_folder.METRICS, folder.resolve().name
        try:
            draw_history(read_history(metrics), title, folder / run_folder.LOSS_CURVE)
            say(f"loss curve: {folder / run_folder.LOSS_CURVE}")
            if draw_health(metrics, title, folder / run_folder.HEALTH):
                say(f"health of every layer: {folder / run_folder.HEALTH}")
        except Exception as error:  # a picture is not worth the run's exit status
            warn(f"no picture was drawn: {error}")

    def __enter__(self) -> RunLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and self.enabled and self._may_write():
            self._failed(error)
        self.close(failed=error is not None)

    def _failed(self, error: BaseException) -> None:
        """Report the steps that no line has told of yet, and where the run ended."""
        if self._pending is not None:
            try:
                self.train(self._pending())
            except Exception as lost:  # a device that failed may not give its numbers away any more
                warn(f"the steps since the last line are lost: {lost}")
        self._event({"event": "error", **self._place, "text": sentence(error)})

    def _may_write(self) -> bool:
        """Whether no later start has the run."""
        try:
            with suppress(OSError):  # as above
                self._check()
        except SupersededError:
            return False
        return True

    def _record(self, values: Mapping[str, object]) -> None:
        self._sinks.record({**values, "time": time.time()})

    def _event(self, values: Mapping[str, object]) -> None:
        self._sinks.event({**values, "time": time.time()})


def say(text: str) -> None:
    """Print. A console that takes nothing (a log on a full disk, a pipe that nobody reads) does not stop the run."""
    with suppress(OSError):
        print(text, flush=True)


def warn(text: str) -> None:
    """Say, on whatever rank, what went wrong although the run goes on."""
    with suppress(OSError):  # as above
        print(f"warning: {text}", file=sys.stderr, flush=True)


def _width() -> int | None:
    """Columns of the terminal; None when the output goes to a file, which takes them all."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None
