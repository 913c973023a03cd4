"""Runs of megatron-core from PyPI, and of this package from the same weights with the same data and options.

``MEGATRON_CORE_PYTHON`` is the Python of an environment of its own, which ``bash tests/megatron_core/setup.sh FOLDER``
makes.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.arguments.cli import parse
from tests.kit.processes import free_port
from tests.kit.runs import start, steps

LOOP = Path(__file__).with_name("loop.py")
VARIABLE = "MEGATRON_CORE_PYTHON"


def missing() -> str:
    """Why megatron-core cannot be run; empty if it can."""
    if Path(os.environ.get(VARIABLE, "")).is_file():
        return ""
    return f"needs megatron-core: bash tests/megatron_core/setup.sh FOLDER; export {VARIABLE}=FOLDER/bin/python"


def run_core(folder: Path, flags: Sequence[str], ranks: int = 1, **job: Any) -> list[dict[str, float]]:
    """Train with megatron-core in a folder to the end; return the loss and gradient norm of each step.

    Args:
        folder: where it runs.
        flags: of Megatron-LM.
        ranks: processes.
        job: more of the job, see ``loop.py``.

    Raises:
        RuntimeError: with the end of its output, if it fails.
    """
    file, found = folder / "job.json", folder / "steps.json"
    found.unlink(missing_ok=True)
    file.write_text(json.dumps({"flags": [*flags], "steps": str(found), **job}))
    launch = ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "--master-port", str(free_port())]
    ran = subprocess.run(
        [os.environ[VARIABLE], *(launch if ranks > 1 else ["-W", "ignore"]), str(LOOP), str(file)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": "", "OMP_NUM_THREADS": "1", "MASTER_PORT": str(free_port())},
        capture_output=True,
        text=True,
        check=False,
    )
    if ran.returncode:
        raise RuntimeError(f"{ran.stdout[-2000:]}\n{ran.stderr[-6000:]}")
    taken: list[dict[str, float]] = json.loads(found.read_text())
    return taken


def run_ours(folder: Path, flags: Sequence[str]) -> list[dict[str, Any]]:
    """Train with this package in a folder to the end, on one rank; return the records of the steps.

    Raises:
        RuntimeError: with what it printed, if it fails.
    """
    outcome = start(parse([*flags, "--device", "cpu", "--run-dir", str(folder / "log")], {}).config)
    if outcome.status != 0:
        raise RuntimeError(f"{outcome.out[-2000:]}\n{outcome.err[-4000:]}")
    return [step for _, step in sorted(steps(folder / "log").items())]


@dataclass(frozen=True)
class Difference:
    """The largest relative differences of two runs.

    Attributes:
        steps: that both have taken.
        loss: of the loss.
        grad_norm: of the norm of the gradients.
    """

    steps: int
    loss: float
    grad_norm: float


def difference(theirs: Sequence[Mapping[str, float]], ours: Sequence[Mapping[str, Any]]) -> Difference:
    """Return the largest relative differences of two runs.

    Raises:
        ValueError: if they did not take the same steps with batches of the same size.
    """
    sizes = [[step["batch_size"] for step in theirs], [step["batch-size"] for step in ours]]
    if sizes[0] != sizes[1]:
        raise ValueError(f"the batches are {sizes[0]} and {sizes[1]}")
    pairs = [*zip(theirs, ours, strict=True)]
    loss, norm = (
        max(abs(mine[name] - step[other]) / abs(step[other]) for step, mine in pairs)
        for name, other in (("lm loss", "lm loss"), ("grad-norm", "grad_norm"))
    )
    return Difference(len(pairs), loss, norm)
