"""Work in a process of its own, which this one can end at any moment, whatever a library is doing in it."""

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

TICK = 0.2  # seconds
PATIENCE = 10.0  # seconds for a process to end


class Watcher(Protocol):
    """Who is told what the other process does."""

    def doing(self, stage: str) -> None:
        """What it is at now."""

    def say(self, sentence: str) -> None:
        """Something a person should know."""

    def tick(self) -> None:
        """Time goes by."""


class Teller:
    """The watcher, seen from the process that works."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def doing(self, stage: str) -> None:
        """Tell what this process is at now."""
        self._connection.send(("doing", stage))

    def say(self, sentence: str) -> None:
        """Tell a person something."""
        self._connection.send(("say", sentence))


def in_child(function: Callable[[Plan, Teller], Result], plan: Plan, watcher: Watcher) -> Result:
    """What ``function(plan, teller)`` returns in another process.

    That process ends with this call, however it ends, and does not see Ctrl-C.

    Args:
        function: to call; it and what it takes and returns can be pickled.
        plan: its argument.
        watcher: is told what the function tells, and a few times a second that time goes by.

    Raises:
        DataError: when the function raises one, or the process dies.
        OSError: when the function raises one.
    """
    spawn = multiprocessing.get_context("spawn")
    connection, theirs = spawn.Pipe()
    process = spawn.Process(target=_work, args=(theirs, function, plan), daemon=True)
    try:
        with interrupts_blocked():
            process.start()
        theirs.close()  # now only the process has that end: when it dies, ours is told
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
            (watcher.doing if kind == "doing" else watcher.say)(content)
    finally:
        if process.pid is not None:
            process.kill()
            process.join()
        connection.close()


def death(process: SpawnProcess, *fixes: str) -> DataError:
    """Why a process that should still work does not."""
    process.join(PATIENCE)
    status = process.exitcode
    if status is None or status >= 0:
        return DataError(f"a worker process ended with status {status}; what it said is above")
    name = signal.Signals(-status).name
    perhaps = "; perhaps memory ran out" if -status == signal.SIGKILL else ""
    return DataError(f"a worker process was ended by {name}{perhaps}", *fixes, "more memory")


@contextmanager
def interrupts_blocked() -> Iterator[None]:
    """Processes that begin here never see Ctrl-C: it is for this one, which tells them."""
    resource_tracker.ensure_running()  # now, because to start it ends the blocking
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def end_with_parent() -> None:
    """From now on this process ends when the one that started it does."""

    def wait() -> None:
        parent = multiprocessing.parent_process()
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def _work(connection: Connection, function: Callable[[Plan, Teller], Result], plan: Plan) -> None:
    end_with_parent()
    try:
        answer = "returned", function(plan, Teller(connection))
    except (DataError, OSError) as error:
        connection.send(("raised", error))
        return
    connection.send(answer)
