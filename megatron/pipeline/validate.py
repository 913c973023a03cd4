"""Prove that a program runs to completion: complete, without duplicates, free of deadlock, within memory bounds.

Communication follows the model of :mod:`megatron.pipeline.communication`. Three passes, each linear in the program's
length:

1. Per rank: every action occurs once, on its stage's rank, after the actions of that rank that it depends on.
2. Per channel: receives match the sends, in the same order. A rank posts in program order, so with equal orders both
   sides have posted transfer k-1 when they post k: no transfer is blocked by another one, and each is delayed only by
   its SEND.
3. All ranks: each advances until it needs a tensor whose SEND has not been reached. If no rank can advance before the
   end, ranks wait for each other in a cycle.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, repeat
from operator import itemgetter
from typing import NamedTuple

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
from megatron.pipeline.communication import channel_of, channels, peer_action

REMOVE_COMMUNICATION_FIX = "leave SEND and RECV out of the file: they are added automatically"
SHOWN = 4
"""Ranks of a cycle named in a message."""

_FORWARD, _INPUT, _WEIGHT, _SEND_F, _RECV_F, _SEND_B, _RECV_B = (1 << bit for bit in range(7))
"""Bits of what is done for a stage and micro-batch; a B sets the bits of both gradients."""

_NAMES = {
    _FORWARD: (FORWARD,),
    _INPUT: (BACKWARD, INPUT),
    _WEIGHT: (BACKWARD, WEIGHT),
    _SEND_F: (SEND_F,),
    _RECV_F: (RECV_F,),
    _SEND_B: (SEND_B,),
    _RECV_B: (RECV_B,),
}
"""Kinds of action that set each bit."""

ACTIVATIONS = {FORWARD: 1, BACKWARD: -1, INPUT: -1}
WEIGHTS = {INPUT: 1, WEIGHT: -1}
BOTH = {FORWARD: 1, BACKWARD: -1, WEIGHT: -1}
"""Change of each count of :class:`PeakCounts` by an action."""


@dataclass(frozen=True)
class PeakCounts:
    """Maximum that each rank holds at one time, in micro-batches of a stage; zero in an evaluation."""

    activations: tuple[int, ...]  # from F to B or I
    weights: tuple[int, ...]  # from I to W, while the inputs of the weight gradient are kept
    both: tuple[int, ...]  # from F to B or W


class _Rule(NamedTuple):
    """Dependencies and effect of an action of one stage and kind, as bits."""

    does: int  # set by the action
    once: int  # none of these may be set before
    needs: int = 0  # all of these must be set before
    offset: int = 0  # to the neighbouring stage on the same rank, in entries of the record
    there: int = 0  # must be set for that stage


_Rules = Sequence[Mapping[str, _Rule]]
"""By stage and kind; a communication without a channel has no rule."""


def validate_program(
    program: PipelineSchedule,
    most_activations: float | None = None,
    most_weights: float | None = None,
    evaluation: bool = False,
) -> PeakCounts:
    """Prove that a program runs every micro-batch through every stage once and to completion.

    Takes time linear in the number of actions.

    Args:
        program: a schedule with its communication.
        most_activations: bound on every rank's ``PeakCounts.activations``.
        most_weights: bound on every rank's ``PeakCounts.weights``.
        evaluation: expect forwards only; otherwise each has its backward.

    Returns:
        The maximum that each rank holds.

    Raises:
        ScheduleError: names the invalid action and its rank.
    """
    placement = program.placement
    kinds = [list(map(itemgetter(1), actions)) for actions in program.ranks]
    _require_all_forwards(program, kinds)
    done = bytearray(len(placement) * program.microbatches)
    rules = _rules(placement, program.microbatches)
    if evaluation:
        rules = [{kind: own[kind] for kind in EVALUATION_KINDS if kind in own} for own in rules]
    for rank in range(len(program.ranks)):
        _check_rank(program, rank, rules, done)
    _require_all_done(program, rules, done)
    _check_orders(program, rules)
    _check_progress(program, rules)
    if evaluation:
        nothing = (0,) * len(kinds)
        return PeakCounts(nothing, nothing, nothing)
    peaks = PeakCounts(*(tuple(max(_held(k, counted)) for k in kinds) for counted in (ACTIVATIONS, WEIGHTS, BOTH)))
    _check_bound(program, kinds, ACTIVATIONS, most_activations, "activations")
    _check_bound(program, kinds, WEIGHTS, most_weights, "weight gradients yet to be made")
    return peaks


def _require_all_forwards(program: PipelineSchedule, kinds: Sequence[Sequence[str]]) -> None:
    """Reject a rank without actions and missing forwards, before tables of stages x micro-batches are allocated."""
    for rank, actions in enumerate(program.ranks):
        if not actions:
            raise ScheduleError(f"rank {rank} of {len(program.ranks)} has no action: every rank needs a stage")
    places = len(program.placement) * program.microbatches
    if sum(k.count(FORWARD) for k in kinds) >= places:
        return
    found = {(a.stage, a.microbatch) for actions in program.ranks for a in actions if a.kind == FORWARD}
    for place in range(places):
        stage, microbatch = divmod(place, program.microbatches)
        if (stage, microbatch) not in found:
            raise _missing(program, stage, microbatch, (FORWARD,))


def _rules(placement: Sequence[int], count: int) -> _Rules:
    """Return the rules of every stage for ``count`` micro-batches."""
    edges = [here != there for here, there in zip(placement, placement[1:])]
    rules: list[Mapping[str, _Rule]] = []
    for stage in range(len(placement)):
        received = stage > 0 and edges[stage - 1]
        sent = stage < len(placement) - 1 and edges[stage]
        before = (0, 0) if stage == 0 or received else (-count, _FORWARD)
        after = (0, 0) if stage == len(placement) - 1 or sent else (count, _INPUT)
        own: dict[str, _Rule] = {
            FORWARD: _Rule(_FORWARD, _FORWARD, _RECV_F if received else 0, *before),
            BACKWARD: _Rule(_INPUT | _WEIGHT, _INPUT, _FORWARD | (_RECV_B if sent else 0), *after),
            INPUT: _Rule(_INPUT, _INPUT, _FORWARD | (_RECV_B if sent else 0), *after),
            WEIGHT: _Rule(_WEIGHT, _WEIGHT, _INPUT),
        }
        if received:
            own |= {RECV_F: _Rule(_RECV_F, _RECV_F), SEND_B: _Rule(_SEND_B, _SEND_B, _INPUT)}
        if sent:
            own |= {SEND_F: _Rule(_SEND_F, _SEND_F, _FORWARD), RECV_B: _Rule(_RECV_B, _RECV_B)}
        rules.append(own)
    return rules


def _check_rank(program: PipelineSchedule, rank: int, rules: _Rules, done: bytearray) -> None:
    """Check one rank's actions in order, recording in ``done`` what each does, by stage and micro-batch."""
    count = program.microbatches
    for index, (stage, kind, microbatch) in enumerate(program.ranks[rank]):
        place = stage * count + microbatch
        rule = rules[stage].get(kind)
        if rule is None:
            raise _no_rule_error(program, rank, Action(stage, kind, microbatch))
        does, once, needs, offset, there = rule
        seen = done[place]
        if seen & once or needs & ~seen or there & ~done[place + offset]:
            raise _rule_error(program, rank, index, rule, done)
        done[place] = seen | does


