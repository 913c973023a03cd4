"""The communication of a schedule: which rank sends what to which, and where in its work.

A schedule with its sends and receives is a *program*. What it means, for the proof, the clock and the run alike:

* A channel is a directed edge, from one rank to another, with a communicator of its own. Whatever goes from rank a to
  rank b, outputs of stages and gradients of their inputs, shares the channel (a, b).
* A SEND posts a send, a RECV posts a receive into a fresh buffer; neither ever stops the rank.
* Transfer k of a channel joins its k-th send and its k-th receive. It starts when both are posted and transfer k-1 is
  over.
* A computing action waits for the receive of its input, or of the gradient of its output. Nothing else waits.
* What is sent is kept until the send is known to be over.
* Neighbouring stages on one rank hand over what they made without communication. The first stage takes the
  micro-batch and sends no gradient; the last one makes the loss and needs none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from megatron.pipeline.actions import (
    COMMUNICATION,
    FORWARD,
    RECV_B,
    RECV_F,
    SEND_B,
    SEND_F,
    WEIGHT,
    Action,
    Schedule,
    ScheduleError,
)

STEP = {SEND_F: 1, RECV_F: -1, SEND_B: -1, RECV_B: 1}
"""From the stage that a communication names to the one at its other end."""

_PARTNER = {SEND_F: RECV_F, RECV_F: SEND_F, SEND_B: RECV_B, RECV_B: SEND_B}


@dataclass
class _Transfers:
    """What goes through a channel, in the order of the sends.

    Attributes:
        receives: the RECV of each tensor.
        takers: where, on the rank that receives, the computing action stands that takes it.
    """

    receives: list[Action] = field(default_factory=list)
    takers: list[int] = field(default_factory=list)


def channels(placement: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """The directed edges (source rank, target rank) that a training step needs, sorted.

    Args:
        placement: the rank of every stage.
    """
    edges = {(here, there) for here, there in zip(placement, placement[1:]) if here != there}
    return tuple(sorted(edges | {(there, here) for here, there in edges}))


def channel_of(action: Action, placement: Sequence[int]) -> tuple[int, int]:
    """The channel (source rank, target rank) that a communication goes through.

    Args:
        action: a SEND or a RECV.
        placement: the rank of every stage.

    Raises:
        ScheduleError: when the action is no communication, or its stage has no neighbour on that side or one on its
            own rank.
    """
    if action.kind not in STEP:
        raise ScheduleError(f"{action} computes: only {', '.join(COMMUNICATION)} go through a channel")
    other, stages = action.stage + STEP[action.kind], range(len(placement))
    if action.stage not in stages or other not in stages:
        raise ScheduleError(f"{action} has no other end: the stages are 0 to {len(placement) - 1}")
    here, there = placement[action.stage], placement[other]
    if here == there:
        raise ScheduleError(f"{action} goes nowhere: stages {action.stage} and {other} are both on rank {here}")
    return (here, there) if action.kind in (SEND_F, SEND_B) else (there, here)


def other_end(action: Action) -> Action:
    """The RECV of what a SEND sends, and the other way round."""
    stage, kind, microbatch = action
    return Action(stage + STEP[kind], _PARTNER[kind], microbatch)


def add_communication(schedule: Schedule) -> Schedule:
    """The program of a schedule: the same actions, with sends and receives between them.

    A SEND stands right after the action that makes the tensor. The RECVs of a channel are in the order of its sends,
    each one computing action before the one that takes the tensor, so that the transfer can hide behind it, or earlier
    where that order demands it. A schedule that brings communication of its own is returned as it is. Nothing is
    checked here: a tensor that no action makes or takes is not moved, and ``validate`` says what is missing.

    Raises:
        ScheduleError: when a stage is on no rank or on several.
    """
    if any(action.kind in STEP for actions in schedule.ranks for action in actions):
        return schedule
    sends, transfers = _transfers(schedule)
    receives: list[dict[int, list[Action]]] = [{} for _ in schedule.ranks]
    for (_, target), moved in sorted(transfers.items()):
        no_later = reversed(list(accumulate(reversed(moved.takers), min)))
        for taker, receive in zip(no_later, moved.receives):
            receives[target].setdefault(max(taker - 1, 0), []).append(receive)
    merged = (_merged(*parts) for parts in zip(schedule.ranks, sends, receives))
    return Schedule(schedule.name, tuple(merged))


def _transfers(schedule: Schedule) -> tuple[list[dict[int, Action]], dict[tuple[int, int], _Transfers]]:
    """The SEND after each action, by rank and place of that action; and what goes through every channel."""
    placement, count = schedule.placement, schedule.microbatches
    forward_at, backward_at = _places(schedule)
    sends: list[dict[int, Action]] = [{} for _ in schedule.ranks]
    transfers = {edge: _Transfers() for edge in channels(placement)}
    for rank, actions in enumerate(schedule.ranks):
        for place, (stage, kind, microbatch) in enumerate(actions):
            if kind == WEIGHT:
                continue
            if kind == FORWARD:
                other, takers, send, receive = stage + 1, forward_at, SEND_F, RECV_F
            else:
                other, takers, send, receive = stage - 1, backward_at, SEND_B, RECV_B
            taker = takers.get(other * count + microbatch)
            if taker is not None and placement[other] != rank:
                sends[rank][place] = Action(stage, send, microbatch)
                moved = transfers[rank, placement[other]]
                moved.takers.append(taker)
                moved.receives.append(Action(other, receive, microbatch))
    return sends, transfers


def _places(schedule: Schedule) -> tuple[dict[int, int], dict[int, int]]:
    """Where on its rank each forward, and each backward of an input, stands, by stage * micro-batches + micro-batch."""
    forward_at: dict[int, int] = {}
    backward_at: dict[int, int] = {}
    count = schedule.microbatches
    for actions in schedule.ranks:
        for place, (stage, kind, microbatch) in enumerate(actions):
            if kind == FORWARD:
                forward_at.setdefault(stage * count + microbatch, place)
            elif kind != WEIGHT:
                backward_at.setdefault(stage * count + microbatch, place)
    return forward_at, backward_at


def _merged(
    actions: Sequence[Action], sends: dict[int, Action], receives: dict[int, list[Action]]
) -> tuple[Action, ...]:
    """One rank's program: before each action the receives posted there, after it what it sends."""
    merged: list[Action] = []
    for place, action in enumerate(actions):
        if place in receives:
            merged += receives[place]
        merged.append(action)
        if place in sends:
            merged.append(sends[place])
    return tuple(merged)
