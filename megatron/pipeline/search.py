"""A schedule made for given costs and a memory limit, by trying many and keeping the one that ends first.

The candidates are the hand-written schedules and those of a list scheduler: time goes by, and whenever a rank is free
it starts the most urgent action that it can start. What is urgent is a matter of a few rules (:class:`_Rules`); which
of them are best depends on the costs, so all are tried. The time of every candidate is the makespan that the simulator
says: the result is never worse than the best hand-written schedule that fits. Nothing is random: the same costs give
the same schedule.

That W fills idle time within a memory limit is the idea of Qi et al., arXiv 2401.10241, section 3.1.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from heapq import heappop, heappush
from itertools import product
from typing import NamedTuple

from megatron.pipeline.actions import BACKWARD, FORWARD, INPUT, WEIGHT, Action, Schedule, ScheduleError
from megatron.pipeline.comms import add_communication
from megatron.pipeline.schedules import SCHEDULES, make
from megatron.pipeline.simulate import Costs, simulate

NAME = "searched"
"""What the schedules of the list scheduler are called."""

_MOST_ACTIONS = 400_000
"""Actions of all candidates together, after which no further one is tried: some seconds."""

_ROUNDING = 1e-9
"""Part by which two sums of the same times may differ."""


def search(
    ranks: int,
    chunks: int,
    microbatches: int,
    costs: Costs,
    limit: float | None = None,
    placement: tuple[int, ...] | None = None,
) -> Schedule:
    """The schedule that ends first among all that were tried and fit; of several, the one that holds least.

    No more are tried once one ends as soon as any schedule could.

    Args:
        ranks: of the pipeline.
        chunks: stages on each rank.
        microbatches: of a step.
        costs: of ``ranks * chunks`` stages.
        limit: most memory that a rank may hold for B, I and W together, in the unit of the costs.
        placement: the rank of every stage, where it is given already. Default: whichever is best.

    Raises:
        ScheduleError: when nothing fits, with the least limit that something was found to fit in, or when the costs
            are of another number of stages.
    """
    costs.check(ranks * chunks)
    best = _Best(costs, math.inf if limit is None else limit * (1 + _ROUNDING))
    for schedule in _hand_written(ranks, chunks, microbatches):
        if placement in (None, schedule.placement):
            best.consider(schedule)
    placements = _placements(ranks, chunks) if placement is None else [placement]
    _consider_lists(placements, microbatches, costs, best)
    if best.schedule is None:
        least = min(best.least, *(_least(stages, costs) for stages in placements))
        stages = "1 stage" if chunks == 1 else f"{chunks} stages"
        raise ScheduleError(
            f"no schedule of {ranks} ranks with {stages} on each fits in a memory limit of {limit:g}",
            f"a memory limit of {least:g}",
        )
    return best.schedule


def _hand_written(ranks: int, chunks: int, microbatches: int) -> Iterator[Schedule]:
    for name, recipe in SCHEDULES.items():
        if recipe.chunks in (None, chunks):
            yield make(name, ranks, chunks, microbatches)


class _Best:
    """The best schedule so far.

    Attributes:
        schedule: None until one fits.
        makespan: of it; infinite before.
        limit: most memory that it may hold.
        least: the least memory that any schedule holds that was considered.
    """

    def __init__(self, costs: Costs, limit: float) -> None:
        self.schedule: Schedule | None = None
        self.makespan = math.inf
        self.limit = limit
        self.least = math.inf
        self._memory = math.inf
        self._costs = costs

    def consider(self, schedule: Schedule) -> None:
        """Keep ``schedule`` if it fits and is better."""
        timeline = simulate(add_communication(schedule), self._costs)
        makespan, memory = timeline.makespan, max(timeline.peak_memory)
        self.least = min(self.least, memory)
        faster = makespan < self.makespan * (1 - _ROUNDING)
        leaner = makespan <= self.makespan * (1 + _ROUNDING) and memory < self._memory
        if memory <= self.limit and (faster or leaner):
            self.schedule, self.makespan, self._memory = schedule, makespan, memory


def _consider_lists(placements: list[tuple[int, ...]], microbatches: int, costs: Costs, best: _Best) -> None:
    """Try all rules in all placements, within the limit and within twice the memory of 1F1B."""
    ranks, stages = 1 + max(placements[0]), len(placements[0])
    soonest = min(_soonest_end(placement, microbatches, costs) for placement in placements)
    tried = 0
    for rules, placement in product(_rules(stages, ranks), placements):
        for limit in sorted({best.limit, min(best.limit, 2 * ranks * _least(placement, costs))}):
            if tried > _MOST_ACTIONS or best.makespan <= soonest * (1 + _ROUNDING):
                return
            tried += 3 * microbatches * stages
            actions = _Lister(placement, microbatches, costs, rules, limit).run(best.makespan)
            if actions is not None:
                best.consider(Schedule(NAME, actions))


def _soonest_end(placement: tuple[int, ...], microbatches: int, costs: Costs) -> float:
    """No schedule ends before: some rank gets its first input, and then has all its actions to do."""
    begins: dict[int, float] = {}
    works: dict[int, float] = dict.fromkeys(placement, 0)
    arrival: float = 0
    for stage, rank in enumerate(placement):
        begins.setdefault(rank, arrival)
        works[rank] += microbatches * sum(costs.seconds(stage, kind) for kind in (FORWARD, BACKWARD))
        hop = costs.latency + costs.transfer if placement[stage + 1 : stage + 2] != (rank,) else 0
        arrival += costs.forward[stage] + hop
    return max(begins[rank] + works[rank] for rank in works)


def _placements(ranks: int, chunks: int) -> list[tuple[int, ...]]:
    """The rank of every stage: in a loop, and back and forth."""
    there = tuple(range(ranks))
    loop = there * chunks
    zigzag = tuple(rank for chunk in range(chunks) for rank in (reversed(there) if chunk % 2 else there))
    return [loop] if loop == zigzag else [zigzag, loop]


class _Rules(NamedTuple):
    """What a rank that is free starts: a forward after an input gradient and the other way round, if it can; and else?

    Attributes:
        live: by rank, how many stages' activations forwards leave for input gradients at most.
        patience: a W is not started when something more urgent arrives within this part of its time.
        thrifty: a W before a second forward in a row.
        steady: a W to make room for a forward whose turn it is; else a second input gradient.
    """

    live: tuple[float, ...]
    patience: float
    thrifty: bool
    steady: bool


def _rules(stages: int, ranks: int) -> Iterator[_Rules]:
    """All sets of rules, those that give the best schedule most often first."""
    for steady, live in product((True, False), _profiles(stages, ranks)):
        for patience, thrifty in product((0.5, 1, 0), (False, True)):
            yield _Rules(live, patience, thrifty, steady)


def _profiles(stages: int, ranks: int) -> Iterator[tuple[float, ...]]:
    """No bound on live activations; then one for the last rank, and so many more for each rank before it."""
    yield (math.inf,) * ranks
    for last, more in product((1 + stages - ranks, stages), (1, 1.5)):
        yield tuple(last + more * (ranks - 1 - rank) for rank in range(ranks))


def _sizes(costs: Costs, stages: int) -> tuple[float, ...]:
    """What an activation of each stage counts for: no less than what its W needs, which it makes room for."""
    return tuple(map(max, costs.activation or (1,) * stages, costs.weight_memory or (1,) * stages))


def _least(placement: tuple[int, ...], costs: Costs) -> float:
    """The least limit that the list scheduler works in: one micro-batch, on the rank where it is largest."""
    held = [0.0] * len(placement)
    for rank, size in zip(placement, _sizes(costs, len(placement))):
        held[rank] += size
    return max(held)


_Task = tuple[int, str]
"""A stage and F or I."""


class _Lister:
    """A list scheduler with one set of rules.

    A forward is started only if the memory that is left would take its micro-batch through all later stages of the
    rank too. Then some rank can always go on, and the end is reached, within any limit that one micro-batch fits in.
    """

    def __init__(
        self, placement: tuple[int, ...], microbatches: int, costs: Costs, rules: _Rules, limit: float
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
        self._pending: list[deque[Action]] = [deque() for _ in ranks]
        self._live = [0 for _ in ranks]
        self._held: list[float] = [0 for _ in ranks]
        self._last = [FORWARD for _ in ranks]
        self._free: list[float] = [0 for _ in ranks]
        self._actions: list[list[Action]] = [[] for _ in ranks]
        self._events: list[tuple[float, int]] = [(0, rank) for rank in ranks]

    def run(self, give_up: float) -> tuple[tuple[Action, ...], ...] | None:
        """The actions of every rank.

        None when it would end after ``give_up``, or not at all, because one micro-batch does not fit in the limit.
        """
        work = (self._own_seconds(own) for own in self._own)
        left = [self._microbatches * seconds for seconds in work]
        while self._events:
            now, rank = heappop(self._events)
            if now < self._free[rank]:
                continue  # when the rank is free it is looked at anyway
            action = self._choose(rank, now)
            if action is not None:
                seconds = self._seconds[action.stage, action.kind]
                self._start(rank, action, now + seconds)
                left[rank] -= seconds
                if self._free[rank] + left[rank] > give_up * (1 + _ROUNDING):
                    return None
        complete = all(count == self._microbatches for count in self._done.values())
        return tuple(map(tuple, self._actions)) if complete else None

    def _own_seconds(self, own: list[int]) -> float:
        return sum(self._seconds[stage, kind] for stage in own for kind in (FORWARD, INPUT, WEIGHT))

    def _choose(self, rank: int, now: float) -> Action | None:
        """What ``rank`` starts; None to wait for something to arrive."""
        pending, soon = self._pending[rank], math.inf
        for stage, kind in self._by_urgency(rank):
            number, arrivals = self._done[stage, kind], self._arrivals[stage, kind]
            if number == len(arrivals) or (kind == FORWARD and not self._may_live(rank, stage)):
                continue
            if arrivals[number] > now:
                soon = min(soon, arrivals[number])
            elif kind == FORWARD and pending and self._makes_room(rank, stage):
                return pending[0]
            elif kind == INPUT or self._fits(rank, stage):
                return Action(stage, kind, number)
        if not pending:
            return None
        waits = soon < now + self._rules.patience * self._seconds[pending[0].stage, WEIGHT]
        return None if waits else pending[0]

    def _makes_room(self, rank: int, stage: int) -> bool:
        """Whether a W comes before a forward that could start."""
        if self._last[rank] == FORWARD:
            return self._rules.thrifty
        return self._rules.steady and not self._fits(rank, stage)

    def _by_urgency(self, rank: int) -> list[_Task]:
        """Forwards of the last stage first, input gradients of the first micro-batch first."""
        forwards = [(stage, FORWARD) for stage in reversed(self._own[rank])]
        backwards = [(stage, INPUT) for stage in self._own[rank]]
        backwards.sort(key=self._done.__getitem__)
        return forwards + backwards if self._last[rank] == INPUT else backwards + forwards

    def _may_live(self, rank: int, stage: int) -> bool:
        return self._live[rank] + len(self._ahead[stage]) <= self._rules.live[rank]

    def _fits(self, rank: int, stage: int) -> bool:
        return self._held[rank] + sum(self._size[other] for other in self._ahead[stage]) <= self._limit

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
