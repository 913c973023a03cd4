"""Replicas that are lost at random, while the others train.

``python -m tests.elastic_soak --deaths 1000 --seed 1`` writes ``tests/golden/elastic.txt``. Each run is of a tiny model
in replicas of one or two ranks. At random moments one or two of them are killed, or one of their ranks, or stopped for
longer than ``--elastic-timeout``; they start again at once, so some die while others join, or while they are filled.
One death in five does not wait until training goes on after the one before, and its time counts for both.
At least one replica that has a state is always left. Each death has to be followed by training within ten seconds, and
each step has to keep the promises of docs/elastic.md (`broken_promises`).
"""

from __future__ import annotations

import argparse
import datetime
import os
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from tests.distributed.replica_runs import FP64, Fleet, broken_promises, undisturbed

FILE = Path(__file__).parent / "golden" / "elastic.txt"

TIMEOUT = 6.0
LIMIT_SECONDS = 10.0
PAUSE = 0.03
"""Seconds before every step."""

SETUPS: dict[str, tuple[int, int, str]] = {
    "3 replicas": (3, 1, ""),
    "4 replicas": (4, 1, "--hidden-dropout 0.1"),
    "3 replicas, left out": (3, 1, "--elastic-batch shrink"),
    "3 replicas of TP 2": (3, 2, "--tensor-model-parallel-size 2 --sequence-parallel"),
    "2 replicas of PP 2": (2, 2, "--pipeline-model-parallel-size 2"),
    "2 replicas of DP 2, ZeRO-3": (
        2,
        2,
        "--use-distributed-optimizer --data-parallel-sharding-strategy optim_grads_params",
    ),
}
"""Replicas, ranks of each, flags."""

LAYOUTS = [flags for _, _, flags in SETUPS.values() if "parallel" in flags]
"""Flags that one process does without."""


@dataclass
class Death:
    """A replica that was lost.

    Attributes:
        kind: what happened.
        index: of the replica.
        step: last step that was taken before.
        time: of the death.
        again: seconds until two steps later; None if that did not happen.
        core: most seconds of it that a survivor was ready to run and had no core.
        back: seconds until the next start of the replica has taken a step; None if it was lost before.
    """

    kind: str
    index: int
    step: int
    time: float
    start: str
    again: float | None = None
    core: float = 0.0
    back: float | None = None


@dataclass
class Run:
    """One run with its deaths."""

    setup: str
    deaths: list[Death] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)  # starts that ended by themselves, and started again
    load: float = 0.0  # of the machine in the last minute


def strike(fleet: Fleet, random: Random, run: Run, stopped: dict[int, float]) -> None:
    """Lose one or more replicas, and start them again."""
    now = time.monotonic()
    whole = [index for index in range(fleet.count) if index not in stopped and fleet.is_back(index)]
    if not whole:
        return
    kept = random.choice(whole)
    others = [index for index in range(fleet.count) if index != kept and index not in stopped]
    if not others:
        return
    number = random.choice([1, 1, 1, len(others)])
    kind = "stopped" if random.random() < 0.05 else random.choice(["killed", "one rank killed"][: fleet.ranks])
    step = fleet.last_step()
    for index in random.sample(others, 1 if kind == "stopped" else number):
        run.deaths.append(Death(kind, index, step, now, fleet.names[index]))
        programs = fleet.programs[index]
        if kind == "stopped":
            for program in programs:
                program.send_signal(signal.SIGSTOP)
            stopped[index] = now
            continue
        if kind == "one rank killed":
            random.choice(programs).kill()
            if fleet.is_back(index):  # a rank that still starts waits for the other one, until its launcher ends it
                fleet.wait_for_end(index)
        fleet.kill(index)
        fleet.start(index)


def wake(fleet: Fleet, run: Run, stopped: dict[int, float]) -> None:
    """Continue replicas that were stopped for long enough, which end by themselves, and start what has ended."""
    for index in range(fleet.count):
        statuses = [program.poll() for program in fleet.programs[index]]
        if index not in stopped and None not in statuses:  # it could not join, because its source was lost
            run.ended.append(f"{fleet.names[index]} {statuses}")
            fleet.start(index)
    for index, since in [*stopped.items()]:
        if time.monotonic() < since + 2 * TIMEOUT:
            continue
        programs = fleet.programs[index]
        for program in programs:
            program.send_signal(signal.SIGCONT)
        step = fleet.last_step()  # the replica may still record a step that it had taken with the others
        ends = partial(_ends_or_goes_on, fleet, index, step)
        fleet.wait(ends)  # it may go on if the others have not missed it yet
        del stopped[index]
        if fleet.step_of(index) <= step:
            fleet.wait_for_end(index)
            fleet.start(index)


