"""Run a function on rank 0 and broadcast its result or error to all ranks."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TypeVar

from megatron.checkpoint.claims import Claim
from megatron.checkpoint.errors import CheckpointError
from megatron.checkpoint.lock import hold
from megatron.checkpoint.remote import location
from megatron.config.launch import Start
from megatron.config.problems import UserError
from megatron.parallel import comm
from megatron.parallel.comm import Group

T = TypeVar("T")


def on_first(act: Callable[[], T], world: Group) -> T:
    """Call ``act`` on rank 0 only, and return its result on every rank; collective.

    Raises:
        CheckpointError: on every rank, if ``act`` raises it.
        UserError: likewise.
        OSError: likewise.

    """
    outcome: tuple[tuple[T, ...], Exception | None] | None = None
    if world.rank == 0:
        try:
            outcome = (act(),), None
        except (CheckpointError, UserError, OSError) as error:
            outcome = (), error
    outcome = comm.broadcast_object(outcome, world)
    if outcome is None:
        raise TypeError("rank 0 has broadcast no result")
    value, failure = outcome
    if failure is not None:
        raise failure
    return value[0]


@contextmanager
def claimed(save: str | None, world: Group) -> Iterator[Claim | None]:
    """Create the ``save`` folder and hold its lease for this run; every rank gets the lease.

    An unwritable folder is found before the first step. An earlier start of the same job that still holds the lease
    is superseded.

    Raises:
        CheckpointError: on every rank, if another run holds the lease, or the folder cannot be written.

    """
    with ExitStack() as stack:
        lease = None
        if save is not None:
            start = Start.read(os.environ)
            lease = on_first(lambda: stack.enter_context(hold(location(save), start=start)), world)
        yield lease
