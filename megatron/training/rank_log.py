"""A log of each rank, ``RUN_DIR/ranks/rank_00005.log``: what a thousand ranks would not print on one console.

It has what Python writes to stderr (warnings of this program and of libraries, ``logging``), the error of the rank,
also where the console shows only the first of all ranks, and the stacks of all threads when native code crashes.
What native libraries write to stderr goes to the console alone; NCCL is given a file beside the log
(``NCCL_DEBUG_FILE``). A file is appended to over restarts, and moved to ``rank_00005.log.1`` when it is full.
"""

from __future__ import annotations

import faulthandler
import io
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from megatron.checkpoint.durable_files import make_folder
from megatron.config.privacy import PRIVATE_FILE, check_access, private_mode, redact
from megatron.training.loggers.console import print_warning

RANKS_FOLDER = "ranks"
"""Subfolder of the run folder."""

MAX_BYTES = 8 << 20
"""Size at which a log is moved away; there is one earlier file, so a rank has at most twice as much."""

TAIL_BYTES = 16 << 10
"""Read of another rank's log, to find how it died."""

DISK_SECONDS = 5.0
"""Seconds that the first text waits for a disk that hangs. Later ones are left out while it does."""

CLAIM_FILE = "first_failure"
"""Created by the first rank that fails."""

FATAL = "Fatal Python error: "
"""Begins what ``faulthandler`` writes about a crash."""


def rank_log_path(run_dir: str | Path, rank: int) -> Path:
    """Return the file of a rank."""
    return Path(run_dir) / RANKS_FOLDER / f"rank_{rank:05}.log"


