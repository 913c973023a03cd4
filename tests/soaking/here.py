"""A run that is kept going on this machine as a cluster would: torchrun's agents, started again until it has finished.

What stands in for Slurm counts the starts as Slurm does, and is as harsh as it may be: an agent that is killed leaves
its ranks behind, which go on, like the ranks of a node that the others cannot reach any more.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from tests.kit.processes import free_port
from tests.soaking.job import EVERY, FLAGS, STEPS, Job, Setup
from tests.soaking.machine import MARK, Process
from tests.soaking.rank import FOLDER

ROOT = Path(__file__).parents[2]

GRACE_SECONDS = 15.0
"""Seconds that agents have to end when another one has failed, before they are killed."""

STARTS_WITHOUT_PROGRESS = 10

STARTING, NO_MORE = threading.Lock(), threading.Event()
"""Held while agents are started; set when none may be started any more."""


def start_no_more() -> None:
    """From now on nothing is started again, by no job: who ends processes then has ended all."""
    with STARTING:
        NO_MORE.set()


class HereJob(Job):
    """A thread starts the agents, and starts them again."""

    def __init__(self, setup: Setup, folder: Path) -> None:
        super().__init__(setup, folder)
        (folder / FOLDER).mkdir()
        self._agents, self._attempt = list[subprocess.Popen[bytes]](), 0
        self._given_up, self._port = threading.Event(), free_port()
        self._thread = threading.Thread(target=self._keep_going, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._given_up.set()
        self._thread.join()

    def is_over(self) -> bool:
        return not self._thread.is_alive()

    def state(self) -> str:
        return f"start {self._attempt}, agents {[agent.poll() for agent in self._agents]}"

    def attempt_of(self, process: Process) -> int:
        return int(process.environ["SLURM_RESTART_COUNT"])

    @property
    def log(self) -> Path:
        return self.folder / "job.log"

    @property
    def stop_file(self) -> Path:
        """The file that asks the ranks of this start to save and end."""
        return self.folder / "slurm" / f"stop.{self._attempt}"

    def _keep_going(self) -> None:
        """Start the agents again until the run has finished, or gets nowhere."""
        idle, reached = 0, -1
        while not self._given_up.is_set() and not self.is_finished():
            with STARTING:
                if NO_MORE.is_set():
                    return
                self._attempt += 1
                self._agents = [self._agent() for _ in range(self.setup.nodes)]
            self._attend()
            newest = max((int(path.name[5:12]) for path in self.checkpoints.glob("iter_*")), default=0)
            idle, reached = (0, newest) if newest > reached else (idle + 1, reached)
            if idle == STARTS_WITHOUT_PROGRESS:
                self.failure = f"{idle} starts in a row have saved nothing new\n{self.tail()}"
                return

    def _attend(self) -> None:
        """Wait until all agents have ended. As soon as one fails, the others get SIGTERM, and then SIGKILL."""
        printed = 0.0
        while any(agent.poll() is None for agent in self._agents):
            failed = self._given_up.is_set() or any(agent.poll() for agent in self._agents)
            if failed and not printed:
                printed = time.monotonic()
                _send(self._agents, signal.SIGTERM)
            if printed and time.monotonic() > printed + GRACE_SECONDS:
                self._kill_what_is_left()
            time.sleep(0.05)

    def _kill_what_is_left(self) -> None:
        """Kill the agents that do not end, and their ranks."""
        alive = {agent.pid for agent in self._agents if agent.poll() is None}
        for process in self.processes():
            if process.parent in alive:
                process.send(signal.SIGKILL)
        _send(self._agents, signal.SIGKILL)

    def _agent(self) -> subprocess.Popen[bytes]:
        setup = self.setup
        program = [sys.executable, "-m", "torch.distributed.run", "--nnodes", str(setup.nodes)]
        place = ["--nproc-per-node", str(setup.ranks), "--max-restarts", "1000", "--rdzv-id", self.folder.name]
        meet = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{self._port}", "--local-addr", "127.0.0.1"]
        length = ["--device", "cpu", "--mock-data", "--train-iters", str(STEPS), "--save-interval", str(EVERY)]
        keep = ["--run-dir", str(self.folder), "--save", str(self.checkpoints), "--stop-file", str(self.stop_file)]
        flags = [*FLAGS.split(), *length, *setup.flags.split(), *keep]
        own = {
            MARK: str(self.folder),
            "SLURM_JOB_ID": str(self._port),
            "SLURM_RESTART_COUNT": str(self._attempt - 1),
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        }
        with self.log.open("ab") as log:
            return subprocess.Popen(
                [*program, *place, *meet, "-m", "tests.soaking.rank", *flags],
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
