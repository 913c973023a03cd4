"""What goes wrong with a run on this machine: its ranks, its agents (which stand for nodes), and its saves."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.distributed.crash_faults import DAMAGE, checkpoints, is_whole
from tests.soaking.job import Job
from tests.soaking.machine import Process
from tests.soaking.rank import FOLDER, FULL, STRUCK, kill_at

CALLS = 40
"""A rank is killed at one of this many calls to the file system, over which it saves once or twice."""


@dataclass(frozen=True)
class Strike:
    """What has happened.

    Attributes:
        kind: one of ``KINDS``.
        what: in words.
        moment: when, in seconds of ``time.time()``.
        must_say: what the next start has to say of it.
        over: when it was over, of one that passes.
    """

    kind: str
    what: str
    moment: float
    must_say: str = ""
    over: float = 0.0


def _victim(job: Job, chance: random.Random) -> tuple[int, Process] | None:
    """A rank; None while they are not all there."""
    there = job.ranks()
    complete = len(there) == job.setup.agents * job.setup.ranks
    return chance.choice(sorted(there.items(), key=lambda item: item[0])) if complete else None


def kill_rank(job: Job, chance: random.Random) -> Strike | None:
    """``kill -9`` of a rank."""
    victim = _victim(job, chance)
    if victim is None:
        return None
    rank, process = victim
    process.send(signal.SIGKILL)
    return Strike("kill a rank", f"kill -9 of rank {rank}", time.time())


def stop_rank(job: Job, chance: random.Random) -> Strike | None:
    """A rank hangs: it is there, and does nothing more."""
    victim = _victim(job, chance)
    if victim is None:
        return None
    rank, process = victim
    process.send(signal.SIGSTOP)
    return Strike("a rank hangs", f"SIGSTOP of rank {rank}", time.time())


def kill_agent(job: Job, chance: random.Random) -> Strike | None:
    """``kill -9`` of an agent; its ranks go on."""
    number, agent = chance.choice([*enumerate(job.agents())])
    agent.kill()
    return Strike("kill an agent", f"kill -9 of agent {number}, not of its ranks", time.time())


def lose_node(job: Job, chance: random.Random) -> Strike | None:
    """An agent and its ranks are gone at once."""
    number, agent = chance.choice([*enumerate(job.agents())])
    own = [process for process in job.processes() if process.parent == agent.pid]
    agent.kill()
    for process in own:
        process.send(signal.SIGKILL)
    return Strike("lose a node", f"kill -9 of agent {number} and its ranks", time.time())


def kill_in_save(job: Job, chance: random.Random) -> Strike | None:
    """``kill -9`` of a rank at a call to the file system with which it saves."""
    rank, call, struck = chance.randrange(job.setup.agents * job.setup.ranks), chance.randrange(CALLS), _struck(job)
    struck.unlink(missing_ok=True)
    kill_at(job.folder, rank, call)
    until = time.monotonic() + 60.0
    while not struck.exists() or not struck.read_text():
        if job.is_over() or time.monotonic() > until:
            (job.folder / FOLDER / f"kill.{rank}").unlink(missing_ok=True)
            return None
        time.sleep(0.01)
    moment, where = struck.read_text().split(" ", 1)
    where = where.replace(str(job.folder / "saved"), "").strip()
    return Strike("kill in a save", f"kill -9 of rank {rank} before its {where}", float(moment))


def _struck(job: Job) -> Path:
    return job.folder / FOLDER / STRUCK


def fill_disk(job: Job, chance: random.Random) -> Strike | None:
    """The disk of the checkpoints is full until a save has failed, and for a while."""
    full, moment = job.folder / FOLDER / FULL, time.time()
    full.touch()
    until = time.monotonic() + 60.0
    while not any(record.get("event") in ("warning", "error") for record in job.progress.since(moment)):
        job.progress.read()
        if job.is_over() or time.monotonic() > until:
            full.unlink()
            return None
        time.sleep(0.02)
    while_full = chance.uniform(0.0, 2.0)
    time.sleep(while_full)
    full.unlink()
    return Strike("full disk", f"disk full until {while_full:.1f} s after a save failed", moment, over=time.time())


def damage_newest(job: Job, chance: random.Random) -> Strike | None:
    """A rank is killed, and the newest checkpoint damaged; the one before has to do."""
    killed = kill_rank(job, chance)
    if killed is None:
        return None
    time.sleep(0.5)  # in which the other ranks end a save that is under way
    whole = [path for path in checkpoints(job.folder / "saved") if not path.suffix and is_whole([path])]
    if len(whole) < 2:
        return killed
    how, file = chance.choice([*DAMAGE]), chance.choice(sorted(file for file in whole[-1].iterdir() if file.is_file()))
    done = DAMAGE[how](file, chance)
    what = f"{killed.what}, and {whole[-1].name}/{file.name} {done}"
    return Strike("damaged checkpoint", what, killed.moment, must_say=whole[-1].name)


def tell_to_stop(job: Job, chance: random.Random) -> Strike | None:
    """The batch script was told that its time is up, and tells the ranks by a file."""
    job.stop_file.touch()
    return Strike("told to stop", "stop file", time.time())


KINDS: dict[str, Callable[[Job, random.Random], Strike | None]] = {
    "kill a rank": kill_rank,
    "a rank hangs": stop_rank,
    "kill an agent": kill_agent,
    "lose a node": lose_node,
    "kill in a save": kill_in_save,
    "full disk": fill_disk,
    "damaged checkpoint": damage_newest,
    "told to stop": tell_to_stop,
}
"""Each makes something happen, and returns what; None where it could not, or the run was over before."""
