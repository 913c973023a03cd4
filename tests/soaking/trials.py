"""Runs with faults, one after the other: drawn, made, measured and judged."""

from __future__ import annotations

import random
import shutil
import threading
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.runs import differences, steps
from tests.soaking.job import STEPS, Job, Setup
from tests.soaking.progress import Progress, complaints
from tests.soaking.strikes import KINDS, Strike

DETECTION_SECONDS = 30.0
RECOVERY_SECONDS = 120.0
PATIENCE_SECONDS = 300.0
"""After which a run that does not go on is given up."""

FIRST, LAST = 3, STEPS - 12
"""The steps between which something happens."""

SETUPS = [
    Setup(
        "dp2 zero1, async", 1, 2, "--bf16 --use-distributed-optimizer --global-batch-size 4 --async-save --keep-last 3"
    ),
    Setup("2 agents, dp2", 2, 1, "--global-batch-size 4"),
    Setup("tp2 sp", 1, 2, "--bf16 --tensor-model-parallel-size 2 --sequence-parallel --global-batch-size 2"),
    Setup("2 agents, pp2, async", 2, 1, "--pipeline-model-parallel-size 2 --global-batch-size 4 --async-save"),
    Setup("dp3 zero2", 1, 3, "--data-parallel-sharding-strategy optim_grads --global-batch-size 6"),
]


@dataclass(frozen=True)
class Outcome:
    """A fault and what came of it.

    Attributes:
        strike: the fault.
        noticed: seconds until something showed that it was noticed; None when nothing did.
        again: seconds until a step of the next start was recorded (after a full disk: a checkpoint); None for never.
    """

    strike: Strike
    noticed: float | None = None
    again: float | None = None

    @property
    def is_in_time(self) -> bool:
        """Whether both came within the time that they may take."""
        if self.noticed is None or self.again is None:
            return False
        return self.noticed < DETECTION_SECONDS and self.again < RECOVERY_SECONDS


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

    def __init__(self, folder: Path, seed: int, most: int, kinds: Sequence[str] = (*KINDS,)) -> None:
        """Make none yet.

        Args:
            folder: for them.
            seed: on which they depend.
            most: faults of one run.
            kinds: of faults.
        """
        self._folder, self._seed, self._most, self._kinds = folder, seed, most, kinds
        self._references: dict[Setup, Path] = {}
        self._making = {setup: threading.Lock() for setup in SETUPS}

    def reference(self, setup: Setup) -> Path:
        """The folder of an undisturbed run, made when it is first asked for.

        Raises:
            RuntimeError: when it fails.
        """
        with self._making[setup]:
            if setup not in self._references:
                folder = self._folder / f"reference{SETUPS.index(setup)}"
                with Job(setup, folder) as job:
                    _await_end(job)
                if not job.is_finished() or job.attempt > 1:
                    raise RuntimeError(f"{setup.name} fails undisturbed:\n{tail(job.log)}")
                self._references[setup] = folder
        return self._references[setup]

    def make(self, number: int) -> Trial:
        """One trial; what happens in it depends on the seed and its number."""
        chance, setup = random.Random(f"{self._seed} {number}"), SETUPS[number % len(SETUPS)]
        trial, folder, began = Trial(setup), self._folder / f"trial{number}", time.monotonic()
        try:
            reference = self.reference(setup)
            with Job(setup, folder) as job:
                self._disturb(trial, job, chance)
                _await_end(job)
                trial.wrong += [job.failure] if job.failure else []
                trial.wrong += judge(job, reference)
            trial.goodput, trial.starts = _last(job.progress, "goodput"), int(_last(job.progress, "starts"))
        except Exception:
            trial.wrong.append(f"{traceback.format_exc()}\n{tail(folder / 'job.log')}")
        trial.seconds = time.monotonic() - began
        if not trial.wrong:
            shutil.rmtree(folder)
        return trial

    def _disturb(self, trial: Trial, job: Job, chance: random.Random) -> None:
        """Have something happen at some steps, each time after the run has recovered."""
        for step in sorted(chance.sample(range(FIRST, LAST), self._most)):
            kind = chance.choice(self._kinds)
            if not _await(job, lambda step=step: job.progress.step >= step):
                return
            offset, since = job.log.stat().st_size, time.time()
            strike = KINDS[kind](job, chance)
            if strike is None:
                continue
            trial.outcomes.append(outcome := _measured(job, strike, offset))
            if outcome.again is None:
                trial.wrong.append(f"{strike.what}: the run does not go on\n{tail(job.log)}")
                return
            if strike.must_say and strike.must_say not in said_since(job, since):
                trial.wrong.append(f"{strike.what}: the next start says nothing of it")


def _measured(job: Job, strike: Strike, offset: int) -> Outcome:
    """Wait until the run has recovered."""
    noticed: float | None = None
    until = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < until and not job.is_over():
        if noticed is None and job.has_noticed(strike.moment, offset):
            noticed = time.time() - strike.moment
        job.progress.read()
        recovered = job.progress.saved_again(strike.over) if strike.over else job.progress.again(strike.moment)
        if recovered is not None:
            return Outcome(strike, noticed, recovered - strike.moment)
        time.sleep(0.05)
    return Outcome(strike, noticed)


def said_since(job: Job, moment: float) -> str:
    """Notes and warnings of the run since then."""
    return "\n".join(record.get("text", "") for record in job.progress.since(moment))


def _await(job: Job, condition: Any) -> bool:
    """Wait for something; False where the run ends before.

    Raises:
        TimeoutError: when neither comes.
    """
    until = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        if job.is_over():
            return False
        if time.monotonic() > until:
            raise TimeoutError(f"the run is at step {job.progress.step} and does not go on")
        time.sleep(0.05)
        job.progress.read()
    return True


def _await_end(job: Job) -> None:
    _await(job, lambda: False)
    job.progress.read()


def judge(job: Job, reference: Path) -> list[str]:
    """What is not as if nothing had happened, now that the run is over."""
    if not job.is_finished():
        return [f"the run has not finished:\n{tail(job.log)}"]
    last = f"saved/iter_{STEPS:07d}"
    found = [f"{name} is another in the end" for name in differences(job.folder / last, reference / last)]
    found += complaints(job.progress.records, STEPS, steps(reference))
    left = [process for process in job.processes() if process.environ["SOAK_ATTEMPT"] != str(job.attempt)]
    return found + [f"process {process.pid} of attempt {process.environ['SOAK_ATTEMPT']} is left" for process in left]


def _last(progress: Progress, name: str) -> float:
    """A number of the last step's record."""
    return next((float(record[name]) for record in reversed(progress.records) if name in record), 0.0)


def tail(log: Path, lines: int = 60) -> str:
    """The last lines of a log."""
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:]) if log.exists() else ""
