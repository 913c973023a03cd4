"""Raw collectives and point-to-point messages: the only module through which tensors leave a rank.

Every collective takes a :class:`Group`, works along dimension 0 and does nothing in a group of one. The ``start_``
forms are asynchronous and return a :class:`Pending`. Names that changed between torch 2.10 and 2.13 are resolved
here.

A :class:`CommMeter` counts the time the rank is blocked (the whole of a synchronous collective, the ``wait`` of an
asynchronous one), and the bytes it sends. Bytes are those of a ring algorithm, which is bandwidth-optimal on most
networks (Patarasuk and Yuan 2009), whatever the library does. On each of n ranks, for a tensor of B bytes:

==============  ==========================  ========================================
operation       bytes sent by a rank        B
==============  ==========================  ========================================
all-reduce      2 B (n - 1) / n             the tensor
reduce-scatter  B (n - 1) / n               the rank's input
all-gather      B (n - 1) / n               the result
broadcast       B (n - 1) / n, on average   the tensor
reduce          B (n - 1) / n, on average   the tensor
all-to-all      rows for other ranks
send            B                           the tensor
==============  ==========================  ========================================
"""

from __future__ import annotations

import importlib
import json
import socket
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.distributed.places import AWAITED, AWAITED_KIND, PLACE, UNNUMBERED, UNTRACKED
from megatron.distributed.timing import COMMUNICATION_PREFIX, NO_SPAN, Stopwatch, profiler_range

ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER = "all-reduce", "reduce-scatter", "all-gather"
BROADCAST, REDUCE, ALL_TO_ALL, SEND = "broadcast", "reduce", "all-to-all", "send"
EXCHANGE, MESSAGE, OBJECTS = "exchange", "message", "all-gather of objects"


class CommObserver(Protocol):
    """Observer of the tensors that this rank gives to collectives and messages, and gets from them."""

    def on_input(self, operation: str, tensors: Sequence[Tensor], group: Group | Channel) -> str:
        """Act on what this rank gives; return a label of the communication, the same on all its ranks."""

    def on_output(self, label: str, x: Tensor) -> None:
        """Act on what this rank gets, once it is complete."""


class Call(NamedTuple):
    """A call of a collective, or of a message."""

    # Among those of the group, see :meth:`Places.call`.
    number: int = 0
    # Of the observer; empty without one, or if this rank gets nothing.
    label: str = ""


NO_CALL = Call()

IN_PHASE = " in "
"""Separates axes from a phase in the names of a meter."""


class CommMeter(Stopwatch):
    """Seconds blocked by axes of the rank grid, and bytes sent by axes and operation.

    Bytes are counted when a collective is called, so replays of a CUDA graph count nothing.
    """

    def __init__(self, names: Iterable[str] = ()) -> None:
        """Start at zero."""
        super().__init__(names)
        self._sent: dict[tuple[str, str], float] = {}
        # Of all communication of the mesh.
        self.observer: CommObserver | None = None
        self.phase = ""  # of a step, under which seconds are counted, too
        self.by_phase: dict[str, float] = {}  # seconds of all axes by phase, as far as :meth:`pop` has returned them

    def span(self, name: str, cuda: bool) -> AbstractContextManager[None]:
        """See :class:`Stopwatch`."""
        return super().span(f"{name}{IN_PHASE}{self.phase}" if self.phase else name, cuda)

    def pop(self) -> dict[str, float]:
        """See :class:`Stopwatch`."""
        taken: dict[str, float] = {}
        for name, seconds in super().pop().items():
            axes, _, phase = name.partition(IN_PHASE)
            taken[axes] = taken.get(axes, 0.0) + seconds
            if phase:
                self.by_phase[phase] = self.by_phase.get(phase, 0.0) + seconds
        return taken

    def sends(self, axes: str, operation: str, count: float) -> None:
        """Add ``count`` bytes, unless paused."""
        if self._running:
            self._sent[axes, operation] = self._sent.get((axes, operation), 0.0) + count

    def pop_bytes_sent(self) -> dict[tuple[str, str], float]:
        """Return bytes by axes and operation since the last call."""
        taken, self._sent = self._sent, {}
        return taken

    def given(self, operation: str, tensors: Sequence[Tensor], group: Group | Channel) -> str:
        """Pass what this rank gives to the observer; return its label."""
        return "" if self.observer is None else self.observer.on_input(operation, tensors, group)

    def got(self, call: Call, x: Tensor) -> Tensor:
        """Pass what this rank has got to the observer; return it."""
        if call.label and self.observer is not None:
            self.observer.on_output(call.label, x)
        return x


