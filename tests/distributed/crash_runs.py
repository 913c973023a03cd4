"""Whole runs of a tiny model, every rank a process of its own: started, disturbed, and judged from outside."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import time
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from unittest.mock import patch

from megatron.training import main
from tests.distributed.crash_faults import Fault, Watch, checkpoints, step_of, whole_steps
from tests.kit.processes import free_port
from tests.kit.runs import differences, steps, tiny_run

EARLY = "torch._dynamo", "megatron.checkpoint.load", "megatron.training.local_checkpoints", "megatron.checkpoint.save"
"""Modules that a run imports when it needs them: importing them before ranks are forked saves each rank seconds."""

for name in EARLY:
    import_module(name)

STEPS = 8
SECONDS = 400.0
"""Seconds after which a start on a busy machine counts as hanging."""

HANG = 240.0
"""Seconds in which ranks must notice a lost rank: a few times the timeout of a collective."""


@dataclass(frozen=True)
class Setup:
    """A run: how many ranks, how they share the model, and how it is saved."""

    name: str
    ranks: int
    layout: str  # flags on which the numbers depend
    way: str = "--save-interval 2"  # flags on which they do not
    node: int = 0  # ranks of a node

    @property
    def is_local(self) -> bool:
        """Return True if nodes keep local checkpoints."""
        return "--local-save" in self.way

    def durable(self, folder: Path) -> Path:
        """Return the folder of the shared checkpoints."""
        return folder / "saved"

    def nodes(self, folder: Path) -> list[Path]:
        """Return the folders of the local checkpoints."""
        return [folder / f"node{n}" for n in range(self.ranks // self.node)] if self.is_local else []

    def flags(self, folder: Path) -> str:
        """All flags of a run in ``folder``."""
        local = f"--local-save {folder}/node{{node}}" if self.is_local else ""
        return (
            f"--train-iters {STEPS} --hidden-dropout 0.1 --eval-interval 3 --eval-iters 1 {self.layout} "
            f"--save {folder}/saved {self.way} {local} --distributed-timeout-minutes 1"
        )


@dataclass(frozen=True)
class Ended:
    """The end of a start."""

    statuses: tuple[int, ...]  # of all ranks, negative for signals
    printed: str  # by rank 0, to both streams
    errors: str  # printed by the others; only the first rank that fails reports its failure
    seconds: float
    calls: tuple[tuple[str, ...], ...]  # names and paths of the calls of each rank that touched checkpoints
    late: float = 0.0  # seconds after a rank was killed until all others had ended by themselves, if they did


def start(setup: Setup, folder: Path, fault: Fault | None = None) -> Ended:
    """Start the run in ``folder``, wait for its end, and have a fault happen.

    Raises:
        TimeoutError: when it does not end.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for file in folder.glob("rank[0-9]*"):
        file.unlink()
    for rank in range(setup.ranks):  # which may be killed before it opens them
        (folder / f"rank{rank}.txt").touch()
        (folder / f"rank{rank}.calls").touch()
    port, began = free_port(), time.monotonic()
    faulthandler.cancel_dump_traceback_later()  # pytest's: a fork has its locks without its thread
    pids = [_fork(setup, folder, rank, port, fault) for rank in range(setup.ranks)]
    statuses: dict[int, int] = {}
    try:
        late = _await(pids, statuses, began, fault)
    finally:
        for pid in [pid for pid in pids if pid not in statuses]:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    message, *others = ((folder / f"rank{rank}.txt").read_text(errors="replace") for rank in range(setup.ranks))
    calls = tuple(tuple((folder / f"rank{r}.calls").read_text().splitlines()) for r in range(setup.ranks))
    ended = tuple(statuses[pid] for pid in pids)
    return Ended(ended, message, "\n".join(others), time.monotonic() - began, calls, late)


