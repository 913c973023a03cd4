"""A tiny run in a process of its own, killed with everything it started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from megatron.training.setup import Trainer
from tests.runs import before_step, start, tiny_run

ROOT = Path(__file__).parents[1]


def run_in_process(folder: Path, flags: str, kill_before: int = 0, wait: float = 0.0, **environment: str) -> int:
    """Start the run and wait for its end.

    Args:
        folder: its ``--run-dir``.
        flags: more of them.
        kill_before: step before which the process and its children get SIGKILL; 0 for never.
        wait: seconds between the step before and that.
        environment: more of its variables.

    Returns:
        The exit status, -9 for a run that was killed.
    """
    command = [sys.executable, "-m", "tests.killed", str(folder), str(kill_before), str(wait), flags]
    variables = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | environment
    return subprocess.run(command, cwd=ROOT, env=variables, start_new_session=True, timeout=120).returncode


def main(folder: str, kill_before: str, wait: str, flags: str) -> int:
    """The process itself: ``python -m tests.killed FOLDER STEP WAIT FLAGS``."""

    def kill(trainer: Trainer) -> None:
        time.sleep(float(wait))
        os.killpg(0, signal.SIGKILL)

    told = start(tiny_run(Path(folder), flags), before_step(int(kill_before), kill))
    print(told.out, told.err, sep="\n")
    return told.status or 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
