"""The name under which a run is known to others, through all its starts."""

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
    """A name that no other run has (36^8 of them), or the one ``given`` to rank 0; on every rank alike. Collective.

    It does not come from the generators of numbers that the run's seed sets: two runs of one seed are two runs.
    """
    return comm.broadcast_object(given or "".join(secrets.choice(LETTERS) for _ in range(LENGTH)), world)


def run_id_of_job(metrics: Path, facts: Facts) -> str:
    """The name that the start before has had, where it was of the same job; empty where it was not.

    A start that was ended before its first checkpoint has left its name in the records only.

    Args:
        metrics: records of the run folder.
        facts: of this start.
    """
    last: dict[str, Any] = {}
    with suppress(OSError):  # the first start
        for line in metrics.read_text(encoding="utf-8", errors="replace").splitlines():
            if '"start"' in line:
                with suppress(ValueError):  # a crash cut it off
                    record = json.loads(line)
                    last = record if record.get("event") == "start" else last
    same = any(name in facts for name in JOB) and all(last.get(name) == facts.get(name) for name in JOB)
    return str(last.get("run-id", "")) if same else ""


def kept_run_id(saved: Mapping[str, Any], own: bool) -> str:
    """The name of the run that a checkpoint's numbers ``saved`` are of; empty where it is another run.

    Args:
        saved: state of the checkpoint. Those written before runs had names have none.
        own: whether it lies in the run's own ``save`` folder, that is, the run goes on.
    """
    return str(saved.get("run_id", "")) if own else ""
