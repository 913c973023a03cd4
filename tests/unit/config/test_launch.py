from __future__ import annotations

import errno
import io
import os
import subprocess
import sys

import pytest

from megatron.arguments.cli import parse
from megatron.config.errors import UserError
from megatron.config.launch import JobStart, Launch, exit_process

TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "head"}
JOB = {"SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_LOCALID": "2", "SLURM_NNODES": "1"}
STEP = JOB | {"SLURM_STEP_ID": "0"}
ALONE = Launch()


@pytest.mark.parametrize(
    ("environ", "launch"),
    [
        ({}, ALONE),
        (TORCHRUN, Launch("torchrun", 5, 8, 1, 4, "head", node=4)),
        ({"RANK": "1", "WORLD_SIZE": "2"}, Launch("torchrun", 1, 2, node=1)),
        ({"RANK": "5"}, ALONE),
        ({"WORLD_SIZE": "8"}, ALONE),
        (STEP, Launch("srun", 3, 4, 2, 3)),
        (STEP | {"MASTER_ADDR": "node1"}, Launch("srun", 3, 4, 2, 3, "node1")),
        (STEP | {"SLURM_NODEID": "2"}, Launch("srun", 3, 4, 2, 3, node=2)),
        (STEP | TORCHRUN, Launch("torchrun", 5, 8, 1, 4, "head", node=4)),
        (JOB, ALONE),  # a batch script has its job's variables, but is no rank of it
        (JOB | {"SLURM_STEP_ID": "4294967291"}, ALONE),  # a batch script
        (JOB | {"SLURM_STEP_ID": "4294967290"}, ALONE),  # the shell of salloc
        (JOB | {"SLURM_STEP_ID": "batch"}, ALONE),
        ({"SLURM_STEP_ID": "0", "SLURM_NTASKS": "4"}, ALONE),
    ],
)
def test_place_of_this_process(environ: dict[str, str], launch: Launch) -> None:
    assert Launch.read(environ) == launch


@pytest.mark.parametrize(
    "environ",
    [
        {"RANK": "0", "WORLD_SIZE": "abc"},
        {"RANK": "2", "WORLD_SIZE": "2"},
        {"RANK": "0", "WORLD_SIZE": "0"},
        {"RANK": "-1", "WORLD_SIZE": "2"},
        TORCHRUN | {"LOCAL_WORLD_SIZE": ""},
        TORCHRUN | {"MASTER_PORT": "abc"},
        TORCHRUN | {"MASTER_PORT": "65536"},
        STEP | {"SLURM_LOCALID": "x"},
    ],
)
def test_variables_that_no_launcher_sets(environ: dict[str, str]) -> None:
    with pytest.raises(UserError, match=r"^E013 .*\n  fix: unset "):
        Launch.read(environ)


SLURM = {"SLURM_JOB_ID": "17", "SLURM_CLUSTER_NAME": "c"}
AGENT = {"TORCHELASTIC_RUN_ID": "a", "TORCHELASTIC_RESTART_COUNT": "1"}


@pytest.mark.parametrize(
    ("environ", "start", "text"),
    [
        ({}, JobStart(), ""),
        (SLURM, JobStart("17", "c"), "Slurm job 17, restart 0"),
        (SLURM | {"SLURM_STEP_ID": "4294967291"}, JobStart("17", "c"), "Slurm job 17, restart 0"),
        (
            SLURM | STEP | {"SLURM_RESTART_COUNT": "2"},
            JobStart("17", "c", 2, 0),
            "Slurm job 17, restart 2, step 0",
        ),
        (TORCHRUN | AGENT, JobStart(group="a", attempt=1), "torchrun's a, attempt 1"),
        (SLURM | {"CHAIN_ID": "9"}, JobStart("17", "c", chain="9"), "Slurm job 17, restart 0"),
        (SLURM | AGENT, JobStart("17", "c", group="a", attempt=1), "Slurm job 17, restart 0, torchrun's a, attempt 1"),
        ({"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_RESTART_COUNT": "1"}, JobStart(attempt=1), ""),
        ({"SLURM_RESTART_COUNT": "2", "SLURM_STEP_ID": "1"}, JobStart(), ""),
    ],
)
def test_the_start_is_read_from_the_environment(environ: dict[str, str], start: JobStart, text: str) -> None:
    assert JobStart.read(environ) == start
    assert str(start) == text


