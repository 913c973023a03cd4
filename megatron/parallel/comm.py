"""The raw collectives: the only place where tensors leave a rank.

Every operation takes a :class:`Group`, works along dimension 0 and does nothing in a group of one. The
``start_`` forms return a :class:`Pending`, whose ``wait`` gives the result. Names that changed between
torch 2.10 and 2.13 are resolved here once. How long a rank is stopped by a collective on tensors, the group's
meter counts: the whole of one that is waited for at once, the wait alone of one that was started before; and how
many bytes it sends.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.parallel.ranges import COMMUNICATION, span
from megatron.parallel.traffic import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, REDUCE_SCATTER, SEND, Meter

_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
T = TypeVar("T")
BUBBLE = "bubble"
"""The name under which a rank's waits for others of its pipeline are counted."""
PIPELINE = "pp"
"""The name under which the bytes are counted that it sends them."""
PRETENDED = "fake"
"""The backend of groups in which this rank alone is there (:func:`megatron.parallel.mesh.pretended`)."""

_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}


@dataclass(frozen=True)
class Group:
    """Ranks that communicate.

    Attributes:
        ranks: global ranks, ascending.
        rank: index of this process among them.
        handle: the process group; None for a group of one, which needs no torch.distributed.
        axes: of the rank grid along which they differ, as a name: ``tp``, ``dp``, ``world`` for all.
        meter: counts the time that this rank waits, and what it sends, by ``axes``; the groups of a mesh share one.
    """

    ranks: tuple[int, ...] = (0,)
    rank: int = 0
    handle: dist.ProcessGroup | None = None
    axes: str = field(default="world", compare=False)
    meter: Meter = field(default_factory=Meter, compare=False, repr=False)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    @property
    def answers(self) -> bool:
        """Whether there are others who say something; those of a pretended world would all say the same."""
        return self.size > 1 and dist.get_backend(self.handle) != PRETENDED

    def waiting(self, x: Tensor) -> AbstractContextManager[None]:
        """Count the time inside, a range in profiles, as waiting for the other ranks, on the device of ``x``."""
        return span(COMMUNICATION + self.axes, self.meter.span(self.axes, x.is_cuda))

    def sends(self, operation: str, count: float) -> None:
        """Count the bytes that a rank sends of ``count`` in a ring."""
        self.meter.sends(PIPELINE if self.axes == BUBBLE else self.axes, operation, count * (self.size - 1) / self.size)


@dataclass(frozen=True)
class Channel:
    """A directed edge of a pipeline: what one rank sends to another, in order, with a communicator of its own.

    Attributes:
        source: global rank of the sender.
        target: of the receiver.
        handle: the process group that has the communicator.
        meter: counts, as ``BUBBLE``, how long this rank waits for what comes, and, as ``PIPELINE``, what it sends.
    """

    source: int
    target: int
    handle: dist.ProcessGroup | None = field(default=None, compare=False)
    meter: Meter = field(default_factory=Meter, compare=False, repr=False)

    def waiting(self, x: Tensor) -> AbstractContextManager[None]:
        """Count the time inside as in :meth:`Group.waiting`."""
        return span(COMMUNICATION + BUBBLE, self.meter.span(BUBBLE, x.is_cuda))


@dataclass
class Pending:
    """A result that communication is still filling, or a tensor that is still being sent."""

    result: Tensor
    work: dist.Work | None = None
    group: Group | Channel = field(default_factory=Group)

    def wait(self) -> Tensor:
        """The result, once it is there."""
        if self.work is not None:
            with self.group.waiting(self.result):
                self.work.wait()
            self.work = None
        return self.result

    def done(self) -> bool:
        """Whether :meth:`wait` is known to find it over. Gloo cannot tell, and says no until it was waited for."""
        return self.work is None or self.work.is_completed()


def start_all_reduce(x: Tensor, group: Group, op: str = "sum") -> Pending:
    """:func:`all_reduce`, not waited for."""
    if group.size == 1:
        return Pending(x, None, group)
    group.sends(ALL_REDUCE, 2 * x.nbytes)
    return Pending(x, dist.all_reduce(x, _OPS[op], group.handle, async_op=True), group)


def start_all_gather(x: Tensor, group: Group, out: Tensor | None = None) -> Pending:
    """:func:`all_gather`, not waited for; into ``out``, of which ``x`` may be this rank's rows."""
    if group.size == 1:
        return Pending(x, None, group)
    if out is None:
        out = _rows_like(x, x.shape[0] * group.size)
    elif not x.is_cuda:  # NCCL gathers in place; of gloo nobody says so
        x = x.clone()
    group.sends(ALL_GATHER, out.nbytes)
    return Pending(out, _all_gather(out, x.contiguous(), group=group.handle, async_op=True), group)


