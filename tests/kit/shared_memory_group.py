"""A ``torch.distributed`` backend for many ranks on few cores of one machine, which communicate by shared memory.

A rank appends each tensor it sends to a log that the others map too, and continues; a result is put together when it
is waited for. Nothing blocks but ``wait``, and a small collective of eight ranks on two cores takes a millisecond, a
tenth of gloo's time. Collectives that differ between ranks, in kind, dtype or size, raise at once.

Reductions add in rank order and are equal to the bit on all ranks. Tensors are contiguous, and of a dtype of gloo.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import struct
import time
import zlib
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

FUTEX = {"x86_64": 202, "aarch64": 98}.get(platform.machine()) if platform.system() == "Linux" else None
"""Number of the system call by which a rank sleeps until another wakes it."""

FUTEX_WAIT, FUTEX_WAKE = 0, 1
SHARED_MEMORY = "shared_memory"
BACKEND = SHARED_MEMORY if FUTEX is not None else "gloo"
"""The fastest backend for ranks of one machine."""

LOG_BYTES = 1 << 33
"""Size of a rank's sparse file: what it may send in a job, of which memory holds what was sent."""

DTYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool),
)
"""The dtypes of gloo."""

REDUCTIONS: dict[Any, Callable[[Tensor, Tensor], Tensor]] = {
    dist.ReduceOp.SUM: Tensor.add_,
    dist.ReduceOp.PRODUCT: Tensor.mul_,
    dist.ReduceOp.MAX: lambda total, x: torch.maximum(total, x, out=total),
    dist.ReduceOp.MIN: lambda total, x: torch.minimum(total, x, out=total),
}

TAIL, BELL, ASLEEP, ENDED, PID = range(5)
"""Words at the beginning of a log: its end, a counter of calls, whether its rank sleeps, has ended, and its process."""

FIRST = 64
HEADER = struct.Struct("=QqqqII")
"""Group, channel (-1 or the receiver), number in both, bytes, kind of communication, and dtype."""

SLEEP_SECONDS = 0.2
"""After which a rank that waits looks whether its peers are still there."""

COLLECTIVE = -1

_libc = ctypes.CDLL(None, use_errno=True)


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_SLEEP = _Timespec(0, int(SLEEP_SECONDS * 1e9))


