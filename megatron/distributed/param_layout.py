"""Parameter layout of the distributed optimizer: which elements of each parameter a rank updates.

Parameters are packed into buckets, and each bucket is divided into equal parts, one per rank. Gradients, main
parameters, moments and averages all follow this one map. It is arithmetic without torch, so the planner can use it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import prod
from typing import Any

from megatron.distributed.sharding import Box, ShardPiece, ShardSpec

ALIGNMENT = 64
"""Parameters and parts of buckets start at multiples of this number of elements."""


@dataclass(frozen=True)
class ParamShard:
    """Elements ``start <= i < stop`` of a parameter's flattened local tensor: the shard that a rank updates."""

    start: int
    stop: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.stop - self.start


@dataclass(frozen=True)
class BucketKey:
    """Properties that the parameters of a bucket have in common."""

    # Of the weights.
    dtype: str
    # Mesh axes over which gradients are summed.
    axes: tuple[str, ...]
    # A tied weight has its own bucket, so that both chunks that hold it shard it alike.
    tied: bool
    # Parameters are not divided between ranks (Muon).
    uncut: bool
    # ZeRO-2 and 3 only: 1-D parameters. Their gradients come with the input's, those of matrices may come much later
    # (deferred W), and the whole bucket stays in memory until all have come.
    vector: bool
    # ZeRO-3 only: the block that gathers the bucket before its use, such as ``layers.3``.
    block: str = ""
    # Weights that are not trained: the bucket has no gradients, and is whole on every rank except with ZeRO-3.
    frozen: bool = False
    # Weights that a component updates: the bucket has no gradients, and is sharded like the others.
    buffer: bool = False

    @property
    def has_gradients(self) -> bool:
        """True for parameters that the optimizer trains."""
        return not (self.frozen or self.buffer)

    @classmethod
    def of(cls, name: str, spec: ShardSpec, dtype: str, uncut: bool, zero_stage: int) -> BucketKey:
        """Return the key of a parameter; ``uncut`` has no effect on ZeRO-3, which divides all parameters."""
        vector = zero_stage >= 2 and len(spec.shape) == 1 and spec.has_gradient
        if zero_stage < 3:
            uncut = uncut and spec.has_gradient
            return cls(dtype, spec.reduce_axes, spec.tied, uncut, vector, frozen=spec.frozen, buffer=spec.buffer)
        return cls(dtype, spec.reduce_axes, spec.tied, False, vector, block_of(name), spec.frozen, spec.buffer)


def block_of(name: str) -> str:
    """Return the block of a parameter: its name up to the first number, such as ``layers.3``, or its first word."""
    numbered = re.match(r"(?:[a-z_]+\.)+\d+(?=\.)", name)
    return numbered[0] if numbered else name.partition(".")[0]


@dataclass(frozen=True)
class Packing:
    """Offsets of parameters in a flat bucket of ``size`` elements."""

    offsets: Mapping[str, int]
    size: int

    def shard_in_part(self, name: str, numel: int, part: int, parts: int) -> ParamShard | None:
        """Return the shard of a parameter that lies in part ``part`` of ``parts`` equal parts, or None."""
        length, offset = self.size // parts, self.offsets[name]
        start, stop = max(part * length - offset, 0), min((part + 1) * length - offset, numel)
        return ParamShard(start, stop) if start < stop else None


def pack(sizes: Mapping[str, int], shards: int, copies: int, uncut: bool = False) -> Packing:
    """Lay parameters out in a bucket, one after the other.

    Args:
        sizes: elements of each parameter, in order.
        shards: number of parts of the bucket.
        copies: ranks with the same part, among which it can be divided further.
        uncut: keep every parameter in one part: largest first, each into the emptiest part.
    """
    if uncut:
        return _pack_uncut(sizes, shards, copies)
    offsets: dict[str, int] = {}
    size = 0
    for name, numel in sizes.items():
        offsets[name] = size
        size += round_up(numel, ALIGNMENT)
    return Packing(offsets, round_up(size, ALIGNMENT * shards * copies))


