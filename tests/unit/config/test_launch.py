from __future__ import annotations

import errno
import io
import os
import subprocess
import sys

import pytest

from megatron.config.launch import Launch, leave

TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "head"}
JOB = {"SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_LOCALID": "2", "SLURM_NNODES": "1"}
STEP = JOB | {"SLURM_STEP_ID": "0"}
ALONE = Launch()


@pytest.mark.parametrize(
    ("environ", "launch"),
    [
        ({}, ALONE),
        (TORCHRUN, Launch("torchrun", 5, 8, 1, 4, "head")),
        ({"RANK": "1", "WORLD_SIZE": "2"}, Launch("torchrun", 1, 2)),
        ({"RANK": "5"}, ALONE),
        ({"WORLD_SIZE": "8"}, ALONE),
        (STEP, Launch("srun", 3, 4, 2, 3)),
        (STEP | {"MASTER_ADDR": "node1"}, Launch("srun", 3, 4, 2, 3, "node1")),
        (STEP | TORCHRUN, Launch("torchrun", 5, 8, 1, 4, "head")),
        (JOB, ALONE),  # a batch script has its job's variables, but is no rank of it
        (JOB | {"SLURM_STEP_ID": "4294967291"}, ALONE),  # a batch script
        (JOB | {"SLURM_STEP_ID": "4294967290"}, ALONE),  # the shell of salloc
        (JOB | {"SLURM_STEP_ID": "batch"}, ALONE),
        ({"SLURM_STEP_ID": "0", "SLURM_NTASKS": "4"}, ALONE),
    ],
)
def test_place_of_this_process(environ: dict[str, str], launch: Launch) -> None:
    assert Launch.read(environ) == launch


def problems(**environ: str) -> list[str]:
    return [str(problem) for problem in Launch.read(STEP | environ).problems()]


def test_ranks_of_srun_on_several_machines_must_be_told_where_to_meet() -> None:
    (problem,) = problems(SLURM_NNODES="2")
    assert problem.startswith("E009 srun started 4 ranks on several machines")
    assert '  fix: export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n1)' in problem
    assert problems(SLURM_NNODES="2", MASTER_ADDR="node1") == []
    assert problems() == []
    assert problems(SLURM_NNODES="2", SLURM_NTASKS="1", SLURM_PROCID="0") == []


class FullDisk(io.StringIO):
    def flush(self) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_console_on_a_full_disk_does_not_change_the_status(monkeypatch: pytest.MonkeyPatch) -> None:
    statuses: list[int] = []
    monkeypatch.setattr(os, "_exit", statuses.append)
    monkeypatch.setattr(sys, "stdout", FullDisk())
    leave(143)
    assert statuses == [143]


@pytest.mark.parametrize("said", ["", "word\n"])
@pytest.mark.parametrize("status", [0, 143])
def test_a_pipe_that_nobody_reads_does_not_change_the_status(said: str, status: int) -> None:
    """Whether something was not written yet or the pipe was found broken before."""
    reading, writing = os.pipe()
    os.close(reading)
    code = f"import sys; from megatron.config.launch import leave; sys.stdout.write({said!r} * 3); leave({status})"
    waits = os.environ | {"PYTHONUNBUFFERED": ""}
    ended = subprocess.run([sys.executable, "-c", code], stdout=writing, stderr=subprocess.PIPE, env=waits, check=False)
    os.close(writing)
    assert (ended.returncode, ended.stderr) == (status, b"")
