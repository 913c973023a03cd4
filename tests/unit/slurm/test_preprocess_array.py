"""Files of each task of ``slurm/preprocess_array.sh``, and the merge, without Slurm."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.unit.slurm.recipes import ROOT

FILES = ("a", "b", "c", "d", "more/a")


def started(folder: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    """A task of job 7, in which the commands of Slurm print their arguments."""
    for name in ("srun", "sbatch", "squeue", "scontrol"):
        (folder / name).write_text('#!/bin/bash\necho "$(basename "$0") $*"\n')
        (folder / name).chmod(0o755)
    for name in FILES:
        path = folder / "some texts" / f"{name}.md"
        path.parent.mkdir(exist_ok=True, parents=True)
        path.touch()
    words = {
        "PATH": f"{folder}:{os.environ['PATH']}",
        "SMALL": "1",
        "RUN": str(folder / "run"),
        "CORPUS": str(folder / "some texts/"),
        "VENV": "none",
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_PARTITION": "batch",
        **environ,
    }
    return subprocess.run(["bash", "slurm/preprocess_array.sh"], cwd=ROOT, env=words, capture_output=True, text=True)


def task(number: int, first: int, last: int, count: int, step: int = 1) -> dict[str, str]:
    """Return the variables that Slurm sets for a task of ``--array=FIRST-LAST:STEP``."""
    printed = {"ID": number, "MIN": first, "MAX": last, "COUNT": count, "STEP": step}
    return {"SLURM_ARRAY_JOB_ID": "7"} | {f"SLURM_ARRAY_TASK_{name}": str(value) for name, value in printed.items()}


@pytest.mark.parametrize(("first", "last", "count", "step"), [(0, 2, 3, 1), (4, 8, 3, 2), (5, 5, 1, 1), (0, 6, 7, 1)])
def test_tasks_take_every_file_once(tmp_path: Path, first: int, last: int, count: int, step: int) -> None:
    printed = [started(tmp_path, **task(n, first, last, count, step)).stdout for n in range(first, last + 1, step)]
    calls = [line for out in printed for line in out.splitlines() if "--input" in line]
    taken = [line.split("/some texts/")[1].split(".md ")[0] for line in calls]
    assert sorted(taken) == sorted(FILES)
    assert [out.count("sbatch --array=0 --job-name=merge") for out in printed] == [1] + [0] * (count - 1)


def test_an_array_with_gaps_is_refused(tmp_path: Path) -> None:
    done = started(tmp_path, **task(3, 3, 7, 2))
    assert done.returncode == 2
    assert done.stdout == ""
    assert "must have no gaps" in done.stderr


def test_parts_are_merged_when_every_file_has_its_own(tmp_path: Path) -> None:
    parts = tmp_path / "run" / "corpus_text.parts"
    parts.mkdir(parents=True)
    for name in FILES:
        assert "has no part" in started(tmp_path, MERGE="1").stderr
        (parts / f"{name.replace('/', '__')}.md_text_document.idx").touch()
    assert "tools/merge_datasets.py" in started(tmp_path, MERGE="1").stdout
    (parts / "gone.md_text_document.idx").touch()
    done = started(tmp_path, MERGE="1")
    assert done.returncode == 2
    assert "6 parts" in done.stderr
