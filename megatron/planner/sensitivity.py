"""Sensitivity of a plan: the step under another network, global batch or number of accelerators.

Either the layout of the plan is kept, or the best one is searched again. Does not import torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from megatron.config.errors import UserError
from megatron.pipeline.actions import ScheduleError
from megatron.planner.search import LayoutSearch, Plan
from megatron.planner.step_time import StepTime, step_time

FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)
"""Multiples of a value that are tried."""

NETWORK, BATCH, GPUS = "network", "batch", "GPUs"
SWEPT = (NETWORK, BATCH, GPUS)
"""Quantities that are varied: bytes per second of an accelerator to other nodes, samples of a step, accelerators."""


@dataclass(frozen=True)
class SweepPoint:
    """The step of a run after one change."""

    # Of :data:`SWEPT`, and its value.
    axis: str
    value: float
    world_size: int
    # With the layout of the plan, whether it fits or not; None if a run refuses it.
    kept: StepTime | None
    # The best layout there; None if it was not searched, or none fits.
    plan: Plan | None
    # Why a run refuses the layout of the plan; empty if it does not.
    refused: str = ""


def sweep(search: LayoutSearch, plan: Plan, again: bool) -> Iterator[SweepPoint]:
    """Yield the points of every axis, by axis and value.

    Args:
        search: that found the plan.
        plan: whose layout is kept.
        again: whether to search the best layout of every point, too.
    """
    for axis in SWEPT:
        changes = {value: changed for changed, value in (_changed(search, axis, factor) for factor in FACTORS)}
        for value, changed in changes.items():
            best = changed.best(1) if again else []
            kept, refused = _kept(changed, plan)
            yield SweepPoint(axis, value, changed.world_size, kept, best[0] if best else None, refused)


def _changed(search: LayoutSearch, axis: str, factor: float) -> tuple[LayoutSearch, float]:
    """Return a search after one change, and the new value."""
    if axis == NETWORK:
        network = search.cluster.network
        faster = network._replace(bandwidth=network.bandwidth * factor)
        return replace(search, cluster=replace(search.cluster, network=faster)), faster.bandwidth
    if axis == GPUS:
        count = max(1, round(search.world_size * factor))
        return replace(search, world_size=count), count
    training = search.config.training
    batch = max(1, round((training.global_batch_size or 1) * factor))
    config = replace(search.config, training=replace(training, global_batch_size=batch))
    return replace(search, config=config), batch


def _kept(search: LayoutSearch, plan: Plan) -> tuple[StepTime | None, str]:
    """Return the time of a step with the layout of a plan; for one that is refused None, and why."""
    training = replace(plan.config.training, global_batch_size=search.config.training.global_batch_size)
    config = replace(plan.config, training=training)
    try:
        if problems := list(search.check(config, search.world_size)):
            return None, problems[0].sentence
        return step_time(config, search.world_size, search.cluster), ""
    except UserError as error:
        return None, error.problems[0].sentence
    except ScheduleError as error:
        return None, str(error)
