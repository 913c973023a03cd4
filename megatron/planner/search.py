"""Search for the layout of a run: what fits, how fast it is, and why its neighbours are worse."""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

from megatron.config.errors import Problem, UserError
from megatron.config.run import RunConfig
from megatron.config.settings import SETTINGS
from megatron.config.text import format_bytes
from megatron.pipeline.actions import ScheduleError
from megatron.pipeline.partition import StageLayers
from megatron.pipeline.plan import resolve_pipeline, stage_layers, stage_placement
from megatron.planner.hardware import Cluster
from megatron.planner.layouts import (
    CHOSEN,
    CONTEXT,
    CP,
    DELAYING_SCHEDULES,
    EP,
    ETP,
    EXPERT,
    GATHER,
    GRID,
    INSTANCES,
    MICRO,
    OFFLOAD,
    OPTIMIZER,
    OVERLAP,
    PP,
    SCHEDULE,
    SEQUENCE,
    STAGES,
    STRATEGY,
    TENSOR,
    TP,
    UNSHARDED,
    Choice,
    LayoutSpace,
    apply,
    choices_of,
)
from megatron.planner.memory import max_peak_bytes, max_state_bytes, peaks_by_rank
from megatron.planner.stage_time import StageTimes, stage_times
from megatron.planner.step_time import StepTime, step_time

HEADROOM = 0.94
"""Share of the device memory that a plan may fill: the CUDA context and fragmentation take the rest."""

SAME = 1e-6
"""Share of a time below which a difference is none."""

WORDS = {
    "compute": "computing",
    "recompute": "recomputation",
    "bubble": "bubble",
    "tensor": "TP communication",
    "context": "CP communication",
    "expert": "EP communication",
    "pipeline": "messages between stages",
    "data": "DP communication",
    "offload": "offload",
    "optimizer": "updates",
}
"""Parts of a step in words."""

Check = Callable[[RunConfig, int], Iterable[Problem]]
"""Returns the problems of a configuration on so many ranks, none if a run accepts it."""


