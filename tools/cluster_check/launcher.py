"""Start Python programs on all ranks, each with a time limit."""

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
TORCHRUN_REPORT = "torch/distributed/elastic/"  # marks the first line of torchrun's failure report
TAIL_LINES = 25

GRACE_SECONDS = 45.0  # seconds a launcher gets to end its ranks; torchrun gives hanging ones 30 before it kills them


@dataclass(frozen=True)
class LaunchResult:
    """How a program ended."""

    status: int | None  # exit status of the launcher; None if it timed out
    seconds: float
    log: Path  # its output

    @property
    def ended(self) -> str:
        """The exit status, or that it timed out, in words."""
        return f"timed out after {self.seconds:.0f} s" if self.status is None else f"exit status {self.status}"

    def tail(self) -> str:
        """Return the end of the ranks' output, without torchrun's own report, which adds nothing."""
        lines = self.log.read_text(errors="replace").splitlines()
        reports = (i for i, line in enumerate(lines) if TORCHRUN_REPORT in line)
        return "\n".join(lines[: next(reports, len(lines))][-TAIL_LINES:])


@dataclass
class RankLauncher:
    """Starts programs one after the other."""

    # Command that starts a Python file on every rank, up to the file's path; ``{port}`` is replaced by a new port at
    # every start.
    command: Sequence[str]
    logs: Path  # folder of the programs' output
    starts: int = field(default=0)  # programs started so far

    def run(self, name: str, program: Sequence[str | Path], seconds: float) -> LaunchResult:
        """Run ``program``, a Python file of the repository and its arguments, on all ranks; wait for its end."""
        self.starts += 1
        port = str(FIRST_PORT + (os.getpid() * 16 + self.starts) % 2000)
        words = [word.replace("{port}", port) for word in self.command]
        command = [*words, str(ROOT / program[0]), *map(str, program[1:])]
        log = self.logs / f"{self.starts:02d}-{name}.log"
        start = time.monotonic()
        with log.open("w") as file:
            file.write(f"$ {shlex.join(command)}\n")
            file.flush()
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=launch_environment(port),
                start_new_session=True,
            )
            try:
                status: int | None = process.wait(seconds)
            except subprocess.TimeoutExpired:
                status = None
            finally:
                terminate(process)
        return LaunchResult(status, time.monotonic() - start, log)


def launch_environment(port: str) -> dict[str, str]:
    """Return the programs' environment: the library's path, and the rendezvous port for launchers that set none."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return {"OMP_NUM_THREADS": "1"} | os.environ | {"PYTHONPATH": path, "MASTER_PORT": port}


def terminate(process: subprocess.Popen[bytes]) -> None:
    """Terminate a launcher that still runs, and every process of its session on this machine."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)  # the launcher forwards it to ranks on other machines too
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_SECONDS)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
