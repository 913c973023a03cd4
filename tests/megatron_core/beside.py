"""Runs of megatron-core from PyPI, and of this package from the same weights with the same data and options.

``MEGATRON_CORE_PYTHON`` is the Python of an environment of its own, which ``bash tests/megatron_core/setup.sh FOLDER``
makes.
"""

from __future__ import annotations

import json
import os
import random
import socket
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from megatron.arguments.cli import parse
from tests.kit.pool import Pool
from tests.kit.runs import Outcome, start, steps
from tests.megatron_core.cases import Case
from tests.unit.data import pairs

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
    file, found = folder.resolve() / "job.json", folder.resolve() / "steps.json"
    found.unlink(missing_ok=True)
    file.write_text(json.dumps({"flags": [*flags], "steps": str(found), **job}))
    if program()(f"{ranks} {file}") != "0":
        raise RuntimeError(file.with_suffix(".log").read_text()[-6000:])
    taken: list[dict[str, float]] = json.loads(found.read_text())
    return taken


@cache
def program() -> Callable[[str], str]:
    """Start the program that runs the jobs, which ends with this one; return what gives it a line for its answer."""
    own, its = socket.socketpair()
    subprocess.Popen(
        [os.environ[VARIABLE], "-W", "ignore", str(LOOP)],
        env={**os.environ, "PYTHONPATH": "", "OMP_NUM_THREADS": "1"},
        stdin=its,
        stdout=its,
        stderr=subprocess.DEVNULL,
    )
    its.close()
    lines = own.makefile("rw")

    def ask(line: str) -> str:
        print(line, file=lines, flush=True)
        return lines.readline().strip()

    return ask


def run_ours(folder: Path, flags: Sequence[str]) -> list[dict[str, Any]]:
    """Train with this package in the current folder to the end, on one rank; return the records of the steps.

    Raises:
        RuntimeError: with what it printed, if it fails.
    """
    return finished(folder, start(parse([*flags, *OWN, str(folder / "log")], {}).config))


OWN = ("--device", "cpu", "--run-dir")
"""Flags of this package alone."""


def finished(folder: Path, outcome: Outcome) -> list[dict[str, Any]]:
    """Return the records of the steps of a run that has ended; RuntimeError if it failed."""
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


def run_rank(rank: int, world_size: int, folder: Path, flags: Sequence[str]) -> list[dict[str, Any]]:
    """Train as one rank of several; return the records of the steps."""
    os.chdir(folder)
    place = {"RANK": str(rank), "WORLD_SIZE": str(world_size)}
    return finished(folder, start(parse([*flags, *OWN, str(folder / "log")], place).config, None, rank, world_size))


def run_case(folder: Path, case: Case, pool: Pool | None = None, fault: str = "") -> Difference:
    """Train both from the same weights; return the differences.

    Args:
        folder: an empty one, where both run.
        case: what they compute.
        pool: of processes, if the case has several.
        fault: Python that changes megatron-core.

    Raises:
        RuntimeError: if one of them fails.
    """
    write_text(folder)
    job = {"save": {"0": "start"}, "fault": f"{case.code}\n{fault}"}
    theirs = run_core(folder, [*case.all_flags, *case.theirs.split()], case.ranks, **job)
    flags = [*case.all_flags, "--load", f"megatron:{folder}/start", "--resume-mode", "weights-only"]
    if case.ranks == 1 or pool is None:
        return difference(theirs, run_ours(folder, flags))
    return difference(theirs, pool.run(case.ranks, run_rank, folder, flags)[0])


def write_text(folder: Path) -> None:
    """Write token files from which a model learns: each token follows from the one before, up to a little chance."""
    chance, documents = random.Random(0), []
    for _ in range(300):
        tokens = [chance.randrange(383)]
        for _ in range(chance.randrange(5, 90)):
            tokens.append((5 * tokens[-1] + chance.choice((1, 1, 1, 2, 7))) % 383)
        documents.append([*tokens, 383])  # which ends a document
    pairs.write(folder / "data", documents)
