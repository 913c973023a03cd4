"""A parameter knows its place: which boxes of the global tensor a rank holds, and with whom it shares them.

Initialisation, gradient reduction, clipping, checkpoints, conversion and the planner read this one record.
No torch here: a spec is arithmetic. Boxes refer to the n-d *view* of a parameter (``qkv`` is stored
``[(q+2)*d*g, h]`` and viewed ``[g, q+2, d, h]``), in which every tensor-parallel shard is a plain box.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

DENSE = ("dp", "cp")
"""Mesh axes over which the gradients of what every rank of a model has are summed."""
EXPERT = ("edp",)
"""Those of experts."""


@dataclass(frozen=True)
class Box:
    """A half-open n-d interval: ``start[i] <= index[i] < start[i] + size[i]``."""

    start: tuple[int, ...]
    size: tuple[int, ...]

    @property
    def slices(self) -> tuple[slice, ...]:
        """The box as an index into a tensor of the same rank."""
        return tuple(slice(a, a + n) for a, n in zip(self.start, self.size))

    @property
    def numel(self) -> int:
        """Elements inside."""
        return prod(self.size)


@dataclass(frozen=True)
class Piece:
    """One box of the global view held by this rank.

    Attributes:
        local: where it lies in the rank's local view.
        place: where it lies in the global view.
        replicas: tensor-parallel coordinates that hold the same box, this rank's included, ascending.
        partial: each replica's gradient covers only its share of the work, so they must be summed;
            otherwise every replica computes the whole gradient.
    """

    local: Box
    place: Box
    replicas: tuple[int, ...]
    partial: bool = False


@dataclass(frozen=True)
class Init:
    """How a parameter starts: ``normal`` with ``std``, or a constant.

    Attributes:
        std: standard deviation of the normal; None for a constant.
        value: the constant.
    """

    std: float | None = None
    value: float = 0.0


@dataclass(frozen=True)
class ShardSpec:
    """A parameter's global shape and this rank's part of it.

    Attributes:
        shape: global stored shape (1-D or 2-D); knows no layout and no padding.
        view: the same elements as an n-d view in which shards are boxes.
        local_view: shape of the rank's local tensor in that view, padding included.
        pieces: the boxes held; padding belongs to none.
        tp_rank: tensor-parallel coordinate of this rank.
        init: initial values.
        reduce_axes: mesh axes over which gradients are summed.
        uses: contributions to its gradient per micro-batch by this rank's chunk.
        tied: it is the embedding and the output projection both, which may be in different chunks.
        copy: another pipeline rank, that of the first stage, holds the same and answers for it.
        matrices: leading dimensions of the view that number matrices, each of which maps a vector by itself.
        fused: along dimension 1 of the view, rows of matrices that lie in turns: of queries, of keys, of values.
    """

    shape: tuple[int, ...]
    view: tuple[int, ...]
    local_view: tuple[int, ...]
    pieces: tuple[Piece, ...]
    tp_rank: int
    init: Init
    reduce_axes: tuple[str, ...] = DENSE
    uses: int = 1
    tied: bool = False
    copy: bool = False
    matrices: int = 0
    fused: tuple[int, ...] = ()

    @property
    def expert(self) -> bool:
        """Whether it belongs to experts."""
        return self.reduce_axes == EXPERT

    @property
    def numel(self) -> int:
        """Elements of the global tensor."""
        return prod(self.shape)

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Stored shape of the local tensor: leading view dims folded into rows."""
        if len(self.shape) == 1:
            return (prod(self.local_view),)
        return (prod(self.local_view[:-1]), self.local_view[-1])

    @property
    def decays(self) -> bool:
        """Whether weight decay applies: biases and other 1-D parameters have none."""
        return len(self.shape) > 1

    @property
    def owned(self) -> tuple[Piece, ...]:
        """The pieces this rank answers for, so that over all ranks of a copy of the model each element counts once."""
        return () if self.copy else tuple(p for p in self.pieces if p.replicas[0] == self.tp_rank)


