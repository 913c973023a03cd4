"""How a run ends: exit status, error reports, and the end of the process."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import pretrain_gpt
from megatron.config.errors import Problem, UserError
from megatron.data.errors import DataError
from megatron.training import failure_report, main
from megatron.training.failure_report import NonFiniteError
from megatron.training.startup import StartupTimer, process_start_time
from tests.runs import FLAGS, column, tiny_run

ROOT = Path(__file__).parents[3]
GLOO = "[x/gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:51376: Connection reset by peer"
USER = UserError([Problem("E701", "the disk is gone")])


@pytest.fixture
def left(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record that torch.distributed was shut down."""
    calls: list[str] = []
    monkeypatch.setattr(main, "destroy_distributed", lambda: calls.append("left"))
    return calls


def run_into(error: Exception, folder: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """Return the exit status of a run in which the loop raises ``error``."""

    def train(*arguments: object) -> int:
        raise error

    monkeypatch.setattr(main, "train", train)
    return main.run(tiny_run(folder))


@pytest.mark.parametrize("status", [0, 143])
def test_the_status_is_that_of_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left: list[str], status: int
) -> None:
    monkeypatch.setattr(main, "train", lambda *arguments: status)
    assert main.run(tiny_run(tmp_path), ["a note"]) == status
    assert left == ["left"]
    note, kernels, summary = column(tmp_path, "text", "text")
    assert kernels == "kernels: torch"
    assert note == "a note"
    assert summary.startswith("ranks      1 = ")
    assert summary.endswith("\ntrain      24 samples, 192 generated tokens over 31 ids")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_device_that_is_not_there_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(tiny_run(tmp_path, "--device cuda")) == 2
    assert "E207 --device cuda" in capsys.readouterr().err


@pytest.mark.parametrize("error", [USER, DataError("no such sample"), NonFiniteError("step 3 is not finite")])
def test_an_expected_error_is_its_sentence(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    left: list[str],
    error: Exception,
) -> None:
    assert run_into(error, tmp_path, monkeypatch) == 1
    assert f"error: {error}\n" in capsys.readouterr().err
    assert left == []


@pytest.mark.parametrize("error", [ValueError("shapes"), FileNotFoundError(2, "gone"), RuntimeError("bug")])
def test_other_errors_come_with_their_traceback(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    left: list[str],
    error: Exception,
) -> None:
    assert run_into(error, tmp_path, monkeypatch) == 1
    printed = capsys.readouterr().err
    assert "error: Traceback (most recent call last)" in printed
    assert f"{type(error).__name__}: " in printed
    assert left == []


def test_lost_contact_is_reported_in_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], left: list[str]
) -> None:
    assert run_into(RuntimeError(GLOO), tmp_path, monkeypatch) == 1
    printed = capsys.readouterr().err
    assert "error: lost contact with another rank: it was killed" in printed
    assert GLOO in printed
    assert "Traceback" not in printed


def test_an_error_that_another_rank_reported_is_not_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], left: list[str]
) -> None:
    monkeypatch.setattr(failure_report, "register_failure", lambda: False)
    assert run_into(USER, tmp_path, monkeypatch) == 1
    assert "E701" not in capsys.readouterr().err


