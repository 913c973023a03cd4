"""The run ID, which identifies a run across restarts."""

from __future__ import annotations

import json
import secrets
import string
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from megatron.parallel import comm
from megatron.parallel.comm import Group
from megatron.training.start_facts import JOB, Facts

LETTERS = string.ascii_lowercase + string.digits
LENGTH = 8


def new_run_id(world: Group, given: str = "") -> str:
    """Return a new random run ID, or the one ``given`` on rank 0; equal on every rank. Collective.

    The ID does not depend on the run's seed: two runs with one seed have two IDs.
    """
    return comm.broadcast_object(given or "".join(secrets.choice(LETTERS) for _ in range(LENGTH)), world)


def run_id_of_job(metrics: Path, facts: Facts) -> str:
    """Return the run ID of the previous start if it belongs to the same job, else an empty string.

    The metrics file is the only record of the ID before the first checkpoint.

    Args:
        metrics: the run folder's ``metrics.jsonl``.
        facts: job and start numbers of this start.

    """
    last: dict[str, Any] = {}
    with suppress(OSError):  # the first start
        for line in metrics.read_text(encoding="utf-8", errors="replace").splitlines():
            if '"start"' in line:
                with suppress(ValueError):  # a line cut off by a crash
                    record = json.loads(line)
                    last = record if record.get("event") == "start" else last
    same_job = any(name in facts for name in JOB) and all(last.get(name) == facts.get(name) for name in JOB)
    return str(last.get("run-id", "")) if same_job else ""


def kept_run_id(saved: Mapping[str, Any], own: bool) -> str:
    """Return the run ID stored in a checkpoint if this run continues it, else an empty string.

    Args:
        saved: state of the checkpoint; old checkpoints have no run ID.
        own: whether the checkpoint lies in the run's own ``--save`` folder.

    """
    return str(saved.get("run_id", "")) if own else ""
