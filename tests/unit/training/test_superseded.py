"""A start that hangs in a save while its job is started again, and then goes on."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import patch

import pytest

from megatron.checkpoint import publish
from megatron.training.loggers import run_logger
from tests.kit.processes import ForkedProgram
from tests.kit.runs import column, contents, start, tiny_run
from tests.kit.saves import over_before

SECONDS = 100.0

CHECK_SECONDS = 1.0
"""In the place of ``SUPERSEDED_CHECK_SECONDS``."""


def hang(folder: Path, flags: str) -> int:
    """A run whose save of step 4 waits until a file is removed."""
    real = publish.publish_staged

    def stalling(final: Path, staged: Path) -> None:
        if final.name == "iter_0000004":
            (folder / "hangs").touch()
            while (folder / "hangs").exists():
                time.sleep(0.01)
        real(final, staged)

    # on a busy machine the save of step 4 would be skipped, because the save of step 2 is still being written
    early = over_before(4) if "async" in flags else nullcontext()
    often = patch.object(run_logger, "SUPERSEDED_CHECK_SECONDS", CHECK_SECONDS)
    with patch.object(publish, "publish_staged", stalling), early, often:
        ran = start(tiny_run(folder, flags))
    print(ran.err, flush=True)
    os._exit(ran.status or 0)


def waited(happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize("how", ["--async-save", pytest.param("", marks=pytest.mark.slow)])
def test_stopped_in_a_save_and_superseded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    flags, hangs = f"--save {tmp_path}/saved --save-interval 2 {how}", tmp_path / "hangs"
    output, job = tmp_path.with_name(f"{tmp_path.name}.output"), {"SLURM_JOB_ID": "17"}
    with ForkedProgram(hang, tmp_path, flags, output=output, environment=job) as old:
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
        time.sleep(max(0.0, stopped + CHECK_SECONDS - time.monotonic()))
        old.send_signal(signal.SIGCONT)
        status = old.wait(SECONDS)
    assert status == 1
    assert "E817 start 1 of the run in " in old.output
    assert "superseded by start 2" in old.output
    assert "Traceback" not in old.output
    now = contents(tmp_path)
    assert now.pop("ranks/rank_00000.log").startswith(left.pop("ranks/rank_00000.log"))  # has the error of the old one
    assert now == left
    assert column(tmp_path, "iteration")[-2:] == [5, 6]
