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
from itertools import accumulate, permutations


def balanced_counts(blocks: Sequence[int], placement: Sequence[int], first: int, last: int) -> list[int]:
    """Return the number of blocks of each stage.

    Args:
        blocks: cost of each, whole numbers; at least the number of stages minus 2.
        placement: rank of every stage, V times each.
        first: further cost of the rank of the first stage, which may have no blocks.
        last: of the rank of the last stage, likewise.
    """
    stages, per_rank = len(placement), placement.count(placement[0])
    further = [first * (rank == placement[0]) + last * (rank == placement[-1]) for rank in placement]
    costs = [per_rank * total for total in accumulate(blocks, initial=0)]
    least = [int(0 < stage < stages - 1) for stage in range(stages)]
    behind = [sum(least[stage + 1 :]) for stage in range(stages)]  # blocks that later stages need

    def latest(bound: int) -> list[int]:
        """Return the ends of stages that take all blocks they may, within a bound on their costs."""
        ends, at = [], 0
        for stage in range(stages):
            end = bisect_right(costs, costs[at] + bound - further[stage]) - 1
            ends.append(at := min(max(end, at + least[stage]), len(blocks) - behind[stage]))
        return ends

    def divide(bound: int, join: Callable[[int, int], int]) -> tuple[int, list[int]] | None:
        """Return the smallest value that costs within a bound are joined to, and the ends of their stages."""
        ends_at_latest, at = latest(bound), len(blocks)
        ranges: list[range] = []
        for stage in reversed(range(stages)):
            ranges.insert(0, range(at, ends_at_latest[stage] + 1))
            at = min(bisect_left(costs, costs[at] + further[stage] - bound), at - least[stage])
        best: dict[int, tuple[int, int, list[int]]] = {0: (0, 0, [])}
        for stage, stops in enumerate(ranges):
            after: dict[int, tuple[int, int, list[int]]] = {}
            for start, (value, places, ends) in best.items():
                for stop in range(max(stops.start, start + least[stage]), stops.stop):
                    cost = costs[stop] - costs[start] + further[stage]
                    if cost > bound:
                        break
                    way = join(value, cost), places + stop
                    if stop not in after or way < after[stop][:2]:
                        after[stop] = *way, [*ends, stop]
            best = after
        return (best[len(blocks)][0], best[len(blocks)][2]) if len(blocks) in best else None

    low = high = -(-(costs[-1] + sum(further)) // stages)  # a bound that is tight leaves few divisions
    while divide(high, max) is None:
        low, high = high + 1, high + max(1, (high - low + max(blocks)) // 8)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if divide(middle, max) else (middle + 1, high)
    found = divide(high, lambda squares, cost: squares + cost**2)
    ends = [] if found is None else found[1]
    counts = [stop - start for start, stop in zip((0, *ends), ends)]
    return counts if per_rank == 1 else _even_ranks(blocks, placement, (first, last), counts)


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
