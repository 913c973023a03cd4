"""Add sends and receives to a schedule, which makes it a *program*.

Validator, simulator and runtime share this model of communication:

* A channel is a directed edge from one rank to another, with a communicator of its own. All tensors from rank a to
  rank b, outputs of stages and gradients of their inputs, use the channel (a, b).
* A SEND posts a send, a RECV posts a receive into a new buffer; neither blocks the rank.
* Transfer k of a channel matches its k-th send with its k-th receive. It starts when both are posted and transfer k-1
  is complete.
* A computing action blocks until its input, or the gradient of its output, has been received. Nothing else blocks.
* A sent tensor is kept until its send is known to be complete.
* Consecutive stages on one rank exchange tensors without communication. The first stage takes the micro-batch and
  sends no gradient; the last one computes the loss and receives no gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from megatron.pipeline.actions import (
    COMMUNICATION_KINDS,
    FORWARD,
    RECV_B,
    RECV_F,
    SEND_B,
    SEND_F,
    WEIGHT,
    Action,
    PipelineSchedule,
    ScheduleError,
)

PEER_STAGE_OFFSET = {SEND_F: 1, RECV_F: -1, SEND_B: -1, RECV_B: 1}
"""Offset from the stage of a communication to the stage at its other end."""

_PARTNER = {SEND_F: RECV_F, RECV_F: SEND_F, SEND_B: RECV_B, RECV_B: SEND_B}


@dataclass
class _Transfers:
    """The tensors sent through a channel, in the order of the sends."""

    receives: list[Action] = field(default_factory=list)  # RECV of each tensor
    # index, in the receiving rank's actions, of the action that uses the tensor
    consumers: list[int] = field(default_factory=list)


def channels(placement: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Return the directed edges (source rank, target rank) that a training step needs, sorted.

    Args:
        placement: rank of every stage.
    """
    edges = {(here, there) for here, there in zip(placement, placement[1:]) if here != there}
    return tuple(sorted(edges | {(there, here) for here, there in edges}))


def channel_of(action: Action, placement: Sequence[int]) -> tuple[int, int]:
    """Return the channel (source rank, target rank) of a communication.

    Args:
        action: a SEND or a RECV.
        placement: rank of every stage.

    Raises:
        ScheduleError: if the action is not a communication, or its stage has no neighbour on that side or one on the
            same rank.
    """
    if action.kind not in PEER_STAGE_OFFSET:
        raise ScheduleError(f"{action} computes: only {', '.join(COMMUNICATION_KINDS)} go through a channel")
    other, stages = action.stage + PEER_STAGE_OFFSET[action.kind], range(len(placement))
    if action.stage not in stages or other not in stages:
        raise ScheduleError(f"{action} has no other end: the stages are 0 to {len(placement) - 1}")
    here, there = placement[action.stage], placement[other]
    if here == there:
        raise ScheduleError(f"{action} has no channel: stages {action.stage} and {other} are both on rank {here}")
    return (here, there) if action.kind in (SEND_F, SEND_B) else (there, here)


def peer_action(action: Action) -> Action:
    """Return the RECV that matches a SEND, or the SEND that matches a RECV."""
    stage, kind, microbatch = action
    return Action(stage + PEER_STAGE_OFFSET[kind], _PARTNER[kind], microbatch)


def add_communication(schedule: PipelineSchedule) -> PipelineSchedule:
    """Return the program of a schedule: the same actions with sends and receives inserted.

    A SEND follows the action that produces its tensor. The RECVs of a channel are in the order of its sends, each one
    computing action before its consumer, so that the transfer overlaps with it, or earlier where the order requires. A
    schedule that already contains communication is returned unchanged. Nothing is checked: a tensor without producer or
    consumer is not transferred, and ``validate_program`` reports what is missing.

    Raises:
        ScheduleError: if a stage is on no rank or on several.
    """
    if any(action.kind in PEER_STAGE_OFFSET for actions in schedule.ranks for action in actions):
        return schedule
    sends, transfers = _transfers(schedule)
    receives: list[dict[int, list[Action]]] = [{} for _ in schedule.ranks]
    for (_, target), moved in sorted(transfers.items()):
        latest = reversed(list(accumulate(reversed(moved.consumers), min)))  # keeps the order of the sends
        for consumer, receive in zip(latest, moved.receives):
            receives[target].setdefault(max(consumer - 1, 0), []).append(receive)
    merged = (_merged(*parts) for parts in zip(schedule.ranks, sends, receives))
    return PipelineSchedule(schedule.name, tuple(merged))


def _transfers(schedule: PipelineSchedule) -> tuple[list[dict[int, Action]], dict[tuple[int, int], _Transfers]]:
    """Return the SEND after each action, by rank and index of the action, and the transfers of every channel."""
    placement, count = schedule.placement, schedule.microbatches
    forward_at, backward_at = _action_indices(schedule)
    sends: list[dict[int, Action]] = [{} for _ in schedule.ranks]
    transfers = {edge: _Transfers() for edge in channels(placement)}
    for rank, actions in enumerate(schedule.ranks):
        for index, (stage, kind, microbatch) in enumerate(actions):
            if kind == WEIGHT:
                continue
            if kind == FORWARD:
                other, consumers, send, receive = stage + 1, forward_at, SEND_F, RECV_F
            else:
                other, consumers, send, receive = stage - 1, backward_at, SEND_B, RECV_B
            consumer = consumers.get(other * count + microbatch)
            if consumer is not None and placement[other] != rank:
                sends[rank][index] = Action(stage, send, microbatch)
                moved = transfers[rank, placement[other]]
                moved.consumers.append(consumer)
                moved.receives.append(Action(other, receive, microbatch))
    return sends, transfers


def _action_indices(schedule: PipelineSchedule) -> tuple[dict[int, int], dict[int, int]]:
    """Return the index on its rank of each forward and each input gradient, by stage * micro-batches + micro-batch."""
    forward_at: dict[int, int] = {}
    backward_at: dict[int, int] = {}
    count = schedule.microbatches
    for actions in schedule.ranks:
        for index, (stage, kind, microbatch) in enumerate(actions):
            if kind == FORWARD:
                forward_at.setdefault(stage * count + microbatch, index)
            elif kind != WEIGHT:
                backward_at.setdefault(stage * count + microbatch, index)
    return forward_at, backward_at


def _merged(
    actions: Sequence[Action], sends: dict[int, Action], receives: dict[int, list[Action]]
) -> tuple[Action, ...]:
    """Insert receives before, and sends after, one rank's actions."""
    merged: list[Action] = []
    for index, action in enumerate(actions):
        if index in receives:
            merged += receives[index]
        merged.append(action)
        if index in sends:
            merged.append(sends[index])
    return tuple(merged)
