"""Runs that are disturbed at random, started again, and must end like an undisturbed run.

``python -m tests.distributed.crashes --faults 200`` writes ``tests/golden/crashes.txt``. A trial is a whole run of a
tiny model on one to four ranks, with up to three faults, one after the other. After each, the next start must go on
from the newest checkpoint without a wrong byte (checked without the library), name what it skips, and end
with the parameters, moments and losses of the undisturbed run, to the bit.
"""

from __future__ import annotations

import argparse
import itertools
import random
import shutil
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path

from tests.distributed.crash_faults import DAMAGE, Fault, checkpoints, lose_node, saves, step_of, whole_steps
from tests.distributed.crash_runs import STEPS, Before, Ended, Setup, same_end, start
from tests.golden.provenance import provenance

FILE = Path(__file__).parents[1] / "golden" / "crashes.txt"
MOST = 3
"""Faults of a trial."""

PLAIN = "--save-interval 2"
KEEPING = f"{PLAIN} --keep-last 2"
NODES = "--save-interval 4 --local-save-interval 1"
CUT = "--use-distributed-optimizer"
STREAMED_TP2 = "--data-parallel-sharding-strategy optim_grads --tensor-model-parallel-size 2"
SETUPS = [
    Setup("1 rank", 1, "--params-dtype fp32", PLAIN),
    Setup("dp2 zero1", 2, f"--bf16 {CUT}", PLAIN),
    Setup("dp2 zero1, async", 2, f"--bf16 {CUT}", f"{PLAIN} --async-save"),
    Setup("dp4 zero1 in 2 copies, 2 nodes", 4, f"{CUT} --num-distributed-optimizer-instances 2", NODES, node=2),
    Setup("tp2 sp, keep 2", 2, "--bf16 --tensor-model-parallel-size 2 --sequence-parallel", KEEPING),
    Setup("dp2 tp2 zero2, async, keep 2", 4, STREAMED_TP2, f"{KEEPING} --async-save"),
    Setup(
        "dp3 zero2, 3 nodes, async",
        3,
        "--data-parallel-sharding-strategy optim_grads --global-batch-size 6",
        f"{NODES} --async-save",
        node=1,
    ),
    Setup("1 rank, remainders, async", 1, "--bf16 --store-param-remainders", f"{PLAIN} --async-save"),
    Setup("pp2 moments in bf16", 2, "--bf16 --pipeline-model-parallel-size 2 --exp-avg-dtype bf16", PLAIN),
]
IN_EVERY_CALL = [setup for setup in SETUPS if setup.ranks == 1]
"""Those that are killed at every call to the file system that one save consists of."""

IN_A_START = ("kill", "kill", "kill", "kill at a moment", "full disk")
FULL = "the disk is full", "No space left"
AFTERWARDS = (*DAMAGE, "lost node")


@dataclass
class Reference:
    """An undisturbed run: its folder, how long it took, and the calls of each rank that touched checkpoints."""

    folder: Path
    ended: Ended


@dataclass
class Trial:
    """A run with faults: what happened, line by line, and what was wrong."""

    setup: Setup
    faults: list[str] = field(default_factory=list)
    story: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    starts: int = 0
    passed_over: int = 0
    latest: float = 0.0


