"""Divide blocks of unequal cost over the stages of a pipeline.

Each rank has V stages. What a rank does beside its blocks, the output layer for example, counts for each of its stages
in equal parts: stages that cost the same then make ranks that cost the same. The cost of the largest stage is
minimised; of the divisions that do, the one with the smallest sum of squares over the stages is taken, and then that
with most blocks in later stages. With several stages per rank, blocks are then passed on from one stage to another
while that reduces the costs of the largest rank and of the largest stage, added up.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, permutations


def balanced_counts(blocks: Sequence[int], placement: Sequence[int], first: int, last: int) -> list[int]:
    """Return the number of blocks of each stage.

    Args:
        blocks: cost of each, whole numbers; at least the number of stages minus 2.
        placement: rank of every stage, V times each.
        first: further cost of the rank of the first stage, which may have no blocks.
        last: of the rank of the last stage, likewise.
    """
    per_rank = placement.count(placement[0])
    further = [first * (rank == placement[0]) + last * (rank == placement[-1]) for rank in placement]
    stages = _Stages([per_rank * total for total in accumulate(blocks, initial=0)], further)
    low = high = -(-(stages.costs[-1] + sum(further)) // len(placement))  # a tight bound leaves few divisions
    while stages.divide(high, max) is None:
        low, high = high + 1, high + max(1, (high - low + max(blocks)) // 8)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if stages.divide(middle, max) else (middle + 1, high)
    ends = stages.divide(high, lambda squares, cost: squares + cost**2) or []
    counts = [stop - start for start, stop in zip((0, *ends), ends)]
    return counts if per_rank == 1 else _even_ranks(blocks, placement, (first, last), counts)


@dataclass(frozen=True)
class _Stages:
    """Consecutive stages; all but the first and the last have a block."""

    # Of the first blocks, by their number.
    costs: list[int]
    # Of each stage, beside its blocks.
    further: list[int]

    def _least(self, stage: int) -> int:
        return int(0 < stage < len(self.further) - 1)

    def _possible_ends(self, bound: int) -> list[range]:
        """Return where each stage may end if no stage costs more than a bound."""
        blocks, latest, at = len(self.costs) - 1, [], 0
        behind = sum(map(self._least, range(len(self.further))))  # blocks that later stages need
        for stage, further in enumerate(self.further):
            behind -= self._least(stage)
            end = bisect_right(self.costs, self.costs[at] + bound - further) - 1
            at = min(max(end, at + self._least(stage)), blocks - behind)
            latest.append(at)
        ends, at = list[range](), blocks
        for stage in reversed(range(len(self.further))):
            ends.insert(0, range(at, latest[stage] + 1))
            start = bisect_left(self.costs, self.costs[at] + self.further[stage] - bound)
            at = min(start, at - self._least(stage))
        return ends

    def divide(self, bound: int, join: Callable[[int, int], int]) -> list[int] | None:
        """Return the ends of stages that cost no more than a bound and are joined to the smallest value."""
        best: dict[int, tuple[int, int, list[int]]] = {0: (0, 0, [])}
        for stage, possible in enumerate(self._possible_ends(bound)):
            after: dict[int, tuple[int, int, list[int]]] = {}
            for start, (value, places, ends) in best.items():
                for stop in range(max(possible.start, start + self._least(stage)), possible.stop):
                    cost = self.costs[stop] - self.costs[start] + self.further[stage]
                    if cost > bound:
                        break
                    way = join(value, cost), places + stop
                    if stop not in after or way < after[stop][:2]:
                        after[stop] = *way, [*ends, stop]
            best = after
        return best[len(self.costs) - 1][2] if len(self.costs) - 1 in best else None


def _even_ranks(
    blocks: Sequence[int], placement: Sequence[int], further: tuple[int, int], counts: list[int]
) -> list[int]:
    """Pass on blocks between stages, one by one through all stages in between, while ranks become more even."""
    costs, last = [*accumulate(blocks, initial=0)], len(counts) - 1

    def of(counts: Sequence[int]) -> tuple[int, int]:
        ends = [*accumulate(counts)]
        stages = [costs[stop] - costs[start] for start, stop in zip((0, *ends), ends)]
        stages[0], stages[-1], ranks = stages[0] + further[0], stages[-1] + further[1], [0] * (1 + max(placement))
        for rank, stage in zip(placement, stages):
            ranks[rank] += stage
        return max(ranks) + max(stages), sum(rank**2 for rank in ranks)

    best = of(counts)
    moves = [*permutations(range(last + 1), 2)]
    while True:
        for giver, taker in moves:
            if counts[giver] > (0 < giver < last):
                counts[giver], counts[taker] = counts[giver] - 1, counts[taker] + 1
                if (now := of(counts)) < best:
                    best = now
                    break
                counts[giver], counts[taker] = counts[giver] + 1, counts[taker] - 1
        else:
            return counts
