"""What every rank has to say of the last steps, in one gather: the fullest, the slowest, and who waited for whom."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from megatron.parallel import comm
from megatron.parallel.comm import BUBBLE, Group
from megatron.training.records import Timing


@dataclass(frozen=True)
class RankTimes:
    """One rank's account.

    Attributes:
        seconds: per step, wall clock.
        waits: seconds per step in which a collective stopped it, by the axes of the grid; as ``BUBBLE``, those in
            which it waited for others of its pipeline.
        phases: seconds per step, by timer.
        memory_bytes: peak use.
        memory_total_bytes: capacity.
        sent: bytes per step that it sends, by the axes of the grid.
    """

    seconds: float
    waits: Mapping[str, float]
    phases: Mapping[str, float]
    memory_bytes: int
    memory_total_bytes: int
    sent: Mapping[str, float] = field(default_factory=dict)

    @property
    def own_seconds(self) -> float:
        """Per step, without what it waited for others."""
        return self.seconds - sum(self.waits.values())


def gather(mine: RankTimes, world: Group, device: torch.device) -> list[RankTimes]:
    """The accounts of all ranks, in rank order; one collective. All have the same axes and phases."""
    numbers = [
        mine.seconds,
        float(mine.memory_bytes),
        float(mine.memory_total_bytes),
        *mine.waits.values(),
        *mine.phases.values(),
        *mine.sent.values(),
    ]
    if world.size == 1:
        return [mine]
    flat = comm.all_gather(torch.tensor(numbers, dtype=torch.float64, device=device), world)
    return [_account(row, mine) for row in flat.view(world.size, -1).tolist()]


def _account(numbers: Sequence[float], like: RankTimes) -> RankTimes:
    """An account out of its numbers, under the names that this rank has."""
    seconds, used, total, *rest = numbers
    left = iter(rest)
    waits, phases, sent = (dict(zip(names, left)) for names in (like.waits, like.phases, like.sent))
    return RankTimes(seconds, waits, phases, int(used), int(total), sent)


@dataclass(frozen=True)
class Comparison:
    """The ranks beside each other.

    Attributes:
        communication: mean over the ranks of the seconds per step in which collectives stopped them, by axes.
        communication_share: of the step, 0 to 1.
        bubble: mean over the ranks of the time in which they waited for others of their pipeline, of the step; None
            without a pipeline.
        data_wait: seconds per step of the rank that waited longest for its data.
        phases: seconds per step of every rank, by timer.
        fullest_rank: with the largest peak use of memory.
        memory_bytes: its peak use.
        memory_total_bytes: its capacity.
        slowest_rank: with the largest own time.
        slowest_excess: how much longer its own time is than the median rank's, as a share of that.
        sent: mean over the ranks of the bytes per step that they send, by axes.
    """

    communication: Mapping[str, float]
    communication_share: float
    bubble: float | None
    data_wait: float
    phases: Mapping[str, tuple[float, ...]]
    fullest_rank: int
    memory_bytes: int
    memory_total_bytes: int
    slowest_rank: int
    slowest_excess: float
    sent: Mapping[str, float]

    def timings(self, option: str) -> dict[str, Timing]:
        """What ``--timing-log-option`` asks for of each timer that ran: ``max``, ``minmax`` or ``all``."""
        return {name: _timing(times, option) for name, times in self.phases.items() if max(times) > 0}


def _timing(by_rank: tuple[float, ...], option: str) -> Timing:
    """One rank alone has nothing but a longest time."""
    several = len(by_rank) > 1
    shortest = min(by_rank) if several and option == "minmax" else None
    return Timing(max(by_rank), shortest, by_rank if several and option == "all" else None)


def compare(ranks: Sequence[RankTimes]) -> Comparison:
    """Compare the accounts of all ranks."""
    own = [rank.own_seconds for rank in ranks]
    slowest = max(range(len(ranks)), key=own.__getitem__)
    fullest = max(range(len(ranks)), key=lambda r: ranks[r].memory_bytes)
    median = statistics.median(own)
    step = statistics.fmean(rank.seconds for rank in ranks)
    waits = {axes: statistics.fmean(rank.waits[axes] for rank in ranks) for axes in ranks[0].waits}
    communication = {axes: seconds for axes, seconds in waits.items() if axes != BUBBLE}
    phases = {name: tuple(rank.phases[name] for rank in ranks) for name in ranks[0].phases}
    return Comparison(
        communication=communication,
        communication_share=sum(communication.values()) / step,
        bubble=waits[BUBBLE] / step if BUBBLE in waits else None,
        data_wait=max(phases.get("batch-generator", (0.0,))),
        phases=phases,
        fullest_rank=fullest,
        memory_bytes=ranks[fullest].memory_bytes,
        memory_total_bytes=ranks[fullest].memory_total_bytes,
        slowest_rank=slowest,
        slowest_excess=own[slowest] / median - 1.0 if median > 0 else 0.0,
        sent={axes: statistics.fmean(rank.sent[axes] for rank in ranks) for axes in ranks[0].sent},
    )
