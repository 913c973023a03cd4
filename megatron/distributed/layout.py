"""Rank grids, as arithmetic without torch.

The same ranks form two grids: ``(pp, dp, cp, tp)`` for dense parameters, ``(pp, edp, ep, etp)`` for experts. The last
axis varies fastest, so tensor-parallel peers are neighbours on a node.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from math import prod

from megatron.config.errors import Problem, UserError
from megatron.config.parallel import ParallelConfig

DENSE_AXES = ("pp", "dp", "cp", "tp")
EXPERT_AXES = ("pp", "edp", "ep", "etp")

AXES_IN_USE: tuple[tuple[str, ...], ...] = (
    ("tp",),
    ("cp",),
    ("cp", "tp"),
    ("dp", "cp"),
    ("pp",),
    ("pp", "tp"),
    ("pp", "dp", "cp", "tp"),
    ("edp",),
    ("ep", "etp"),
    ("etp",),
)
"""Axes of every group that training uses, in the order of creation."""

REDUCTION_GROUPS: tuple[tuple[str, ...], ...] = (("dp", "cp"), ("edp",))
"""Groups over which gradients are summed: of dense parameters, and of experts."""


@dataclass(frozen=True)
class Layout:
    """Sizes of all axes of both grids; ``pp`` is common to them."""

    sizes: dict[str, int]

    @classmethod
    def from_config(cls, config: ParallelConfig, world_size: int) -> Layout:
        """Return the layout of ``world_size`` ranks; DP is what the other axes leave.

        Raises:
            UserError: when ``world_size`` is not a multiple of the other axes' product.
        """
        tp, pp = config.tensor_model_parallel_size, config.pipeline_model_parallel_size
        cp = config.context_parallel_size
        ep, etp = config.expert_model_parallel_size, config.expert_tensor_parallel_size or tp
        for name, size in (("TP x PP x CP", tp * pp * cp), ("PP x EP x expert-TP", pp * ep * etp)):
            if world_size % size:
                raise UserError([Problem("E202", f"{world_size} ranks are not a multiple of {name} = {size}")])
        dp, edp = world_size // (tp * pp * cp), world_size // (pp * ep * etp)
        return cls({"pp": pp, "dp": dp, "cp": cp, "tp": tp, "edp": edp, "ep": ep, "etp": etp})

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return prod(self.sizes[a] for a in DENSE_AXES)

    def coordinate(self, rank: int) -> dict[str, int]:
        """Return the coordinate of ``rank`` on every axis of both grids."""
        return self._unravel(rank, EXPERT_AXES) | self._unravel(rank, DENSE_AXES)

    def group_of(self, rank: int, axes: tuple[str, ...]) -> tuple[int, ...]:
        """Return the ranks that differ from ``rank`` only along ``axes``, ascending."""
        grid = grid_of(axes)
        here = self._unravel(rank, grid)
        free = [range(self.sizes[a]) if a in axes else (here[a],) for a in grid]
        return tuple(self._ravel(c, grid) for c in product(*free))

    def groups(self, axes: tuple[str, ...]) -> list[tuple[int, ...]]:
        """Return all groups along ``axes``: a partition of the ranks, ordered by first rank."""
        grid = grid_of(axes)
        firsts = product(*(range(1) if a in axes else range(self.sizes[a]) for a in grid))
        return [self.group_of(self._ravel(first, grid), axes) for first in firsts]

    def _unravel(self, rank: int, grid: tuple[str, ...]) -> dict[str, int]:
        coordinate = {}
        for axis in reversed(grid):
            rank, coordinate[axis] = divmod(rank, self.sizes[axis])
        return coordinate

    def _ravel(self, coordinate: tuple[int, ...], grid: tuple[str, ...]) -> int:
        rank = 0
        for axis, c in zip(grid, coordinate):
            rank = rank * self.sizes[axis] + c
        return rank


def grid_of(axes: tuple[str, ...]) -> tuple[str, ...]:
    """Return the grid that contains ``axes``.

    Raises:
        ValueError: when neither grid contains all of them.
    """
    for grid in (DENSE_AXES, EXPERT_AXES):
        if set(axes) <= set(grid):
            return grid
    raise ValueError(f"axes {axes} belong to no one grid: {DENSE_AXES} or {EXPERT_AXES}")


def chunks_of(length: int, size: int, rank: int) -> tuple[range, ...]:
    """Return the positions that ring rank ``rank`` of ``size`` holds: one chunk from either end of the sequence."""
    if size == 1:
        return (range(length),)
    chunk = length // (2 * size)
    return tuple(range(i * chunk, (i + 1) * chunk) for i in (rank, 2 * size - 1 - rank))
