"""The place of every rank: what it does and which collectives it has called, in memory that other processes can read.

A stalled rank may be unable to answer: stopped by a signal, or inside native code that holds the interpreter's lock.
So each rank keeps its place in a memory file without a name, by plain stores, and the ranks of its machine open that
file through ``/proc``. The kernel frees it with the last process, so nothing is left behind, and only processes of the
same user can open it. Does not import torch.

The record is an array of 64-bit numbers, followed by texts that the numbers point to:

* a header, with the slots named below;
* a row for each group of ranks or channel: the number of its collectives that were called, the one that is waited for,
  and the last ``RING`` calls;
* texts: phases, operations, and the ranks of groups.
"""

from __future__ import annotations

import json
import mmap
import os
import signal
import time
import zlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

BEAT, STEP, PHASE, ACTION, ROWS, FAILED, LEFT, REPORTED = range(8)
"""Slots: time of the watchdog's last beat (ns of the monotonic clock), step, phase, pipeline action, number of rows,
time of a failure (ns), 1 after the rank has left the run without an error, and 1 after it has reported a failure."""
HEADER = 8

INFO, CALLS, AWAITED, AWAITED_KIND, SIGNATURE = range(5)
"""Slots of a row: text on the group, calls, number and kind of the call that is waited for, signature of all calls."""
RING, ENTRY, ROW_HEADER = 64, 3, 5
ROW = ROW_HEADER + RING * ENTRY
MAX_ROWS = 128

UNTRACKED = HEADER
"""Row of groups without a row of their own. It is never read."""

BACKGROUND = "background"
"""Axes of groups that other threads than the main one use."""

UNNUMBERED = -1
"""Number of an awaited call that is not counted: exchanges, of which ranks may start different numbers."""

TEXTS = 8 * (HEADER + MAX_ROWS * ROW)
"""Where texts begin, in bytes."""
SIZE = TEXTS + 8 * 16384


