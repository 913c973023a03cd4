"""A clock for programs: when each action and transfer starts and ends, and what follows from that.

The model is that of :mod:`megatron.pipeline.comms`, with a duration for every action and every transfer. Two times are
told apart. The *makespan* runs from the first start on any rank to the last end on any: with a gradient norm over
all ranks, or any other step that starts together, this is what a run waits for. The *span* of a rank runs from its own
first start to its own last end; papers quote the longest of these.

Times are seconds, or any other unit if all are in it. Integers and fractions stay exact.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from megatron.pipeline.actions import (
    BACKWARD,
    COMPUTE,
    FORWARD,
    INPUT,
    RECV_B,
    RECV_F,
    SEND_B,
    SEND_F,
    WEIGHT,
    Action,
    Schedule,
    ScheduleError,
)
from megatron.pipeline.comms import channel_of, other_end


@dataclass(frozen=True)
class Costs:
    """What the stages of a pipeline take.

    Attributes:
        forward: seconds of F, by stage.
        input: seconds of I, by stage.
        weight: seconds of W, by stage; B takes those of I and W.
        latency: seconds of a transfer whatever its size.
        transfer: seconds of a transfer that its size takes.
        activation: memory that one micro-batch holds from the start of F to the end of B or I, by stage, in any unit;
            ``()``: one each.
        weight_memory: what it holds from then on to the end of W; ``()``: one each.
    """

    forward: tuple[float, ...]
    input: tuple[float, ...]
    weight: tuple[float, ...]
    latency: float = 0
    transfer: float = 0
    activation: tuple[float, ...] = ()
    weight_memory: tuple[float, ...] = ()

    @classmethod
    def uniform(
        cls,
        stages: int,
        forward: float = 1,
        input: float = 1,
        weight: float = 1,
        latency: float = 0,
        transfer: float = 0,
    ) -> Costs:
        """The same for each of ``stages`` stages."""
        return cls((forward,) * stages, (input,) * stages, (weight,) * stages, latency, transfer)

    def seconds(self, stage: int, kind: str) -> float:
        """How long ``stage`` takes for an action of one of the kinds that compute."""
        if kind == BACKWARD:
            return self.input[stage] + self.weight[stage]
        return {FORWARD: self.forward, INPUT: self.input, WEIGHT: self.weight}[kind][stage]

    def check(self, stages: int) -> None:
        """See that every stage has its costs, and that they can be added up.

        Raises:
            ScheduleError: when a tuple has another length than ``stages``, or some cost is no finite number from 0 on.
        """
        for name in ("forward", "input", "weight", "activation", "weight_memory"):
            values = getattr(self, name)
            if len(values) != stages and (values or name in ("forward", "input", "weight")):
                raise ScheduleError(f"the costs say '{name}' of {len(values)} stages, and the schedule has {stages}")
            _require_amounts(name, values)
        _require_amounts("latency", (self.latency,))
        _require_amounts("transfer", (self.transfer,))


def _require_amounts(name: str, values: tuple[float, ...]) -> None:
    for value in values:
        if not 0 <= value < math.inf:
            raise ScheduleError(f"the costs say '{name}' {value}: each is a number from 0 on, and finite")


class Interval(NamedTuple):
    """A rank computes ``action`` from ``start`` to ``end``."""

    action: Action
    start: float
    end: float


class Transfer(NamedTuple):
    """The tensor of a ``SEND_F`` or ``SEND_B`` goes from rank ``source`` to rank ``target``.

    It is ready at ``sent``, and moves from ``start``, when the receive is posted too and the channel is free, to
    ``end``.
    """

    action: Action
    source: int
    target: int
    sent: float
    start: float
    end: float


class Held(NamedTuple):
    """What a rank keeps from ``time`` on: ``activations`` for B and I, ``weights`` for W."""

    time: float
    activations: float
    weights: float


@dataclass(frozen=True)
class Timeline:
    """What happened when, simulated or measured.

    Attributes:
        name: of the schedule.
        intervals: of each rank, in order of time, none overlapping.
        transfers: in no particular order; empty where they were not measured.
        activation: memory by stage, as in :class:`Costs`; ``()``: one each.
        weight_memory: the same.
    """

    name: str
    intervals: tuple[tuple[Interval, ...], ...]
    transfers: tuple[Transfer, ...] = ()
    activation: tuple[float, ...] = ()
    weight_memory: tuple[float, ...] = ()

    @cached_property
    def start(self) -> float:
        """First start on any rank; 0 when nothing happens."""
        return min((intervals[0].start for intervals in self.intervals if intervals), default=0)

    @cached_property
    def end(self) -> float:
        """Last end on any rank; 0 when nothing happens."""
        return max((intervals[-1].end for intervals in self.intervals if intervals), default=0)

    @property
    def makespan(self) -> float:
        """From the first start on any rank to the last end on any."""
        return self.end - self.start

    @cached_property
    def spans(self) -> tuple[float, ...]:
        """From each rank's first start to its last end."""
        return tuple(intervals[-1].end - intervals[0].start if intervals else 0 for intervals in self.intervals)

    @property
    def span(self) -> float:
        """The longest of ``spans``."""
        return max(self.spans, default=0)

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """How long each rank computes."""
        return tuple(sum(end - start for _, start, end in intervals) for intervals in self.intervals)

    @property
    def bubble(self) -> float:
        """Part of all ranks' time, each from ``start`` to ``end``, in which they do not compute; 0 to 1."""
        return _idle(sum(self.busy), len(self.busy) * self.makespan)

    @property
    def span_bubble(self) -> float:
        """The same when each rank's time is the longest span, as papers quote it."""
        return _idle(sum(self.busy), len(self.busy) * self.span)

    @cached_property
    def exposed(self) -> tuple[tuple[tuple[float, float], ...], ...]:
        """By rank, the times at which it idles while the tensor it waits for was sent and is not there yet.

        The rest of its idle time is the other rank's computing, or the end of the step.
        """
        awaited = {_consumer(transfer.action): transfer for transfer in self.transfers}
        return tuple(tuple(_exposed(intervals, self.start, awaited)) for intervals in self.intervals)

    @property
    def exposed_time(self) -> tuple[float, ...]:
        """How long that is for each rank."""
        return tuple(sum(end - start for start, end in waits) for waits in self.exposed)

    @cached_property
    def memory(self) -> tuple[tuple[Held, ...], ...]:
        """By rank, each change of what it holds."""
        return tuple(tuple(self._held(intervals)) for intervals in self.intervals)

    @property
    def peak_memory(self) -> tuple[float, ...]:
        """By rank, the most it holds at once, for B, I and W together."""
        return tuple(max((held.activations + held.weights for held in rank), default=0) for rank in self.memory)

    @property
    def peak_activations(self) -> tuple[float, ...]:
        """By rank, the most it holds at once for B and I."""
        return tuple(max((held.activations for held in rank), default=0) for rank in self.memory)

    @property
    def peak_weights(self) -> tuple[float, ...]:
        """By rank, the most it holds at once for W."""
        return tuple(max((held.weights for held in rank), default=0) for rank in self.memory)

    def _held(self, intervals: tuple[Interval, ...]) -> Iterator[Held]:
        activations: float = 0
        weights: float = 0
        for (stage, kind, _), start, end in intervals:
            activation = self.activation[stage] if self.activation else 1
            weight = self.weight_memory[stage] if self.weight_memory else 1
            activations += {FORWARD: activation, WEIGHT: 0}.get(kind, -activation)
            weights += {INPUT: weight, WEIGHT: -weight}.get(kind, 0)
            yield Held(start if kind == FORWARD else end, activations, weights)


