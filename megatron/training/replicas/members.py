"""Replicas of a run: how they find each other, agree on the members of an exchange, and survive each other.

A replica is a run of its own, with its own torch.distributed world: of DiLoCo (`training/diloco`), or of elastic data
parallelism (`training/elastic`). Replicas share nothing but a key-value store, which ``tools/diloco_server.py`` hosts,
so none of them is special. Rank r of a replica exchanges tensors with the ranks r of the others, in a group outside of
its world.

Exchanges are attempts with consecutive numbers. In an attempt,

1. every replica arrives; once all that are alive have, the first to notice fixes the members (an atomic compare-and-set
   in the store, so that all read the same list);
2. the ranks of the members exchange tensors, and vote;
3. if all ranks of all members have voted, the attempt is committed; if an exchange fails, or a member dies before that,
   it is aborted. Which of the two happens first is decided by a second compare-and-set.

Nothing may be changed before a commit. After an abort the survivors make the next attempt. A replica that starts
arrives at the next attempt whose members are not fixed.

The members of a committed attempt may exchange again without another attempt (:meth:`Replicas.settle`): each further
exchange has a decision of its own, and the first that is aborted ends the series.
"""

from __future__ import annotations

import json
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from megatron.config.errors import Problem, UserError
from megatron.config.files import parse_json
from megatron.config.text import counted, listed, printable
from megatron.distributed.comm import CommMeter, Group
from megatron.distributed.launch import is_peer_lost
from megatron.training.replicas.store import GREETING, KEPT_ATTEMPTS, NONCE_BYTES, AuthenticatedChannel, body_size

T = TypeVar("T")

POLL_SECONDS = 0.02
"""Pause between two looks at the store while waiting."""

RANKS_PER_POLL = 64
"""Ranks of all replicas above which each of them looks less often."""

BLOCKED_SECONDS = 0.1
"""Time that a request may wait in the server: the other threads of the client wait as long."""

WATCH_SECONDS = 0.2
"""Time between two looks of a rank for a group that another rank has found broken."""

CONNECT_SECONDS = 2.0
"""First timeout for opening a group of replicas that watch each other; it doubles after each failure."""

BEATS_PER_TIMEOUT = 6
"""Heartbeats in the time after which a replica without one counts as dead."""

MAX_FAILURES = 30
"""Failed attempts in a row with the same members, each of which is alive, after which a replica gives up."""

MAX_COUNT = 1 << 62
"""Above all numbers of rounds, steps and samples, and above digests."""

MAX_ROUNDS = 1 << 40

FINISHED = "finished"

KNOCK = "knock"
"""Key that is there while a replica waits to join, also for a moment afterwards."""

NOT_FINITE = "not finite"
"""Decision on an attempt whose mean is of no use."""

AXES = "replica"
"""Name under which bytes are counted."""


class ReplicaError(RuntimeError):
    """This replica cannot continue: the server is gone, or the other replicas continued without it."""


class ServerLostError(ReplicaError):
    """The server is gone; the state of this replica is whole."""


class OtherSecretError(OSError):
    """The server and this replica have different secrets."""