def _pack_uncut(sizes: Mapping[str, int], shards: int, copies: int) -> Packing:
    filled, placed = [0] * shards, {}
    for name in sorted(sizes, key=lambda name: -sizes[name]):
        shard = filled.index(min(filled))
        placed[name] = shard, filled[shard]
        filled[shard] += round_up(sizes[name], ALIGNMENT)
    length = round_up(max(filled), ALIGNMENT * copies)
    return Packing({name: placed[name][0] * length + placed[name][1] for name in sizes}, length * shards)


def round_up(n: int, multiple: int) -> int:
    """Round ``n`` up to a multiple."""
    return -(-n // multiple) * multiple


@dataclass(frozen=True)
class ShardBox:
    """A box of the global view inside a rank's shard of a parameter."""

    # The box in the local and in the global view.
    piece: ShardPiece
    # The contiguous run of elements that contains the box: its first element in the shard, and its local box.
    first: int
    run: Box

    def view_in(self, share: Any) -> Any:
        """Return a view of the box's elements, of shape ``piece.local_box.size``, in a tensor of the shard."""
        inner = Box(tuple(a - b for a, b in zip(self.piece.local_box.start, self.run.start)), self.piece.local_box.size)
        return share.view(-1)[self.first : self.first + self.run.numel].view(self.run.size)[inner.slices]


def shard_boxes(spec: ShardSpec, share: ParamShard, pieces: Sequence[ShardPiece] | None = None) -> tuple[ShardBox, ...]:
    """Return the boxes of a rank's pieces inside its shard: at most 2n - 1 per piece, for a view of n dimensions."""
    return tuple(
        ShardBox(_intersect(piece, run), first - share.start, run)
        for first, run in contiguous_boxes(spec.local_view, share)
        for piece in (spec.pieces if pieces is None else pieces)
        if _overlap(piece.local_box, run)
    )


def contiguous_boxes(view: tuple[int, ...], share: ParamShard) -> Iterator[tuple[int, Box]]:
    """Split a flat range of a tensor of shape ``view`` into boxes; yield each one's first element and the box."""
    strides = [*accumulate(reversed(view), lambda a, b: a * b, initial=1)][::-1]  # strides[0] is the whole tensor
    first = share.start
    while first < share.stop:
        depth = next(i for i, n in enumerate(strides) if first % n == 0 and first + n <= share.stop)
        start = tuple(first // stride % n for n, stride in zip(view, strides[1:]))
        count = 1
        if depth > 0:
            dim = depth - 1
            count = min((share.stop - first) // strides[depth], view[dim] - start[dim])
            size = (*(1 for _ in view[:dim]), count, *view[depth:])
        else:
            size = view
        yield first, Box(start, size)
        first += count * strides[depth]


def _overlap(a: Box, b: Box) -> bool:
    return all(s < t + m and t < s + n for s, n, t, m in zip(a.start, a.size, b.start, b.size))


def _intersect(piece: ShardPiece, run: Box) -> ShardPiece:
    """Return the part of a piece inside a box of the local view."""
    start = tuple(map(max, piece.local_box.start, run.start))
    ends = (min(s + n, t + m) for s, n, t, m in zip(piece.local_box.start, piece.local_box.size, run.start, run.size))
    size = tuple(end - first for end, first in zip(ends, start))
    place = tuple(p + a - b for p, a, b in zip(piece.global_box.start, start, piece.local_box.start))
    return replace(piece, local_box=Box(start, size), global_box=Box(place, size))


@dataclass(frozen=True)
class MatrixBlock:
    """Matrices of a parameter, or whole rows of one, in a rank's part of a bucket, to compress their gradient."""

    name: str
    # First element in the parameter's flattened local tensor, and in the part.
    first: int
    place: int
    # ``count`` adjacent matrices ``[rows, columns]``.
    count: int
    rows: int
    columns: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.count * self.rows * self.columns


def matrix_blocks(
    packing: Packing, specs: Mapping[str, ShardSpec], part: int, parts: int, rank: int = 0
) -> list[MatrixBlock]:
    """Return the matrices in part ``part`` of ``parts`` of a bucket, ascending.

    Vectors, rows that are cut and parameters of which several tensor-parallel ranks hold a piece are left out.

    Args:
        packing: of the bucket.
        specs: of its parameters.
        part: index of the part.
        parts: number of parts.
        rank: leave out matrices whose factors of this rank are not smaller; 0 for none.
    """
    blocks = []
    for name, spec in specs.items():
        share = packing.shard_in_part(name, prod(spec.local_shape), part, parts)
        if share is None or len(spec.shape) == 1 or any(len(piece.tp_ranks) > 1 for piece in spec.pieces):
            continue
        columns, height = spec.local_view[-1], prod(spec.local_view[spec.matrices : -1])
        row, stop = -(-share.start // columns), share.stop // columns
        place = packing.offsets[name] - part * (packing.size // parts)
        while row < stop:
            count = (stop - row) // height if row % height == 0 else 0
            rows = height if count else min(stop, round_up(row + 1, height)) - row
            if rank * (rows + columns) < rows * columns:
                first = row * columns
                blocks.append(MatrixBlock(name, first, place + first, max(count, 1), rows, columns))
            row += max(count, 1) * rows
    return sorted(blocks, key=lambda block: block.place)


MIN_PART_RATIO = 2
"""Minimum ratio of a rank's part of an uncut bucket to its largest parameter. Larger buckets have less padding."""


MAX_REDUCTIONS_IN_FLIGHT = 2
"""Maximum number of reductions in flight that need extra memory: those of ZeRO-2 buckets and those in bf16."""


@dataclass(frozen=True)
class BucketShape:
    """The parameters of a gradient bucket, and how they are sharded."""

    key: BucketKey
    # Local elements of the parameters, in the order in which backward finishes them.
    sizes: Mapping[str, int]
    packing: Packing
    # Ranks that shard the bucket, and ranks that hold the same shard.
    shards: int
    copies: int


def plan_buckets(
    specs: Mapping[str, ShardSpec],
    keys: Mapping[str, BucketKey],
    limit: int,
    group_sizes: Callable[[tuple[str, ...]], tuple[int, int]],
) -> Iterator[BucketShape]:
    """Yield the buckets of a rank's parameters in the order in which their gradients are expected to be complete.

    Parameters are taken in reverse order. A bucket is closed once it reaches its capacity.

    Args:
        specs: of all parameters, in the order of forward.
        keys: of the same parameters.
        limit: elements at which an ordinary bucket is closed.
        group_sizes: maps reduction axes to the ranks that shard a bucket, and those that hold the same shard.
    """
    sizes = {name: prod(spec.local_shape) for name, spec in specs.items()}
    buckets: list[tuple[BucketKey, dict[str, int]]] = []
    filled: dict[BucketKey, int] = {}  # elements of the last bucket of each key
    capacity = {key: _capacity(key, keys, sizes, limit, group_sizes(key.axes)[0]) for key in {*keys.values()}}
    last: dict[BucketKey, dict[str, int]] = {}
    for name in reversed([*keys]):
        key = keys[name]
        if key not in last or filled[key] >= capacity[key]:
            last[key], filled[key] = {}, 0
            buckets.append((key, last[key]))
        last[key][name] = sizes[name]
        filled[key] += round_up(sizes[name], ALIGNMENT)
    for key, in_bucket in buckets:
        shards, copies = (1, 1) if key.frozen and not key.block else group_sizes(key.axes)
        yield BucketShape(key, in_bucket, pack(in_bucket, shards, copies, key.uncut), shards, copies)


def _capacity(key: BucketKey, keys: Mapping[str, BucketKey], sizes: Mapping[str, int], limit: int, shards: int) -> int:
    """Return the elements at which a bucket is closed.

    All parts of a bucket are as long as the fullest. Where parameters are not divided, a few of them over many ranks
    would be mostly padding, so these buckets are larger, and of equal size.
    """
    if not key.uncut or shards == 1:
        return limit
    padded = [round_up(sizes[name], ALIGNMENT) for name in keys if keys[name] == key]
    count = max(1, sum(padded) // max(limit, MIN_PART_RATIO * shards * max(padded)))
    return -(-sum(padded) // count)
