"""Errors of the data package, and the command-line conventions of the data tools.

`DataError` holds what is wrong and how to fix it. `ToolParser` reports all unknown flags at once; `run_tool` turns
data errors, disk errors and signals into a message and an exit status.
"""

from __future__ import annotations

import argparse
import errno
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import NoReturn

from megatron.config.privacy import redact
from megatron.config.text import LONGEST_SENTENCE, clipped, did_you_mean, echo


class DataError(ValueError):
    """A data file is wrong, or does not fit what the run needs.

    Functions of this package raise it, and UserError for invalid options, without a mention of their own.
    """

    def __init__(self, seen: str, *fixes: str) -> None:
        self.seen = seen  # what is wrong
        self.fixes = fixes  # what to do about it, one alternative each
        super().__init__(redact(clipped(seen, LONGEST_SENTENCE) + ("\n  fix: " + " | ".join(fixes) if fixes else "")))


class ToolParser(argparse.ArgumentParser):
    """Argument parser that reports all unknown flags at once, with the nearest known ones."""

    def __init__(self, prog: str, description: str, epilog: str) -> None:
        super().__init__(prog, description=description, epilog=epilog, allow_abbrev=False)

    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        """Parse the flags; exit with status 2 if they are invalid."""
        known = self._option_string_actions
        args = argv[: argv.index("--")] if "--" in argv else argv
        flags = (arg.split("=")[0] for arg in args if arg.startswith("--"))
        unknown = [flag for flag in dict.fromkeys(flags) if flag not in known]
        if unknown:
            guesses = {flag: did_you_mean(flag, known) for flag in unknown}
            names = [f"{flag} (did you mean {guess}?)" if guess else flag for flag, guess in guesses.items()]
            self.error(f"there is no {', no '.join(names)}")
        return self.parse_args(argv)

    def fail(self, problem: object, status: int) -> int:
        """Print what is wrong with the input or the output, and return the exit status."""
        echo(f"{Path(self.prog).stem}: {problem}", file=sys.stderr)
        return status

    def error(self, message: str) -> NoReturn:
        """Exit with status 2 and a line that points to ``--help``."""
        self.exit(2, f"{Path(self.prog).stem}: {message}\n  help: python tools/{self.prog} --help\n")


class StoppedError(BaseException):
    """Raised by SIGTERM and SIGINT inside `stop_on_signals`."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.status = 128 + number  # exit status for this signal


class StopSignal:
    """State of the signals that ask this process to end."""

    def __init__(self) -> None:
        self._number: int | None = None
        self._only_record = False

    def note(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal: raise StoppedError, or, after `wait_for_checks`, only record it."""
        self._number = number
        if not self._only_record:
            raise StoppedError(number)

    def wait_for_checks(self) -> None:
        """Raise only from `check`, and now, because a library may lose an exception or take it for its own failure."""
        self._only_record = True
        self.check()

    def check(self) -> None:
        """Raise StoppedError if a signal has been received."""
        if self._number is not None:
            raise StoppedError(self._number)


@contextmanager
def stop_on_signals() -> Iterator[StopSignal]:
    """Handle SIGTERM and SIGINT with a `StopSignal` inside the context."""
    stop = StopSignal()
    before = {number: signal.signal(number, stop.note) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run_tool(parser: ToolParser, run: Callable[[StopSignal], int | None], output: str | Path, flag: str) -> int:
    """Run a tool's work, which writes ``output``, the value of ``flag``; return its exit status."""
    try:
        with stop_on_signals() as stop:
            return run(stop) or 0
    except DataError as error:
        return parser.fail(error, 1)
    except OSError as error:
        return parser.fail(disk_error(error, output, flag), 1)
    except StoppedError as stopped:
        return parser.fail(f"stopped by {stopped} before {output} was written", stopped.status)


def disk_error(error: OSError, output: str | Path, flag: str) -> DataError:
    """Turn an OSError into a DataError that names the ``output`` (set by ``flag``) or the input it concerns."""
    why = error.strerror or str(error)
    if error.filename is not None:
        # Of the output are its files, its temporary files beside it, and the folders above it.
        file, target = os.path.abspath(os.fspath(error.filename)), os.path.abspath(output)
        is_beside = os.path.dirname(file) == os.path.dirname(target)
        is_temporary = is_beside and os.path.basename(file).startswith(("tmp", ".partial"))
        if not (file.startswith(target) or target.startswith(file + os.sep) or is_temporary):
            return DataError(f"{error.filename} cannot be read: {why}")
    free_space = ("make room on that disk",) if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) else ()
    return DataError(f"{output} cannot be written: {why}", *free_space, f"another {flag}")
