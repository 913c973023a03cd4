"""A progress bar on a terminal, in place of log lines."""

from __future__ import annotations

import os
import sys
from contextlib import suppress

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn

from megatron.training.loggers.base import Metrics
from megatron.training.loggers.console import ConsoleLogger, print_line, progress_line

BAR_WIDTH = 20
OTHER_WIDTH = BAR_WIDTH + 3
"""Columns of the bar, the spinner and the spaces around them."""


class _Console(Console):
    """Console that never hides the cursor: a killed process could not show it again."""

    def show_cursor(self, show: bool = True) -> bool:
        """Do nothing."""
        return False


class TerminalLogger(ConsoleLogger):
    """Shows the numbers of the last log step beside a bar, which moves with every step; other lines appear above it."""

    def __init__(self, step: int, total: int) -> None:
        """Begin after ``step`` of ``total`` steps."""
        columns = SpinnerColumn(), BarColumn(BAR_WIDTH), TextColumn("{task.fields[line]}", markup=False)
        self._console = _Console(highlight=False, soft_wrap=True)
        self._progress = Progress(*columns, console=self._console, transient=True)
        self._task = self._progress.add_task("", total=total, completed=step, line=f"{step}/{total}")
        self._step, self._total = step, total
        self._metrics: Metrics | None = None

    def log_step(self, step: int, metrics: Metrics) -> None:
        """Show the numbers of a log step."""
        self._metrics = metrics
        self.stepped(step)

    def event(self, step: int, kind: str, fields: Metrics) -> None:
        """Print an event above the bar, which appears with the first one, the start of the run."""
        with suppress(OSError):  # the terminal is gone
            self._progress.start()
        super().event(step, kind, fields)

    def stepped(self, step: int) -> None:
        """Move the bar."""
        self._step, line = step, f"{step}/{self._total}"
        if self._metrics is not None:
            line = progress_line(step, self._metrics, max(1, self._console.width - OTHER_WIDTH))
        self._progress.update(self._task, completed=step, line=line)

    def close(self) -> None:
        """Leave the last numbers in place of the bar."""
        with suppress(OSError):
            self._progress.stop()
        if self._metrics is not None:
            print_line(progress_line(self._step, self._metrics, self._console.width))
        self._metrics = None


def open_console(step: int, total: int) -> ConsoleLogger:
    """Return a logger of the kind that standard output can show, after ``step`` of ``total`` steps."""
    with suppress(OSError, ValueError):  # a stream without a file
        if os.isatty(sys.stdout.fileno()) and os.environ.get("TERM", "dumb") != "dumb":
            return TerminalLogger(step, total)
    return ConsoleLogger()