class Trials:
    """Draws trials and makes them."""

    def __init__(self, folder: Path, setups: Sequence[Setup], seed: int) -> None:
        self._folder, self._setups, self._seed = folder, setups, seed
        self._references: dict[Setup, Reference] = {}

    def reference(self, setup: Setup) -> Reference:
        """The undisturbed run of a setup, made when it is first asked for.

        Raises:
            RuntimeError: when it fails.
        """
        if setup not in self._references:
            folder = self._folder / f"reference{len(self._references)}"
            ended = start(setup, folder)
            if any(ended.statuses):
                raise RuntimeError(f"{setup.name} fails undisturbed: {ended.statuses}\n{ended.printed}")
            self._references[setup] = Reference(folder, ended)
        return self._references[setup]

    def make(self, number: int) -> Trial:
        """One trial; its faults depend on the seed and its number alone."""
        chance = random.Random(f"{self._seed} {number}")
        trial, folder = Trial(self._setups[number % len(self._setups)]), self._folder / f"trial{number}"

        def happen() -> None:
            for _ in range(chance.randint(1, MOST)):
                self._disturb(trial, folder, chance)

        return self._made(trial, folder, happen)

    def at_call(self, setup: Setup, number: int) -> Trial:
        """The trial in which rank 0 is killed at one of its calls."""
        fault = Fault("kill", 0, number, torn=number % 2 == 1, patient=number % 4 == 0)
        trial, folder = Trial(setup), self._folder / f"{setup.name}, call {number}".replace(" ", "-")
        return self._made(trial, folder, lambda: self._strike(trial, folder, fault))

    def calls_of_a_save(self, setup: Setup) -> list[int]:
        """Numbers of the calls of rank 0 that the second save consists of; of the first where threads save."""
        calls, step = self.reference(setup).ended.calls[0], 2 if "--async-save" in setup.way else 4
        return [number for number, call in enumerate(calls) if f"/iter_{step:07d}" in call]

    def _made(self, trial: Trial, folder: Path, happen: Callable[[], None]) -> Trial:
        """The trial in which something happens, and then nothing more."""
        try:
            happen()
            ended = self._start(trial, folder, None)
            if any(ended.statuses):
                trial.wrong.append(f"the last start ended with {ended.statuses}:\n{ended.printed}\n{ended.errors}")
            else:
                same = same_end(trial.setup, folder, self.reference(trial.setup).folder)
                trial.wrong += [f"{what} is another" for what in same]
        except Exception:
            trial.wrong.append(traceback.format_exc())
        if not trial.wrong:
            shutil.rmtree(folder)
        return trial

    def _strike(self, trial: Trial, folder: Path, fault: Fault) -> None:
        """Have a fault happen in a start."""
        ended = self._start(trial, folder, fault)
        happened = _has_happened(fault, ended)
        trial.story[-1] += "" if happened else " (over before that)"
        trial.faults += [fault.kind] * happened

    def _disturb(self, trial: Trial, folder: Path, chance: random.Random) -> None:
        """Have something happen: in a start, or to the files between two."""
        setup = trial.setup
        durable, nodes = setup.durable(folder), setup.nodes(folder)
        whole = whole_steps(durable, nodes)
        one_may_go = len(whole_steps(durable, [])) + len(whole_steps(folder / "nowhere", nodes)) > 1
        possible = [*DAMAGE] if one_may_go else []
        possible += ["lost node"] if any(map(checkpoints, nodes)) and one_may_go else []
        kind = chance.choice([*IN_A_START, *possible])
        if kind in AFTERWARDS:
            trial.story.append(_damage(setup, folder, chance, kind, max(whole)))
            trial.faults.append(kind)
        else:
            whole_run = self.reference(setup).ended
            self._strike(trial, folder, draw_fault(kind, chance, whole_run, max(whole, default=0)))

    def _start(self, trial: Trial, folder: Path, fault: Fault | None) -> Ended:
        """Start the run, and compare its first lines with what is there."""
        before = Before.look(trial.setup, folder) if folder.exists() else Before(set(), ())
        ended = start(trial.setup, folder, fault)
        began = any(words in ended.printed for words in ("resumed from ", "starts from scratch"))
        if fault is None or began:
            trial.wrong += before.complaints(ended.printed)
        if fault is not None and fault.kind == "full disk":
            trial.wrong += _complaints_of_full_disk(fault, ended)
        trial.passed_over += ended.printed.count("passed over ")
        trial.latest = max(trial.latest, ended.late)
        trial.starts += 1
        where = "from nothing" if not before.newest else f"from step {before.newest}"
        trial.story.append(f"{where}: {fault or 'undisturbed'} -> {' '.join(map(str, ended.statuses))}")
        return ended


def draw_fault(kind: str, chance: random.Random, whole: Ended, done: int) -> Fault:
    """A fault of a start that has ``done`` steps behind it, of a run that undisturbed is ``whole``."""
    rank, left = chance.randrange(len(whole.statuses)), (STEPS - done) / STEPS
    calls = max(1, int(len(whole.calls[rank]) * left))
    return Fault(
        kind,
        rank,
        call=chance.randrange(calls),
        calls=chance.choice((1, 1, 5, 50)),
        torn=chance.random() < 0.5,
        moment=whole.seconds * chance.uniform(0.2, 0.4 + 0.6 * left),
        patient=chance.random() < 0.5,
    )


def _damage(setup: Setup, folder: Path, chance: random.Random, kind: str, newest: int) -> str:
    """Damage a file of the newest checkpoint, or lose a node; returns what was done."""
    if kind == "lost node":
        return lose_node([node for node in setup.nodes(folder) if node.exists()], chance)
    places = [setup.durable(folder), *setup.nodes(folder)]
    paths = [path for place in places for path in saves(place) if step_of(path) == newest]
    path = chance.choice(paths)
    file = chance.choice(sorted(file for file in path.rglob("*") if file.is_file()))
    return f"{file.relative_to(folder)} {DAMAGE[kind](file, chance)}"


def _has_happened(fault: Fault, ended: Ended) -> bool:
    if fault.kind == "full disk":
        return any(words in ended.printed + ended.errors for words in FULL)
    return ended.statuses[fault.rank] == -9


