"""Who updates what: buckets of parameters are cut into equal parts, one for each rank that shares the work.

Gradients, masters, moments and averages all follow from this one map. No torch here: it is arithmetic, so that memory
can be foretold from it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, TypeVar

from megatron.parallel.shard import Box, Piece, ShardSpec

ALIGNMENT = 64
"""Elements: every parameter, and every rank's part of a bucket, starts at a multiple."""


@dataclass(frozen=True)
class Share:
    """Elements ``start`` to ``stop`` of a parameter's local tensor, flattened."""

    start: int
    stop: int

    @property
    def numel(self) -> int:
        """Elements inside."""
        return self.stop - self.start


@dataclass(frozen=True)
class BucketKey:
    """What parameters of one bucket have in common.

    Attributes:
        dtype: of the weights.
        axes: of the rank grid, over which gradients are summed.
        tied: a tied weight has a bucket of its own, so that the chunks which share it cut it alike.
        uncut: one rank updates each of them whole.
        vector: of ZeRO-2's buckets, those of vectors are apart: their gradients come with that of the input, those of
            matrices may come much later, and a bucket is kept until all have come.
    """

    dtype: str
    axes: tuple[str, ...]
    tied: bool
    uncut: bool
    vector: bool

    @classmethod
    def of(cls, spec: ShardSpec, dtype: str, uncut: bool, streamed: bool) -> BucketKey:
        """Of a parameter; ``streamed`` in ZeRO-2."""
        return cls(dtype, spec.reduce_axes, spec.tied, uncut, streamed and len(spec.shape) == 1)


@dataclass(frozen=True)
class Packing:
    """Where parameters lie in a flat bucket of ``size`` elements, by the first element of each."""

    offsets: Mapping[str, int]
    size: int

    def share(self, name: str, numel: int, part: int, parts: int) -> Share | None:
        """What of a parameter of ``numel`` elements lies in one of equal parts of the bucket; None for nothing."""
        length, offset = self.size // parts, self.offsets[name]
        start, stop = max(part * length - offset, 0), min((part + 1) * length - offset, numel)
        return Share(start, stop) if start < stop else None


def pack(sizes: Mapping[str, int], shards: int, copies: int, uncut: bool = False) -> Packing:
    """Lay parameters into a bucket, one after the other.

    Args:
        sizes: elements of each, in order.
        shards: ranks that cut the bucket among themselves.
        copies: ranks that have the same part, which can be cut among them in turn.
        uncut: no parameter may lie in two shards. Each goes, the largest first, into the one that has least.

    """
    if uncut:
        return _pack_uncut(sizes, shards, copies)
    offsets, size = {}, 0
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
    """The smallest multiple that is not below ``n``."""
    return -(-n // multiple) * multiple


@dataclass(frozen=True)
class Slot:
    """A box of the global view that lies in a rank's share of a parameter.

    Attributes:
        piece: the box, where it lies in the local and in the global view, and who else has it.
        first: element of the share at which the run of neighbouring elements begins that the box lies in.
        run: that run, as a box of the local view.
    """

    piece: Piece
    first: int
    run: Box

    def of(self, share: Any) -> Any:
        """The elements of the box, of shape ``piece.local.size``: a view of a tensor of the share, of any shape."""
        inner = Box(tuple(a - b for a, b in zip(self.piece.local.start, self.run.start)), self.piece.local.size)
        return share.view(-1)[self.first : self.first + self.run.numel].view(self.run.size)[inner.slices]


def slots(spec: ShardSpec, share: Share, pieces: Sequence[Piece] | None = None) -> tuple[Slot, ...]:
    """What of a rank's pieces (or of these) lies in its share: of each at most 2n - 1 boxes, in a view of n dims."""
    return tuple(
        Slot(_within(piece, run), first - share.start, run)
        for first, run in runs(spec.local_view, share)
        for piece in (spec.pieces if pieces is None else pieces)
        if _meet(piece.local, run)
    )


def runs(view: tuple[int, ...], share: Share) -> Iterator[tuple[int, Box]]:
    """A flat range of a tensor of shape ``view`` as boxes of neighbouring elements: the first element, and the box."""
    sizes = [*accumulate(reversed(view), lambda a, b: a * b, initial=1)][::-1]  # elements of an index of each depth
    at = share.start
    while at < share.stop:
        depth = next(i for i, n in enumerate(sizes) if at % n == 0 and at + n <= share.stop)
        start = tuple(at // below % n for n, below in zip(view, sizes[1:]))
        count = 1
        if depth > 0:
            dim, step = depth - 1, sizes[depth]
            count = min((share.stop - at) // step, view[dim] - start[dim])
            size = (*(1 for _ in view[:dim]), count, *view[depth:])
        else:
            size = view
        yield at, Box(start, size)
        at += count * sizes[depth]


def _meet(a: Box, b: Box) -> bool:
    return all(s < t + m and t < s + n for s, n, t, m in zip(a.start, a.size, b.start, b.size))


def _within(piece: Piece, run: Box) -> Piece:
    """The part of a piece that lies in a run of the local view."""
    start = tuple(map(max, piece.local.start, run.start))
    ends = (min(s + n, t + m) for s, n, t, m in zip(piece.local.start, piece.local.size, run.start, run.size))
    size = tuple(end - first for end, first in zip(ends, start))
    place = tuple(p + a - b for p, a, b in zip(piece.place.start, start, piece.local.start))
    return replace(piece, local=Box(start, size), place=Box(place, size))


ROUNDS = 2
"""Of an uncut bucket, how often its largest parameter fits into a rank's part: the more, the larger are buckets, the
less is padding."""


def limits_of(
    keys: Mapping[str, BucketKey], sizes: Mapping[str, int], limit: int, shards: Callable[[tuple[str, ...]], int]
) -> dict[BucketKey, int]:
    """Elements after which a bucket is full, by what its parameters have in common.

    All parts of a bucket are as long as the fullest: where parameters are not cut, few of them on many ranks would be
    mostly padding. Such buckets are larger, and all of one size.

    Args:
        keys: of all parameters, by name.
        sizes: their elements.
        limit: of buckets that are cut anywhere.
        shards: ranks that cut a bucket among themselves, by the axes over which it is summed.

    """
    limits = {}
    for key in dict.fromkeys(keys.values()):
        limits[key] = limit
        ranks = shards(key.axes)
        if key.uncut and ranks > 1:
            held = [round_up(sizes[name], ALIGNMENT) for name in keys if keys[name] == key]
            count = max(1, sum(held) // max(limit, ROUNDS * ranks * max(held)))
            limits[key] = -(-sum(held) // count)
    return limits


K = TypeVar("K", bound=Hashable)


def partition(keys: Mapping[str, K], sizes: Mapping[str, int], limits: Mapping[K, int]) -> list[tuple[K, list[str]]]:
    """Names of one bucket each, with what they have in common: in reverse order, cut once the limit is reached.

    Args:
        keys: what parameters of one bucket must have in common, by name, in the order in which forward uses them.
        sizes: their elements.
        limits: elements after which a bucket is full, by what its parameters have in common.

    """
    buckets: list[tuple[K, list[str]]] = []
    open_: dict[K, tuple[list[str], int]] = {}
    for name in reversed(list(keys)):
        limit = limits[keys[name]]
        names, filled = open_.get(keys[name], ([], limit))
        if filled >= limit:
            names, filled = [], 0
            buckets.append((keys[name], names))
        names.append(name)
        open_[keys[name]] = names, filled + round_up(sizes[name], ALIGNMENT)
    return buckets