class ProcessPlace:
    """The place of this process; see :data:`PLACE`."""

    def __init__(self) -> None:
        """Begin with a record that no other process can read."""
        self._descriptors: tuple[int, ...] = ()
        self.reset()

    def reset(self) -> None:
        """Forget all, and share nothing. Processes that have opened the record keep what it held."""
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors = ()
        self.peers: dict[int, PeerPlace] = {}
        self.hosts: list[tuple[str, int]] = []  # machine and local rank of every rank
        self.stacks: int | None = None  # descriptor of the memory file for stacks, while the record is shared
        self._offsets: dict[str, int] = {}
        self._kinds: dict[tuple[str, str, object], tuple[int, int]] = {}
        self._uses: Counter[tuple[object, ...]] = Counter()
        self._end = TEXTS + 1  # an empty text is at offset TEXTS
        self._use(memoryview(bytearray(SIZE)))
        self.slots[ROWS] = 1
        self.world_row = UNTRACKED  # of the default group
        self.timeout = 0.0  # seconds after which a rank that waits has stalled
        self.finishes_save = False  # it has failed, and still waits for a save in progress

    def _use(self, memory: memoryview) -> None:
        self._bytes, self.slots = memory, memory.cast("q")

    def share(self) -> tuple[int, int]:
        """Move the record into memory that other processes can open; return its descriptor and that of the stacks.

        Raises:
            OSError: on systems without memory files.
        """
        descriptor, self.stacks = self._descriptors = os.memfd_create("place"), os.memfd_create("stacks")
        os.ftruncate(descriptor, SIZE)
        memory = memoryview(mmap.mmap(descriptor, SIZE))
        memory[:] = self._bytes
        self._use(memory)
        return descriptor, self.stacks

    def text(self, text: str) -> int:
        """Return the offset of a text, which is written once; that of the empty text when there is no room."""
        offset = self._offsets.get(text)
        if offset is None:
            content = text.encode() + b"\0"
            offset = self._end if self._end + len(content) <= SIZE else TEXTS
            if offset != TEXTS:
                self._bytes[offset : offset + len(content)] = content
                self._end += len(content)
            self._offsets[text] = offset
        return offset

    def new_row(self, axes: str, ranks: Sequence[int], channel: bool = False) -> int:
        """Return the row of a new group or channel; ``UNTRACKED`` when there is no room.

        Args:
            axes: along which the ranks differ.
            ranks: of the group, or sender and receiver of the channel.
            channel: the calls are messages, which sender and receiver count alike.
        """
        number = self.slots[ROWS]
        if number >= MAX_ROWS:
            return UNTRACKED
        row = HEADER + number * ROW
        # equal rows of several ranks are one group; `use` tells groups of the same ranks apart, in order of creation
        use = self._uses[axes, *ranks]
        self._uses[axes, *ranks] += 1
        info = self.text(json.dumps({"axes": axes, "ranks": _packed(ranks), "channel": channel, "use": use}))
        if info == TEXTS:  # rows of unknown groups would be compared as one group
            return UNTRACKED
        self.slots[row : row + ROW] = memoryview(bytes(8 * ROW)).cast("q")
        self.slots[row + INFO] = info
        self.slots[ROWS] = number + 1
        return row

    def call(self, row: int, operation: str, axes: str, dtype: object, count: int) -> int:
        """Record a call of a collective of ``count`` elements; return its number in the group, from 1."""
        slots, key = self.slots, (operation, axes, dtype)
        kind, code = self._kinds.get(key) or self._kind(key)
        number = slots[row + CALLS] + 1
        at = row + ROW_HEADER + number % RING * ENTRY
        slots[at], slots[at + 1] = kind, count
        slots[at + 2] = slots[row + SIGNATURE] = hash((slots[row + SIGNATURE], code, count))
        slots[row + CALLS] = number
        return int(number)

    def kind(self, operation: str, axes: str, dtype: object) -> int:
        """Return the offset of the text of a kind of calls."""
        key = operation, axes, dtype
        return (self._kinds.get(key) or self._kind(key))[0]

    def _kind(self, key: tuple[str, str, object]) -> tuple[int, int]:
        operation, axes, dtype = key
        text = f"{operation}|{axes}|{str(dtype).removeprefix('torch.')}"
        self._kinds[key] = found = self.text(text), zlib.crc32(text.encode())
        return found

    def connect(
        self, gather: Callable[[list[Any]], list[list[Any]]], rank: int, timeout: float, host: str, local_rank: int
    ) -> None:
        """Share the record with the other ranks of this machine, and open theirs; collective.

        Without memory files or ``/proc`` nothing is shared. Where a rank that stalls runs then stays unknown.

        Args:
            gather: returns what all ranks pass to it.
            rank: this one.
            timeout: seconds after which a rank that waits has stalled.
            host: name of this machine.
            local_rank: number of this rank on its machine.
        """
        self.reset()
        self.timeout = timeout
        try:
            # containers of a machine may number their processes apart
            boot, numbering = Path("/proc/sys/kernel/random/boot_id").read_text(), os.readlink("/proc/self/ns/pid")
            machine = f"{host} {boot.strip()} {numbering}"
            descriptors = self.share()
        except (OSError, AttributeError):  # not Linux
            machine, descriptors = "", (-1, -1)
        processes = gather([host, local_rank, machine, os.getpid(), *descriptors])
        self.hosts = [(name, number) for name, number, *_ in processes]
        self.world_row = self.new_row("world", range(len(processes)))
        for other, (_, _, where, process, *files) in enumerate(processes):
            if other != rank and where == machine and machine:
                with suppress(OSError):  # the process has just ended, or may not be read
                    opened = [os.open(f"/proc/{process}/fd/{file}", os.O_RDONLY) for file in files]
                    self.peers[other] = PeerPlace(process, *opened)

    def read(self) -> dict[str, Any]:
        """Return this process's place."""
        return decode(self.content())

    def content(self) -> bytes:
        """Return a copy of the record."""
        return bytes(self._bytes)

    def snapshot(self) -> bytes:
        """Return what changes when the rank makes progress."""
        return bytes(self._bytes[8 * STEP : 8 * (HEADER + self.slots[ROWS] * ROW)])


def after_fork() -> None:
    """Give a forked process a record of its own."""
    PLACE.reset()


PLACE = ProcessPlace()
"""The place of this process. Of a process there is one, as of its stacks; groups and timers store into it."""

os.register_at_fork(after_in_child=after_fork)