def _no_rule_error(program: PipelineSchedule, rank: int, action: Action) -> ScheduleError:
    """Return the error for an action for which its stage has no rule."""
    if action.kind in COMMUNICATION_KINDS:
        try:
            channel_of(action, program.placement)
        except ScheduleError as error:
            return error
    return ScheduleError(f"rank {rank} has {action} in an evaluation, which has only forwards")


def _rule_error(program: PipelineSchedule, rank: int, index: int, rule: _Rule, done: bytearray) -> ScheduleError:
    """Return the error for the action at ``index`` of a rank, whose rule is violated."""
    actions = program.ranks[rank]
    action = actions[index]
    stage, _, microbatch = action
    place = stage * program.microbatches + microbatch
    if done[place] & rule.once:
        if action in actions[:index]:
            return ScheduleError(f"rank {rank} has {action} twice")
        halves = (BACKWARD, INPUT, WEIGHT)
        first = next(a for a in actions if a.stage == stage and a.microbatch == microbatch and a.kind in halves)
        return ScheduleError(f"rank {rank} has {action} after {first}: a backward is one B, or one I and one W")
    lacking = rule.needs & ~done[place]
    if not lacking:
        stage, lacking = stage + (1 if rule.offset > 0 else -1), rule.there
    kinds = next(names for bit, names in _NAMES.items() if bit & lacking)
    later = [a for a in actions[index:] if a.stage == stage and a.kind in kinds and a.microbatch == microbatch]
    if later:
        return ScheduleError(f"rank {rank} has {action} before {later[0]}, whose result it needs")
    if kinds[0] == RECV_B and not _backward(program, stage + 1, microbatch):
        return _missing(program, stage + 1, microbatch, (BACKWARD, INPUT))
    names = " or ".join(f"{stage}{kind}{microbatch}" for kind in kinds)
    fixes = (REMOVE_COMMUNICATION_FIX,) if kinds[0] in (RECV_F, RECV_B) else ()
    return ScheduleError(f"rank {rank} has {action} but no {names}, whose result it needs", *fixes)


