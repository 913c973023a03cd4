"""A short soak, regressions from the long one, and the judge on planted faults."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.soak import FILE, main
from tests.soaking import machine
from tests.soaking.here import ROOT
from tests.soaking.progress import complaints
from tests.soaking.strikes import HERE, ON_SLURM
from tests.soaking.trials import SETUPS

HEAD = re.compile(r"(\d+) of (\d+) faults survived in (\d+) runs, \d+ starts, (\d+) wrong: seed \d+\n")
IN_TIME = "training again within 120 s: all but 0\n"


def soak(output: Path, *flags: str) -> str:
    assert main(["--output", str(output), *flags]) == 0
    return output.read_text()


KINDS = ("kill in a save", "agent lost, ranks frozen", "told to stop")


@pytest.mark.slow  # tests/distributed/test_crashes.py kills in saves, too
@pytest.mark.parametrize(("setup", "faults"), [pytest.param(8, 1, id="1 rank"), pytest.param(0, 3, id="2 ranks")])
def test_a_fault_of_each_kind(setup: int, faults: int, tmp_path: Path) -> None:
    kinds, count = KINDS[:faults], str(faults)
    flags = ("--faults", count, "--per-run", count, "--jobs", "1", "--setups", str(setup), "--seed", "5")
    text = soak(tmp_path / "found.txt", *flags, "--kinds", *kinds)
    found = HEAD.match(text)
    assert found is not None
    assert (found[1], found[4]) == (count, "0")
    assert IN_TIME in text
    assert all(f"\n{kind}" in text for kind in kinds)


@pytest.mark.slow
def test_two_hundred_faults(tmp_path: Path) -> None:
    assert IN_TIME in soak(tmp_path / "found.txt", "--faults", "200", "--seed", "2")


def test_the_long_soak_is_kept() -> None:
    """Compare the stored results in tests/golden with the limits."""
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


def saved(iteration: int) -> dict[str, Any]:
    return {"event": "checkpoint", "iteration": iteration + 1, "path": f"x/iter_{iteration:07d}"}


SAVED = [start(0), step(1), saved(1), step(2), saved(2), step(3), saved(3)]


@pytest.mark.parametrize(
    "records",
    [
        UNDISTURBED,
        [start(0), step(1), step(2), start(1), step(2), start(2), step(3), step(4)],
        [*SAVED, start(3), step(4)],
        [*SAVED, start(2), step(3), step(4)],  # a file of the newest checkpoint is damaged
        [*SAVED, start(2), step(3), start(1), step(2), step(3), step(4)],  # and then one of the one before
    ],
)
def test_the_judge_takes_one_curve_in_one_start_or_several(records: list[dict[str, Any]]) -> None:
    assert complaints(records, 4, EXPECTED) == []


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
        [*SAVED, start(1), *map(step, (2, 3, 4))],  # two newer checkpoints were complete
        [*SAVED, *UNDISTURBED],  # so were three
    ],
)
def test_the_judge_finds_every_fault(records: list[dict[str, Any]]) -> None:
    assert complaints(records, 4, EXPECTED) != []


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
