"""A short soak, what the long one has found, and whether the judge sees what is wrong."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.soak import FILE
from tests.soaking import machine
from tests.soaking.here import ROOT
from tests.soaking.job import Setup
from tests.soaking.machine import MARK, Process
from tests.soaking.progress import Progress, complaints
from tests.soaking.rank import FOLDER, FULL, Saboteur, kill_at
from tests.soaking.report import report
from tests.soaking.strikes import HERE, ON_SLURM
from tests.soaking.trials import DETECTION_SECONDS, RECOVERY_SECONDS, SETUPS, Outcome, Trial

HEAD = re.compile(r"(\d+) of (\d+) faults survived in (\d+) runs, \d+ starts, (\d+) wrong: seed \d+\n")
IN_TIME = "training again within 120 s: all but 0\n"


def soak(output: Path, *flags: str) -> str:
    command = [sys.executable, "-m", "tests.soak", "--output", str(output), *flags]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TMPDIR": str(output.parent)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return output.read_text()


def test_three_faults(tmp_path: Path) -> None:
    kinds = ("told to stop", "kill in a save", "agent lost, ranks frozen")
    flags = ("--faults", "3", "--per-run", "3", "--jobs", "1", "--setups", "0", "--seed", "5")
    text = soak(tmp_path / "found.txt", *flags, "--kinds", *kinds)
    found = HEAD.match(text)
    assert found is not None
    assert (found[1], found[4]) == ("3", "0")
    assert IN_TIME in text
    assert all(f"\n{kind}" in text for kind in kinds)


@pytest.mark.slow
def test_two_hundred_faults(tmp_path: Path) -> None:
    assert IN_TIME in soak(tmp_path / "found.txt", "--faults", "200", "--seed", "2")


def test_the_long_soak_is_kept() -> None:
    """What it found at its last, in tests/golden."""
    text = FILE.read_text()
    found = HEAD.match(text)
    assert found is not None
    assert int(found[1]) == int(found[2]) >= 200
    assert found[4] == "0"
    assert IN_TIME in text
    for name in [*(setup.name for setup in SETUPS), *HERE]:
        assert name in text
    assert sum(f"\n{kind}" in text for kind in ON_SLURM) >= len(ON_SLURM) - 1


# ---- the judge


def start(iteration: int, run: str = "a") -> dict[str, Any]:
    return {"event": "start", "iteration": iteration, "run-id": run}


def step(iteration: int, loss: float | None = None) -> dict[str, Any]:
    return {"iteration": iteration, "lm loss": 1.0 / iteration if loss is None else loss}


UNDISTURBED = [start(0), *map(step, range(1, 5))]
EXPECTED = {n: {"lm loss": 1.0 / n} for n in range(1, 5)}


def test_one_curve_in_one_start_or_several() -> None:
    assert complaints(UNDISTURBED, 4, EXPECTED) == []
    assert complaints([start(0), step(1), step(2), start(1), step(2), start(2), step(3), step(4)], 4, EXPECTED) == []


@pytest.mark.parametrize(
    "records",
    [
        UNDISTURBED[:-1],  # the last one is missing
        UNDISTURBED[:2] + UNDISTURBED[3:],  # another one is
        [*UNDISTURBED[:3], start(3), *map(step, (4,))],  # the start has left one out
        [*UNDISTURBED[:3], start(1), step(3), step(4)],  # so has this
        [*UNDISTURBED[:3], start(1), step(2), step(3), step(3), step(4)],  # an earlier start still writes
        [*UNDISTURBED[:3], start(1), step(2, 0.4), step(3), step(4)],  # what is done again differs
        [*UNDISTURBED[:3], start(2, "b"), step(3), step(4)],  # another run
    ],
)
def test_the_judge_sees_what_is_wrong(records: list[dict[str, Any]]) -> None:
    assert complaints(records, 4, EXPECTED) != []


def saved(iteration: int) -> dict[str, Any]:
    return {"event": "checkpoint", "iteration": iteration + 1, "path": f"x/iter_{iteration:07d}"}


@pytest.mark.parametrize(("begun", "good"), [((3,), True), ((2,), True), ((1,), False), ((0,), False), ((2, 1), True)])
def test_a_start_takes_up_the_newest_checkpoint_or_the_one_before(begun: tuple[int, ...], good: bool) -> None:
    """The one before, where a file of the newest is damaged."""
    records = [start(0), step(1), saved(1), step(2), saved(2), step(3), saved(3)]
    for iteration in begun:
        records += [start(iteration), *([step(iteration + 1)] if iteration != begun[-1] else [])]
    records += map(step, range(begun[-1] + 1, 5))
    assert (complaints(records, 4, EXPECTED) == []) == good


def test_progress_is_read_as_it_comes(tmp_path: Path) -> None:
    progress = Progress(tmp_path / "metrics.jsonl")
    progress.read()
    assert progress.step == 0
    lines = [start(0) | {"time": 1.0}, step(1) | {"time": 2.0}, start(1) | {"time": 4.0}, step(2) | {"time": 6.0}]
    text = "".join(f"{json.dumps(line)}\n" for line in lines)
    for end, reached in ((0, 0), (len(text) - 40, 1), (len(text), 2)):
        progress.file.write_text(text[:end])
        progress.read()
        assert progress.step == reached
    assert progress.again(3.0) == 6.0
    assert progress.again(0.5) == 2.0
    assert progress.again(5.0) is None
    assert progress.told_since(3.0)
    assert not progress.told_since(5.0)


# ---- what it strikes with


def test_processes_are_found_by_their_mark(tmp_path: Path) -> None:
    script = "import time; print(flush=True); time.sleep(600)"
    environ = os.environ | {MARK: f"{tmp_path}/trial1"}
    with subprocess.Popen([sys.executable, "-c", script], env=environ, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        for mark in (tmp_path, tmp_path / "trial1"):
            assert [process.pid for process in machine.marked(str(mark))] == [child.pid]
        assert [*machine.marked(f"{tmp_path}/trial")] == []
        (process,) = machine.marked(str(tmp_path))
        assert process.is_alive
        process.send(signal.SIGKILL)
    assert not process.is_alive
    assert [*machine.marked(str(tmp_path))] == []


def test_ranks_and_agents_are_told_apart() -> None:
    commands = [
        "/v/bin/python /v/bin/torchrun --nnodes 1 pretrain_gpt.py --lr 1",
        "/v/bin/python -u pretrain_gpt.py --lr 1",
        "/v/bin/python -u -m tests.soaking.rank --lr 1",
        "/v/bin/python -m torch.distributed.run --nnodes 1 -m tests.soaking.rank --lr 1",
        "python pretrain_gpt.py --lr 1 --check-config",
        "srun --export=ALL python pretrain_gpt.py --lr 1",
    ]
    all_of_them = [Process(n + 50, 1, 0, command, {"RANK": str(10 + n)}) for n, command in enumerate(commands)]
    assert {rank: process.pid for rank, process in machine.ranks(all_of_them).items()} == {11: 51, 12: 52}
    assert [process.pid for process in machine.agents(all_of_them)] == [50, 53]
    under_srun = Process(7, 1, 0, "/v/bin/python pretrain_gpt.py --lr 1", {"SLURM_PROCID": "3"})
    forked = Process(8, 7, 0, under_srun.command, under_srun.environ)
    assert machine.ranks([forked, under_srun]) == {3: under_srun}


def test_a_rank_lets_its_saves_be_disturbed(tmp_path: Path) -> None:
    saved = tmp_path / "saved" / "iter_1"
    saved.mkdir(parents=True)
    (tmp_path / FOLDER).mkdir()
    child = os.fork()
    if not child:
        with Saboteur(tmp_path, tmp_path / "saved", 3).standing_there():
            (tmp_path / FOLDER / FULL).touch()
            os.mkdir(tmp_path / "elsewhere")
            try:
                os.mkdir(saved / "a")
            except OSError as error:
                (tmp_path / FOLDER / FULL).unlink()
                kill_at(tmp_path, 3, 2)
                for name in "bcdefg" if error.errno == errno.ENOSPC else "":
                    os.mkdir(saved / name)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert sorted(path.name for path in saved.iterdir()) == ["b", "c"]


# ---- what it tells


def test_the_report() -> None:
    outcomes = [Outcome("x", "x of rank 1", 1.0, 10.0), Outcome("x", "x of rank 2", 3.0, RECOVERY_SECONDS)]
    other = [Outcome("y", "y", DETECTION_SECONDS - 1, 20.0), Outcome("y", "y", None, None)]
    trials = [
        Trial(Setup("one", "here", 1, 1, ""), outcomes, goodput=0.5, starts=3),
        Trial(Setup("two", "here", 1, 1, ""), other, ["lost"], starts=2),
    ]
    text = "\n".join(report(trials, 7))
    assert text.startswith("2 of 4 faults survived in 2 runs, 5 starts, 1 wrong: seed 7\n")
    assert "all but 2\n" in text
    assert re.search(r"^x +2 +2 +2\.0 +3\.0 +65\.0 +120\.0$", text, re.MULTILINE)
    assert re.search(r"^y +2 +0 +29\.0 +29\.0 +20\.0 +20\.0$", text, re.MULTILINE)
    assert "lost" in text


@pytest.mark.slow
def test_a_soak_that_is_ended_leaves_no_process(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.soak", "--setups", "8", "--jobs", "1", "--output", str(tmp_path / "found")]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, cwd=ROOT, env=environment) as soaking:
        while not list(machine.marked(str(tmp_path))):
            assert soaking.poll() is None
            time.sleep(0.1)
        soaking.terminate()
    time.sleep(1.0)
    assert list(machine.marked(str(tmp_path))) == []
