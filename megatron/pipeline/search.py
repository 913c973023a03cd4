"""Search a schedule for given costs and a memory limit: try many candidates and keep the one that ends first.

Candidates are the hand-written schedules and those of a list scheduler: whenever a rank is free it starts the most
urgent action that it can start. A few rules (:class:`_Rules`) define urgency; which are best depends on the costs, so
all are tried. Candidates are compared by simulated makespan, so the result is never worse than the best hand-written
schedule that fits. The search is deterministic.

Filling idle time with W within a memory limit is the idea of Qi et al., arXiv 2401.10241, section 3.1.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from heapq import heappop, heappush
from itertools import product
from typing import NamedTuple

from megatron.pipeline.actions import BACKWARD, FORWARD, INPUT, WEIGHT, Action, PipelineSchedule, ScheduleError
from megatron.pipeline.communication import add_communication
from megatron.pipeline.schedules import SCHEDULES, make_schedule
from megatron.pipeline.simulate import StageCosts, simulate

SEARCHED = "searched"
"""Name of the schedules that this search finds."""

_MOST_ACTIONS = 400_000
"""Total actions of all candidates after which the search stops; takes some seconds."""

_ROUNDING = 1e-9
"""Relative difference to tolerate between two sums of the same times."""


def search_schedule(
    ranks: int,
    chunks: int,
    microbatches: int,
    costs: StageCosts,
    limit: float | None = None,
    placement: tuple[int, ...] | None = None,
) -> PipelineSchedule:
    """Return the schedule that ends first among all candidates that fit; among equals, the one with the least memory.

    Stops early when a candidate reaches the lower bound on the makespan.

    Args:
        ranks: of the pipeline.
        chunks: stages on each rank.
        microbatches: of a step.
        costs: of ``ranks * chunks`` stages.
        limit: maximum memory of a rank for B, I and W together, in the unit of the costs.
        placement: rank of every stage, if fixed. Default: the best of a zigzag and a loop over the ranks.

    Raises:
        ScheduleError: if nothing fits, with the smallest limit found to fit; or if the costs are for another number of
            stages.
    """
    costs.check(ranks * chunks)
    best = _Best(costs, math.inf if limit is None else limit * (1 + _ROUNDING))
    for name, recipe in SCHEDULES.items():
        if recipe.chunks in (None, chunks):
            schedule = make_schedule(name, ranks, chunks, microbatches)
            if placement in (None, schedule.placement):
                best.consider(schedule)
    loop = tuple(range(ranks)) * chunks
    zigzag = tuple(rank for chunk in range(chunks) for rank in (loop[ranks - 1 :: -1] if chunk % 2 else loop[:ranks]))
    placements = list(dict.fromkeys([zigzag, loop])) if placement is None else [placement]
    _consider_lists(placements, microbatches, costs, best)
    if best.schedule is None:
        least = min(best.least, *(_least(stages, costs) for stages in placements))
        stages = "1 stage" if chunks == 1 else f"{chunks} stages"
        raise ScheduleError(
            f"no schedule of {ranks} ranks with {stages} on each fits in a memory limit of {limit:g}",
            f"a memory limit of {least:g}",
        )
    return best.schedule


class _Best:
    """The best schedule so far."""

    def __init__(self, costs: StageCosts, limit: float) -> None:
        self.schedule: PipelineSchedule | None = None  # None until one fits
        self.makespan = math.inf
        self.limit = limit  # of memory
        self.least = math.inf  # least memory of any candidate
        self._memory = math.inf
        self._costs = costs

    def consider(self, schedule: PipelineSchedule) -> None:
        """Keep ``schedule`` if it fits and is better."""
        timeline = simulate(add_communication(schedule), self._costs)
        makespan, memory = timeline.makespan, max(timeline.peak_memory)
        self.least = min(self.least, memory)
        faster = makespan < self.makespan * (1 - _ROUNDING)
        leaner = makespan <= self.makespan * (1 + _ROUNDING) and memory < self._memory
        if memory <= self.limit and (faster or leaner):
            self.schedule, self.makespan, self._memory = schedule, makespan, memory


def _consider_lists(placements: list[tuple[int, ...]], microbatches: int, costs: StageCosts, best: _Best) -> None:
    """Try all rules in all placements, within the limit and within twice the memory of 1F1B."""
    ranks, stages = 1 + max(placements[0]), len(placements[0])
    soonest = min(_makespan_bound(placement, microbatches, costs) for placement in placements)
    tried = 0
    for rules, placement in product(_rules(stages, ranks), placements):
        for limit in sorted({best.limit, min(best.limit, 2 * ranks * _least(placement, costs))}):
            if tried > _MOST_ACTIONS or best.makespan <= soonest * (1 + _ROUNDING):
                return
            tried += 3 * microbatches * stages
            actions = _ListScheduler(placement, microbatches, costs, rules, limit).run(best.makespan)
            if actions is not None:
                best.consider(PipelineSchedule(SEARCHED, actions))


def _makespan_bound(placement: tuple[int, ...], microbatches: int, costs: StageCosts) -> float:
    """Return a lower bound on the makespan: some rank gets its first input and then has all its actions to do."""
    first_input: dict[int, float] = {}
    work: dict[int, float] = dict.fromkeys(placement, 0)
    arrival: float = 0
    for stage, rank in enumerate(placement):
        first_input.setdefault(rank, arrival)
        work[rank] += microbatches * sum(costs.seconds(stage, kind) for kind in (FORWARD, BACKWARD))
        hop = costs.latency + costs.transfer if placement[stage + 1 : stage + 2] != (rank,) else 0
        arrival += costs.forward[stage] + hop
    return max(first_input[rank] + work[rank] for rank in work)


class _Rules(NamedTuple):
    """Rules for what a free rank starts, besides alternating forwards and input gradients where possible."""

    live: tuple[float, ...]  # by rank, maximum live activations, in stages
    patience: float  # no W is started if something more urgent arrives within this fraction of its time
    thrifty: bool  # run a W before a second forward in a row
    steady: bool  # run a W to make room for a forward whose turn it is; else a second input gradient


def _rules(stages: int, ranks: int) -> Iterator[_Rules]:
    """Yield all sets of rules, the most often successful first."""
    # Bounds on live activations: none; then one for the last rank that increases towards the first.
    lives: list[tuple[float, ...]] = [(math.inf,) * ranks]
    for last, more in product((1 + stages - ranks, stages), (1, 1.5)):
        lives.append(tuple(last + more * (ranks - 1 - rank) for rank in range(ranks)))
    for steady, live, patience, thrifty in product((True, False), lives, (0.5, 1, 0), (False, True)):
        yield _Rules(live, patience, thrifty, steady)


def _sizes(costs: StageCosts, stages: int) -> tuple[float, ...]:
    """Return the memory to reserve for an activation of each stage: no less than what its W needs."""
    return tuple(map(max, costs.activation or (1,) * stages, costs.weight_memory or (1,) * stages))


def _least(placement: tuple[int, ...], costs: StageCosts) -> float:
    """Return the smallest limit in which the list scheduler works: one micro-batch, on the rank where it is largest."""
    held = [0.0] * len(placement)
    for rank, size in zip(placement, _sizes(costs, len(placement))):
        held[rank] += size
    return max(held)


_Task = tuple[int, str]
"""A stage and F or I."""


class _ListScheduler:
    """A list scheduler with one set of rules.

    A forward is started only if the remaining memory suffices to take its micro-batch through all later stages of the
    rank. Then some rank can always continue, within any limit that one micro-batch fits in.
    """

    def __init__(
        self, placement: tuple[int, ...], microbatches: int, costs: StageCosts, rules: _Rules, limit: float
    ) -> None:
        stages, ranks = range(len(placement)), range(1 + max(placement))
        self._placement, self._microbatches, self._rules, self._limit = placement, microbatches, rules, limit
        self._hop = costs.latency + costs.transfer
        self._seconds = {(s, kind): costs.seconds(s, kind) for s in stages for kind in (FORWARD, INPUT, WEIGHT)}
        self._kept = costs.weight_memory or (1,) * len(stages)
        self._size = _sizes(costs, len(stages))
        self._own = [[stage for stage in stages if placement[stage] == rank] for rank in ranks]
        self._ahead = [[other for other in self._own[placement[stage]] if other >= stage] for stage in stages]
        self._done: dict[_Task, int] = {(stage, kind): 0 for stage in stages for kind in (FORWARD, INPUT)}
        self._arrivals: dict[_Task, list[float]] = {task: [] for task in self._done}
        self._arrivals[0, FORWARD] = [0] * microbatches
        self._pending: list[deque[Action]] = [deque() for _ in ranks]  # W by rank, oldest first
        self._live = [0 for _ in ranks]
        self._held: list[float] = [0 for _ in ranks]
        self._last = [FORWARD for _ in ranks]
        self._free: list[float] = [0 for _ in ranks]
        self._actions: list[list[Action]] = [[] for _ in ranks]
        self._events: list[tuple[float, int]] = [(0, rank) for rank in ranks]

    def run(self, give_up: float) -> tuple[tuple[Action, ...], ...] | None:
        """Return the actions of every rank.

        None if it would end after ``give_up``, or cannot finish because one micro-batch exceeds the limit.
        """
        kinds = (FORWARD, INPUT, WEIGHT)
        left = [
            self._microbatches * sum(self._seconds[stage, kind] for stage in own for kind in kinds) for own in self._own
        ]
        while self._events:
            now, rank = heappop(self._events)
            if now < self._free[rank]:
                continue  # another event follows when the rank is free
            action = self._choose(rank, now)
            if action is not None:
                seconds = self._seconds[action.stage, action.kind]
                self._start(rank, action, now + seconds)
                left[rank] -= seconds
                if self._free[rank] + left[rank] > give_up * (1 + _ROUNDING):
                    return None
        complete = all(count == self._microbatches for count in self._done.values())
        return tuple(map(tuple, self._actions)) if complete else None

    def _choose(self, rank: int, now: float) -> Action | None:
        """Return the action that ``rank`` starts; None to wait for an arrival."""
        pending, last, soon = self._pending[rank], self._last[rank], math.inf
        # The most urgent first: forwards of later stages, input gradients of earlier micro-batches.
        forwards = [(stage, FORWARD) for stage in reversed(self._own[rank])]
        backwards = sorted(((stage, INPUT) for stage in self._own[rank]), key=self._done.__getitem__)
        for stage, kind in forwards + backwards if last == INPUT else backwards + forwards:
            number, arrivals = self._done[stage, kind], self._arrivals[stage, kind]
            if number == len(arrivals):
                continue
            if kind == FORWARD and self._live[rank] + len(self._ahead[stage]) > self._rules.live[rank]:
                continue
            if arrivals[number] > now:
                soon = min(soon, arrivals[number])
                continue
            needed = sum(self._size[other] for other in self._ahead[stage])
            fits = kind == INPUT or self._held[rank] + needed <= self._limit
            weight_first = self._rules.thrifty if last == FORWARD else self._rules.steady and not fits
            if kind == FORWARD and pending and weight_first:
                return pending[0]
            if fits:
                return Action(stage, kind, number)
        if not pending:
            return None
        waits = soon < now + self._rules.patience * self._seconds[pending[0].stage, WEIGHT]
        return None if waits else pending[0]

    def _start(self, rank: int, action: Action, end: float) -> None:
        stage, kind, microbatch = action
        if kind == FORWARD:
            self._live[rank] += 1
            self._held[rank] += self._size[stage]
            self._hand_over(rank, (stage + 1, FORWARD) if stage + 1 < len(self._placement) else (stage, INPUT), end)
        elif kind == INPUT:
            self._live[rank] -= 1
            self._held[rank] -= self._size[stage] - self._kept[stage]
            self._pending[rank].append(Action(stage, WEIGHT, microbatch))
            if stage > 0:
                self._hand_over(rank, (stage - 1, INPUT), end)
        else:
            self._held[rank] -= self._kept[stage]
            self._pending[rank].popleft()
        if kind != WEIGHT:
            self._done[stage, kind] += 1
            self._last[rank] = kind
        self._actions[rank].append(action)
        self._free[rank] = end
        heappush(self._events, (end, rank))

    def _hand_over(self, rank: int, task: _Task, end: float) -> None:
        target = self._placement[task[0]]
        arrival = end if target == rank else end + self._hop
        self._arrivals[task].append(arrival)
        if target != rank:
            heappush(self._events, (arrival, target))
