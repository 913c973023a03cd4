"""Where a run's records go: a line on the console, a line of JSON in the run's folder, a picture at the end."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType

import torch

from megatron.config.memory import shown
from megatron.config.problems import Problem, UserError
from megatron.config.run import RunConfig
from megatron.config.sources import to_yaml
from megatron.training import run_folder
from megatron.training.console import evaluation_line, progress_line
from megatron.training.history import read_history
from megatron.training.metrics import device_name
from megatron.training.plot import draw_history
from megatron.training.records import EvaluationRecord, TrainRecord
from megatron.training.throughput import Yardstick


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
    ) -> None:
        """Prepare ``run_dir``, where there is one.

        Args:
            config: resolved, so that the copy in the folder shows every number.
            world_size: ranks.
            device: this rank's.
            enabled: whether this rank speaks; usually ``rank == 0``.
            iteration: steps taken before this start.
            consumed_samples: samples they used.

        Raises:
            UserError: when the folder cannot be made or written.
        """
        self.enabled = enabled
        self.folder = Path(config.logging.run_dir) if enabled and config.logging.run_dir else None
        self._file: run_folder.JsonLines | None = None
        self._pending: Callable[[], TrainRecord] | None = None
        self._seq_length = config.training.seq_length
        self._place = self._place_of(iteration, consumed_samples)
        if not enabled:
            return
        name = device_name(device)
        self.yardstick = Yardstick.from_config(config, world_size, name, iteration, consumed_samples)
        if self.folder is not None:
            self._open(self.folder, to_yaml(config), name, world_size)

    def _open(self, folder: Path, resolved_config: str, device: str, world_size: int) -> None:
        """Prepare the folder and write its first lines."""
        metrics = folder / run_folder.METRICS
        used_before = metrics.exists()
        try:
            kept = run_folder.prepare(folder, resolved_config, device, world_size)
            self._file = run_folder.JsonLines(metrics, warn=_warn)
        except OSError as error:
            sentence = f"the run folder {folder} cannot be written: {error.strerror}"
            raise UserError([Problem("E701", sentence, ("--run-dir ANOTHER_FOLDER",))]) from error
        self._write({"event": "start", **self._place, "world-size": world_size})
        if used_before:
            names = ", ".join(path.name for path in kept)
            old = f", what it wrote otherwise is now {names}" if kept else ""
            self.note(f"{folder} holds an earlier start: {metrics.name} goes on below it{old}")

    def _place_of(self, iteration: int, consumed_samples: int) -> dict[str, int]:
        tokens = consumed_samples * self._seq_length
        return {"iteration": iteration, "consumed-samples": consumed_samples, "consumed-tokens": tokens}

    def stepped(self, iteration: int, consumed_samples: int, read: Callable[[], TrainRecord]) -> None:
        """Say how far the run is, and how to ``read`` the steps since the last line, lest it fail before the next."""
        self._place, self._pending = self._place_of(iteration, consumed_samples), read

    def train(self, record: TrainRecord) -> None:
        """Report the steps since the last log line."""
        self._pending = None
        if not self.enabled:
            return
        _say(progress_line(record, self.yardstick, _width()))
        self._write({**record.values(), **self.yardstick.values(record)})

    def evaluation(self, record: EvaluationRecord) -> None:
        """Report an evaluation."""
        if self.enabled:
            _say(evaluation_line(record))
            self._write(record.values())

    def checkpoint(self, path: Path, size: int, seconds: float) -> None:
        """Report a checkpoint of ``size`` bytes that took ``seconds``."""
        if self.enabled:
            _say(f"saved {path}: {shown(size)} in {seconds:.1f}s, {shown(size / seconds)}/s")
            self._write({"event": "checkpoint", **self._place, "path": str(path), "bytes": size, "seconds": seconds})

    def warning(self, text: str) -> None:
        """Say what went wrong although the run goes on."""
        if self.enabled:
            _warn(text)
            self._write({"event": "warning", **self._place, "text": text})

    def note(self, text: str) -> None:
        """Say something that is no number."""
        if self.enabled:
            _say(text)
            self._write({"event": "note", "text": text})

    def close(self) -> None:
        """Draw the loss curve into the run's folder and close the file; never raises."""
        file, self._file = self._file, None
        if file is None or self.folder is None:
            return
        file.close()
        try:
            picture = self.folder / run_folder.LOSS_CURVE
            draw_history(read_history(self.folder / run_folder.METRICS), self.folder.resolve().name, picture)
        except Exception as error:  # a picture is not worth the run's exit status
            _warn(f"no loss curve was drawn: {error}")
        else:
            _say(f"loss curve: {picture}")

    def __enter__(self) -> RunLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and self.enabled:
            self._failed(error)
        self.close()

    def _failed(self, error: BaseException) -> None:
        """Report the steps that no line has told of yet, and where the run ended."""
        if self._pending is not None:
            try:
                self.train(self._pending())
            except Exception as lost:  # a device that failed may not give its numbers away any more
                _warn(f"the steps since the last line are lost: {lost}")
        self._write({"event": "error", **self._place, "text": f"{type(error).__name__}: {error}"})

    def _write(self, values: Mapping[str, object]) -> None:
        if self._file is not None:
            self._file.write({**values, "time": time.time()})


def _say(text: str) -> None:
    print(text, flush=True)


def _warn(text: str) -> None:
    print(f"warning: {text}", file=sys.stderr, flush=True)


def _width() -> int | None:
    """Columns of the terminal; None when the output goes to a file, which takes them all."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None
