"""Sharding specs: which boxes of a parameter's global tensor a rank holds, and which other ranks hold them too.

Initialisation, gradient reduction, clipping, checkpoints, conversion and the planner all read this one record. It is
arithmetic without torch. Boxes refer to an n-d *view* of the parameter in which every tensor-parallel shard is a box:
``qkv`` is stored as ``[(q+2)*d*g, h]`` and viewed as ``[g, q+2, d, h]``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import prod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed.tensor import Placement

from megatron.config.parallel import ParallelConfig

DENSE_REDUCE_AXES = ("dp", "cp")
"""Mesh axes over which gradients of dense parameters are summed."""
EXPERT_REDUCE_AXES = ("edp",)
"""Mesh axes over which gradients of experts are summed."""


@dataclass(frozen=True)
class Box:
    """A half-open n-d interval: ``start[i] <= index[i] < start[i] + size[i]``."""

    start: tuple[int, ...]
    size: tuple[int, ...]

    @property
    def slices(self) -> tuple[slice, ...]:
        """The box as an index into a tensor."""
        return tuple(slice(a, a + n) for a, n in zip(self.start, self.size))

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.size)


@dataclass(frozen=True)
class ShardPiece:
    """A box of the global view that this rank holds."""

    # The box in the rank's local view, and in the global view.
    local_box: Box
    global_box: Box
    # Tensor-parallel coordinates of all ranks that hold the box, ascending.
    tp_ranks: tuple[int, ...]
    # Each of these ranks computes a partial gradient, to be summed over them; otherwise each computes all of it.
    partial: bool = False


@dataclass(frozen=True)
class Init:
    """Initial values of a parameter: normal with standard deviation ``std``, uniform, or the constant ``value``."""

    std: float | None = None
    value: float = 0.0
    # Bounds of uniform values.
    uniform: tuple[float, float] | None = None
    # Name of a function of drawn values, in :data:`megatron.distributed.random.TRANSFORMS`.
    transform: str | None = None


@dataclass(frozen=True)
class ShardSpec:
    """A parameter's global shape, and this rank's pieces of it."""

    # Global stored shape (1-D or 2-D): independent of the layout, without padding.
    shape: tuple[int, ...]
    # The same elements as an n-d view in which shards are boxes.
    view: tuple[int, ...]
    # Shape of the rank's local tensor in that view, padding included.
    local_view: tuple[int, ...]
    # The boxes that the rank holds; padding belongs to none.
    pieces: tuple[ShardPiece, ...]
    # Tensor-parallel coordinate of the rank.
    tp_rank: int
    init: Init
    # Mesh axes over which gradients are summed.
    reduce_axes: tuple[str, ...] = DENSE_REDUCE_AXES
    # Contributions to the gradient per micro-batch and chunk of this rank.
    contributions: int = 1
    # Parameters of one group have a gradient norm in common, and are clipped by it. That of group 0 is the model's.
    norm_group: int = 0
    # The parameter is both word embedding and output projection, which may be in different chunks.
    tied: bool = False
    # A tied parameter's copy on the last pipeline stage; norms and checkpoints count the first stage's.
    counted_elsewhere: bool = False
    # Number of leading view dimensions that enumerate separate matrices, such as experts or gate and up projection; or
    # separate vectors, such as the filters of a convolution.
    matrices: int = 0
    # A weight whose inputs are sharded, not its outputs.
    row_parallel: bool = False
    # Of a fused QKV projection: heads per group, interleaved along dimension 1 of the view: queries, perhaps as many
    # gates, one key and one value.
    fused: tuple[int, ...] = ()
    # The parameter is not trained: it has neither a gradient nor optimizer state, and checkpoints do not hold it.
    frozen: bool = False
    # The parameter has neither a gradient nor optimizer state, like a buffer of ``nn.Module``: a component updates it
    # (:meth:`megatron.optimizer.distributed_optimizer.UpdateHook.update_buffers`), and checkpoints hold it.
    buffer: bool = False
    # The parameter is kept in at least fp32.
    wide: bool = False
    # Of a quantised weight, whose elements are bytes: the spec of its values, and the format of the bytes.
    dense: ShardSpec | None = None
    precision: str | None = None

    @property
    def expert(self) -> bool:
        """True for parameters of experts."""
        return self.reduce_axes == EXPERT_REDUCE_AXES

    @property
    def has_gradient(self) -> bool:
        """True if the optimizer trains the parameter."""
        return not (self.frozen or self.buffer)

    @property
    def numel(self) -> int:
        """Number of elements of the global tensor."""
        return prod(self.shape)

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Stored shape of the local tensor: leading view dimensions are folded into rows."""
        if len(self.shape) == 1:
            return (prod(self.local_view),)
        return (prod(self.local_view[:-1]), self.local_view[-1])

    @property
    def is_matrix(self) -> bool:
        """True for one matrix or several, which inputs are multiplied with."""
        return len(self.shape) == 2 and len(self.view) - self.matrices >= 2

    @property
    def decays(self) -> bool:
        """True if weight decay applies by default: not to biases and other 1-D parameters."""
        return len(self.shape) > 1

    def placements(self, axes: Sequence[str], gradient: bool = False) -> tuple[Placement, ...]:
        """Return the DTensor placements of the local tensor.

        Args:
            axes: dimensions of :meth:`megatron.distributed.mesh.Mesh.device_mesh`, from ``dp_cp`` and ``tp``.
            gradient: return the placements of the gradient that backward leaves, before its reduction.

        Raises:
            ValueError: when the local tensor is not one of equal parts along a dimension, such as that of a fused
                projection, or the parameter is not on all ranks of these dimensions.
        """
        from torch.distributed.tensor import Partial, Replicate, Shard

        if self.expert or not set(axes) <= {"dp_cp", "tp"}:
            raise ValueError(f"the parameter does not lie on the dimensions {[*axes]} of a device mesh")
        tp: Placement = Replicate()
        if gradient and any(piece.partial for piece in self.pieces):
            tp = Partial()
        elif "tp" in axes and (dim := self._sharded_dim()) is not None:
            tp = Shard(dim)
        return tuple(tp if axis == "tp" else Partial() if gradient else Replicate() for axis in axes)

    def _sharded_dim(self) -> int | None:
        """Return the dimension of the stored tensor of which TP ranks hold equal parts; None if each holds all of it.

        Raises:
            ValueError: when there is no such dimension.
        """
        view, local = self.view, self.local_view
        cut = next((i for i, (part, whole) in enumerate(zip(local, view)) if part != whole), None)
        box = Box(tuple(self.tp_rank * size if i == cut else 0 for i, size in enumerate(local)), local)
        columns = cut == len(view) - 1 and len(self.shape) == 2
        plain = cut is None or (view[cut] % local[cut] == 0 and (columns or prod(view[:cut]) == 1))
        alone = [piece.tp_ranks == (self.tp_rank,) for piece in self.pieces if piece.global_box == box]
        if not plain or alone != [cut is not None] or len(self.pieces) != 1:
            raise ValueError(f"{local} of {view} is neither one of equal parts along a dimension nor the whole tensor")
        return None if cut is None else int(columns)

    @property
    def owned(self) -> tuple[ShardPiece, ...]:
        """The pieces that this rank owns: over one replica of the model, every element has one owner."""
        return () if self.counted_elsewhere else tuple(p for p in self.pieces if p.tp_ranks[0] == self.tp_rank)