class StoreClient(distributed_c10d.Store):
    """A connection to a :class:`~megatron.training.replicas.store.StoreServer`, also for gloo's rendezvous."""

    def __init__(self, host: str, port: int, timeout: float, secret: bytes = b"") -> None:
        """Connect; OSError if there is no server, or it has another secret. ``timeout`` is in seconds."""
        super().__init__()
        self._seconds, self._lock = timeout, threading.Lock()
        # Polled while a key is awaited; True gives up, because its writer is gone.
        self.given_up: Callable[[], bool] = lambda: False
        self._socket = socket.create_connection((host, port), timeout)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._file = self._socket.makefile("rb")
        greeting = self._file.read(len(GREETING) + NONCE_BYTES)
        if not greeting:
            raise ConnectionResetError("it closed the connection, or has as many as it accepts")
        if not greeting.startswith(GREETING):
            raise OSError("what answers is no replica server of this version")
        mine = secrets.token_bytes(NONCE_BYTES)
        self._channel = AuthenticatedChannel(secret, greeting[len(GREETING) :] + mine, server=False)
        self._socket.sendall(mine)
        try:
            self._request(b"hello", certain=True)
        except ReplicaError as error:
            raise OSError(str(error)) from error
        except RuntimeError as error:
            if isinstance(error.__cause__, ConnectionError):  # it gave the place to another connection
                raise error.__cause__ from error
            raise OtherSecretError(f"it does not have the secret of this replica ({error})") from error

    def _request(self, *fields: bytes, values: int = 0, certain: bool = False) -> list[bytes]:
        """Return the answer ``ok`` with so many ``values``; [] for ``none``, unless ``certain`` excludes it.

        ReplicaError if the server refuses the request, or answers something else; RuntimeError if it is gone.
        """
        with self._lock:
            try:
                self._socket.sendall(self._channel.seal(fields))
                head = self._file.read(4)
                if len(head) < 4:
                    raise OSError("it closed the connection")
                answer = self._channel.open(self._file.read(body_size(head)))
            except (OSError, ValueError) as error:
                self._file.close()  # which keeps the socket open
                self._socket.close()
                raise RuntimeError(str(error)) from error
        match answer:
            case [b"ok", *_] if len(answer) == 1 + values:
                return answer
            case [b"none"] if not certain:
                return []
            case [b"refused", reason]:
                raise ReplicaError(
                    f"the replica server refuses a request: {printable(reason.decode(errors='replace'))}"
                )
        raise ReplicaError(
            f"what answers is no replica server of this version: it sent {counted(len(answer), 'field')} to a request "
            f"{fields[0].decode()}; start tools/diloco_server.py of the replicas' version, and all replicas again"
        )

    def set(self, key: str, value: str | bytes) -> None:
        """Set a value."""
        content = value.encode() if isinstance(value, str) else bytes(value)
        self._request(b"set", key.encode(), content, certain=True)

    def read(self, keys: Iterable[str]) -> list[bytes]:
        """Return the values of some keys at one time; empty for a key that is not there."""
        names = [key.encode() for key in keys]
        return self._request(b"read", *names, values=len(names), certain=True)[1:]

    def get(self, key: str) -> bytes:
        """Return a value, once it is there; raise DistStoreError after the timeout."""
        return self._await([key], self._seconds)[0]

    def check(self, keys: list[str]) -> bool:
        """Return True if all keys are there."""
        return bool(self._request(b"check", *(key.encode() for key in keys)))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys are there; raise DistStoreError after the timeout."""
        self._await(keys, self._seconds if timeout is None else timeout.total_seconds())

    def _await(self, keys: list[str], seconds: float) -> list[bytes]:
        until, names = time.monotonic() + seconds, [key.encode() for key in keys]
        while True:
            left = until - time.monotonic()
            pause = f"{1000 * max(0.0, min(left, BLOCKED_SECONDS)):.0f}".encode()
            if found := self._request(b"wait", pause, *names, values=len(keys)):
                return found[1:]
            if left <= 0 or self.given_up():
                raise dist.DistStoreError(f"no {listed(keys)} after {seconds - left:.3g} seconds")

    def check_any(self, keys: list[str]) -> bool:
        """Return True if any of the keys has a value."""
        return any(self.read(keys))

    def add(self, key: str, amount: int) -> int:
        """Add to a number, which is 0 at first; return the sum."""
        return int(self._request(b"add", key.encode(), str(amount).encode(), values=1)[1])

    def bind(self, key: str) -> None:
        """Let the server set a key when this connection ends."""
        self._request(b"bind", key.encode(), certain=True)

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        """Set a value that is ``expected`` (empty for none), and return the one that is there then."""
        return self._request(b"compare_set", key.encode(), expected.encode(), value.encode(), values=1, certain=True)[1]

    # torch calls these, too

    def delete_key(self, key: str) -> bool:
        """Delete a key; return False if there is none."""
        return bool(self._request(b"delete", key.encode()))

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the time for a key to appear."""
        self._seconds = timeout.total_seconds()


