"""Phases of a run: against trainers that take over each other's state by hand, killed anywhere, and what they record."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.config.phases import Phase
from megatron.config.run import RunConfig
from megatron.data.errors import DataError
from megatron.optimizer.lr_scheduler import Rates
from megatron.training.build import build_trainer
from megatron.training.checkpoint_contents import local_tensors
from megatron.training.step import train_step
from megatron.training.trainer import Trainer
from tests.kit.runs import (
    Outcome,
    before_step,
    checkpoint,
    column,
    differences,
    kill,
    records,
    saved_steps,
    start,
    steps,
    tiny_phases,
    tiny_run,
)
from tests.unit.checkpoint.samples import file_of, flip

ROPE = "--position-embedding-type rope --params-dtype fp64 --hidden-dropout 0.1"
LONG = {"seq_length": 16, "max_position_embeddings": 16, "rotary_base": 500000}
PHASES: list[dict[str, Any]] = [
    {"name": "main", "tokens": 90},  # 3 steps of 4 x 8
    {"name": "long", "tokens": "0.1K", **LONG, "global_batch_size": 2},  # 4 steps of 2 x 16
    {"name": "anneal", "tokens": 64, "lr": 2e-3, "lr_decay_style": "linear", "lr_warmup_iters": 1, "seed": 7},
]
EDGES = 3, 7, 9
FLAGS = f"{ROPE} --lr-decay-style cosine --lr-warmup-iters 2 --min-lr 1e-3 --weight-decay-incr-style linear "
FLAGS += "--start-weight-decay 0 --end-weight-decay 0.1 --save-interval 2"


def phased(folder: Path, flags: str = FLAGS, phases: list[dict[str, Any]] = PHASES) -> list[Phase]:
    return tiny_phases(folder, phases, flags)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three phases."""
    folder = tmp_path_factory.mktemp("phases") / "whole"
    done = start(phased(folder))
    assert (done.status, done.err) == (0, "")
    return folder


def cosine(tokens: int) -> tuple[float, float]:
    """Learning rate and weight decay after ``tokens`` of the run of 288: a warm-up of 64, then a cosine."""
    rate = 1e-2 * tokens / 64
    if tokens > 64:
        rate = 1e-3 + (1e-2 - 1e-3) * 0.5 * (1 + math.cos(math.pi * (tokens - 64) / (288 - 64)))
    return rate, 0.1 * tokens / 288


RATES = [cosine(tokens) for tokens in range(0, 224, 32)]
RATES += [(0.0, 0.0), (2e-3, 0.05)]  # the annealing: a warm-up of 1 step, then 2e-3 to 1e-3 over the one that is left


def take_over(trainer: Trainer, before: Trainer | None) -> None:
    """Copy weights, moments and the step of Adam, without a checkpoint."""
    if before is None:
        return
    for name, tensor in local_tensors(trainer).items():
        tensor.copy_(local_tensors(before)[name])
    trainer.optimizer.main_params.set(dict(before.optimizer.main_params))
    trainer.optimizer.write_weights()
    trainer.optimizer.set_steps_applied(before.optimizer.steps_applied())


def test_phases_equal_trainers_that_take_over_state_by_hand(whole: Path) -> None:
    expected, before = [], None
    rates = iter(RATES)
    for phase, (first, last) in zip(phased(whole), ((0, 3), (3, 7), (7, 9))):
        trainer = build_trainer(phase.config, 0, 1)
        take_over(trainer, before)
        for step in range(first, last):
            batches = [replace(batch, step=step) for batch in trainer.next_batches()]
            expected.append(train_step(trainer, batches, Rates(*next(rates))).loss.item())
            trainer.progress.iteration += 1
            trainer.progress.consumed_samples += trainer.reader.next_batch_size
        before = trainer
    assert column(whole, "lm loss") == pytest.approx(expected, rel=1e-13)