@dataclass(frozen=True)
class Shard:
    """This rank's coordinate along TP: the factory of specs."""

    rank: int
    size: int

    def split(self, shape: tuple[int, ...], dim: int, init: Init, view: tuple[int, ...] | None = None) -> ShardSpec:
        """Cut dimension ``dim`` of the view evenly over TP.

        Raises:
            ValueError: when TP does not divide it.
        """
        view = view or shape
        if view[dim] % self.size:
            raise ValueError(f"dimension {dim} of {view} does not divide by TP {self.size}")
        n = view[dim] // self.size
        local = view[:dim] + (n,) + view[dim + 1 :]
        start = tuple(self.rank * n if i == dim else 0 for i in range(len(view)))
        piece = Piece(Box((0,) * len(view), local), Box(start, local), (self.rank,))
        return ShardSpec(shape, view, local, (piece,), self.rank, init)

    def replicate(self, shape: tuple[int, ...], init: Init, partial: bool) -> ShardSpec:
        """The whole tensor on every TP rank; ``partial`` when each computes a share of the gradient."""
        whole = Box((0,) * len(shape), shape)
        piece = Piece(whole, whole, tuple(range(self.size)), partial)
        return ShardSpec(shape, shape, shape, (piece,), self.rank, init)

    def vocabulary(self, entries: int, hidden: int, divisible_by: int, init: Init) -> ShardSpec:
        """Rows of an embedding, padded to a multiple of ``divisible_by`` x TP; padding is in no piece."""
        rows = padded_vocabulary(entries, divisible_by, self.size) // self.size
        held = max(0, min(entries - self.rank * rows, rows))
        box = Box((self.rank * rows, 0), (held, hidden))
        pieces = (Piece(Box((0, 0), box.size), box, (self.rank,)),) if held else ()
        return ShardSpec((entries, hidden), (entries, hidden), (rows, hidden), pieces, self.rank, init)

    def qkv(self, groups: int, q_per_group: int, tail: tuple[int, ...], init: Init) -> ShardSpec:
        """The fused QKV projection ``[groups, q_per_group + 2, *tail]``: per group its queries, then k, then v.

        ``tail`` is ``(head_dim, hidden)`` for the weight and ``(head_dim,)`` for the bias. With more ranks
        than groups, ``TP/groups`` ranks share one group: each has some of its queries and a copy of its k and v.

        Raises:
            ValueError: when TP and the heads do not divide one another.
        """
        rows = groups * (q_per_group + 2) * tail[0]
        shape = (rows, *tail[1:])
        view = (groups, q_per_group + 2, *tail)
        if groups % self.size == 0:
            return replace(self.split(shape, 0, init, view), fused=(q_per_group, 1, 1))
        copies, left = divmod(self.size, groups)
        if left or q_per_group % copies:
            raise ValueError(f"{groups} groups of {q_per_group} query heads do not divide over TP {self.size}")
        queries = q_per_group // copies
        group, part = divmod(self.rank, copies)
        zeros = (0,) * len(tail)

        def box(group: int, start: int, size: int) -> Box:
            return Box((group, start, *zeros), (1, size, *tail))

        sharers = tuple(range(group * copies, (group + 1) * copies))
        q = Piece(box(0, 0, queries), box(group, part * queries, queries), (self.rank,))
        kv = Piece(box(0, queries, 2), box(group, q_per_group, 2), sharers, partial=True)
        local = (1, queries + 2, *tail)
        return ShardSpec(shape, view, local, (q, kv), self.rank, init, fused=(q_per_group, 1, 1))


@dataclass(frozen=True)
class ExpertShard:
    """This rank's coordinates along EP and along TP inside experts: the factory of specs of experts.

    Attributes:
        rank: along EP, over which experts are dealt out in runs.
        size: of EP.
        tp_rank: along TP inside experts.
        tp_size: of that.
    """

    rank: int
    size: int
    tp_rank: int
    tp_size: int

    def split(self, view: tuple[int, ...], dim: int, init: Init) -> ShardSpec:
        """The weights of all experts, stored one above the other.

        Args:
            view: ``[experts, ..., in]``.
            dim: which dimension of it TP cuts, counted from 0.
            init: initial values.

        Raises:
            ValueError: when EP or TP does not divide it.
        """
        if view[0] % self.size or view[dim] % self.tp_size:
            raise ValueError(f"{view} does not divide by EP {self.size} and, in dimension {dim}, by TP {self.tp_size}")
        cuts = {0: (self.rank, self.size), dim: (self.tp_rank, self.tp_size)}
        local = tuple(n // cuts.get(i, (0, 1))[1] for i, n in enumerate(view))
        start = tuple(cuts.get(i, (0, 1))[0] * n for i, n in enumerate(local))
        piece = Piece(Box((0,) * len(view), local), Box(start, local), (self.tp_rank,))
        shape = (prod(view[:-1]), view[-1])
        return ShardSpec(shape, view, local, (piece,), self.tp_rank, init, reduce_axes=EXPERT, matrices=len(view) - 2)


def padded_vocabulary(entries: int, divisible_by: int, tp: int) -> int:
    """Embedding rows over all TP ranks: ``entries`` rounded up to a multiple of ``divisible_by`` x TP."""
    multiple = divisible_by * tp
    return -(-entries // multiple) * multiple
