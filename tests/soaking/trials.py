"""Runs with faults, one after the other: drawn, made, measured and judged."""

from __future__ import annotations

import math
import random
import shutil
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.distributed.crash_faults import step_of
from tests.kit.runs import differences, steps
from tests.slurm.cluster import Cluster
from tests.soaking.here import HereJob
from tests.soaking.job import PATIENCE_SECONDS, STEPS, Job, Mark, Setup
from tests.soaking.machine import Process
from tests.soaking.on_slurm import SlurmJob
from tests.soaking.progress import complaints
from tests.soaking.strikes import HERE, ON_SLURM, Strike

DETECTION_SECONDS = 30.0
RECOVERY_SECONDS = 120.0

LEAVING_SECONDS = 60.0
"""Seconds that processes of earlier starts have to end after the run: a collective's timeout, and a margin."""

FIRST, LAST = 3, STEPS - 12
"""The steps between which something happens."""

SP_TP2 = "--tensor-model-parallel-size 2 --sequence-parallel"
ZERO2 = "--data-parallel-sharding-strategy optim_grads"
SETUPS = [
    Setup("dp2 zero1, async", "here", 1, 2, "--bf16 --use-distributed-optimizer --global-batch-size 4 --async-save"),
    Setup("2 agents, dp2", "here", 2, 1, "--global-batch-size 4"),
    Setup("tp2 sp", "here", 1, 2, f"--bf16 {SP_TP2} --global-batch-size 2"),
    Setup("Slurm, 2 nodes, tp2 dp2", "slurm", 2, 2, "--global-batch-size 4"),
    Setup("2 agents, pp2, async", "here", 2, 1, "--pipeline-model-parallel-size 2 --global-batch-size 4 --async-save"),
    Setup("dp3 zero2", "here", 1, 3, f"{ZERO2} --global-batch-size 6"),
    Setup("dp2 zero2, async", "here", 1, 2, f"--bf16 {ZERO2} --global-batch-size 4 --async-save"),
    Setup("2 agents, tp2", "here", 2, 1, f"{SP_TP2} --global-batch-size 2"),
    Setup("1 rank, async", "here", 1, 1, "--global-batch-size 2 --async-save"),
    Setup("Slurm, 2 nodes, tp2 dp2, srun", "slurm", 2, 2, "--global-batch-size 4", "srun"),
]


@dataclass(frozen=True)
class Outcome:
    """A fault and what came of it.

    Attributes:
        kind: of fault.
        what: has happened.
        noticed: seconds until something showed that it was noticed; None when nothing did.
        again: seconds until a step of the next start was recorded (after a full disk: a checkpoint), or the run was
            finished nevertheless; None for never.
    """

    kind: str
    what: str
    noticed: float | None = None
    again: float | None = None

    @property
    def is_in_time(self) -> bool:
        """Return True if both came in time."""
        if self.noticed is None or self.again is None:
            return False
        return self.noticed < DETECTION_SECONDS and self.again < RECOVERY_SECONDS

    def __str__(self) -> str:
        noticed, again = ("never" if s is None else f"{s:.1f}" for s in (self.noticed, self.again))
        return f"{self.what} ({noticed}, {again} s)"


@dataclass
class Trial:
    """A run with its faults, and what was wrong in the end; goodput in (0, 1]."""

    setup: Setup
    outcomes: list[Outcome] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    goodput: float = 0.0
    starts: int = 0
    seconds: float = 0.0