def _ends_or_goes_on(fleet: Fleet, index: int, step: int) -> bool:
    return fleet.step_of(index) > step or all(program.poll() is not None for program in fleet.programs[index])


def measure(fleet: Fleet, run: Run) -> None:
    """Find when training went on after each death."""
    lines = sorted((line for index in range(fleet.count) for line in fleet.steps(index)), key=lambda line: line["time"])
    for death in run.deaths:
        after = [line for line in lines if line["time"] > death.time]
        again = next((line["time"] for line in after if line["step"] > death.step + 1), None)
        if again is not None:
            death.again, death.core = again - death.time, _wait_for_a_core(lines, death.time, again)
        starts = sorted({line["start"] for line in lines if line["start"].startswith(f"{death.index}.")}, key=_number)
        later = [start for start in starts if _number(start) > _number(death.start)]
        if later:
            death.back = next(line["time"] for line in after if line["start"] == later[0]) - death.time


def _wait_for_a_core(lines: Sequence[dict[str, Any]], began: float, end: float) -> float:
    """Return the most seconds that one of the starts which were there all the time was ready to run without a core."""
    before = {line["start"]: line["core"] for line in lines if line["time"] <= began}
    after = {line["start"]: line["core"] for line in lines if line["time"] <= end}
    last = {line["start"]: line["time"] for line in lines}
    return max((after[s] - before[s] for s in before if last[s] >= end), default=0.0)


def _number(start: str) -> int:
    return int(start.partition(".")[2])


def make_run(folder: Path, setup: str, seed: int, deaths: int, pace: float) -> Run:
    """Train with so many deaths, and check what was promised."""
    count, ranks, flags = SETUPS[setup]
    random, run, stopped = Random(seed), Run(setup), dict[int, float]()
    steps = 40 * deaths
    base = f"{FP64} --lr 1e-4 --global-batch-size 6 --seed {seed} --train-iters {steps} --lr-decay-iters 1000"
    base += f" --lr-warmup-iters 0 --save-interval 40 --log-interval 10 {flags.replace('--elastic-batch shrink', '')}"
    elastic = f"--save {folder}/saved --elastic-timeout {TIMEOUT} {flags if 'elastic' in flags else ''}"
    try:
        with Fleet(folder / "run", f"{base} {elastic}", count, ranks, PAUSE) as fleet:
            fleet.start(*range(count))
            fleet.wait(lambda: all(fleet.is_back(index) for index in range(count)))
            while len(run.deaths) < deaths and all(fleet.step_of(index) < steps - 40 for index in range(count)):
                time.sleep(pace * random.random())
                wake(fleet, run, stopped)
                if run.deaths and random.random() < 0.8:
                    step = run.deaths[-1].step
                    fleet.wait(lambda step=step: fleet.last_step() > step + 1)  # type: ignore[misc]
                strike(fleet, random, run, stopped)
            last = run.deaths[-1].step
            fleet.wait(lambda: fleet.last_step() > last + 2)
            while stopped:
                time.sleep(0.1)
                wake(fleet, run, stopped)
            until = time.monotonic() + 60.0
            while not all(fleet.is_back(index) for index in range(count)) and time.monotonic() < until:
                time.sleep(0.1)
                wake(fleet, run, stopped)
            fleet.wait(lambda: all(fleet.is_back(index) for index in range(count)), 0.0)
            fleet.kill(*range(count))
            taken = fleet.last_step()
            measure(fleet, run)
            one = None
            if "shrink" not in flags:
                world = f"{base} --exit-interval {taken + 1}"
                for words in LAYOUTS:
                    world = world.replace(words, "")
                one = undisturbed(folder / "one", world)
            run.wrong += broken_promises(fleet, one, 1e-8)
    except (TimeoutError, RuntimeError) as error:
        run.wrong.append(str(error))
    run.load = os.getloadavg()[0]
    return run


