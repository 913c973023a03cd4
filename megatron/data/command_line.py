"""How the tools for data read their flags, end on a signal, and tell what the disk refuses."""

from __future__ import annotations

import argparse
import errno
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import NoReturn

from megatron.config.problems import did_you_mean
from megatron.data.errors import DataError

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Parser(argparse.ArgumentParser):
    """Flags that are told in a sentence and a line where help is, all unknown ones at once."""

    def __init__(self, prog: str, description: str, epilog: str) -> None:
        super().__init__(prog, description=description, epilog=epilog, allow_abbrev=False)

    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        """The flags; ends the process with status 2 where they cannot be read."""
        known = self._option_string_actions
        words = argv[: argv.index("--")] if "--" in argv else argv
        flags = (word.split("=")[0] for word in words if word.startswith("--"))
        unknown = [flag for flag in dict.fromkeys(flags) if flag not in known]
        if unknown:
            guesses = {flag: did_you_mean(flag, known) for flag in unknown}
            told = [f"{flag} (did you mean {guess}?)" if guess else flag for flag, guess in guesses.items()]
            self.error(f"there is no {', no '.join(told)}")
        return self.parse_args(argv)

    def error(self, message: str) -> NoReturn:
        """End the process with status 2."""
        self.exit(2, f"{Path(self.prog).stem}: {message}\n  help: python tools/{self.prog} --help\n")


class StoppedError(BaseException):
    """A signal came that asks this process to end."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number

    @property
    def status(self) -> int:
        """The exit status of a process that ends for it."""
        return 128 + self.number


@contextmanager
def stopped_by_signals() -> Iterator[None]:
    """SIGTERM and SIGINT raise `StoppedError` in here."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise StoppedError(number)

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def ended(run: Callable[[], None], tell: Callable[[object, int], int], output: str | Path, flag: str) -> int:
    """The exit status of a tool's work, which writes ``output``, said with ``flag``; what ends it goes to ``tell``."""
    try:
        with stopped_by_signals():
            run()
    except DataError as error:
        return tell(error, 1)
    except OSError as error:
        return tell(refused(error, output, flag), 1)
    except StoppedError as stop:
        return tell(f"stopped by {stop}; nothing was written under {output}", stop.status)
    return 0


def refused(error: OSError, output: str | Path, flag: str) -> DataError:
    """What the disk refuses, in a sentence that names what was to be written (``output``, of ``flag``) or read."""
    why = error.strerror or str(error)
    if error.filename is not None and not _belongs(os.fspath(error.filename), str(output)):
        return DataError(f"{error.filename} cannot be read: {why}")
    room = ("make room on that disk",) if error.errno in FULL else ()
    return DataError(f"{output} cannot be written: {why}", *room, f"another {flag}")


def _belongs(file: str, output: str) -> bool:
    """Whether a file is the output, grows for it or lies above it."""
    file, output = os.path.abspath(file), os.path.abspath(output)
    beside = os.path.dirname(file) == os.path.dirname(output) and os.path.basename(file).startswith(("tmp", ".partial"))
    return file.startswith(output) or output.startswith(file + os.sep) or beside


def counted(number: int, things: str) -> str:
    """``1 document``, ``2 documents``: a number with the word for many of them."""
    return f"{number:,} {things.removesuffix('s') if number == 1 else things}"