_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
T = TypeVar("T")
BUBBLE = "bubble"
"""Name under which the meter counts time blocked on other pipeline ranks."""
PIPELINE = "pp"
"""Name under which the meter counts bytes sent to other pipeline ranks."""
FAKE_BACKEND = "fake"
"""Backend of groups without peers (:func:`megatron.distributed.launch.fake_process_group`)."""

_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}


@dataclass(frozen=True)
class Group:
    """A process group, and this rank's place in it."""

    # Global ranks, ascending.
    ranks: tuple[int, ...] = (0,)
    # Index of this process among them.
    rank: int = 0
    # None for a group of one, which needs no torch.distributed.
    handle: dist.ProcessGroup | None = None
    # Axes of the rank grid along which the ranks differ (``tp``, ``dp-cp``...), or ``world``; names the meter's counts.
    axes: str = field(default="world", compare=False)
    # Shared by all groups of a mesh.
    meter: CommMeter = field(default_factory=CommMeter, compare=False, repr=False)
    # In the place of this process; groups with one communicator share it.
    row: int = field(default=UNTRACKED, compare=False, repr=False)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    @property
    def has_peers(self) -> bool:
        """True if the group has peers that take part in collectives; those of a fake process group do not."""
        return self.size > 1 and dist.get_backend(self.handle) != FAKE_BACKEND

    @property
    def uses_nccl(self) -> bool:
        """True if NCCL communicates."""
        return self.size > 1 and dist.get_backend(self.handle) == "nccl"

    def blocked(self, out: Tensor, call: Call = NO_CALL) -> AbstractContextManager[None]:
        """Count the time inside as blocked on the other ranks, on the device of ``out``; also a range in profiles.

        Args:
            out: what this rank gets, complete at the end.
            call: from :meth:`called`.
        """
        return profiler_range(
            COMMUNICATION_PREFIX + self.axes, _Wait(self, self.meter.span(self.axes, out.is_cuda), call, out)
        )

    def called(self, operation: str, x: Tensor, count: float, given: Sequence[Tensor] | None = None) -> Call:
        """Record the call of a collective on ``x``.

        Args:
            operation: such as ``ALL_REDUCE``.
            x: of the same dtype and size on all ranks.
            count: bytes that a ring collective sends from this rank, times the ranks over the other ranks.
            given: what this rank gives; None for ``x``.
        """
        axes = PIPELINE if self.axes == BUBBLE else self.axes
        self.meter.sends(axes, operation, count * (self.size - 1) / self.size)
        number = PLACE.call(self.row, operation, axes, x.dtype, x.numel())
        return Call(number, self.meter.given(operation, (x,) if given is None else given, self))


@dataclass(frozen=True)
class Channel:
    """A directed edge of a pipeline, with a communicator of its own; messages arrive in the order of sending."""

    # Global ranks of sender and receiver.
    source: int
    target: int
    handle: dist.ProcessGroup | None = field(default=None, compare=False)
    # Counts time blocked as ``BUBBLE`` and bytes sent as ``PIPELINE``.
    meter: CommMeter = field(default_factory=CommMeter, compare=False, repr=False)
    # In the place of this process.
    row: int = field(default=UNTRACKED, compare=False, repr=False)

    def blocked(self, out: Tensor, call: Call = NO_CALL) -> AbstractContextManager[None]:
        """Count the time inside as blocked on the peer; see :meth:`Group.blocked`."""
        return profiler_range(
            COMMUNICATION_PREFIX + BUBBLE, _Wait(self, self.meter.span(BUBBLE, out.is_cuda), call, out)
        )

    def called(self, x: Tensor, given: Sequence[Tensor]) -> Call:
        """Record a message ``x``, of which this rank gives ``given``."""
        number = PLACE.call(self.row, MESSAGE, PIPELINE, x.dtype, x.numel())
        return Call(number, self.meter.given(SEND, given, self))


