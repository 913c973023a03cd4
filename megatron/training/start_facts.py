"""Which start of which job this is, for the records: what a person looks for who reads a run's history by its jobs."""

from __future__ import annotations

from collections.abc import Mapping

from megatron.config.launch import Start

Facts = Mapping[str, object]

JOB = "slurm-job", "torchrun-run"
"""Facts that all starts of a job have in common."""

LONGEST = 60
"""Characters of a list of nodes in a sentence."""


def start_facts(environ: Mapping[str, str], epoch: int | None) -> Facts:
    """What the launcher says of this start, by the names of the event; what it does not say is left out.

    Args:
        environ: its variables.
        epoch: number of this start among those that have written to the ``save`` folder; None without one.
    """
    start = Start.read(environ)
    facts = {
        "epoch": epoch,
        "slurm-job": start.job,
        "slurm-restart": start.restart if start.job else None,
        "torchrun-run": start.group,
        "torchrun-restart": start.attempt or None,
        "nodes": environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_JOB_NODELIST"),
    }
    return {name: value for name, value in facts.items() if value is not None}


def in_words(facts: Facts) -> str:
    """The facts as a part of a sentence; empty where there are none."""
    words = [f"start {facts['epoch']} of this run"] if "epoch" in facts else []
    if "slurm-job" in facts:
        words.append(f"Slurm job {facts['slurm-job']} restart {facts['slurm-restart']}")
    if "torchrun-restart" in facts:
        words.append(f"torchrun restart {facts['torchrun-restart']}")
    if "nodes" in facts:
        words.append(f"on {_short(str(facts['nodes']))}")
    return ", ".join(words)


def _short(nodes: str) -> str:
    return nodes if len(nodes) <= LONGEST else f"{nodes[: LONGEST - 3]}..."
