"""The name under which a run is known to others, through all its starts."""

from __future__ import annotations

import secrets
import string
from collections.abc import Mapping
from typing import Any

from megatron.parallel import comm
from megatron.parallel.comm import Group

LETTERS = string.ascii_lowercase + string.digits
LENGTH = 8


def new_run_id(world: Group) -> str:
    """A name that no other run has (36^8 of them), the same on every rank; collective.

    It does not come from the generators of numbers that the run's seed sets: two runs of one seed are two runs.
    """
    return comm.broadcast_object("".join(secrets.choice(LETTERS) for _ in range(LENGTH)), world)


def kept_run_id(saved: Mapping[str, Any], own: bool) -> str:
    """The name of the run that a checkpoint's numbers ``saved`` are of; empty where it is another run.

    Args:
        saved: state of the checkpoint. Those written before runs had names have none.
        own: whether it lies in the run's own ``save`` folder, that is, the run goes on.
    """
    return str(saved.get("run_id", "")) if own else ""