def _flags(chosen: Choice) -> list[str]:
    return [SETTINGS[name].spell(value) for name, value in chosen.items() if value != SETTINGS[name].default]


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
        return _flags(self.chosen)

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
class Shortfall:
    """Missing memory of a run that fits in no layout, and the changes that would make it fit."""

    # The plan that takes the least memory, and how many bytes it takes too many on the fullest rank.
    plan: Plan
    missing: int
    # A number of ranks with which it fits; None if there is none up to 64 times as many.
    ranks: int | None
    # Flags that were given, without any of which it fits.
    dropped: tuple[str, ...]

    def __str__(self) -> str:
        """Return the plan, what is missing, and what would fit."""
        short = f"{format_bytes(self.missing)} too much on the fullest rank with {' '.join(self.plan.flags)}"
        ways = [*([f"{self.ranks:,} ranks"] if self.ranks else []), *(f"no {flag}" for flag in self.dropped)]
        ways.append(f"{format_bytes(self.plan.bytes / HEADROOM)} per rank")
        return f"{short}; it fits with {', or '.join(ways)}"


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
        return list(itertools.islice(self.ranked(), count))

    def ranked(self) -> Iterator[Plan]:
        """Yield the fastest plan of each grid of ranks that has one that fits, in the order of their times.

        After :data:`EFFORT` layouts, those that follow are the fastest of a sample (:meth:`_hurried`), and
        :meth:`may_be_beaten_by` is their distance from the lower bound of what has not been looked at.
        """
        if not self._holds_any():
            return
        queue, done = _Queue(), set[tuple[Any, ...]]()
        self._progress.timed, self._progress.bound = 0, None
        queue.push(self._cores())
        expand = {CORE: self._pipelines, PIPELINE: self._staged, STAGED: self._unsharded, SIMULATED: self._layouts}
        while (node := queue.pop()) is not None:
            if self._progress.timed > EFFORT:
                queue.push([node])
                plans = self._hurried(queue, done)
                if plans or done:
                    self._progress.bound = node.seconds
                    yield from plans
                    return
                self._progress.timed = -math.inf  # whatever it takes
                continue
            if node.level > CORE and self._grid(node.chosen) in done:
                continue
            if node.level in expand:
                queue.push(expand[node.level](node))
            elif node.time is None:
                queue.push(self._timed(node))
            elif (plan := self._accepted(node)) is not None:
                done.add(self._grid(node.chosen))
                yield plan
            else:
                queue.push(self._savers(node))

    def _grid(self, chosen: Choice) -> tuple[Any, ...]:
        """Return the sizes of the grid of ranks; PP is not yet known of a core."""
        return tuple(chosen.get(name) for name in GRID)

    def may_be_beaten_by(self, plan: Plan) -> float:
        """Return the most by which another layout may be faster, as a share of the time of a plan; 0 if none is."""
        bound = self._progress.bound
        return 0.0 if bound is None else max(0.0, 1 - bound / plan.time.seconds)

    def _hurried(self, queue: _Queue, done: set[tuple[Any, ...]]) -> list[Plan]:
        """Return plans of the most promising pipelines that are left, each with the least recomputation that fits."""
        found, tried, of_grid = list[Plan](), set[tuple[Any, ...]](), Counter[tuple[Any, ...]]()
        taken = list[_Node]()
        while len(tried) < SAMPLE and (node := queue.pop()) is not None:
            grid = self._grid(node.chosen)
            if node.level == CORE:
                queue.push(self._pipelines(node))
            elif node.level == PIPELINE:
                queue.push(self._staged(node))
            else:
                taken.append(node)
                if grid in done or of_grid[grid] == SAMPLE_OF_GRID:
                    continue
                key = tuple(node.chosen[name] for name in (*TENSOR, *CONTEXT, *EXPERT, *MICRO, PP, STAGES, SCHEDULE))
                if key not in tried:
                    tried.add(key)
                    of_grid[grid] += 1
                    found += self._completed(node.chosen)
        queue.push(taken)
        plans = dict[tuple[Any, ...], Plan]()
        for plan in sorted(found, key=lambda plan: plan.time.seconds):
            if (grid := self._grid(plan.chosen)) not in plans and not list(self.check(plan.config, self.world_size)):
                plans[grid] = plan
        return [*plans.values()]

    def _completed(self, chosen: Choice) -> Iterator[Plan]:
        """Yield a plan for each way to shard, with the first choice of recomputation with which it fits."""
        chosen = {**chosen, **UNSHARDED}
        for sharding in self.space.shardings(chosen):
            if sharding[INSTANCES] > 1 and INSTANCES not in self.given:
                continue
            layout = {**chosen, **sharding}
            layout |= self.space.offloads(layout)[0]
            if not self._holds(self._state({**layout, **self.space.recomputations(layout)[0]})):
                continue
            for recomputation in self.space.recomputations(layout):
                config = apply(self.space.start, {**layout, **recomputation})
                with suppress(ValueError, ZeroDivisionError):  # which the checks report
                    memory = max_peak_bytes(config, self.world_size)
                    if sum(memory.values()) <= self.capacity:
                        time = step_time(config, self.world_size, self.cluster)
                        yield Plan({**layout, **recomputation}, config, time, memory)
                        break

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
        slower, reasons = other.time.seconds - plan.time.seconds, []
        if (missing := other.bytes - self.capacity) > 0:
            peaks = [sum(peak.values()) for peak in peaks_by_rank(other.config, self.world_size)]
            where = f" on pipeline rank {peaks.index(max(peaks))}" if len(peaks) > 1 else ""
            reasons.append(f"{format_bytes(missing)} too much{where}")
        if slower > SAME * plan.time.seconds:
            grown = {part: seconds - plan.time.parts[part] for part, seconds in other.time.parts.items()}
            part = max(grown, key=lambda each: grown[each])
            reason = f"{slower / plan.time.seconds:+.1%}: {grown[part]:.3g} s more of {WORDS[part]}"
            tp = other.config.parallel.tensor_model_parallel_size
            crosses = part == "tensor" and self.cluster.group(tp, 1).per_node < tp
            reasons.append(reason + f", as TP {tp} crosses nodes" * crosses)
        elif not reasons and slower > -SAME * plan.time.seconds:
            saved = plan.bytes - other.bytes
            less = f" with {format_bytes(abs(saved))} {'less' if saved > 0 else 'more'}" if saved else ""
            reasons.append(f"as fast{less}")
        return "; ".join(reasons)

    def shortfall(self) -> Shortfall | None:
        """Return what is missing where nothing fits; None if something fits, or no layout is accepted."""
        least = self._smallest()
        if least is None or self.fits(least):
            return None
        larger = (replace(self, world_size=times * self.world_size) for times in (2, 4, 8, 16, 32, 64))
        ranks = next((each.world_size for each in larger if each._holds_any()), None)
        freed = (name for name in CHOSEN if name in self.given)
        dropped = [name for name in freed if replace(self, given=self.given - {name})._holds_any()]
        missing = math.ceil(least.bytes - self.capacity)
        off = {name for name in dropped if SETTINGS[name].value_in(self.config) is False}
        flags = (SETTINGS[name].negative if name in off else SETTINGS[name].flag for name in dropped)
        return Shortfall(least, missing, ranks, tuple(flags))

    def _holds_any(self) -> bool:
        smallest = self._smallest(enough=self.capacity)
        return smallest is not None and self.fits(smallest)

    def _smallest(self, enough: float = 0.0) -> Plan | None:
        """Return the plan that takes the least memory, or the first with ``enough``.

        Only layouts are compared that save the most: with the smallest micro-batches, and all or no blocks recomputed
        and offloaded.
        """
        best: Plan | None = None
        for chosen in self._most_saving():
            most = math.inf if best is None else best.bytes
            if self._state(chosen).bytes >= min(most, enough * (1 + STATE_TOLERANCE) or math.inf):
                continue
            with suppress(ValueError, ZeroDivisionError):
                used = sum(max_peak_bytes(apply(self.space.start, chosen), self.world_size).values())
                if used < most and (plan := self.plan(chosen)) is not None:
                    best = plan
                    if used <= enough:
                        break
        return best

    def _most_saving(self) -> Iterator[Choice]:
        """Yield the layouts of each grid, schedule and ZeRO stage that save the most."""
        seen = set[tuple[Any, ...]]()
        for core in self.space.cores():
            if core[OVERLAP] and OVERLAP not in self.given:
                continue
            for pipeline in self.space.pipelines(core):
                layout = {**core, **pipeline}
                key = tuple(layout[name] for name in (*GRID, STAGES, SCHEDULE))
                for sharding in self.space.shardings(layout) if key not in seen else ():
                    chosen = {**layout, **sharding}
                    overlaps = chosen[GATHER] and GATHER not in self.given
                    if not overlaps and (chosen[INSTANCES] == 1 or INSTANCES in self.given):
                        # A given option may refuse recomputation or offload, so layouts without are looked at, too.
                        for offload in self._ends_of(self.space.offloads(chosen)):
                            for recomputation in self._ends_of(self.space.recomputations(chosen)):
                                yield {**chosen, **recomputation, **offload}
                seen.add(key)

    def _ends_of(self, choices: Sequence[Choice]) -> Sequence[Choice]:
        """Return the last and the first choice; one if they are the same."""
        return choices[:: 1 - len(choices)] if len(choices) > 1 else choices

    def _predict(self, config: RunConfig, chosen: Choice) -> Plan:
        time = step_time(config, self.world_size, self.cluster)
        return Plan(chosen, config, time, max_peak_bytes(config, self.world_size))

    def _cores(self) -> Iterator[_Node]:
        """Yield what determines the work of a micro-batch, with the time of this work divided equally."""
        for core in self.space.cores():
            if core[SEQUENCE] and not core[OVERLAP] and OVERLAP not in self.given:
                continue  # which takes no less time than the same with overlap
            config = apply(self.space.start, {**core, PP: 1, STAGES: None, SCHEDULE: None})
            try:
                (stage,) = stage_layers(config.model, config.parallel, config.training.seq_length)
                times = stage_times(config, self.cluster)
                work = sum(times.of(stage).phases)
            except (ValueError, ZeroDivisionError):  # which the checks report in the words of the options
                continue
            micro_batches = self.space.batch / core[MICRO[0]] / (self.world_size / (core[TP] * core[CP]))
            yield _Node(work * micro_batches, CORE, core, times)

    def _pipelines(self, node: _Node) -> Iterator[_Node]:
        """Yield the stages and schedules of a core."""
        for pipeline in self.space.pipelines(node.chosen):
            yield replace(node, level=PIPELINE, chosen={**node.chosen, **pipeline})

    def _staged(self, node: _Node) -> Iterator[_Node]:
        """Yield a pipeline with a lower bound of the time that its stages take; none if it cannot split the layers."""
        chosen = node.chosen
        key = chosen[PP], chosen[STAGES], chosen[SCHEDULE]
        if key not in self._splits:
            self._splits[key] = _Split.of(apply(self.space.start, dict(zip((PP, STAGES, SCHEDULE), key))), node.times)
        if (split := self._splits[key]) is not None:
            micro_batches = -(-self.space.batch // (chosen[MICRO[0]] * self.space.data_parallel(chosen)))
            kinds = [node.times.of(stage).phases for stage in split.kinds]
            costs = [kinds[kind] for kind in split.stages]
            least = least_makespan(costs, split.ranks, micro_batches, chosen[SCHEDULE] not in DELAYING_SCHEDULES)
            yield replace(node, seconds=max(node.seconds, least), level=STAGED)

    def _unsharded(self, node: _Node) -> Iterator[_Node]:
        """Yield a pipeline with the time that it takes without the communication and the updates of its replicas."""
        chosen = {**node.chosen, **UNSHARDED}
        chosen |= {**self.space.recomputations(chosen)[0], **self.space.offloads(chosen)[0]}
        if (time := self._time(chosen)) is not None:
            least = max(node.seconds, time.seconds - sum(time.parts[part] for part in OF_REPLICAS))
            yield replace(node, seconds=least, level=SIMULATED, chosen=chosen, least=least)

    def _layouts(self, node: _Node) -> Iterator[_Node]:
        """Yield the layouts of a pipeline with the least recomputation, and the least offload with which state fits."""
        shardings = self.space.shardings(node.chosen)
        for sharding in shardings:
            if not sharding[GATHER] and {**sharding, GATHER: True} in shardings:
                continue  # which takes no less time than the same with overlap
            chosen = {**node.chosen, **sharding}
            offloads = self._of_state(chosen)
            if self._holds(self._state({**chosen, **offloads[0]})):
                offloads = offloads[:1]
            # Recomputed blocks offload less, so with offload of activations that is given it may take less time.
            recomputations = self.space.recomputations(chosen)[: None if offloads[0][ACTIVATIONS] else 1]
            choices = ({**chosen, **one, **other} for one in offloads for other in recomputations)
            yield from self._with(node, choices)

    def _of_state(self, chosen: Choice) -> list[Choice]:
        """Return the choices of offload with the least offload of activations."""
        choices = self.space.offloads(chosen)
        return [choice for choice in choices if choice[ACTIVATIONS] == choices[0][ACTIVATIONS]]

    def _savers(self, node: _Node) -> Iterator[_Node]:
        """Yield layouts that take no less time than one that does not fit, or is refused, and may save memory.

        Each is reached by one path, which changes one kind of choice after the other.
        """
        chosen = node.chosen
        offloads, recomputations = self._of_state(chosen), self.space.recomputations(chosen)
        of_activations = (each[ACTIVATIONS] for each in self.space.offloads(chosen))
        changes: tuple[Sequence[Choice], ...] = (
            [{OVERLAP: False}] if chosen[OVERLAP] and OVERLAP not in self.given else [],
            [{GATHER: False}] if chosen[GATHER] and GATHER not in self.given else [],
            offloads[1:] if _has(chosen, offloads[0]) else [],
            [] if chosen[ACTIVATIONS] else recomputations[1:],
            [{ACTIVATIONS: count} for count in dict.fromkeys(of_activations) if count > chosen[ACTIVATIONS]],
        )
        for number, others in enumerate(changes):
            if number >= node.saved:
                layouts = ({**chosen, **other} for other in others)
                yield from (replace(each, saved=number + 1) for each in self._with(node, layouts))

    def _with(self, node: _Node, layouts: Iterable[Choice]) -> Iterator[_Node]:
        """Yield layouts of the set of a node whose state fits."""
        for chosen in layouts:
            state = self._state(chosen)
            if self._holds(state):
                least = max(node.seconds, node.least + state.updating)
                yield replace(node, seconds=least, level=LAYOUT, chosen=chosen, time=None)

    def _timed(self, node: _Node) -> Iterator[_Node]:
        """Yield a layout with its time; none if it is refused."""
        if (time := self._time(node.chosen)) is not None:
            yield replace(node, seconds=max(node.seconds, time.seconds), time=time)

    def _time(self, chosen: Choice) -> StepTime | None:
        """Return the time of a layout; None if it is refused, for a reason that the checks report."""
        self._progress.timed += 1
        with suppress(ValueError, ZeroDivisionError):
            return step_time(apply(self.space.start, chosen), self.world_size, self.cluster)
        return None

    def _holds(self, state: _State) -> bool:
        """Return False if a state does not fit for certain."""
        return state.bytes <= self.capacity * (1 + STATE_TOLERANCE)

    def _state(self, chosen: Choice) -> _State:
        """Return the state of a layout: as CP and DP shard alike, of its TP, PP, EP, ZeRO and offload."""
        names = (TP, PP, EP, ETP, OPTIMIZER, STRATEGY, INSTANCES, *OFFLOAD[:2])
        stages = chosen[STAGES]
        if stages is not None and self.config.model.num_layers % (chosen[PP] * stages) == 0:
            stages = None  # as many layers on a rank
        key = (*(chosen[name] for name in names), stages, chosen[SCHEDULE] in V_SCHEDULES)
        if key not in self._states:
            self._states[key] = _State(math.inf, 0.0)
            chosen = {**chosen, STAGES: stages}
            if (time := self._time(chosen)) is not None:
                used = max_state_bytes(apply(self.space.start, chosen), self.world_size)
                self._states[key] = _State(sum(used.values()), time.parts["optimizer"])
        return self._states[key]

    @cached_property
    def _progress(self) -> _Progress:
        """Progress of the search."""
        return _Progress()

    @cached_property
    def _states(self) -> dict[tuple[Any, ...], _State]:
        """Known states by the choices that determine them."""
        return {}

    @cached_property
    def _splits(self) -> dict[tuple[Any, ...], _Split | None]:
        """Known stages of a pipeline by its choices; None if it cannot split the layers."""
        return {}

    def _accepted(self, node: _Node) -> Plan | None:
        """Return the plan of a layout; None if it is refused or does not fit."""
        config = apply(self.space.start, node.chosen)
        if node.time is None:
            return None
        with suppress(ValueError, ZeroDivisionError):  # which the checks report
            plan = Plan(node.chosen, config, node.time, max_peak_bytes(config, self.world_size))
            if self.fits(plan) and not list(self.check(config, self.world_size)):  # the slower one last
                return plan
        return None


V_SCHEDULES = "zb-v", "dualpipe-v"
"""Schedules whose ranks have a stage of the first half and its mirror image of the second."""

CORE, PIPELINE, STAGED, SIMULATED, LAYOUT = range(5)
"""Levels of the tree: what determines the work of a micro-batch; stages and schedule too, bound by this work, by the
costs of the stages, and by a simulation; all."""

EFFORT, SAMPLE, SAMPLE_OF_GRID = 5000, 120, 3
"""Layouts whose time is computed before a search is cut short, in about 7 seconds, and pipelines that are sampled then,
and of them those of a grid of ranks. Dense models mostly reach the best plan before; those with experts have too many
layouts that are fast and do not fit."""

STATE_TOLERANCE = 0.01
"""Share by which the state of a rank may differ between numbers of stages: buckets of at least 40 million elements are
padded to multiples of 64 per shard."""

ACTIVATIONS = OFFLOAD[2]

OF_REPLICAS = "data", "optimizer", "offload"
"""Parts of a step that depend on what data-parallel ranks shard and offload."""


class _Split(NamedTuple):
    """Stages of a pipeline."""

    # One stage of each cost.
    kinds: tuple[StageLayers, ...]
    # Number of its kind, and the rank, of every stage.
    stages: tuple[int, ...]
    ranks: tuple[int, ...]

    @classmethod
    def of(cls, config: RunConfig, times: StageTimes) -> _Split | None:
        """Return the stages of a configuration; None if it cannot split the layers."""
        with suppress(ScheduleError):
            parallel = resolve_pipeline(config.model, config.parallel)
            stages = stage_layers(config.model, parallel, config.training.seq_length)
            ranks = stage_placement(parallel, parallel.num_virtual_stages_per_pipeline_rank or 1)
            numbers: dict[int, int] = {}  # stages of one cost share it, in every layout
            kinds = tuple(numbers.setdefault(id(times.of(stage)), len(numbers)) for stage in stages)
            return cls(tuple(stages[kinds.index(number)] for number in numbers.values()), kinds, ranks)
        return None


class _State(NamedTuple):
    """Memory of parameters, gradients and optimizer state, and the time of an update."""

    # On the fullest rank; infinite for a layout that is refused.
    bytes: float
    # Seconds of an update.
    updating: float


@dataclass(frozen=True)
class _Node:
    """A set of layouts with these choices in common, or one layout."""

    # Lower bound of the seconds of a step; those of a layout that is timed.
    seconds: float
    level: int
    chosen: Choice
    # Costs of its stages for a micro-batch.
    times: StageTimes
    # Lower bound without replicas and updates, of a pipeline that is simulated.
    least: float = 0.0
    # Kinds of choices that have been changed to save memory, of those that :meth:`LayoutSearch._savers` lists.
    saved: int = 0
    time: StepTime | None = None


@dataclass
class _Progress:
    """Progress of a search."""

    # Layouts whose time was computed.
    timed: float = 0
    # Lower bound of the seconds of those that are left, where the search was cut short.
    bound: float | None = None


def _has(chosen: Choice, choice: Choice) -> bool:
    return all(chosen[name] == value for name, value in choice.items())


class _Queue:
    """Nodes in the order of their seconds; what may still become slower first, then by fewer flags."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, bool, int, int, _Node]] = []
        self._numbers = itertools.count()

    def push(self, nodes: Iterable[_Node]) -> None:
        for node in nodes:
            flags = len(_flags(node.chosen)) if node.time is not None else 0
            heapq.heappush(self._heap, (node.seconds, node.time is not None, flags, next(self._numbers), node))

    def pop(self) -> _Node | None:
        return heapq.heappop(self._heap)[-1] if self._heap else None


def least_makespan(
    costs: Sequence[tuple[float, float, float]], placement: Sequence[int], micro_batches: int, joined: bool
) -> float:
    """Return a lower bound of the time of any schedule of these stages.

    A rank computes all micro-batches on its stages. It cannot begin before the stages ahead of its first one have
    computed a forward. Where a backward computes its weight gradients at once, the last gradient that the rank passes
    on has still to go through these stages.

    Args:
        costs: seconds of F, I and W of every stage.
        placement: rank of every stage.
        micro_batches: of a step.
        joined: no schedule delays weight gradients.
    """
    ahead, busy, waits = 0.0, dict[int, float](), dict[int, float]()
    for rank, (forward, back, weight) in zip(placement, costs):
        waits.setdefault(rank, ahead)
        busy[rank] = busy.get(rank, 0.0) + forward + back + weight
        ahead += forward + (back + weight) * joined
    return max(waits[rank] + micro_batches * once for rank, once in busy.items())


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
