"""Drivers of the resume tests on every rank: runs saved on one layout and resumed on another."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

from torch import Tensor

from megatron.checkpoint.errors import DamagedCheckpointError
from megatron.checkpoint.format import Manifest
from megatron.config.run import RunConfig
from megatron.distributed.launch import world_group
from megatron.training.build import build_trainer
from megatron.training.checkpoint_contents import local_tensors, parameter_name, tensors_to_save, total_bytes
from megatron.training.checkpointer import Checkpointer, choose_resume_source
from megatron.training.step import train_step
from megatron.training.stop import SIGNALS
from megatron.training.trainer import Trainer
from tests.kit.runs import Outcome, before_step, full_disk, kill, misread, start
from tools.lib.verify_parallel import RankTrace, StepTrace, TracedPiece, join_traces, trace_pieces

BEFORE, AFTER = 2, 10
"""Steps before and after the checkpoint."""


def save_at_once(rank: int, world_size: int, config: RunConfig) -> None:
    """Save a run before its first step."""
    Checkpointer(build_trainer(config, rank, world_size)).write()


def _raise_signal(number: signal.Signals, trainer: Trainer) -> None:
    signal.raise_signal(number)


@dataclass(frozen=True)
class Leg:
    """The state of one rank at the checkpoint, and its continuation.

    Attributes:
        state: masters as ``weights``, moments as ``grads``.
        losses: of the steps after it.
        digest: of all samples in the end.
        bytes: of the tensors in a checkpoint, as reported.
    """

    state: RankTrace
    losses: list[float]
    digest: int
    bytes: int


def save_and_go_on(rank: int, world_size: int, config: RunConfig) -> Leg:
    """Train up to the checkpoint, write it, and go on to the end."""
    trainer = build_trainer(config, rank, world_size)
    advance(trainer, BEFORE)
    Checkpointer(trainer).write()
    return go_on(trainer)


def load_and_go_on(rank: int, world_size: int, config: RunConfig) -> Leg:
    """Load the checkpoint and go on to the end."""
    origin = choose_resume_source(config.checkpoint, world_group(rank, world_size))
    trainer = build_trainer(config, rank, world_size, fresh=origin.fresh)
    Checkpointer(trainer).load(origin)
    return go_on(trainer)


def go_on(trainer: Trainer) -> Leg:
    """Take the steps that are left."""
    tensors = {name: _pieces(trainer, parameter_name(name), share) for name, share in local_tensors(trainer).items()}
    weights = {name: pieces for name, pieces in tensors.items() if not name.startswith("optim.")}
    moments = {name: pieces for name, pieces in tensors.items() if name.startswith("optim.")}
    state = RankTrace(0.0, 0.0, moments, weights)
    losses = advance(trainer, trainer.total_steps - trainer.iteration)
    size = total_bytes(tensors_to_save(trainer), trainer.mesh.world)
    return Leg(state, losses, trainer.reader.consumed_digest(), size)


def _pieces(trainer: Trainer, parameter: str, share: Tensor) -> list[TracedPiece]:
    spec = trainer.specs[parameter]
    first = trainer.mesh.optimizer_replica_group(*spec.reduce_axes).rank == 0
    return trace_pieces(spec, trainer.buckets.shards[parameter], share, first)


def advance(trainer: Trainer, steps: int) -> list[float]:
    """Take steps as the training loop does; returns their losses."""
    t, losses = trainer, []
    for _ in range(steps):
        samples = t.reader.next_batch_size
        metrics = train_step(t, t.next_batches(), t.schedule.rates(t.consumed_samples))
        losses.append(metrics.loss.item())
        t.progress.iteration += 1
        t.progress.consumed_samples += samples
    return losses


def gathered(legs: Sequence[Leg]) -> StepTrace:
    """Masters and moments of all ranks put together."""
    return join_traces([leg.state for leg in legs])


def _unreadable(step: int) -> Callable[[Manifest], dict[str, bytes]]:
    """The small files of the checkpoint of ``step`` cannot be read on this machine."""

    def carried_by(manifest: Manifest) -> dict[str, bytes]:
        if manifest.state["iteration"] == step:
            raise DamagedCheckpointError(f"{manifest.path}/tokenizer cannot be read here")
        return {}

    return carried_by


ACTIONS: dict[str, Callable[[Trainer], None]] = {
    "kill": kill,
    "misread": misread,
    **{number.name: partial(_raise_signal, number) for number in SIGNALS},
}
"""Events that may happen to a rank before it reads the data of a step."""


def run_rank(
    rank: int, world_size: int, config: RunConfig, what: str = "", step: int = 0, on: int | None = None
) -> Outcome:
    """A run on this rank, on which ``what`` happens at ``step``; on all ranks where ``on`` names none."""
    event: AbstractContextManager[Any] | None = None
    if what and on in (None, rank):
        if what == "unreadable files":
            event = patch("megatron.training.checkpointer.saved_tokenizer_files", _unreadable(step))
        else:
            event = full_disk(step) if what == "full disk" else before_step(step, ACTIONS[what])
    return start(config, event, rank, world_size)
