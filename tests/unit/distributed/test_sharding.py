"""Shards tile the global tensor, in every layout, with the same initial values."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import chain, combinations
from math import prod

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron.config.parallel import ParallelConfig
from megatron.distributed.layout import DENSE_AXES, EXPERT_AXES, Layout, grid_of
from megatron.distributed.random import initialize
from megatron.distributed.sharding import DenseSharding, Init, ShardSpec

INIT = Init(std=0.02)
MakeSpec = Callable[[DenseSharding], ShardSpec]

CONSTRUCTORS: dict[str, MakeSpec] = {
    "column weight": lambda s: s.split((840, 3), 0, INIT),
    "row weight": lambda s: s.split((3, 840), 1, INIT),
    "column bias": lambda s: s.split((840,), 0, INIT),
    "gate and up": lambda s: s.split((2 * 840, 3), 1, INIT, (2, 840, 3)),
    "gate and up bias": lambda s: s.split((2 * 840,), 1, INIT, (2, 840)),
    "norm": lambda s: s.replicate((5,), INIT, partial=False),
    "norm, sequence parallel": lambda s: s.replicate((5,), INIT, partial=True),
    "positions": lambda s: s.replicate((6, 5), INIT, partial=True),
    "parts": lambda s: s.parts((840, 1680, 2520), (3,), INIT),
    "uniform parts": lambda s: s.parts((840, 1680), (3,), Init(uniform=(-0.5, 0.5))),
    "uniform, transformed": lambda s: s.split((840,), 0, Init(uniform=(1.0, 16.0), transform="log")),
    "parts of a bias": lambda s: s.parts((840, 1680, 2520), (), INIT),
    **{
        f"vocabulary {entries}/{divisible}": lambda s, e=entries, d=divisible: s.vocabulary(e, 3, d, INIT)
        for entries in (1, 7, 64, 101)
        for divisible in (1, 8, 128)
    },
}
QKV: dict[str, tuple[int, int, tuple[int, ...]]] = {
    f"qkv {groups} groups of {queries} {len(tail)}-D": (groups, queries, tail)
    for groups in (1, 2, 3, 4, 8)
    for queries in (1, 2, 4, 6, 8)
    for tail in ((2, 3), (2,))
}
CONSTRUCTORS |= {name: lambda s, a=a: s.qkv(*a, INIT) for name, a in QKV.items()}


def divides(name: str, tp: int) -> bool:
    """Return True if ``tp`` ranks can hold this parameter."""
    if name not in QKV:
        return 840 % tp == 0
    groups, queries, _ = QKV[name]
    return groups % tp == 0 or (tp % groups == 0 and queries % (tp // groups) == 0)


def specs_of(name: str, tp: int) -> list[ShardSpec]:
    """One per rank."""
    return [CONSTRUCTORS[name](DenseSharding(rank, tp)) for rank in range(tp)]


CASES = [(name, tp) for name in CONSTRUCTORS for tp in range(1, 9) if divides(name, tp)]


@pytest.mark.parametrize(("name", "tp"), CASES)
def test_pieces_tile_the_global_tensor(name: str, tp: int) -> None:
    specs = specs_of(name, tp)
    owners = np.zeros(specs[0].view, int)
    holders = np.zeros((tp, *specs[0].view), int)
    for rank, spec in enumerate(specs):
        for piece in spec.owned:
            owners[piece.global_box.slices] += 1
        for piece in spec.pieces:
            holders[rank][piece.global_box.slices] += 1
    assert (owners == 1).all(), "the owned pieces of all ranks must hold every element exactly once"
    assert holders.max() == 1, "a rank holds an element twice"
    for rank, spec in enumerate(specs):
        for piece in spec.pieces:
            holding = holders[(slice(None), *piece.global_box.slices)].reshape(tp, -1)
            assert rank in piece.tp_ranks
            assert list(piece.tp_ranks) == [r for r in range(tp) if holding[r].all()]
            assert not any(holding[r].any() for r in range(tp) if r not in piece.tp_ranks)


@pytest.mark.parametrize(("name", "tp"), CASES)
def test_local_tensors_hold_their_pieces(name: str, tp: int) -> None:
    specs = specs_of(name, tp)
    for spec in specs:
        assert len(spec.shape) in (1, 2)
        assert spec.shape == specs[0].shape == CONSTRUCTORS[name](DenseSharding(0, 1)).shape, (
            "a global shape knows no layout"
        )
        assert spec.local_view == specs[0].local_view, "ranks hold tensors of one shape"
        assert prod(spec.view) == prod(spec.shape) == spec.numel
        assert prod(spec.local_view) == prod(spec.local_shape)
        assert len(spec.local_shape) == len(spec.shape)
        used = np.zeros(spec.local_view, int)
        for piece in spec.pieces:
            assert piece.local_box.size == piece.global_box.size
            assert used[piece.local_box.slices].shape == piece.local_box.size, "a piece reaches out of the local tensor"
            used[piece.local_box.slices] += 1
        assert used.max(initial=0) <= 1, "two pieces share a local element"
        if not name.startswith("vocabulary"):
            assert used.min() == 1, "only a vocabulary has padding"


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_partial_gradients_are_marked_for_summation(tp: int) -> None:
    """Partial gradients: sequence-parallel norms and shared keys and values; nothing else."""
    shard = DenseSharding(0, tp)
    assert shard.replicate((5,), INIT, partial=True).pieces[0].partial
    assert not shard.replicate((5,), INIT, partial=False).pieces[0].partial
    assert not any(p.partial for p in shard.split((840, 3), 0, INIT).pieces)
    pieces = shard.qkv(2, 4, (2, 3), INIT).pieces
    assert [p.partial for p in pieces] == ([False] if tp <= 2 else [False, True])


@pytest.mark.parametrize(("groups", "queries", "tp"), [(3, 4, 2), (2, 3, 4), (4, 1, 8), (1, 1, 2), (2, 8, 3)])
def test_refuses_heads_that_do_not_divide(groups: int, queries: int, tp: int) -> None:
    with pytest.raises(ValueError, match=f"do not divide over TP {tp}"):
        DenseSharding(0, tp).qkv(groups, queries, (2, 3), INIT)


def filled(spec: ShardSpec, dtype: torch.dtype = torch.float32, name: str = "w", seed: int = 1) -> Tensor:
    local = torch.full(spec.local_shape, float("nan"), dtype=dtype)
    initialize(local, spec, name, seed)
    return local


@pytest.mark.parametrize(("name", "tp"), [case for case in CASES if case[1] in (2, 3, 8)])
def test_union_over_ranks_is_the_whole(name: str, tp: int) -> None:
    """Every piece, owned or a copy, has the bits that one rank alone would give it; padding is zero."""
    whole_spec = CONSTRUCTORS[name](DenseSharding(0, 1))
    whole = filled(whole_spec)[: whole_spec.shape[0]].view(whole_spec.view)
    for spec in specs_of(name, tp):
        local = filled(spec).view(spec.local_view)
        for piece in spec.pieces:
            assert torch.equal(local[piece.local_box.slices], whole[piece.global_box.slices])
            local[piece.local_box.slices] = 0
        assert not local.any(), "padding is not zero"


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_every_dtype_rounds_the_same_numbers(dtype: torch.dtype) -> None:
    spec = DenseSharding(0, 1).split((100, 7), 0, Init(std=0.3))
    assert torch.equal(filled(spec, dtype), filled(spec).to(dtype))


def test_distribution() -> None:
    values = filled(DenseSharding(0, 1).split((1000, 200), 0, Init(std=0.3)))
    n = values.numel()
    assert abs(values.mean().item()) < 5 * 0.3 / n**0.5
    assert values.std().item() == pytest.approx(0.3, abs=5 * 0.3 / (2 * n) ** 0.5)
    assert (values / 0.3).pow(4).mean().item() == pytest.approx(3, abs=5 * (96 / n) ** 0.5)  # a normal's fourth moment
    blocks = values[:960].view(15, 64, 200).flatten(1)
    assert (blocks.corrcoef() - torch.eye(15)).abs().max() < 5 / blocks.shape[1] ** 0.5, "blocks of rows are related"


def test_uniform_values_and_their_transforms() -> None:
    """As Mamba-2 begins: decays between 1 and 16, steps between 0.001 and 0.1 whose logarithms are uniform."""
    dense, (low, high) = DenseSharding(0, 1), (math.log(1e-3), math.log(1e-1))
    decays = filled(dense.split((4096,), 0, Init(uniform=(1.0, 16.0), transform="log")), torch.float64).exp()
    steps = filled(dense.split((4096,), 0, Init(uniform=(low, high), transform="inverse_softplus_of_exp")))
    logs = torch.nn.functional.softplus(steps.double()).log()
    for values, least, most in ((decays, 1.0, 16.0), (logs, low, high)):
        assert least - 1e-4 <= values.min()
        assert values.max() <= most + 1e-4
        deciles = (values - least) / (most - least) * 10
        assert deciles.clamp(0, 9.99).int().bincount(minlength=10).float().sub(409.6).abs().max() < 100
    tiny = filled(dense.split((64,), 0, Init(uniform=(-30.0, -20.0), transform="inverse_softplus_of_exp")))
    torch.testing.assert_close(torch.nn.functional.softplus(tiny), torch.full((64,), 1e-4), rtol=1e-3, atol=0)


def test_filters_are_no_matrices() -> None:
    dense = DenseSharding(0, 2)
    assert not replace(dense.parts((8, 4), (4,), INIT), matrices=1).is_matrix
    assert not dense.split((8,), 0, INIT, (4, 2)).is_matrix
    assert dense.parts((8, 4), (4,), INIT).is_matrix
    assert dense.qkv(2, 4, (2, 3), INIT).is_matrix


def test_names_and_seeds_differ() -> None:
    spec = DenseSharding(0, 1).split((64, 64), 0, Init(std=1.0))
    drawn = [filled(spec), filled(spec, name="v"), filled(spec, seed=2)]
    correlations = torch.stack([d.flatten() for d in drawn]).corrcoef() - torch.eye(3)
    assert correlations.abs().max() < 5 / 64
    assert torch.equal(drawn[0], filled(spec))


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
@pytest.mark.parametrize("name", [*LAYOUTS][1::2])
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


@pytest.mark.parametrize(
    ("sizes", "world", "name"), [({"tp": 3}, 8, "TP x PP x CP = 3"), ({"tp": 2, "ep": 3}, 8, "PP x EP x expert-TP = 6")]
)
def test_refuses_sizes_that_do_not_divide(sizes: dict[str, int], world: int, name: str) -> None:
    with pytest.raises(ValueError, match=f"{world} ranks are not a multiple of {name}"):
        layout(**sizes, world=world)


def test_refuses_axes_of_two_grids() -> None:
    with pytest.raises(ValueError, match="belong to no one grid"):
        grid_of(("dp", "ep"))