def start_reduce_scatter(x: Tensor, group: Group, out: Tensor | None = None) -> Pending:
    """:func:`reduce_scatter`, not waited for; on GPUs into ``out``, which may be this rank's rows of ``x``."""
    if group.size == 1:
        return Pending(x, None, group)
    if out is None or not x.is_cuda:  # NCCL sums in place; of gloo nobody says so
        out = _rows_like(x, x.shape[0] // group.size)
    group.sends(REDUCE_SCATTER, x.nbytes)
    return Pending(out, _reduce_scatter(out, x.contiguous(), group=group.handle, async_op=True), group)


def start_all_to_all(x: Tensor, group: Group) -> Pending:
    """``[size * n, ...]`` on each rank, ``n`` rows for every rank -> ``[size * n, ...]``, those from every rank."""
    if group.size == 1:
        return Pending(x, None, group)
    out = torch.empty_like(x)
    group.sends(ALL_TO_ALL, x.nbytes)
    return Pending(out, dist.all_to_all_single(out, x.contiguous(), group=group.handle, async_op=True), group)


def all_to_all_rows(x: Tensor, sent: Sequence[int], received: Sequence[int], group: Group) -> Tensor:
    """``sent[i]`` rows of ``x`` to every rank ``i``, in rank order -> ``received[i]`` rows from every rank ``i``."""
    if group.size == 1:
        return x
    out = _rows_like(x, sum(received))
    leaving = sum(sent) - sent[group.rank]
    group.meter.sends(group.axes, ALL_TO_ALL, leaving * x[:1].nbytes)
    with group.waiting(x):
        dist.all_to_all_single(out, x.contiguous(), list(received), list(sent), group=group.handle)
    return out


def start_send(x: Tensor, channel: Channel) -> Pending:
    """Send ``x``, which must stay as it is until it is there; the other end receives in the order of sending."""
    channel.meter.sends(PIPELINE, SEND, x.nbytes)
    return Pending(x, dist.isend(x, channel.target, channel.handle), channel)


def start_receive(out: Tensor, channel: Channel) -> Pending:
    """Fill ``out``, of the shape and format of what is sent, with what comes next."""
    return Pending(out, dist.irecv(out, channel.source, channel.handle), channel)


def all_reduce(x: Tensor, group: Group, op: str = "sum") -> Tensor:
    """Reduce ``x`` in place over the group (``sum`` or ``max``); every rank gets the same bits."""
    if group.size > 1:
        group.sends(ALL_REDUCE, 2 * x.nbytes)
        with group.waiting(x):
            dist.all_reduce(x, _OPS[op], group.handle)
    return x


def all_gather(x: Tensor, group: Group) -> Tensor:
    """``[n, ...]`` on each rank -> ``[size * n, ...]`` on all, in rank order."""
    if group.size == 1:
        return x
    out = _rows_like(x, x.shape[0] * group.size)
    group.sends(ALL_GATHER, out.nbytes)
    with group.waiting(x):
        _all_gather(out, x.contiguous(), group=group.handle)
    return out


def reduce_scatter(x: Tensor, group: Group) -> Tensor:
    """``[size * n, ...]`` on each rank -> the sum's own ``[n, ...]`` rows on each."""
    if group.size == 1:
        return x
    out = _rows_like(x, x.shape[0] // group.size)
    group.sends(REDUCE_SCATTER, x.nbytes)
    with group.waiting(x):
        _reduce_scatter(out, x.contiguous(), group=group.handle)
    return out


def _rows_like(x: Tensor, rows: int) -> Tensor:
    return torch.empty((rows, *x.shape[1:]), dtype=x.dtype, device=x.device)


def all_gather_objects(value: T, group: Group) -> list[T]:
    """Each rank's picklable ``value``, in rank order; for set-up and messages, never inside a step."""
    values = [value] * group.size
    if group.answers:
        dist.all_gather_object(values, value, group.handle)
    return values


def broadcast_object(value: T, group: Group) -> T:
    """The picklable ``value`` of the group's first rank; what the others give is not looked at."""
    values = [value]
    if group.answers:
        dist.broadcast_object_list(values, group.ranks[0], group.handle)
    return values[0]