def _backward(program: PipelineSchedule, stage: int, microbatch: int) -> bool:
    """Return True if some rank computes the gradient of the stage's input."""
    wanted = (Action(stage, BACKWARD, microbatch), Action(stage, INPUT, microbatch))
    return any(action in actions for actions in program.ranks for action in wanted)


def _require_all_done(program: PipelineSchedule, rules: _Rules, done: bytearray) -> None:
    """Reject a program in which some action is missing."""
    count = program.microbatches
    for stage, own in enumerate(rules):
        complete = 0
        for rule in own.values():
            complete |= rule.does
        states = done[stage * count : (stage + 1) * count]
        if states.count(complete) == count:
            continue
        microbatch = next(index for index, state in enumerate(states) if state != complete)
        lacking = complete & ~states[microbatch]
        raise _missing(program, stage, microbatch, next(kinds for bit, kinds in _NAMES.items() if bit & lacking))


def _missing(program: PipelineSchedule, stage: int, microbatch: int, kinds: Sequence[str]) -> ScheduleError:
    names = " or ".join(f"{stage}{kind}{microbatch}" for kind in kinds)
    fixes = (REMOVE_COMMUNICATION_FIX,) if kinds[0] in COMMUNICATION_KINDS else ()
    return ScheduleError(
        f"rank {program.placement[stage]} has no {names}: stages 0 to {program.stages - 1} "
        f"each do micro-batches 0 to {program.microbatches - 1}",
        *fixes,
    )


def _check_orders(program: PipelineSchedule, rules: _Rules) -> None:
    """Reject a channel whose receives are not in the order of its sends; their numbers are equal."""
    placement, count = program.placement, program.microbatches
    sent: dict[tuple[int, int], list[int]] = {edge: [] for edge in channels(placement)}
    received: dict[tuple[int, int], list[int]] = {edge: [] for edge in channels(placement)}
    offsets = _tensor_offsets(count)
    posts: list[dict[str, tuple[int, list[int]]]] = [{} for _ in rules]
    for stage, own in enumerate(rules):
        for kind in own:
            if kind in COMMUNICATION_KINDS:
                side = sent if kind in (SEND_F, SEND_B) else received
                posts[stage][kind] = offsets[kind], side[channel_of(Action(stage, kind, 0), placement)]
    for actions in program.ranks:
        for stage, kind, microbatch in actions:
            post = posts[stage].get(kind)
            if post is not None:
                offset, order = post
                order.append(2 * (stage * count + microbatch) + offset)
    for (source, target), order in sent.items():
        found = received[source, target]
        if order != found:
            number = next(index for index, pair in enumerate(zip(order, found)) if pair[0] != pair[1])
            expected, posted = _receive(order[number], count), _receive(found[number], count)
            raise ScheduleError(
                f"rank {target} has {posted} where {expected} belongs: transfer {number} from rank {source} to "
                f"rank {target} is {peer_action(expected)}, and receives must be in the order of the sends",
                REMOVE_COMMUNICATION_FIX,
            )


