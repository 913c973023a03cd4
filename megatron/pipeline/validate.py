"""Prove that a program runs to completion: complete, without duplicates, free of deadlock, within memory bounds.

Communication follows the model of :mod:`megatron.pipeline.communication`. Three passes, each linear in the program's
length:

1. Per rank: every action occurs once, on its stage's rank, after the actions of that rank that it depends on.
2. Per channel: receives match the sends, in the same order. A rank posts in program order, so with equal orders both
   sides have posted transfer k-1 when they post k: no transfer is blocked by another one, and each is delayed only by
   its SEND.
3. All ranks (:func:`megatron.pipeline.communication.execution_order`): each advances until it needs a tensor whose SEND
   has not been reached. If no rank can advance before the end, ranks wait for each other in a cycle.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron.pipeline.actions import (
    BACKWARD,
    COMMUNICATION_KINDS,
    EVALUATION_KINDS,
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
from megatron.pipeline.communication import (
    PEER_STAGE_OFFSET,
    DeadlockError,
    channel_of,
    channels,
    execution_order,
    peer_action,
)

REMOVE_COMMUNICATION_FIX = "leave SEND and RECV out of the file: they are added automatically"
SHOWN = 4
"""Ranks of a cycle named in a message."""

RESULTS = (FORWARD, INPUT, WEIGHT, RECV_B, RECV_F, SEND_F, SEND_B)
"""Actions of every stage for each micro-batch, in the order of reports of missing ones; a B is an I and a W."""

_Needs = Sequence[Mapping[str, Sequence[tuple[int, str]]]]
"""By stage and kind: the results (stage, kind) that an action needs on its rank. Impossible kinds are absent."""


@dataclass(frozen=True)
class PeakCounts:
    """Maximum that each rank holds at one time, in micro-batches of a stage; zero in an evaluation."""

    activations: tuple[int, ...]  # from F to B or I
    weights: tuple[int, ...]  # from I to W, while the inputs of the weight gradient are kept
    both: tuple[int, ...]  # from F to B or W


def validate_program(program: PipelineSchedule, evaluation: bool = False) -> PeakCounts:
    """Prove that a program runs every micro-batch through every stage once and to completion.

    Takes time linear in the number of actions.

    Args:
        program: a schedule with its communication.
        evaluation: expect forwards only; otherwise each has its backward.

    Returns:
        The maximum that each rank holds.

    Raises:
        ScheduleError: names the invalid action and its rank.
    """
    needs = _needs(program.placement, evaluation)
    _check_ranks(program, needs)
    _check_channels(program)
    try:
        for _ in execution_order(program):
            pass
    except DeadlockError as error:
        raise _deadlock(program, error.waits) from None
    if evaluation:
        nothing = (0,) * len(program.ranks)
        return PeakCounts(nothing, nothing, nothing)
    return PeakCounts(*zip(*map(_peaks, program.ranks)))


def _needs(placement: Sequence[int], evaluation: bool) -> _Needs:
    """Return the kinds of action of every stage, and what they depend on."""
    needs: list[dict[str, list[tuple[int, str]]]] = []
    last = len(placement) - 1
    for stage, rank in enumerate(placement):
        own: dict[str, list[tuple[int, str]]] = {FORWARD: [], INPUT: [(stage, FORWARD)], WEIGHT: [(stage, INPUT)]}
        if stage > 0 and placement[stage - 1] == rank:
            own[FORWARD].append((stage - 1, FORWARD))
        elif stage > 0:
            own[FORWARD].append((stage, RECV_F))
            own |= {RECV_F: [], SEND_B: [(stage, INPUT)]}
        if stage < last and placement[stage + 1] == rank:
            own[INPUT].append((stage + 1, INPUT))
        elif stage < last:
            own[INPUT].append((stage, RECV_B))
            own |= {RECV_B: [], SEND_F: [(stage, FORWARD)]}
        own[BACKWARD] = own[INPUT]
        needs.append({kind: own[kind] for kind in own if kind in EVALUATION_KINDS or not evaluation})
    return needs


def _check_ranks(program: PipelineSchedule, needs: _Needs) -> None:
    """Reject impossible, duplicate and missing actions, and those that precede what they need on their rank."""
    completed = 0
    for rank, actions in enumerate(program.ranks):
        if not actions:
            raise ScheduleError(f"rank {rank} of {len(program.ranks)} has no action: every rank needs a stage")
        done: set[tuple[int, str, int]] = set()
        for action in actions:
            stage, kind, microbatch = action
            if kind not in needs[stage]:
                raise _impossible(program, rank, action)
            for result in ((stage, INPUT, microbatch), (stage, WEIGHT, microbatch)) if kind == BACKWARD else (action,):
                if result in done:
                    raise _duplicate(rank, action, actions)
                done.add(result)
            for producer, result_kind in needs[stage][kind]:
                if (producer, result_kind, microbatch) not in done:
                    raise _premature(program, needs, rank, action, Action(producer, result_kind, microbatch))
        completed += len(done)
    if completed < program.microbatches * sum(kind != BACKWARD for own in needs for kind in own):
        raise _missing(program, needs)


def _impossible(program: PipelineSchedule, rank: int, action: Action) -> ScheduleError:
    """Return the error for a communication without a channel, or a backward in an evaluation."""
    if action.kind in COMMUNICATION_KINDS:
        channel_of(action, program.placement)  # raises, except in an evaluation
    return ScheduleError(f"rank {rank} has {action} in an evaluation, which has only forwards")


def _premature(program: PipelineSchedule, needs: _Needs, rank: int, action: Action, result: Action) -> ScheduleError:
    """Return the error for an action whose rank makes a result that it needs later, or not at all."""
    if program.ranks[rank].count(action) > 1:
        return _duplicate(rank, action, program.ranks[rank])
    producers = {result, result._replace(kind=BACKWARD)} if result.kind == INPUT else {result}
    later = next((a for a in program.ranks[rank] if a in producers), None)
    if later is None:
        return _missing(program, needs)
    return ScheduleError(f"rank {rank} has {action} before {later}, whose result it needs")


def _duplicate(rank: int, action: Action, actions: Sequence[Action]) -> ScheduleError:
    if actions.count(action) > 1:
        return ScheduleError(f"rank {rank} has {action} twice")
    first = next(a for a in actions if a in {action._replace(kind=kind) for kind in (BACKWARD, INPUT, WEIGHT)})
    return ScheduleError(f"rank {rank} has {action} after {first}: a backward is one B, or one I and one W")


def _missing(program: PipelineSchedule, needs: _Needs) -> ScheduleError:
    """Return the error for the first missing action."""
    done = {action for actions in program.ranks for action in actions}
    done |= {action._replace(kind=half) for action in done if action.kind == BACKWARD for half in (INPUT, WEIGHT)}
    every = (
        Action(stage, kind, microbatch)
        for kind in RESULTS
        for stage, own in enumerate(needs)
        if kind in own
        for microbatch in range(program.microbatches)
    )
    action = next(action for action in every if action not in done)
    name = f"{action._replace(kind=BACKWARD)} or {action}" if action.kind in (INPUT, WEIGHT) else action
    return ScheduleError(
        f"rank {program.placement[action.stage]} has no {name}: stages 0 to {program.stages - 1} "
        f"each do micro-batches 0 to {program.microbatches - 1}",
        *([REMOVE_COMMUNICATION_FIX] if action.kind in COMMUNICATION_KINDS else []),
    )


def _check_channels(program: PipelineSchedule) -> None:
    """Reject a channel whose receives are not in the order of its sends; their numbers are equal."""
    placement = program.placement
    sent: dict[tuple[int, int], list[Action]] = {edge: [] for edge in channels(placement)}
    received: dict[tuple[int, int], list[Action]] = {edge: [] for edge in channels(placement)}
    for rank, actions in enumerate(program.ranks):
        for action in actions:
            stage, kind, _ = action
            if kind in (SEND_F, SEND_B):
                sent[rank, placement[stage + PEER_STAGE_OFFSET[kind]]].append(action)
            elif kind in PEER_STAGE_OFFSET:
                received[placement[stage + PEER_STAGE_OFFSET[kind]], rank].append(action)
    for (source, target), sends in sent.items():
        for number, (send, receive) in enumerate(zip(sends, received[source, target], strict=True)):
            expected = peer_action(send)
            if receive != expected:
                raise ScheduleError(
                    f"rank {target} has {receive} where {expected} belongs: transfer {number} from rank {source} to "
                    f"rank {target} is {send}, and receives must be in the order of the sends",
                    REMOVE_COMMUNICATION_FIX,
                )


def _deadlock(program: PipelineSchedule, waits: Mapping[int, tuple[Action, Action]]) -> ScheduleError:
    """Return the error that names the ranks of a cycle; arguments as for :class:`DeadlockError`."""
    sources = {rank: program.placement[send.stage] for rank, (send, _) in waits.items()}
    seen: list[int] = []
    rank = min(waits)
    while rank not in seen:
        seen.append(rank)
        rank = sources[rank]
    cycle = seen[seen.index(rank) :]
    clauses = []
    for waiter in cycle:
        send, action = waits[waiter]
        source = sources[waiter]
        before = program.ranks[source][program.ranks[source].index(send) - 1]
        clauses.append(
            f"rank {waiter} waits for {peer_action(send)} before {action}, which rank {source} sends after {before}"
        )
    if len(clauses) > SHOWN:
        clauses[SHOWN - 1 :] = [f"and so on over {len(cycle)} ranks, back to rank {rank}"]
    return ScheduleError(f"deadlock: ranks wait for each other in a cycle: {'; '.join(clauses)}")


def _peaks(actions: Sequence[Action]) -> tuple[int, int, int]:
    """Return the maximum of each count of `PeakCounts` on a rank."""
    activations = weights = most_activations = most_weights = most_both = 0
    for _, kind, _ in actions:
        if kind == FORWARD:
            activations += 1
            most_activations = max(most_activations, activations)
            most_both = max(most_both, activations + weights)
        elif kind == INPUT:
            activations -= 1
            weights += 1
            most_weights = max(most_weights, weights)
        elif kind == BACKWARD:
            activations -= 1
        elif kind == WEIGHT:
            weights -= 1
    return most_activations, most_weights, most_both