class _Wait(AbstractContextManager[None]):
    """Marks a call as awaited, in the place of this process, also after an error inside: it is then the place of the
    error."""

    __slots__ = ("_call", "_inner", "_meter", "_out", "_row")

    def __init__(
        self, group: Group | Channel, inner: AbstractContextManager[None], call: Call, out: Tensor | None = None
    ) -> None:
        self._row, self._meter, self._inner, self._call, self._out = group.row, group.meter, inner, call, out

    def __enter__(self) -> None:
        PLACE.slots[self._row + AWAITED] = self._call.number
        self._inner.__enter__()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        self._inner.__exit__(kind, error, trace)
        if kind is None:
            PLACE.slots[self._row + AWAITED] = 0
            if self._out is not None:
                self._meter.got(self._call, self._out)


@dataclass
class Pending:
    """The result of asynchronous communication, or a tensor that is being sent."""

    result: Tensor
    works: Sequence[dist.Work] = ()
    group: Group | Channel = field(default_factory=Group)
    # Other tensors that are being sent.
    sent: Sequence[Tensor] = ()
    # See :meth:`Group.called`.
    call: Call = NO_CALL

    def wait(self) -> Tensor:
        """Wait for the communication, and return the result."""
        if self.works:
            with self.group.blocked(self.result, self.call):
                for work in self.works:
                    work.wait()
            self.works = self.sent = ()
        return self.result

    def is_done(self) -> bool:
        """Return True if :meth:`wait` would return at once. Always False for gloo before ``wait``."""
        return all(work.is_completed() for work in self.works)


def new_group(ranks: Sequence[int], timeout: timedelta | None, description: str) -> dist.ProcessGroup:
    """Create a process group; collective over all ranks of the world.

    On NCCL its kernels run on a stream of high priority: a transfer and the matrix product that hides it become ready
    together, and the transfer has to start first.

    Args:
        ranks: of the group.
        timeout: of its collectives; None for the default.
        description: appears in NCCL's error messages and flight recorder.
    """
    options = None
    if dist.get_backend() == "nccl":
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        if timeout is not None:
            options._timeout = timeout
    return dist.new_group([*ranks], timeout=timeout, pg_options=options, group_desc=description)


def open_communicator(handle: dist.ProcessGroup | None) -> None:
    """Create the communicator of a group, which NCCL leaves to the first collective, and wait for it; collective."""
    if handle is not None and dist.get_backend(handle) == "nccl":
        dist.all_reduce(torch.zeros(1, device="cuda"), group=handle)
        torch.cuda.synchronize()


def start_all_reduce(x: Tensor, group: Group, op: str = "sum") -> Pending:
    """Start an :func:`all_reduce`."""
    if group.size == 1:
        return Pending(x)
    call = group.called(ALL_REDUCE, x, 2 * x.nbytes)
    return Pending(x, [dist.all_reduce(x, _OPS[op], group.handle, async_op=True)], group, call=call)


def start_all_gather(x: Tensor, group: Group, out: Tensor | None = None) -> Pending:
    """Start an :func:`all_gather` into ``out``; ``x`` may be this rank's rows of it."""
    if group.size == 1:
        return Pending(x)
    if out is None:
        out = _rows_like(x, x.shape[0] * group.size)
    elif not x.is_cuda and x.untyped_storage()._cdata == out.untyped_storage()._cdata:
        x = x.clone()  # NCCL supports gathering in place; gloo does not document it
    call = group.called(ALL_GATHER, x, out.nbytes)
    return Pending(out, [_all_gather(out, x.contiguous(), group=group.handle, async_op=True)], group, call=call)


