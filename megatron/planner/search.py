"""Search for the layout of a run: what fits, how fast it is, and why its neighbours are worse.

A layout is a choice of options that change no number of the training (role ``free``): sizes of the rank grid, pipeline
schedule, ZeRO stage, micro-batch size, recomputation, offload. Options that are given stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron.config.errors import UserError
from megatron.config.run import RunConfig
from megatron.config.settings import SETTINGS
from megatron.config.text import divisors
from megatron.pipeline.actions import ScheduleError
from megatron.planner.hardware import Cluster
from megatron.planner.memory import max_peak_bytes
from megatron.planner.step_time import StepTime, step_time

HEADROOM = 0.94
"""Share of the device memory that a plan may fill: the CUDA context and fragmentation take the rest."""


@dataclass(frozen=True)
class Plan:
    """A layout, with what it is predicted to take."""

    # Values of the options that the planner chose, by name.
    chosen: Mapping[str, Any]
    config: RunConfig
    time: StepTime
    # Bytes at the peak of a step on the fullest rank, by part.
    memory: Mapping[str, int]

    @property
    def flags(self) -> list[str]:
        """The flags of what was chosen, as far as it differs from the defaults."""
        return [SETTINGS[name].spell(value) for name, value in self.chosen.items() if value != SETTINGS[name].default]


@dataclass(frozen=True)
class Neighbour:
    """A layout that differs from a plan in one choice."""

    # The difference, such as "TP 16"; and flags that make it.
    change: str
    flags: tuple[str, ...]
    # Why it is no plan, such as "12 heads do not divide"; empty if it is one.
    refused: str
    # Its plan, whether it fits or not; None if it is refused.
    plan: Plan | None


@dataclass(frozen=True)
class LayoutSearch:
    """The layouts of a run on a cluster."""

    # With its vocabulary size and its global batch size.
    config: RunConfig
    world_size: int
    cluster: Cluster
    # Returns the problems of a configuration, none if a run accepts it (:func:`megatron.arguments.validate`).
    check: Callable[[RunConfig, int], Iterable[object]]
    # Names of options that stay as they are in ``config``.
    given: frozenset[str] = frozenset()

    def best(self, count: int = 10) -> list[Plan]:
        """Return the fastest plans that fit, the best first; empty if none fits."""
        plans = []
        for chosen in self._candidates():
            changed = (name for name, value in chosen.items() if value != SETTINGS[name].value_in(self.config))
            if not self.given.isdisjoint(changed):
                continue
            plan = self.plan(chosen)
            if plan is not None and self.fits(plan):
                plans.append(plan)
        return sorted(plans, key=lambda plan: plan.time.seconds)[:count]

    def plan(self, chosen: Mapping[str, Any]) -> Plan | None:
        """Return the plan of some choices, whether it fits or not; None for a layout that is refused."""
        config = self.config
        for name, value in chosen.items():
            group = SETTINGS[name].group
            config = config.with_group(group, replace(config.group(group), **{name: value}))
        try:
            if list(self.check(config, self.world_size)):
                return None
            time = step_time(config, self.world_size, self.cluster)
            return Plan(chosen, config, time, max_peak_bytes(config, self.world_size))
        except (UserError, ScheduleError):
            return None

    def fits(self, plan: Plan) -> bool:
        """Return True if the fullest rank has the memory for it."""
        return sum(plan.memory.values()) <= HEADROOM * self.cluster.accelerator.memory

    def neighbours(self, plan: Plan) -> list[Neighbour]:
        """Return the layouts that differ from a plan in one choice."""
        return []

    def _candidates(self) -> Iterator[dict[str, Any]]:
        """Yield choices of layouts, valid or not."""
        for tp in _up_to(8, self.world_size):
            for pp in divisors(self.world_size // tp):
                for micro in (1, 2, 4):
                    for recompute in (None, "full"):
                        yield {
                            "tensor_model_parallel_size": tp,
                            "sequence_parallel": tp > 1,
                            "pipeline_model_parallel_size": pp,
                            "micro_batch_size": micro,
                            "use_distributed_optimizer": True,
                            "recompute_granularity": recompute,
                        }


def _up_to(most: int, of: int) -> Sequence[int]:
    return [size for size in divisors(of) if size <= most]