class Trials:
    """Draws runs with faults, and makes them."""

    def __init__(
        self,
        folder: Path,
        seed: int,
        most: int,
        setups: Sequence[Setup],
        kinds: Sequence[str],
        cluster: Cluster | None,
        report: Callable[[str], None],
    ) -> None:
        """Make none yet.

        Args:
            folder: for those that Slurm does not run.
            seed: on which they depend.
            most: faults of one run.
            setups: to make, in turn.
            kinds: of faults; a setup gets the possible ones.
            cluster: for setups on Slurm.
            report: called with every fault.
        """
        self._folder, self._seed, self._most, self._setups, self._cluster = folder, seed, most, setups, cluster
        self._report = report
        self._kinds = {where: [kind for kind in table if kind in kinds] for where, table in TABLES.items()}
        self._references: dict[Setup, Path] = {}
        self._making = {setup: threading.Lock() for setup in setups}

    def reference(self, setup: Setup) -> Path:
        """The folder of an undisturbed run, made when it is first asked for.

        Raises:
            RuntimeError: when it fails.
        """
        with self._making[setup]:
            if setup not in self._references:
                with self._job(setup, f"reference{self._setups.index(setup)}") as job:
                    job.until(lambda: False)
                job.progress.read()
                if not job.is_finished() or sum(r.get("event") == "start" for r in job.progress.records) != 1:
                    raise RuntimeError(f"{setup.name} fails undisturbed:\n{job.tail()}")
                self._references[setup] = job.folder
        return self._references[setup]

    def _job(self, setup: Setup, name: str) -> Job:
        if setup.where == "here":
            return HereJob(setup, self._folder / name)
        if self._cluster is None:
            raise RuntimeError(f"there is no cluster for {setup.name}")
        return SlurmJob(setup, self._cluster.root / name, self._cluster)

    def make(self, number: int) -> Trial:
        """One trial; what happens in it depends on the seed and its number.

        Raises:
            RuntimeError: when the run fails undisturbed.
        """
        chance, setup = random.Random(f"{self._seed} {number}"), self._setups[number % len(self._setups)]
        reference = self.reference(setup)
        trial, began = Trial(setup), time.monotonic()
        with self._job(setup, f"trial{number}") as job:
            try:
                self._disturb(trial, job, chance)
                if not trial.wrong:
                    job.until(lambda: False)
                    job.progress.read()
                    trial.wrong += [job.failure] if job.failure else []
                    trial.wrong += judge(job, reference)
            except Exception:
                trial.wrong.append(f"{traceback.format_exc()}\n{job.tail()}")
        last = next((record for record in reversed(job.progress.records) if "goodput" in record), None)
        if last is not None:
            trial.goodput, trial.starts = last["goodput"], last["starts"]
        if not trial.wrong:
            shutil.rmtree(job.folder)
        trial.seconds = time.monotonic() - began
        return trial

    def _disturb(self, trial: Trial, job: Job, chance: random.Random) -> None:
        """Have something happen at some steps, of as many kinds as there are, each time after the run has recovered."""
        kinds = self._kinds_for(job.setup)
        drawn = chance.sample(kinds * math.ceil(self._most / len(kinds)), self._most)
        for step, kind in zip(sorted(chance.sample(range(FIRST, LAST), self._most)), drawn):
            if not job.until(lambda step=step: job.progress.step >= step):
                return
            mark = job.mark()
            strike = TABLES[job.setup.where][kind](job, chance)
            if strike is None:
                continue
            trial.outcomes.append(outcome := _measured(job, kind, strike, mark))
            self._report(f"{job.folder.name}: {outcome}")
            if outcome.again is None:
                trial.wrong.append(f"{strike.what}: the run does not go on\n{job.tail()}")
                return
            trial.wrong += _unreported(strike, job.progress.since(strike.moment))
            strike.afterwards()

    def _kinds_for(self, setup: Setup) -> list[str]:
        """Those that can happen to it: srun has no agents, and a rank alone that hangs is not noticed."""
        without = ["agent"] * (setup.launcher == "srun") + ["hangs"] * (setup.nodes * setup.ranks == 1)
        return [kind for kind in self._kinds[setup.where] if not any(word in kind for word in without)]


def _unreported(strike: Strike, records: list[dict[str, Any]]) -> list[str]:
    """Return the damage that the next start should have reported, and did not.

    A save that was under way may have given it a newer checkpoint; then it need not look at the damaged one.
    """
    if strike.damaged is None:
        return []
    resumed = next((record["iteration"] for record in records if record.get("event") == "start"), 0)
    reported = any(strike.damaged.name in record.get("text", "") for record in records)
    needed = resumed <= step_of(strike.damaged)
    return [f"{strike.what}: the next start does not report it"] if needed and not reported else []


TABLES = {"here": HERE, "slurm": ON_SLURM}


def _measured(job: Job, kind: str, strike: Strike, mark: Mark) -> Outcome:
    """Wait until the run has recovered."""
    noticed: float | None = None
    until = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < until and not job.is_over():
        if noticed is None and job.has_noticed(mark, strike.moment):
            noticed = time.time() - strike.moment
        job.progress.read()
        again = job.progress.saved_again(strike.over) if strike.over else job.progress.again(strike.moment)
        if again is not None:
            return Outcome(kind, strike.what, noticed, again - strike.moment)
        time.sleep(0.05)
    finished = time.time() - strike.moment if job.is_finished() else None
    return Outcome(kind, strike.what, finished if noticed is None else noticed, finished)


def judge(job: Job, reference: Path) -> list[str]:
    """Return the traces that the fault has left now that the run is over."""
    if not job.is_finished():
        return [f"the run has not finished:\n{job.tail()}"]
    last = f"checkpoints/iter_{STEPS:07d}"
    found = [f"{name} is another in the end" for name in differences(job.folder / last, reference / last)]
    found += complaints(job.progress.records, STEPS, steps(reference))
    return found + [f"process {p.pid} of start {job.attempt_of(p)} does not end: {p.command}" for p in _left(job)]


def _left(job: Job) -> list[Process]:
    """Processes that should have ended."""
    until = time.monotonic() + LEAVING_SECONDS
    while (left := job.processes()) and time.monotonic() < until:
        time.sleep(0.2)
    return left
