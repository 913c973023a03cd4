"""Runs that are disturbed and started again end like an undisturbed run; a short form of ``crashes``."""

from __future__ import annotations

import os
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.checkpoint.folder import CheckpointFolder
from tests.distributed.crash_faults import DAMAGE, is_whole, whole_steps
from tests.distributed.crash_runs import Before
from tests.distributed.crashes import FILE, SETUPS, Trials
from tests.distributed.sites import ROOT
from tests.unit.checkpoint.samples import save, small

HEAD = re.compile(r"(\d+) faults in (\d+) runs, \d+ starts, (\d+) wrong: (.*)")


def test_three_runs_with_faults(tmp_path: Path) -> None:
    """One process, two, and two that save in threads."""
    trials = Trials(tmp_path, SETUPS[:3], seed=4)
    made = [trials.make(number) for number in range(3)]
    assert [trial.wrong for trial in made] == [[]] * 3
    assert all(trial.faults for trial in made)


@pytest.mark.slow
def test_two_hundred_faults_and_every_call_of_a_save(tmp_path: Path) -> None:
    """The program, in a process that has no threads and may fork."""
    output = tmp_path / "found.txt"
    command = [sys.executable, "-m", "tests.distributed.crashes", "--output", str(output)]
    command += ["--faults", "200", "--every-call", "--seed", "2"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert all(found[3] == "0" for found in HEAD.finditer(output.read_text()))


def test_the_long_run_is_kept() -> None:
    """Compare the stored results in tests/golden with the limits."""
    text = FILE.read_text()
    random_faults, *every_call = HEAD.finditer(text)
    assert int(random_faults[1]) >= 200
    assert [found[3] for found in (random_faults, *every_call)] == ["0"] * (1 + len(every_call))
    for setup in SETUPS:
        assert f"\n{setup.name}" in text
    for kind in (*DAMAGE, "kill", "kill at a moment", "full disk", "lost node"):
        assert kind in text


# ---- the judge, who does not ask the library


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    """A folder with the checkpoints of steps 2 and 4."""
    for step in (2, 4):
        save(CheckpointFolder(tmp_path / "saved").path(step), small())
    return tmp_path / "saved"


@pytest.mark.parametrize("how", DAMAGE)
def test_the_judge_sees_any_damage(kept: Path, how: str) -> None:
    chance = random.Random(3)
    assert whole_steps(kept, []) == {2, 4}
    for file in sorted(file for file in (kept / "iter_0000004").rglob("*") if file.is_file()):
        name = file.name
        copy = Path(shutil.copytree(kept, kept.with_name(f"without-{name}")))
        DAMAGE[how](copy / file.relative_to(kept), chance)
        assert whole_steps(copy, []) == {2}, name


def test_the_judge_counts_a_save_of_which_only_renames_are_left(kept: Path) -> None:
    final, staged = kept / "iter_0000004", kept / ".epoch-1" / "iter_0000004"
    staged.parent.mkdir()
    final.rename(staged)
    assert whole_steps(kept, []) == whole_steps(kept / "nothing", [kept]) == {2, 4}
    (attempt,) = staged.glob("attempt-*")
    final.mkdir()
    attempt.rename(final / attempt.name)
    assert whole_steps(kept, []) == {2, 4}
    (staged / "COMPLETE").unlink()
    assert whole_steps(kept, []) == {2}


def test_the_judge_takes_each_file_from_any_node(kept: Path) -> None:
    first, second = kept / "iter_0000004", Path(shutil.copytree(kept, kept.with_name("other"))) / "iter_0000004"
    (data,) = first.rglob("*.safetensors")
    data.unlink()
    assert not is_whole([first])
    assert is_whole([first, second])
    (second / "COMPLETE").unlink()
    assert whole_steps(kept.with_name("nothing"), [kept, second.parent]) == {2}


@pytest.mark.parametrize(
    ("printed", "complaints"),
    [
        ("passed over {}/iter_0000004: cut off\nresumed from {}/iter_0000002: step 2, 8 samples", 0),
        ("resumed from {}/iter_0000002: step 2, 8 samples", 1),
        ("passed over {}/iter_0000004: cut off\nresumed from {}/iter_0000001: step 1, 4 samples", 1),
        ("starts from scratch", 2),
    ],
)
def test_the_judge_wants_a_report(kept: Path, printed: str, complaints: int) -> None:
    before = Before({2}, (kept / "iter_0000004",))
    assert len(before.complaints(printed.replace("{}", str(kept)))) == complaints
