"""The rank grid against an n-d array of rank numbers."""

from __future__ import annotations

from itertools import chain, combinations

import numpy as np
import pytest

from megatron.config.parallel import ParallelConfig
from megatron.distributed.layout import DENSE_AXES, EXPERT_AXES, Layout, grid_of


def layout(tp: int = 1, pp: int = 1, cp: int = 1, ep: int = 1, etp: int | None = None, world: int = 8) -> Layout:
    config = ParallelConfig(
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        context_parallel_size=cp,
        expert_model_parallel_size=ep,
        expert_tensor_parallel_size=etp,
    )
    return Layout.from_config(config, world)


LAYOUTS = {
    "alone": layout(world=1),
    "tp2 dp4": layout(tp=2),
    "tp2 pp2 cp2 dp3": layout(tp=2, pp=2, cp=2, world=24),
    "pp3 tp2 ep4 etp1 dp4": layout(tp=2, pp=3, ep=4, etp=1, world=24),
    "cp2 ep2": layout(cp=2, ep=2, world=8),
}


def subsets(axes: tuple[str, ...]) -> list[tuple[str, ...]]:
    return list(chain.from_iterable(combinations(axes, n) for n in range(1, len(axes) + 1)))


@pytest.mark.parametrize("axes", sorted({*subsets(DENSE_AXES), *subsets(EXPERT_AXES)}), ids="-".join)
@pytest.mark.parametrize("name", LAYOUTS)
def test_groups_are_slices_of_the_grid(name: str, axes: tuple[str, ...]) -> None:
    lay, grid = LAYOUTS[name], grid_of(axes)
    ranks = np.arange(lay.world_size).reshape([lay.sizes[a] for a in grid])
    fixed = [i for i, a in enumerate(grid) if a not in axes]
    expected = set()
    for index in np.ndindex(*[ranks.shape[i] for i in fixed]):
        selection: list[int | slice] = [slice(None)] * len(grid)
        for i, at in zip(fixed, index):
            selection[i] = at
        expected.add(tuple(sorted(ranks[tuple(selection)].ravel().tolist())))
    assert lay.groups(axes) == sorted(expected)
    for group in expected:
        assert all(lay.group_of(rank, axes) == group for rank in group)


@pytest.mark.parametrize("name", LAYOUTS)
def test_coordinates(name: str) -> None:
    lay = LAYOUTS[name]
    for grid in (DENSE_AXES, EXPERT_AXES):
        shape = [lay.sizes[a] for a in grid]
        for rank, index in enumerate(np.ndindex(*shape)):
            coordinate = lay.coordinate(rank)
            assert tuple(coordinate[a] for a in grid) == index


def test_tensor_parallel_ranks_are_neighbours() -> None:
    assert LAYOUTS["tp2 pp2 cp2 dp3"].groups(("tp",))[:3] == [(0, 1), (2, 3), (4, 5)]


@pytest.mark.parametrize(
    ("sizes", "world", "name"), [({"tp": 3}, 8, "TP x PP x CP = 3"), ({"tp": 2, "ep": 3}, 8, "PP x EP x expert-TP = 6")]
)
def test_refuses_what_does_not_divide(sizes: dict[str, int], world: int, name: str) -> None:
    with pytest.raises(ValueError, match=f"{world} ranks are not a multiple of {name}"):
        layout(**sizes, world=world)


def test_refuses_axes_of_two_grids() -> None:
    with pytest.raises(ValueError, match="belong to no one grid"):
        grid_of(("dp", "ep"))
