"""Identify this start (job, restart, nodes) for the run's records."""

from __future__ import annotations

from collections.abc import Mapping

from megatron.config.launch import Start

Facts = Mapping[str, object]

JOB = "slurm-job", "torchrun-run"
"""Facts shared by all starts of a job."""

LONGEST = 60
"""Longer node lists, in characters, are cut in notes."""


def start_facts(environ: Mapping[str, str], epoch: int | None) -> Facts:
    """Return what the launcher's environment reveals about this start, keyed as in the run's ``start`` event.

    Args:
        environ: environment variables.
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
    """Return the facts as one comma-separated phrase; empty if there are none."""
    phrases = [f"start {facts['epoch']} of this run"] if "epoch" in facts else []
    if "slurm-job" in facts:
        phrases.append(f"Slurm job {facts['slurm-job']} restart {facts['slurm-restart']}")
    if "torchrun-restart" in facts:
        phrases.append(f"torchrun restart {facts['torchrun-restart']}")
    if "nodes" in facts:
        nodes = str(facts["nodes"])
        phrases.append(f"on {nodes if len(nodes) <= LONGEST else nodes[: LONGEST - 3] + '...'}")
    return ", ".join(phrases)
