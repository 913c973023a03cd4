"""What the launcher says of this process: torchrun and srun tell it through the environment."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import NoReturn, TextIO

from megatron.config.problems import Problem

FIRST_SPECIAL_STEP = 0xFFFFFFF0
"""Slurm counts the steps of a job from 0; from here on numbers mean a batch script, an interactive shell and so on."""


NO_ID = "none"
"""What torchrun takes for a ``--rdzv-id`` where none is given: the same for everybody."""


@dataclass(frozen=True)
class Start:
    """Which start of which job a process belongs to, as far as the launcher says.

    Attributes:
        job: Slurm's number of the job.
        cluster: Slurm's name of the cluster, whose jobs the number tells apart.
        restart: how often Slurm has put the job back into its queue.
        step: of the job, counted by srun; -1 outside of any.
        group: torchrun's ``--rdzv-id``.
        attempt: how often torchrun has restarted its processes.
    """

    job: str | None = None
    cluster: str | None = None
    restart: int = 0
    step: int = -1
    group: str | None = None
    attempt: int = 0

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> Start:
        """What ``environ`` says."""
        job, group = environ.get("SLURM_JOB_ID") or None, environ.get("TORCHELASTIC_RUN_ID") or None
        return cls(
            job=job,
            cluster=environ.get("SLURM_CLUSTER_NAME") if job else None,
            restart=_number(environ, "SLURM_RESTART_COUNT", 0) if job else 0,
            step=_step(environ) if job else -1,
            group=None if group == NO_ID else group,
            attempt=_number(environ, "TORCHELASTIC_RESTART_COUNT", 0) if group else 0,
        )

    def follows(self, other: Start) -> bool:
        """Whether this is a later start of the same job, which takes the place of ``other``.

        Within one step of one job, and outside of Slurm, it is torchrun that starts again: with the same
        ``--rdzv-id``, and a number of attempts that does not go down (a rank that comes or goes starts all of them
        anew, and is not counted).
        """
        if (self.job, self.cluster) != (other.job, other.cluster):
            return False
        here, there = (self.restart, self.step), (other.restart, other.step)
        if here != there:
            return here > there
        return self.group is not None and self.group == other.group and self.attempt >= other.attempt

    def __str__(self) -> str:
        words = []
        if self.job is not None:
            words += [f"Slurm job {self.job}", f"restart {self.restart}", *([f"step {self.step}"] * (self.step >= 0))]
        if self.group is not None:
            words += [f"torchrun's {self.group}", f"attempt {self.attempt}"]
        return ", ".join(words)


def restart_remarks(environ: Mapping[str, str]) -> list[str]:
    """That torchrun's restarts may fail: ranks of every start meet in the agents' store, among keys of the dead."""
    if not _number(environ, "TORCHELASTIC_MAX_RESTARTS", 0) or environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return []
    return [
        "--max-restarts: ranks that start again would look for those that are dead, and fail; before torchrun: "
        "export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"
    ]


@dataclass(frozen=True)
class Launch:
    """This process among those that were started together; by itself, a process that was started plainly.

    Attributes:
        launcher: ``torchrun`` (or whoever sets its variables), ``srun``, or None.
        rank: from 0.
        world_size: ranks.
        local_rank: rank among those of this machine.
        local_size: ranks of this machine, as far as this one knows.
        master: the address at which rank 0 waits for the others; None when nobody says.
        node: tells this machine from the others of the run, and grows with their order; not by ones.
    """

    launcher: str | None = None
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_size: int = 1
    master: str | None = "127.0.0.1"
    node: int = 0

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> Launch:
        """What ``environ`` says; torchrun comes before srun, inside of which it may run."""
        if "RANK" in environ and "WORLD_SIZE" in environ:
            return cls._torchrun(environ)
        if _is_srun_step(environ):
            return cls._srun(environ)
        return cls()

    @classmethod
    def _torchrun(cls, environ: Mapping[str, str]) -> Launch:
        rank, size, local = int(environ["RANK"]), int(environ["WORLD_SIZE"]), int(environ.get("LOCAL_RANK", "0"))
        local_size = int(environ.get("LOCAL_WORLD_SIZE", local + 1))
        master = environ.get("MASTER_ADDR", cls.master)
        return cls("torchrun", rank, size, local, local_size, master, rank - local)

    @classmethod
    def _srun(cls, environ: Mapping[str, str]) -> Launch:
        rank, size, local = (int(environ[name]) for name in ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"))
        one_machine = environ.get("SLURM_NNODES", "1") == "1"
        master = environ.get("MASTER_ADDR", cls.master if one_machine else None)
        return cls("srun", rank, size, local, local + 1, master, int(environ.get("SLURM_NODEID", "0")))

    def problems(self) -> Iterator[Problem]:
        """Why the ranks cannot find each other."""
        if self.master is None and self.world_size > 1:
            yield Problem(
                "E009",
                f"srun started {self.world_size} ranks on several machines, and nothing says on which one rank 0 is",
                ('export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n1)',),
            )


def _is_srun_step(environ: Mapping[str, str]) -> bool:
    """Whether srun started this process; a batch script has its job's variables too, but is no rank."""
    return _step(environ) >= 0 and {"SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"} <= environ.keys()


def _step(environ: Mapping[str, str]) -> int:
    """Number of the step that srun started; -1 outside of any."""
    step = _number(environ, "SLURM_STEP_ID", -1)
    return step if step < FIRST_SPECIAL_STEP else -1


def _number(environ: Mapping[str, str], name: str, otherwise: int) -> int:
    """A variable that is a number, if it is."""
    text = environ.get(name, "")
    return int(text) if text.isdecimal() else otherwise


def leave(status: int) -> NoReturn:
    """End the process without the interpreter's own end; what is registered for the exit is done after a success.

    A thread of torch that comes back to Python in that end aborts the process, whatever it had achieved. After a
    failure, torch.distributed could wait there for ranks that are gone.
    """
    if status == 0:
        atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        _flush(stream)
    os._exit(status)


def _flush(stream: TextIO) -> None:
    """Write what waits. What nobody takes is dropped: Python would try once more and make 120 of the status."""
    try:
        stream.flush()
    except OSError:  # a full disk, a pipe that nobody reads; the status tells more
        with suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
