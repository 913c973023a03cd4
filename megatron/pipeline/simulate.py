"""Simulate programs: when each action and transfer starts and ends, idle time and memory.

The model is that of :mod:`megatron.pipeline.communication`, with a duration for every action and transfer. Two times
are distinguished. The *makespan* is from the first start on any rank to the last end on any: the time of a step when
ranks synchronise between steps, as for a gradient norm. The *span* of a rank is from its own first start to its own
last end; papers quote the longest of these.

Times are in seconds, or any other unit if all use it. Integers and fractions stay exact.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from megatron.pipeline.actions import (
    BACKWARD,
    COMPUTE_KINDS,
    FORWARD,
    INPUT,
    RECV_B,
    RECV_F,
    SEND_B,
    SEND_F,
    WEIGHT,
    Action,
    PipelineSchedule,
    ScheduleError,
)
from megatron.pipeline.communication import channel_of, peer_action


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
        """Check that every stage has costs, and that they are finite.

        Raises:
            ScheduleError: if a tuple does not have ``stages`` entries, or a cost is not a finite number >= 0.
        """
        for name in ("forward", "input", "weight", "activation", "weight_memory"):
            values = getattr(self, name)
            if len(values) != stages and (values or name in ("forward", "input", "weight")):
                raise ScheduleError(f"the costs have '{name}' for {len(values)} stages, and the schedule has {stages}")
            _require_amounts(name, values)
        _require_amounts("latency", (self.latency,))
        _require_amounts("transfer", (self.transfer,))


def _require_amounts(name: str, values: tuple[float, ...]) -> None:
    for value in values:
        if not 0 <= value < math.inf:
            raise ScheduleError(f"the costs have '{name}' {value}: each must be a finite number >= 0")


class Interval(NamedTuple):
    """A rank computes ``action`` from ``start`` to ``end``."""

    action: Action
    start: float
    end: float


class Transfer(NamedTuple):
    """The tensor of a ``SEND_F`` or ``SEND_B`` is transferred from rank ``source`` to rank ``target``.

    It is ready at ``sent``; the transfer runs from ``start``, when the receive is posted and the channel is free, to
    ``end``.
    """

    action: Action
    source: int
    target: int
    sent: float
    start: float
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
        awaited = {_consumer(transfer.action): transfer for transfer in self.transfers}
        return tuple(tuple(_exposed(intervals, self.start, awaited)) for intervals in self.intervals)

    @property
    def exposed_time(self) -> tuple[float, ...]:
        """Total of ``exposed`` for each rank."""
        return tuple(sum(end - start for start, end in waits) for waits in self.exposed)

    @cached_property
    def memory(self) -> tuple[tuple[HeldMemory, ...], ...]:
        """Changes of memory, by rank."""
        return tuple(tuple(self._held(intervals)) for intervals in self.intervals)

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

    def _held(self, intervals: tuple[Interval, ...]) -> Iterator[HeldMemory]:
        activations: float = 0
        weights: float = 0
        for (stage, kind, _), start, end in intervals:
            activation = self.activation[stage] if self.activation else 1
            weight = self.weight_memory[stage] if self.weight_memory else 1
            activations += {FORWARD: activation, WEIGHT: 0}.get(kind, -activation)
            weights += {INPUT: weight, WEIGHT: -weight}.get(kind, 0)
            yield HeldMemory(start if kind == FORWARD else end, activations, weights)


def _idle(busy: float, whole: float) -> float:
    return (whole - busy) / whole if whole else 0


def _consumer(send: Action) -> tuple[int, str, int]:
    """Return stage, kind and micro-batch of the action that waits for the tensor of ``send``; ``I`` counts as ``B``."""
    if send.kind == SEND_F:
        return send.stage + 1, FORWARD, send.microbatch
    return send.stage - 1, BACKWARD, send.microbatch


def _exposed(
    intervals: tuple[Interval, ...], start: float, awaited: dict[tuple[int, str, int], Transfer]
) -> Iterator[tuple[float, float]]:
    free = start
    for interval in intervals:
        stage, kind, microbatch = interval.action
        transfer = awaited.get((stage, BACKWARD if kind == INPUT else kind, microbatch))
        if transfer is not None:
            begin, end = max(free, transfer.sent), min(interval.start, transfer.end)
            if begin < end:
                yield begin, end
        free = interval.end


def simulate(program: PipelineSchedule, costs: StageCosts) -> Timeline:
    """Return the timeline of ``program`` if every action and transfer starts as early as possible.

    Each rank is followed until it needs a tensor whose transfer cannot be timed yet, and resumed when it can. The
    result does not depend on the order of ranks, and every action is processed once.

    Args:
        program: valid, or at least with communication.
        costs: of as many stages.

    Raises:
        ScheduleError: if the costs are for another number of stages, or the program deadlocks.
    """
    placement = program.placement
    costs.check(len(placement))
    network = _Network(costs.latency + costs.transfer)
    done: list[list[Interval]] = [[] for _ in program.ranks]
    ranks = [
        _follow(actions, _action_costs(actions, placement, costs, network), network, done[rank])
        for rank, actions in enumerate(program.ranks)
    ]
    network.runnable.extend(range(len(ranks)))
    while network.runnable:
        rank = network.runnable.pop()
        tensor = next(ranks[rank], None)
        if tensor is not None:
            network.waiting[tensor] = rank
    for tensor, rank in network.waiting.items():
        raise ScheduleError(
            f"deadlock: rank {rank} waits for {Action(*tensor)} forever",
            "let add_communication place the sends and receives, and validate the program",
        )
    transfers = tuple(transfer for channel in network.channels.values() for transfer in channel.transfers)
    return Timeline(program.name, tuple(map(tuple, done)), transfers, costs.activation, costs.weight_memory)


_Tensor = tuple[int, str, int]
"""A transferred tensor, named by its receive."""


@dataclass
class _Channel:
    """One direction between two ranks: tensors sent, times at which receives were posted, and completed transfers."""

    source: int
    target: int
    sent: list[tuple[Action, float]] = field(default_factory=list)
    expected: list[float] = field(default_factory=list)
    transfers: list[Transfer] = field(default_factory=list)


class _Network:
    """The channels between ranks, arrived tensors, and waiting ranks."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.channels: dict[tuple[int, int], _Channel] = {}
        self.arrivals: dict[_Tensor, float] = {}  # end of each transfer that can be timed
        self.waiting: dict[_Tensor, int] = {}  # rank that is blocked on a tensor
        self.runnable: list[int] = []  # ranks that can continue

    def channel(self, source: int, target: int) -> _Channel:
        return self.channels.setdefault((source, target), _Channel(source, target))

    def post(self, channel: _Channel, action: Action, now: float) -> None:
        """Post a send or a receive, and time the transfer if it completes one."""
        if action.kind in (SEND_F, SEND_B):
            channel.sent.append((action, now))
        else:
            channel.expected.append(now)
        number = len(channel.transfers)
        if number < len(channel.sent) and number < len(channel.expected):
            self._move(channel, *channel.sent[number], channel.expected[number])

    def _move(self, channel: _Channel, action: Action, sent: float, expected: float) -> None:
        free = channel.transfers[-1].end if channel.transfers else 0
        start = max(sent, expected, free)
        end = start + self.seconds
        channel.transfers.append(Transfer(action, channel.source, channel.target, sent, start, end))
        tensor = peer_action(action)
        self.arrivals[tensor] = end
        rank = self.waiting.pop(tensor, None)
        if rank is not None:
            self.runnable.append(rank)


