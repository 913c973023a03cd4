"""Find the ranks that others wait for, from the places of all ranks.

A place (:func:`megatron.distributed.places.decode`) has the number of the collectives that a rank has called in each of
its groups, and the one that it waits for. A rank waits for the members of that group which have called fewer. Ranks
that are waited for, and do not wait themselves, are the cause. Calls of equal number have to be equal, too.
"""

from __future__ import annotations

import re
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

from megatron.config.text import listed_ranks
from megatron.distributed.places import BACKGROUND, UNNUMBERED
from megatron.pipeline.actions import Action

PlaceFacts = Mapping[str, Any]
"""Place of a rank; besides what `decode` returns ``host``, ``state`` (of its process) and ``stacks``."""

GroupKey = tuple[str, tuple[int, ...], int]
"""Axes, ranks and use of a group; equal on all of its ranks."""

MAX_PLACES = 4
"""Places listed in a summary."""

MAX_CALLS = 16
"""Calls of each group that are kept, or sent to another machine."""

MIN_SILENCE = 5.0
"""Seconds without a sign of Python at least, until a process is taken to be inside native code: machines are loaded."""

MAX_RANKS_LISTED = 16
"""Ranks listed per place."""

PHASE_NAMES = {"batch-generator": "data loader", "all-grads-sync": "gradient reduction"}
"""Names of timed phases in a summary, where they are others."""


@dataclass(frozen=True)
class Stall:
    """Why ranks wait."""

    # For people: the ranks that others wait for and where they are, and where the others are.
    sentence: str
    # Ranks that are the cause; empty if none is known.
    culprits: tuple[int, ...] = ()
    # The cause has ended: the run is not stalled, but has lost a rank.
    lost: bool = False
    # The ranks have called different collectives.
    differ: bool = False
    places: Mapping[int, PlaceFacts] = field(default_factory=dict)

    @property
    def step(self) -> int:
        """The latest step in which a rank is."""
        return max((place["step"] for place in self.places.values()), default=0)


def explain_stall(places: Mapping[int, PlaceFacts], timeout: float, runs_ahead: bool = False) -> Stall:
    """Return why ranks wait for each other.

    Args:
        places: by rank, of all ranks that are known.
        timeout: seconds after which a rank that waits has stalled. One that has run no Python for half of it is inside
            native code.
        runs_ahead: ranks give collectives to a GPU and do not wait for them.
    """
    if (mismatch := find_mismatch(places)) is not None:
        return Stall(*mismatch, differ=True, places=places)
    ended = tuple(r for r, place in places.items() if is_ended(place))
    if ended:
        return Stall(summary(places, ended, timeout), ended, lost=True, places=places)
    halted = tuple(r for r, place in places.items() if obstacle(place, timeout))
    culprits = halted or missing_ranks(places) or (ranks_behind(places) if runs_ahead else ())
    return Stall(summary(places, culprits, timeout), culprits, places=places)


def is_ended(place: PlaceFacts) -> bool:
    """Return True if the process has ended inside the run, without an error of its own."""
    return place.get("state") == "" and not place["left"] and not place["failed"]


def obstacle(place: PlaceFacts, timeout: float) -> str:
    """Return why a process does not run Python; empty if it does, or may."""
    state = place.get("state", "R")
    if state == "":
        return "" if place["left"] or place["failed"] else "has ended"
    if state in "Tt":
        return f"stopped (process state {state})"
    return "in native code that holds Python's lock" if place["silent"] > max(MIN_SILENCE, timeout / 2) else ""


def by_group(places: Mapping[int, PlaceFacts]) -> dict[GroupKey, dict[int, Mapping[str, Any]]]:
    """Return the rows of each group by rank."""
    found: dict[GroupKey, dict[int, Mapping[str, Any]]] = defaultdict(dict)
    for rank, place in places.items():
        for group in place["groups"]:
            found[group["axes"], tuple(group["ranks"]), group["use"]][rank] = group
    return found


def find_mismatch(places: Mapping[int, PlaceFacts]) -> tuple[str, tuple[int, ...]] | None:
    """Return a sentence on the first calls of equal number that differ, and the ranks that are fewer; None if equal."""
    for (axes, _, _), rows in by_group(places).items():
        numbers = Counter(number for row in rows.values() for number in row["last"])
        for number in sorted((n for n, count in numbers.items() if count > 1), key=int):
            calls = {rank: row["last"][number] for rank, row in rows.items() if number in row["last"]}
            if len({call["signature"] for call in calls.values()}) == 1:
                continue
            ranks_of: dict[str, list[int]] = defaultdict(list)
            for rank, call in calls.items():
                ranks_of[call_text(call)].append(rank)
            if len(ranks_of) == 1:
                before = f"{axes or 'a group'}: the ranks have called other collectives before number {number}"
                return f"{before}: {ranks_text(sorted(calls))}", ()
            sides = sorted(ranks_of.items(), key=lambda side: (len(side[1]), side[1]))
            (text, fewer), *others = sides
            rest = "; ".join(f"{ranks_text(ranks)} called {other}" for other, ranks in others)
            place = describe(places[fewer[0]], 0.0)
            axes = calls[fewer[0]]["axes"]
            sentence = f"{ranks_text(fewer)} called {text} in {axes} as number {number} of the group; {rest}"
            return f"{sentence} ({ranks_text(fewer)}: {place})", tuple(fewer)
    return None


def call_text(call: Mapping[str, Any]) -> str:
    """Return a call as text, such as ``all-reduce of 1,024 x float32``."""
    size = f" of {call['count']:,} x {call['dtype']}" if call["count"] else ""
    return f"{call['operation']}{size}"


