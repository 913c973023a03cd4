"""Go back to an earlier checkpoint, and leave out the samples of the steps that were undone: ``rewind:N``.

:mod:`megatron.checkpoint.rewinds` has the record that decides what a run continues from. Once it is written,
``take_phases`` in :mod:`megatron.training.main` starts again in the same processes, as it does for the next phase.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from megatron.checkpoint.errors import DamagedCheckpointError
from megatron.checkpoint.format import Manifest
from megatron.checkpoint.lease import Lease
from megatron.checkpoint.location import parse_location
from megatron.checkpoint.rewinds import (
    CORRUPTION,
    REWINDS_FILE,
    Rewind,
    add_rewinds,
    rewinds_of,
    without_corruption,
)
from megatron.config.errors import Problem, UserError
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


def refuse_suspects(config: RunConfig, source: ResumeSource, world: Group) -> None:
    """Refuse to go on after a corruption under ``--on-corruption stop``. Collective.

    Args:
        config: of the run.
        source: what it starts from. A checkpoint that lists the corruption is of a start with ``exclude`` since then.
        world: all ranks.

    Raises:
        UserError: on every rank.
    """
    found = [rewind for rewind in source.rewinds if rewind.kind == CORRUPTION]
    if not found or config.reliability.on_corruption != "stop" or config.checkpoint.save is None:
        return

    def listed_in_checkpoint() -> list[str]:
        with suppress(DamagedCheckpointError):
            return [rewind.id for rewind in rewinds_of(Manifest.open(source.paths[0]).state)]
        return []

    known = run_on_rank0(listed_in_checkpoint, world) if source.paths else []
    for rewind in found:
        if rewind.id not in known:
            sentence = f"{config.checkpoint.save}/{REWINDS_FILE}: {rewind.why}"
            fix = f"the same command with --on-corruption exclude, which resumes from step {rewind.limit} or before"
            raise UserError([Problem("E984", sentence, (fix,))])


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
