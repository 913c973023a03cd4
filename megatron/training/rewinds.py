"""Go back to an earlier checkpoint, and leave out the samples of the steps that were undone: ``rewind:N``.

:mod:`megatron.checkpoint.rewinds` has the record that decides what a run continues from. Once it is written,
``take_phases`` in :mod:`megatron.training.main` starts again in the same processes, as it does for the next phase.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from megatron.checkpoint.lease import Lease
from megatron.checkpoint.location import parse_location
from megatron.checkpoint.rewinds import Rewind, add_rewinds, without_corruption
from megatron.config.run import RunConfig
from megatron.config.text import counted
from megatron.distributed.comm import Group
from megatron.distributed.launch import run_on_rank0
from megatron.training.component import Component
from megatron.training.components.step_incidents import RewindNeededError
from megatron.training.failure_report import NonFiniteError
from megatron.training.loggers.base import Metrics
from megatron.training.resume_source import ResumeSource, is_own_checkpoint, step_of


class Rewinds(Component):
    """The rewinds after which a run continues; checkpoints keep them."""

    name = "rewinds"

    def __init__(self, rewinds: Sequence[Rewind]) -> None:
        """Keep ``rewinds``, oldest first."""
        self.rewinds = tuple(rewinds)

    def state_dict(self) -> Mapping[str, Any]:
        """See :class:`Component`."""
        return {"list": [rewind.to_json() for rewind in self.rewinds]}

    def metrics(self) -> Metrics:
        """See :class:`Component`."""
        return {"rewinds": len(without_corruption(self.rewinds))}


class RewindRefusedError(NonFiniteError):
    """A run cannot go back from a step that its policy undoes."""


def go_back(
    request: RewindNeededError,
    config: RunConfig,
    source: ResumeSource,
    began: int,
    first: int,
    world: Group,
    lease: Lease | None,
) -> str:
    """Write the record of a rewind, if the run may and can go back; return a sentence on it. Collective.

    Args:
        request: what is to be undone.
        config: of the phase.
        source: what the run would start from now.
        began: steps taken where this start began.
        first: steps taken where the phase began.
        world: all ranks.
        lease: on the ``save`` folder.

    Raises:
        RewindRefusedError: if it has gone back too often, or no checkpoint is old enough.
        OSError: if the record cannot be written.
    """
    options, phase, limit = config.checkpoint, config.training.phase_name or "", request.step - request.steps
    most = config.reliability.max_rewinds
    if len(without_corruption(source.rewinds)) >= most:
        why = f"the run has gone back {counted(most, 'time')}, the limit of --max-rewinds"
        raise RewindRefusedError(f"{request}; {why}")
    own = [step_of(path) for path in source.paths if is_own_checkpoint(path, options)]
    usable = [step for step in own or [began] if first <= step <= limit]
    if not usable:
        oldest = min((step for step in own or [began] if step >= first), default=None)
        there = "" if oldest is None else f": the oldest is of step {oldest}"
        raise RewindRefusedError(
            f"{request}; the run cannot go back {counted(request.steps, 'step')}, because no checkpoint of this phase "
            f"is of step {limit} or earlier{there}\n  fix: --save-interval {max(1, request.steps // 2)} --keep-last 5"
        )
    begin, end = request.places
    rewind = Rewind(secrets.token_hex(8), request.kind, request.step, request.steps, begin, end, phase)
    folder = parse_location(str(options.save))

    def write() -> None:
        if lease is not None:
            lease.check()
        add_rewinds(folder, [*source.rewinds, rewind])

    run_on_rank0(write, world)
    return f"goes back from step {request.step} to step {max(usable)}, and leaves out the samples {rewind.words}"
