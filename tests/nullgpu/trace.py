"""Record the CUDA, cuBLAS and NCCL calls of a piece of code on the null GPU, in order.

from tests.nullgpu.trace import record

with record() as trace:
    step()
print(trace.summary())
"""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

KINDS = (
    "", "kernel", "memcpy", "memset", "event", "wait", "sync", "gemm", "nccl", "malloc", "free", "graph", "mark",
    "module",
)  # fmt: skip
"""Kinds of events; the index is the number in ``nullcuda.c``."""

DTYPES = ("int8", "uint8", "int32", "uint32", "int64", "uint64", "fp16", "fp32", "fp64", "bf16", "fp8e4m3", "fp8e5m2")
"""NCCL's data types, by number."""


class Event(NamedTuple):
    """One call. What ``a`` and ``b`` hold depends on the kind.

    ======  =========================  ========================================================
    kind    a                          b
    ======  =========================  ========================================================
    kernel  blocks of the grid         threads of a block
    gemm    floating-point operations
    memcpy  bytes                      1 where a capture forbids it
    memset  bytes
    event   the event (eventRecord), or the priority of a stream as a positive number (streamCreate)
    wait    the event                  stream that recorded the event
    sync    1 where forbidden          the event (eventSynchronize)
    nccl    elements                   rank in the communicator
    malloc  bytes                      1 where a capture forbids it, as outside of the graph's pool
    graph   operations in the graph
    mark    of the caller of ``mark``  of the caller of ``mark``
    module                             compiled code was loaded
    ======  =========================  ========================================================
    """

    kind: str
    name: str
    a: int
    b: int
    stream: int
    thread: int
    seconds: float
    capture: int = 0
    """Number of the graph capture that this call is part of; 0 outside."""


@dataclass(frozen=True)
class Collective:
    """One NCCL call, parsed."""

    op: str
    comm: str
    """The communicator, equal on all its ranks."""
    size: int
    """Number of ranks of the communicator."""
    rank: int
    count: int
    dtype: str
    arg: int
    """Number of the reduction (allReduce, reduceScatter), root (broadcast, reduce), or peer (send, recv)."""
    group: int
    """Number of the ncclGroupStart that the call is part of; 0 for none."""
    stream: int
    index: int
    """Index of the event in its trace."""


NCCL_NAME = re.compile(r"(\w+) comm(\w+)/(\d+) dt(\d+) x(-?\d+) g(\d+)")


class Trace(list[Event]):
    """The events of one rank, in the order of the calls."""

    def of(self, *kinds: str) -> list[Event]:
        """Return the events of these kinds."""
        return [event for event in self if event.kind in kinds]

    def launches(self) -> list[Event]:
        """Return what the host submits to the device: kernels, GEMMs, copies, memsets, collectives, whole graphs."""
        return [
            event
            for event in self
            if event.kind in ("kernel", "gemm", "memcpy", "memset", "nccl") or event.name == "graphLaunch"
        ]

    def gemms(self) -> list[Event]:
        """Return the matrix products."""
        return self.of("gemm")

    def syncs(self) -> list[Event]:
        """Return the calls in which the host waits for the device, some copies among them."""
        return [
            event
            for event in self
            if event.kind == "sync"
            or (event.kind == "memcpy" and re.search(r"D2H async pageable|(H2D|D2H) sync", event.name))
        ]

    def pageable_copies(self) -> list[Event]:
        """Return the copies from or to host memory that is not pinned."""
        return [event for event in self if event.kind == "memcpy" and "pageable" in event.name]

    def collectives(self) -> list[Collective]:
        """Return the NCCL calls that communicate, in the order in which they were issued."""
        found = []
        for index, event in enumerate(self):
            if event.kind == "nccl" and (match := NCCL_NAME.fullmatch(event.name)):
                op, comm, size, dtype, arg, group = match.groups()
                call = op, comm, int(size), event.b, event.a, DTYPES[int(dtype)], int(arg), int(group)
                found.append(Collective(*call, event.stream, index))
        return found

    def summary(self, most: int = 40) -> str:
        """Return the counts, and the most frequent calls."""
        rows = Counter((event.kind, event.name) for event in self if event.kind not in ("event", "malloc", "free"))
        head = f"{len(self.launches())} launches ({len(self.gemms())} gemm, {len(self.of('nccl'))} nccl)"
        head += f", {len(self.syncs())} syncs, {len(self.pageable_copies())} pageable copies"
        lines = [f"{count:6d} {kind:7s} {name[:150]}" for (kind, name), count in rows.most_common(most)]
        return "\n".join([head, *lines])

    def dump(self, path: Path | str) -> None:
        """Write the events to a file, one per line."""
        Path(path).write_text("".join("\t".join(map(str, event)) + "\n" for event in self))

    @classmethod
    def load(cls, path: Path | str) -> Trace:
        """Read a file written by ``dump``."""
        rows = (line.split("\t") for line in Path(path).read_text().splitlines())
        types = str, str, int, int, int, int, float, int
        return cls(Event(*(read(field) for read, field in zip(types, row))) for row in rows)


def demangle(names: Iterable[str]) -> dict[str, str]:
    """Return the C++ names of mangled ones."""
    mangled = sorted(name for name in set(names) if name.startswith("_Z"))
    plain = subprocess.run(["c++filt"], input="\n".join(mangled), text=True, capture_output=True, check=True).stdout
    return dict(zip(mangled, plain.split("\n")))


def mark(name: str, a: int = 0, b: int = 0) -> None:
    """Record a point in the program."""
    library = ctypes.CDLL(os.environ["NULLGPU"] + "/libnullcuda.so")
    library.nullcuda_mark(name.encode(), ctypes.c_uint64(a), ctypes.c_uint64(b))


@contextmanager
def record() -> Iterator[Trace]:
    """Record all calls of this process; the trace is filled when the context ends."""
    library = ctypes.CDLL(os.environ["NULLGPU"] + "/libnullcuda.so")
    trace = Trace()
    library.nullcuda_start()
    try:
        yield trace
    finally:
        library.nullcuda_stop()
        with TemporaryDirectory() as folder:
            path = Path(folder, "trace")
            library.nullcuda_dump(os.fsencode(path))
            rows = [line.split("\t") for line in path.read_text().splitlines()]
        names = demangle(row[1] for row in rows)
        for kind, name, a, b, stream, thread, seconds, *capture in rows:
            address = 0 if stream == "(nil)" else int(stream, 16)
            call = KINDS[int(kind)], names.get(name, name), int(a), int(b), address, int(thread), float(seconds)
            trace.append(Event(*call, *map(int, capture)))