def _complaints_of_full_disk(fault: Fault, ended: Ended) -> Iterator[str]:
    """A disk that is full ends no run but with its last save, and all ranks alike."""
    if len({status for status in ended.statuses if status >= 0}) > 1 or -9 in ended.statuses:
        yield f"{fault}: the ranks end with {ended.statuses}"
    if any(ended.statuses) and not _has_happened(fault, ended):
        message = f"{ended.printed}\n{ended.errors}"
        yield f"{fault}: ends with {ended.statuses} without a word on a full disk:\n{message}"


def report(trials: Sequence[Trial], how: str) -> Iterator[str]:
    """Return the results: a table by kind of fault, then every trial."""
    total, starts = sum(len(trial.faults) for trial in trials), sum(trial.starts for trial in trials)
    wrong = [trial for trial in trials if trial.wrong]
    yield f"{total} faults in {len(trials)} runs, {starts} starts, {len(wrong)} wrong: {how}"
    yield provenance()
    yield f"checkpoints that were passed over, and told of: {sum(trial.passed_over for trial in trials)}"
    yield f"longest time until all ranks had noticed that one was killed: {max(t.latest for t in trials):.1f} s"
    yield ""
    counts = Counter((trial.setup.name, kind) for trial in trials for kind in trial.faults)
    kinds = sorted({kind for _, kind in counts})
    names = list(dict.fromkeys(trial.setup.name for trial in trials))
    width = max(map(len, names))
    yield "  ".join([" " * width, *kinds, "wrong"])
    for name in names:
        cells = [f"{counts[name, kind]:>{len(kind)}}" for kind in kinds]
        bad = sum(trial.setup.name == name for trial in wrong)
        yield "  ".join([f"{name:<{width}}", *cells, f"{bad:>5}"])
    yield ""
    yield from (f"{number:>3} {line(trial)}" for number, trial in enumerate(trials))


def line(trial: Trial) -> str:
    """A trial in a line, and more where something was wrong."""
    end = "\n".join(["WRONG", *trial.wrong]) if trial.wrong else "same"
    return f"{trial.setup.name} | {'; '.join(trial.story)} | {end}"


def at_random(trials: Trials, faults: int, jobs: int) -> list[Trial]:
    """Trials until so many faults have happened, some at the same time; each is printed when it is over."""
    made: dict[int, Trial] = {}
    with ProcessPoolExecutor(jobs, get_context("fork")) as pool:
        numbers = itertools.count()
        waiting = {pool.submit(trials.make, number): number for number in itertools.islice(numbers, jobs)}
        while waiting:
            for future in wait(waiting, return_when=FIRST_COMPLETED).done:
                made[waiting.pop(future)] = trial = future.result()
                happened = sum(len(trial.faults) for trial in made.values())
                print(f"{happened:>4} faults  {line(trial)}", flush=True)
                if happened < faults:
                    number = next(numbers)
                    waiting[pool.submit(trials.make, number)] = number
    return [made[number] for number in sorted(made)]


def at_every_call(trials: Trials, setups: Sequence[Setup], jobs: int) -> list[Trial]:
    """Trials in which rank 0 is killed at every call to the file system that one save consists of."""
    made = []
    with ProcessPoolExecutor(jobs, get_context("fork")) as pool:
        places = [(setup, number) for setup in setups for number in trials.calls_of_a_save(setup)]
        for trial in pool.map(trials.at_call, *zip(*places)):
            made.append(trial)
            print(line(trial), flush=True)
    return made


def main(argv: Sequence[str]) -> int:
    """Make trials, and write what was found; 1 when something was wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=200, help="drawn at random")
    parser.add_argument("--every-call", action="store_true", help="besides, kill at every call of a save")
    parser.add_argument("--setups", type=int, default=len(SETUPS), help="how many kinds of runs, the first ones")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=2, help="runs at the same time")
    parser.add_argument("--output", type=Path, default=FILE)
    options = parser.parse_args(argv)
    folder = Path(tempfile.mkdtemp(prefix="crashes-"))
    setups = SETUPS[: options.setups]
    trials = Trials(folder, setups, options.seed)
    for setup in setups:  # before there are other processes, which share them
        trials.reference(setup)
    made, text = [], []
    if options.faults:
        made = at_random(trials, options.faults, options.jobs)
        text += [*report(made, f"drawn at random, seed {options.seed}"), ""]
        options.output.write_text("\n".join(text))
    if options.every_call:
        every = at_every_call(trials, [setup for setup in IN_EVERY_CALL if setup in setups], options.jobs)
        made, text = made + every, [*text, *report(every, "killed at every call of one save"), ""]
    options.output.write_text("\n".join(text))
    if any(trial.wrong for trial in made):
        print(f"the folders of runs that went wrong are in {folder}")
        return 1
    shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