def _tensor_offsets(count: int) -> dict[str, int]:
    """Return what to add to twice the index of an action to get the number of the tensor it sends, receives or needs.

    The number of a tensor is twice the index of the action that consumes it, plus 1 for a gradient.
    """
    forward, gradient = {SEND_F: 2 * count, RECV_F: 0, FORWARD: 0}, {SEND_B: 1 - 2 * count, RECV_B: 1}
    return {**forward, **gradient, BACKWARD: 1, INPUT: 1}


def _receive(number: int, count: int) -> Action:
    """Return the RECV of the tensor with this number."""
    place, gradient = divmod(number, 2)
    stage, microbatch = divmod(place, count)
    return Action(stage, RECV_B if gradient else RECV_F, microbatch)


def _check_progress(program: PipelineSchedule, rules: _Rules) -> None:
    """Advance all ranks as far as possible; reject a program that does not reach its end."""
    count, offsets = program.microbatches, _tensor_offsets(program.microbatches)
    waits = [{kind: offsets[kind] for kind, rule in own.items() if rule.needs & (_RECV_F | _RECV_B)} for own in rules]
    sends = {kind: offsets[kind] for kind in (SEND_F, SEND_B)}
    sent = bytearray(2 * len(rules) * count)
    left = [iter(actions) for actions in program.ranks]
    waiting: dict[int, tuple[int, Action]] = {}
    ready = list(range(len(left)))
    while ready:
        rank = ready.pop()
        for action in left[rank]:
            stage, kind, microbatch = action
            number = 2 * (stage * count + microbatch)
            if kind in sends:
                number += sends[kind]
                sent[number] = 1
                if number in waiting:
                    ready.append(waiting.pop(number)[0])
            elif kind in waits[stage]:
                number += waits[stage][kind]
                if not sent[number]:
                    waiting[number] = rank, action
                    break
    if waiting:
        raise _deadlock(program, {rank: (_receive(n, count), action) for n, (rank, action) in waiting.items()})


def _deadlock(program: PipelineSchedule, waits: Mapping[int, tuple[Action, Action]]) -> ScheduleError:
    """Return the error for a deadlock; ``waits`` has, by rank, the RECV and the action that waits for it."""
    sources = {rank: channel_of(receive, program.placement)[0] for rank, (receive, _) in waits.items()}
    seen: list[int] = []
    rank = min(waits)
    while rank not in seen:
        seen.append(rank)
        rank = sources[rank]
    cycle = seen[seen.index(rank) :]
    clauses = [_waiting(program, rank, sources[rank], *waits[rank]) for rank in cycle]
    if len(clauses) > SHOWN:
        clauses[SHOWN - 1 :] = [f"and so on over {len(cycle)} ranks, back to rank {rank}"]
    return ScheduleError(f"deadlock: ranks wait for each other in a cycle: {'; '.join(clauses)}")


def _waiting(program: PipelineSchedule, rank: int, source: int, receive: Action, action: Action) -> str:
    sender = program.ranks[source]
    before = sender[sender.index(peer_action(receive)) - 1]
    return f"rank {rank} waits for {receive} before {action}, which rank {source} sends after {before}"


def _held(kinds: Sequence[str], counted: Mapping[str, int]) -> list[int]:
    """Return what a rank holds after each of its actions."""
    return list(accumulate(map(counted.get, kinds, repeat(0))))


def _check_bound(
    program: PipelineSchedule, kinds: Sequence[Sequence[str]], counted: Mapping[str, int], most: float | None, what: str
) -> None:
    if most is None:
        return
    for rank, own in enumerate(kinds):
        for action, held in zip(program.ranks[rank], _held(own, counted)):
            if held > most:
                raise ScheduleError(f"rank {rank} holds {held} {what} after {action}, more than {most:g}")
