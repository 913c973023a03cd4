"""Starting Python programs on all ranks, each in bounded time."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
FIRST_PORT = 29600
AGENT = "torch/distributed/elastic/"
"""Where torchrun begins to tell of a failure."""
TAIL_LINES = 25

GRACE = 45.0
"""Seconds that a launcher gets to end its ranks: torchrun gives those that hang 30 before it kills them."""


@dataclass(frozen=True)
class Outcome:
    """How a program ended.

    Attributes:
        status: of the launcher; None where the time was over.
        seconds: it took.
        log: what it wrote.
    """

    status: int | None
    seconds: float
    log: Path

    @property
    def ended(self) -> str:
        """In words."""
        return f"not over after {self.seconds:.0f} s" if self.status is None else f"exit status {self.status}"

    def tail(self) -> str:
        """The end of what the ranks wrote, without what torchrun has to add: no more than that they failed."""
        lines = self.log.read_text(errors="replace").splitlines()
        own = (i for i, line in enumerate(lines) if AGENT in line)
        return "\n".join(lines[: next(own, len(lines))][-TAIL_LINES:])


@dataclass
class Launcher:
    """Starts programs one after the other.

    Attributes:
        command: words that start a Python file on every rank, as they stand before its path; ``{port}`` is replaced
            by a port that no start before has used.
        logs: folder for what the programs write.
        starts: how many there were.
    """

    command: Sequence[str]
    logs: Path
    starts: int = field(default=0)

    def run(self, name: str, program: Sequence[str | Path], seconds: float) -> Outcome:
        """Start ``program``, a Python file of the repository and its arguments, and wait for its end."""
        self.starts += 1
        port = str(FIRST_PORT + (os.getpid() * 16 + self.starts) % 2000)
        words = [word.replace("{port}", port) for word in self.command]
        command = [*words, str(ROOT / program[0]), *map(str, program[1:])]
        log = self.logs / f"{self.starts:02d}-{name}.log"
        begun = time.monotonic()
        with log.open("w") as file:
            file.write(f"$ {shlex.join(command)}\n")
            file.flush()
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=environment(port),
                start_new_session=True,
            )
            try:
                status: int | None = process.wait(seconds)
            except subprocess.TimeoutExpired:
                status = None
            finally:
                end(process)
        return Outcome(status, time.monotonic() - begun, log)


def environment(port: str) -> dict[str, str]:
    """For the programs: they find the library, and each other where the launcher itself does not say how."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return {"OMP_NUM_THREADS": "1"} | os.environ | {"PYTHONPATH": path, "MASTER_PORT": port}


def end(process: subprocess.Popen[bytes]) -> None:
    """End a launcher that still runs, and all that it started on this machine."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)  # it ends its ranks, those on other machines too
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
