"""Faults of a run: in its ranks, launchers, saves and nodes."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.distributed.crash_faults import DAMAGE, is_whole, saves, step_of
from tests.soaking.here import HereJob
from tests.soaking.job import Job
from tests.soaking.machine import agents
from tests.soaking.on_slurm import SlurmJob
from tests.soaking.rank import FOLDER, FULL, STRUCK, kill_at

CALLS = 40
"""A rank is killed at one of this many calls to the file system, over which it saves once or twice."""

SECONDS = 60.0
"""For a save to begin."""


@dataclass(frozen=True)
class Strike:
    """A fault that has happened.

    Attributes:
        what: in words.
        moment: when, in seconds of ``time.time()``.
        damaged: the checkpoint that it damaged; the next start has to report that.
        over: when it was over, of one that passes.
        afterwards: what happens as soon as the run has recovered.
    """

    what: str
    moment: float
    damaged: Path | None = None
    over: float = 0.0
    afterwards: Callable[[], Any] = lambda: None


def kill_rank(job: Job, chance: random.Random) -> Strike | None:
    """``kill -9`` of a rank."""
    return _signal(job, chance, signal.SIGKILL, "kill -9")


def stop_rank(job: Job, chance: random.Random) -> Strike | None:
    """A rank hangs: it is there, and does nothing more."""
    return _signal(job, chance, signal.SIGSTOP, "SIGSTOP")


def _signal(job: Job, chance: random.Random, number: signal.Signals, name: str) -> Strike | None:
    there = job.ranks()
    if not there:
        return None
    rank = chance.choice(sorted(there))
    there[rank].send(number)
    return Strike(f"{name} of rank {rank}", time.time())


def kill_agent(job: Job, chance: random.Random) -> Strike | None:
    """``kill -9`` of an agent; its ranks freeze, and come back to life when others have taken over."""
    return _lose_group(job, chance, signal.SIGSTOP, "is killed, its ranks freeze until others have taken over")


def lose_group(job: Job, chance: random.Random) -> Strike | None:
    """An agent and its ranks are gone at once."""
    return _lose_group(job, chance, signal.SIGKILL, "and its ranks are killed")


def _lose_group(job: Job, chance: random.Random, number: signal.Signals, what: str) -> Strike | None:
    there = agents(job.newest())
    if not there:
        return None
    victim = chance.choice(there)
    own = [process for process in job.newest() if process.parent == victim.pid]
    for process in own:
        process.send(number)
    victim.send(signal.SIGKILL)

    def thaw() -> None:
        for process in own:
            process.send(signal.SIGCONT)

    return Strike(f"an agent {what}", time.time(), afterwards=thaw)


# ---- saves, with faults from outside


def kill_in_save(job: HereJob, chance: random.Random) -> Strike | None:
    """``kill -9`` of a rank at a call to the file system with which it saves."""
    rank, call = chance.randrange(job.setup.nodes * job.setup.ranks), chance.randrange(CALLS)
    struck = job.folder / FOLDER / STRUCK
    struck.unlink(missing_ok=True)
    kill_at(job.folder, rank, call)
    if not _happens(job, lambda: struck.exists() and struck.read_text().endswith("\n")):
        (job.folder / FOLDER / f"kill.{rank}").unlink(missing_ok=True)
        return None
    moment, where = struck.read_text().split(" ", 1)
    where = where.replace(f"{job.checkpoints}/", "").strip()
    return Strike(f"kill -9 of rank {rank} before its {where}", float(moment))


def _happens(job: Job, what: Callable[[], bool]) -> bool:
    """Return True if a condition holds in time and before the run is over."""
    try:
        return job.until(what, SECONDS)
    except TimeoutError:
        return False


def fill_disk(job: HereJob, chance: random.Random) -> Strike | None:
    """The disk of the checkpoints is full until a save has failed, and for a while."""
    full, moment = job.folder / FOLDER / FULL, time.time()
    full.touch()
    printed = ("warning", "error")
    failed = _happens(job, lambda: any(r.get("event") in printed for r in job.progress.since(moment)))
    longer = chance.uniform(0.0, 2.0)
    time.sleep(longer if failed else 0.0)
    full.unlink()
    return Strike(f"disk full until {longer:.1f} s after a save failed", moment, over=time.time()) if failed else None


def damage_newest(job: HereJob, chance: random.Random) -> Strike | None:
    """A rank is killed, and the newest checkpoint damaged; the one before has to do."""
    if len(_whole(job.checkpoints)) < 3 or not (killed := kill_rank(job, chance)):
        return None
    time.sleep(0.5)  # in which the other ranks end a save that is under way
    newest = max(_whole(job.checkpoints), key=step_of)
    how, file = chance.choice([*DAMAGE]), chance.choice(sorted(file for file in newest.iterdir() if file.is_file()))
    done = DAMAGE[how](file, chance)
    return Strike(f"{killed.what}, {newest.name}/{file.name} {done}", killed.moment, damaged=newest)


def _whole(folder: Path) -> list[Path]:
    """Saves of which every byte is right."""
    return [path for path in saves(folder) if is_whole([path])]


# ---- from above


def report_to_stop(job: HereJob, chance: random.Random) -> Strike | None:
    """The batch script got the signal that its time is up, and passes it to the ranks by a file."""
    job.stop_file.touch()
    return Strike("stop file", time.time())


def signal_job(job: SlurmJob, chance: random.Random) -> Strike | None:
    """Slurm's signal before the time limit."""
    job.cluster.login("scancel", "--signal=USR1", "--batch", job.number)
    return Strike("USR1", time.time())


