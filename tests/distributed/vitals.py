"""Watching the steps of a case, and how far two reports are apart."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from megatron.distributed import comm
from megatron.layers.router import Router, Routing
from megatron.training.build import build_trainer
from megatron.training.callbacks.health import HealthReport
from megatron.training.components.expert_loads import ExpertLoadBalance
from megatron.training.step import train_step
from tests.kit.cases import RATES, Case, batches_of
from tests.kit.runs import part_of


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


Balance = dict[str, list[float]]
"""Of each router by what it is: choices of each expert in the step, those of the step before that the loss uses, and
the bias; and the experts of each token."""


def expert_balance(rank: int, world_size: int, case: Case) -> list[Balance]:
    """The balance of the experts on this rank, step by step."""
    trainer, steps = build_trainer(case.config(), rank, world_size), []
    component, mesh = part_of(trainer, ExpertLoadBalance), trainer.mesh
    routers = {
        m.context.prefix: m for chunk in trainer.chunks.values() for m in chunk.modules() if isinstance(m, Router)
    }
    found: Balance = {}
    for name, router in routers.items():
        router.register_forward_hook(partial(_note_choices, found, name))
    for step in range(case.steps):
        found.clear()
        component.window.zero_()
        train_step(trainer, batches_of(trainer, case, step), RATES)
        counted = comm.all_reduce(comm.all_reduce(component.window.clone(), mesh.dp_cp), mesh.tp)
        for name, counts in zip(component.routers, counted):
            found[f"{name} loads"] = counts.tolist()
            found[f"{name} before"] = routers[name].loads.before.tolist()
        for chunk in trainer.chunks.values():
            with trainer.optimizer.weights.gathered(chunk.parts):
                biased = [name for name, router in routers.items() if router.expert_bias is not None]
                found |= {f"{name} bias": trainer.params[f"{name}.expert_bias"].tolist() for name in biased}
        steps.append(dict(found))
    return steps


def joined_balance(ranks: Sequence[list[Balance]]) -> list[Balance]:
    """The balance on all ranks, step by step; empty if they differ."""
    steps: list[Balance] = []
    for parts in zip(*ranks, strict=True):
        whole = {name: value for part in parts for name, value in part.items()}
        if any(whole[name] != value for part in parts for name, value in part.items()):
            return []
        steps.append(whole)
    return steps


def _note_choices(found: Balance, name: str, router: Router, inputs: tuple[Any, ...], output: Routing) -> None:
    x_SBH, ctx = inputs
    chosen_SBK = output.experts.view(*x_SBH.shape[:2], -1)
    for sample, chosen_SK in zip(ctx.batch.sample_ids.tolist(), chosen_SBK.transpose(0, 1)):
        for position, chosen in zip(ctx.row_positions.tolist(), chosen_SK.tolist()):
            found[f"{name} sample {sample} position {position}"] = chosen


def difference(got: dict[str, float], expected: dict[str, float], zeros: bool = True) -> float:
    """The largest relative difference of any number.

    Leave ``zeros`` out where keys have biases: in exact arithmetic their gradients are zero, and in ours now and then.
    """
    if list(got) != list(expected):
        return math.inf
    pairs = [(got[name], expected[name]) for name in got if zeros or "zeros" not in name]
    return max(0.0 if a == b else abs(a - b) / max(abs(b), 1e-12) for a, b in pairs)
