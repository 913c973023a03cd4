"""Shards of each task of ``slurm/preprocess_array.sh``, and the merge, without Slurm."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.unit.slurm.recipes import ROOT


def started(folder: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    """A task of job 7, in which the commands of Slurm print their arguments."""
    for name in ("srun", "sbatch", "squeue", "scontrol"):
        (folder / name).write_text('#!/bin/bash\necho "$(basename "$0") $*"\n')
        (folder / name).chmod(0o755)
    (folder / "some texts").mkdir(exist_ok=True)
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
@pytest.mark.parametrize("shards", [5, None])
def test_tasks_take_every_shard_once(
    tmp_path: Path, first: int, last: int, count: int, step: int, shards: int | None
) -> None:
    more = {} if shards is None else {"SHARDS": str(shards)}
    tasks = range(first, last + 1, step)
    printed = [started(tmp_path, **task(n, first, last, count, step), **more).stdout for n in tasks]
    calls = [line for out in printed for line in out.splitlines() if "--input" in line]
    taken = [line.split("--shard ")[1].split()[0] for line in calls]
    assert sorted(taken) == [f"{n}/{shards or count}" for n in range(shards or count)]
    assert [out.count("sbatch --array=0 --job-name=merge") for out in printed] == [1] + [0] * (count - 1)


def test_an_array_with_gaps_is_refused(tmp_path: Path) -> None:
    done = started(tmp_path, **task(3, 3, 7, 2))
    assert done.returncode == 2
    assert done.stdout == ""
    assert "must have no gaps" in done.stderr


def test_shards_are_merged_when_all_are_there(tmp_path: Path) -> None:
    parts = tmp_path / "run" / "corpus_text.parts"
    parts.mkdir(parents=True)
    for number in range(3):
        assert f"shard {number} of 3 is not in" in started(tmp_path, MERGE="1", SHARDS="3").stderr
        (parts / f"shard-0000{number}-of-3_text_document.idx").touch()
    assert "tools/merge_datasets.py" in started(tmp_path, MERGE="1").stdout
    done = started(tmp_path, MERGE="1", SHARDS="4")
    assert done.returncode == 2
    assert "has shards of 3, not of 4" in done.stderr


def test_another_array_continues_the_shards_of_the_first(tmp_path: Path) -> None:
    parts = tmp_path / "run" / "corpus_text.parts"
    parts.mkdir(parents=True)
    (parts / "shard-00001-of-3_text_document.idx").touch()
    printed = started(tmp_path, **task(0, 0, 0, 1)).stdout
    taken = [line.split("--shard ")[1].split()[0] for line in printed.splitlines() if "--shard" in line]
    assert taken == ["0/3", "2/3"]
