"""Watching the steps of a case, and how far two reports are apart."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from megatron.training.build import build_trainer
from megatron.training.callbacks.health import HealthReport
from megatron.training.step import train_step
from tests.kit.cases import RATES, Case, batches_of


def report(
    rank: int, world_size: int, case: Case, fault: Callable[[], AbstractContextManager[Any]] = nullcontext
) -> list[dict[str, float]]:
    """The records of all steps of a case."""
    trainer, records = build_trainer(case.config(), rank, world_size), []
    for step in range(case.steps):
        vitals = HealthReport(trainer)
        vitals.on_step_start()
        metrics = train_step(trainer, batches_of(trainer, case, step), RATES)
        progress = trainer.progress
        progress.iteration, progress.consumed_samples = step + 1, (step + 1) * 4
        with fault():
            records.append(vitals.report(metrics))
    return records


def router_losses(rank: int, world_size: int, case: Case) -> list[dict[str, float]]:
    """The losses of routers and the loss, step by step."""
    trainer, steps = build_trainer(case.config(), rank, world_size), []
    for step in range(case.steps):
        metrics = train_step(trainer, batches_of(trainer, case, step), RATES)
        steps.append({"lm loss": metrics.loss.item()} | {name: x.item() for name, x in metrics.extra.items()})
    return steps


def difference(got: dict[str, float], expected: dict[str, float], zeros: bool = True) -> float:
    """The largest relative difference of any number.

    Leave ``zeros`` out where keys have biases: in exact arithmetic their gradients are zero, and in ours now and then.
    """
    if list(got) != list(expected):
        return math.inf
    pairs = [(got[name], expected[name]) for name in got if zeros or "zeros" not in name]
    return max(0.0 if a == b else abs(a - b) / max(abs(b), 1e-12) for a, b in pairs)