_ActionCosts = dict[tuple[int, str], tuple[float, str | None, _Channel | None]]
"""By stage and kind: seconds, the kind of receive it waits for if any, the channel it uses if any."""


def _action_costs(
    actions: tuple[Action, ...], placement: tuple[int, ...], costs: StageCosts, network: _Network
) -> _ActionCosts:
    costs_by_kind: _ActionCosts = {}
    for stage, kind in {(action.stage, action.kind) for action in actions}:
        if kind in COMPUTE_KINDS:
            costs_by_kind[stage, kind] = costs.seconds(stage, kind), _required_receive(stage, kind, placement), None
        else:
            costs_by_kind[stage, kind] = 0, None, network.channel(*channel_of(Action(stage, kind, 0), placement))
    return costs_by_kind


def _required_receive(stage: int, kind: str, placement: tuple[int, ...]) -> str | None:
    """Return the kind of receive that a computing action waits for; None if all its inputs are on its rank."""
    if kind == FORWARD:
        return RECV_F if stage > 0 and placement[stage - 1] != placement[stage] else None
    last = stage == len(placement) - 1
    return None if kind == WEIGHT or last or placement[stage + 1] == placement[stage] else RECV_B


def _follow(
    actions: tuple[Action, ...], costs_by_kind: _ActionCosts, network: _Network, done: list[Interval]
) -> Iterator[_Tensor]:
    """Time the actions of a rank; yield each tensor that must arrive before it can continue."""
    now: float = 0
    for action in actions:
        stage, kind, microbatch = action
        seconds, receive, channel = costs_by_kind[stage, kind]
        if channel is not None:
            network.post(channel, action, now)
            continue
        if receive is not None:
            tensor = (stage, receive, microbatch)
            if tensor not in network.arrivals:
                yield tensor
            now = max(now, network.arrivals[tensor])
        done.append(Interval(action, now, now + seconds))
        now += seconds
