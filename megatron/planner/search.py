"""Search for the layout of a run: what fits, how fast it is, and why its neighbours are worse."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from megatron.config.errors import Problem, UserError
from megatron.config.run import RunConfig
from megatron.config.settings import SETTINGS
from megatron.config.text import format_bytes
from megatron.pipeline.actions import ScheduleError
from megatron.planner.hardware import Cluster
from megatron.planner.layouts import NO_RECOMPUTATION, Choice, LayoutSpace, apply, choices_of
from megatron.planner.memory import max_peak_bytes
from megatron.planner.step_time import StepTime, step_time

HEADROOM = 0.94
"""Share of the device memory that a plan may fill: the CUDA context and fragmentation take the rest."""

GRID = (
    "tensor_model_parallel_size",
    "context_parallel_size",
    "pipeline_model_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
)
"""Options of the sizes of the rank grid."""

Check = Callable[[RunConfig, int], Iterable[Problem]]
"""Returns the problems of a configuration on so many ranks, none if a run accepts it."""


@dataclass(frozen=True)
class Plan:
    """A layout, with what it is predicted to take."""

    # Values of the options that the planner chose, by name.
    chosen: Choice
    config: RunConfig
    time: StepTime
    # Bytes at the peak of a step on the fullest rank, by part.
    memory: Mapping[str, int]

    @property
    def flags(self) -> list[str]:
        """The flags of what was chosen, as far as it differs from the defaults."""
        return [SETTINGS[name].spell(value) for name, value in self.chosen.items() if value != SETTINGS[name].default]

    @property
    def bytes(self) -> int:
        """Bytes at the peak of a step on the fullest rank."""
        return sum(self.memory.values())


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
    # Bytes that it saves on the fullest rank, and seconds that it adds to a step; below zero for the contrary.
    saved: int = 0
    slower: float = 0.0
    # Options of the axis that it changes.
    axis: tuple[str, ...] = ()
    # Why it is not better, such as "+31 %: tensor-parallel communication takes 2.1 s more"; empty if it is.
    reason: str = ""


@dataclass(frozen=True)
class LayoutSearch:
    """The layouts of a run on a cluster."""

    # With its vocabulary size and its global batch size.
    config: RunConfig
    world_size: int
    cluster: Cluster
    # :func:`megatron.arguments.validate.find_problems`, which this package may not import.
    check: Check
    # Names of options that stay as they are in ``config``.
    given: frozenset[str] = frozenset()

    def best(self, count: int = 10) -> list[Plan]:
        """Return the fastest plan of each grid of ranks, the best first; empty if none fits."""
        plans: dict[tuple[Any, ...], Plan] = {}
        for plan in self._some():
            grid = tuple(plan.chosen[name] for name in GRID)
            if grid not in plans or plan.time.seconds < plans[grid].time.seconds:
                plans[grid] = plan
        return sorted(plans.values(), key=lambda plan: plan.time.seconds)[:count]

    def plan(self, chosen: Choice) -> Plan | None:
        """Return the plan of some choices, whether it fits or not; None for a layout that is refused."""
        config = apply(self.space.start, chosen)
        try:
            return None if list(self.check(config, self.world_size)) else self._predict(config, chosen)
        except (UserError, ScheduleError):
            return None

    def plan_of(self, config: RunConfig) -> Plan:
        """Return the plan of a configuration that a run accepts, with all choices as they are."""
        return self._predict(config, choices_of(config))

    def fits(self, plan: Plan) -> bool:
        """Return True if the fullest rank has the memory for it."""
        return plan.bytes <= self.capacity

    @property
    def capacity(self) -> float:
        """Bytes that a plan may fill on a rank."""
        return HEADROOM * self.cluster.accelerator.memory

    @cached_property
    def space(self) -> LayoutSpace:
        """All layouts of the run."""
        return LayoutSpace(self.config, self.world_size, self.cluster.node_size, self.given)

    def neighbours(self, plan: Plan) -> list[Neighbour]:
        """Return the layouts that differ from a plan in one choice."""
        return [self._neighbour(plan, change, choice) for change, choice in self.space.moves(plan.config)]

    def _neighbour(self, plan: Plan, change: str, choice: Choice) -> Neighbour:
        now = choices_of(plan.config)
        changed = {name: value for name, value in choice.items() if value != now[name]}
        flags = tuple(SETTINGS[name].spell(value) for name, value in changed.items())
        kept = [SETTINGS[name].flag for name in changed if name in self.given]
        if kept:
            return Neighbour(change, flags, f"{kept[0]} is given", None)
        config = apply(plan.config, choice)
        try:
            problems = [*self.check(config, self.world_size)]
            if problems:
                return Neighbour(change, flags, problems[0].sentence, None)
            other = self._predict(config, {**plan.chosen, **choice})
        except ScheduleError as error:
            return Neighbour(change, flags, error.sentence, None)
        except UserError as error:
            return Neighbour(change, flags, error.problems[0].sentence, None)
        saved, slower = plan.bytes - other.bytes, other.time.seconds - plan.time.seconds
        return Neighbour(change, flags, "", other, saved, slower, tuple(choice), self._why(plan, other))

    def _why(self, plan: Plan, other: Plan) -> str:
        """Return why another plan is not better; empty if it is."""
        reasons = []
        if other.bytes > self.capacity:
            reasons.append(f"{format_bytes(other.bytes - self.capacity)} too much")
        if other.time.seconds > plan.time.seconds:
            grown = {part: seconds - plan.time.parts[part] for part, seconds in other.time.parts.items()}
            part = max(grown, key=lambda each: grown[each])
            share = other.time.seconds / plan.time.seconds - 1
            reasons.append(f"{share:+.1%}, {part} {grown[part]:+.3g} s")
        return "; ".join(reasons)

    def _predict(self, config: RunConfig, chosen: Choice) -> Plan:
        time = step_time(config, self.world_size, self.cluster)
        return Plan(chosen, config, time, max_peak_bytes(config, self.world_size))

    def _some(self) -> Iterator[Plan]:
        """Yield plans that fit, of a part of the space."""
        for core in self.space.cores():
            if core["context_parallel_size"] > 1 or core["micro_batch_size"] > 4 or core["tp_comm_overlap"]:
                continue
            for pipeline in self.space.pipelines(core):
                for recomputation in (NO_RECOMPUTATION, {"recompute_granularity": "full"}):
                    sharding = next(iter(self.space.sharding(core, pipeline)))
                    plan = self.plan({**core, **pipeline, **sharding, **recomputation})
                    if plan is not None and self.fits(plan):
                        yield plan


def cheapest_fits(
    config: RunConfig,
    world_size: int,
    cluster: Cluster,
    check: Check,
    given: frozenset[str] = frozenset(),
    *,
    capacity: float | None = None,
    beyond: int = 0,
    count: int = 3,
) -> list[Neighbour]:
    """Return single changes that make a configuration fit, at most one of every axis, the least slow first.

    Each has its ``flags``, the bytes ``saved`` on the fullest rank, and how much ``slower`` a step is in seconds.

    Args:
        config: of a run that was accepted, with its vocabulary size and its global batch size.
        world_size: ranks.
        cluster: that they run on.
        check: as of :class:`LayoutSearch`.
        given: options that must stay as they are. Default: none, so that any may be changed.
        capacity: bytes that a rank may use. Default: ``HEADROOM`` of the memory of an accelerator.
        beyond: bytes that the run takes beyond the prediction, such as what it had allocated less what was predicted.
        count: of the changes.
    """
    search = LayoutSearch(config, world_size, cluster, check, given)
    limit = (search.capacity if capacity is None else capacity) - beyond
    found = search.neighbours(search.plan_of(config))
    fitting = [each for each in found if each.plan is not None and each.saved > 0 and each.plan.bytes <= limit]
    cheapest: dict[tuple[str, ...], Neighbour] = {}
    for each in sorted(fitting, key=lambda each: each.slower):
        cheapest.setdefault(each.axis, each)
    return [*cheapest.values()][:count]
