"""A run that a real Slurm keeps going: ``slurm/train_175b.sh`` with a tiny model, on nodes that can be lost."""

from __future__ import annotations

import time
from contextlib import nullcontext, suppress
from pathlib import Path

from tests.slurm.cluster import ENDED, Cluster
from tests.soaking.job import EVERY, FLAGS, STEPS, Job, Setup
from tests.soaking.machine import MARK, Process

LOOK_EVERY = 0.5
"""Seconds between two questions to Slurm, each of which takes a process."""

SMALLER = "--num-virtual-stages-per-pipeline-rank 1 --pipeline-model-parallel-size 1"


class SlurmJob(Job):
    """One job, queued again by Slurm and by itself."""

    def __init__(self, setup: Setup, folder: Path, cluster: Cluster) -> None:
        super().__init__(setup, folder)
        self.cluster, self.number, self.lost = cluster, "", set[str]()
        self._asked, self._seen = 0.0, dict[str, str]()

    def start(self) -> None:
        setup = self.setup
        words = {"SMALL": "1", "RUN": str(self.folder), "STEPS": str(STEPS), "SAVE_EVERY": str(EVERY)}
        words |= {"LAUNCHER": setup.launcher, "RANKS_PER_NODE": str(setup.ranks), "MAX_RESTARTS": "100"}
        words |= {"MAX_STALLED": "10", MARK: str(self.folder)}
        flags = [*FLAGS.split(), *SMALLER.split(), *setup.flags.split()]
        nodes = f"--nodes={setup.nodes}"
        self.number = self.cluster.sbatch(nodes, "slurm/train_175b.sh", *flags, environ=words)

    def stop(self) -> None:
        if self.number:
            self.bring_back()
            self.cluster.cancel(self.number)

    def is_over(self) -> bool:
        return self._job()["JobState"] in ENDED

    def state(self) -> str:
        job = self._job()
        return f"{job['JobState']}, restarts {job.get('Restarts')}, on {job.get('NodeList')}"

    def attempt_of(self, process: Process) -> int:
        return int(process.environ.get("SLURM_RESTART_COUNT", "0"))

    @property
    def log(self) -> Path:
        return self.cluster.submitted[self.number]

    def nodes(self) -> list[str]:
        """Those it has now; none while it waits."""
        return self.cluster.node_list(self.number) if self._job()["JobState"] == "RUNNING" else []

    def bring_back(self) -> None:
        """Nodes that were lost boot, or are plugged in, are idle again and hold no steps of this job.

        A node that is given the job again while an earlier step of it has not reported its end is drained by Slurm,
        which holds the job.
        """
        for node in self.lost:
            if (self.cluster.root / "run" / f"{node}.pid").exists():
                self.cluster.plug(node)
            else:
                self.cluster.power_on(node)
        steps = rf"slurmstepd: \[{self.number}\."
        for node in self.lost:
            self.cluster.until(lambda node=node: self.cluster.nodes()[node] == "IDLE", f"{node} is idle again")
            self.cluster.until(lambda node=node: not self.cluster.processes(node, steps), f"{node} has ended its steps")
        self.lost.clear()

    def _job(self) -> dict[str, str]:
        """Return Slurm's record, not asked too often; the last one where Slurm has no time to answer."""
        if time.monotonic() > self._asked + LOOK_EVERY:
            with suppress(RuntimeError) if self._seen else nullcontext():
                self._seen = self.cluster.job(self.number)
            self._asked = time.monotonic()
        return self._seen
