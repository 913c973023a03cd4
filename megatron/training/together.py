"""What one rank does for all: the others hear what came of it."""

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
    """What ``act`` returns on the first rank, which alone calls it; collective.

    Raises:
        CheckpointError: on every rank, when ``act`` raises one.
        UserError: likewise.
        OSError: likewise.

    """
    outcome = comm.broadcast_object(_outcome(act) if world.rank == 0 else None, world)
    if outcome is None:
        raise TypeError("nothing came from the first rank")
    value, error = outcome
    if error is not None:
        raise error
    return value[0]


def _outcome(act: Callable[[], T]) -> tuple[tuple[T, ...], Exception | None]:
    """What is returned, alone, or what is raised."""
    try:
        return (act(),), None
    except (CheckpointError, UserError, OSError) as error:
        return (), error


@contextmanager
def claimed(save: str | None, world: Group) -> Iterator[Claim | None]:
    """Keep the ``save`` folder for this run, and make it, so that one that cannot be written is found before a step.

    An earlier start of the same job that still has it is superseded. All ranks get the claim that the first has.

    Raises:
        CheckpointError: when another run has it, or it cannot be written; on every rank.

    """
    with ExitStack() as stack:
        claim = None
        if save is not None:
            start = Start.read(os.environ)
            claim = on_first(lambda: stack.enter_context(hold(location(save), start=start)), world)
        yield claim
