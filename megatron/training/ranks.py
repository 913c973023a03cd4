"""Gather times and memory of all ranks in one collective, and compare them."""

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
    """Times, traffic and memory of one rank."""

    seconds: float  # wall-clock time per step
    waits: Mapping[str, float]  # seconds per step blocked in collectives, by mesh axes; in the pipeline as BUBBLE
    phases: Mapping[str, float]  # seconds per step, by timer
    memory_bytes: int  # peak
    memory_total_bytes: int  # capacity
    sent: Mapping[str, float] = field(default_factory=dict)  # bytes sent per step, by mesh axes

    @property
    def own_seconds(self) -> float:
        """Seconds per step without the waits for other ranks."""
        return self.seconds - sum(self.waits.values())


def gather(mine: RankTimes, world: Group, device: torch.device) -> list[RankTimes]:
    """Return the statistics of all ranks, in rank order. One collective over ``world``.

    All ranks must have the same axes and phases.
    """
    if world.size == 1:
        return [mine]
    numbers = [
        mine.seconds,
        float(mine.memory_bytes),
        float(mine.memory_total_bytes),
        *mine.waits.values(),
        *mine.phases.values(),
        *mine.sent.values(),
    ]
    gathered = comm.all_gather(torch.tensor(numbers, dtype=torch.float64, device=device), world)
    ranks = []
    for seconds, used, total, *rest in gathered.view(world.size, -1).tolist():
        remaining = iter(rest)
        waits, phases, sent = (dict(zip(names, remaining)) for names in (mine.waits, mine.phases, mine.sent))
        ranks.append(RankTimes(seconds, waits, phases, int(used), int(total), sent))
    return ranks


@dataclass(frozen=True)
class Comparison:
    """Means and extremes over all ranks."""

    communication: Mapping[str, float]  # mean seconds per step blocked in collectives, by mesh axes
    communication_share: float  # of the step, 0 to 1
    bubble: float | None  # mean share of the step spent waiting for other pipeline stages; None without a pipeline
    data_wait: float  # seconds per step of the rank that waited longest for data
    phases: Mapping[str, tuple[float, ...]]  # seconds per step of every rank, by timer
    fullest_rank: int  # with the largest peak memory
    memory_bytes: int  # peak of the fullest rank
    memory_total_bytes: int  # capacity of the fullest rank
    slowest_rank: int  # with the largest own time
    slowest_excess: float  # its own time over the median rank's, less 1
    sent: Mapping[str, float]  # mean bytes sent per step, by mesh axes

    def timings(self, option: str) -> dict[str, Timing]:
        """Return every timer that ran, as ``--timing-log-option`` says: ``max``, ``minmax`` or ``all``."""
        timings = {}
        for name, by_rank in self.phases.items():
            if max(by_rank) > 0:
                several = len(by_rank) > 1
                shortest = min(by_rank) if several and option == "minmax" else None
                timings[name] = Timing(max(by_rank), shortest, by_rank if several and option == "all" else None)
        return timings


def compare(ranks: Sequence[RankTimes]) -> Comparison:
    """Compare the statistics of all ranks."""
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
