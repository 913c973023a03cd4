"""Find the processes of a run from outside: a process that inherits its mark belongs to it, in any namespace."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

MARK = "SOAK_RUN"
PASSES = 50
"""Over all processes, after which one that cannot be killed (it waits for a disk) is left."""


@dataclass(frozen=True)
class Process:
    """A process.

    Attributes:
        pid: its number.
        parent: the number of its parent.
        born: when it began, in ticks since the boot: a number may belong to another process later.
        command: how it was started.
        environ: with which variables.
    """

    pid: int
    parent: int
    born: int
    command: str
    environ: dict[str, str]

    @property
    def is_alive(self) -> bool:
        """Return True if it is running and not a zombie."""
        stat = _stat(self.pid)
        return stat is not None and int(stat[19]) == self.born and stat[0] != "Z"

    def send(self, number: signal.Signals) -> None:
        """Send it a signal, if it is there still."""
        if self.is_alive:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)


def _stat(pid: int) -> list[str] | None:
    """Fields of ``/proc/PID/stat`` from the state on."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None


def marked(mark: str) -> Iterator[Process]:
    """Processes that live with ``SOAK_RUN=mark``, or something that begins so and goes on with a slash."""
    wanted = f"{MARK}={mark}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            content = (folder / "environ").read_bytes().split(b"\0")
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        is_marked = any(item == wanted or item.startswith(wanted + b"/") for item in content)
        stat = _stat(int(folder.name)) if is_marked else None
        if stat is not None and stat[0] != "Z":
            environ = dict(item.decode(errors="replace").partition("=")[::2] for item in content if b"=" in item)
            yield Process(int(folder.name), int(stat[1]), int(stat[19]), command, environ)


def end(mark: str) -> None:
    """Kill them all, and what they have started meanwhile."""
    for _ in range(PASSES):
        if not (found := [*marked(mark)]):
            return
        for process in found:
            process.send(signal.SIGKILL)
        time.sleep(0.1)


RANK = re.compile(r"\S*python\S* (-u )?(-m tests\.soaking\.rank|\S*pretrain_gpt\.py) (?!.*--check-config)")
AGENT = re.compile(r"\S*python\S* (-m torch\.distributed\.run|\S*torchrun) ")


def ranks(processes: Iterable[Process]) -> dict[int, Process]:
    """The ranks among them by number; not what they have started themselves."""
    found = [process for process in processes if RANK.match(process.command)]
    pids = {process.pid for process in found}
    return {_number(process): process for process in found if process.parent not in pids}


def _number(process: Process) -> int:
    """From the variables of the launcher: torchrun, or else srun."""
    return int(process.environ.get("RANK", process.environ.get("SLURM_PROCID", "0")))


def agents(processes: Iterable[Process]) -> list[Process]:
    """The agents of torchrun among them."""
    return [process for process in processes if AGENT.match(process.command)]