def connect(server: str, timeout: float, secret: bytes = b"", flags: str = "--diloco") -> distributed_c10d.Store:
    """Return a client of the store at ``HOST:PORT``.

    Raises:
        UserError: if the name is unknown, there is none within ``timeout`` seconds, or it has another secret.
    """
    host, _, port = server.rpartition(":")
    until = time.monotonic() + timeout
    while True:
        try:
            return StoreClient(host, int(port), timeout, secret)
        except (OSError, ValueError) as error:
            if isinstance(error, ConnectionError) and time.monotonic() < until:
                time.sleep(10 * POLL_SECONDS)  # it may be starting, or busy
                continue
            sentence = f"no replica server answers at {server}: {error}"
            start = f"python tools/diloco_server.py --port {port}"
            fix = start if host in ("127.0.0.1", "localhost") else f"{start} --host {host}"
            if isinstance(error, OtherSecretError):
                fix = f"{flags}-secret-file FILE, with the secret of the server"
            raise UserError([Problem("E954", sentence, (fix,))]) from error


@dataclass(frozen=True)
class Member:
    """A replica in an attempt, as it arrived."""

    # Position among the streams of samples, and order in the group.
    index: int
    # Of this start of the replica.
    id: str
    # What it passed to :meth:`Replicas.agree`.
    facts: Mapping[str, Any] = field(compare=False)


def _count(value: Any, least: int = 0, limit: int = MAX_COUNT) -> int:
    """Return a number of things; raise ValueError for any other value."""
    if type(value) is not int or not least <= value < limit:
        raise ValueError(f"{str(value)[:40]} is no number of rounds, steps or samples")
    return value


def check_facts(facts: Any) -> Mapping[str, Any]:
    """Return the facts of a replica; raise ValueError, TypeError or KeyError if they are malformed."""
    if len(facts["position"]) != 2:
        raise ValueError("position is not a step and a number of samples")
    for value in (*facts["position"], facts.get("digest", 0), *facts.get("numbers", ())):
        _count(value)
    rounds = _count(facts.get("rounds", -1), -1, MAX_ROUNDS)
    kinds = {"starting": bool, "whole": bool, "pending": bool, "norm": float, "run": str}
    for name, value in facts.items():
        if not isinstance(value, kinds.get(name, object)):
            raise ValueError(f"{name} is {str(value)[:40]}")
    return {**facts, "starting": facts["starting"], "whole": facts["whole"], "rounds": rounds}


