"""A tiny run in a process of its own, killed with everything it started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tests.runs import before_step, records, start, tiny_run

ROOT = Path(__file__).parents[1]
SECONDS = 120.0


def run_in_process(
    folder: Path, flags: str, kill_after: int = 0, ready: Callable[[], bool] = lambda: True, **environment: str
) -> int:
    """Start the run and wait for its end.

    Args:
        folder: its ``--run-dir``.
        flags: more of them.
        kill_after: step after which it waits, and the process and its children get SIGKILL; 0 for never.
        ready: asked again and again when it waits there, until the time has come.
        environment: more of its variables.

    Returns:
        The exit status, -9 for a run that was killed.

    Raises:
        TimeoutError: when it takes too long.
    """
    command = [sys.executable, "-m", "tests.killed", str(folder), str(kill_after), flags]
    inherited = {name: value for name, value in os.environ.items() if name != "WANDB_SERVICE"}  # of an earlier start
    variables = inherited | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | environment
    deadline = time.monotonic() + SECONDS
    with subprocess.Popen(command, cwd=ROOT, env=variables, start_new_session=True) as process:
        while process.poll() is None:
            late = time.monotonic() > deadline
            if late or (kill_after and _reached(folder, kill_after) and ready()):
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            if late:
                raise TimeoutError(f"the run in {folder} takes more than {SECONDS:.0f} s")
            time.sleep(0.05)
    return process.returncode


def _reached(folder: Path, step: int) -> bool:
    """Whether the last start of the run has reported ``step``."""
    path = folder / "metrics.jsonl"
    if not path.exists() or not path.read_bytes().endswith(b"\n"):
        return False
    lines = records(folder, "iteration")
    begun = max(i for i, line in enumerate(lines) if line.get("event") == "start")
    return any(line["iteration"] == step for line in lines[begun + 1 :] if "lm loss" in line)


def main(folder: str, wait_after: str, flags: str) -> int:
    """The process itself: ``python -m tests.killed FOLDER STEP FLAGS``."""
    waiting = before_step(int(wait_after) + 1 if int(wait_after) else 0, lambda trainer: time.sleep(SECONDS))
    printed = start(tiny_run(Path(folder), flags), waiting)
    print(printed.out, printed.err, sep="\n")
    return printed.status or 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
