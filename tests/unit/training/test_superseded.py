"""A start that hangs in a save while its job is started again, and then goes on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron.training.loggers.run_logger import SUPERSEDED_CHECK_SECONDS
from tests.killed import ROOT
from tests.runs import column, contents, start, tiny_run

SECONDS = 100.0

HANGING = """
import os, sys, time
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import patch
from megatron.checkpoint import publish
from tests.runs import start, tiny_run
from tests.saves import over_before

folder, real = Path(sys.argv[1]), publish.publish_staged

def stalling(final, staged):
    if final.name == "iter_0000004":
        (folder / "hangs").touch()
        while (folder / "hangs").exists():
            time.sleep(0.01)
    real(final, staged)

# on a busy machine the save of step 4 would be skipped, because that of step 2 is still being written
with patch.object(publish, "publish_staged", stalling), over_before(4) if "async" in sys.argv[2] else nullcontext():
    told = start(tiny_run(folder, sys.argv[2]))
print(told.err, flush=True)
os._exit(told.status)
"""


def waited(happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize("how", ["--async-save", pytest.param("", marks=pytest.mark.slow)])
def test_stopped_in_a_save_and_superseded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    flags, hangs = f"--save {tmp_path}/saved --save-interval 2 {how}", tmp_path / "hangs"
    command = [sys.executable, "-c", HANGING, str(tmp_path), flags]
    job = {"SLURM_JOB_ID": "17", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, env=os.environ | job, cwd=ROOT, stdout=subprocess.PIPE, text=True) as old:
        try:
            waited(hangs.exists)
            old.send_signal(signal.SIGSTOP)
            stopped = time.monotonic()
            refused = start(tiny_run(tmp_path, flags))
            assert refused.status == 1
            assert f"in use by process {old.pid} on " in refused.err
            monkeypatch.setenv("SLURM_JOB_ID", "17")
            monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
            printed = start(tiny_run(tmp_path, flags))
            assert printed.status == 0
            assert f"start 1, of process {old.pid} on " in printed.out
            assert f"resumed from {tmp_path}/saved/iter_0000004: step 4" in printed.out
            hangs.unlink()
            left = contents(tmp_path)
            time.sleep(max(0.0, stopped + SUPERSEDED_CHECK_SECONDS - time.monotonic()))
            old.send_signal(signal.SIGCONT)
            message, _ = old.communicate(timeout=SECONDS)
        finally:
            old.kill()
    assert old.returncode == 1
    assert "E817 start 1 of the run in " in message
    assert "superseded by start 2" in message
    assert "Traceback" not in message
    assert contents(tmp_path) == left
    assert column(tmp_path, "iteration")[-2:] == [5, 6]