def awaited_call(place: PlaceFacts) -> Mapping[str, Any] | None:
    """Return the group whose call a rank waits for; those of background threads come last."""
    waiting = [group for group in place["groups"] if group["awaited"]]
    return min(waiting, key=lambda group: group["axes"] == BACKGROUND, default=None)


def missing_ranks(places: Mapping[int, PlaceFacts]) -> tuple[int, ...]:
    """Return the ranks that others wait for and that wait for no other; all of a circle if there is only that."""
    rows = by_group(places)
    waits: dict[int, set[int]] = {}
    for rank, place in places.items():
        if (group := awaited_call(place)) is None:
            continue
        number, key = group["awaited"]["number"], (group["axes"], tuple(group["ranks"]), group["use"])
        if number == UNNUMBERED:
            arrived = {other for other, row in rows[key].items() if row["awaited"]}
        else:
            arrived = {other for other, row in rows[key].items() if row["calls"] >= number}
        waits[rank] = {*group["ranks"]} - arrived
    awaited = {other for missing in waits.values() for other in missing}
    return tuple(sorted({rank for rank in awaited if not waits.get(rank)} or awaited))


def ranks_behind(places: Mapping[int, PlaceFacts]) -> tuple[int, ...]:
    """Return the ranks that wait for no call, and have called fewer than others of a group; for GPUs, which wait."""
    behind = set()
    for rows in by_group(places).values():
        most = max(row["calls"] for row in rows.values())
        behind |= {rank for rank, row in rows.items() if row["calls"] < most and awaited_call(places[rank]) is None}
    return tuple(sorted(behind)) if len(behind) < len(places) else ()


def describe(place: PlaceFacts, timeout: float) -> str:
    """Return a place as text, such as ``data loader, step 12`` or ``all-reduce dp, step 12, micro-batch 3 (1F3)``."""
    group, at = awaited_call(place), PHASE_NAMES.get(place["phase"], place["phase"]) or "start of the run"
    if group is not None:
        axes = group["awaited"]["axes"] or group["axes"]
        if group["channel"]:
            at = f"message from rank {group['ranks'][0]} to rank {group['ranks'][1]}"
        else:
            at = f"{group['awaited']['operation']} {axes}"
    parts = [at]
    if why := timeout and obstacle(place, timeout):
        parts = [f"{why}, {at}"]
    if place["step"]:
        parts.append(f"step {place['step']}")
    if place["action"]:
        action = Action.from_number(place["action"])
        parts.append(f"micro-batch {action.microbatch} ({action})")
    return ", ".join(parts)


def summary(places: Mapping[int, PlaceFacts], culprits: Sequence[int], timeout: float) -> str:
    """Return one line: the culprits with their places, then those of the others."""
    parts = []
    for rank in culprits[:MAX_PLACES]:
        if rank not in places:
            parts.append(f"rank {rank}: no answer")
            continue
        frame = innermost_frame(places[rank].get("stacks", ""))
        host = f" on {places[rank]['host']}" if "host" in places[rank] else ""
        parts.append(f"rank {rank}{host}: {describe(places[rank], timeout)}{frame}")
    if len(culprits) > MAX_PLACES:
        parts.append(f"{len(culprits) - MAX_PLACES} more ranks")
    ranks_at: dict[str, list[int]] = defaultdict(list)
    for rank, place in places.items():
        if rank not in culprits and not place["left"]:
            ranks_at[describe(place, timeout)].append(rank)
    if len(ranks_at) == 1 and culprits:
        parts.append(f"others: {next(iter(ranks_at))}")
    else:
        most = sorted(ranks_at.items(), key=lambda item: -len(item[1]))
        parts += [f"{ranks_text(ranks)}: {place}" for place, ranks in most[:MAX_PLACES]]
        if len(most) > MAX_PLACES:
            parts.append(f"{len(most) - MAX_PLACES} more places")
    return "; ".join(parts)


def ranks_text(ranks: Sequence[int]) -> str:
    """Return ``rank 3`` or ``ranks 0, 1 and 7 more``."""
    return listed_ranks([*ranks], MAX_RANKS_LISTED)


def innermost_frame(stacks: str) -> str:
    """Return the last line of the main thread's Python stack as `` (NAME at FILE:LINE)``; empty if it is unknown."""
    _, found, main = stacks.rpartition("(most recent call first):\n")
    frame = re.search(r'File "(.*)", line (\d+) in (\S+)', main) if found else None
    return f" ({frame[3]} at {PurePath(frame[1]).name}:{frame[2]})" if frame else ""


def short_place(place: PlaceFacts) -> dict[str, Any]:
    """Return a place with the last calls of each group only."""
    groups = [{**group, "last": dict([*group["last"].items()][-MAX_CALLS:])} for group in place["groups"]]
    return {**place, "groups": groups}


def incident_facts(stall: Stall) -> dict[str, Any]:
    """Return the facts of an incident of kind ``hang``: the culprits, and the places of all ranks without stacks.

    Each place begins with ``at``, as in the sentence, and its groups with those whose call it waits for.
    """
    places = {}
    for rank, place in stall.places.items():
        known = {name: value for name, value in short_place(place).items() if name != "stacks"}
        groups = sorted(known["groups"], key=lambda group: group["awaited"] is None)
        places[str(rank)] = {"at": describe(place, 0.0), **known, "groups": groups}
    return {"culprits": [*stall.culprits], "places": places, "noticed": time.time()}
