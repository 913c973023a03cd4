"""Contiguous gradient buckets, reduced over data-parallel ranks while backward still runs.

A bucket holds the main gradients (at least fp32) of parameters of one dtype and one reduction group, in the order in
which backward is expected to finish them. Its sum over that group is made in two steps: a reduce-scatter over the ranks
that cut it among themselves (``shards``), which leaves each the part that it updates, and an all-reduce of that part
over the ranks that have the same one (``copies``). Without ZeRO nobody cuts it, and the second step is all there is.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from megatron.config.parallel import ParallelConfig
from megatron.optim.wire import Sum, start_all_reduce, start_reduce_scatter
from megatron.parallel.comm import Group
from megatron.parallel.grads import GradSink
from megatron.parallel.mesh import Mesh
from megatron.parallel.ownership import BucketKey, Packing, Share, limits_of, pack, partition
from megatron.parallel.shard import ShardSpec

IN_FLIGHT = 2
"""Sums of streamed buckets, over all of these, or of rounded addends that may be on their way before one is waited for:
they need memory besides what is kept."""


@dataclass(frozen=True)
class Room:
    """How a bucket is made up.

    Attributes:
        packing: where its parameters lie.
        shards: ranks that cut it among themselves.
        copies: ranks that have the same part of it.
        dtype: of the gradients, at least fp32.
        device: theirs.
        wire: format in which they travel.
    """

    packing: Packing
    shards: Group
    copies: Group
    dtype: torch.dtype
    device: torch.device
    wire: torch.dtype

    def zeros(self, elements: int) -> Tensor:
        """A flat buffer."""
        return torch.zeros(elements, dtype=self.dtype, device=self.device)


class Bucket:
    """The gradients of some parameters, all of them kept.

    Attributes:
        room: how it is made up.
        specs: of its parameters, by name.
        own: this rank's part, ``[elements / shards]``: the sum over all ranks once :meth:`finish` is done.
    """

    def __init__(self, room: Room, specs: Mapping[str, ShardSpec]) -> None:
        self.room, self.specs = room, specs
        self._buffer = room.zeros(room.packing.size)
        self.own = self._buffer.view(room.shards.size, -1)[room.shards.rank]
        self._sum: Sum | None = None
        self._started = False

    def start_step(self) -> None:
        """Zero the gradients."""
        self.settle()  # what a step that was given up has left on its way
        self._buffer.zero_()
        self._started = False

    def target(self, name: str) -> Tensor:
        """Where contributions to a gradient are added, ``spec.local_shape``."""
        return view_of(self._buffer, self.room.packing, name, self.specs[name])

    def contributed(self, name: str, complete: bool, overlap: bool) -> None:
        """Take note of a contribution; ``complete`` when the bucket has all of the step's."""
        if complete and overlap:
            self._start()

    def scatter(self) -> None:
        """Have the sum over the ranks that cut the bucket, and start that over the others."""
        if not self._started:
            self._start()
        if self.room.shards.size > 1:
            self.settle()
            self._sum = start_all_reduce(self.own, self.room.copies, self.room.wire)

    def finish(self) -> None:
        """Have the sum over all ranks, after :meth:`scatter`."""
        self.settle()

    def settle(self) -> None:
        """Take up the sum that is on its way, if there is one; the memory that it came in is let go of."""
        if self._sum is not None:
            put(self._sum.wait(), self.own)
            self._sum = None

    def _start(self) -> None:
        self._started = True
        if self.room.shards.size > 1:
            self._sum = start_reduce_scatter(self._buffer, self.room.shards, self.room.wire)
        else:
            self._sum = start_all_reduce(self.own, self.room.copies, self.room.wire)


class Spare:
    """Whole buffers that streamed buckets are lent for a while, until the sums that are made of them have come."""

    def __init__(self) -> None:
        self._idle: dict[tuple[int, torch.dtype], list[Tensor]] = defaultdict(list)
        self._on_the_way: deque[tuple[Sum, Tensor, Tensor]] = deque()

    def take(self, room: Room) -> Tensor:
        """A buffer of zeros for a whole bucket."""
        idle = self._idle[room.packing.size, room.dtype]
        return idle.pop().zero_() if idle else room.zeros(room.packing.size)

    def reduce(self, buffer: Tensor, room: Room, own: Tensor) -> None:
        """Start the sum of a buffer, to be added to a rank's ``own`` part of it."""
        self._on_the_way.append((start_reduce_scatter(buffer, room.shards, room.wire), buffer, own))

    def settle(self, left: int) -> None:
        """Add up what is on its way, the oldest first, but for so many sums; their buffers may be used again."""
        while len(self._on_the_way) > left:
            total, buffer, own = self._on_the_way.popleft()
            own.add_(total.wait())
            self._idle[buffer.numel(), buffer.dtype].append(buffer)


