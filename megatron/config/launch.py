"""The launcher's environment variables, of torchrun or srun: ranks, restarts, the address of rank 0.

``Launch`` describes this process among the ranks; ``JobStart`` orders restarts of a job, so that a later start can take
over the checkpoint folder from an earlier one.
"""

from __future__ import annotations

import atexit
import json
import os
import re
import sys
import time
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from megatron.config.errors import Problem, UserError
from megatron.config.privacy import redact

FIRST_SPECIAL_STEP = 0xFFFFFFF0
"""Slurm counts the steps of a job from 0; larger numbers denote a batch script, an interactive shell and so on."""

DEFAULT_RDZV_ID = "none"
"""torchrun's default ``--rdzv-id``, which does not identify a job."""


@dataclass(frozen=True)
class JobStart:
    """Job of a process, and number of its start. A later start takes over the run's checkpoint folder."""

    job: str | None = None  # number of the Slurm job
    cluster: str | None = None  # Slurm cluster; job numbers are unique in one
    restart: int = 0  # number of times that Slurm requeued the job
    step: int = -1  # of the job, counted by srun; -1 outside of any
    group: str | None = None  # torchrun's ``--rdzv-id``
    attempt: int = 0  # number of times that torchrun restarted its processes
    chain: str | None = None  # number of the first job of its chain, see slurm/lib.sh

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> JobStart:
        """Read the environment."""
        job = environ.get("SLURM_JOB_ID") or None
        group = environ.get("TORCHELASTIC_RUN_ID") or None
        return cls(
            job=job,
            cluster=environ.get("SLURM_CLUSTER_NAME") if job else None,
            restart=_number(environ, "SLURM_RESTART_COUNT", 0) if job else 0,
            step=_step(environ) if job else -1,
            group=None if group == DEFAULT_RDZV_ID else group,
            attempt=_number(environ, "TORCHELASTIC_RESTART_COUNT", 0) if group else 0,
            chain=environ.get("CHAIN_ID") or None if job else None,
        )

    def follows(self, other: JobStart) -> bool:
        """Return True if this is a later start of the same job as ``other``, or a later job of the same chain.

        Within one Slurm step, and outside of Slurm, torchrun restarts processes: with the same ``--rdzv-id`` and an
        attempt that does not decrease. A change in the number of nodes restarts all ranks without a new attempt.
        """
        if self.cluster != other.cluster:
            return False
        if self.job != other.job:
            mine, theirs = (
                int(job) if re.fullmatch(r"\d{1,18}", job) else 0 for job in (str(self.job), str(other.job))
            )
            return self.chain is not None and self.chain == other.chain and mine > theirs
        here = (self.restart, self.step)
        there = (other.restart, other.step)
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


def launch_notes(environ: Mapping[str, str]) -> list[str]:
    """Return notes if this is one process though a launcher has left a number of ranks, or if restarts may fail.

    Torch's agents write the address of a store that they share once only, so an agent that comes later waits in vain.
    """
    if environ.get("WORLD_SIZE", "1") != "1" and "RANK" not in environ:
        return [f"WORLD_SIZE={environ['WORLD_SIZE']} has no effect without RANK: this is a single process"]
    if not _number(environ, "TORCHELASTIC_MAX_RESTARTS", 0) or environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return []
    return [
        "--max-restarts: a machine that comes back cannot join, and the others fail; before torchrun: "
        "export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"
    ]


@dataclass(frozen=True)
class Launch:
    """The rank of this process and the ranks it was started with; the defaults are a single process."""

    launcher: str | None = None  # torchrun (or a compatible launcher), srun or None
    rank: int = 0  # from 0
    world_size: int = 1
    local_rank: int = 0  # on this node
    local_size: int = 1  # ranks of this node; under srun only a lower bound
    master: str | None = "127.0.0.1"  # address of rank 0; None if unknown
    node: int = 0  # identifies the node; increases with the node's order, but not by 1
    port: int = 29500  # of rank 0

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> Launch:
        """Read the environment; torchrun takes precedence over srun, which may have started it.

        Raises:
            UserError: if a variable is not a number, or the rank is not below the number of ranks.
        """
        if "RANK" in environ and "WORLD_SIZE" in environ:
            rank, size = _ranks(environ, "RANK", "WORLD_SIZE")
            local = _variable(environ, "LOCAL_RANK", 0)
            local_size = _variable(environ, "LOCAL_WORLD_SIZE", local + 1)
            master = environ.get("MASTER_ADDR", cls.master)
            return cls("torchrun", rank, size, local, local_size, master, rank - local, _port(environ))
        names = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID")
        if _step(environ) < 0 or not set(names) <= environ.keys():
            return cls()  # a batch script has its job's variables, but is not a rank
        rank, size = _ranks(environ, *names[:2])
        local = _variable(environ, names[2])
        one_machine = environ.get("SLURM_NNODES", "1") == "1"
        address = environ.get("MASTER_ADDR", cls.master if one_machine else None)
        node = _variable(environ, "SLURM_NODEID", 0)
        return cls("srun", rank, size, local, local + 1, address, node, _port(environ))

    def problems(self) -> Iterator[Problem]:
        """Yield a problem if the address of rank 0 is unknown."""
        if self.master is None and self.world_size > 1:
            yield Problem(
                "E009",
                f"srun started {self.world_size} ranks on several machines, but MASTER_ADDR is not set",
                ('export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n1)',),
            )