@dataclass
class PeerPlace:
    """The place of another process of this machine."""

    process: int
    # Descriptors of its record and stacks.
    record: int
    stacks: int
    # The number of a process that has ended may be given to another one: when this one began, and its descriptor.
    began: str = field(init=False)
    handle: int = field(init=False)
    # Rows of the groups that both processes have, and how many rows each had when these were found.
    _shared: list[tuple[int, int]] = field(init=False, default_factory=list)
    _rows: tuple[int, int] = field(init=False, default=(0, 0))

    def __post_init__(self) -> None:
        self.began, self.handle = process_status(self.process)[1], os.pidfd_open(self.process)

    def __del__(self) -> None:
        for descriptor in (self.record, self.stacks, getattr(self, "handle", -1)):
            with suppress(OSError):
                os.close(descriptor)

    def kill(self) -> None:
        """Kill the process if it has not ended."""
        with suppress(OSError):
            signal.pidfd_send_signal(self.handle, signal.SIGKILL)

    def read(self) -> dict[str, Any]:
        """Return the place, with what the kernel knows of the process."""
        return {**decode(os.pread(self.record, SIZE, 0)), "state": self.state()}

    def differs(self) -> bool:
        """Return True if it and this process seem to have called different collectives; cheap enough for every second.

        Signatures are of all calls, so those of the last common call are compared. Both may be writing meanwhile.
        """
        record = os.pread(self.record, SIZE, 0)
        mine, theirs = PLACE.slots, memoryview(record).cast("q")
        if (rows := (mine[ROWS], theirs[ROWS])) != self._rows:
            self._rows = rows
            own_rows, other_rows = _rows_by_group(PLACE.content()), _rows_by_group(record)
            self._shared = [(row, other_rows[group]) for group, row in own_rows.items() if group in other_rows]
        for own, other in self._shared:
            calls = mine[own + CALLS], theirs[other + CALLS]
            at = ROW_HEADER + min(calls) % RING * ENTRY + 2
            if min(calls) > 0 and max(calls) - min(calls) < RING - 1 and mine[own + at] != theirs[other + at]:
                return True
        return False

    def slot(self, number: int) -> int:
        """Return a slot of the header."""
        return int.from_bytes(os.pread(self.record, 8, 8 * number), "little", signed=True)

    def state(self) -> str:
        """Return the kernel's letter for the process's state, such as S or T; empty if it has ended."""
        state, began = process_status(self.process)
        return "" if began != self.began or state in "ZX" else state

    def read_stacks(self) -> str:
        """Return the stacks that the process has written last."""
        return read_all(self.stacks)


def process_status(process: int) -> tuple[str, str]:
    """Return the kernel's letter for the state of a process, and when it began; empty texts if there is none."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "", ""
    return fields[0], fields[19]


def read_all(descriptor: int) -> str:
    """Return the content of a memory file."""
    return os.pread(descriptor, 1 << 20, 0).decode(errors="replace")


def _packed(ranks: Sequence[int]) -> list[int] | dict[str, int]:
    """Return ranks as first, step and count if they are evenly spaced."""
    step = ranks[1] - ranks[0] if len(ranks) > 1 else 1
    even = [*ranks] == [ranks[0] + step * i for i in range(len(ranks))] and len(ranks) > 4
    return {"first": ranks[0], "step": step, "count": len(ranks)} if even else [*ranks]


def _text(record: bytes, offset: int) -> str:
    return record[offset : record.index(b"\0", offset)].decode() if TEXTS <= offset < SIZE else ""


def _rows_by_group(record: bytes) -> dict[str, int]:
    """Return the row of each group, by its text."""
    slots = memoryview(record).cast("q")
    return {_text(record, slots[row + INFO]): row for row in _rows(slots)}


def _rows(slots: memoryview) -> range:
    return range(HEADER + ROW, HEADER + min(slots[ROWS], MAX_ROWS) * ROW, ROW)


def _info(record: bytes, offset: int) -> dict[str, Any]:
    info: dict[str, Any] = json.loads(_text(record, offset) or '{"axes": "", "ranks": [], "channel": false, "use": 0}')
    if isinstance(packed := info["ranks"], Mapping):
        info["ranks"] = [packed["first"] + packed["step"] * i for i in range(packed["count"])]
    return info


def _call(kind: str, count: int) -> dict[str, Any]:
    operation, axes, dtype = kind.split("|") if kind else ("", "", "")
    return {"operation": operation, "axes": axes, "dtype": dtype, "count": count}


def decode(record: bytes) -> dict[str, Any]:
    """Return a record as JSON.

    ``step``, ``phase``, ``action`` (a number), ``silent`` (seconds since the watchdog's last beat), ``failed``,
    ``left`` and ``groups``. Each group has ``axes``, ``ranks``, ``channel``, ``use``, ``calls`` (their number),
    ``awaited`` (None, or a call with its ``number``) and ``last``, calls by number, each with ``signature``.
    """
    slots, groups = memoryview(record).cast("q"), []
    for row in _rows(slots):
        calls, awaited = slots[row + CALLS], slots[row + AWAITED]
        last = {}
        for number in range(max(1, calls - RING + 2), calls + 1):  # the oldest may be overwritten meanwhile
            at = row + ROW_HEADER + number % RING * ENTRY
            last[str(number)] = {**_call(_text(record, slots[at]), slots[at + 1]), "signature": slots[at + 2]}
        waiting = None
        if awaited:
            waiting = {**_call(_text(record, slots[row + AWAITED_KIND]), 0), **last.get(str(awaited), {})}
            waiting["number"] = awaited
        groups.append({**_info(record, slots[row + INFO]), "calls": calls, "awaited": waiting, "last": last})
    return {
        "step": slots[STEP],
        "phase": _text(record, slots[PHASE]),
        "action": slots[ACTION],
        "silent": (time.monotonic_ns() - slots[BEAT]) / 1e9 if slots[BEAT] else 0.0,
        "failed": slots[FAILED],
        "left": bool(slots[LEFT]),
        "groups": groups,
    }