def _idle(busy: float, whole: float) -> float:
    return (whole - busy) / whole if whole else 0


def _consumer(send: Action) -> tuple[int, str, int]:
    """What waits for the tensor of ``send``; ``B`` stands for ``I`` too."""
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


def simulate(program: Schedule, costs: Costs) -> Timeline:
    """When each action and transfer of ``program`` starts and ends, if every one starts as soon as it can.

    Each rank is followed until it waits for a tensor whose transfer cannot be timed yet, and again once it can: the
    result does not depend on the order in which ranks are followed, and every action is looked at once.

    Args:
        program: a validated one, or at least one with communication.
        costs: of as many stages.

    Raises:
        ScheduleError: when the costs are of another number of stages, or a rank waits for ever.
    """
    placement = program.placement
    costs.check(len(placement))
    network = _Network(costs.latency + costs.transfer)
    done: list[list[Interval]] = [[] for _ in program.ranks]
    ranks = [
        _follow(actions, _duties(actions, placement, costs, network), network, done[rank])
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
            f"rank {rank} waits for {Action(*tensor)} for ever",
            "let add_communication place the sends and receives, and validate the program",
        )
    transfers = tuple(transfer for channel in network.channels.values() for transfer in channel.transfers)
    return Timeline(program.name, tuple(map(tuple, done)), transfers, costs.activation, costs.weight_memory)