def test_the_clock_starts_with_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not when torch is imported and the ranks have joined, nor at the first line of this program."""
    given: list[StartupTimer] = []
    monkeypatch.setattr(main, "run", lambda config, notes, startup: given.append(startup) or 0)
    before = time.monotonic()
    assert pretrain_gpt.main([*FLAGS.split(), "--run-dir", str(tmp_path)]) == 0
    assert given[0].began == pytest.approx(process_start_time(), abs=0.02)
    assert given[0].began < before
    assert {name for name, seconds in given[0].seconds.items() if seconds} == {"python", "flags", "imports"}


def place(monkeypatch: pytest.MonkeyPatch, rank: int, local_rank: int) -> None:
    for name, value in {"RANK": rank, "WORLD_SIZE": 16, "LOCAL_RANK": local_rank}.items():
        monkeypatch.setenv(name, str(value))


@pytest.mark.parametrize(("rank", "local_rank", "told"), [(0, 0, True), (1, 1, False), (8, 0, False)])
def test_only_rank_0_reports_wrong_flags(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], rank: int, local_rank: int, told: bool
) -> None:
    place(monkeypatch, rank, local_rank)
    assert pretrain_gpt.main(["--hiden-size", "64"]) == 2
    assert ("E001" in capsys.readouterr().err) == told


@pytest.mark.parametrize(("rank", "local_rank", "told"), [(0, 0, True), (1, 1, False), (8, 0, True)])
def test_unreadable_data_are_reported_once_per_machine(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], rank: int, local_rank: int, told: bool
) -> None:
    def unreadable(*arguments: object) -> int:
        raise DataError("the tokenizer is torn")

    monkeypatch.setattr(pretrain_gpt, "with_vocabulary", unreadable)
    place(monkeypatch, rank, local_rank)
    assert pretrain_gpt.main([*FLAGS.split(), "--global-batch-size", "16"]) == 2
    assert capsys.readouterr().err == ("the tokenizer is torn\n" if told else "")


def test_after_a_failure_the_process_ends_whatever_still_runs() -> None:
    program = (
        "import threading, time, pretrain_gpt\n"
        "threading.Thread(target=time.sleep, args=(60,)).start()\n"
        "print('last words', end='')\n"
        "pretrain_gpt.exit_process(3)"
    )
    start = time.monotonic()
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert (done.returncode, done.stdout) == (3, "last words")
    assert time.monotonic() - start < 30


def test_a_failure_as_a_person_meets_it(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    command = [sys.executable, "pretrain_gpt.py", *FLAGS.split(), "--run-dir"]
    failed = subprocess.run([*command, str(tmp_path / "file")], cwd=ROOT, capture_output=True, text=True)
    assert failed.returncode == 2
    assert failed.stderr.startswith(
        f"E701 --run-dir {tmp_path / 'file'}: it is a file, not a folder\n  fix: --run-dir "
    )
    assert "Traceback" not in failed.stderr


def test_an_unwritable_run_folder_is_refused_before_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], left: list[str]
) -> None:
    monkeypatch.setattr(main, "train", lambda *arguments: pytest.fail("it began"))
    (tmp_path / "config.yaml").mkdir()
    assert main.run(tiny_run(tmp_path)) == 2
    printed = capsys.readouterr().err
    assert printed.startswith(
        f"error: E701 the run folder {tmp_path} cannot be written: Is a directory\n  fix: --run-dir"
    )


@pytest.mark.parametrize(
    ("ranks", "threads", "cores", "exceed"),
    [
        (1, "", 8, False),  # every core a thread, and nobody else
        (1, "8", 8, False),
        (1, "16", 8, True),
        (2, "", 8, True),
        (2, "4", 8, False),
        (2, "5,2", 8, True),
        (16, "1", 8, True),
        (8, "1", 8, False),
    ],
)
def test_threads_wait_without_spinning_only_where_they_exceed_the_cores(
    monkeypatch: pytest.MonkeyPatch, ranks: int, threads: str, cores: int, exceed: bool
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
    torchrun = {"RANK": "0", "WORLD_SIZE": "64", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": str(ranks)}
    assert pretrain_gpt.threads_exceed_cores(torchrun | {"OMP_NUM_THREADS": threads}) == exceed


@pytest.mark.parametrize(("tasks", "exceed"), [("4(x2),3", False), ("9(x3)", True), ("4,9", True)])
def test_tasks_of_srun_share_all_cores_of_the_machine(
    monkeypatch: pytest.MonkeyPatch, tasks: str, exceed: bool
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})  # the cores that srun binds this task to
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    places = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_NTASKS": "12", "SLURM_LOCALID": "0"}
    assert pretrain_gpt.threads_exceed_cores(places | {"SLURM_STEP_TASKS_PER_NODE": tasks}) == exceed
