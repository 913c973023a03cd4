"""Runs that are disturbed at random and have to get over it by themselves, while somebody holds a stop-watch.

``python -m tests.soak --faults 200 --seed 1`` writes ``tests/golden/soak.txt``. Each run is of a tiny model on two or
three ranks under torchrun, kept going as a batch job is; ranks, agents and saves are struck at random moments, several
times a run. It has to end by itself with the parameters of the undisturbed run to the bit, and one curve without holes;
each fault has to be noticed, and training be under way again, in time.
"""

from __future__ import annotations

import argparse
import itertools
import shutil
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from pathlib import Path

from tests.soaking.report import line, report
from tests.soaking.strikes import KINDS
from tests.soaking.trials import Trial, Trials

FILE = Path(__file__).parent / "golden" / "soak.txt"


def soak(trials: Trials, faults: int, jobs: int) -> list[Trial]:
    """Trials until so many faults have happened, some at the same time; each is printed when it is over."""
    made: dict[int, Trial] = {}
    with ThreadPoolExecutor(jobs) as pool:
        numbers = itertools.count()
        waiting = {pool.submit(trials.make, number): number for number in itertools.islice(numbers, jobs)}
        while waiting:
            for future in wait(waiting, return_when=FIRST_COMPLETED).done:
                made[waiting.pop(future)] = trial = future.result()
                happened = sum(len(trial.outcomes) for trial in made.values())
                print(f"{happened:>4} faults, {trial.seconds:.0f} s  {line(trial)}", flush=True)
                if happened < faults:
                    number = next(numbers)
                    waiting[pool.submit(trials.make, number)] = number
    return [made[number] for number in sorted(made)]


def main(argv: Sequence[str]) -> int:
    """Make trials, and write what was found; 1 when something was wrong or late."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--per-run", type=int, default=6, help="faults of a run")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=[*KINDS])
    parser.add_argument("--jobs", type=int, default=3, help="runs at the same time; some only wait")
    parser.add_argument("--output", type=Path, default=FILE)
    options = parser.parse_args(argv)
    folder = Path(tempfile.mkdtemp(prefix="soak-"))
    made = soak(Trials(folder, options.seed, options.per_run, options.kinds), options.faults, options.jobs)
    options.output.write_text("\n".join([*report(made, options.seed), ""]))
    if any(trial.wrong for trial in made):
        print(f"the folders of runs that went wrong are in {folder}")
        return 1
    shutil.rmtree(folder)
    return int(not all(outcome.is_in_time for trial in made for outcome in trial.outcomes))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
