"""The slowest ranks, and where they are slow, with ``--log-slowest-ranks-interval``.

A rank's own time in a phase of the step is the time of the phase less its waits for other ranks inside. Ranks of one
pipeline stage have the same work, so each is compared with the median of its stage. One collective per report.
"""

from __future__ import annotations

import os
import socket
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import torch

from megatron.config.run import RunConfig
from megatron.config.text import counted
from megatron.distributed import comm
from megatron.distributed.comm import CommMeter
from megatron.distributed.mesh import Mesh
from megatron.distributed.timing import PHASES, Timers, profiler_range
from megatron.training.component import Component
from megatron.training.loggers.base import Metrics
from megatron.training.loggers.console import SLOW_RANK_EXCESS
from megatron.training.trainer import Trainer

PLACES = {
    "batch-generator": "data",
    "forward-compute": "forward",
    "backward-compute": "backward",
    "optimizer": "optimizer",
}
"""Phases that are compared, which do not overlap, and their names in a report."""

MOST_RANKS = 3
"""Ranks named in a report."""

PERSISTENT = 3
"""Reports in a row after which a slow rank is a warning."""


class PhaseTimers(Timers):
    """Times all phases, whatever is logged, and lets the meter count waits by phase."""

    def __init__(self, level: int, device: torch.device, meter: CommMeter) -> None:
        """Log the phases up to ``level``."""
        super().__init__(max(phase.level for phase in PHASES.values()), device)
        self.level = level
        self.total = dict.fromkeys(PLACES, 0.0)  # seconds since they were last taken, waits included
        self.meter = meter

    def __call__(self, name: str) -> AbstractContextManager[None]:
        """See :class:`Timers`."""
        span = self.watch.span(name, self._cuda)
        return profiler_range(name, _InPhase(self.meter, name, span) if name in PLACES else span)

    def read(self, steps: int) -> dict[str, float]:
        """See :class:`Timers`."""
        seconds = super().read(steps)
        for name in PLACES:
            self.total[name] += seconds[name] * steps
        return {name: each for name, each in seconds.items() if PHASES[name].level <= self.level}

    def take(self) -> list[float]:
        """Return the seconds of each of ``PLACES`` without waits, of the steps that were read since the last call."""
        waits, self.meter.by_phase = self.meter.by_phase, {}
        taken = [max(0.0, self.total[name] - waits.get(name, 0.0)) for name in PLACES]
        self.total = dict.fromkeys(PLACES, 0.0)
        return taken


class _InPhase(AbstractContextManager[None]):
    __slots__ = ("_meter", "_name", "_outer", "_span")

    def __init__(self, meter: CommMeter, name: str, span: AbstractContextManager[None]) -> None:
        self._meter, self._name, self._span = meter, name, span

    def __enter__(self) -> None:
        self._outer, self._meter.phase = self._meter.phase, self._name
        self._span.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._span.__exit__(kind, error, trace)
        self._meter.phase = self._outer


def step_timers(config: RunConfig, mesh: Mesh, device: torch.device) -> Timers:
    """Return the timers of a run."""
    level = config.logging.timing_log_level
    if config.reliability.log_slowest_ranks_interval is None or mesh.world.size == 1:
        return Timers(level, device)
    return PhaseTimers(level, device, mesh.meter)


@dataclass(frozen=True)
class SlowRank:
    """A rank that is slower than the median of its stage."""

    rank: int
    # Own time over the median, less 1.
    excess: float
    # Phase with the largest excess, of ``PLACES``' values.
    place: str


