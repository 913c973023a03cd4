"""Notice that this rank makes no progress, and collect the places and stacks of all ranks.

The watchdog thread of each rank (:class:`megatron.training.failure_report.PeerWatchdog`) polls a :class:`StallWatch`.
It writes the stacks of the rank's threads when the rank has made no progress for most of the timeout. A rank whose
native code holds Python's lock has no thread that can do so, so two timers of the system are set again at every poll:
faulthandler's thread, which needs no lock, writes the stacks, and an alarm ends the process. A stopped process does
neither. The ranks of its machine read its place, and end it when they fail.
"""

from __future__ import annotations

import base64
import faulthandler
import json
import os
import signal
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron.distributed.comm import Group
from megatron.distributed.launch import add_to_count, publish_text, read_texts, write_flight_record
from megatron.distributed.places import BEAT, FAILED, LEFT, PLACE, REPORTED, read_all
from megatron.training.first_cause import DISK_SECONDS, within
from megatron.training.incidents import Incident, record_incident
from megatron.training.stalls import (
    Stall,
    awaited_call,
    explain_stall,
    find_mismatch,
    incident_facts,
    obstacle,
    short_place,
)

DUMP_FRACTION = 0.9
"""Part of the timeout without progress after which a rank writes its stacks."""

ALARM_SECONDS = 8.0
"""Seconds after the timeout at which a rank ends that runs no Python."""

REPORT_SECONDS = 3.0
"""Seconds that ranks wait for the first that failed to collect their places."""

REARM_SECONDS = 5.0
"""Seconds between two starts of faulthandler's timer, which starts a thread."""

NO_RAISE_SECONDS = 3.0
"""Seconds after the timeout in which a collective of gloo has raised."""

REQUEST_KEY, RECORD_KEY, REPORTED_KEY = "places requested", "record of rank {}", "failure reported"
"""Keys of the store: ranks publish their places, a place, and the first failure is reported."""

ASKERS_KEY = "ranks that ask for places"
"""Key of the store, which counts them: only the first one collects the places of all ranks."""

MAX_STACKS = 20_000
"""Characters of a rank's stacks that are sent to another machine."""

READ_AT_ONCE = 64
"""Records that one request to the store reads, so that it stays within its timeout."""