class Log:
    """The messages of a rank, in a file that all ranks map; ``words`` are its first."""

    def __init__(self, path: Path, create: bool) -> None:
        file = os.open(path, os.O_RDWR | (os.O_CREAT | os.O_EXCL if create else 0), 0o600)
        try:
            if create:
                os.ftruncate(file, LOG_BYTES)
            self.memory = mmap.mmap(file, LOG_BYTES)
        finally:
            os.close(file)
        self.words = memoryview(self.memory)[:FIRST].cast("Q")
        self._bell = ctypes.addressof(ctypes.c_uint32.from_buffer(self.memory, 8 * BELL))
        self.read_to = FIRST

    def append(self, header: tuple[int, ...], content: Tensor | None) -> None:
        """Add a message."""
        place = self.words[TAIL]
        start = place + FIRST
        end = start + header[3]
        if end > LOG_BYTES:
            raise MemoryError(f"this rank has sent {LOG_BYTES} bytes in one job")
        HEADER.pack_into(self.memory, place, *header)
        if content is not None and header[3]:
            target = torch.frombuffer(self.memory, dtype=torch.uint8, count=header[3], offset=start)
            target.copy_(content.reshape(-1).view(torch.uint8))
        self.words[TAIL] = -(-end // FIRST) * FIRST

    def wake(self) -> None:
        """End the sleep of the rank of this log."""
        self.words[BELL] = (self.words[BELL] + 1) & 0xFFFFFFFF
        if self.words[ASLEEP]:
            _libc.syscall(FUTEX, ctypes.c_void_p(self._bell), FUTEX_WAKE, 1, None, None, 0)

    def sleep(self, bell: int) -> None:
        """Sleep until another rank wakes this one, or has done so since it had this count."""
        self.words[ASLEEP] = 1
        if self.words[BELL] == bell:
            _libc.syscall(FUTEX, ctypes.c_void_p(self._bell), FUTEX_WAIT, ctypes.c_uint32(bell), ctypes.byref(_SLEEP))
        self.words[ASLEEP] = 0


class Board:
    """The logs of all ranks of a job, in the order of ranks, and the messages read from them and not taken yet."""

    def __init__(self, folder: Path, rank: int, world_size: int, timeout: float) -> None:
        self.rank, self.timeout = rank, timeout
        self.mine = Log(folder / f".{rank}", create=True)
        self.mine.words[TAIL], self.mine.words[PID] = FIRST, os.getpid()
        os.rename(folder / f".{rank}", folder / str(rank))
        self._arrived: list[dict[tuple[int, int, int], tuple[int, int, int, int]]] = [{} for _ in range(world_size)]
        self.logs = [self.mine if r == rank else self._open(folder / str(r)) for r in range(world_size)]

    def _open(self, path: Path) -> Log:
        deadline = time.monotonic() + self.timeout
        while not path.exists():
            if time.monotonic() > deadline:
                raise dist.DistBackendError(f"rank {path.name} has not started in {self.timeout:g} s")
            time.sleep(0.001)
        return Log(path, create=False)

    def send(self, group: int, channel: int, number: int, kind: int, x: Tensor | None, to: Sequence[int]) -> None:
        """Append a message and wake the ranks in ``to``."""
        size, dtype = (0, 0) if x is None else (x.nbytes, DTYPES.index(x.dtype))
        self.mine.append((group, channel, number, size, kind, dtype), x)
        for rank in to:
            if rank != self.rank:
                self.logs[rank].wake()

    def receive(self, source: int, key: tuple[int, int, int], kind: int, like: Tensor, deadline: float) -> Tensor:
        """Wait for a message of rank ``source``, and return it as a view of its log, shaped like a tensor.

        Raises:
            DistBackendError: the rank has ended, or the message does not come in time.
            RuntimeError: the message is of another kind, size or dtype.
        """
        arrived = self._arrived[source]
        while key not in arrived:
            bell = self.mine.words[BELL]
            self._read(source)
            if key in arrived:
                break
            log = self.logs[source]
            if log.words[ENDED] or not Path(f"/proc/{log.words[PID]}").exists():
                self._read(source)
                if key not in arrived:
                    raise dist.DistBackendError(f"rank {source} has ended, rank {self.rank} waits for it")
                break
            if time.monotonic() > deadline:
                raise dist.DistBackendError(f"timed out: rank {self.rank} has no message of rank {source}")
            self.mine.sleep(bell)
        place, size, its_kind, its_dtype = arrived.pop(key)
        its = KINDS[its_kind], size, DTYPES[its_dtype]
        own = KINDS[kind], like.nbytes, like.dtype
        if its != own:
            texts = ("{} of {} bytes of {}".format(*call) for call in (its, own))
            raise RuntimeError(f"rank {source} calls {next(texts)}, rank {self.rank} {next(texts)}")
        if not size:
            return torch.empty_like(like)
        count = size // like.dtype.itemsize
        return torch.frombuffer(self.logs[source].memory, dtype=like.dtype, count=count, offset=place).view(like.shape)

    def _read(self, source: int) -> None:
        log = self.logs[source]
        end = log.words[TAIL]
        while log.read_to < end:
            group, channel, number, size, kind, dtype = HEADER.unpack_from(log.memory, log.read_to)
            start = log.read_to + FIRST
            if channel in (COLLECTIVE, self.rank):
                self._arrived[source][group, channel, number] = start, size, kind, dtype
            log.read_to = -(-(start + size) // FIRST) * FIRST

    def end(self) -> None:
        """Say to all that nothing more comes."""
        self.mine.words[ENDED] = 1
        for log in self.logs:
            log.wake()


_board: Board | None = None


def open_board(folder: Path, rank: int, world_size: int, timeout: float) -> None:
    """Join the other ranks of a job at ``folder``, which is theirs alone."""
    global _board
    folder.mkdir(exist_ok=True)
    _board = Board(folder, rank, world_size, timeout)


def close_board() -> None:
    """Leave them; ranks that still wait for this one fail."""
    global _board
    if _board is not None:
        _board.end()
        _board = None


class Pending(dist.Work):
    """Communication that ends in ``wait``, where ``finish`` receives and writes the results."""

    def __init__(self, finish: Callable[[], None] | None, result: list[Tensor]) -> None:
        super().__init__()
        self._finish, self._result = finish, result

    def wait(self, timeout: object = None) -> bool:
        """Receive."""
        if self._finish is not None:
            finish, self._finish = self._finish, None
            with torch.no_grad():
                finish()
        return True

    def is_completed(self) -> bool:
        """Return True after ``wait``."""
        return self._finish is None

    def result(self) -> list[Tensor]:
        """Return the tensors."""
        return self._result


KINDS = ("all-reduce", "all-gather", "reduce-scatter", "broadcast", "reduce", "all-to-all", "gather", "barrier", "send")
Part = Callable[[int, Tensor], Tensor]


ProcessGroup: Any = dist.ProcessGroup  # the overloads of its stub cannot be overridden


class SharedMemoryGroup(ProcessGroup):
    """A process group on the board of this process."""

    def __init__(self, options: Any, _: object = None) -> None:
        super().__init__(options.group_rank, options.group_size)
        if _board is None:
            raise RuntimeError("the board of this process is closed")
        self._board, self._rank = _board, options.group_rank
        self._ranks = tuple(options.global_ranks_in_group) or tuple(range(options.group_size))
        self._group_id = options.group_id
        self._name = zlib.crc32(options.group_id.encode()) << 1
        self._timeout = min(options.timeout.total_seconds(), _board.timeout)
        self._collectives, self._sent, self._received = 0, Counter[int](), Counter[int]()

    def getBackendName(self) -> str:  # noqa: N802
        """Return its name."""
        return SHARED_MEMORY

    @property
    def group_name(self) -> str:
        """Return the name under which the group is registered."""
        return str(self._group_id)

    def size(self) -> int:
        """Return the number of ranks."""
        return len(self._ranks)

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Pending:
        """Reduce in place."""
        (x,) = tensors
        part = self._begin("all-reduce", x)
        return Pending(lambda: _copy(x, self._total(part, x, opts.reduceOp)), tensors)

    def all_gather_single(self, out: Tensor, x: Tensor, opts: Any = None) -> Pending:
        """Gather into ``out``."""
        rows = _chunks(out, self.size())
        return self._gather(rows, x, out)

    def allgather(self, out: list[list[Tensor]], tensors: list[Tensor], opts: Any = None) -> Pending:
        """Gather into a list."""
        return self._gather(out[0], tensors[0], *out[0])

    def _gather(self, rows: Sequence[Tensor], x: Tensor, *result: Tensor) -> Pending:
        part = self._begin("all-gather", x)

        def finish() -> None:
            for rank, row in enumerate(rows):
                _copy(row, x if rank == self._rank else part(rank, x))

        return Pending(finish, [*result])

    def gather(self, out: list[list[Tensor]], tensors: list[Tensor], opts: Any) -> Pending:
        """Gather on one rank."""
        part, (x,) = self._begin("gather", tensors[0], self._ranks[opts.rootRank]), tensors

        def finish() -> None:
            if opts.rootRank == self._rank:
                for rank, row in enumerate(out[0]):
                    _copy(row, x if rank == self._rank else part(rank, x))

        return Pending(finish, out[0] if out else [])

    def reduce_scatter_single(self, out: Tensor, x: Tensor, opts: Any) -> Pending:
        """Reduce the rows of every rank into ``out``."""
        part = self._begin("reduce-scatter", x)

        def mine(rank: int, _: Tensor) -> Tensor:
            return _chunks(part(rank, x), self.size())[self._rank]

        own = _chunks(x, self.size())[self._rank]
        return Pending(lambda: _copy(out, self._total(mine, own, opts.reduceOp)), [out])

    def broadcast(self, tensors: list[Tensor], opts: Any) -> Pending:
        """Copy the tensor of one rank to all."""
        (x,) = tensors
        root = opts.rootRank
        part = self._begin("broadcast", x)
        return Pending(lambda: None if root == self._rank else _copy(x, part(root, x)), tensors)

    def reduce(self, tensors: list[Tensor], opts: Any) -> Pending:
        """Reduce in place on one rank; on others the tensor becomes invalid."""
        (x,) = tensors
        part = self._begin("reduce", x)
        invalid = torch.full_like(x, torch.nan if x.is_floating_point() else 0)
        root = opts.rootRank
        return Pending(
            lambda: _copy(x, self._total(part, x, opts.reduceOp) if root == self._rank else invalid), tensors
        )

    def all_to_all_single(
        self, out: Tensor, x: Tensor, received: Sequence[int], sent: Sequence[int], opts: Any = None
    ) -> Pending:
        """Send rows to every rank, equally many without ``received`` and ``sent``."""
        _check(x, out)
        count = self.size()
        leaving = x.split([*sent] or [len(x) // count] * count)
        coming = out.split([*received] or [len(out) // count] * count)
        number, code = self._collectives, KINDS.index("all-to-all")
        self._collectives += 1
        for rank, rows in zip(self._ranks, leaving, strict=True):
            self._board.send(self._name + 1, rank, number, code, rows, [rank])

        key = self._name + 1, self._board.rank, number

        def finish() -> None:
            for source, rows in zip(self._ranks, coming, strict=True):
                _copy(rows, self._board.receive(source, key, code, rows, self._until))

        return Pending(finish, [out])

    def barrier(self, opts: Any = None) -> Pending:
        """Wait for all ranks."""
        x = torch.zeros(1)
        part = self._begin("barrier", x)
        return Pending(lambda: _copy(x, self._total(part, x, dist.ReduceOp.SUM)), [])

    def send(self, tensors: list[Tensor], target: int, tag: int) -> Pending:
        """Send to one rank."""
        (x,) = tensors
        _check(x)
        rank, number = self._ranks[target], self._sent[target]
        self._sent[target] += 1
        self._board.send(self._name, rank, number, KINDS.index("send"), x, [rank])
        return Pending(None, tensors)

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> Pending:
        """Receive from one rank."""
        (out,) = tensors
        _check(out)
        key = self._name, self._board.rank, self._received[source]
        self._received[source] += 1
        rank, code = self._ranks[source], KINDS.index("send")
        return Pending(lambda: _copy(out, self._board.receive(rank, key, code, out, self._until)), tensors)

    # names before torch 2.13
    _allgather_base, _reduce_scatter_base, alltoall_base = all_gather_single, reduce_scatter_single, all_to_all_single

    @property
    def _until(self) -> float:
        return time.monotonic() + self._timeout

    def _begin(self, kind: str, x: Tensor, *to: int) -> Part:
        """Send this rank's part; return the function that receives a rank's, shaped like a tensor."""
        _check(x)
        key, code = (self._name, COLLECTIVE, self._collectives), KINDS.index(kind)
        self._collectives += 1
        self._board.send(*key, code, x, to or self._ranks)
        return lambda rank, like: self._board.receive(self._ranks[rank], key, code, like, self._until)

    def _total(self, part: Part, x: Tensor, reduce: Any) -> Tensor:
        """Reduce parts in the order of ranks; ``x`` is this rank's."""
        add = REDUCTIONS[getattr(reduce, "op", reduce)]
        parts = (x if rank == self._rank else part(rank, x) for rank in range(self.size()))
        total = next(parts).clone()
        for other in parts:
            add(total, other)
        return total


def _copy(out: Tensor, x: Tensor) -> None:
    out.copy_(x.view(out.shape))


def _chunks(x: Tensor, count: int) -> tuple[Tensor, ...]:
    return x.view(count, -1).unbind()


def _check(*tensors: Tensor) -> None:
    """Refuse what gloo or NCCL refuses."""
    for x in tensors:
        if not x.is_contiguous() or x.dtype not in DTYPES:
            raise RuntimeError(f"a tensor of {x.dtype} and strides {x.stride()} cannot be sent")


def register() -> None:
    """Make the backend known to ``torch.distributed``."""
    if SHARED_MEMORY not in dist.Backend.backend_list:
        dist.Backend.register_backend(SHARED_MEMORY, SharedMemoryGroup, extended_api=True, devices=["cpu"])
