"""A real Slurm for tests: ``Cluster`` starts ``minislurm.sh`` and speaks with it as a user and an operator do."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
MINISLURM = Path(__file__).with_name("minislurm.sh")

ENDED = frozenset(
    ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "DEADLINE", "BOOT_FAIL", "PREEMPTED")
)
"""States of a job that will not run again."""

PATIENCE = 420.0
"""Seconds until something that takes a tenth of them on an idle machine is thought to hang."""


def obstacle() -> str | None:
    """Why there can be no cluster here, in a sentence; None where there can."""
    if sys.platform != "linux":
        return "Slurm's tests need Linux."
    asked = subprocess.run([MINISLURM, "check"], text=True, capture_output=True, timeout=60)
    return None if asked.returncode == 0 else " ".join(asked.stderr.split())


class Cluster:
    """One cluster: a login node, which is the controller too, and nodes ``n1``, ``n2``, ...

    Attributes:
        root: its folder, which all nodes share; a place for the folders of runs too.
        path: where its nodes look for programs: first beside this Python.
        submitted: the jobs that :meth:`sbatch` has brought in, and their logs.
    """

    def __init__(self, root: Path, nodes: int, gpus: int, switches: str = "") -> None:
        """Start it; returns when all nodes are idle.

        Args:
            root: a folder that all users can enter, with a short path; see ``minislurm.sh``.
            nodes: without the login node.
            gpus: of each node; they are none, but Slurm counts and deals them out.
            switches: the nodes of every leaf switch, as in ``n1,n3 n2,n4``; none means no topology.

        Raises:
            RuntimeError: with the words of ``minislurm.sh``, when it does not start.
        """
        self.root, self.submitted = root, dict[str, Path]()
        self._unplugged = set[str]()
        self.path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        self._do(
            "up", str(nodes), str(gpus), environ={"MINISLURM_OWNER": str(os.getpid()), "MINISLURM_SWITCHES": switches}
        )

    def _do(self, verb: str, *words: str, environ: Mapping[str, str] | None = None, seconds: float = 120.0) -> str:
        # What a job is submitted with is what it gets: this Python first, and no word of a Slurm around these tests.
        own = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "SBATCH_"))}
        own |= {"PATH": self.path, "OMP_NUM_THREADS": "1"}
        command = [str(MINISLURM), verb, str(self.root), *words]
        done = subprocess.run(
            command,
            env=own | dict(environ or {}),
            cwd=REPOSITORY,
            text=True,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=seconds,
        )
        if done.returncode:
            raise RuntimeError(f"{verb} {' '.join(words)}: exit status {done.returncode}\n{done.stdout}{done.stderr}")
        return done.stdout

    def login(self, *words: str, environ: Mapping[str, str] | None = None, seconds: float = 120.0) -> str:
        """Run a command on the login node, in the folder of the repository; return its output.

        Raises:
            RuntimeError: when it fails.
        """
        return self._do("login", *words, environ=environ, seconds=seconds)

    def on(self, node: str, *words: str) -> str:
        """Run a command on a node; return its output.

        Raises:
            RuntimeError: when it fails.
        """
        return self._do("on", node, *words)

    def processes(self, node: str, pattern: str) -> list[int]:
        """Numbers, inside the node, of the processes whose command line matches a regular expression; no zombies."""
        lines = self.on(node, "ps", "-eo", "pid=,stat=,args=").splitlines()
        split = [line.split(None, 2) for line in lines]
        return [int(pid) for pid, state, words in split if not state.startswith("Z") and re.search(pattern, words)]

    def power_off(self, node: str) -> None:
        """All processes of the node are gone at once, without notice."""
        self._do("poweroff", node)

    def power_on(self, node: str) -> None:
        """Boot it again."""
        self._do("poweron", node)

    def unplug(self, node: str) -> None:
        """Cut its network; its processes, and the disk it shares, go on."""
        self._unplugged.add(node)
        self._do("unplug", node)

    def plug(self, node: str) -> None:
        """Give it its network back."""
        self._do("plug", node)
        self._unplugged.discard(node)

    def repair(self) -> None:
        """Every node boots, is plugged in and idle again, as the next test expects it."""
        for node in self._unplugged.copy():
            self.plug(node)
        for node, state in self.nodes().items():
            if not (self.root / "run" / f"{node}.pid").exists():
                self.power_on(node)
            elif "DRAIN" in state or state == "DOWN":
                self.login("scontrol", "update", f"nodename={node}", "state=resume")
        self.until(lambda: set(self.nodes().values()) == {"IDLE"}, "all nodes are idle")

    def nodes(self) -> dict[str, str]:
        """Every node's state, in Slurm's words: ``IDLE``, ``MIXED+DRAIN``, ``DOWN*+NOT_RESPONDING``, ..."""
        lines = self.login("scontrol", "show", "node", "-o").splitlines()
        printed = [dict(re.findall(r"(\w+)=(\S*)", line)) for line in lines if line.startswith("NodeName=")]
        return {node["NodeName"]: node["State"] for node in printed}

    def sbatch(self, *words: str, environ: Mapping[str, str] | None = None) -> str:
        """Submit a job into the log ``root/jobs/NUMBER.log`` of all its starts; returns its number."""
        (self.root / "jobs").mkdir(exist_ok=True)
        log = self.root / "jobs" / "%j.log"
        printed = self.login("sbatch", "--parsable", f"--output={log}", "--open-mode=append", *words, environ=environ)
        number = printed.strip().split(";")[0]
        self.submitted[number] = self.root / "jobs" / f"{number}.log"
        return number

    def log(self, job: str) -> str:
        """Return the output of all starts of a job."""
        path = self.root / "jobs" / f"{job}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def job(self, number: str) -> dict[str, str]:
        """Return Slurm's record of a job under its own names, such as ``JobState``, ``Restarts`` and ``NodeList``."""
        return dict(re.findall(r"(\w+)=(\S*)", self.login("scontrol", "show", "job", "-o", number)))

    def node_list(self, number: str) -> list[str]:
        """Nodes of a job that runs, in Slurm's order."""
        return self.login("scontrol", "show", "hostnames", self.job(number)["NodeList"]).split()

    def until(self, holds: Callable[[], bool], what: str, job: str | None = None, seconds: float = PATIENCE) -> None:
        """Wait until something holds.

        Args:
            holds: asked twice a second: a question to Slurm takes five processes.
            what: in words, for the complaint.
            job: a job that must not end before.
            seconds: of patience.

        Raises:
            AssertionError: when it does not hold in time, or the job has ended without it.
        """
        began = time.monotonic()
        for turn in itertools.count():
            if holds():
                return
            ended = job is not None and turn % 4 == 3 and self.job(job)["JobState"] in ENDED
            if ended and not holds():
                raise AssertionError(f"job {job} ended; awaited: {what}")
            if time.monotonic() > began + seconds:
                raise AssertionError(f"not within {seconds:.0f} s: {what}")
            time.sleep(0.5)

    def wait(self, number: str, seconds: float = PATIENCE) -> dict[str, str]:
        """Wait for the end of a job; return what Slurm knows of it then.

        Raises:
            AssertionError: when it takes longer.
        """
        self.until(lambda: self.job(number)["JobState"] in ENDED, f"the end of job {number}", seconds=seconds)
        return self.job(number)

    def cancel(self, number: str) -> None:
        """End a job, whatever it is at, and wait until it has."""
        if self.job(number)["JobState"] not in ENDED:
            self.login("scancel", number)
            self.wait(number)

    def named(self, name: str) -> list[str]:
        """The states of all jobs of a name, the tasks of an array each by itself."""
        return self.login("squeue", "--noheader", "--array", "--states=all", f"--name={name}", "--format=%T").split()

    def reported(self) -> str:
        """Return what explains a failed test: nodes, jobs, the last lines of the latest logs."""
        parts = [self.login("sinfo", "-N", "-l"), self.login("squeue", "--array", "--states=all")]
        logs = sorted((self.root / "jobs").glob("*.log"), key=lambda path: path.stat().st_mtime)
        for path in logs[-6:]:
            lines = path.read_text(errors="replace").splitlines()
            parts.append("\n".join([f"--- {path.name}, {len(lines)} lines ---", *lines[-60:]]))
        return "\n".join(parts)

    def down(self) -> None:
        """End every process of the cluster; returns when they are gone."""
        self._do("down")


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """A folder for one cluster; what is left of the cluster is brought down and the folder removed in the end."""
    root = Path(tempfile.mkdtemp(prefix="ms."))
    root.chmod(0o755)  # munge refuses a folder that is closed to some users
    try:
        yield root
    finally:
        subprocess.run([MINISLURM, "down", root], timeout=120)
        shutil.rmtree(root, ignore_errors=True)


@contextmanager
def running(nodes: int, gpus: int = 0, switches: str = "") -> Iterator[Cluster]:
    """A cluster of so many nodes and fake GPUs per node, until the body ends, however it does."""
    with temporary_folder() as root:
        yield Cluster(root, nodes, gpus, switches)
