"""A run that is kept going on this machine as a cluster would: torchrun's agents, started again until it has finished.

What stands in for Slurm is as harsh as it may be: an agent that is killed leaves its ranks behind, which go on, as
those of a node do that the others cannot reach any more.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.soaking.machine import MARK, Process, marked, ranks
from tests.soaking.progress import Progress
from tests.soaking.rank import FOLDER

ROOT = Path(__file__).parents[2]
STEPS = 150
TIMEOUT_MINUTES = 0.25
"""Of collectives: a rank that hangs is noticed after that time."""

GRACE_SECONDS = 15.0
"""What agents have to end when another one has failed, before they are killed."""

STARTS_WITHOUT_PROGRESS = 5
NOTICED = re.compile(r"error on rank|exitcode|Signal \d+|SIG[A-Z]+|RendezvousClosed|No space left|stopped by", re.ASCII)
"""What the log of a job says of a fault."""

FLAGS = (
    "--mock-data --vocab-size 31 --num-layers 2 --hidden-size 16 --num-attention-heads 2 --ffn-hidden-size 32 "
    "--hidden-dropout 0.1 --attention-dropout 0 --max-position-embeddings 8 --seq-length 8 --device cpu --lr 1e-2 "
    f"--log-interval 1 --train-iters {STEPS} --save-interval 10 --keep-last 4 --distributed-timeout-minutes {TIMEOUT_MINUTES}"
)


@dataclass(frozen=True)
class Setup:
    """A run.

    Attributes:
        name: for people.
        agents: of torchrun, one for each node.
        ranks: of each agent.
        flags: of its own.
    """

    name: str
    agents: int
    ranks: int
    flags: str


class Job:
    """One run, from its first start to its end; leaves no process behind."""

    program = "tests.soaking.rank"

    def __init__(self, setup: Setup, folder: Path) -> None:
        self.setup, self.folder = setup, folder
        self.progress = Progress(folder / "metrics.jsonl")
        self.attempt, self.failure = 0, ""
        self._agents: list[subprocess.Popen[bytes]] = []
        self._over, self._port = threading.Event(), _free_port()
        self._thread = threading.Thread(target=self._keep_going, daemon=True)
        for name in (FOLDER, "slurm"):
            (folder / name).mkdir(parents=True, exist_ok=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._over.set()
        self._thread.join()
        for process in marked(str(self.folder)):
            process.send(signal.SIGKILL)

    @property
    def log(self) -> Path:
        """What agents and ranks say."""
        return self.folder / "job.log"

    @property
    def stop_file(self) -> Path:
        """The file that tells the ranks of this attempt to save and end."""
        return self.folder / "slurm" / f"stop.{self.attempt}"

    def processes(self) -> list[Process]:
        """All that belong to the run now: agents, ranks, and those that earlier attempts have left."""
        return list(marked(str(self.folder)))

    def ranks(self) -> dict[int, Process]:
        """Those of the present attempt."""
        mine = [process for process in self.processes() if process.environ["SOAK_ATTEMPT"] == str(self.attempt)]
        return ranks(mine, self.program)

    def agents(self) -> list[subprocess.Popen[bytes]]:
        """Those of the present attempt."""
        return [*self._agents]

    def is_over(self) -> bool:
        """Whether nothing more will happen: it has finished, or was given up."""
        return not self._thread.is_alive()

    def is_finished(self) -> bool:
        """Whether the run says that its last step is taken and saved."""
        return (self.folder / "finished.json").exists()

    def has_noticed(self, moment: float, offset: int) -> bool:
        """Whether anything of the job shows that it has noticed what happened at ``moment``.

        Args:
            moment: in seconds of ``time.time()``.
            offset: how long the log was then.
        """
        self.progress.read()
        with self.log.open("rb") as file:
            file.seek(offset)
            said = file.read().decode(errors="replace")
        return NOTICED.search(said) is not None or self.progress.told_since(moment)

    # ---- the part of Slurm

    def _keep_going(self) -> None:
        """Start the agents again until the run has finished, or gets nowhere."""
        idle, reached = 0, -1
        while not self._over.is_set() and not self.is_finished():
            self.attempt += 1
            self._agents = [self._agent(node) for node in range(self.setup.agents)]
            self._await()
            newest = max((int(path.name[5:12]) for path in (self.folder / "saved").glob("iter_*")), default=0)
            idle, reached = (0, newest) if newest > reached else (idle + 1, reached)
            if idle == STARTS_WITHOUT_PROGRESS:
                self.failure = f"{idle} starts in a row have saved nothing new"
                return

    def _await(self) -> None:
        """Wait until all agents have ended. As soon as one fails, the others are told to end, and then made to."""
        told = 0.0
        while any(agent.poll() is None for agent in self._agents):
            failed = self._over.is_set() or any(agent.poll() for agent in self._agents)
            if failed and not told:
                told = time.monotonic()
                _send(self._agents, signal.SIGTERM)
            if told and time.monotonic() > told + GRACE_SECONDS:
                self._kill_what_is_left()
            time.sleep(0.05)

    def _kill_what_is_left(self) -> None:
        """Kill the agents that do not end, and their ranks."""
        alive = {agent.pid for agent in self._agents if agent.poll() is None}
        for process in self.processes():
            if process.parent in alive:
                process.send(signal.SIGKILL)
        _send(self._agents, signal.SIGKILL)

    def _agent(self, node: int) -> subprocess.Popen[bytes]:
        setup = self.setup
        program = [sys.executable, "-m", "torch.distributed.run", "--nnodes", str(setup.agents)]
        place = ["--nproc-per-node", str(setup.ranks), "--max-restarts", "1000", "--rdzv-id", self.folder.name]
        meet = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{self._port}", "--local-addr", "127.0.0.1"]
        keep = ["--run-dir", str(self.folder), "--save", f"{self.folder}/saved", "--stop-file", str(self.stop_file)]
        flags = [*FLAGS.split(), *setup.flags.split(), *keep]
        own = {
            MARK: str(self.folder),
            "SOAK_ATTEMPT": str(self.attempt),
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        }
        with self.log.open("ab") as log:
            return subprocess.Popen(
                [*program, *place, *meet, "-m", self.program, *flags],
                cwd=ROOT,
                env=os.environ | own,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )


def _send(agents: list[subprocess.Popen[bytes]], number: signal.Signals) -> None:
    for agent in agents:
        if agent.poll() is None:
            agent.send_signal(number)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
