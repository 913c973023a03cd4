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

from collections import defaultdict
from collections.abc import Sequence
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

_Transfers = dict[tuple[int, int], list[tuple[int, Action]]]
"""By channel, in the order of its sends: where the action that takes the tensor stands on its rank, and the RECV."""


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
    other = action.stage + STEP[action.kind]
    if not 0 <= other < len(placement):
        raise ScheduleError(f"{action} has no other end: the stages are 0 to {len(placement) - 1}")
    here, there = placement[action.stage], placement[other]
    if here == there:
        raise ScheduleError(f"{action} goes nowhere: stages {action.stage} and {other} are both on rank {here}")
    return (here, there) if action.kind in (SEND_F, SEND_B) else (there, here)


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
    receives: list[dict[int, list[Action]]] = [defaultdict(list) for _ in schedule.ranks]
    for (_, target), moved in sorted(transfers.items()):
        earliest_after = list(accumulate((taker for taker, _ in reversed(moved)), min))
        for taker, (_, receive) in zip(reversed(earliest_after), moved):
            receives[target][max(taker - 1, 0)].append(receive)
    merged = (_merged(*parts) for parts in zip(schedule.ranks, sends, receives))
    return Schedule(schedule.name, tuple(merged))


def _transfers(schedule: Schedule) -> tuple[list[dict[int, Action]], _Transfers]:
    """The SEND after each action, by rank and place of that action; and what goes through every channel."""
    placement, count = schedule.placement, schedule.microbatches
    last = len(placement) - 1
    forward_at, backward_at = _places(schedule)
    sends: list[dict[int, Action]] = []
    transfers: _Transfers = defaultdict(list)
    for rank, actions in enumerate(schedule.ranks):
        after: dict[int, Action] = {}
        for place, (stage, kind, microbatch) in enumerate(actions):
            if kind == FORWARD and stage < last:
                other, takers, send, receive = stage + 1, forward_at, SEND_F, RECV_F
            elif kind not in (FORWARD, WEIGHT) and stage > 0:
                other, takers, send, receive = stage - 1, backward_at, SEND_B, RECV_B
            else:
                continue
            taker = takers.get(other * count + microbatch)
            if placement[other] != rank and taker is not None:
                after[place] = Action(stage, send, microbatch)
                transfers[rank, placement[other]].append((taker, Action(other, receive, microbatch)))
        sends.append(after)
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
