from __future__ import annotations

import os
import sys
from pathlib import Path
from unittest.mock import patch

import pytest

from tests.processes import wait_until_gone
from tools.cluster_check import run
from tools.cluster_check.run import ROOT, LaunchResult, RankLauncher


def program(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_a_program_runs_with_its_words_and_finds_the_library(tmp_path: Path) -> None:
    tell = "import os, sys, megatron.config.launch\nprint(sys.argv[1:], os.environ['MASTER_PORT'])\nsys.exit(3)\n"
    starts = RankLauncher([sys.executable, "-B", "-W", "ignore::{port}"], tmp_path)
    outcomes = [starts.run("tell", [program(tmp_path / "tell.py", tell), "a b", tmp_path], 60) for _ in range(2)]
    logs = [outcome.log.read_text() for outcome in outcomes]
    assert [outcome.status for outcome in outcomes] == [3, 3]
    assert outcomes[0].ended == "exit status 3"
    assert [outcome.log.name for outcome in outcomes] == ["01-tell.log", "02-tell.log"]
    assert f"['a b', '{tmp_path}'] " in logs[0]
    ports = [log.split()[-1] for log in logs]
    assert ports[0] != ports[1]
    assert f"ignore::{ports[0]}" in logs[0].splitlines()[0]


def test_the_files_are_those_of_the_repository(tmp_path: Path) -> None:
    outcome = RankLauncher(["echo"], tmp_path).run("x", ["benchmarks/bandwidth.py", "--device", "cpu"], 60)
    assert outcome.log.read_text().splitlines()[1] == f"{ROOT / 'benchmarks' / 'bandwidth.py'} --device cpu"
    assert (ROOT / "benchmarks" / "bandwidth.py").exists()


def test_what_hangs_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    hang = (
        "import os, signal, subprocess, sys, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "print(os.getpid(), child.pid, flush=True)\ntime.sleep(600)\n"
    )
    with patch.object(run, "GRACE_SECONDS", 0.2):
        outcome = RankLauncher([sys.executable], tmp_path).run("hang", [program(tmp_path / "hang.py", hang)], 3)
    assert outcome.status is None
    assert outcome.ended.startswith("timed out after ")
    wait_until_gone(map(int, outcome.log.read_text().splitlines()[-1].split()))


def test_a_launcher_that_is_told_to_end_may_end_its_ranks(tmp_path: Path) -> None:
    polite = (
        "import signal, sys, time\nsignal.signal(signal.SIGTERM, lambda *_: (print('goodbye'), sys.exit(0)))\n"
        "print('here', flush=True)\ntime.sleep(600)\n"
    )
    outcome = RankLauncher([sys.executable], tmp_path).run("polite", [program(tmp_path / "polite.py", polite)], 3)
    assert outcome.status is None
    assert outcome.log.read_text().endswith("here\ngoodbye\n")


def test_a_launcher_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        RankLauncher(["no-such-launcher"], tmp_path).run("x", ["pretrain_gpt.py"], 1)


def test_the_tail_is_what_ranks_wrote(tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    agent = "W1122 12:06:08.012 3133 torch/distributed/elastic/multiprocessing/api.py:1028] Sending process 1 SIGTERM"
    log.write_text("\n".join([*(f"line {i}" for i in range(100)), "error on rank 1: out of luck", agent, "Root Cause"]))
    tail = LaunchResult(1, 0.0, log).tail().splitlines()
    assert tail[-1] == "error on rank 1: out of luck"
    assert len(tail) == run.TAIL_LINES


def test_an_environment_of_ones_own_is_kept() -> None:
    with patch.dict(os.environ, {"OMP_NUM_THREADS": "7", "PYTHONPATH": "mine"}):
        found = run.launch_environment("1")
    assert found["OMP_NUM_THREADS"] == "7"
    assert found["PYTHONPATH"].split(os.pathsep) == [str(ROOT), "mine"]
