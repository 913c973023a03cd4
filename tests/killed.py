"""A tiny run in a process of its own, killed with everything it started."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

from tests.kit.processes import ForkedProgram
from tests.runs import before_step, records, start, tiny_run

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
    deadline = time.monotonic() + SECONDS
    output = folder.with_name(f"{folder.name}.output")
    with patch.dict(os.environ):
        os.environ.pop("WANDB_SERVICE", None)  # of an earlier start
        program = ForkedProgram(run, folder, kill_after, flags, output=output, environment=environment)
    with program:
        while program.poll() is None:
            if kill_after and _reached(folder, kill_after) and ready():
                program.kill()
            elif time.monotonic() > deadline:
                raise TimeoutError(f"the run in {folder} takes more than {SECONDS:.0f} s")
            else:
                time.sleep(0.05)
        return program.wait(0.0)


def run(folder: Path, wait_after: int, flags: str) -> int:
    """The process itself."""
    waiting = before_step(wait_after + 1 if wait_after else 0, lambda trainer: time.sleep(SECONDS))
    printed = start(tiny_run(folder, flags), waiting)
    print(printed.out, printed.err, sep="\n")
    return printed.status or 0


def _reached(folder: Path, step: int) -> bool:
    """Whether the last start of the run has reported ``step``."""
    path = folder / "metrics.jsonl"
    if not path.exists() or not path.read_bytes().endswith(b"\n"):
        return False
    lines = records(folder, "iteration")
    begun = max(i for i, line in enumerate(lines) if line.get("event") == "start")
    return any(line["iteration"] == step for line in lines[begun + 1 :] if "lm loss" in line)