def report(runs: Sequence[Run], command: str) -> list[str]:
    """Return the lines of the file."""
    deaths = [death for run in runs for death in run.deaths]
    late = [death for death in deaths if death.again is None or death.again > LIMIT_SECONDS]
    slow = [death for death in late if death.again is None or death.again - death.core > LIMIT_SECONDS]
    wrong = [text for run in runs for text in run.wrong]
    loads = [run.load for run in runs]
    lines = [
        f"{command}, {datetime.date.today()}; load of {min(loads):.0f} to {max(loads):.0f} on {os.cpu_count()} cores",
        f"{len(deaths)} replicas lost in {len(runs)} runs; {len(wrong)} wrong, {len(late)} later than "
        f"{LIMIT_SECONDS:g} s ({len(slow)} without the time that a survivor waited for a core); "
        f"{sum(len(run.ended) for run in runs)} starts could not join and started again",
        "",
        f"{'':<28}{'deaths':>7}   seconds until two steps later    seconds until the replica trains again",
        f"{'':<28}{'':>7}   {'median':>7}{'95 %':>7}{'99 %':>7}{'most':>7}    {'median':>7}{'95 %':>7}{'most':>7}",
    ]
    groups: dict[str, list[Death]] = {"all": deaths}
    groups |= {kind: [d for d in deaths if d.kind == kind] for kind in sorted(Counter(d.kind for d in deaths))}
    groups |= {setup: [d for run in runs if run.setup == setup for d in run.deaths] for setup in SETUPS}
    for name, found in groups.items():
        again = sorted(death.again for death in found if death.again is not None)
        back = sorted(death.back for death in found if death.back is not None)
        if again:
            shown = "".join(f"{_quantile(again, share):>7.2f}" for share in (0.5, 0.95, 0.99, 1.0))
            shown_back = "".join(f"{_quantile(back, share):>7.2f}" for share in (0.5, 0.95, 1.0)) if back else ""
            lines.append(f"{name:<28}{len(found):>7}   {shown}    {shown_back}")
    return [*lines, *[f"wrong: {text.splitlines()[0][:200]}" for text in wrong]]


def _quantile(values: Sequence[float], share: float) -> float:
    return (
        values[0]
        if len(values) == 1
        else statistics.quantiles([*values], n=1000, method="inclusive")[min(998, int(share * 1000) - 1)]
        if share < 1
        else values[-1]
    )


def main(argv: Sequence[str]) -> int:
    """Make runs until so many replicas were lost, and write what was found; 1 when something was wrong or late."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--deaths", type=int, default=1000)
    parser.add_argument("--per-run", type=int, default=15)
    parser.add_argument("--pace", type=float, default=1.5, help="most seconds between two strikes")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--setups", nargs="+", type=int, default=range(len(SETUPS)), help="which, counted from 0")
    parser.add_argument("--output", type=Path, default=FILE)
    options = parser.parse_args(argv)
    setups, runs = [[*SETUPS][number] for number in options.setups], list[Run]()
    command = f"python -m tests.elastic_soak --deaths {options.deaths} --seed {options.seed}"
    while sum(len(run.deaths) for run in runs) < options.deaths:
        folder, number = Path(tempfile.mkdtemp(prefix="elastic.")), len(runs)
        began = time.monotonic()
        run = make_run(folder, setups[number % len(setups)], options.seed + number, options.per_run, options.pace)
        runs.append(run)
        found: Any = f"WRONG: {run.wrong[0][:3000]} ({folder})" if run.wrong else "right"
        longest = max((death.again or 99.0 for death in run.deaths), default=0.0)
        print(
            f"{number:>3} {run.setup:<28} {len(run.deaths):>3} deaths, again in at most {longest:.2f} s, "
            f"{time.monotonic() - began:.0f} s: {found}",
            flush=True,
        )
        if not run.wrong:
            shutil.rmtree(folder, ignore_errors=True)
        options.output.write_text("\n".join([*report(runs, command), ""]))
    late = any(death.again is None or death.again > LIMIT_SECONDS for run in runs for death in run.deaths)
    return int(late or any(run.wrong for run in runs))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
