"""Simulate programs: when each action and transfer starts and ends, idle time and memory.

The model is that of :mod:`megatron.pipeline.communication`, with a duration for every action and transfer. Two times
are distinguished. The *makespan* is from the first start on any rank to the last end on any: the time of a step when
ranks synchronise between steps, as for a gradient norm. The *span* of a rank is from its own first start to its own
last end; papers quote the longest of these.

Times are in seconds, or any other unit if all use it. Integers and fractions stay exact.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from megatron.pipeline.actions import (
    BACKWARD,
    COMMUNICATION_KINDS,
    COMPUTE_KINDS,
    FORWARD,
    INPUT,
    SEND_B,
    SEND_F,
    WEIGHT,
    Action,
    PipelineSchedule,
    ScheduleError,
)
from megatron.pipeline.communication import RECEIVE_FOR, channel_of, execution_order, peer_action, required_receive


@dataclass(frozen=True)
class StageCosts:
    """Durations and memory of the stages of a pipeline."""

    forward: tuple[float, ...]  # seconds of F, by stage
    input: tuple[float, ...]  # seconds of I, by stage
    weight: tuple[float, ...]  # seconds of W, by stage; B takes those of I and W
    latency: float = 0  # seconds of a transfer, independent of its size
    transfer: float = 0  # seconds of a transfer due to its size
    # Memory of one micro-batch from the start of F to the end of B or I, by stage, in any unit; ``()``: one each.
    activation: tuple[float, ...] = ()
    weight_memory: tuple[float, ...] = ()  # memory from then to the end of W; ``()``: one each

    @classmethod
    def uniform(
        cls,
        stages: int,
        forward: float = 1,
        input: float = 1,
        weight: float = 1,
        latency: float = 0,
        transfer: float = 0,
    ) -> StageCosts:
        """Return equal costs for ``stages`` stages."""
        return cls((forward,) * stages, (input,) * stages, (weight,) * stages, latency, transfer)

    def seconds(self, stage: int, kind: str) -> float:
        """Return the duration of a computing action of ``stage``."""
        if kind == BACKWARD:
            return self.input[stage] + self.weight[stage]
        return {FORWARD: self.forward, INPUT: self.input, WEIGHT: self.weight}[kind][stage]

    def check(self, stages: int) -> None:
        """Raise a ``ScheduleError`` unless every stage has costs, and all are finite numbers >= 0."""
        for name in ("forward", "input", "weight", "activation", "weight_memory"):
            values = getattr(self, name)
            if len(values) != stages and (values or name in ("forward", "input", "weight")):
                raise ScheduleError(f"the costs have '{name}' for {len(values)} stages, and the schedule has {stages}")
        for name, value in vars(self).items():
            for amount in value if isinstance(value, tuple) else (value,):
                if not 0 <= amount < math.inf:
                    raise ScheduleError(f"the costs have '{name}' {amount}: each must be a finite number >= 0")


class Interval(NamedTuple):
    """A rank computes ``action`` from ``start`` to ``end``."""

    action: Action
    start: float
    end: float


class Transfer(NamedTuple):
    """The tensor of a ``SEND_F`` or ``SEND_B`` is transferred from rank ``source`` to rank ``target``."""

    action: Action
    source: int
    target: int
    sent: float  # time at which the tensor is ready
    start: float  # time at which the receive is posted and the channel is free
    end: float


class HeldMemory(NamedTuple):
    """Memory of a rank from ``time`` on: ``activations`` for B and I, ``weights`` for W."""

    time: float
    activations: float
    weights: float


@dataclass(frozen=True)
class Timeline:
    """Actions and transfers with their times, simulated or measured."""

    name: str  # of the schedule
    intervals: tuple[tuple[Interval, ...], ...]  # of each rank, in order of time, not overlapping
    transfers: tuple[Transfer, ...] = ()  # in any order; empty if not measured
    activation: tuple[float, ...] = ()  # memory by stage, as in :class:`StageCosts`
    weight_memory: tuple[float, ...] = ()  # memory by stage, as in :class:`StageCosts`

    @cached_property
    def start(self) -> float:
        """First start on any rank; 0 without actions."""
        return min((intervals[0].start for intervals in self.intervals if intervals), default=0)

    @cached_property
    def end(self) -> float:
        """Last end on any rank; 0 without actions."""
        return max((intervals[-1].end for intervals in self.intervals if intervals), default=0)

    @property
    def makespan(self) -> float:
        """Time from the first start on any rank to the last end on any."""
        return self.end - self.start

    @cached_property
    def spans(self) -> tuple[float, ...]:
        """Time from each rank's first start to its last end."""
        return tuple(intervals[-1].end - intervals[0].start if intervals else 0 for intervals in self.intervals)

    @property
    def span(self) -> float:
        """Longest of ``spans``."""
        return max(self.spans, default=0)

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """Computing time of each rank."""
        return tuple(sum(end - start for _, start, end in intervals) for intervals in self.intervals)

    @property
    def bubble(self) -> float:
        """Idle fraction of all ranks' time within the makespan, 0 to 1."""
        return _idle(sum(self.busy), len(self.busy) * self.makespan)

    @property
    def span_bubble(self) -> float:
        """Idle fraction with the longest span as each rank's time, as quoted in papers."""
        return _idle(sum(self.busy), len(self.busy) * self.span)

    @cached_property
    def exposed(self) -> tuple[tuple[tuple[float, float], ...], ...]:
        """Idle times of each rank while the tensor it waits for is in transfer.

        The rest of its idle time is due to other ranks' computing, or to the end of the step.
        """
        transfers = {peer_action(transfer.action): transfer for transfer in self.transfers}
        exposed = []
        for intervals in self.intervals:
            waits = []
            free = self.start
            for (stage, kind, microbatch), start, end in intervals:
                transfer = transfers.get(Action(stage, RECEIVE_FOR.get(kind, kind), microbatch))
                if transfer is not None and max(free, transfer.sent) < min(start, transfer.end):
                    waits.append((max(free, transfer.sent), min(start, transfer.end)))
                free = end
            exposed.append(tuple(waits))
        return tuple(exposed)

    @cached_property
    def memory(self) -> tuple[tuple[HeldMemory, ...], ...]:
        """Changes of memory, by rank."""
        changes = []
        for intervals in self.intervals:
            held = [HeldMemory(self.start, 0, 0)]
            for (stage, kind, _), start, end in intervals:
                activation = self.activation[stage] if self.activation else 1
                weight = self.weight_memory[stage] if self.weight_memory else 1
                _, activations, weights = held[-1]
                activations += {FORWARD: activation, WEIGHT: 0}.get(kind, -activation)
                weights += {INPUT: weight, WEIGHT: -weight}.get(kind, 0)
                held.append(HeldMemory(start if kind == FORWARD else end, activations, weights))
            changes.append(tuple(held[1:]))
        return tuple(changes)

    @property
    def peak_memory(self) -> tuple[float, ...]:
        """Maximum memory for B, I and W together, by rank."""
        return tuple(max((held.activations + held.weights for held in rank), default=0) for rank in self.memory)

    @property
    def peak_activations(self) -> tuple[float, ...]:
        """Maximum memory for B and I, by rank."""
        return tuple(max((held.activations for held in rank), default=0) for rank in self.memory)

    @property
    def peak_weights(self) -> tuple[float, ...]:
        """Maximum memory for W, by rank."""
        return tuple(max((held.weights for held in rank), default=0) for rank in self.memory)


