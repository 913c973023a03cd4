"""Runs that are disturbed at random and must recover by themselves within a time limit.

``python -m tests.soak --faults 200 --seed 1`` writes ``tests/golden/soak.txt``. Each run is of a tiny model on one to
four ranks, kept going as a batch job is: by torchrun on this machine, or by ``slurm/train_175b.sh`` on a real Slurm.
Ranks, agents, saves and nodes are struck at random moments, several times a run. It has to end by itself with the
parameters of the undisturbed run to the bit, and one curve without holes; each fault has to be noticed, and training be
under way again, in time.
"""

from __future__ import annotations

import argparse
import itertools
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path

from tests.slurm import cluster as slurm
from tests.slurm.cluster import Cluster
from tests.soaking.here import start_no_more
from tests.soaking.machine import end
from tests.soaking.report import line, report
from tests.soaking.strikes import HERE, ON_SLURM
from tests.soaking.trials import SETUPS, Trial, Trials

FILE = Path(__file__).parent / "golden" / "soak.txt"
NODES_OF_A_RUN = 4
"""Of a cluster, for each run at the same time: two of them can be lost."""

MESSAGE_TIMEOUT = 5
"""Seconds that Slurm waits for an answer, more than its KillWait.

A node answers to the kill of a step (``srun --kill-on-bad-exit``) after KillWait. If that is too late, Slurm repeats
the kill after a minute; a job that was requeued and has begun meanwhile then loses a step with the same number.
(Otherwise this has no effect: a job waits for two minutes before it begins again.)
"""

GPUS = 8
"""None, but the recipe asks for them."""


def soak(trials: Trials, faults: int, jobs: int) -> list[Trial]:
    """Trials until so many faults have happened, some at the same time; each is printed when it is over."""
    made: dict[int, Trial] = {}
    with ThreadPoolExecutor(jobs) as pool:
        numbers = itertools.count()
        waiting = {pool.submit(trials.make, number): number for number in itertools.islice(numbers, jobs)}
        while waiting:
            for future in wait(waiting, return_when=FIRST_COMPLETED).done:
                number = waiting.pop(future)
                made[number] = trial = future.result()
                happened = sum(len(trial.outcomes) for trial in made.values())
                print_now(f"{happened:>4} faults  {number:>3} {line(trial)}, {trial.seconds:.0f} s")
                if happened < faults:
                    number = next(numbers)
                    waiting[pool.submit(trials.make, number)] = number
    return [made[number] for number in sorted(made)]


def print_now(text: str) -> None:
    """Print a line at once."""
    print(text, flush=True)


@contextmanager
def places(jobs: int, with_slurm: bool) -> Iterator[tuple[Path, Cluster | None]]:
    """A folder for runs, and a cluster where it is wanted; no process is left in the end, whatever ends it."""

    def leave(number: int, frame: object) -> None:
        start_no_more()
        end(str(folder))
        if cluster is not None:
            cluster.down()
            shutil.rmtree(cluster.root, ignore_errors=True)
        os._exit(128 + number)

    folder, cluster = Path(tempfile.mkdtemp(prefix="soak.")), None
    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        if not with_slurm:
            yield folder, None
        else:
            os.environ["MINISLURM_MESSAGE_TIMEOUT"] = str(MESSAGE_TIMEOUT)
            with slurm.running(NODES_OF_A_RUN * jobs, GPUS) as cluster:
                yield folder, cluster
    finally:
        end(str(folder))
        for number, handler in before.items():
            signal.signal(number, handler)


def main(argv: Sequence[str]) -> int:
    """Make trials, and write what was found; 1 when something was wrong or late."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--per-run", type=int, default=6, help="faults of a run")
    parser.add_argument("--kinds", nargs="+", choices=[*HERE, *ON_SLURM], default=[*HERE, *ON_SLURM], metavar="KIND")
    parser.add_argument("--setups", nargs="+", type=int, default=range(len(SETUPS)), help="which, counted from 0")
    parser.add_argument("--jobs", type=int, default=3, help="runs at the same time; some only wait")
    parser.add_argument("--output", type=Path, default=FILE)
    options = parser.parse_args(argv)
    setups = [SETUPS[number] for number in options.setups]
    with_slurm = any(setup.where == "slurm" for setup in setups)
    if with_slurm and (why := slurm.obstacle()):
        print(f"without Slurm: {why}")
        setups = [setup for setup in setups if setup.where == "here"]
        with_slurm = False
    with places(options.jobs, with_slurm) as (folder, cluster):
        trials = Trials(folder, options.seed, options.per_run, setups, options.kinds, cluster, print_now)
        made = soak(trials, options.faults, options.jobs)
    options.output.write_text("\n".join([*report(made, options.seed), ""]))
    if any(trial.wrong for trial in made):
        print(f"the folders of runs that went wrong are in {folder}")
        return 1
    shutil.rmtree(folder, ignore_errors=True)
    return int(not all(outcome.is_in_time for trial in made for outcome in trial.outcomes))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