def ranks_per_node(environ: Mapping[str, str]) -> int:
    """Return the number of ranks on this node, from the launcher's variables.

    Slurm writes ``8(x2),4`` for two nodes with 8 ranks and one with 4; the first number is taken.
    """
    launch = Launch.read(environ)
    tasks = re.match(r"\d+", environ.get("SLURM_STEP_TASKS_PER_NODE", "")) if launch.launcher == "srun" else None
    return max(launch.local_size, int(tasks[0])) if tasks else launch.local_size


def limit_spinning(environ: MutableMapping[str, str]) -> None:
    """Let waiting OpenMP threads sleep if there are more than cores: threads that spin take cores from others."""
    if threads_exceed_cores(environ):
        environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def threads_exceed_cores(environ: Mapping[str, str]) -> bool:
    """Return True if the ranks of this machine together have more OpenMP threads than there are cores."""
    usable = cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    launch = Launch.read(environ)
    ranks = launch.local_size
    if launch.launcher == "srun":  # it may bind each rank to cores of its own
        cores = os.cpu_count() or 1
        counts = re.findall(r"(?:^|,)(\d+)", environ.get("SLURM_STEP_TASKS_PER_NODE", ""))  # such as 4(x2),3
        ranks = max([ranks, *map(int, counts)])
    first = environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    threads = int(first) if first.isdecimal() and int(first) else usable
    return ranks * threads > cores


def _step(environ: Mapping[str, str]) -> int:
    """Return the number of srun's step; -1 outside of one."""
    step = _number(environ, "SLURM_STEP_ID", -1)
    return step if step < FIRST_SPECIAL_STEP else -1


def _ranks(environ: Mapping[str, str], *names: str) -> tuple[int, int]:
    """Return the rank and the number of ranks from the variables ``names``; raise UserError if they are invalid."""
    rank, size = (_variable(environ, name) for name in names)
    if rank >= size:
        given = " ".join(f"{name}={environ[name]}" for name in names)
        sentence = f"{given}: the ranks of {size} are 0 to {size - 1}" if size else f"{given}: there is no rank"
        raise UserError([Problem("E013", sentence, (f"unset {' '.join(names)}",))])
    return rank, size


def _port(environ: Mapping[str, str]) -> int:
    port = _variable(environ, "MASTER_PORT", Launch.port)
    if not 0 < port < 1 << 16:
        raise UserError([Problem("E013", f"MASTER_PORT={port} must be 1 to 65535", ("unset MASTER_PORT",))])
    return port


def _variable(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    """Return a launcher's variable; raise UserError if it is not a whole number."""
    text = environ.get(name, "" if default is None else str(default))
    if not text.isdecimal():
        raise UserError(
            [Problem("E013", f"{name}={text} must be a whole number; a launcher sets it", (f"unset {name}",))]
        )
    return int(text)


def _number(environ: Mapping[str, str], name: str, default: int) -> int:
    """Return the value of a numeric variable, or a default."""
    text = environ.get(name, "")
    return int(text) if text.isdecimal() else default


ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
"""Variable with the file whose text torchrun prints as the root cause, at the end of its report."""


def end_refused_start(seconds: float, report: str | None) -> int:
    """Return the exit status of a rank whose start is refused, at most ``seconds`` later.

    torchrun ends all ranks of a machine once one has failed, and lists them. So the rank with a ``report``, which
    torchrun then prints, waits for the others of its machine, which end with status 0 once they see the report.
    """
    if ERROR_FILE not in os.environ:  # a launcher kills all ranks once one exits: let the reporting rank print first
        time.sleep(0.0 if report is not None else seconds)
        return 2
    own, left, deadline = Path(os.environ[ERROR_FILE]), "left", time.monotonic() + seconds
    others = int(os.environ.get("LOCAL_WORLD_SIZE", 1)) - 1
    with suppress(OSError):
        if report is not None:
            extra = {"py_callstack": redact(report), "timestamp": str(int(time.time()))}
            own.write_text(json.dumps({"message": {"message": redact(report), "extraInfo": extra}}))
        while time.monotonic() < deadline:
            if report is None and any(own.parent.parent.glob(f"*/{own.name}")):
                own.with_name(left).touch()
                exit_process(0, handlers=False)
            if report is not None and len([*own.parent.parent.glob(f"*/{left}")]) >= others:
                time.sleep(min(0.2, seconds) * (others > 0))  # until they have ended
                break
            time.sleep(0.05)
    return 2


def exit_process(status: int, handlers: bool = True) -> NoReturn:
    """End the process without Python's own shutdown; after a success, ``handlers`` of the exit are run.

    A thread of torch that returns to Python during the shutdown would abort the process. After a failure,
    torch.distributed could block there on dead ranks.
    """
    if status == 0 and handlers:
        atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:  # a full disk or a closed pipe: Python would exit with status 120, but ours matters more
            with suppress(OSError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    os._exit(status)