class RankLog:
    """The open log of this rank. A disk that fails or hangs costs one warning, and the rest of the log.

    Each text is written by a thread, because a write to a dead network disk never returns. The caller waits for it, so
    that the log is complete if the process is killed.
    """

    def __init__(self, path: Path, header: str, warn: bool) -> None:
        """Open ``path`` for appending, and write a header.

        Raises:
            OSError: if it cannot be written.
        """
        self.path = path
        self._warn = warn
        self._file = self._open()
        self._size = os.fstat(self._file).st_size
        self._hangs: threading.Thread | None = None  # waits for a disk that has not answered in time
        self.lock = threading.Lock()  # of the threads that write
        self.write(f"{'' if self._size == 0 else chr(10)}==== {time.strftime('%Y-%m-%d %H:%M:%S %z')} {header}\n")

    def _open(self) -> int:
        if self.path.exists() and self.path.stat().st_size >= MAX_BYTES // 2:
            self.path.replace(f"{self.path}.1")
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
        return os.open(self.path, flags, private_mode(self.path.parent, PRIVATE_FILE))

    def _do(self, act: Callable[[], object]) -> None:
        """Act in a thread, and wait until it is done, or the disk hangs; do nothing while the disk hangs."""
        if self._hangs is not None and self._hangs.is_alive():
            return

        def act_alone() -> None:
            with self.lock:
                act()

        thread = threading.Thread(target=act_alone, name="rank log", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # no memory for a thread, or Python ends
            act()
            return
        thread.join(DISK_SECONDS)
        if thread.is_alive():
            self._hangs = thread
            self._complain("the disk does not answer")

    def _complain(self, reason: str) -> None:
        if self._warn and sys.__stderr__ is not None:
            self._warn = False
            sys.__stderr__.write(f"warning: {self.path} is incomplete: {reason}\n")

    def write(self, text: str) -> None:
        """Append a text, without credentials."""
        self._do(partial(self._append, redact(text).encode(errors="replace")))

    def _append(self, data: bytes) -> None:
        try:
            if self._size + len(data) > MAX_BYTES:
                self._rotate()
            os.write(self._file, data)
            self._size += len(data)
        except OSError as error:
            self._size = 0  # do not try to move the file at each text
            self._complain(str(error.strerror))

    def _rotate(self) -> None:
        """Continue in a new file under the same descriptor, which faulthandler has too."""
        self.path.replace(f"{self.path}.1")
        new = self._open()
        os.dup2(new, self._file)
        os.close(new)
        self._size = 0

    def fileno(self) -> int:
        """Return the descriptor of the file."""
        return self._file

    def close(self) -> None:
        """Close the file."""

        def close() -> None:
            with suppress(OSError):
                os.close(self._file)

        self._do(close)


class StderrCopy(io.TextIOBase):
    """Passes texts on to stderr, and copies them into the log."""

    def __init__(self, stream: TextIO, log: RankLog) -> None:
        """Copy what is written to ``stream``."""
        self._stream, self._log = stream, log

    def write(self, text: str) -> int:
        """Write to both; to the stream first, because the disk of the log may hang."""
        try:
            return self._stream.write(text)
        finally:
            self._log.write(text)

    def flush(self) -> None:
        """Flush the stream; the log has no buffer."""
        self._stream.flush()

    def fileno(self) -> int:
        """Return the descriptor of the stream."""
        return self._stream.fileno()

    def isatty(self) -> bool:
        """Return True if the stream is a terminal."""
        return self._stream.isatty()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


_open_log: RankLog | None = None
"""Of this process, like the handlers of ``logging``."""


def renew_lock() -> None:
    """Give the log of a forked process a lock of its own: the thread that holds the other is not there."""
    if _open_log is not None:
        _open_log.lock = threading.Lock()


os.register_at_fork(after_in_child=renew_lock)


@contextmanager
def rank_log(run_dir: str | None, rank: int, world_size: int, environ: Mapping[str, str]) -> Iterator[None]:
    """Keep the log of this rank open; without a folder, or if it cannot be written, do nothing."""
    global _open_log
    if run_dir is None or _open_log is not None:
        yield
        return
    try:
        log = _create(run_dir, rank, world_size, environ)
    except OSError as error:
        if rank == 0:  # a full disk is full for all
            print_warning(f"there are no logs of ranks: {error}")
        yield
        return
    before, crashes, level = sys.stderr, faulthandler.is_enabled(), logging.getLogger().level
    _open_log, sys.stderr = log, StderrCopy(before, log)
    faulthandler.enable(log.fileno(), all_threads=True)
    try:
        yield
    finally:
        _open_log, sys.stderr = None, before
        if _remove_handlers():
            logging.getLogger().setLevel(level)
        if crashes and sys.__stderr__ is not None:
            faulthandler.enable(sys.__stderr__)
        else:
            faulthandler.disable()
        log.close()


def _create(run_dir: str, rank: int, world_size: int, environ: Mapping[str, str]) -> RankLog:
    folder = Path(run_dir) / RANKS_FOLDER
    make_folder(Path(run_dir), private=True)
    check_access(Path(run_dir), shared=True)
    make_folder(folder, private=True)
    job = " ".join(f"{name}={environ[name]}" for name in ("SLURM_JOB_ID", "SLURM_RESTART_COUNT") if name in environ)
    if rank == 0:
        (folder / CLAIM_FILE).unlink(missing_ok=True)  # of an earlier start
    header = f"rank {rank} of {world_size} on {socket.gethostname()}, process {os.getpid()} {job}".rstrip()
    return RankLog(rank_log_path(run_dir, rank), header, warn=rank == 0)


def give_nccl_a_file(run_dir: str | None, environ: dict[str, str] | os._Environ[str]) -> None:
    """Let NCCL write what ``NCCL_DEBUG`` asks for into files of the processes; a file that is set is kept."""
    if run_dir is not None and "NCCL_DEBUG" in environ:
        environ.setdefault("NCCL_DEBUG_FILE", f"{Path(run_dir).absolute()}/{RANKS_FOLDER}/nccl_%h_%p.log")


def write_text(text: str) -> None:
    """Append a text to the log of this rank, if there is one."""
    if _open_log is not None:
        _open_log.write(text)


def set_level(level: int) -> tuple[bool, str]:
    """Set the level of Python's logging, whose records go into the log; return whether it was set, and a sentence.

    Warnings go to stderr as before.
    """
    if _open_log is None:
        return False, "there are no logs of ranks; --rank-logs and a --run-dir that can be written give some"
    _remove_handlers()
    root = logging.getLogger()
    root.addHandler(_LogHandler(level))
    root.setLevel(level)
    return True, f"records of logging from {logging.getLevelName(level).lower()} on are in {_open_log.path.parent}"


def _remove_handlers() -> bool:
    """Undo :func:`set_level`; return True if there was something to undo."""
    root = logging.getLogger()
    found = [each for each in root.handlers if isinstance(each, _LogHandler)]
    for handler in found:
        root.removeHandler(handler)
    return bool(found)


class _LogHandler(logging.Handler):
    """Writes records into the log of this rank; warnings through stderr, from where they are copied."""

    def __init__(self, level: int) -> None:
        super().__init__(level)
        self.setFormatter(logging.Formatter("%(asctime)s %(name)s %(levelname)s: %(message)s"))

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record."""
        text = f"{self.format(record)}\n"
        if record.levelno >= logging.WARNING:
            sys.stderr.write(text)
        else:
            write_text(text)


def claim_first_failure() -> bool:
    """Return True if no other rank of this start has called this before; also without logs of ranks.

    The disk decides where the store cannot: it is gone with the rank that hosts it, which may have been the first.
    """
    if _open_log is None:
        return True
    try:
        os.close(os.open(_open_log.path.with_name(CLAIM_FILE), os.O_CREAT | os.O_EXCL, PRIVATE_FILE))
    except FileExistsError:
        return False
    except OSError:  # a disk that cannot be written
        pass
    return True


def crashed_ranks(world_size: int) -> list[str]:
    """Return which ranks have crashed in native code since this start, and how, as their logs have it."""
    if _open_log is None:
        return []
    found = []
    for rank in range(world_size):
        path = _open_log.path.with_name(rank_log_path("", rank).name)
        if words := _last_words(path):
            found.append(f"rank {rank} has crashed: {words}; its stacks: {path}")
    return found


def _last_words(path: Path) -> str:
    """Return how the rank of a log crashed, such as ``Segmentation fault``; empty if it did not."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - TAIL_BYTES))
            lines = file.read().decode(errors="replace").rpartition("\n==== ")[2].splitlines()
    except OSError:
        return ""
    return next((line.removeprefix(FATAL) for line in lines if line.startswith(FATAL)), "")