def _fork(setup: Setup, folder: Path, rank: int, port: int, fault: Fault | None) -> int:
    child = os.fork()
    if child:
        return child
    status = 70
    try:
        status = _rank(setup, folder, rank, port, fault)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _rank(setup: Setup, folder: Path, rank: int, port: int, fault: Fault | None) -> int:
    """One rank, in its process."""
    out = os.open(folder / f"rank{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(out, stream)
    sys.stdout, sys.stderr = (os.fdopen(stream, "w", buffering=1) for stream in (1, 2))  # not a test's own
    size = setup.node or setup.ranks
    place = {"RANK": rank, "WORLD_SIZE": setup.ranks, "LOCAL_RANK": rank % size, "LOCAL_WORLD_SIZE": size}
    os.environ |= {name: str(value) for name, value in place.items()}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    mine = fault if fault is not None and fault.rank == rank else None
    watch = Watch([setup.durable(folder), *setup.nodes(folder)], mine, folder / f"rank{rank}.calls")
    with watch.watching(), patch("megatron.training.loggers.run_logger.draw_plots", lambda *arguments: None):
        return main.run(tiny_run(folder, setup.flags(folder), setup.ranks))


def _await(pids: list[int], statuses: dict[int, int], began: float, fault: Fault | None) -> float:
    """Wait for all, and kill at the moment that was chosen, and what a launcher would kill; return ``Ended.late``."""
    died = 0.0
    while left := [pid for pid in pids if pid not in statuses]:
        for pid in left:
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                statuses[pid] = os.waitstatus_to_exitcode(status)
        now = time.monotonic()
        if not died and -signal.SIGKILL in statuses.values():
            died = now
            if fault is not None and not fault.patient:
                _kill([pid for pid in pids if pid not in statuses])
        if fault is not None and fault.kind == "kill at a moment" and not died and now > began + fault.moment:
            _kill([pid for pid in (pids[fault.rank],) if pid not in statuses])
        if now > began + SECONDS or (died and now > died + HANG):
            raise TimeoutError(f"{len(left)} of {len(pids)} ranks do not end")
        time.sleep(0.01)
    return time.monotonic() - died if died and fault is not None and fault.patient else 0.0


def _kill(pids: list[int]) -> None:
    """End processes that were not waited for yet, so that their numbers are still theirs."""
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


@dataclass(frozen=True)
class Before:
    """The contents of a run's folders when it is started: steps of whole checkpoints, and the folders of others."""

    whole: set[int]
    broken: tuple[Path, ...]

    @classmethod
    def look(cls, setup: Setup, folder: Path) -> Before:
        """Look at every byte."""
        durable = setup.durable(folder)
        whole = whole_steps(durable, setup.nodes(folder))
        mine = whole_steps(durable, [])
        return cls(whole, tuple(path for path in checkpoints(durable) if step_of(path) not in mine))

    @property
    def newest(self) -> int:
        """The step from which a run has to go on; 0 for the beginning."""
        return max(self.whole, default=0)

    def complaints(self, printed: str) -> list[str]:
        """Return the notes that a start should have printed and has not."""
        found = []
        if self.newest and f": step {self.newest}, " not in printed:
            found.append(f"does not report that it resumes from step {self.newest}")
        if not self.newest and "starts from scratch" not in printed:
            found.append("does not report that it starts from scratch")
        for path in self.broken:
            is_named = any(
                words in printed for words in (f"passed over {path}:", f"  {path.name}: ", f"removed {path.name}:")
            )
            if step_of(path) > self.newest and not is_named:
                found.append(f"does not report why {path.name} is passed over")
        return found


def same_end(setup: Setup, folder: Path, reference: Path) -> list[str]:
    """Return differences, to the bit, from the end of the undisturbed run: tensors, numbers and losses."""
    last = f"saved/iter_{STEPS:07d}"
    found = differences(folder / last, reference / last)
    apart = [step for step, numbers in steps(reference).items() if steps(folder).get(step) != numbers]
    return found + [f"the record of step {step}" for step in apart]
