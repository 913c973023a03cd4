"""Run a function in another process that can be killed at any moment, whatever library call it is in."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Protocol, TypeVar

from megatron.data.errors import DataError

Plan = TypeVar("Plan")
Result = TypeVar("Result")

TICK = 0.2  # seconds between polls
PATIENCE = 10.0  # seconds to wait for a process to end


class Watcher(Protocol):
    """Receiver of the progress of another process."""

    def set_stage(self, stage: str) -> None:
        """Report the current stage."""

    def message(self, text: str) -> None:
        """Report a message for the user."""

    def tick(self) -> None:
        """Update the display; called a few times per second."""


class Teller:
    """Sender of progress from the other process to its watcher."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def set_stage(self, stage: str) -> None:
        """Report the current stage."""
        self._connection.send(("stage", stage))

    def message(self, text: str) -> None:
        """Report a message for the user."""
        self._connection.send(("message", text))


def in_child(function: Callable[[Plan, Teller], Result], plan: Plan, watcher: Watcher) -> Result:
    """Return ``function(plan, teller)``, called in another process.

    That process ends with this call, however the call ends, and ignores Ctrl-C.

    Args:
        function: to call; the function, its argument and its result must be picklable.
        plan: its argument.
        watcher: receives the reports of the function, and ticks.

    Raises:
        DataError: if the function raises one, or the process dies.
        OSError: if the function raises one.
    """
    spawn = multiprocessing.get_context("spawn")
    connection, remote = spawn.Pipe()
    process = spawn.Process(target=_run_function, args=(remote, function, plan), daemon=True)
    try:
        with interrupts_blocked():
            process.start()
        remote.close()  # only the child holds that end now, so its death ends the pipe
        while True:
            while not connection.poll(TICK):
                watcher.tick()
            try:
                kind, content = connection.recv()
            except (EOFError, OSError) as error:
                raise death(process) from error
            if kind == "returned":
                return content
            if kind == "raised":
                raise content
            (watcher.set_stage if kind == "stage" else watcher.message)(content)
    finally:
        if process.pid is not None:
            process.kill()
            process.join()
        connection.close()


def death(process: SpawnProcess, *fixes: str) -> DataError:
    """Return the error for a worker process that has died."""
    process.join(PATIENCE)
    status = process.exitcode
    if status is None or status >= 0:
        return DataError(f"a worker process ended with status {status}; its output is above")
    name = signal.Signals(-status).name
    cause = "; it may have run out of memory" if -status == signal.SIGKILL else ""
    return DataError(f"a worker process was killed by {name}{cause}", *fixes, "more memory")


@contextmanager
def interrupts_blocked() -> Iterator[None]:
    """Block SIGINT in processes started inside, so that only this process handles Ctrl-C."""
    resource_tracker.ensure_running()  # now, because starting it later would unblock the signal
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def end_with_parent() -> None:
    """Exit when the parent process ends."""

    def wait() -> None:
        parent = multiprocessing.parent_process()
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def _run_function(connection: Connection, function: Callable[[Plan, Teller], Result], plan: Plan) -> None:
    end_with_parent()
    try:
        answer = "returned", function(plan, Teller(connection))
    except (DataError, OSError) as error:
        connection.send(("raised", error))
        return
    connection.send(answer)
