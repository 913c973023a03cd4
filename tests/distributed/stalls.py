"""A fault on one rank of a run: sleep, exit, exception, other collectives, a blocked disk, SIGSTOP, native deadlock.

    python -m tests.distributed.stalls    # on 8 ranks, prints; --write keeps it in tests/golden/stalls.txt

Every rank is a process of its own, and no launcher ends what is left. All have to end by themselves with a status that
is not 0, within the timeout and 10 seconds after the fault, and the one report names the rank and its place.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from unittest.mock import patch

import torch

from megatron.distributed import comm
from megatron.distributed.comm import Group
from megatron.training import main
from megatron.training.trainer import Trainer
from tests.kit.processes import ForkedProgram, free_port, is_alive
from tests.kit.runs import before_step, tiny_run

GOLDEN = Path(__file__).parents[1] / "golden/stalls.txt"
STEP = 3
LAYOUT = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --global-batch-size 8"
MARGIN = 10.0
"""Seconds after the timeout in which all ranks have to end."""

LONG = 1000
"""Seconds of something that does not end."""

FAULT_FILE = "fault at"
"""File with the time at which the fault happened."""


def overheat() -> None:
    raise ValueError("too hot")


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def hold_lock() -> None:
    ctypes.PyDLL(None).sleep(LONG)  # PyDLL does not release Python's lock


def block_disk() -> None:
    patch.object(os, "fsync", lambda descriptor: time.sleep(LONG)).start()


def other_call(call: Callable[[Group], object], group: Group) -> None:
    call(group)


def call_equally(group: Group) -> None:
    comm.all_reduce(torch.zeros(1024), group)


@dataclass(frozen=True)
class Case:
    """A fault."""

    # Happens on one rank.
    act: Callable[[], object] | None
    # In the report, after the rank.
    place: str
    # Calls of the rank and of the others, for different collectives.
    call: Callable[[Group], object] | None = None
    # In the forward of a micro-batch; False for before the data are read.
    in_forward: bool = True


CALLED = r" called {} in world as number \d+ of the group; rank"
CASES = {
    "sleep": Case(lambda: time.sleep(LONG), r": forward-compute, step 3, micro-batch 1"),
    "exit": Case(lambda: os._exit(3), r": has ended, forward-compute, step 3, micro-batch 1"),
    "exception": Case(overheat, r": Traceback[^?]*ValueError: too hot"),
    "operation": Case(
        None,
        CALLED.format("reduce-scatter of 1,024 x float32"),
        lambda group: comm.reduce_scatter(torch.zeros(1024), group),
    ),
    "size": Case(
        None, CALLED.format("all-reduce of 512 x float32"), lambda group: comm.all_reduce(torch.zeros(512), group)
    ),
    "dtype": Case(
        None,
        CALLED.format("all-reduce of 1,024 x int32"),
        lambda group: comm.all_reduce(torch.zeros(1024, dtype=torch.int32), group),
    ),
    "disk": Case(block_disk, r": checkpoint, step 3", in_forward=False),
    "data": Case(lambda: time.sleep(LONG), r": data loader, step 3", in_forward=False),
    "SIGSTOP": Case(stop, r": stopped \(process state T\), forward-compute, step 3, micro-batch 1"),
    "native": Case(
        hold_lock,
        r": in native code that holds Python's lock, forward-compute, step 3, micro-batch 1[^;]*\(hold_lock at",
    ),
}


def set_up(trainer: Trainer, name: str, rank: int, culprit: int, folder: Path) -> None:
    """Make the fault happen in this step; without one for a name that is no case."""
    if name not in CASES:
        return
    case = CASES[name]
    if case.call is not None:
        if rank == culprit:
            (folder / FAULT_FILE).write_text(str(time.monotonic()))
        next(iter(trainer.chunks.values())).register_forward_pre_hook(lambda *_: time.sleep(0.03))  # as a larger model
        group = trainer.mesh.world
        (case.call if rank == culprit else call_equally)(group)
        return
    if rank != culprit or case.act is None:
        return
    act, forwards = case.act, list[object]()

    def fault() -> None:
        (folder / FAULT_FILE).write_text(str(time.monotonic()))
        act()

    def before(*_: object) -> None:
        forwards.append(None)
        if len(forwards) == 2:
            fault()

    if case.in_forward:
        next(iter(trainer.chunks.values())).register_forward_pre_hook(before)
    else:
        fault()


def run_rank(rank: int, size: int, port: int, name: str, culprit: int, folder: str, flags: str, apart: bool) -> int:
    """One rank, in a process of its own."""
    place = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size, "MASTER_PORT": port}
    if apart:  # as on machines of their own, which share no memory
        place |= {"SLURMD_NODENAME": f"node{rank}", "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
    os.environ |= {key: str(value) for key, value in place.items()} | {"MASTER_ADDR": "127.0.0.1"}
    torch.set_num_threads(1)
    at = partial(set_up, name=name, rank=rank, culprit=culprit, folder=Path(folder))
    with before_step(STEP, at), patch("megatron.training.loggers.run_logger.draw_plots", lambda *arguments: None):
        status = main.run(tiny_run(Path(folder) / "run", flags, size))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


@dataclass(frozen=True)
class Ended:
    """The end of a run with a fault."""

    # Exit statuses by rank.
    statuses: tuple[int | None, ...]
    # Standard error and output of all ranks.
    printed: str
    # Seconds from the fault to the end of the last rank.
    seconds: float
    # Sessions in which a process was left.
    left: int
    folder: Path

    def problems(self, name: str, culprit: int, timeout: float) -> list[str]:
        """Return what is wrong with it."""
        case, found = CASES[name], []
        reports = re.findall(r"^error on rank \d+.*: ", self.printed, re.MULTILINE)
        if len(reports) != 1:
            found.append(f"{len(reports)} reports")
        if not re.search(rf"rank {culprit}(?: on node\d+)?{case.place}", self.printed):
            found.append("rank or place is not named")
        if not all(self.statuses):
            found.append(f"exit statuses {self.statuses}")
        if self.seconds > timeout + MARGIN:
            found.append(f"{self.seconds:.1f} s")
        if self.left:
            found.append(f"{self.left} processes are left")
        file = self.folder / "run/failures.jsonl"
        lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
        if [line["rank"] for line in lines] != [culprit]:
            found.append(f"failures.jsonl: {lines}")
        return found


def run_case(
    name: str, size: int, culprit: int, minutes: float, folder: Path, layout: str = LAYOUT, apart: bool = False
) -> Ended:
    """Run a case, and wait for the end of all ranks; those that are left are killed."""
    folder.mkdir(parents=True, exist_ok=True)
    flags = (
        f"{layout} --train-iters 2000 --log-interval 400 --micro-batch-size 1 --distributed-timeout-minutes {minutes}"
    )
    flags += f" --save {folder}/saved --save-interval 3" if name == "disk" else ""
    port, ranks = free_port(), list[ForkedProgram]()
    try:
        for rank in range(size):
            arguments = rank, size, port, name, culprit, str(folder), flags, apart
            ranks.append(ForkedProgram(run_rank, *arguments, output=folder / f"rank{rank}.txt"))
        began: float | None = None
        ended = time.monotonic()
        while any(rank.poll() is None for rank in ranks):
            if began is None and (folder / FAULT_FILE).exists():
                began = float((folder / FAULT_FILE).read_text() or time.monotonic())
            ended = time.monotonic()
            if ended > (began + 60 * minutes + 3 * MARGIN if began else ranks_began(folder) + 300.0):
                break
            time.sleep(0.05)
        statuses = tuple(rank.poll() for rank in ranks)
        left = sum(is_alive(rank.pid) for rank in ranks)
    finally:
        for program in ranks:
            program.kill()
    printed = "\n".join(program.output for program in ranks)
    return Ended(statuses, printed, ended - (began or ended), left, folder)


def ranks_began(folder: Path) -> float:
    """Return when the folder was made, on the monotonic clock."""
    return time.monotonic() - (time.time() - folder.stat().st_ctime)


def report_of(printed: str) -> str:
    """Return the line of the report that names the ranks, or the last line of a traceback."""
    lines = [line for line in printed.splitlines() if line.startswith("error on rank ")]
    return lines[0] if lines else "no report"


def main_program(argv: Sequence[str] | None = None) -> int:
    """Run all cases."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", nargs="*", default=[*CASES])
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--minutes", type=float, default=0.2, help="timeout")
    parser.add_argument("--apart", action="store_true", help="as if each rank had a machine of its own")
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args(argv)
    lines, wrong = [], 0
    for number, name in enumerate(args.cases):
        culprit = (5 + 3 * number) % args.ranks
        with tempfile.TemporaryDirectory() as folder:
            ended = run_case(name, args.ranks, culprit, args.minutes, Path(folder) / name, apart=args.apart)
            problems = ended.problems(name, culprit, 60 * args.minutes)
            wrong += bool(problems)
            if problems:
                print(ended.printed, file=sys.stderr)
        statuses = " ".join(map(str, ended.statuses))
        lines += [
            f"{name} on rank {culprit}: {'; '.join(problems) or 'right'}, {ended.seconds:.1f} s, exits {statuses}"
        ]
        lines += [f"  {report_of(ended.printed)}"]
        print(*lines[-2:], sep="\n", flush=True)
    if args.write:
        head = f"python -m tests.distributed.stalls --write: {args.ranks} ranks, timeout {60 * args.minutes:g} s"
        GOLDEN.write_text("\n".join([f"{head}, {time.strftime('%Y-%m-%d')}", *lines, f"{wrong} wrong"]) + "\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main_program())
