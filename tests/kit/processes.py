"""Processes of tests: a start in a tenth of a second, a wait for their end, and ports for them."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from multiprocessing.context import ForkServerContext
from pathlib import Path
from types import TracebackType
from typing import Any

ROOT = Path(__file__).parents[2]
PRELOAD = ["torch._dynamo", "pytest", "tests.kit.runs", "tests.kit.cases", "tests.kit.worker"]
"""Imported once by the server that processes are forked from; building an optimizer needs torch._dynamo (2 s)."""


def fork_server() -> ForkServerContext:
    """The server of this session; it begins with the first process."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    return context


class ForkedProgram:
    """A call in a process and session of its own, which has the environment of this process; for kills and signals.

    A fork of this process itself would inherit gloo's groups without their threads, and hang when it destroys them.

    Args:
        function: importable by its module and name; it returns the exit status.
        args: its arguments, which can be pickled.
        output: file for all that is printed.
        environment: more variables.
    """

    def __init__(
        self, function: Callable[..., int], *args: Any, output: Path, environment: Mapping[str, str] | None = None
    ) -> None:
        self._output = output
        variables = {**os.environ, **(environment or {})}
        process = fork_server().Process(target=_call, args=(function, args, str(output), variables))
        process.start()
        self._process = process

    def __enter__(self) -> ForkedProgram:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.kill()

    @property
    def pid(self) -> int:
        """Number of the process, and of its session."""
        return self._process.pid or 0

    @property
    def output(self) -> str:
        """All that has been printed."""
        return self._output.read_text() if self._output.exists() else ""

    def poll(self) -> int | None:
        """Return the exit status, -N for a process that signal N has ended; None while it runs."""
        return self._process.exitcode

    def wait(self, seconds: float) -> int:
        """Return the exit status.

        Raises:
            TimeoutError: after ``seconds``.
        """
        self._process.join(seconds)
        status = self.poll()
        if status is None:
            raise TimeoutError(f"the process takes more than {seconds:g} s:\n{self.output}")
        return status

    def send_signal(self, number: int) -> None:
        """Send a signal to the process alone."""
        os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill it with everything it has started, and wait for it."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.kill()  # it may have no session yet
        self._process.join()


def _call(function: Callable[..., int], args: tuple[Any, ...], output: str, environment: Mapping[str, str]) -> None:
    os.setsid()
    os.chdir(ROOT)
    os.environ.clear()
    os.environ.update(environment)
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(file, stream)
    sys.stdout, sys.stderr = (os.fdopen(stream, "w", buffering=1) for stream in (1, 2))  # not the server's
    sys.exit(function(*args))


def is_alive(process: int) -> bool:
    """Return True if a process of this number is running; a zombie is not."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def anonymous_bytes() -> int:
    """Return the memory of this process without mapped files."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


def wait_until_gone(processes: Iterable[int], seconds: float = 10.0) -> None:
    """Wait for the end of processes that another process has to reap.

    Raises:
        AssertionError: when one of them is alive for longer than ``seconds``.
    """
    left, until = set(processes), time.monotonic() + seconds
    while left := {process for process in left if is_alive(process)}:
        assert time.monotonic() < until, f"processes {sorted(left)} are still there"
        time.sleep(0.02)


def free_port() -> int:
    """A free port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