_Tensor = tuple[int, str, int]
"""A tensor that goes from rank to rank, named by its receive."""


@dataclass
class _Channel:
    """One direction between two ranks: the tensors that were sent, and when each of its receives was posted."""

    source: int
    target: int
    sent: list[tuple[Action, float]] = field(default_factory=list)
    expected: list[float] = field(default_factory=list)
    transfers: list[Transfer] = field(default_factory=list)


class _Network:
    """The channels between ranks, what has arrived by them, and who waits for what has not.

    Attributes:
        arrivals: end of the transfer of each tensor that can be timed.
        waiting: the rank that cannot go on without a tensor.
        runnable: the ranks that can.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.channels: dict[tuple[int, int], _Channel] = {}
        self.arrivals: dict[_Tensor, float] = {}
        self.waiting: dict[_Tensor, int] = {}
        self.runnable: list[int] = []

    def channel(self, source: int, target: int) -> _Channel:
        return self.channels.setdefault((source, target), _Channel(source, target))

    def post(self, channel: _Channel, action: Action, now: float) -> None:
        """Take note of a send or a receive, and time the transfer that it completes."""
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
        tensor = other_end(action)
        self.arrivals[tensor] = end
        rank = self.waiting.pop(tensor, None)
        if rank is not None:
            self.runnable.append(rank)


_Duties = dict[tuple[int, str], tuple[float, str | None, _Channel | None]]
"""By stage and kind: seconds, the kind of receive that it waits for if any, the channel that it uses if any."""


def _duties(actions: tuple[Action, ...], placement: tuple[int, ...], costs: Costs, network: _Network) -> _Duties:
    duties: _Duties = {}
    for stage, kind in {(action.stage, action.kind) for action in actions}:
        if kind in COMPUTE:
            duties[stage, kind] = costs.seconds(stage, kind), _awaited(stage, kind, placement), None
        else:
            duties[stage, kind] = 0, None, network.channel(*channel_of(Action(stage, kind, 0), placement))
    return duties


def _awaited(stage: int, kind: str, placement: tuple[int, ...]) -> str | None:
    """The kind of the receive that a computing action waits for; None when all it needs is on its rank."""
    if kind == FORWARD:
        return RECV_F if stage > 0 and placement[stage - 1] != placement[stage] else None
    last = stage == len(placement) - 1
    return None if kind == WEIGHT or last or placement[stage + 1] == placement[stage] else RECV_B


def _follow(actions: tuple[Action, ...], duties: _Duties, network: _Network, done: list[Interval]) -> Iterator[_Tensor]:
    """Time the actions of a rank, yielding each tensor that has to arrive before it can go on."""
    now: float = 0
    for action in actions:
        stage, kind, microbatch = action
        seconds, receive, channel = duties[stage, kind]
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