class Replicas:
    """This rank of a replica among the replicas of the run.

    The replica's first rank (``leader``) claims an index, sends heartbeats and arrives for the replica. All ranks vote.
    """

    def __init__(
        self,
        store: distributed_c10d.Store,
        rank: int,
        ranks: int,
        count: int,
        timeout: float,
        poll: float = POLL_SECONDS,
        flags: str = "--diloco",
    ) -> None:
        """Take part as rank ``rank`` of a replica of ``ranks``.

        Args:
            store: shared by all replicas.
            rank: of this process in its replica.
            ranks: of each replica.
            count: indices that replicas can have.
            timeout: seconds without a heartbeat after which a replica is dead; also of a transfer of one chunk.
            poll: seconds between two looks at the store.
            flags: beginning of the options of these replicas, for errors.
        """
        self.rank, self.ranks, self.count, self.timeout, self.poll = rank, ranks, count, timeout, poll
        self.leader = rank == 0
        self._flags = flags
        self.index, self.id = -1, ""
        self.meter = CommMeter()
        # Number of the next attempt, and of the last one that was committed here.
        self.attempt, self.series = 0, -1
        self._watched = False
        self._tried, self._failures = list[Member](), 0  # members of the last attempt, and how often they failed since
        self._store = store
        self._group: tuple[tuple[Member, ...], Group] | None = None
        self._opened = -1  # attempt in which the group was opened
        self._beats: dict[str, tuple[str, float]] = {}  # last heartbeat of a replica, and when it was new here
        self._stopped = threading.Event()

    # ---- The store

    def _ask(self, request: Callable[..., T], *arguments: object) -> T:
        """Make a request to the store.

        Raises:
            ReplicaError: if the server does not answer.
            DistStoreError: if a key is not there in time.
        """
        try:
            return request(*arguments)
        except (ReplicaError, dist.DistStoreError):
            raise
        except RuntimeError as error:
            raise ServerLostError(
                "the replica server is gone: start it and all replicas again, which resume from their checkpoints "
                f"({str(error).splitlines()[0]})"
            ) from error

    def _read(self, *keys: str) -> list[str]:
        """Return the values of some keys; empty for a key that is not there."""
        if isinstance(self._store, StoreClient):
            found = self._ask(self._store.read, keys)
        else:
            found = [self._ask(self._store.get, key) if self._ask(self._store.check, [key]) else b"" for key in keys]
        return [value.decode(errors="replace") for value in found]

    def _parse(self, key: str, value: str, parse: Callable[[Any], T]) -> T:
        """Return what ``parse`` makes of the JSON ``value`` of a key.

        Raises:
            ReplicaError: if it is not JSON, or ``parse`` raises an error.
        """
        try:
            return parse(parse_json(value))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ReplicaError(
                f"the replica server's value {key} is not one that replicas write ({printable(str(error))[:200]}): "
                "another program or version writes there; give this run a server of its own, with "
                f"{self._flags}-secret-file"
            ) from error

    def _replace(self, key: str, before: str, after: str) -> bool:
        """Set a value that is ``before`` (empty for none); return False if it is another."""
        found: bytes = self._ask(self._store.compare_set, key, before, after)
        return found.decode(errors="replace") == after

    # ---- Being alive

    def claim(self, wanted: int | None, required: bool, options: Mapping[str, Any]) -> int:
        """Claim an index, and start the heartbeat; for the leader.

        Args:
            wanted: index to try first; without ``required`` ignored if there are fewer.
            required: accept no other.
            options: what must be the same in all replicas, JSON.

        Raises:
            UserError: if the options differ from those of the first replica, or no index is free.
        """
        if wanted is not None and not required and wanted >= self.count:
            wanted = None
        mine = json.dumps(options, sort_keys=True)
        if not self._replace("options", "", mine):
            (there,) = self._read("options")
            first = self._parse("options", there, lambda found: dict[str, Any](found.items()))
            names = [name for name in {*first, *options} if first.get(name) != options.get(name)]
            if names:
                shown = listed([f"{n}: {first.get(n)} there, {options.get(n)} here" for n in sorted(names)])
                sentence = f"the server belongs to a run with other options: {shown}"
                raise UserError([Problem("E955", sentence, ("python tools/diloco_server.py --port PORT",))])
        self.id = secrets.token_hex(8)
        self._ask(self._store.set, f"beat/{self.id}", "0")
        began = time.monotonic()
        while (waited := time.monotonic() - began) < 2 * self.timeout:
            only = wanted is not None and (required or waited < 1.5 * self.timeout)  # until its last holder is dead
            for index in [wanted] if only and wanted is not None else range(self.count):
                (holder,) = self._read(f"holder/{index}")
                if not (holder and self._alive([holder])) and self._replace(f"holder/{index}", holder, self.id):
                    self.index = index
                    threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()
                    return index
            time.sleep(self.poll)
        which = f"replica {wanted} is alive" if required else f"all {self.count} replicas are alive"
        more = f"{self._flags}-replicas {self.count + 1} in all of them"
        fixes = (f"drop {self._flags}-replica",) if required else (more,)
        raise UserError([Problem("E956", f"this replica has no place: {which}", fixes)])

    def watch(self) -> None:
        """Let the replica count as dead once this process is gone, and watch the others; called after the claim.

        All replicas call it, or none. Needs a :class:`StoreClient`.
        """
        self._watched = True
        if isinstance(self._store, StoreClient):
            self._ask(self._store.bind, f"gone/{self.id}")
        threading.Thread(target=self._watch, name="replica watch", daemon=True).start()

    def _watch(self) -> None:
        """Close a group that another rank has found broken, which ends an exchange that this rank is blocked in.

        The leader also looks at the heartbeats of the members, which end when their machine is lost.
        """
        while not self._stopped.wait(WATCH_SECONDS):
            if (current := self._group) is None:
                continue
            try:
                if self.leader and not self._are_alive(current[0]):
                    self._ask(self._store.set, f"{self._opened}/broken", "1")
                if self._ask(self._store.check, [f"{self._opened}/broken"]) and self._group is current:
                    self._abort(current[1])
            except ReplicaError:  # the main thread finds out
                return

    def break_group(self) -> None:
        """Close the group after an error in it, on all ranks of all members."""
        if self._group is not None:
            self._ask(self._store.set, f"{self._opened}/broken", "1")
        self.close_group()

    def leave(self) -> None:
        """Release the index, so that the other replicas do not wait for this one."""
        self._stopped.set()
        self.close_group()
        if self.leader and self.index >= 0:
            with suppress(ReplicaError):
                self._ask(self._store.set, f"gone/{self.id}", "1")
                self._replace(f"holder/{self.index}", self.id, "")

    def _beat(self) -> None:
        number = 0
        while not self._stopped.wait(self.timeout / BEATS_PER_TIMEOUT):
            number += 1
            try:
                self._ask(self._store.set, f"beat/{self.id}", str(number))
            except ReplicaError:  # the next request of the main thread reports it
                return

    def _alive(self, ids: Sequence[str]) -> set[str]:
        """Return the replicas that are not gone, and whose heartbeat has changed within ``timeout``.

        Clocks of machines are not compared. A replica that is watched for the first time counts as alive.
        """
        values = self._read(*(f"{kind}/{each}" for each in ids for kind in ("gone", "beat")))
        found, now = set(), time.monotonic()
        for each, gone, beat in zip(ids, values[::2], values[1::2]):
            if self._beats.setdefault(each, (beat, now))[0] != beat:
                self._beats[each] = beat, now
            if not gone and now - self._beats[each][1] < self.timeout:
                found.add(each)
        return found

    def _are_alive(self, members: Sequence[Member]) -> bool:
        """Return True if all members but this one are alive."""
        others = [member.id for member in members if member.id != self.id]
        return len(self._alive(others)) == len(others)

    # ---- An attempt

    def agree(self, facts: Mapping[str, Any], stopped: Callable[[], bool] = lambda: False) -> list[Member]:
        """Arrive at the next attempt, and return its members once they are fixed, by index.

        Args:
            facts: JSON that the members learn, see `check_facts`. ``starting`` is true for a replica that has not
                taken a step since its start: it waits for one that has, or for all others that start.
            stopped: polled by a leader that starts; True gives up, with an empty list on all ranks.

        Raises:
            ReplicaError: if the server is gone, or the others went on without this replica.
        """
        starting = bool(facts["starting"])
        if starting:
            self._ask(self._store.set, f"ready/{self.id}", "1")
            self.attempt = max(self.attempt, self._latest(*self._read("latest")) + 1)
        while True:
            members = self._attend(facts, stopped)
            if members is None or any(member.id == self.id for member in members):
                return members or []
            if not starting:
                raise ReplicaError(
                    f"the other replicas went on without this one, which did not answer for {self.timeout:g} seconds: "
                    "start it again, and it joins them at the next synchronisation"
                )
            self.attempt += 1

    def _latest(self, value: str) -> int:
        """Return the newest attempt whose members are fixed; -1 without one."""
        return self._parse("latest", value, _count) if value else -1

    def _attend(self, facts: Mapping[str, Any], stopped: Callable[[], bool]) -> list[Member] | None:
        key, began = f"{self.attempt}/members", time.monotonic()
        pause = self.poll * max(1, self.count * self.ranks / RANKS_PER_POLL)
        given_up = f"stopped/{self.id}"
        if self.leader:
            self._ask(self._store.set, f"{self.attempt}/arrived/{self.id}", json.dumps(dict(facts)))
        while True:
            members, latest, gone, stop, knock = self._read(key, "latest", f"gone/{self.id}", given_up, KNOCK)
            if members:
                return self._parse(key, members, self._members)
            if self._latest(latest) >= self.attempt + KEPT_ATTEMPTS:
                return []
            if gone:
                raise ReplicaError("a rank of this replica is gone, or has lost its connection to the server")
            if stop:
                return None
            if self.leader and facts["starting"] and not knock:
                self._ask(self._store.set, KNOCK, "1")
            if self.leader and facts["starting"] and stopped():
                self._ask(self._store.set, given_up, "1")
            if not (self.leader and self._fix_members(key, began)):
                time.sleep(pause)

    def _fix_members(self, key: str, began: float) -> bool:
        """Fix the members of the attempt unless others are expected; return False if this replica did not."""
        found = self._arrived(began)
        if found is None or not self._replace(key, "", json.dumps(found)):
            return False
        self._ask(self._store.set, "latest", str(self.attempt))
        return True

    def _members(self, found: Any) -> list[Member]:
        members = [Member(_count(index), str(holder), check_facts(facts)) for index, holder, facts in found]
        indices = [member.index for member in members]
        if not members or indices != sorted({*indices}) or indices[-1] >= self.count:
            raise ValueError(f"indices {listed(indices)} of {self.count} replicas")
        return members

    def _arrived(self, began: float) -> list[list[Any]] | None:
        """Return the replicas at this attempt as JSON; None while others are expected."""
        places = self._read(*(f"holder/{index}" for index in range(self.count)))
        holders = {index: holder for index, holder in enumerate(places) if holder}
        ids, kinds = [*holders.values()], (f"{self.attempt}/arrived", "gone", "ready", "took part")
        alive, values = self._alive(ids), self._read(*(f"{kind}/{each}" for kind in kinds for each in ids))
        found, missing = list[list[Any]](), list[tuple[str, str]]()
        for number, (index, holder) in enumerate(holders.items()):
            arrived, gone, ready, took_part = values[number :: len(ids)]
            if arrived and not gone:
                found.append([index, holder, self._parse(f"{kinds[0]}/{holder}", arrived, check_facts)])
            elif holder in alive:
                missing.append((ready, took_part))
        if any(facts.get("within_step") for _, _, facts in found):  # which a replica that starts cannot join
            found = [each for each in found if not each[2]["starting"]]
            missing = [each for each in missing if each[1]]
        all_start = all(facts["starting"] for _, _, facts in found)
        if any(all_start or ready for ready, _ in missing):
            return None
        if all_start and len(found) < self.count and time.monotonic() < began + self.timeout:
            return None
        return found

    def exchange(
        self, members: list[Member], act: Callable[[], T], is_valid: Callable[[T], bool] = lambda found: True
    ) -> T | None:
        """Exchange with the members, vote and decide; return the result, or None if the attempt is aborted.

        Args:
            members: of the attempt.
            act: exchanges tensors.
            is_valid: returns False for a result that must end all members.

        Raises:
            ReplicaError: if the result is not valid, or too many attempts of the same members fail.
            RuntimeError: of ``act``, unless a peer was lost.
        """
        self._failures = self._failures + 1 if members == self._tried else 0
        self._tried, found = members, None
        if self._failures == MAX_FAILURES:
            raise ReplicaError(f"{counted(MAX_FAILURES, 'exchange')} in a row failed, although all replicas are alive")
        try:
            found = act()
        except ReplicaError:
            raise
        except RuntimeError as error:
            self.abort()
            self.break_group()
            if not is_peer_lost(error):
                raise
        else:
            self.vote(members, is_valid(found))
        return found if self.decide(members) else None

    def vote(self, members: Sequence[Member], valid: bool = True) -> None:
        """Vote for the attempt: this rank has all that it needs. If that is not ``valid``, all members end."""
        self._ask(self._store.set, f"{self.attempt}/vote/{self.id}/{self.rank}", "1")
        votes = [f"{self.attempt}/vote/{member.id}/{rank}" for member in members for rank in range(self.ranks)]
        if not valid or self._ask(self._store.check, votes):
            self._replace(f"{self.attempt}/decision", "", "commit" if valid else NOT_FINITE)

    def abort(self) -> None:
        """Abort the attempt, unless it is committed."""
        self._replace(f"{self.attempt}/decision", "", "abort")

    def decide(self, members: Sequence[Member]) -> bool:
        """Wait for the decision, and return True if the attempt is committed. The next attempt follows.

        Raises:
            ReplicaError: if the mean is not finite.
        """
        key = f"{self.attempt}/decision"
        while not self._ask(self._store.check, [key]):
            if self.leader and not self._are_alive(members):
                self.abort()
            time.sleep(self.poll)
        (decision,) = self._read(key)
        if decision == NOT_FINITE:
            raise ReplicaError(
                "the mean of the replicas is not finite, although what each reported is: one of them computes or sends "
                "other numbers, on a broken machine or in another version; start them again, without it"
            )
        committed = decision == "commit"
        if committed:
            self.series, self._tried = self.attempt, []
            if self.leader:
                self._ask(self._store.set, f"took part/{self.id}", "1")
        else:
            self.close_group()
        self.attempt += 1
        return committed

    # ---- Further exchanges of the members of an attempt

    def settle(self, number: int, members: Sequence[Member], whole: bool) -> str:
        """Decide on exchange ``number`` of the members of the last committed attempt; for the leader.

        Args:
            number: larger than those before.
            members: of the attempt.
            whole: all ranks of this replica have all that they need.

        Returns:
            ``commit``; ``open`` for a commit while another replica waits to join; ``abort``.
        """
        votes, key = f"{self.series}/votes/{number}", f"{self.series}/decision/{number}"
        if not whole:
            self._replace(key, "", "abort")
        elif self._ask(self._store.add, votes, 1) == len(members):
            self._replace(key, "", "open" if self._ask(self._store.check, [KNOCK]) else "commit")
            for old in (f"{self.series}/votes/{number - 1}", f"{self.series}/decision/{number - 1}"):
                self._ask(self._store.delete_key, old)  # all that vote now have read it
        while True:
            with suppress(dist.DistStoreError):
                self._ask(self._store.wait, [key], timedelta(seconds=BLOCKED_SECONDS))
                return self._read(key)[0]
            if not self._are_alive(members):
                self._replace(key, "", "abort")

    def finish(self) -> None:
        """Record that the last step of the run was taken, and saved."""
        self._ask(self._store.set, FINISHED, "1")

    def has_finished(self) -> bool:
        """Return True if the last step of the run was taken, and saved."""
        return bool(self._ask(self._store.check, [FINISHED]))

    def wait_for_first(self, members: Sequence[Member]) -> int:
        """Wait until the run has finished, or this replica is the first member left; return how many are left."""
        left = [*members]
        while left[0].id != self.id and not self.has_finished():
            if not self._alive([left[0].id]) and not self.has_finished():
                left.pop(0)
            time.sleep(self.poll)
        return len(left)

    def forget_knock(self) -> None:
        """Forget that replicas wait to join; those that still do knock again."""
        self._ask(self._store.delete_key, KNOCK)

    # ---- The group

    def group(self, members: Sequence[Member]) -> Group:
        """Return the group of this rank and the same rank of the other members; collective over them.

        It is kept while the members stay the same and all attempts are committed.

        Raises:
            RuntimeError: if not all members come within ``timeout``.
        """
        if self._group is not None and self._group[0] == tuple(members):
            return self._group[1]
        self.close_group()
        mine = [member.id for member in members].index(self.id)
        if len(members) == 1:
            return Group(axes=AXES, meter=self.meter)
        prefix = distributed_c10d.PrefixStore(f"{self.attempt}/group/{self.rank}", self._store)
        self._opened, size, patience = self.attempt, len(members), self.timeout
        if self._watched and isinstance(self._store, StoreClient):
            ends = [f"{self.attempt}/decision", *(f"gone/{member.id}" for member in members)]
            self._store.given_up = partial(self._store.check_any, ends)
            # gloo tries for as long as this to reach a member that is gone; the same on members that have just started
            failed = 0
            while self._read(f"{self.attempt - 1 - failed}/decision") == ["abort"]:
                failed += 1
            patience = min(self.timeout, CONNECT_SECONDS * 2**failed)
        gloo = dist.ProcessGroup.BackendType.GLOO
        handle = dist.ProcessGroup(prefix, mine, size)
        backend = dist.ProcessGroupGloo(prefix, mine, size, timedelta(seconds=patience))
        backend._set_default_timeout(timedelta(seconds=self.timeout))
        handle._set_default_backend(gloo)
        handle._register_backend(torch.device("cpu"), gloo, backend)
        # as new_group registers those of the world, for get_backend and the ranks of a source
        distributed_c10d._world.pg_map[handle] = "gloo", prefix
        distributed_c10d._world.pg_group_ranks[handle] = {rank: rank for rank in range(size)}
        group = Group(tuple(range(size)), mine, handle, AXES, self.meter)
        self._group = tuple(members), group
        return group

    def close_group(self) -> None:
        """Close the connections, so that members that still wait for this one fail at once."""
        group, self._group = self._group, None
        if group is not None and group[1].handle is not None:
            handle = group[1].handle
            distributed_c10d._world.pg_map.pop(handle, None)
            distributed_c10d._world.pg_group_ranks.pop(handle, None)
            self._abort(group[1])

    @staticmethod
    def _abort(group: Group) -> None:
        if group.handle is not None:
            group.handle.abort()