def start_reduce_scatter(x: Tensor, group: Group, out: Tensor | None = None) -> Pending:
    """Start a :func:`reduce_scatter`; on GPUs into ``out``, which may be this rank's rows of ``x``."""
    if group.size == 1:
        return Pending(x)
    if out is None or not x.is_cuda:  # NCCL supports reducing in place; gloo does not document it
        out = _rows_like(x, x.shape[0] // group.size)
    call = group.called(REDUCE_SCATTER, x, x.nbytes)
    return Pending(out, [_reduce_scatter(out, x.contiguous(), group=group.handle, async_op=True)], group, call=call)


def start_broadcast(x: Tensor, group: Group, source: int) -> Pending:
    """Start copying ``x`` of rank ``source`` of the group into ``x`` of the others."""
    if group.size == 1:
        return Pending(x)
    call = group.called(BROADCAST, x, x.nbytes, (x,) if group.rank == source else ())
    return Pending(x, [dist.broadcast(x, group.ranks[source], group.handle, async_op=True)], group, call=call)


def start_reduce(x: Tensor, group: Group, target: int) -> Pending:
    """Start summing ``x`` over ranks, in place on rank ``target`` of the group; on the others ``x`` becomes invalid."""
    if group.size == 1:
        return Pending(x)
    call = group.called(REDUCE, x, x.nbytes)
    if group.rank != target:
        call = Call(call.number)
    work = dist.reduce(x, group.ranks[target], _OPS["sum"], group.handle, async_op=True)
    return Pending(x, [work], group, call=call)


def start_all_to_all(x: Tensor, group: Group) -> Pending:
    """Start an all-to-all of ``[size * n, ...]``: ``n`` rows for every rank -> ``n`` rows from every rank."""
    if group.size == 1:
        return Pending(x)
    out = torch.empty_like(x)
    call = group.called(ALL_TO_ALL, x, x.nbytes)
    work = dist.all_to_all_single(out, x.contiguous(), group=group.handle, async_op=True)
    return Pending(out, [work], group, call=call)


def start_all_to_all_rows(
    x: Tensor, sent: Sequence[int] | None, received: Sequence[int] | None, group: Group
) -> Pending:
    """Start to send ``sent[i]`` rows of ``x`` to every rank ``i``, in rank order, and to get ``received[i]`` from it.

    None is for equally many.
    """
    if sent is None or received is None or group.size == 1:
        return start_all_to_all(x, group)
    out = _rows_like(x, sum(received))
    leaving = sum(sent) - sent[group.rank]
    group.meter.sends(group.axes, ALL_TO_ALL, leaving * x[:1].nbytes)
    number = PLACE.call(group.row, ALL_TO_ALL, group.axes, x.dtype, 0)  # ranks have different numbers of rows
    call = Call(number, group.meter.given(ALL_TO_ALL, (x,), group))
    splits = list(received), list(sent)
    work = dist.all_to_all_single(out, x.contiguous(), *splits, group=group.handle, async_op=True)
    return Pending(out, [work], group, call=call)


def start_send(x: Tensor, channel: Channel) -> Pending:
    """Start sending ``x``, which must not change until the send is complete."""
    channel.meter.sends(PIPELINE, SEND, x.nbytes)
    call = Call(channel.called(x, (x,)).number)
    work = dist.isend(x, channel.target, channel.handle)
    return Pending(x, () if work is None else (work,), channel, call=call)


def start_receive(out: Tensor, channel: Channel) -> Pending:
    """Start receiving the next message into ``out``, of the shape and dtype that is sent."""
    call = channel.called(out, ())
    work = dist.irecv(out, channel.source, channel.handle)
    return Pending(out, () if work is None else (work,), channel, call=call)


def start_exchange(
    sent: Sequence[tuple[Tensor, int]], received: Sequence[tuple[Tensor, int]], result: Tensor, group: Group
) -> Pending:
    """Start to exchange messages with other ranks of a group.

    Two ranks have to start the exchanges with messages between them in the same order.

    Args:
        sent: contiguous tensors, and the rank in the group to send each to.
        received: parts of ``result``, and the rank to receive each from.
        result: returned by :meth:`Pending.wait`.
        group: of the ranks.
    """
    messages = [(dist.isend, x, peer) for x, peer in sent] + [(dist.irecv, x, peer) for x, peer in received]
    operations = [dist.P2POp(operation, x, group.ranks[peer], group.handle) for operation, x, peer in messages]
    group.meter.sends(group.axes, SEND, sum(x.nbytes for x, _ in sent))
    label = group.meter.given(SEND, [x for x, _ in sent], group)
    works = dist.batch_isend_irecv(operations) if operations else []
    PLACE.slots[group.row + AWAITED_KIND] = PLACE.kind(EXCHANGE, group.axes, result.dtype)
    return Pending(result, works, group, [x for x, _ in sent], Call(UNNUMBERED, label))


def all_reduce(x: Tensor, group: Group, op: str = "sum") -> Tensor:
    """Reduce ``x`` in place over the group (``sum`` or ``max``); results are bitwise equal on all ranks."""
    if group.size > 1:
        call = group.called(ALL_REDUCE, x, 2 * x.nbytes)
        with group.blocked(x, call):
            dist.all_reduce(x, _OPS[op], group.handle)
    return x


def all_gather(x: Tensor, group: Group) -> Tensor:
    """Gather ``[n, ...]`` of every rank to ``[size * n, ...]`` on all ranks, in rank order."""
    if group.size == 1:
        return x
    out = _rows_like(x, x.shape[0] * group.size)
    call = group.called(ALL_GATHER, x, out.nbytes)
    with group.blocked(out, call):
        _all_gather(out, x.contiguous(), group=group.handle)
    return out


def reduce_scatter(x: Tensor, group: Group) -> Tensor:
    """Sum ``[size * n, ...]`` over ranks; return this rank's ``[n, ...]`` rows of the sum."""
    if group.size == 1:
        return x
    out = _rows_like(x, x.shape[0] // group.size)
    call = group.called(REDUCE_SCATTER, x, x.nbytes)
    with group.blocked(out, call):
        _reduce_scatter(out, x.contiguous(), group=group.handle)
    return out


def all_gather_matmul(x: Tensor, matrix: Tensor, group: Group) -> tuple[Tensor, Tensor]:
    """Return the gathered ``x`` and its product with ``matrix``, fused by symmetric memory.

    Args:
        x: ``[n, ..., in]`` of this rank, on a GPU.
        matrix: ``[in, out]``.
        group: ranks for which :func:`symmetric_memory_missing` has returned None.
    """
    handle = _handle(group)
    call = group.called(ALL_GATHER, x, x.nbytes * group.size)
    rows, (y,) = torch.ops.symm_mem.fused_all_gather_matmul(x.contiguous(), [matrix], 0, handle.group_name)
    return group.meter.got(call, rows), y


def matmul_reduce_scatter(x: Tensor, matrix: Tensor, group: Group) -> Tensor:
    """Return this rank's rows of the product of ``x`` and ``matrix``, summed over ranks; see :func:`all_gather_matmul`.

    Args:
        x: ``[size * n, ..., in]``.
        matrix: ``[in, out]`` of this rank.
        group: the ranks.
    """
    handle = _handle(group)
    y: Tensor = torch.ops.symm_mem.fused_matmul_reduce_scatter(x.contiguous(), matrix, "sum", 0, handle.group_name)
    call = group.called(REDUCE_SCATTER, y, y.nbytes * group.size, (x,))
    return group.meter.got(call, y)


def symmetric_memory_missing(group: Group, device: torch.device) -> str | None:
    """Return why the GPUs of a group cannot read each other's memory, or None if they can. Collective."""
    if device.type != "cuda" or not group.has_peers:
        return "it needs GPUs"
    if len(set(all_gather_objects(socket.gethostname(), group))) > 1:
        return "the tensor-parallel ranks are on several machines"
    try:
        memory = importlib.import_module("torch.distributed._symmetric_memory")  # also registers the fused operations
        tensor = memory.empty(256, dtype=torch.uint8, device=device)
        memory.rendezvous(tensor, _handle(group).group_name)
        found = ""
    except (ImportError, AttributeError, RuntimeError) as error:
        found = f"{type(error).__name__}: {error}".splitlines()[0]
    return next(filter(None, all_gather_objects(found, group)), None)


def _handle(group: Group) -> dist.ProcessGroup:
    if group.handle is None:
        raise ValueError("a group of one rank has no communicator")
    return group.handle


def _rows_like(x: Tensor, rows: int) -> Tensor:
    return torch.empty((rows, *x.shape[1:]), dtype=x.dtype, device=x.device)


def all_gather_objects(value: T, group: Group) -> list[T]:
    """Gather JSON values in rank order. For set-up and messages, never inside a step.

    Nothing that a rank sends can run code on another: values travel as the bytes of their JSON.

    Raises:
        TypeError: if ``value`` is not JSON, as a tuple is not.
        ValueError: if what a rank has sent is not JSON.
    """
    content = _encode(value, group)
    if not group.has_peers:
        return [value] * group.size
    sizes, row = _pad(content, group)
    rows = row.new_empty(group.size * len(row))
    with _exchanging_objects(group):
        _all_gather(rows, row, group=group.handle)
    return _decode(rows.chunk(group.size), sizes, group)


def gather_objects(value: T, group: Group) -> list[T]:
    """As :func:`all_gather_objects`, but only the group's first rank gets the values; the others get []."""
    content = _encode(value, group)
    if not group.has_peers:
        return [value] * group.size if group.rank == 0 else []
    sizes, row = _pad(content, group)
    rows = [torch.empty_like(row) for _ in sizes] if group.rank == 0 else None
    with _exchanging_objects(group):
        dist.gather(row, rows, group.ranks[0], group.handle)
    return [] if rows is None else _decode(rows, sizes, group)


def broadcast_object(value: T, group: Group) -> T:
    """As :func:`all_gather_objects`, but return the value of the group's first rank; other ranks' are ignored."""
    content = _encode(value, group)
    if not group.has_peers:
        return value
    size = content.new_tensor([len(content)], dtype=torch.int64)
    with _exchanging_objects(group):
        dist.broadcast(size, group.ranks[0], group.handle)
        if group.rank:
            content = content.new_empty(int(size))
        dist.broadcast(content, group.ranks[0], group.handle)
    received: T = _decode([content], [len(content)], group)[0]
    return received


def _encode(value: object, group: Group) -> Tensor:
    """Return the bytes of a JSON value, on a device that the group's backend serves."""
    try:
        text = json.dumps(value)
        is_same = json.loads(text) == value
    except (TypeError, ValueError) as error:
        raise TypeError(f"ranks exchange only JSON, which {value!r:.200} is not: {error}") from error
    if not is_same:
        raise TypeError(f"ranks exchange only JSON, which {value!r:.200} is not: it would arrive as {text:.200}")
    device = "cuda" if group.uses_nccl else "cpu"
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).to(device)


def _exchanging_objects(group: Group) -> AbstractContextManager[None]:
    """Record a collective on JSON values in the place of this process, and that it is awaited."""
    return _Wait(group, NO_SPAN, Call(PLACE.call(group.row, OBJECTS, group.axes, "bytes", 0)))


def _pad(content: Tensor, group: Group) -> tuple[list[int], Tensor]:
    """Return the number of bytes of every rank, and this rank's bytes padded to the largest; collective."""
    sizes = content.new_empty(group.size, dtype=torch.int64)
    with _exchanging_objects(group):
        _all_gather(sizes, content.new_tensor([len(content)], dtype=torch.int64), group=group.handle)
    row = content.new_zeros(int(sizes.max()))
    row[: len(content)] = content
    return sizes.tolist(), row


def _decode(rows: Sequence[Tensor], sizes: Sequence[int], group: Group) -> list[Any]:
    """Return the values that the first ranks of the group have sent."""
    values = []
    for rank, row, size in zip(group.ranks, rows, sizes):
        content = row[:size].cpu().numpy().tobytes()
        try:
            values.append(json.loads(content.decode()))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"rank {rank} has sent something that is not JSON: {content[:40]!r}") from error
    return values