def _idle(busy: float, whole: float) -> float:
    return (whole - busy) / whole if whole else 0


def simulate(program: PipelineSchedule, costs: StageCosts) -> Timeline:
    """Return the timeline of ``program`` if every action and transfer starts as early as possible.

    A receive precedes its consumer, and the receives of a channel are in the order of its sends, as
    :func:`megatron.pipeline.validate.validate_program` proves.

    Raises:
        ScheduleError: if the costs are for another number of stages, or the program deadlocks.
    """
    placement = program.placement
    costs.check(len(placement))
    needs = {
        (stage, kind): (costs.seconds(stage, kind), required_receive(stage, kind, placement))
        for stage in range(len(placement))
        for kind in COMPUTE_KINDS
    }
    kinds = {(a.stage, a.kind) for actions in program.ranks for a in actions if a.kind in COMMUNICATION_KINDS}
    edges = {(stage, kind): channel_of(Action(stage, kind, 0), placement) for stage, kind in kinds}
    channels = {edge: _Channel(*edge, costs.latency + costs.transfer) for edge in sorted(edges.values())}
    arrivals: dict[Action, float] = {}  # by RECV, end of each transfer
    intervals: list[list[Interval]] = [[] for _ in program.ranks]
    clock: list[float] = [0] * len(program.ranks)
    for rank, action in execution_order(program):
        stage, kind, microbatch = action
        if kind in COMMUNICATION_KINDS:
            transfer = channels[edges[stage, kind]].post(action, clock[rank])
            if transfer is not None:
                arrivals[peer_action(transfer.action)] = transfer.end
            continue
        seconds, needed = needs[stage, kind]
        start = clock[rank]
        if needed is not None:
            start = max(start, arrivals[Action(stage, needed, microbatch)])
        clock[rank] = start + seconds
        intervals[rank].append(Interval(action, start, clock[rank]))
    transfers = tuple(transfer for channel in channels.values() for transfer in channel.transfers)
    return Timeline(program.name, tuple(map(tuple, intervals)), transfers, costs.activation, costs.weight_memory)


class _Channel:
    """One direction between two ranks: what was posted, and the transfers that can be timed."""

    def __init__(self, source: int, target: int, seconds: float) -> None:
        self.transfers: list[Transfer] = []
        self._source, self._target, self._seconds = source, target, seconds
        self._sends: list[tuple[Action, float]] = []
        self._receives: list[float] = []

    def post(self, action: Action, now: float) -> Transfer | None:
        """Post a send or a receive, and return the transfer if that completes one."""
        if action.kind in (SEND_F, SEND_B):
            self._sends.append((action, now))
        else:
            self._receives.append(now)
        number = len(self.transfers)
        if number == min(len(self._sends), len(self._receives)):
            return None
        send, sent = self._sends[number]
        free = self.transfers[-1].end if self.transfers else 0
        start = max(sent, self._receives[number], free)
        transfer = Transfer(send, self._source, self._target, sent, start, start + self._seconds)
        self.transfers.append(transfer)
        return transfer
