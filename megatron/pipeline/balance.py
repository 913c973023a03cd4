"""Divide blocks of unequal cost over the stages of a pipeline.

The largest cost of a rank is minimised. With several stages per rank, the largest stage is then minimised, for which
ranks may cost 3% more than that: stages of one round wait for each other. Among such divisions costs are as even as
possible: first the sum of squares over stages, then over ranks, and then blocks are in later stages.

The stages of a rank are in rounds: in each the pipeline passes all ranks, forwards or backwards. For given blocks of
the rounds, a dynamic program goes from rank to rank; its state is the number of blocks of each round that the ranks so
far have. Within a bound T on the cost of a rank, p ranks leave no more than p T minus the cost of the model unused, so
that few states are possible if T is tight. Therefore T is raised from below until there is a division.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from heapq import nsmallest
from itertools import accumulate, pairwise, product
from math import comb
from typing import NamedTuple

SLACK = 3
"""Percent by which ranks may exceed the smallest cost of the largest one, so that stages are more even."""

MAX_STEPS = 30_000
"""Transitions of the dynamic program after which the best division so far is taken."""

MAX_STATES = 60
"""Most states after a rank that are followed, the most even first."""

MAX_ROUNDS, FEW_ROUNDS = 4_000, 4
"""Most choices of the blocks of each round, the most even first, and how many are tried while T is raised."""

Counts = list[int]
"""Number of blocks of each stage."""

State = tuple[int, ...]
"""Number of blocks of each round that the first ranks have."""


def balanced_counts(blocks: Sequence[int], placement: Sequence[int], first: int, last: int) -> Counts:
    """Return the number of blocks of each stage.

    Exact while the limits above suffice, and for the largest cost of one stage per rank always. Ranks that are in
    another order in each round are balanced by their stages only.

    Args:
        blocks: cost of each, whole numbers; at least the number of stages minus 2.
        placement: rank of every stage.
        first: further cost of the first stage, which may have no blocks.
        last: of the last stage, likewise.
    """
    ranks, stages = 1 + max(placement), len(placement)
    alone = _Search(blocks, stages, [False], first, last).improve(_smallest_stages(blocks, stages, first, last))
    rounds = [tuple(placement[at : at + ranks]) for at in range(0, stages, ranks)]
    if len(rounds) == 1 or len({*rounds[0]}) < ranks or not {*rounds} <= {rounds[0], rounds[0][::-1]}:
        return alone
    return _Search(blocks, ranks, [each != rounds[0] for each in rounds], first, last).improve(alone)


def _smallest_stages(blocks: Sequence[int], stages: int, first: int, last: int) -> Counts:
    """Return a division whose largest stage is smallest: within a bound, each stage takes all that it can."""
    ends = [*accumulate(blocks, initial=0)]

    def fill(most: int) -> Counts | None:
        at, counts = 0, []
        for stage in range(stages):
            extra = first * (stage == 0) + last * (stage == stages - 1)
            left = max(0, stages - 2 - stage)  # blocks that later stages need
            end = min(bisect_right(ends, ends[at] + most - extra) - 1, len(blocks) - left)
            if end < at + (0 < stage < stages - 1):
                return None
            counts.append(end - at)
            at = end
        return counts if at == len(blocks) else None

    low, high = -1, ends[-1] + first + last
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fill(middle) else (middle, high)
    return fill(high) or []


class _Division(NamedTuple):
    """A division of the blocks; within equal bounds on ranks and stages the smallest is the best."""

    evenness: tuple[int, int, int]  # sums of squares over stages and over ranks, and of the places where stages end
    counts: Counts
    rank: int  # largest cost
    stage: int


class _Reached(NamedTuple):
    """The best way to a state, compared by its evenness."""

    squares: int  # of stages, or of ranks
    others: int  # of ranks, or of stages
    places: int
    cost: int  # of the ranks so far
    before: State


class _Part(NamedTuple):
    """Blocks of the first rounds on a rank."""

    cost: int
    squares: int  # of its stages
    places: int
    state: State


class _Search:
    """Search for ranks that are in the same or in the reverse order in each round."""

    def __init__(self, blocks: Sequence[int], ranks: int, reverse: Sequence[bool], first: int, last: int) -> None:
        self._blocks, self._ranks, self._reverse, stages = blocks, ranks, reverse, ranks * len(reverse)
        self._extra = [first * (stage == 0) + last * (stage == stages - 1) for stage in range(stages)]
        self._least = [int(0 < stage < stages - 1) for stage in range(stages)]
        # The stages of each rank by round, the ranks in the order of the first round.
        self._own = [
            [ranks * k + (ranks - 1 - rank if back else rank) for k, back in enumerate(reverse)]
            for rank in range(ranks)
        ]
        self._whole, self._steps = sum(blocks) + first + last, MAX_STEPS
        self._rounds, self._even_ranks = self._choose_rounds(), False  # compare squares of ranks first

    def improve(self, counts: Counts) -> Counts:
        """Return the best division, given one with the smallest stages."""
        given, few, every = self._measure(counts), self._rounds[:FEW_ROUNDS], self._rounds
        best, rank = given, given.rank
        if len(self._reverse) > 1:
            stage, mean = given.stage, -(-self._whole // self._ranks)
            self._even_ranks = True
            even = self._raise(lambda bound: self._divisions(few, bound, stage), mean, rank) or given
            best = self._lower(lambda at: self._divisions(every, at.rank - 1, at.rank - 1), even)
            rank, self._even_ranks = best.rank * (100 + SLACK) // 100, False
            best = min((each for each in (given, even, best) if each.rank <= rank), key=lambda each: each.stage)
            best = self._lower(lambda at: self._divisions(every, rank, at.stage - 1), best)
        self._steps = MAX_STEPS
        return min([best, *self._divisions(every, rank, best.stage)]).counts

    def _raise(self, divisions: Callable[[int], Iterator[_Division]], bound: int, most: int) -> _Division | None:
        """Return the first division within a bound that is raised up to ``most``, exclusively."""
        self._steps, step = MAX_STEPS, 1 + max(self._blocks, default=0) // 16
        while bound < most and self._steps >= 0:
            if found := next(divisions(bound), None):
                return found
            step, bound = 2 * step, bound + step
        return None

    def _lower(self, better: Callable[[_Division], Iterator[_Division]], best: _Division) -> _Division:
        """Return the last of divisions of which each is better than the one before."""
        self._steps = MAX_STEPS
        while found := next(better(best), None):
            best = found
        return best

    def _divisions(self, rounds: Sequence[State], rank: int, stage: int) -> Iterator[_Division]:
        """Yield the most even divisions for some ends of rounds within bounds on the costs of ranks and of stages."""
        for ends in rounds:
            if self._steps < 0:
                return
            if found := self._divide(ends, rank, stage):
                yield found

    def _choose_rounds(self) -> list[State]:
        """Return the places where rounds end, after a 0, the most even rounds first."""
        count, between, ends = len(self._blocks), len(self._reverse) - 1, [*accumulate(self._blocks, initial=0)]
        places = [range(count + 1)] * between
        if comb(count, between) > MAX_ROUNDS:
            wide = int(MAX_ROUNDS ** (1 / between)) // 2
            middle = [bisect_left(ends, ends[-1] * k // (between + 1)) for k in range(1, between + 1)]
            places = [range(max(0, at - wide), min(count, at + wide) + 1) for at in middle]
        least = [sum(self._least[own[k]] for own in self._own) for k in range(between + 1)]
        choices = ((0, *cuts, count) for cuts in product(*places))
        found = [cuts for cuts in choices if all(b - a >= n for (a, b), n in zip(pairwise(cuts), least))]
        return sorted(found, key=lambda cuts: max(ends[b] - ends[a] for a, b in pairwise(cuts)))

    def _divide(self, cuts: State, most_rank: int, most_stage: int) -> _Division | None:
        """Return the most even division within bounds on the costs of ranks and of stages; None if there is none."""
        rounds = [self._blocks[a:b][:: -1 if back else 1] for (a, b), back in zip(pairwise(cuts), self._reverse)]
        costs = [[*accumulate(each, initial=0)] for each in rounds]
        later = [sum(self._least[own[k]] for own in self._own) for k in range(len(rounds))]
        begin = (0,) * len(rounds)
        reached = [{begin: _Reached(0, 0, 0, 0, begin)}]
        for left, own in zip(reversed(range(self._ranks)), self._own):
            later = [blocks - self._least[stage] for blocks, stage in zip(later, own)]
            last = [len(of_round) - 1 - blocks for of_round, blocks in zip(costs, later)]
            after: dict[State, _Reached] = {}
            for state, at in self._most_even(reached[-1], left + 1).items():
                needed = max(0, self._whole - left * most_rank - at.cost)
                for part in self._parts(costs, cuts, own, state, last, (needed, most_rank, most_stage), left == 0):
                    more = (part.cost**2, part.squares) if self._even_ranks else (part.squares, part.cost**2)
                    squares, others = at.squares + more[0], at.others + more[1]
                    way = _Reached(squares, others, at.places + part.places, at.cost + part.cost, state)
                    if part.state not in after or way < after[part.state]:
                        after[part.state] = way
                if self._steps < 0:
                    return None
            reached.append(after)
        return self._measure(self._counts(reached)) if reached[-1] else None

    def _most_even(self, states: dict[State, _Reached], ranks: int) -> dict[State, _Reached]:
        """Return the states that are most even if the ``ranks`` after them share the rest equally."""
        if len(states) <= MAX_STATES:
            return states

        parts = ranks * (1 if self._even_ranks else len(self._reverse))

        def squares(state: State) -> float:
            return states[state].squares + (self._whole - states[state].cost) ** 2 / parts

        return {state: states[state] for state in nsmallest(MAX_STATES, states, key=squares)}

    def _parts(
        self,
        costs: Sequence[Sequence[int]],
        cuts: State,
        own: Sequence[int],
        state: State,
        last: Sequence[int],
        bounds: tuple[int, int, int],
        ends: bool,
    ) -> list[_Part]:
        """Return what a rank may have after ``state``.

        Args:
            costs: of the first blocks of each round, by their number.
            cuts: ends of the rounds.
            own: stages of the rank.
            state: before the rank.
            last: most blocks of each round in the next state.
            bounds: least cost of the rank, most of the rank and of a stage.
            ends: it is the last rank, which has all other blocks.
        """
        (needed, most_rank, most_stage), parts = bounds, [_Part(0, 0, 0, ())]
        for k, (of_round, at, stage) in enumerate(zip(costs, state, own)):
            base, longer = of_round[at] - self._extra[stage], list[_Part]()
            for part in parts:
                low = last[k] if ends else at + self._least[stage]
                if k == len(own) - 1:
                    low = max(low, bisect_left(of_round, base + needed - part.cost))
                most = min(most_stage, most_rank - part.cost)
                high = min(last[k], bisect_right(of_round, base + most) - 1)
                self._steps -= 1 + max(0, high + 1 - low)
                if self._steps < 0:
                    return []
                for to in range(low, high + 1):
                    more = of_round[to] - base
                    place = cuts[k + 1] - at if self._reverse[k] else cuts[k] + to
                    reached = (*part.state, to)
                    longer.append(_Part(part.cost + more, part.squares + more**2, part.places + place, reached))
            parts = longer
        return parts

    def _counts(self, reached: Sequence[dict[State, _Reached]]) -> Counts:
        """Return the blocks of each stage, by the best way to the last state."""
        counts = [0] * len(self._extra)
        (state,) = reached[-1]
        for states, own in zip(reversed(reached), reversed(self._own)):
            before = states[state].before
            for stage, a, b in zip(own, before, state):
                counts[stage] = b - a
            state = before
        return counts

    def _measure(self, counts: Counts) -> _Division:
        """Return a division with its costs."""
        places, ends = [*accumulate(counts)], [*accumulate(self._blocks, initial=0)]
        costs = [ends[to] - ends[to - n] + extra for to, n, extra in zip(places, counts, self._extra)]
        ranks = [sum(costs[stage] for stage in own) for own in self._own]
        squares = sum(cost**2 for cost in costs), sum(cost**2 for cost in ranks), sum(places)
        return _Division(squares, counts, max(ranks), max(costs))