class StallWatch:
    """Watches the progress of this rank, from its watchdog thread."""

    def __init__(self, world: Group) -> None:
        """Begin now. Without :func:`megatron.distributed.launch.connect_places` nothing is watched."""
        self._world, self._timeout = world, PLACE.timeout
        self._snapshot, self._since = b"", time.monotonic()
        self._armed = -REARM_SECONDS
        self._has_stacks = self._has_published = False
        self._asks: bool | None = None  # this rank collects the places of all; None before it may have to
        # another handler or timer of the program has precedence
        self._alarms = signal.getsignal(signal.SIGALRM) == signal.SIG_DFL and not any(
            signal.getitimer(signal.ITIMER_REAL)
        )
        PLACE.slots[LEFT] = PLACE.slots[FAILED] = PLACE.slots[REPORTED] = 0
        PLACE.finishes_save = False
        self.interval = min(1.0, self._timeout / 10) if self._timeout else 1.0
        self.poll()  # the timers run before the first step

    @property
    def still(self) -> float:
        """Seconds without progress; 0 while a rank that has failed waits for a save in progress."""
        return 0.0 if PLACE.finishes_save else time.monotonic() - self._since

    def poll(self) -> None:
        """Note that this process runs Python, and write its stacks if it makes no progress."""
        if not self._timeout:
            return
        now = time.monotonic()
        PLACE.slots[BEAT] = time.monotonic_ns()
        if self._alarms and signal.getsignal(signal.SIGALRM) == signal.SIG_DFL:
            signal.setitimer(signal.ITIMER_REAL, self._timeout + ALARM_SECONDS)
        rearm = min(REARM_SECONDS, self._timeout / 20)
        if PLACE.stacks is not None and now >= self._armed + rearm:
            self._armed = now
            faulthandler.dump_traceback_later(DUMP_FRACTION * self._timeout, file=PLACE.stacks)
        if (snapshot := PLACE.snapshot()) != self._snapshot:
            self._snapshot, self._since, self._has_stacks = snapshot, now, False
        elif self.still >= DUMP_FRACTION * self._timeout and not self._has_stacks:
            self._has_stacks = True
            write_stacks()
            within(DISK_SECONDS, write_flight_record, None)

    def find(self) -> Stall | None:
        """Return a stall that no collective has reported: of another backend than gloo, or of unequal calls."""
        if not self._timeout:
            return None
        limit = self._timeout + NO_RAISE_SECONDS
        if self._world.uses_nccl:  # its own watchdog aborts the process at the timeout
            limit = self._timeout - min(5.0, self._timeout / 20)
        if self.still >= limit and (self._world.uses_nccl or awaited_call(PLACE.read()) is not None):
            stall = current_stall(self._world) if self._is_asker() else None
            return stall if stall is not None and stall.culprits else None
        return current_stall(self._world) if self._differs() and self._is_asker() else None

    def _is_asker(self) -> bool:
        """Return True on the first rank that calls this; without a store, on the lowest of each machine that can.

        All ranks come to this at about the same time. If each read the places of all others, the store of 1,000 ranks
        would have to send a million records within seconds. The others end when the first one has reported.
        """
        if self._asks is None:
            number = add_to_count(ASKERS_KEY)
            self._asks = number == 1 or (number == 0 and self._is_lowest())
        return self._asks

    def _is_lowest(self) -> bool:
        """Return True if no lower rank of this machine could act in the place of this one."""
        lower = [peer for rank, peer in PLACE.peers.items() if rank < self._world.rank]
        return all(peer.slot(FAILED) or obstacle(peer.read(), PLACE.timeout) for peer in lower)

    def _differs(self) -> bool:
        """Return True if collectives differ from those of the next rank of this machine.

        It may write its record while that is read, so two readings have to find the same difference.
        """
        next_rank = min(PLACE.peers, key=lambda rank: (rank < self._world.rank, rank), default=None)
        if next_rank is None or not PLACE.peers[next_rank].differs():
            return False

        def difference() -> str:
            places = {self._world.rank: PLACE.read(), next_rank: PLACE.peers[next_rank].read()}
            sentence, _ = find_mismatch(places) or ("", ())
            return sentence.split(" (")[0]  # without the place

        first = difference()
        return bool(first) and difference() == first

    def answer(self) -> None:
        """Publish this rank's place, and those of ranks of this machine that cannot, for ranks of other machines."""
        if self._has_published or not PLACE.hosts or len(PLACE.peers) + 1 == self._world.size:
            return
        self._has_published = True
        if not self._has_stacks:
            write_stacks()
        publish_place(self._world.rank, {**PLACE.read(), "stacks": own_stacks()})
        answering = [rank for rank, peer in PLACE.peers.items() if not obstacle(peer.read(), PLACE.timeout)]
        if self._world.rank < min(answering, default=self._world.size):
            for rank in PLACE.peers.keys() - {*answering}:
                publish_place(rank, peer_place(rank))

    def close(self, failed: bool) -> None:
        """Stop watching; the rank has left the run, or ``failed``."""
        if not self._timeout:
            return
        self._timeout = 0.0
        faulthandler.cancel_dump_traceback_later()
        PLACE.slots[BEAT] = 0
        if self._alarms:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
        if failed:
            PLACE.slots[FAILED] = time.monotonic_ns()
            _failed[:] = [self]  # answers if it is asked: see `await_report`
        else:
            PLACE.slots[LEFT] = 1


def write_stacks() -> None:
    """Write the stacks of this process's threads where the ranks of its machine can read them."""
    if PLACE.stacks is not None:
        os.ftruncate(PLACE.stacks, 0)
        os.lseek(PLACE.stacks, 0, os.SEEK_SET)
        faulthandler.dump_traceback(file=PLACE.stacks)


def own_stacks() -> str:
    """Return what :func:`write_stacks` has written; a rank that is asked before it has written them does so now."""
    if PLACE.stacks is None:
        return ""
    if not read_all(PLACE.stacks):
        write_stacks()
    return read_all(PLACE.stacks)


def publish_place(rank: int, place: Mapping[str, Any]) -> None:
    """Publish the place of a rank in the store, compressed to a few KB."""
    content = json.dumps({**short_place(place), "stacks": place["stacks"][-MAX_STACKS:]})
    publish_text(RECORD_KEY.format(rank), base64.b64encode(zlib.compress(content.encode())).decode())