def find_slow_ranks(own: Sequence[Sequence[float]], stages: Sequence[int]) -> list[SlowRank]:
    """Return the slow ranks, the slowest first.

    Args:
        own: seconds of each rank in each of ``PLACES``.
        stages: pipeline stage of each rank.
    """
    found = []
    for stage in sorted(set(stages)):
        ranks = [rank for rank, each in enumerate(stages) if each == stage]
        totals = statistics.median(sum(own[rank]) for rank in ranks)
        medians = [statistics.median(column) for column in zip(*(own[rank] for rank in ranks))]
        for rank in ranks:
            excess = sum(own[rank]) / totals - 1.0 if totals > 0 else 0.0
            if excess >= SLOW_RANK_EXCESS:
                more = [seconds - median for seconds, median in zip(own[rank], medians)]
                found.append(SlowRank(rank, excess, [*PLACES.values()][more.index(max(more))]))
    return sorted(found, key=lambda each: -each.excess)


def describe(slow: Sequence[SlowRank], hosts: Sequence[str], reports: Mapping[int, int]) -> str:
    """Return a sentence on slow ranks: nodes all of whose ranks are slow, then others.

    Args:
        slow: the slow ranks, the slowest first; not empty.
        hosts: of each rank.
        reports: in how many reports in a row each rank is slow, by rank.
    """
    of_host = defaultdict(list)
    for each in slow:
        of_host[hosts[each.rank]].append(each)
    sizes = {host: hosts.count(host) for host in of_host}
    several = len(set(hosts)) > 1
    whole = [host for host, found in of_host.items() if several and len(found) == sizes[host] > 1]
    phrases = []
    for host in whole:
        found = of_host[host]
        place = statistics.mode(each.place for each in found)
        least, most = min(each.excess for each in found), max(each.excess for each in found)
        phrases.append(f"all {sizes[host]} ranks of {host} +{least:.0%} to +{most:.0%} in {place}")
    single = [each for each in slow if hosts[each.rank] not in whole]
    for each in single[:MOST_RANKS]:
        where = f" on {hosts[each.rank]}" if several else ""
        often = f" (for {counted(reports[each.rank], 'report')})" if reports[each.rank] > 1 else ""
        phrases.append(f"rank {each.rank}{where} +{each.excess:.0%} in {each.place}{often}")
    more = len(single) - MOST_RANKS
    return ", ".join([*phrases, *([f"{more} more"] if more > 0 else [])])


class SlowRanks(Component):
    """Reports the slowest ranks at the first log line after every N steps; those that stay slow as a warning."""

    def __init__(self, trainer: Trainer, timers: PhaseTimers, interval: int) -> None:
        """Report every ``interval`` steps."""
        self._trainer, self._timers, self._interval = trainer, timers, interval
        self._hosts: list[str] = []
        self._reports: dict[int, int] = {}  # in how many reports in a row a rank is slow
        self._last = 0  # step of the last report

    @classmethod
    def create(cls, trainer: Trainer) -> Self | None:
        """See :class:`Feature`."""
        interval, timers = trainer.config.reliability.log_slowest_ranks_interval, trainer.timers
        return cls(trainer, timers, interval) if interval is not None and isinstance(timers, PhaseTimers) else None

    def on_train_start(self) -> None:
        """Gather the names of the machines."""
        host = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
        self._hosts = comm.all_gather_objects(host, self._trainer.mesh.world)
        self._last = self._trainer.iteration

    def metrics(self) -> Metrics:
        """Gather and report the times of all ranks, if that is due; collective then."""
        step, mesh = self._trainer.iteration, self._trainer.mesh
        if step - self._last < self._interval:
            return {}
        row: list[Any] = [float(mesh.coordinate["pp"]), *self._timers.take()]
        with mesh.world.meter.paused():
            sent = torch.tensor(row, dtype=torch.float64, device=self._trainer.device)
            rows = comm.all_gather(sent, mesh.world).view(mesh.world.size, -1).tolist()
        slow = find_slow_ranks([each[1:] for each in rows], [int(each[0]) for each in rows])
        self._reports = {each.rank: self._reports.get(each.rank, 0) + 1 for each in slow}
        first, self._last = self._last + 1, step
        if slow:
            stays = max(self._reports.values()) >= PERSISTENT
            text = f"slowest ranks in steps {first} to {step}: {describe(slow, self._hosts, self._reports)}"
            (self.log.warning if stays else self.log.note)(text)
        return {}