class StreamedBucket:
    """The gradients of some parameters, of which this rank keeps its part alone (ZeRO-2).

    The whole is there from the first contribution of a micro-batch until it is reduced, as soon as every parameter has
    had one micro-batch's. So each micro-batch sends as much as a whole step does otherwise.
    """

    def __init__(self, room: Room, specs: Mapping[str, ShardSpec], spare: Spare) -> None:
        self.room, self.specs, self._spare = room, specs, spare
        self.own = room.zeros(room.packing.size // room.shards.size)
        self._begin()

    def _begin(self) -> None:
        self._buffer: Tensor | None = None
        self._last: Sum | None = None
        self._wanted = {name: spec.uses for name, spec in self.specs.items()}

    def start_step(self) -> None:
        """Zero the gradients."""
        self._spare.settle(0)  # what a step that was given up has left on its way
        self.own.zero_()
        self._begin()

    def target(self, name: str) -> Tensor:
        """Where contributions to a gradient are added, ``spec.local_shape``."""
        if self._buffer is None:
            self._buffer = self._spare.take(self.room)
        return view_of(self._buffer, self.room.packing, name, self.specs[name])

    def contributed(self, name: str, complete: bool, overlap: bool) -> None:
        """Take note of a contribution; ``complete`` when the bucket has all of the step's."""
        self._wanted[name] -= 1
        if complete or all(wanted <= 0 for wanted in self._wanted.values()):
            self._reduce(IN_FLIGHT if overlap else 0)

    def _reduce(self, in_flight: int) -> None:
        """Start the sum of what is there, and take up those before, but for some that may still be on their way."""
        if self._buffer is None:
            raise RuntimeError(f"a gradient of {', '.join(self.specs)} was counted before it was there")
        self._spare.reduce(self._buffer, self.room, self.own)
        self._buffer, self._wanted = None, {name: spec.uses for name, spec in self.specs.items()}
        self._spare.settle(in_flight)

    def scatter(self) -> None:
        """Have the sum over the ranks that cut the bucket, and start that over the others."""
        self._spare.settle(0)
        self._last = start_all_reduce(self.own, self.room.copies, self.room.wire)

    def finish(self) -> None:
        """Have the sum over all ranks, after :meth:`scatter`."""
        if self._last is not None:
            put(self._last.wait(), self.own)


class GradBuckets:
    """All main gradients of a rank.

    Attributes:
        buckets: in the order in which they are expected to be ready.
        shares: what of each parameter this rank updates, by name; those of which it is nothing are not listed.
        grads: gradients of these shares once :meth:`finish` is done: of the local stored shape where a share is the
            whole parameter, else flat.
        overlap: reduce a bucket when it is ready, instead of all at the end.
    """

    def __init__(
        self,
        specs: Mapping[str, ShardSpec],
        dtypes: Mapping[str, torch.dtype],
        mesh: Mesh,
        sink: GradSink,
        device: torch.device,
        config: ParallelConfig,
        uncut: Collection[str] = (),
    ) -> None:
        """Allocate the buckets and bind the sink to them.

        Args:
            specs: of all parameters, in the order in which forward uses them.
            dtypes: of the same parameters.
            mesh: the groups.
            sink: will write into the buckets.
            device: of the buffers.
            config: size of buckets, what is cut, what travels, and when.
            uncut: parameters that one rank updates whole.

        """
        self.specs, self.overlap = specs, config.overlap_grad_reduce
        self.buckets: list[Bucket | StreamedBucket] = []
        self._bucket_of: dict[str, Bucket | StreamedBucket] = {}
        self._missing: dict[str, int] = {}
        self._unfinished: dict[int, int] = {}
        self._reducing, spare = True, Spare()
        self._rounds, self._rounded = config.grad_reduce_in_bf16, deque[Bucket]()
        streamed = config.zero_stage == 2
        keys = {name: BucketKey.of(spec, str(dtypes[name]), name in uncut, streamed) for name, spec in specs.items()}
        sizes = {name: prod(spec.local_shape) for name, spec in specs.items()}
        limits = limits_of(keys, sizes, config.ddp_bucket_size, lambda axes: mesh.shards(*axes).size)
        for key, names in partition(keys, sizes, limits):
            shards, copies = mesh.shards(*key.axes), mesh.copies(*key.axes)
            packing = pack({name: sizes[name] for name in names}, shards.size, copies.size, key.uncut)
            dtype = torch.promote_types(dtypes[names[0]], torch.float32)
            wire = torch.bfloat16 if config.grad_reduce_in_bf16 else dtype
            room, held = Room(packing, shards, copies, dtype, device, wire), {name: specs[name] for name in names}
            bucket = StreamedBucket(room, held, spare) if streamed and shards.size > 1 else Bucket(room, held)
            self.buckets.append(bucket)
            self._bucket_of |= dict.fromkeys(names, bucket)
        self.shares = self._cut(counted=False)
        self.grads = {name: self.share_of(self._bucket_of[name].own, name) for name in self.shares}
        sink.bind(self.target, self._contributed)

    def _cut(self, counted: bool) -> dict[str, Share]:
        """This rank's share of every parameter; ``counted``, of those that all ranks cut among themselves."""
        found = {}
        for bucket in self.buckets:
            shards, copies = bucket.room.shards, bucket.room.copies
            part, parts = shards.rank, shards.size
            if counted:
                part, parts = part * copies.size + copies.rank, parts * copies.size
            for name, spec in bucket.specs.items():
                share = bucket.room.packing.share(name, prod(spec.local_shape), part, parts)
                if share is not None:
                    found[name] = share
        return {name: found[name] for name in self.specs if name in found}

    def counted(self) -> dict[str, Share]:
        """What of each parameter this rank answers for, so that over all replicas every element counts once.

        The same whatever is cut, and so the same order in all that is summed over elements.
        """
        return self._cut(counted=True)

    def share_of(self, part: Tensor, name: str, share: Share | None = None) -> Tensor:
        """A parameter's share in this rank's part of its bucket, or in a buffer that is laid out as that is.

        Args:
            part: ``[elements / shards]``.
            name: of the parameter.
            share: a part of its share; the whole by default.

        Returns:
            A view: of the local stored shape where the share is the whole parameter, else flat.

        """
        room, spec = self._bucket_of[name].room, self.specs[name]
        share = share or self.shares[name]
        first = room.packing.offsets[name] + share.start - room.shards.rank * part.numel()
        found = part[first : first + share.numel]
        return found.view(spec.local_shape) if share.numel == prod(spec.local_shape) else found

    def target(self, name: str) -> Tensor:
        """Where contributions to a gradient are added, ``spec.local_shape``."""
        return self._bucket_of[name].target(name)

    def start_step(self, microbatches: int) -> None:
        """Zero the gradients and expect this many micro-batches."""
        self._missing = {name: microbatches * spec.uses for name, spec in self.specs.items()}
        self._unfinished = {id(bucket): len(bucket.specs) for bucket in self.buckets}
        self._rounded.clear()
        for bucket in self.buckets:
            bucket.start_step()

    @contextmanager
    def unreduced(self) -> Iterator[None]:
        """Inside, gradients are added up on this rank alone, to be looked at in :meth:`target`."""
        self._reducing = False
        try:
            yield
        finally:
            self._reducing = True

    def _contributed(self, name: str) -> None:
        bucket = self._bucket_of[name]
        self._missing[name] -= 1
        self._unfinished[id(bucket)] -= self._missing[name] == 0
        if self._reducing:
            complete = self._unfinished[id(bucket)] == 0
            bucket.contributed(name, complete, self.overlap)
            if self._rounds and complete and isinstance(bucket, Bucket):
                self._settle_but(bucket)

    def _settle_but(self, latest: Bucket) -> None:
        """Take up the sums of rounded addends, but for the latest: they need as much memory as the gradients do."""
        self._rounded.append(latest)
        if len(self._rounded) > IN_FLIGHT:
            self._rounded.popleft().settle()

    def finish(self) -> None:
        """Wait until every gradient of this rank's shares is the sum over all data-parallel ranks.

        Raises:
            RuntimeError: when a parameter got fewer or more contributions than its spec says.

        """
        for name, missing in self._missing.items():
            if missing:
                raise RuntimeError(
                    f"the gradient of {name} misses {missing} contributions: the uses in its spec do not match what "
                    "its layer's backward adds"
                )
        while self._rounded:
            self._rounded.popleft().settle()
        summed: deque[Bucket | StreamedBucket] = deque()
        for bucket in self.buckets:
            bucket.scatter()
            summed.append(bucket)
            if self._rounds and len(summed) > IN_FLIGHT:
                summed.popleft().finish()
        for bucket in summed:
            bucket.finish()


def view_of(buffer: Tensor, packing: Packing, name: str, spec: ShardSpec) -> Tensor:
    """A parameter in a whole bucket, or in a buffer that is laid out as that is: a view ``spec.local_shape``."""
    offset = packing.offsets[name]
    return buffer[offset : offset + prod(spec.local_shape)].view(spec.local_shape)


def put(x: Tensor, out: Tensor) -> None:
    """Copy, unless it is the same memory."""
    if x.data_ptr() != out.data_ptr():
        out.copy_(x)
