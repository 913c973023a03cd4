"""A clock for schedules that shares no code with the simulator: it shows that they end, and when."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product

from megatron.pipeline.actions import Action, PipelineSchedule

UNIT = {"F": 1, "B": 2, "I": 1, "W": 1}
"""Every half of a backward takes as long as a forward."""


class StuckError(Exception):
    """Every rank waits for another one."""


def needs(action: Action, stages: int) -> list[tuple[int, str, int]]:
    """Return the actions that must be over before; a whole backward counts as an I and a W."""
    stage, kind, mb = action
    if kind == "W":
        return [(stage, "I", mb)]
    if kind == "F":
        return [(stage - 1, "F", mb)] if stage else []
    return [(stage, "F", mb)] + ([(stage + 1, "I", mb)] if stage + 1 < stages else [])


def yields(action: Action) -> list[tuple[int, str, int]]:
    """Return the actions that are over with this one."""
    kinds = "IW" if action.kind == "B" else action.kind
    return [(action.stage, kind, action.microbatch) for kind in kinds]


def clock(schedule: PipelineSchedule, seconds: Mapping[str, float] = UNIT) -> list[tuple[float, float]]:
    """When each rank starts its first and ends its last action; communication takes no time.

    Every stage takes ``seconds``. Each stage has to do everything once with each micro-batch.
    """
    everything = set(product(range(schedule.stages), "FIW", range(schedule.microbatches)))
    done: dict[tuple[int, str, int], float] = {}
    position, starts, now = ([0] * len(schedule.ranks) for _ in range(3))
    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(schedule.ranks):
            for action in actions[position[rank] :]:
                before = needs(action, schedule.stages)
                if not all(key in done for key in before):
                    break
                start = max([now[rank], *(done[key] for key in before)])
                starts[rank] = starts[rank] if position[rank] else start
                now[rank] = start + seconds[action.kind]
                for key in yields(action):
                    assert key not in done, f"{action} is there twice"
                    done[key] = now[rank]
                position[rank] += 1
                moved = True
    waiting = [str(actions[at]) for actions, at in zip(schedule.ranks, position, strict=True) if at < len(actions)]
    if waiting:
        raise StuckError(", ".join(waiting))
    assert set(done) == everything
    return list(zip(starts, now, strict=True))


def bubbles(schedule: PipelineSchedule, seconds: Mapping[str, float] = UNIT) -> list[float]:
    """Seconds that each rank idles between its first and its last action."""
    work = [sum(seconds[action.kind] for action in actions) for actions in schedule.ranks]
    return [end - start - busy for (start, end), busy in zip(clock(schedule, seconds), work, strict=True)]


def memory(actions: Sequence[Action]) -> int:
    """The most (stage, micro-batch) pairs between F and the end of backward at once."""
    alive = most = 0
    for action in actions:
        alive += action.kind == "F"
        most = max(most, alive)
        alive -= action.kind in "BW"
    return most
