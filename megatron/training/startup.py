"""Time the phases of a start, and identify it (job, restart, nodes) for the run's records. Does not import torch.

The watch runs from the creation of the process to the end of the first step. Phases nest: data are opened while a
checkpoint is loaded. The time of an inner phase does not count for the outer one, so the phases add up to the whole.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from megatron.config.launch import JobStart

PHASES: dict[str, str] = {
    "python": "the interpreter, and what `pretrain_gpt.py` imports before it reads a flag",
    "flags": "reading and checking flags, looking for checkpoints and tokenizer",
    "imports": "PyTorch and the rest of the program",
    "joining": "choosing the device and joining torch.distributed, which waits for the last rank",
    "groups": "opening process groups and channels",
    "kernels": "choosing kernels and checking them against PyTorch",
    "model": "building the model",
    "optimizer": "allocating gradients and optimizer state",
    "data": "opening the data, building or reading tables of samples",
    "checkpoint": "acquiring the checkpoint folder, choosing a checkpoint and loading it",
    "first step": "the first step, including compilation, tuning and first connections",
    "other": "the rest: opening loggers, an evaluation that the previous start missed",
}
"""All phases, in the order in which they begin, with what each covers."""

MIN_SHOWN_SECONDS = 0.05
"""Shorter phases, in seconds, are left out of the console line."""

SLOWER_BY_SECONDS = 1.0
"""The console line also names phases that took the slowest rank this many seconds longer than rank 0."""


class StartupTimer:
    """Stopwatch whose time always counts for one phase: ``with startup("data"): ...``."""

    def __init__(self, began: float | None = None, phase: str = "other") -> None:
        """Start the watch at ``began``, on the clock of ``time.monotonic()``; None for now."""
        self.began = time.monotonic() if began is None else began
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self.running = True  # until the first step has been taken
        self._phase = phase
        self._since = self.began

    def enter(self, phase: str) -> None:
        """Count the time from now on for ``phase``."""
        now = time.monotonic()
        self.seconds[self._phase] += now - self._since
        self._phase, self._since = phase, now

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Count the time inside the context for ``phase``, and after it for the previous one again."""
        previous = self._phase
        self.enter(phase)
        try:
            yield
        finally:
            self.enter(previous)

    def stop(self) -> None:
        """Stop the watch, after the first step."""
        self.enter("other")
        self.running = False


def process_start_time() -> float:
    """Return the value of ``time.monotonic()`` when this process began, to 10 ms; outside Linux the current value."""
    now = time.monotonic()
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()  # proc_pid_stat(5), from field 3 on
        since_boot = int(fields[19]) / os.sysconf("SC_CLK_TCK")
        return min(now, now - (time.clock_gettime(time.CLOCK_BOOTTIME) - since_boot))
    except (OSError, ValueError, IndexError, AttributeError):  # not Linux
        return now


def startup_line(mine: Mapping[str, float], longest: Mapping[str, float]) -> str:
    """Return the log line with this rank's seconds by phase, and the phases that took the slowest rank much longer."""
    late = {name: seconds for name, seconds in longest.items() if seconds > mine[name] + SLOWER_BY_SECONDS}
    others = f"; longest on any rank: {_format_phases(late)}" if late else ""
    return f"start-up {sum(mine.values()):.1f}s: {_format_phases(mine)}{others}"


def _format_phases(phases: Mapping[str, float]) -> str:
    return " ".join(f"{name} {seconds:.1f}" for name, seconds in phases.items() if seconds >= MIN_SHOWN_SECONDS)


StartFacts = Mapping[str, object]

JOB_FACTS = "slurm-job", "torchrun-run"
"""Facts shared by all starts of a job."""

MAX_NODE_LIST_CHARS = 60
"""Longer node lists, in characters, are cut in notes."""


def start_facts(environ: Mapping[str, str], epoch: int | None) -> StartFacts:
    """Return what the launcher's environment reveals about this start, keyed as in the run's ``start`` event.

    Args:
        environ: environment variables.
        epoch: number of this start among those that have written to the ``save`` folder; None without one.
    """
    start = JobStart.read(environ)
    facts = {
        "epoch": epoch,
        "slurm-job": start.job,
        "slurm-restart": start.restart if start.job else None,
        "torchrun-run": start.group,
        "torchrun-restart": start.attempt or None,
        "nodes": environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST"),
    }
    return {name: value for name, value in facts.items() if value is not None}


def start_phrase(facts: StartFacts) -> str:
    """Return the facts as one comma-separated phrase; empty if there are none."""
    phrases = list[str]()
    if "slurm-job" in facts:
        phrases.append(f"Slurm job {facts['slurm-job']} restart {facts['slurm-restart']}")
    if "torchrun-restart" in facts:
        phrases.append(f"torchrun restart {facts['torchrun-restart']}")
    if "nodes" in facts:
        nodes = str(facts["nodes"])
        phrases.append(f"on {nodes if len(nodes) <= MAX_NODE_LIST_CHARS else nodes[: MAX_NODE_LIST_CHARS - 3] + '...'}")
    return ", ".join(phrases)
