"""A supervised run, as seen by the code that disturbs and checks it."""

from __future__ import annotations

import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.soaking.machine import Process, end, marked, ranks
from tests.soaking.progress import Progress

STEPS = 150
EVERY = 10
"""Steps between two checkpoints."""

TIMEOUT_MINUTES = 0.25
"""Of collectives: a rank that hangs is noticed after that time."""

PATIENCE_SECONDS = 600.0
"""After which a run that does not go on is given up."""

NOTICED = re.compile(
    r"error on rank|exitcode|[Ss]ignal \d|SIG[A-Z]+|No space left|stopped by|slurm: .*(ended|ends|up:)|task \d+: Killed"
)
"""The lines that the log of a job may have about a fault."""

STEP_LINE = re.compile(r"\s*\d+/\d+ ")
"""The beginning of a step's log line."""

FLAGS = (
    "--vocab-size 31 --num-layers 2 --hidden-size 16 --num-attention-heads 2 --ffn-hidden-size 32 "
    "--hidden-dropout 0.1 --attention-dropout 0 --max-position-embeddings 8 --seq-length 8 --lr 1e-2 "
    f"--log-interval 1 --keep-last 4 --distributed-timeout-minutes {TIMEOUT_MINUTES}"
)


@dataclass(frozen=True)
class Setup:
    """A run.

    Attributes:
        name: for people.
        where: what keeps it going: ``here`` or ``slurm``.
        nodes: of it; here, agents of torchrun.
        ranks: of each node.
        flags: of its own.
        launcher: what starts its ranks.
    """

    name: str
    where: str
    nodes: int
    ranks: int
    flags: str
    launcher: str = "torchrun"


@dataclass(frozen=True)
class Mark:
    """State right before a fault: the length of the log, and the output of its supervisor."""

    offset: int
    state: str


class Job(ABC):
    """One run, from its first start to its end; leaves no process behind."""

    def __init__(self, setup: Setup, folder: Path) -> None:
        """Start nothing yet; ``folder`` becomes the run's."""
        self.setup, self.folder, self.failure = setup, folder, ""
        self.progress = Progress(folder / "metrics.jsonl")
        (folder / "slurm").mkdir(parents=True)

    @abstractmethod
    def start(self) -> None:
        """Start it."""

    @abstractmethod
    def stop(self) -> None:
        """Give it up."""

    @abstractmethod
    def is_over(self) -> bool:
        """Return True if the job has finished or was given up."""

    @abstractmethod
    def state(self) -> str:
        """Return the report of the process that keeps the job going; another text once it has noticed something."""

    @abstractmethod
    def attempt_of(self, process: Process) -> int:
        """The number of the start that a process belongs to."""

    @property
    @abstractmethod
    def log(self) -> Path:
        """Return the path of its log."""

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()
        end(str(self.folder))

    @property
    def checkpoints(self) -> Path:
        """Return the folder of its checkpoints."""
        return self.folder / "checkpoints"

    def is_finished(self) -> bool:
        """Return True if the run reports its last step as taken and saved."""
        return (self.folder / "finished.json").exists()

    def processes(self) -> list[Process]:
        """All that belong to the run now: agents, ranks, and those that earlier starts have left."""
        return list(marked(str(self.folder)))

    def newest(self) -> list[Process]:
        """Those of the present start."""
        there = self.processes()
        latest = max((self.attempt_of(process) for process in there), default=0)
        return [process for process in there if self.attempt_of(process) == latest]

    def ranks(self) -> dict[int, Process]:
        """The ranks of the present start; none while they are not all there."""
        found = ranks(self.newest())
        return found if len(found) == self.setup.nodes * self.setup.ranks else {}

    def mark(self) -> Mark:
        """Return the current state."""
        return Mark(self.log.stat().st_size, self.state())

    def has_noticed(self, mark: Mark, moment: float) -> bool:
        """Return True if there is a sign that the fault at ``moment``, right after ``mark``, was noticed."""
        self.progress.read()
        with self.log.open("rb") as file:
            file.seek(mark.offset)
            message = file.read().decode(errors="replace")
        return NOTICED.search(message) is not None or self.progress.reported_since(moment) or self.state() != mark.state

    def until(self, holds: Callable[[], bool], seconds: float = PATIENCE_SECONDS) -> bool:
        """Wait until something holds; False where the run ends without it.

        Raises:
            TimeoutError: when neither comes.
        """
        patience = time.monotonic() + seconds
        while not holds():
            if self.is_over():
                return holds()
            if time.monotonic() > patience:
                raise TimeoutError(f"the run is at step {self.progress.step} and does not go on")
            time.sleep(0.05)
            self.progress.read()
        return True

    def tail(self, lines: int = 80) -> str:
        """Return the last lines of its log, without lines of steps."""
        if not self.log.exists():
            return ""
        message = self.log.read_text(errors="replace").splitlines()
        return "\n".join([line for line in message if not STEP_LINE.match(line)][-lines:])