def read_places(ranks: Sequence[int]) -> dict[int, dict[str, Any]]:
    """Return the places that ranks have published, as far as they have."""
    found: dict[int, dict[str, Any]] = {}
    for first in range(0, len(ranks), READ_AT_ONCE):
        keys = {RECORD_KEY.format(rank): rank for rank in ranks[first : first + READ_AT_ONCE]}
        texts = read_texts([*keys])
        found |= {keys[key]: json.loads(zlib.decompress(base64.b64decode(text))) for key, text in texts.items()}
    return found


def peer_place(rank: int) -> dict[str, Any]:
    """Return the place of another rank of this machine, with its stacks."""
    peer = PLACE.peers[rank]
    return {**peer.read(), "stacks": peer.read_stacks()}


def is_peer_failed() -> bool:
    """Return True if another rank of this machine has failed, or has ended without leaving the run."""
    return any(peer.slot(FAILED) or not (peer.slot(LEFT) or peer.state()) for peer in PLACE.peers.values())


def gather_places(world: Group) -> dict[int, dict[str, Any]]:
    """Return the places of all ranks that are known, with their stacks: of this machine, and of others that answer."""
    places = {rank: peer_place(rank) for rank in PLACE.peers}
    places[world.rank] = {**PLACE.read(), "stacks": own_stacks()}
    others = {*range(world.size)} - places.keys()
    if others:
        publish_text(REQUEST_KEY, "")
        wait_for(lambda: places.update(read_places(sorted(others - places.keys()))) or not others - places.keys())
    if len({host for host, _ in PLACE.hosts}) > 1:
        for rank, place in places.items():
            place["host"] = PLACE.hosts[rank][0]
    return dict(sorted(places.items()))


def wait_for(done: Callable[[], object], seconds: float = REPORT_SECONDS) -> None:
    """Poll until ``done()``, for a few seconds at most."""
    until = time.monotonic() + seconds
    while not done() and time.monotonic() < until:
        time.sleep(0.05)


_failed: list[StallWatch] = []
"""The watch of this rank, once it has failed."""

_explained: list[tuple[memoryview, Stall]] = []
"""The stall of the current run, once it is explained: evidence is lost as ranks end."""


def current_stall(world: Group) -> Stall | None:
    """Return why the ranks of this run wait for each other, as of the first answer; None if no places are known."""
    if not PLACE.timeout:
        return None
    if _explained and _explained[-1][0] is PLACE.slots:  # connect_places makes another array
        return _explained[-1][1]
    stall = explain_stall(gather_places(world), PLACE.timeout, world.uses_nccl)
    if stall.culprits or stall.differ:
        _explained[:] = [(PLACE.slots, stall)]
    return stall


def save_stall(run_dir: str, stall: Stall) -> Path:
    """Write an incident with the places of all ranks, and beside it ``rank_N.txt`` with the stacks of each.

    Raises:
        OSError: if they cannot be written.
    """
    folder = record_incident(run_dir, Incident("hang", stall.step, stall.sentence, incident_facts(stall)))
    for rank, place in stall.places.items():
        if text := place["stacks"]:
            (folder / f"rank_{rank}.txt").write_text(text)
    return folder


def mark_reported() -> None:
    """Publish that the first failure is reported."""
    PLACE.slots[REPORTED] = 1
    if PLACE.timeout:
        publish_text(REPORTED_KEY, "")


def await_report() -> None:
    """Wait until the first failure is reported, a few seconds at most, because this process may host the store.

    Publish the place of this rank meanwhile if the rank that reports asks for it.
    """

    def is_reported() -> bool:
        if any(peer.slot(REPORTED) for peer in PLACE.peers.values()):
            return True
        found = read_texts([REPORTED_KEY, REQUEST_KEY])
        if REQUEST_KEY in found and _failed:
            _failed[-1].answer()
        return REPORTED_KEY in found

    if PLACE.timeout:
        wait_for(is_reported)


def end_stuck_peers() -> None:
    """Kill the ranks of this machine that run no Python: stopped, or inside native code. They cannot end themselves."""
    for peer in PLACE.peers.values():
        place = peer.read()
        if place["state"] and obstacle(place, PLACE.timeout):
            peer.kill()