LATER = [
    [
        JobStart("17"),
        JobStart("17", step=0),
        JobStart("17", step=3),
        JobStart("17", restart=1),
        JobStart("17", restart=2, step=0),
    ],
    [JobStart(group="a"), JobStart(group="a", attempt=1), JobStart(group="a", attempt=3)],
    [JobStart("17", restart=1, group="a", attempt=4), JobStart("17", restart=2, group="b")],
    [JobStart("9", chain="9"), JobStart("10", chain="9", step=1), JobStart("10", chain="9", restart=1)],
]
STRANGERS = [
    JobStart(),
    JobStart("18", restart=9),
    JobStart("18", chain="18"),
    JobStart("17", "another", restart=9),
    JobStart(group="b", attempt=9),
]


@pytest.mark.parametrize("starts", LATER)
def test_a_later_start_follows_only_earlier_ones_of_its_job(starts: list[JobStart]) -> None:
    for place, start in enumerate(starts):
        assert all(start.follows(earlier) for earlier in starts[:place])
        assert not any(start.follows(later) for later in starts[place + 1 :])
        assert not any(start.follows(other) or other.follows(start) for other in STRANGERS)
        assert start.follows(start) is (start.group is not None)  # ranks that came or went are not counted


def test_ranks_of_srun_on_several_machines_need_an_address() -> None:
    def codes(**environ: str) -> list[str]:
        return [problem.code for problem in Launch.read(STEP | environ).problems()]

    assert codes(SLURM_NNODES="2") == ["E009"]
    assert codes(SLURM_NNODES="2", MASTER_ADDR="node1") == codes() == []
    assert codes(SLURM_NNODES="2", SLURM_NTASKS="1", SLURM_PROCID="0") == []


class FullDisk(io.StringIO):
    def flush(self) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_console_on_a_full_disk_does_not_change_the_status(monkeypatch: pytest.MonkeyPatch) -> None:
    statuses: list[int] = []
    monkeypatch.setattr(os, "_exit", statuses.append)
    monkeypatch.setattr(sys, "stdout", FullDisk())
    exit_process(143)
    assert statuses == [143]


def test_a_broken_pipe_does_not_change_the_status_and_exit_handlers_run_after_a_success() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    waits = os.environ | {"PYTHONUNBUFFERED": ""}
    code = "import atexit, sys; from megatron.config.launch import exit_process; sys.stdout.write('word' * 3); "
    code += "atexit.register(print, 'done', file=sys.stderr, end=''); exit_process({})"
    for status, reported in ((0, b"done"), (143, b"")):
        command = [sys.executable, "-c", code.format(status)]
        ended = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, env=waits, check=False)
        assert (ended.returncode, ended.stderr) == (status, reported)
    os.close(writing)


COMES_BACK = """
import threading, time
from datetime import timedelta
from torch.distributed import TCPStore
from megatron.config.launch import exit_process

store = TCPStore("127.0.0.1", 0, 1, True)

def come_back():
    while True:
        try:
            store.wait(["never"], timedelta(seconds=0.05))
        except Exception:
            pass

threading.Thread(target=come_back, daemon=True).start()
time.sleep(0.2)
exit_process(0)
"""


@pytest.mark.slow
def test_a_thread_returning_from_torch_does_not_abort_a_finished_run() -> None:
    """As ``sys.exit`` lets it: with -6, and "terminate called without an active exception"."""
    assert subprocess.run([sys.executable, "-c", COMES_BACK], stderr=subprocess.DEVNULL, timeout=60).returncode == 0


def test_restarts_that_no_machine_could_join_are_reported() -> None:
    """torch 2.13 shares the store of torchrun's agents with the ranks of every start, unless a variable forbids it."""
    message = {"TORCHELASTIC_MAX_RESTARTS": "2", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    flags = ["--preset", "tiny-llama", "--mock-data", "--vocab-size", "512", "--train-iters", "4"]
    assert any("TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in note for note in parse(flags, message).notes)
    for name, other in (("TORCHELASTIC_MAX_RESTARTS", "0"), ("TORCHELASTIC_USE_AGENT_STORE", "False")):
        assert parse(flags, message | {name: other}).notes == parse(flags, {}).notes
    assert any(note.startswith("WORLD_SIZE=2 has no effect") for note in parse(flags, {"WORLD_SIZE": "2"}).notes)
