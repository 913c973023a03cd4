"""Driving runs that are saved on one layout and go on on another: what the resume tests run on every rank."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any
from unittest.mock import patch

from torch import Tensor

from megatron.arguments.sources import resolve
from megatron.checkpoint.errors import DamagedCheckpointError
from megatron.checkpoint.format import Manifest
from megatron.config.run import CheckpointConfig, RunConfig
from megatron.distributed.launch import world_group
from megatron.training.build import build_trainer
from megatron.training.checkpointer import choose_resume_source, load_start_state, save_checkpoint
from megatron.training.loop import SIGNALS
from megatron.training.step import train_step
from megatron.training.trainer import Trainer
from megatron.training.trainer_state import checkpoint_bytes, consumed_digest, local_tensors, parameter_name
from tests.distributed.grid import FACTORS, LAYOUT, SHARING, case_of, label, layouts, valid
from tests.distributed.pairwise import Choice
from tests.runs import Told, before_step, full_disk, kill, misread, start
from tools.lib.verify_parallel import RankTrace, StepTrace, TracedPiece, join_traces, trace_pieces

GLOBAL_BATCH = 6
BEFORE, AFTER = 2, 10
"""Steps before and after the checkpoint."""

CUT = tuple(name for name in SHARING if name not in (*LAYOUT, "biases"))
"""What is as it is by default here: ``resharding`` is about it."""

OTHERWISE = ("recompute", "loss_chunk", "overlap", "bucket")
"""What may change with the layout."""


@dataclass(frozen=True)
class Pair:
    """A run, and the layout and other ways of computing it in which it goes on."""

    before: Choice
    after: Choice

    def __str__(self) -> str:
        c, otherwise = self.after, [n for n in OTHERWISE if self.after[n] != self.before[n]]
        layout = f"pp{c['pp']}x{c['vpp']} {c['schedule']} tp{c['tp']} dp{c['dp']} mb{c['micro_batch']}"
        return " ".join([f"{label(self.before)}->{layout}", *(f"{n}={c[n]}" for n in otherwise)]).replace(" ", "-")


@cache
def layouts_of(layers: int, ranks: int) -> list[Choice]:
    """All layouts of a model with so many layers on at most so many ranks; without a pipeline, of one chunk."""
    found = [layout for layout in layouts() if layout["layers"] == layers and layout["samples"] == GLOBAL_BATCH]
    found = [c for c in found if c["pp"] > 1 or (c["vpp"], c["schedule"]) == (1, "1f1b")]
    return [layout for layout in found if ranks_of(layout) <= ranks]


def random_pair(seed: int, ranks: int, **fixed: Choice) -> Pair:
    """Two different layouts of a random model.

    Args:
        seed: of the choice.
        ranks: most on which they may be.
        fixed: what is not left to chance, of the ``model``, and of the layouts ``before`` and ``after``.
    """
    chance = random.Random(seed)
    free = set(FACTORS) - set(LAYOUT) - set(CUT)
    model = {name: chance.choice(values) if name in free else values[0] for name, values in FACTORS.items()}
    model = {name: value for name, value in model.items() if name not in LAYOUT}
    model |= {"documents": "one", "masked": False, **fixed.get("model", {})}
    for name, value in (("rotary", "plain"), ("optimizer", "adam")):
        if not valid(model):
            model[name] = value
    otherwise = {name: chance.choice(FACTORS[name]) for name in OTHERWISE}
    wanted = [fixed.get(side, {}).items() for side in ("before", "after")]
    possible = [[[c for c in layouts_of(n, ranks) if w <= c.items()] for w in wanted] for n in FACTORS["layers"]]
    before, after = map(chance.choice, chance.choice([sides for sides in possible if all(sides)]))
    return Pair(model | before, model | otherwise | after)


def ranks_of(choice: Choice) -> int:
    return int(choice["tp"][0]) * int(choice["dp"]) * int(choice["pp"])


def config_of(choice: Choice, options: CheckpointConfig) -> RunConfig:
    """The run of a choice, in fp64, on generated samples."""
    config = case_of(choice).config()
    training = replace(
        config.training, global_batch_size=GLOBAL_BATCH, train_iters=BEFORE + AFTER, cross_entropy_chunk_size=1024
    )
    optimizer = replace(config.optimizer, lr=1e-2, lr_warmup_iters=1)
    return resolve(replace(config, training=training, optimizer=optimizer, checkpoint=options), ranks_of(choice))


def die_within(trainer: Trainer) -> None:
    """Be killed in the middle of the next forward pass, as the operating system does it."""
    kill_now = partial(os.kill, os.getpid(), signal.SIGKILL)
    for chunk in trainer.chunks.values():
        chunk.register_forward_hook(lambda *arguments: kill_now())


def _raise_signal(number: signal.Signals, trainer: Trainer) -> None:
    signal.raise_signal(number)


@dataclass(frozen=True)
class Leg:
    """What one rank has at the checkpoint, and how it goes on.

    Attributes:
        state: masters as ``weights``, moments as ``grads``.
        losses: of the steps after it.
        digest: of all samples in the end.
        bytes: of the tensors in a checkpoint, as they are told.
    """

    state: RankTrace
    losses: list[float]
    digest: int
    bytes: int


def save_and_go_on(rank: int, world_size: int, config: RunConfig) -> Leg:
    """Train up to the checkpoint, write it, and go on to the end."""
    trainer = build_trainer(config, rank, world_size)
    advance(trainer, BEFORE)
    save_checkpoint(trainer)
    return go_on(trainer)


def load_and_go_on(rank: int, world_size: int, config: RunConfig) -> Leg:
    """Load the checkpoint and go on to the end."""
    origin = choose_resume_source(config.checkpoint, world_group(rank, world_size))
    trainer = build_trainer(config, rank, world_size, fresh=origin.fresh)
    load_start_state(trainer, origin)
    return go_on(trainer)


def go_on(trainer: Trainer) -> Leg:
    """Take the steps that are left."""
    tensors = {name: _pieces(trainer, parameter_name(name), share) for name, share in local_tensors(trainer).items()}
    weights = {name: pieces for name, pieces in tensors.items() if not name.startswith("optim.")}
    moments = {name: pieces for name, pieces in tensors.items() if name.startswith("optim.")}
    state = RankTrace(0.0, 0.0, moments, weights)
    losses = advance(trainer, trainer.total_steps - trainer.iteration)
    return Leg(state, losses, consumed_digest(trainer), checkpoint_bytes(trainer))


def _pieces(trainer: Trainer, parameter: str, share: Tensor) -> list[TracedPiece]:
    spec = trainer.specs[parameter]
    first = trainer.mesh.optimizer_replica_group(*spec.reduce_axes).rank == 0
    return trace_pieces(spec, trainer.buckets.shards[parameter], share, first)


def advance(trainer: Trainer, steps: int) -> list[float]:
    """Take steps as the training loop does; returns their losses."""
    t, losses = trainer, []
    for _ in range(steps):
        samples = t.next_batch_size
        metrics = train_step(t, t.next_batches(), t.schedule.rates(t.consumed_samples))
        losses.append(metrics.loss.item())
        t.iteration += 1
        t.consumed_samples += samples
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
    "die": die_within,
    "misread": misread,
    **{number.name: partial(_raise_signal, number) for number in SIGNALS},
}
"""What may happen to a rank before it reads the data of a step."""


def run_rank(
    rank: int, world_size: int, config: RunConfig, what: str = "", step: int = 0, on: int | None = None
) -> Told:
    """A run on this rank, on which ``what`` happens at ``step``; on all ranks where ``on`` names none."""
    event: AbstractContextManager[Any] | None = None
    if what and on in (None, rank):
        if what == "unreadable files":
            event = patch("megatron.training.checkpointer.saved_tokenizer_files", _unreadable(step))
        else:
            event = full_disk(step) if what == "full disk" else before_step(step, ACTIONS[what])
    return start(config, event, rank, world_size)
