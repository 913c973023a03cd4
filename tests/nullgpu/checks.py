"""Check the GPU calls of ranks. Every function returns a list of problems.

None of them needs a GPU, real or null: they read traces.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Hashable, Sequence
from itertools import zip_longest

from tests.nullgpu.trace import Collective, Event, Trace

COMPUTE = ("kernel", "gemm", "memset")
WORK = (*COMPUTE, "memcpy", "nccl", "graph")
P2P = ("send", "recv")


def regions(trace: Trace, name: str) -> list[Trace]:
    """Return the parts between the marks ``name begin`` and ``name end``."""
    found: list[Trace] = []
    start: int | None = None
    for index, event in enumerate(trace):
        if event.kind == "mark" and event.name == f"{name} begin":
            start = index
        elif event.kind == "mark" and event.name == f"{name} end" and start is not None:
            found.append(Trace(trace[start : index + 1]))
            start = None
    return found


def short(event: Event) -> str:
    return f"{event.kind} {event.name[:80]} on stream {event.stream:#x}"


def host_waits(step: Trace, allowed: int = 0) -> list[str]:
    """The host waits for the device more than ``allowed`` times."""
    found = [short(event) for event in step.syncs()]
    return found if len(found) > allowed else []


def pageable_copies(step: Trace) -> list[str]:
    """A copy from or to memory that is not pinned: it waits, or is staged through another buffer."""
    return [f"{short(event)}, {event.a} bytes" for event in step.pageable_copies()]


def hidden_copies(step: Trace) -> dict[str, tuple[int, int]]:
    """Count the copies on side streams, by direction: those that a matrix product follows, and all.

    The product has to follow before a compute stream waits for an event after the copy.
    """
    computing, counts = compute_streams(step), dict[str, tuple[int, int]]()
    for index, copy in enumerate(step):
        if copy.kind != "memcpy" or copy.stream in computing:
            continue
        hidden, total = counts.get(copy.name[:3], (0, 0))
        counts[copy.name[:3]] = hidden + _is_hidden(copy, step[index + 1 :], computing), total + 1
    return counts


def _is_hidden(copy: Event, after: Sequence[Event], computing: set[int]) -> bool:
    marks: set[int] = set()
    for event in after:
        if event.name == "eventRecord" and event.stream == copy.stream:
            marks.add(event.a)
        elif event.kind == "gemm":
            return True
        elif event.kind == "wait" and event.a in marks and event.stream in computing:
            return False
    return False


def compute_streams(trace: Trace) -> set[int]:
    """Return the streams that should compute: the default one, and those that captures begin on."""
    return {0} | {event.stream for event in trace if event.name == "beginCapture"}


def stray_kernels(trace: Trace, others: int = 0) -> list[str]:
    """Kernels outside the compute streams, on more than ``others`` streams."""
    allowed = compute_streams(trace)
    strays = [event for event in trace if event.kind in COMPUTE and event.stream not in allowed]
    return [short(event) for event in strays] if len({event.stream for event in strays}) > others else []


def capture_leaks(trace: Trace) -> list[str]:
    """Work of a capturing thread that its graph does not contain, or that a capture forbids."""
    problems = []
    capturing: dict[int, int] = {}  # by thread
    for event in trace:
        if event.name == "beginCapture":
            capturing[event.thread] = event.stream
        elif event.name == "endCapture":
            capturing.pop(event.thread, None)
        elif event.kind in WORK and not event.capture and capturing:
            problems.append(f"not captured: {short(event)}")
        elif event.kind in ("sync", "malloc") and event.thread in capturing:
            forbidden = event.a if event.kind == "sync" else event.b
            problems += [f"in a capture: {short(event)}"] * bool(forbidden)
    return problems


def late_modules(steps: Sequence[Trace], warm_up: int) -> list[str]:
    """Code that is compiled, or loaded, after the first ``warm_up`` steps."""
    return [
        f"{event.name} in step {number}"
        for number, step in enumerate(steps, 1)
        for event in step
        if event.kind == "module" and number > warm_up
    ]


Lane = tuple[int, int]
"""A stream and the capture that it is part of, 0 outside: captured work is not done when others go on."""


class StreamClocks:
    """Work of every lane that events order before the next work of a lane."""

    def __init__(self) -> None:
        self.issued: Counter[Lane] = Counter()
        self._known: dict[Lane, Counter[Lane]] = defaultdict(Counter)
        self._events: dict[int, Counter[Lane]] = {}
        self._host: dict[int, Counter[Lane]] = defaultdict(Counter)  # by thread

    def known(self, event: Event, other: Lane) -> int:
        """Return the number of operations of the lane ``other`` that end before the one of ``event`` begins."""
        lane = event.stream, event.capture
        return self.issued[other] if lane == other else max(self._known[lane][other], self._host[event.thread][other])

    def add(self, event: Event) -> None:
        """Take the next call into account."""
        lane = event.stream, event.capture
        known = self._known[lane]
        if event.kind in WORK and event.name not in ("beginCapture", "endCapture"):
            self.issued[lane] += 1
            known |= self._host[event.thread]
        elif event.name == "eventRecord":
            self._events[event.a] = known | Counter({lane: self.issued[lane]})
        elif event.kind == "wait":
            known |= self._events.get(event.a, Counter())
        elif event.name == "streamSynchronize":
            self._host[event.thread] |= known | Counter({lane: self.issued[lane]})
        elif event.name == "eventSynchronize":
            self._host[event.thread] |= self._events.get(event.b, Counter())
        elif event.name == "deviceSynchronize":
            self._host[event.thread] |= self.issued


def unordered_collectives(trace: Trace) -> list[str]:
    """Collectives that may begin before the computation that was launched ahead of them: on the wrong stream."""
    problems = []
    clocks, allowed = StreamClocks(), compute_streams(trace)
    compute: dict[int, Lane] = {}  # the last one of each capture
    for event in trace:
        if event.kind in COMPUTE and event.stream in allowed:
            compute[event.capture] = event.stream, event.capture
        if event.kind == "nccl" and event.stream not in allowed and event.capture in compute:
            lane = compute[event.capture]
            done, issued = clocks.known(event, lane), clocks.issued[lane]
            if done < issued:
                problems.append(f"{short(event)} begins after {done} of {issued} operations of stream {lane[0]:#x}")
        clocks.add(event)
    return problems


def hidden_work(trace: Trace) -> list[tuple[Collective, int]]:
    """Return every collective on a stream of its own, and the computation launched before anything waits for it."""
    streams = compute_streams(trace)
    recorded: dict[int, tuple[int, int]] = {}  # by event: its stream, and the index of the record
    waits: dict[int, list[tuple[int, int]]] = defaultdict(list)  # by stream: indices of the wait and of the record
    computed = [0]
    for index, event in enumerate(trace):
        computed.append(computed[-1] + (event.kind in ("kernel", "gemm") and event.stream in streams))
        if event.name == "eventRecord":
            recorded[event.a] = event.stream, index
        elif event.kind == "wait" and event.stream in streams and event.a in recorded:
            stream, at = recorded[event.a]
            waits[stream].append((index, at))
    found = []
    for call in trace.collectives():
        if call.stream not in streams:
            until = next((wait for wait, at in waits[call.stream] if at > call.index), len(trace) - 1)
            found.append((call, computed[until] - computed[call.index]))
    return found


def differing_collectives(traces: Sequence[Trace]) -> list[str]:
    """Ranks that call other collectives of a communicator, or with other sizes, and messages without a partner."""
    problems = []
    collectives: dict[str, dict[int, list[tuple[object, ...]]]] = defaultdict(lambda: defaultdict(list))
    messages: dict[tuple[str, int, int], dict[str, list[tuple[int, str]]]] = defaultdict(lambda: defaultdict(list))
    sizes = {}
    for trace in traces:
        for call in trace.collectives():
            sizes[call.comm] = call.size
            if call.op in P2P:
                edge = (call.rank, call.arg) if call.op == "send" else (call.arg, call.rank)
                messages[call.comm, *edge][call.op].append((call.count, call.dtype))
            else:
                collectives[call.comm][call.rank].append((call.op, call.count, call.dtype, call.arg))
    for comm, calls in collectives.items():
        for rank in range(1, sizes[comm]):
            if difference := first_difference(calls[0], calls[rank]):
                problems.append(f"communicator {comm}: ranks 0 and {rank} differ in {difference}")
    for (comm, source, target), sides in messages.items():
        if difference := first_difference(sides["send"], sides["recv"]):
            problems.append(f"communicator {comm}: rank {source} sends, rank {target} receives {difference}")
    return problems


def first_difference(first: Sequence[object], second: Sequence[object]) -> str:
    for number, pair in enumerate(zip_longest(first, second, fillvalue="nothing")):
        if pair[0] != pair[1]:
            return f"call {number}: {pair[0]} and {pair[1]}"
    return ""


class WaitGraph:
    """Order in which the calls of all ranks must complete; a cycle is a deadlock.

    A call of NCCL begins when its stream reaches it, and ends when all ranks that take part have begun. Streams wait
    for events, and threads for streams. Collectives may also need the order of their launches, whatever their streams:
    kernels of several communicators that wait for their peers may not fit on a GPU together. So a rank's collectives
    follow each other, and only messages (send, receive) run beside anything; with ``one_queue``
    (CUDA_DEVICE_MAX_CONNECTIONS=1) not even these.
    """

    def __init__(self, one_queue: bool = False) -> None:
        self.one_queue = one_queue
        self._before: dict[Hashable, set[Hashable]] = defaultdict(set)
        self._calls: dict[Hashable, tuple[int, Collective]] = {}  # by the node of their begin

    def add(self, rank: int, trace: Trace) -> None:
        """Add the calls of a rank."""
        last: dict[object, Hashable] = {}  # node after which the next work begins; by stream, thread, and "queue"
        begun: set[Hashable] = set()
        events: dict[int, Hashable] = {}
        counts: Counter[Hashable] = Counter()
        calls = {call.index: call for call in trace.collectives()}
        for index, event in enumerate(trace):
            stream, thread, node = ("stream", event.stream), ("thread", event.thread), (rank, index)
            if event.name == "eventRecord":
                events[event.a] = last.get(stream)
            elif event.kind == "wait":
                self._after(node, last.get(stream), events.get(event.a))
                last[stream] = node
            elif event.kind == "sync":
                streams = [key for key in last if isinstance(key, tuple) and key[0] == "stream"]
                awaited = streams if event.name == "deviceSynchronize" else [stream]
                recorded = [events.get(event.b)] if event.name == "eventSynchronize" else [last.get(k) for k in awaited]
                self._after(node, last.get(thread), *recorded)
                last[thread] = node
            elif call := calls.get(index):
                unit = ("group", rank, event.thread, call.group) if call.group else node
                begin, end = ("begin", unit), ("end", unit)
                if begin not in begun:
                    begun.add(begin)
                    self._after(begin, last.get(stream), last.get(thread))
                    if call.op not in P2P or self.one_queue:
                        self._after(begin, last.get("queue"))
                        last["queue"] = end
                if call.op in P2P:
                    edge = (call.rank, call.arg) if call.op == "send" else (call.arg, call.rank)
                    counts[call.comm, edge, call.op] += 1
                    operation = call.comm, edge, counts[call.comm, edge, call.op]
                    part, parts = int(call.op == "recv"), range(2)
                else:
                    counts[call.comm] += 1
                    operation = call.comm, "collective", counts[call.comm]
                    part, parts = call.rank, range(call.size)
                self._after(operation, *((operation, "part", other) for other in parts))
                self._after((operation, "part", part), begin)
                self._after(end, operation)
                self._calls[operation, "part", part] = rank, call
                last[stream] = end

    def _after(self, node: Hashable, *before: Hashable) -> None:
        self._before[node] |= {other for other in before if other is not None}

    def stuck(self) -> list[str]:
        """Return the calls that have begun and never end."""
        after: dict[Hashable, list[Hashable]] = defaultdict(list)
        missing = {}
        for node, before in self._before.items():
            missing[node] = len(before)
            for other in before:
                after[other].append(node)
        nodes = set(missing) | set(after)
        # a part that no rank has called never begins
        ready = deque(n for n in nodes if not missing.get(n) and not (is_part(n) and n not in self._calls))
        done = set(ready)
        while ready:
            for node in after[ready.popleft()]:
                missing[node] -= 1
                if not missing[node]:
                    done.add(node)
                    ready.append(node)
        return [
            f"rank {rank} waits in {call.op} of communicator {call.comm}/{call.size} on stream {call.stream:#x}"
            for part, (rank, call) in self._calls.items()
            if part in done and part[0] not in done  # type: ignore[index]
        ]


def is_part(node: Hashable) -> bool:
    return isinstance(node, tuple) and len(node) == 3 and node[1] == "part"


def deadlocks(traces: Sequence[Trace], one_queue: bool = False) -> list[str]:
    """Calls that wait for each other, or for a rank that never makes them."""
    graph = WaitGraph(one_queue)
    for rank, trace in enumerate(traces):
        graph.add(rank, trace)
    return graph.stuck()