def queue_again(job: SlurmJob, chance: random.Random) -> Strike | None:
    """Somebody, or a preemption, puts the job back into the queue."""
    moment = time.time()
    job.cluster.login("scontrol", "requeue", job.number)
    return Strike("scontrol requeue", moment)


def power_off(job: SlurmJob, chance: random.Random) -> Strike | None:
    """A node other than the batch script's is gone."""
    return _lose(job, lambda nodes: chance.choice(nodes[1:]), job.cluster.power_off, "power off")


def power_off_head(job: SlurmJob, chance: random.Random) -> Strike | None:
    """The node with the batch script and rank 0 is gone."""
    return _lose(job, lambda nodes: nodes[0], job.cluster.power_off, "power off")


def unplug(job: SlurmJob, chance: random.Random) -> Strike | None:
    """A node is cut off; what runs there goes on, and sees the disk."""
    return _lose(job, chance.choice, job.cluster.unplug, "network cut")


def _lose(job: SlurmJob, choose: Callable[[list[str]], str], how: Callable[[str], Any], name: str) -> Strike | None:
    nodes = job.nodes()
    if not nodes:
        return None
    node = choose(nodes)
    how(node)
    moment = time.time()
    job.lost.add(node)
    where = f"{node}{' (batch host)' * (node == nodes[0])}"
    return Strike(f"{name}: {where}", moment, afterwards=job.bring_back)


Kinds = dict[str, Callable[[Any, random.Random], Strike | None]]

HERE: Kinds = {
    "kill a rank": kill_rank,
    "a rank hangs": stop_rank,
    "agent lost, ranks frozen": kill_agent,
    "agent and ranks lost": lose_group,
    "kill in a save": kill_in_save,
    "full disk": fill_disk,
    "damaged checkpoint": damage_newest,
    "told to stop": report_to_stop,
}
ON_SLURM: Kinds = {
    "Slurm: kill a rank": kill_rank,
    "Slurm: a rank hangs": stop_rank,
    "Slurm: agent lost": kill_agent,
    "Slurm: agent and ranks lost": lose_group,
    "Slurm: USR1": signal_job,
    "Slurm: requeue": queue_again,
    "Slurm: node powered off": power_off,
    "Slurm: batch host powered off": power_off_head,
    "Slurm: node cut off": unplug,
}
"""Each makes something happen, and returns what; None where it could not, or the run was over before."""
