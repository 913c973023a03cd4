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

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import product

from megatron.pipeline.actions import (
    BACKWARD,
    COMMUNICATION_KINDS,
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

PEER_STAGE_OFFSET = {SEND_F: 1, RECV_F: -1, SEND_B: -1, RECV_B: 1}
"""Offset from the stage of a communication to the stage at its other end."""

_PARTNER = {SEND_F: RECV_F, RECV_F: SEND_F, SEND_B: RECV_B, RECV_B: SEND_B}

RECEIVE_FOR = {FORWARD: RECV_F, BACKWARD: RECV_B, INPUT: RECV_B}
"""Receive of the tensor that a computing action needs, if a neighbouring stage on another rank produces it."""


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


def required_receive(stage: int, kind: str, placement: Sequence[int]) -> str | None:
    """Return the kind of receive that a computing action waits for; None if all its inputs are on its rank."""
    receive = RECEIVE_FOR.get(kind)
    if receive is None:
        return None
    peer = stage + PEER_STAGE_OFFSET[receive]
    return receive if 0 <= peer < len(placement) and placement[peer] != placement[stage] else None


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
    sends, receives = _sends_and_receives(schedule)
    program = []
    for actions, send_after, receives_before in zip(schedule.ranks, sends, receives):
        merged: list[Action] = []
        for index, action in enumerate(actions):
            if index in receives_before:
                merged += reversed(receives_before[index])
            merged.append(action)
            if index in send_after:
                merged.append(send_after[index])
        program.append(tuple(merged))
    return PipelineSchedule(schedule.name, tuple(program))


def _sends_and_receives(schedule: PipelineSchedule) -> tuple[list[dict[int, Action]], list[dict[int, list[Action]]]]:
    """Return by rank the SEND after each action, and the RECVs before each action in reverse, by its index."""
    placement = schedule.placement
    consumers: dict[tuple[int, str, int], int] = {}  # by RECV, index on its rank of the action that needs the tensor
    for actions in schedule.ranks:
        for index, (stage, kind, microbatch) in enumerate(actions):
            if kind in RECEIVE_FOR:
                consumers.setdefault((stage, RECEIVE_FOR[kind], microbatch), index)
    sends: list[dict[int, Action]] = [{} for _ in schedule.ranks]
    # By channel, in the order of the sends: index of the consumer, and RECV.
    transfers: dict[tuple[int, int], list[tuple[int, Action]]] = defaultdict(list)
    for rank, actions in enumerate(schedule.ranks):
        for index, (stage, kind, microbatch) in enumerate(actions):
            if kind == WEIGHT:
                continue
            send = SEND_F if kind == FORWARD else SEND_B
            target = stage + PEER_STAGE_OFFSET[send]
            receive = (target, _PARTNER[send], microbatch)
            if receive in consumers and placement[target] != rank:
                sends[rank][index] = Action(stage, send, microbatch)
                transfers[rank, placement[target]].append((consumers[receive], Action(*receive)))
    receives: list[dict[int, list[Action]]] = [defaultdict(list) for _ in schedule.ranks]
    for (_, rank), moved in sorted(transfers.items(), reverse=True):
        latest = len(schedule.ranks[rank])
        for consumer, receive in reversed(moved):
            latest = min(latest, consumer)  # keeps the order of the sends
            receives[rank][max(latest - 1, 0)].append(receive)
    return sends, receives


class DeadlockError(ScheduleError):
    """Ranks of a program that wait forever."""

    def __init__(self, waits: Mapping[int, tuple[Action, Action]]) -> None:
        """Name one of them; ``waits`` has, by rank, the awaited SEND and the action that waits for it."""
        rank, (send, _) = next(iter(waits.items()))
        super().__init__(
            f"deadlock: rank {rank} waits for {peer_action(send)} forever",
            "let add_communication place the sends and receives, and validate the program",
        )
        self.waits = waits


def execution_order(program: PipelineSchedule) -> Iterator[tuple[int, Action]]:
    """Yield the actions of all ranks, each with its rank and after the SEND of the tensor that it waits for.

    Ranks are followed one after the other, each as far as possible. Takes time linear in the number of actions.

    Raises:
        DeadlockError: if no rank can advance before the end.
    """
    placement = program.placement
    awaited: dict[tuple[int, str], tuple[int, str]] = {}  # by stage and kind of action, those of the SEND
    for stage, kind in product(range(len(placement)), RECEIVE_FOR):
        if (receive := required_receive(stage, kind, placement)) is not None:
            awaited[stage, kind] = peer_action(Action(stage, receive, 0))[:2]
    sent: set[tuple[int, str, int]] = set()
    waiting: dict[tuple[int, str, int], int] = {}  # rank by awaited SEND
    position = [0] * len(program.ranks)  # of the next action of each rank
    ready = list(range(len(program.ranks)))
    while ready:
        rank = ready.pop()
        actions = program.ranks[rank]
        for index in range(position[rank], len(actions)):
            action = actions[index]
            stage, kind, microbatch = action
            if kind in (SEND_F, SEND_B):
                sent.add(action)
                if action in waiting:
                    ready.append(waiting.pop(action))
            elif (stage, kind) in awaited and (*awaited[stage, kind], microbatch) not in sent:
                waiting[(*awaited[stage, kind], microbatch)] = rank
                position[rank] = index
                break
            yield rank, action
    if waiting:
        blocked = ((rank, send, program.ranks[rank][position[rank]]) for send, rank in waiting.items())
        raise DeadlockError({rank: (Action(*send), action) for rank, send, action in blocked})