Specs = dict[str, ShardSpec]
"""Specs by parameter name."""


@dataclass(frozen=True)
class DenseSharding:
    """Factory of the specs of dense parameters, for a tensor-parallel rank."""

    rank: int
    size: int

    def split(self, shape: tuple[int, ...], dim: int, init: Init, view: tuple[int, ...] | None = None) -> ShardSpec:
        """Shard dimension ``dim`` of the view over TP.

        Raises:
            ValueError: when the dimension is not divisible by TP.
        """
        view = view or shape
        if view[dim] % self.size:
            raise ValueError(f"dimension {dim} of {view} does not divide by TP {self.size}")
        n = view[dim] // self.size
        local = view[:dim] + (n,) + view[dim + 1 :]
        start = tuple(self.rank * n if i == dim else 0 for i in range(len(view)))
        piece = ShardPiece(Box((0,) * len(view), local), Box(start, local), (self.rank,))
        row_parallel = len(shape) > 1 and dim == len(view) - 1
        return ShardSpec(shape, view, local, (piece,), self.rank, init, row_parallel=row_parallel)

    def parts(self, sizes: Sequence[int], tail: tuple[int, ...], init: Init) -> ShardSpec:
        """Shard each of consecutive parts of the rows ``[sum of sizes, *tail]`` over TP, as a fused projection needs.

        Raises:
            ValueError: when a part is not divisible by TP.
        """
        if left := [size for size in sizes if size % self.size]:
            raise ValueError(f"{left[0]} of the {sum(sizes)} rows do not divide by TP {self.size}")
        whole, zeros, pieces = (sum(sizes), *tail), (0,) * len(tail), []
        for start, size in zip(accumulate(sizes, initial=0), sizes):
            n = size // self.size
            own = Box((start + self.rank * n, *zeros), (n, *tail))
            pieces.append(ShardPiece(Box((start // self.size, *zeros), own.size), own, (self.rank,)))
        local = (sum(sizes) // self.size, *tail)
        return ShardSpec(whole, whole, local, tuple(pieces), self.rank, init)

    def replicate(self, shape: tuple[int, ...], init: Init, partial: bool) -> ShardSpec:
        """Replicate the tensor on every TP rank; ``partial`` if each rank computes a partial gradient."""
        whole = Box((0,) * len(shape), shape)
        piece = ShardPiece(whole, whole, tuple(range(self.size)), partial)
        return ShardSpec(shape, shape, shape, (piece,), self.rank, init)

    def vocabulary(self, entries: int, hidden: int, divisible_by: int, init: Init) -> ShardSpec:
        """Shard the rows of an embedding, padded to a multiple of ``divisible_by`` x TP; padding is in no piece."""
        rows = padded_vocab_size(entries, divisible_by, self.size) // self.size
        held = max(0, min(entries - self.rank * rows, rows))
        box = Box((self.rank * rows, 0), (held, hidden))
        pieces = (ShardPiece(Box((0, 0), box.size), box, (self.rank,)),) if held else ()
        return ShardSpec((entries, hidden), (entries, hidden), (rows, hidden), pieces, self.rank, init)

    def heads(self, queries: int, groups: int, channels: int, init: Init) -> tuple[ShardSpec, ShardSpec]:
        """Shard a value of every channel of all queries, and one of all keys, like the rows of :meth:`qkv`."""
        q = self.split((queries * channels,), 0, init)
        if groups % self.size == 0:
            return q, self.split((groups * channels,), 0, init)
        copies = self.size // groups
        group = self.rank // copies
        ranks = tuple(range(group * copies, (group + 1) * copies))
        k = ShardPiece(Box((0,), (channels,)), Box((group * channels,), (channels,)), ranks, partial=True)
        shape = (groups * channels,)
        return q, ShardSpec(shape, shape, (channels,), (k,), self.rank, init)

    def qkv(self, groups: int, q_per_group: int, tail: tuple[int, ...], init: Init, gated: bool = False) -> ShardSpec:
        """Shard the fused QKV projection ``[groups, q_per_group + 2, *tail]``: per group its queries, then k, then v.

        If ``gated``, a gate for each query head follows the queries of a group.

        ``tail`` is ``(head_dim, hidden)`` for the weight and ``(head_dim,)`` for the bias. With more ranks than
        groups, ``TP/groups`` ranks share a group: each holds some of its query heads, and all hold its k and v.

        Raises:
            ValueError: when heads or groups are not divisible by TP.
        """
        wide = 1 + gated
        rows = groups * (wide * q_per_group + 2) * tail[0]
        shape = (rows, *tail[1:])
        view, fused = (groups, wide * q_per_group + 2, *tail), (*(q_per_group,) * wide, 1, 1)
        if groups % self.size == 0:
            return replace(self.split(shape, 0, init, view), fused=fused)
        copies, left = divmod(self.size, groups)
        if left or q_per_group % copies:
            raise ValueError(f"{groups} groups of {q_per_group} query heads do not divide over TP {self.size}")
        queries = q_per_group // copies
        group, part = divmod(self.rank, copies)
        zeros = (0,) * len(tail)

        def box(group: int, start: int, size: int) -> Box:
            return Box((group, start, *zeros), (1, size, *tail))

        group_ranks = tuple(range(group * copies, (group + 1) * copies))
        own = (
            ShardPiece(
                box(0, i * queries, queries), box(group, i * q_per_group + part * queries, queries), (self.rank,)
            )
            for i in range(wide)
        )
        kv = ShardPiece(box(0, wide * queries, 2), box(group, wide * q_per_group, 2), group_ranks, partial=True)
        local = (1, wide * queries + 2, *tail)
        return ShardSpec(shape, view, local, (*own, kv), self.rank, init, fused=fused)


@dataclass(frozen=True)
class ExpertSharding:
    """Factory of the specs of expert parameters."""

    # Expert-parallel rank and size; each rank holds consecutive experts.
    rank: int
    size: int
    # Expert-TP rank and size.
    tp_rank: int
    tp_size: int

    def split(self, view: tuple[int, ...], dim: int, init: Init) -> ShardSpec:
        """Shard the stacked weights of all experts over EP, and dimension ``dim`` over expert-TP.

        Args:
            view: ``[experts, ..., in]``.
            dim: dimension of the view.
            init: initial values.

        Raises:
            ValueError: when the dimensions are not divisible by EP and expert-TP.
        """
        if view[0] % self.size or view[dim] % self.tp_size:
            raise ValueError(f"{view} does not divide by EP {self.size} and, in dimension {dim}, by TP {self.tp_size}")
        sharded = {0: (self.rank, self.size), dim: (self.tp_rank, self.tp_size)}
        local = tuple(n // sharded.get(i, (0, 1))[1] for i, n in enumerate(view))
        start = tuple(sharded.get(i, (0, 1))[0] * n for i, n in enumerate(local))
        piece = ShardPiece(Box((0,) * len(view), local), Box(start, local), (self.tp_rank,))
        shape, matrices = (prod(view[:-1]), view[-1]), len(view) - 2
        spec = ShardSpec(shape, view, local, (piece,), self.tp_rank, init, EXPERT_REDUCE_AXES, matrices=matrices)
        return replace(spec, row_parallel=dim == len(view) - 1)

    def split_bias(self, view: tuple[int, ...], init: Init) -> ShardSpec:
        """Shard the biases ``[experts, ..., out]`` over EP, and their last dimension over expert-TP; see `split`."""
        split = self.split(view, len(view) - 1, init)
        return replace(split, shape=(prod(view),), matrices=0, row_parallel=False)


@dataclass(frozen=True)
class Sharding:
    """The sizes and ranks that determine a rank's part of every parameter."""

    dense: DenseSharding
    expert: ExpertSharding
    # Each TP rank computes a part of the rows, so gradients of replicated parameters are partial.
    sequence_parallel: bool = False

    @classmethod
    def of_first_rank(cls, parallel: ParallelConfig) -> Sharding:
        """Return that of rank 0 of TP, EP and expert-TP; shapes are the same on the others."""
        experts = ExpertSharding(0, parallel.expert_model_parallel_size, 0, parallel.expert_tp)
        return cls(DenseSharding(0, parallel.tensor_model_parallel_size), experts, parallel.sequence_parallel)


UNSHARDED = Sharding(DenseSharding(0, 1), ExpertSharding(0, 1, 0, 1))
"""That of a rank that holds the whole of every parameter."""


def padded_vocab_size(entries: int, divisible_by: int, tp: int) -> int:
    """Return ``entries`` rounded up to a multiple of ``divisible_by`` x TP."""
    multiple = divisible_by * tp
    return -(-entries // multiple) * multiple
